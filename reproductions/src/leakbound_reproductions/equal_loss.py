"""Compare two families of defenses at equal cost, as papers A and B plot them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

Levels = Iterable[tuple[Mapping[int, float], Mapping[int, float]]]
"""A family of defenses, level by level: training losses and errors (any measure), by seed."""
Point = tuple[float, float]


def at_equal_loss(ours: Levels, theirs: Levels, *, least: float = 0.0) -> list[float]:
    """How much higher our error is than theirs at equal loss: pseudo-values, one per seed.

    Losses and errors are means over the seeds. The value of a family at a loss is the largest mean
    error among its levels that cost no more, with linear interpolation between the levels that
    raise it. The difference is the mean over the losses that both families span. Results are
    jackknife pseudo-values, so that an interval of their mean includes the uncertainty of all these
    means. The largest error of single seeds would grow with their scatter and favor the noisier
    family.

    Args:
        ours: the levels of one family; seeds that all levels have are used.
        theirs: those of the other.
        least: families are compared only if they share a range of losses wider than this.

    Returns:
        One number a seed; none where the families span no more than `least` together, where one
        has fewer than two levels, or where fewer than two seeds have all levels.

    Source: Efron, B. and Stein, C. (1981). "The jackknife estimate of variance", Annals of
    Statistics 9(3).

    Example:
        >>> ours = [({0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.0}), ({0: 2.0, 1: 2.0}, {0: 8.0, 1: 8.0})]
        >>> theirs = [(losses, {0: 1.0, 1: 1.0}) for losses, _ in ours]
        >>> at_equal_loss(ours, theirs)
        [4.0, 4.0]
    """
    families = list(ours), list(theirs)
    tables = [table for levels in families for level in levels for table in level]
    seeds = sorted(set.intersection(*map(set, tables))) if tables else []
    if len(seeds) < 2 or min(map(len, families)) < 2:
        return []
    low, high = shared(*(_means(levels, seeds) for levels in families))
    if high - low <= least:
        return []
    return jackknife(seeds, lambda some: _gap(*(_means(levels, some) for levels in families)))


def shared(ours: Sequence[Point], theirs: Sequence[Point]) -> Point:
    """The smallest and the largest loss that both families have; high < low if they do not overlap.

    Example:
        >>> shared([(1.0, 0.0), (3.0, 0.5)], [(2.0, 0.0), (5.0, 0.1)])
        (2.0, 3.0)
    """
    spans = [(min(own)[0], max(own)[0]) for own in (ours, theirs)]
    return max(low for low, _ in spans), min(high for _, high in spans)


def raising(points: Iterable[Point]) -> list[Point]:
    """By loss, the points that raise the error so far, and the last one's loss with that error.

    Example:
        >>> raising([(3.0, 0.1), (1.0, 0.0), (2.0, 0.2)])
        [(1.0, 0.0), (2.0, 0.2), (3.0, 0.2)]
    """
    ordered = sorted(points)
    found = ordered[:1]
    for loss, error in ordered[1:]:
        if error > found[-1][1]:
            found.append((loss, error))
    if ordered[-1][0] > found[-1][0]:
        found.append((ordered[-1][0], found[-1][1]))
    return found


def jackknife(seeds: Sequence[int], value: Callable[[Sequence[int]], float]) -> list[float]:
    """For each: n times the value of all minus (n - 1) times the value of all others.

    For a mean, these are its terms.

    Example:
        >>> jackknife([1, 2, 6], lambda seeds: sum(seeds) / len(seeds))
        [1.0, 2.0, 6.0]
    """
    n = len(seeds)
    whole = value(seeds)
    return [n * whole - (n - 1) * value([s for s in seeds if s != out]) for out in seeds]


def _means(levels: Iterable[tuple[Mapping[int, float], ...]], seeds: Sequence[int]) -> list[Point]:
    return [(_mean(losses, seeds), _mean(errors, seeds)) for losses, errors in levels]


def _mean(values: Mapping[int, float], seeds: Sequence[int]) -> float:
    return fmean(values[seed] for seed in seeds)


def _gap(ours: Sequence[Point], theirs: Sequence[Point]) -> float:
    """The mean difference of two curves over the losses that both span, or at the nearest one."""
    low, high = shared(ours, theirs)
    at = np.linspace(low, max(low, high), 20)
    return float(np.mean(_read(raising(ours), at) - _read(raising(theirs), at)))


def _read(curve: Sequence[Point], at: NDArray[np.float64]) -> NDArray[np.float64]:
    points = np.array(curve)
    return np.asarray(np.interp(at, points[:, 0], points[:, 1]))
