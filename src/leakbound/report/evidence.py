"""Evidence for people who must sign: one page and the same content as JSON.

`document` makes the JSON value, `page` draws nothing but that value and the pictures it names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from leakbound.report.evidence_run import Accountant, of_run
from leakbound.report.evidence_text import LONGEST, NOT_STATED, SYMBOLS, number
from leakbound.report.evidence_told import STATEMENTS
from leakbound.report.evidence_training import of_training
from leakbound.report.folder import Picture, Run
from leakbound.report.folder import read as read_run
from leakbound.report.html import check_installed, percent, rendered

SCHEMA = "leakbound-report/1"
SIDE = 72
"""About how many pixels of the page one image is wide."""

__all__ = [
    "Accountant",
    "SCHEMA",
    "STATEMENTS",
    "check_installed",
    "document",
    "of_run",
    "of_training",
    "page",
    "read_run",
    "schema",
]


def document(subjects: Sequence[Mapping[str, Any]], *, images: bool) -> dict[str, Any]:
    """The JSON value of `report.json`: the same subjects give the same value.

    Args:
        subjects: what `of_run` and `of_training` made.
        images: whether the page shows pictures of the data.
    """
    shown = any(one["pictures"] for subject in subjects for one in subject["strongest"])
    private = any(
        subject["provenance"]["own_data"] is not False
        for subject in subjects
        if any(one["pictures"] for one in subject["strongest"])
    )
    return {
        "schema": SCHEMA,
        "leakbound": _version(),
        "images": images and shown,
        "private_pictures": images and private,
        "subjects": [dict(subject) for subject in subjects],
    }


def schema() -> str:
    """The JSON Schema (draft 2020-12) of `report.json`, as text."""
    file = resources.files("leakbound.report").joinpath("schema/report-1.schema.json")
    return file.read_text(encoding="utf-8")


def page(content: Mapping[str, Any], runs: Sequence[Run] = ()) -> str:
    """The page as text.

    Args:
        content: what `document` made; its first subjects are those of `runs`.
        runs: where the pictures are that the content names.
    """
    from markupsafe import Markup

    from leakbound.report import evidence_plots as plots

    drawn = [_figures(subject, place, plots) for place, subject in enumerate(content["subjects"])]
    shown = {
        "content": content,
        "figures": drawn,
        "svg": Markup,
        "pictures": [_pictures(*both) for both in zip(runs, content["subjects"], strict=False)],
        "symbols": SYMBOLS,
        "unstated": NOT_STATED,
        "side": SIDE,
    }
    return rendered("evidence.html.j2", shown, {"percent": rate, "fact": fact})


def fact(value: Any) -> str:
    """A JSON value of a header as short text.

    Example:
        >>> fact([1, 28]), fact(None), fact({"a": 1.5})
        ('1, 28', '–', 'a 1.5')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{number(value):g}"
    if isinstance(value, list):
        return ", ".join(map(fact, value[:LONGEST])) or "–"
    if isinstance(value, dict):
        return ", ".join(f"{key} {fact(item)}" for key, item in value.items()) or "–"
    return str(value)


def rate(value: float | None, digits: int = 0) -> str:
    r"""A share, or a difference of shares, for reading.

    Example:
        >>> rate(-0.125, 1), rate(-0.0001, 1)
        ('−12.5\xa0%', '0.0\xa0%')
    """
    return percent(value if value is None else round(value, digits + 2) + 0.0, digits).replace(
        "-", "−"
    )


def claims(found: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """The lines that the page shows of each claim: all of the first, of others what differs."""
    first = found[0]["items"] if found else []
    return [
        [one for place, one in enumerate(claim["items"]) if not number or one != first[place]]
        for number, claim in enumerate(found)
    ]


def _figures(subject: Mapping[str, Any], place: int, plots: Any) -> dict[str, Any]:
    corridor = subject["corridor"]
    curve = corridor["curve"]
    return {
        "mean_error": plots.mean_errors(corridor["mean_error"], corridor["threshold"]),
        "probability": plots.probabilities(corridor["probability"]),
        "curve": None if curve is None else plots.curve(curve, f"curve{place}"),
        "claims": claims(subject["differential_privacy"]),
    }


def _pictures(run: Run, subject: Mapping[str, Any]) -> dict[str, Picture]:
    """The pictures that a subject names, by name; those that cannot be read are left out."""
    named = {
        name
        for one in subject["strongest"]
        for name in (one["pictures"] or {}).values()
    }  # fmt: skip
    found = {name: run.picture(name) for name in sorted(named)}
    return {name: picture for name, picture in found.items() if picture is not None}


def _version() -> str:
    try:
        return version("leakbound")
    except PackageNotFoundError:
        return "not installed"
