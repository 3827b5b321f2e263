"""The systematic evaluation: run what is missing, then write tables and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from leakbound import audit
from leakbound_reproductions import kept
from leakbound_reproductions.outcome import SMALL, Tell
from leakbound_reproductions.systematic_evaluation import evaluation_page, tradeoff_figure
from leakbound_reproductions.systematic_evaluation.measured import Measured
from leakbound_reproductions.systematic_evaluation.parts import Part, parts


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


def run(wanted: Sequence[Part], folder: Path, workers: int, device: str, tell: Tell) -> None:
    """All audits, one after the other."""
    for part in wanted:
        name = f"{part.data}: {part.name}"
        total = len(part.plan.experiments()) + len(part.plan.trainings())
        tell(name, 0, total)
        audit.audit(
            part.plan,
            folder / part.data / part.name,
            workers=workers,
            device=device,
            pictures=False,
            watch=lambda now, name=name, total=total: tell(name, now.done, total),  # type: ignore[misc]
        )
