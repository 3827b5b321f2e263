"""One HTML page that shows two runs beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leakbound.report.compare import Comparison, VerdictPair, compare
from leakbound.report.folder import Run
from leakbound.report.html import check_installed, decimal, rendered, save, significant
from leakbound.report.paired import Difference
from leakbound.report.strength import NO_UPDATE

FILE = "compare.html"


def write_comparison(first: Run, second: Run, path: Path) -> Comparison:
    """Write the page of two runs to a path; returns what it says.

    The page holds numbers and no pictures. The same inputs give the same bytes.

    Raises:
        ValueError: it cannot be written, or jinja2 is not installed.
    """
    check_installed()
    found = compare(first, second)
    save(path, render_comparison(first, second, found))
    return found


def render_comparison(first: Run, second: Run, found: Comparison) -> str:
    """The page as text."""
    return rendered("compare.html.j2", _context(first, second, found))


def signed(value: float | None, digits: int = 1) -> str:
    """A difference for reading, with its sign.

    Example:
        >>> signed(1.25), signed(-0.04), signed(None)
        ('+1.2', '0.0', '–')
    """
    if value is None:
        return "–"
    text = decimal(value, digits)
    if not text.strip("−0."):
        return text.removeprefix("−")
    return text if value < 0 else f"+{text}"


def tiny(value: float | None) -> str:
    """A difference of any size in three digits, with its sign."""
    if not value:
        return "–" if value is None else "0"
    return ("+" if value > 0 else "") + significant(value)


def summary(found: Comparison) -> str:
    """The first sentence: what became of the verdicts."""
    changes = [pair.change for pair in found.verdicts]
    worse, better = changes.count(-1), changes.count(1)
    many = f"{len(changes)} combination{'' if len(changes) == 1 else 's'}"
    if not changes:
        return "The runs share no combination of model, batch size and defense."
    if not worse + better:
        return f"No verdict changed: {many} in both runs."
    ways = [f"{worse} less safe in B"] * bool(worse) + [f"{better} safer in B"] * bool(better)
    return f"{worse + better} of {many} changed verdict: {' and '.join(ways)}."


def _context(first: Run, second: Run, found: Comparison) -> dict[str, Any]:
    seen = [row.psnr for row in found.attacks if row.psnr is not None and row.psnr.low is not None]
    return {
        "runs": [("A", first), ("B", second)],
        "names": [_name(first), _name(second)],
        "found": found,
        "summary": summary(found),
        "grave": [one.words for one in found.concerns if one.grave],
        "notes": [one.words for one in found.concerns if not one.grave],
        "changed": any(pair.change for pair in found.verdicts),
        "no_update": NO_UPDATE,
        "moved": _moved,
        "signed": signed,
        "tiny": tiny,
        "interval": _interval,
        "intervals": len(seen),
        "by_chance": decimal(0.05 * len(seen)),
        "seen": sum(bool(one.side) for one in seen),
        "paired_cells": found.cells[0],
        "equal_cells": found.cells[1],
    }


def _name(run: Run) -> str:
    name = str(run.header["plan"].get("name") or "audit")
    folder = run.folder.resolve().name
    return name if folder == name else f"{name} ({folder})"


def _moved(pair: VerdictPair) -> str:
    return {-1: "less safe in B", 1: "safer in B", 0: "the same"}[pair.change]


def _interval(found: Difference | None, *, small: bool = False) -> str:
    if found is None or found.low is None or found.high is None:
        return "–"
    show = tiny if small else signed
    return f"{show(found.low)} to {show(found.high)}"
