"""Evidence for approvers: a sign-off page, its annex, a model card's section, and all as JSON.

`document` makes the value of `report.json`. `page`, `annex` and `card` draw nothing but that value,
the pictures that it names and the digests of the files beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec

from leakbound._util.docstrings import cleaned
from leakbound._util.text import markdown, version
from leakbound.assess.verdict import MEANINGS, meanings
from leakbound.report.evidence import charts
from leakbound.report.evidence.auxiliary import STATEMENTS
from leakbound.report.evidence.parts import NOT_STATED, EvidenceReport, Part, Subject
from leakbound.report.evidence.sign_off import chance, epsilon_line, fitting, training_line
from leakbound.report.evidence.subjects import digests, of_run
from leakbound.report.folder import Run, Strip
from leakbound.report.sentences import shortened
from leakbound.report.tables import LONGEST, SHOWN
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
    # The root is no reference, so that a reader of the schema sees its fields first.
    header = {"$schema": form, "$id": "urn:leakbound:report:1", "$defs": parts}
    return json.dumps(
        parts.pop("EvidenceReport") | header,
        indent=1,
        sort_keys=True,
    )


def page(
    content: EvidenceReport,
    files: Sequence[Mapping[str, str]] = (),
) -> str:
    """The sign-off page as text, an A4 page per run; `files`: SHA-256 by name, per subject."""
    sheets = []
    for place, subject in enumerate(content.subjects):
        words = meanings(truth_known=not subject.measured.captured)
        beside = files[place] if place < len(files) else {}
        # What to know before signing: what does not hold first, then what is missing.
        broken = [
            f"Does not hold: {check.words} ({check.detail}). Do not sign before you know why."
            for check in subject.checks
            if check.holds is False
        ]
        warnings = [shortened(text, WARNED) for text in (*broken, *subject.notices)]
        epsilons = [epsilon_line(audit) for audit in subject.epsilon_audits]
        trainings = [] if subject.training is None else [training_line(subject.training)]
        lines = [*warnings, *epsilons, *trainings]
        rows = fitting(subject.sign_off, lines, len(beside), words)
        sheets.append(
            {
                "subject": subject,
                "rows": rows,
                "meanings": {row.verdict: words[row.verdict] for row in rows},
                "warnings": warnings,
                "epsilons": epsilons,
                "trainings": trainings,
                "files": beside,
            }
        )
    context = {"content": content, "sheets": sheets, "digits": PREFIX}
    return rendered("evidence.html.j2", context, {"share": chance})


def annex(content: EvidenceReport, runs: Sequence[Run] = ()) -> str:
    """The annex as text; the first subjects are those of `runs`, where the pictures are."""
    figures = [
        {
            "mean_error": charts.mean_errors(subject.configurations, subject.threshold),
            "probability": charts.probabilities(subject.configurations),
        }
        for subject in content.subjects
    ]
    context = {
        "content": content,
        "numbers": {name: number for number, name in enumerate(get_args(Part), 1)},
        "figures": figures,
        "pictures": [_pictures(*both) for both in zip(runs, content.subjects, strict=False)],
        "unstated": NOT_STATED,
        "side": SIDE,
        "meanings": MEANINGS,
    }
    return rendered("evidence-annex.html.j2", context, {"fact": fact})


def card(content: EvidenceReport) -> str:
    """A section for a model card, one for each run. Texts of strangers, such as names, are escaped.

    It is Markdown, and says what the sign-off page says.
    """
    subjects = [(one, meanings(truth_known=not one.measured.captured)) for one in content.subjects]
    context = {"subjects": subjects, "version": content.leakbound, "listed": SHOWN}
    # Some lines of the template are empty for some runs: one newline ends the text.
    text = rendered("model-card.md.j2", context, {"share": chance, "markdown": markdown})
    return text.rstrip("\n") + "\n"


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


def _pictures(run: Run, subject: Subject) -> dict[str, Strip]:
    names = {name for one in subject.strongest for name in (one.pictures or {}).values()}
    pictures = {name: run.picture(name) for name in sorted(names)}
    return {name: picture for name, picture in pictures.items() if picture is not None}
