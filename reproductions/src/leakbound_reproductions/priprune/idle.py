"""When PriPrune can first withhold anything."""

from __future__ import annotations

import math
from statistics import fmean

from leakbound.defenses import PriPrune
from leakbound_reproductions.priprune import cell as cells
from leakbound_reproductions.priprune.cell import Record
from leakbound_reproductions.priprune.measured import Measured


def acting(found: Measured) -> list[int]:
    """The attacked rounds in which PriPrune's masks can withhold."""
    marks = sorted({mark for cell, _ in found.pairs for mark in cell.marks})
    return [mark for mark in marks if mark >= first(found)]


def first(found: Measured) -> int:
    """The first round in which alpha can be above 1/2, at Adam's largest steps from its start.

    0 if no experiment has PriPrune.
    """
    links = [
        link
        for defense in found.values("defense")
        for link in cells.defense(defense).links
        if isinstance(link, PriPrune)
    ]
    waits = [-math.log(o.start / (1 - o.start)) / (o.mask_rate * o.mask_steps) for o in links]
    return max((math.ceil(wait) for wait in waits), default=0)


def started(found: Measured) -> str:
    """When PriPrune's masks begin to withhold, and how much; empty without experiments."""
    if not first(found):
        return ""
    rates = {m: found.by_seed(lambda r, m=m: _rate(r, m)) for m in acting(found)}  # type: ignore[misc]
    each = ", ".join(f"{100 * fmean(own.values()):.2g} % in round {m}" for m, own in rates.items())
    return (
        f"Before round {first(found)}, PriPrune's masks cannot withhold anything, so those rounds "
        "are not judged. (Alpha's start and step are ours; the paper gives neither.) After that "
        f"it withholds these shares of the weights: {each}"
    )


def _rate(record: Record, mark: int) -> float | None:
    return next((row["rate"] for row in record["rounds"] if row["round"] == mark), None)
