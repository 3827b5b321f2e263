"""Upper bounds on the number of examples in one ball with any center, from cheap to exact.

Distances are root mean squared errors over the values of an example. They are computed in float64
and rounded so that counts can only grow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from leakbound.bounds.law import Array, positive, single
from leakbound.bounds.record_priors import flat_images

__all__ = ["BallCounts", "ball_counts"]

ROUNDING = 1e-9
"""Rounding of squared distances, relative to the squared norms; it can only raise counts."""
BLOCK = 512
MOST_PAIRS = 30_000_000
"""Number of neighbor pairs that are kept; above it, only neighbor counts bound a ball."""
SEARCHED, CALLS = 24, 20_000
"""Largest count for which exact balls are searched, and the number of balls that ends it."""


@dataclass(frozen=True, eq=False)
class BallCounts:
    """Bounds on how many examples of a sample one ball of a radius can hold.

    Attributes:
        each: (n,) no ball that holds example i holds more examples than `each[i]`.
        most: no ball holds more examples.
        how: which bound gave `most`: "neighbors", "medoid" or "exact".
    """

    each: Array
    most: int
    how: str


def ball_counts(examples: ArrayLike, eta: float) -> BallCounts:
    """Upper bounds on the number of examples within a mean squared error of eta of one point.

    Two examples in a ball of radius r lie within 2 r of each other, so 1 + the neighbors within 2 r
    bound its count. For K points in a ball, all squared distances sum to at most (K r)^2. So the
    squared distances from one of them (the medoid) sum to at most 2 K r^2. If few examples remain,
    the search covers all sets of neighbors and their smallest enclosing balls.

    Shapes: `examples` (n, ...); all values count.

    Raises:
        ValueError: there are no examples, values are not finite, or eta is 0 or less.

    Source: this project; docs/errata.md, "Ours".

    Example:
        >>> found = ball_counts([[0.0], [0.1], [0.2], [1.0]], 0.0025)
        >>> found.most, found.each.tolist(), found.how
        (2, [2, 2, 2, 1], 'exact')
    """
    rows = flat_images(examples)
    level = float(single("eta", positive("eta", eta)))
    return counts_of(rows, level, *neighbors(rows, 4 * level))


def counts_of(rows: Array, level: float, near: list[Array], apart: list[Array]) -> BallCounts:
    degree = np.array([len(own) for own in near])
    if degree.sum() > MOST_PAIRS:
        return BallCounts(degree, int(degree.max()), "neighbors")
    medoid = np.array([_medoid(own, level) for own in apart])
    each = np.minimum([medoid[own].max() for own in near], degree)
    most, how = int(each.max()), "medoid"
    if 1 < most <= SEARCHED:
        found = _search(rows, near, level)
        most, how = (most, how) if found is None else (found, "exact")
    return BallCounts(np.minimum(each, most), most, how)


def neighbors(rows: Array, reach: float) -> tuple[list[Array], list[Array]]:
    """The rows within `reach` of each row, itself included, and their mean squared errors, sorted.

    With too many pairs only the counts are right: the lists keep their lengths but hold no values.
    """
    square, near, apart, pairs = np.square(rows).sum(1), [], [], 0
    for start in range(0, len(rows), BLOCK):
        own = rows[start : start + BLOCK]
        sums = square[start : start + BLOCK, None] + square
        found = (sums * (1 - ROUNDING) - 2 * own @ rows.T) / rows.shape[1]
        for line in found:
            inside = np.flatnonzero(line <= reach)
            pairs += len(inside)
            if pairs > MOST_PAIRS:
                near.append(np.broadcast_to(np.int32(0), len(inside)))  # takes no memory
                continue
            order = inside[np.argsort(line[inside], kind="stable")]
            near.append(order.astype(np.int32))
            apart.append(np.maximum(0.0, line[order]))
    return near, apart


def _medoid(apart: Array, level: float) -> int:
    """The largest number of points in a ball whose medoid is this point."""
    count = np.arange(1, len(apart) + 1)
    inside = np.cumsum(apart) <= 2 * count * level * (1 + ROUNDING)
    return int(count[inside].max(initial=1))


def _search(rows: Array, near: list[Array], level: float) -> int | None:
    """The largest set that fits into one ball; None if the search takes too long."""
    order = np.argsort([len(own) for own in near], kind="stable")
    place = np.empty(len(near), int)
    place[order] = np.arange(len(near))
    linked = [set(own.tolist()) for own in near]
    best, calls = 1, 0
    for first in order[::-1].tolist():
        earlier = [x for x in near[first].tolist() if place[x] < place[first]]
        stack = [([first], earlier)]
        while stack:
            chosen, others = stack.pop()
            best = max(best, len(chosen))
            for at, other in enumerate(others):
                if len(chosen) + len(others) - at <= best:
                    break
                left = [x for x in others[at + 1 :] if x in linked[other]]
                if len(chosen) + 1 + len(left) <= best:
                    continue
                calls += 1
                if calls > CALLS:
                    return None
                if _fits(rows[[*chosen, other]], level):
                    stack.append(([*chosen, other], left))
    return best


def _fits(points: Array, level: float, steps: int = 300) -> bool:
    """Whether a ball with a mean squared error of `level` may hold all points; False is proven.

    Frank-Wolfe on the dual of the smallest ball: any weights w on the points give a lower bound
    w'Dw / 2 on its squared radius, and a center from which all points may be within reach.
    """
    apart = np.square(points[:, None] - points).mean(2)
    weights = np.full(len(points), 1 / len(points))
    for step in range(steps):
        pulled = apart @ weights
        least = weights @ pulled / 2
        if least > level * (1 + ROUNDING):
            return False
        distances = pulled - least
        farthest = int(distances.argmax())
        if distances[farthest] <= level:
            return True
        share = 2 / (step + 3)
        weights *= 1 - share
        weights[farthest] += share
    return True  # undecided: counts as fitting, so the bound stays an upper bound
