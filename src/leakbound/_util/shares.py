"""Intervals of shares, and corrections for many tests."""

from __future__ import annotations

from collections.abc import Sequence


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval (1927) of a share, which takes all n as independent.

    Example:
        >>> [round(edge, 3) for edge in wilson(8, 10)]
        [0.49, 0.943]
    """
    if not n:
        return 0.0, 1.0
    z2 = 1.959963984540054**2
    middle = (hits + z2 / 2) / (n + z2)
    half = (z2 * (hits * (n - hits) / n + z2 / 4)) ** 0.5 / (n + z2)
    return (middle - half if hits else 0.0), (middle + half if hits < n else 1.0)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for all tests together, whatever their dependence (Holm 1979).

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    found = [1.0] * len(p_values)
    largest = 0.0
    for place, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[at]))
        found[at] = largest
    return found
