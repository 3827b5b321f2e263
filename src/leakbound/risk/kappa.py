"""The prior-only success kappa: of a data set, and under a prior taken from it.

kappa is the probability that the prior-only baseline meets the criterion. No noise brings any
attacker's success below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike

from leakbound.assess.criterion import distance_of
from leakbound.bounds import record_priors
from leakbound.bounds.law import Array, positive, single
from leakbound.bounds.record_priors import flat_images, largest_match_rates
from leakbound.domains import Domain
from leakbound.risk.target import Target

TIE = 1e-12
"""Errors that exceed eta by at most this part count as matched: rounding."""


@dataclass(frozen=True)
class BaselineMatches:
    """Shares of a data set's examples within an MSE of eta of prior-only baselines.

    Attributes:
        examples: number of examples checked.
        constant: the largest share that one constant image matches, and
        value: that constant.
        mean: the share that the mean image matches.
        example: the largest share of the other examples that one example matches. An attacker who
            does not have this example cannot use it, so it rejects no target.
    """

    examples: int
    constant: float
    value: float
    mean: float
    example: float = 0.0

    @property
    def most(self) -> float:
        """The largest of the shares."""
        return max(self.constant, self.mean, self.example)


def baseline_matches(images: ArrayLike, eta: float) -> BaselineMatches:
    """Count what the best constant image, the mean image and the best example match.

    Shapes: `images` (n, ...); the trailing sizes are one example's values.

    Raises:
        ValueError: there are no images, values are not finite, or eta is 0 or less.

    Example:
        >>> found = baseline_matches([[0.0, 0.0], [0.05, 0.05], [1.0, 0.0]], 0.0025)
        >>> round(found.constant, 3), found.value, found.mean, found.example
        (0.667, 0.025, 0.0, 0.5)
    """
    return matches_at(images, [eta])[0]


def matches_at(images: ArrayLike, levels: Sequence[float]) -> list[BaselineMatches]:
    """`baseline_matches` at each level; images are compared with each other once."""
    flat = flat_images(images)
    reached = [single(positive, eta=eta) * (1 + TIE) for eta in levels]
    examples = largest_match_rates(flat, reached)
    return [_of_level(flat, *each) for each in zip(reached, examples, strict=True)]


def _of_level(
    flat: Array,
    level: float,
    example: float,
) -> BaselineMatches:
    middle = flat.mean(1)
    variance = flat.var(1)
    mean = float((np.square(flat - flat.mean(0)).mean(1) <= level).mean())
    inside = variance <= level
    if not inside.any():
        return BaselineMatches(len(flat), 0.0, float(middle.mean()), mean, example)
    # The error of a constant c is the variance of the values plus (mean - c)^2.
    half = np.sqrt(level - variance[inside])
    low = middle[inside] - half
    high = middle[inside] + half
    # The best constant lies at the start of some interval: count the intervals open there.
    starts = np.sort(low)
    covered = np.searchsorted(starts, starts, "right") - np.searchsorted(np.sort(high), starts)
    best = int(np.argmax(covered))
    holds = (low <= starts[best]) & (high >= starts[best])
    # The middle of the common part, because at its start one example matches only just.
    value = float((starts[best] + high[holds].min()) / 2)
    return BaselineMatches(len(flat), float(covered[best]) / len(flat), value, mean, example)


def row_matches(
    rows: ArrayLike,
    domain: Domain,
) -> Callable[[float], BaselineMatches]:
    """What the domain's own prior-only baseline and the best of the first examples match, by level.

    For rows (n, values) of a table or a series; `mean` is the share of the baseline. Distances are
    measured once for all levels.
    """
    flat = flat_images(rows)
    distance = distance_of(domain)
    public = torch.tensor(flat, dtype=domain.dtype).reshape(-1, *domain.shape)
    blind = domain.blind(public).flatten().double().numpy()
    from_blind = distance.paired(np.broadcast_to(blind, flat.shape), flat)
    # Pairs of more rows take too long.
    few = flat[: record_priors.MOST]
    apart = distance.apart(few, few)

    def at(level: float) -> BaselineMatches:
        reached = (apart <= level).sum(1).max() - 1
        return BaselineMatches(
            len(flat),
            0.0,
            0.0,
            float((from_blind <= level).mean()),
            float(reached) / max(1, len(few) - 1),
        )

    return at


def refuse_matched(matches: BaselineMatches, target: Target) -> None:
    """Reject a target that a prior-only baseline meets more often than is accepted."""
    typical = "the mean image of the data" if target.goal is None else "the most typical example"
    what, share = max(
        (f"the constant image {matches.value:.3g}", matches.constant),
        (typical, matches.mean),
        key=lambda pair: pair[1],
    )
    if share > target.gamma:
        raise ValueError(
            f"target is {target}, but {what} matches {share:.2%} of the {matches.examples} "
            f"examples without any update: no amount of noise helps; {target.harder} or accept a "
            "larger probability"
        )
