"""Upper bounds on the number of examples in one ball with any center, from cheap to exact.

A ball holds the examples that one candidate matches. Distances are computed in float64 and rounded
so that counts can only grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from leakbound.bounds.distances import Distance
from leakbound.bounds.law import Array

__all__ = ["BallCounts"]

MOST_PAIRS = 30_000_000
"""Number of neighbor pairs that are kept; above it, only neighbor counts bound a ball."""
SEARCHED = 24
COLORED = 3_000_000
CALLS = 20_000
"""Largest count of a ball of squared errors, and number of neighbor pairs of other distances, for
which balls are searched; number of balls after which a search ends."""


@dataclass(frozen=True, eq=False)
class BallCounts:
    """Bounds on how many examples of a sample one ball of a radius can hold.

    Attributes:
        each: (n,) no ball that holds example i holds more examples than `each[i]`.
        most: no ball holds more examples.
        how: which bound gave `most`: "neighbors", "medoid", "colors", "exact", or "all".
    """

    each: Array
    most: int
    how: str


def counts_of(
    rows: Array,
    level: float,
    near: list[Array],
    apart: list[Array],
    distance: Distance,
) -> BallCounts:
    """Upper bounds on the number of examples that one candidate matches at a level.

    `near` and `apart` are the `neighbors` within the distance's reach; `rows` are coded.

    Of squared errors: two examples in a ball of radius r lie within 2 r of each other, so 1 + the
    neighbors within 2 r bound its count. For K points in a ball, all squared distances sum to at
    most (K r)^2. So the squared distances from one of them (the medoid) sum to at most 2 K r^2. If
    few examples remain, the search covers all sets of neighbors and their smallest enclosing balls.

    Source: this project; docs/errata.md, "Ours".
    """
    degree = np.array([len(indices) for indices in near])
    if degree.sum() > MOST_PAIRS:
        return BallCounts(degree, int(degree.max()), "neighbors")
    medoid = np.array([_medoid(distances, distance.mean(level)) for distances in apart])
    each = np.minimum([medoid[indices].max() for indices in near], degree)
    most = int(each.max())
    how = "medoid"
    few = most <= SEARCHED if distance.squared else degree.sum() <= COLORED
    if most > 1 and few:
        largest, by, by_example = _search(near, distance.fits(rows, level))
        most, how = (largest, by) if largest < most or by == "exact" else (most, how)
        each = each if distance.squared else np.minimum(each, by_example)
    return BallCounts(np.minimum(each, most), most, how)


def neighbors(
    blocks: Iterable[Array],
    reach: float,
) -> tuple[list[Array], list[Array]]:
    """The rows within `reach` of each row, itself included, and their distances, sorted.

    `blocks` are the rows of a matrix of distances, some at a time. With too many pairs only the
    counts are right: the lists keep their lengths but hold no values.
    """
    near = []
    apart = []
    pairs = 0
    for line in (line for block in blocks for line in block):
        inside = np.flatnonzero(line <= reach)
        pairs += len(inside)
        if pairs > MOST_PAIRS:
            near.append(np.broadcast_to(np.int32(0), len(inside)))  # takes no memory
            continue
        # Stable: equal distances must not depend on the machine.
        order = inside[np.argsort(line[inside], kind="stable")]
        near.append(order.astype(np.int32))
        # Distances are rounded down, so equal examples may lie a little below 0.
        apart.append(np.maximum(0, line[order]))
    return near, apart


def _medoid(apart: Array, mean: float) -> int:
    """The largest number of points in a ball whose medoid is this point."""
    count = np.arange(1, len(apart) + 1)
    inside = np.cumsum(apart, dtype=float) <= count * mean
    return int(count[inside].max(initial=1))


def _search(
    near: list[Array],
    fits: Callable[[list[int]], bool],
) -> tuple[int, str, Array]:
    """The largest set that fits into one ball, or a bound on it if the search takes too long.

    Examples of one ball are neighbors of each other. If neighbors never have the same color, a ball
    holds one example of a color at most (Tomita and Seki 2003).

    Returns:
        The bound, how it was found, and by example a bound (n,) on the balls that hold it.
    """
    order = np.argsort([len(indices) for indices in near], kind="stable")
    place = np.argsort(order)
    linked = [_bits(place[near[i]], len(near)) & ~(1 << at) for at, i in enumerate(order.tolist())]
    later = [bits >> at + 1 << at + 1 for at, bits in enumerate(linked)]
    each, caps = (np.array([1 + _colors(bits, linked) for bits in of]) for of in (linked, later))
    best = 1
    calls = 0
    # The largest possible ball first: then the others end at once.
    for first in np.argsort(-caps, kind="stable").tolist():
        if caps[first] <= best:
            break
        stack = [([first], later[first])]
        while stack:
            chosen, left = stack.pop()
            # Colors fall, so once one member fails the bound, all that follow fail too.
            for other, colors in reversed(_colored(left, linked)):
                if len(chosen) + colors <= best:
                    break
                calls += 1
                if calls > CALLS:
                    return int(caps[first]), "colors", each[place]
                left ^= 1 << other
                if fits(order[[*chosen, other]].tolist()):
                    best = max(best, len(chosen) + 1)
                    stack.append(([*chosen, other], left & linked[other]))
    return best, "exact", each[place]


def _bits(members: Array, count: int) -> int:
    """The members of a set of numbers below `count` as the bits of one number."""
    held = np.zeros(count, bool)
    held[members] = True
    return int.from_bytes(np.packbits(held, bitorder="little").tobytes(), "little")


def _colored(left: int, linked: list[int]) -> list[tuple[int, int]]:
    """The members of a set, greedily colored, and the number of colors up to each of them."""
    colored = []
    color = 0
    while left:
        color = color + 1
        free = left
        while free:
            lowest = free & -free
            member = lowest.bit_length() - 1
            left ^= lowest
            free &= ~(lowest | linked[member])
            colored.append((member, color))
    return colored


def _colors(left: int, linked: list[int]) -> int:
    return max((color for _, color in _colored(left, linked)[-1:]), default=0)
