"""Evidence for approvers: a sign-off page, its annex, a model card's section, and all as JSON.

`document` makes the value of `report.json`. `page`, `annex` and `card` draw nothing but that value,
the pictures that it names and the digests of the files beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import msgspec

from leakbound._util.docstrings import cleaned
from leakbound._util.text import version
from leakbound.assess.verdict import MEANINGS, meanings
from leakbound.report.evidence.auxiliary import STATEMENTS
from leakbound.report.evidence.model_card import card
from leakbound.report.evidence.parts import (
    NOT_STATED,
    EvidenceReport,
    Item,
    Part,
    PrivacyClaim,
    Subject,
)
from leakbound.report.evidence.sign_off import chance, epsilon_line, fitting, training_line
from leakbound.report.evidence.subjects import digests, of_run
from leakbound.report.folder import Run, Strip
from leakbound.report.tables import LONGEST
from leakbound.report.template import rendered

SIDE = 72
"""About how many pixels of the page one example is wide."""
WARNED = 160
"""How many letters of a warning the sign-off page shows."""
PREFIX = 16
"""How many digits of a SHA-256 the sign-off page shows."""

__all__ = ["STATEMENTS", "annex", "card", "digests", "document", "of_run", "page", "schema"]


def document(subjects: Sequence[Subject], *, images: bool) -> EvidenceReport:
    """The value of `report.json`: the same subjects give the same value."""
    shown = [s for s in subjects if any(one.pictures for one in s.strongest)]
    return EvidenceReport(
        leakbound=version("leakbound"),
        images=images and bool(shown),
        private_pictures=images and any(s.provenance.own_data is not False for s in shown),
        subjects=tuple(subjects),
    )


def schema() -> str:
    """The JSON Schema (draft 2020-12) of `report.json`, as text."""
    parts = cleaned(msgspec.json.schema(EvidenceReport)["$defs"])
    form = "https://json-schema.org/draft/2020-12/schema"
    own = {"$schema": form, "$id": "urn:leakbound:report:1", "$defs": parts}
    return json.dumps(parts.pop("EvidenceReport") | own, indent=1, sort_keys=True)


def page(content: EvidenceReport, files: Sequence[Mapping[str, str]] = ()) -> str:
    """The sign-off page as text, an A4 page per run; `files`: SHA-256 by name, per subject."""
    sheets = []
    for place, one in enumerate(content.subjects):
        words = meanings(truth_known=not one.measured.captured)
        beside = files[place] if place < len(files) else {}
        warnings = _warnings(one)
        known = [epsilon_line(own) for own in one.epsilon_audits]
        declared = [] if one.training is None else [training_line(one.training)]
        rows = fitting(one.sign_off, [*warnings, *known, *declared], len(beside), words)
        sheets.append(
            {
                "subject": one,
                "rows": rows,
                "more": len(one.sign_off.rows) - len(rows),
                "meanings": {row.verdict: words[row.verdict] for row in rows},
                "warnings": warnings,
                "epsilons": known,
                "trainings": declared,
                "files": beside,
            }
        )
    context = {"content": content, "sheets": sheets, "digits": PREFIX}
    filters: dict[str, Callable[..., str]] = {
        "share": chance,
    }
    return rendered("evidence.html.j2", context, filters)


def annex(content: EvidenceReport, runs: Sequence[Run] = ()) -> str:
    """The annex as text; the first subjects are those of `runs`, where the pictures are."""
    from leakbound.report.evidence import charts

    drawn = [
        {
            "mean_error": charts.mean_errors(one.configurations, one.threshold),
            "probability": charts.probabilities(one.configurations),
            "claims": _claims(one.differential_privacy),
        }
        for one in content.subjects
    ]
    context = {
        "content": content,
        "numbers": {name: number for number, name in enumerate(get_args(Part), 1)},
        "figures": drawn,
        "pictures": [_pictures(*both) for both in zip(runs, content.subjects, strict=False)],
        "unstated": NOT_STATED,
        "side": SIDE,
        "meanings": MEANINGS,
    }
    filters: dict[str, Callable[..., str]] = {
        "fact": fact,
    }
    return rendered("evidence-annex.html.j2", context, filters)


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


def _warnings(subject: Subject) -> list[str]:
    """What to know before signing: what does not hold first, then what is missing."""
    said = [
        f"Does not hold: {check.words} ({check.detail}). Do not sign before you know why."
        for check in subject.checks
        if check.holds is False
    ]
    said += subject.notices
    return [text if len(text) <= WARNED else f"{text[: WARNED - 1]}…" for text in said]


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
