"""Compare two families of defenses at equal cost, as papers A and B plot them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

__all__ = ["Levels", "at_equal_loss"]

Levels = Iterable[tuple[Mapping[int, float], Mapping[int, float]]]
"""A family of defenses, level by level: training losses and errors (any measure), by seed."""
Point = tuple[float, float]
PLACES = 20
"""At how many losses two families are compared."""


def at_equal_loss(ours: Levels, theirs: Levels, *, least: float = 0.0) -> list[float]:
    """How much higher our error is than theirs at equal loss: pseudo-values, one per seed.

    The differences of `both_at_equal_loss`, which says what is compared.

    Args:
        ours: the levels of one family; seeds that all levels have are used.
        theirs: those of the other.
        least: families are compared only if they share a range of losses wider than this.

    Returns:
        One number a seed; none where the families are not compared.

    Example:
        >>> ours = [({0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.0}), ({0: 2.0, 1: 2.0}, {0: 8.0, 1: 8.0})]
        >>> theirs = [(losses, {0: 1.0, 1: 1.0}) for losses, _ in ours]
        >>> at_equal_loss(ours, theirs)
        [4.0, 4.0]
    """
    one, other = both_at_equal_loss(ours, theirs, least=least)
    return [a - b for a, b in zip(one, other, strict=True)]


def both_at_equal_loss(
    ours: Levels,
    theirs: Levels,
    *,
    least: float = 0.0,
) -> tuple[list[float], list[float]]:
    """Our error and theirs at equal loss: jackknife pseudo-values, one per seed.

    Losses and errors are means over the seeds. The value of a family at the loss of a level is the
    largest mean error among its levels that cost no more, and linear in between. The results are
    means over the losses that both families span. They are jackknife pseudo-values around the value
    of all seeds, so that an interval of their mean includes the uncertainty of all these means.

    The largest error of single seeds would grow with their scatter and favor the noisier family. A
    curve through those levels only that raise the error would jump where noise decides which do.

    Args:
        ours: the levels of one family; seeds that all levels have are used.
        theirs: those of the other.
        least: families are compared only if they share a range of losses wider than this.

    Returns:
        Two lists, one number a seed; empty where the families span no more than `least` together,
        where one has fewer than two levels, or where fewer than two seeds have all levels.

    Source: Efron, B. and Stein, C. (1981). "The jackknife estimate of variance", Annals of
    Statistics 9(3).

    Example:
        >>> ours = [({0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.0}), ({0: 2.0, 1: 2.0}, {0: 8.0, 1: 8.0})]
        >>> theirs = [(losses, {0: 1.0, 1: 1.0}) for losses, _ in ours]
        >>> both_at_equal_loss(ours, theirs)
        ([5.0, 5.0], [1.0, 1.0])
    """
    families = list(ours), list(theirs)
    seeds = _seeds(*families)
    if len(seeds) < 2 or min(map(len, families)) < 2:
        return [], []
    low, high = shared(*(_means(levels, seeds) for levels in families))
    if high - low <= least:
        return [], []

    def values(place: int) -> list[float]:
        def error(some: Sequence[int]) -> float:
            means = [_means(levels, some) for levels in families]
            return _over(means[place], shared(*means))

        return jackknife(seeds, error)

    return values(0), values(1)


def at_loss(levels: Levels, loss: float) -> list[float]:
    """A family's error at one loss: jackknife pseudo-values, one per seed.

    The value at a loss is that of `both_at_equal_loss`.

    Returns:
        One number a seed; none where the family does not span the loss, where it has fewer than two
        levels, or where fewer than two seeds have all levels.

    Example:
        >>> levels = [({0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.0}), ({0: 2.0, 1: 2.0}, {0: 8.0, 1: 8.0})]
        >>> at_loss(levels, 1.5), at_loss(levels, 2.5)
        ([5.0, 5.0], [])
    """
    levels = list(levels)
    seeds = _seeds(levels)
    if len(seeds) < 2 or len(levels) < 2:
        return []
    low, high = spans(levels)
    if not low <= loss <= high:
        return []
    return jackknife(seeds, lambda some: _over(_means(levels, some), (loss, loss)))


def spans(levels: Levels) -> Point:
    """The smallest and the largest mean loss of a family's levels, over the seeds that all have.

    Example:
        >>> spans([({0: 1.0, 1: 3.0}, {0: 2.0, 1: 2.0}), ({0: 4.0, 1: 4.0}, {0: 8.0, 1: 8.0})])
        (2.0, 4.0)
    """
    levels = list(levels)
    losses = [loss for loss, _ in _means(levels, _seeds(levels))]
    return min(losses), max(losses)


def shared(ours: Sequence[Point], theirs: Sequence[Point]) -> Point:
    """The smallest and the largest loss that both families have; high < low if they do not overlap.

    Example:
        >>> shared([(1.0, 0.0), (3.0, 0.5)], [(2.0, 0.0), (5.0, 0.1)])
        (2.0, 3.0)
    """
    ends = [(min(own)[0], max(own)[0]) for own in (ours, theirs)]
    return max(low for low, _ in ends), min(high for _, high in ends)


def best_so_far(points: Iterable[Point]) -> list[Point]:
    """By loss, the largest error of the points that cost no more.

    Example:
        >>> best_so_far([(3.0, 0.1), (1.0, 0.0), (2.0, 0.2)])
        [(1.0, 0.0), (2.0, 0.2), (3.0, 0.2)]
    """
    found: dict[float, float] = {}
    best = -math.inf
    for loss, error in sorted(points):
        best = max(best, error)
        found[loss] = best
    return [*found.items()]


def jackknife(seeds: Sequence[int], value: Callable[[Sequence[int]], float]) -> list[float]:
    """Terms with the value of all as their mean, and the jackknife's variance of that value.

    For a mean, these are its own terms.

    Example:
        >>> jackknife([1, 2, 6], lambda seeds: sum(seeds) / len(seeds))
        [1.0, 2.0, 6.0]
    """
    others = [value([s for s in seeds if s != out]) for out in seeds]
    # Around the value itself: a correction of bias is noisy where the largest of means counts.
    middle = value(seeds) + (len(seeds) - 1) * fmean(others)
    return [middle - (len(seeds) - 1) * other for other in others]


def _seeds(*families: Iterable[tuple[Mapping[int, float], ...]]) -> list[int]:
    """The seeds that all levels have."""
    tables = [table for levels in families for level in levels for table in level]
    return sorted(set.intersection(*map(set, tables))) if tables else []


def _means(levels: Iterable[tuple[Mapping[int, float], ...]], seeds: Sequence[int]) -> list[Point]:
    return [(_mean(losses, seeds), _mean(errors, seeds)) for losses, errors in levels]


def _mean(values: Mapping[int, float], seeds: Sequence[int]) -> float:
    return fmean(values[seed] for seed in seeds)


def _over(points: Sequence[Point], ends: Point) -> float:
    """The mean of a curve over a range of losses, or at its lower end if it has no width."""
    low, high = ends
    at = np.linspace(low, max(low, high), PLACES)
    return float(np.mean(_read(best_so_far(points), at)))


def _read(curve: Sequence[Point], at: NDArray[np.float64]) -> NDArray[np.float64]:
    points = np.array(curve)
    return np.asarray(np.interp(at, points[:, 0], points[:, 1]))
