"""The systematic evaluation: run what is missing, then write tables and a figure."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from leakbound import audit
from leakbound.assess import Assessment
from leakbound_reproductions import kept
from leakbound_reproductions.gallery import Strip, draw
from leakbound_reproductions.outcome import SMALL, Tell
from leakbound_reproductions.systematic_evaluation import evaluation_page, tradeoff_figure
from leakbound_reproductions.systematic_evaluation.measured import Measured, family, label
from leakbound_reproductions.systematic_evaluation.parts import COLOR, HONEST, Part, parts

GALLERY = COLOR, "honest"
"""The part whose reconstructions are drawn: its images, and its name."""


def evaluate(
    folder: Path, *, scale: str, color: str, workers: int, tell: Tell, device: str = "cpu"
) -> Measured:
    """Run all parts into `folder` and write evaluation.md and evaluation.png.

    An interrupted run continues where it was. Each part is a separate audit in
    `folder`/<data>/<part>, which `leakbound report` shows with all its records.

    Raises:
        ValueError: no such scale, or images that cannot be read.
    """
    wanted = parts(scale, color)
    run(wanted, folder, workers, device, tell)
    found = Measured.read(wanted, folder)
    tradeoff_figure.draw(found, folder / "evaluation.png")
    kept.page(folder / "evaluation.md", evaluation_page.page(found, color, small=scale == SMALL))
    return found


class OutOfTime(Exception):
    """The time limit of a run is over; what is done is stored."""


def run(
    wanted: Sequence[Part],
    folder: Path,
    workers: int,
    device: str,
    tell: Tell,
    end: float = math.inf,
) -> None:
    """All audits, one after the other.

    Raises:
        OutOfTime: `end`, of `time.monotonic`, is over. As after Ctrl-C, what runs at this time is
            lost.
    """

    def watch(part: str, total: int, now: audit.Progress) -> None:
        tell(part, now.done, total)
        if time.monotonic() >= end:
            raise OutOfTime

    for part in wanted:
        name = f"{part.data}: {part.name}"
        total = len(part.plan.experiments()) + len(part.plan.trainings())
        if time.monotonic() >= end:
            raise OutOfTime
        tell(name, 0, total)
        audit.audit(
            part.plan,
            folder / part.data / part.name,
            workers=workers,
            device=device,
            pictures=(part.data, part.name) == GALLERY,
            watch=partial(watch, name, total),
        )


def gallery(found: Measured, folder: Path) -> bool:
    """Draw reconstructions of the first batch under each defense at its largest setting.

    This is paper B's figure 2. False if there is none.
    """
    names = found.names[GALLERY]
    cells = found.cells[GALLERY]
    first = [cell for cell in cells if (cell.seed, cell.batch_size) == _smallest(cells)]
    # The last of each family stays. A run that was stopped may hold them in any order.
    rising = sorted(first, key=lambda cell: _level(label(cell)))
    chosen = {(names[cell.attack.hash], family(label(cell))): cell for cell in rising}
    own = folder.joinpath(*GALLERY)
    columns = {
        attack: [
            Strip(label(cell), cell, own) for (name, _), cell in chosen.items() if name == attack
        ]
        for attack in (HONEST[2], HONEST[0])
    }
    return draw(columns, folder / "gallery.png")


def _level(defense: str) -> float:
    """The number at the end of a label; 0 without one."""
    own = defense.removeprefix(family(defense))
    return float(own) if own else 0.0


def _smallest(cells: Sequence[Assessment]) -> tuple[int, int]:
    """The first round, and its smallest batch of several images."""
    several = [cell for cell in cells if cell.batch_size > 1]
    return min(((cell.seed, cell.batch_size) for cell in several), default=(0, 0))
