"""Evidence for approvers: a printable sign-off page and the same content as JSON.

`document` makes the value of `report.json`, `page` draws nothing but that value and the pictures it
names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from leakbound.assess.verdict import MEANINGS
from leakbound.report.evidence.auxiliary import STATEMENTS
from leakbound.report.evidence.parts import (
    NOT_STATED,
    EvidenceReport,
    Item,
    PrivacyClaim,
    Subject,
)
from leakbound.report.evidence.subjects import of_run, of_training
from leakbound.report.folder import Run, Strip
from leakbound.report.tables import LONGEST
from leakbound.report.template import percent, rendered

SIDE = 72
"""About how many pixels of the page one example is wide."""

__all__ = ["STATEMENTS", "document", "of_run", "of_training", "page", "schema"]


def document(subjects: Sequence[Subject], *, images: bool) -> EvidenceReport:
    """The value of `report.json`: the same subjects give the same value."""
    shown = [s for s in subjects if any(one.pictures for one in s.strongest)]
    return EvidenceReport(
        leakbound=_version(),
        images=images and bool(shown),
        private_pictures=images and any(s.provenance.own_data is not False for s in shown),
        subjects=tuple(subjects),
    )


def schema() -> str:
    """The JSON Schema (draft 2020-12) of `report.json`, as text."""
    parts = msgspec.json.schema(EvidenceReport)["$defs"]
    form = "https://json-schema.org/draft/2020-12/schema"
    own = {"$schema": form, "$id": "urn:leakbound:report:1", "$defs": parts}
    return json.dumps(parts.pop("EvidenceReport") | own, indent=1, sort_keys=True)


def page(content: EvidenceReport, runs: Sequence[Run] = ()) -> str:
    """The page as text; the first subjects are those of `runs`, where the pictures are."""
    from leakbound.report.evidence import charts

    drawn = [
        {
            "mean_error": charts.mean_errors(one.configurations, one.threshold),
            "probability": charts.probabilities(one.configurations),
            "curve": None if one.curve is None else charts.curve(one.curve, f"curve{place}"),
            "claims": _claims(one.differential_privacy),
        }
        for place, one in enumerate(content.subjects)
    ]
    context = {
        "content": content,
        "figures": drawn,
        "pictures": [_pictures(*both) for both in zip(runs, content.subjects, strict=False)],
        "unstated": NOT_STATED,
        "side": SIDE,
        "meanings": MEANINGS,
    }
    return rendered("evidence.html.j2", context, {"percent": rate, "fact": fact})


def fact(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(fact, value[:LONGEST])) or "–"
    if isinstance(value, dict):
        return ", ".join(f"{key} {fact(item)}" for key, item in value.items()) or "–"
    return str(value)


def rate(value: float | None, digits: int = 0) -> str:
    return percent(value if value is None else round(value, digits + 2) + 0.0, digits).replace(
        "-", "−"
    )


def _claims(found: Sequence[PrivacyClaim]) -> list[list[Item]]:
    """The lines that the page shows of each claim: all of the first, of others what differs."""
    first = found[0].items if found else ()
    return [
        [one for place, one in enumerate(claim.items) if not number or one != first[place]]
        for number, claim in enumerate(found)
    ]


def _pictures(run: Run, subject: Subject) -> dict[str, Strip]:
    named = {name for one in subject.strongest for name in (one.pictures or {}).values()}
    found = {name: run.picture(name) for name in sorted(named)}
    return {name: picture for name, picture in found.items() if picture is not None}


def _version() -> str:
    try:
        return version("leakbound")
    except PackageNotFoundError:
        return "not installed"
