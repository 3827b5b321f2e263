"""The short trainings behind the test accuracy: means over their seeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from leakbound.assess.record import Training
from leakbound.report.tables import Names, grouped

EARLY = 5
"""The round whose loss shows how fast a model learns at first."""


@dataclass(frozen=True)
class TrainingCurve:
    """One model's training under one defense: means over the seeds that ran.

    `losses` holds the rounds that all seeds have, with None where a loss is no number.
    """

    model: str
    defense: str
    optimizer: str
    losses: dict[int, float | None]
    n: int

    @property
    def early(self) -> float | None:
        return self.losses.get(EARLY)

    @property
    def rounds(self) -> int:
        return max(self.losses)

    @property
    def last(self) -> float | None:
        return self.losses[self.rounds]


def loss_curves(trainings: Iterable[Training], names: Names) -> list[TrainingCurve]:
    found = grouped(
        ((names.model(t), names.defense(t), t.optimizer), dict(t.curve))
        for t in trainings
        if t.status == "ok" and t.curve
    )
    rows = []
    for key, own in found.items():
        by_round = {r: [curve[r] for curve in own] for r in sorted(set(own[0]).intersection(*own))}
        losses = {
            r: None if None in values else fmean(v for v in values if v is not None)
            for r, values in by_round.items()
        }
        rows.append(TrainingCurve(*key, losses, len(own)))
    return [row for row in rows if row.losses]
