"""Intervals of shares and means, and corrections for many tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev

from scipy.special import betainccinv, betaincinv, stdtrit


def clopper_pearson(
    hits: int,
    n: int,
    tail: float,
) -> tuple[float, float]:
    """Lower and upper limit of a share; each is wrong with a probability of at most `tail`.

    Clopper and Pearson 1934: exact for every share, if all n are independent.

    Example:
        >>> [round(limit, 4) for limit in clopper_pearson(8, 10, 0.025)]
        [0.4439, 0.9748]
    """
    low = 0.0 if hits == 0 else float(betaincinv(hits, n - hits + 1, tail))
    # The complement keeps all digits of a small tail, which 1 - tail loses.
    high = 1.0 if hits >= n else float(betainccinv(hits + 1, n - hits, tail))
    return low, high


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval (1927) of a share, which takes all n as independent.

    Example:
        >>> [round(edge, 3) for edge in wilson(8, 10)]
        [0.49, 0.943]
    """
    if not n:
        return 0.0, 1.0
    z2 = 1.959963984540054**2  # 97.5 % quantile of the normal distribution
    middle = (hits + z2 / 2) / (n + z2)
    half = (z2 * (hits * (n - hits) / n + z2 / 4)) ** 0.5 / (n + z2)
    # The ends are exact there; a difference would leave a rounding error.
    return (middle - half if hits else 0.0), (middle + half if hits < n else 1.0)


def student_reach(values: Sequence[float], tail: float) -> float:
    """How far Student's one-sided limit of the mean is from the mean; infinite for one value.

    It takes the values as nearly normal. Each side is wrong with a probability of `tail`.
    """
    n = len(values)
    if n < 2:
        return math.inf
    return float(stdtrit(n - 1, 1 - tail)) * stdev(values) / math.sqrt(n)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for all tests together, whatever their dependence (Holm 1979).

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    corrected = [1.0] * len(p_values)
    largest = 0.0
    for place, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        # A larger p-value must not end below a smaller one.
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[at]))
        corrected[at] = largest
    return corrected
