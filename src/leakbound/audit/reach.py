"""What guesses that see no update reach in a data set: no noise protects against these."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from leakbound.audit.target import Target
from leakbound.bounds.law import positive, single
from leakbound.bounds.record_priors import flat_images, largest_match_rate

TIE = 1e-12
"""Errors that exceed eta by no more than this part count as reached: rounding."""


@dataclass(frozen=True)
class Reach:
    """Shares of a data set's records within an MSE of eta of blind guesses.

    Attributes:
        records: how many records were looked at.
        constant: the largest share that one constant image reaches, and
        value: that constant.
        mean: the share that the mean image reaches.
        record: the largest share of the other records that one record reaches. An attacker who has
            no such record cannot guess it, so this is told and not refused.
    """

    records: int
    constant: float
    value: float
    mean: float
    record: float = 0.0

    @property
    def most(self) -> float:
        """The largest of the shares."""
        return max(self.constant, self.mean, self.record)


def reach(images: ArrayLike, eta: float) -> Reach:
    """Count what the best constant image, the mean image and the best record reach.

    Shapes: `images` (n, ...); the trailing sizes are one record's values.

    Raises:
        ValueError: no images, values that are no finite numbers, eta of 0 or below.

    Example:
        >>> reach([[0.0, 0.0], [0.05, 0.05], [1.0, 0.0]], 0.0025)
        Reach(records=3, constant=0.6666666666666666, value=0.025, mean=0.0, record=0.5)
    """
    flat = flat_images(images)
    level = float(single("eta", positive("eta", eta))) * (1 + TIE)
    middle, variance = flat.mean(1), flat.var(1)
    mean = float((np.square(flat - flat.mean(0)).mean(1) <= level).mean())
    record, inside = largest_match_rate(flat, level), variance <= level
    if not inside.any():
        return Reach(len(flat), 0.0, float(middle.mean()), mean, record)
    half = np.sqrt(level - variance[inside])
    low, high = middle[inside] - half, middle[inside] + half
    starts = np.sort(low)
    covered = np.searchsorted(starts, starts, "right") - np.searchsorted(np.sort(high), starts)
    best = int(np.argmax(covered))
    holds = (low <= starts[best]) & (high >= starts[best])
    value = float((starts[best] + high[holds].min()) / 2)
    return Reach(len(flat), float(covered[best]) / len(flat), value, mean, record)


def refuse_reached(found: Reach, target: Target) -> None:
    """Refuse a target that a guess without any update reaches more often than is accepted.

    Raises:
        ValueError: saying what reaches it, and how often.
    """
    what, share = max(
        (f"the constant image {found.value:.3g}", found.constant),
        ("the mean image of the data", found.mean),
        key=lambda pair: pair[1],
    )
    if share > target.gamma:
        raise ValueError(
            f"target is {target}, but {what}, which sees no update, reaches {share:.2%} of the "
            f"{found.records} records: no noise helps; ask for a smaller error or accept a larger "
            "probability"
        )
