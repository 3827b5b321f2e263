"""Differences of paired values, with an interval over the pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtrit

LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """The second minus the first of `n` pairs.

    Attributes:
        first, second: the means of both sides.
        mean: the mean difference.
        low, high: cover its expectation with 95 %, by Student's t; None from one pair.
        same: no pair differs at all.
    """

    n: int
    first: float
    second: float
    mean: float
    low: float | None
    high: float | None
    same: bool

    @property
    def side(self) -> int:
        """1 where the interval lies above 0, -1 where it lies below, else 0."""
        if self.same or self.low is None or self.high is None:
            return 0
        return 1 if self.low > 0 else -1 if self.high < 0 else 0

    @property
    def words(self) -> str:
        """What can be said of it.

        Example:
            >>> difference([(1.0, 3.0), (2.0, 4.5), (3.0, 5.0)]).words
            'higher in B'
        """
        if self.same:
            return "the same in every pair"
        if self.low is None:
            return "one pair: no interval"
        return {1: "higher in B", -1: "lower in B", 0: "no difference can be seen"}[self.side]


def difference(pairs: Sequence[tuple[float, float]]) -> Difference | None:
    """The mean of second - first over pairs, with its 95 % interval; None of none.

    The interval takes the differences as nearly normal; of few pairs that are skewed it is too
    narrow.

    Example:
        >>> found = difference([(1.0, 2.0), (1.0, 4.0)])
        >>> found.mean, round(found.low, 2), round(found.high, 2)
        (2.0, -10.71, 14.71)
    """
    if not pairs:
        return None
    found = [second - first for first, second in pairs]
    n, mean = len(found), fmean(found)
    reach = None
    if n > 1:
        reach = float(stdtrit(n - 1, (1 + LEVEL) / 2)) * stdev(found) / math.sqrt(n)
    return Difference(
        n,
        fmean(first for first, _ in pairs),
        fmean(second for _, second in pairs),
        mean,
        None if reach is None else mean - reach,
        None if reach is None else mean + reach,
        not any(found),
    )
