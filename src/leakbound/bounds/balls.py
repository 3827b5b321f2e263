"""How many examples one ball can hold, wherever its center is: upper bounds, from cheap to exact.

Distances are root mean squared errors over the values of an example, computed in float64 and
rounded so that counts only grow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from leakbound.bounds.law import Array, positive, single
from leakbound.bounds.record_priors import flat_images

__all__ = ["BallCounts", "ball_counts"]

ROUNDING = 1e-9
"""Of squared distances, relative to the squared norms they come from; counts only grow by it."""
BLOCK = 512
MOST_PAIRS = 30_000_000
"""Pairs of neighbors that are kept; beyond, counts of neighbors alone bound a ball."""
SEARCHED, CALLS = 24, 20_000
"""The largest count for which exact balls are searched, and after how many balls that stops."""


@dataclass(frozen=True, eq=False)
class BallCounts:
    """How many examples of a sample one ball of a radius can hold.

    Attributes:
        each: (n,) no ball that holds this example holds more of the sample than so many.
        most: no ball holds more.
        how: "neighbors", "medoid" or "exact": which bound gave `most`.
    """

    each: Array
    most: int
    how: str


def ball_counts(examples: ArrayLike, eta: float) -> BallCounts:
    """Upper bounds on the number of examples within a mean squared error of eta of one point.

    Two examples of a ball of radius r are within 2 r of each other, so 1 + the neighbors within 2 r
    bound its count. Of K points in a ball, the sum of all squared distances is at most (K r)^2, so
    one of them (the medoid) has squared distances that sum to 2 K r^2 at most. Where that leaves
    few, the search goes over all sets of neighbors and the smallest balls around them.

    Shapes: `examples` (n, ...), of which all values count.

    Raises:
        ValueError: no examples, values that are not finite, eta of 0 or below.

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
    """For each row those within `reach`, itself too, and their mean squared errors, nearest first.

    Of too many pairs only the counts are right: the lists are as long as they would be, and empty.
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
    """The most points of a ball of which this one is the medoid."""
    count = np.arange(1, len(apart) + 1)
    inside = np.cumsum(apart) <= 2 * count * level * (1 + ROUNDING)
    return int(count[inside].max(initial=1))


def _search(rows: Array, near: list[Array], level: float) -> int | None:
    """The largest set that fits into one ball; None where that takes too long."""
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
    """Whether a ball with a mean squared error of `level` may hold all: False is proved.

    Frank-Wolfe on the dual of the smallest ball: any weights w on the points give a lower bound on
    its squared radius, w'Dw / 2, and a center, from which all may be within reach.
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
    return True  # not decided: counts as fitting, which errs upwards
