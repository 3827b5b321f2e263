"""Upper bounds on the number of examples in one ball with any center, from cheap to exact.

A ball holds the examples that one candidate matches. Distances are computed in float64 and rounded
so that counts can only grow.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from leakbound.bounds.distances import Distance
from leakbound.bounds.law import Array

__all__ = ["BallCounts"]

MOST_PAIRS = 30_000_000
"""Number of neighbor pairs that are kept; above it, only neighbor counts bound a ball."""
SEARCHED = 24
COLORED = 3_000_000
CALLS = 5_000
SHORT = 1_000
"""Largest count of a ball of squared errors, and number of neighbor pairs of other distances, for
which balls are searched; number of balls after which a search ends; number of
examples up to which all are the bits of one number."""


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


@dataclass(frozen=True, eq=False)
class Neighbors:
    """The rows near each row, itself included, as `neighbors` finds them.

    Attributes:
        reach: the largest distance of the pairs that are kept.
        near, apart: for each row the rows within `reach`, the nearest first, and their distances.
        many: (n,) the numbers of rows within a longer reach, whose pairs are too many to keep.
    """

    reach: float
    near: list[Array]
    apart: list[Array]
    many: dict[float, Array]

    def holds(self, reach: float) -> bool:
        """Whether the numbers of rows within this reach are known."""
        return reach <= self.reach or reach in self.many

    def degrees(self, reach: float) -> Array:
        """(n,) the numbers of rows within a reach."""
        if reach in self.many:
            return self.many[reach]
        if reach == self.reach:
            return np.array([len(line) for line in self.apart])
        return np.array([np.searchsorted(line, reach, "right") for line in self.apart])

    def within(self, reach: float) -> tuple[list[Array], list[Array]]:
        """`near` and `apart` of a reach that is kept."""
        near = []
        apart = []
        lists = zip(
            self.near,
            self.apart,
            self.degrees(reach).tolist(),
            strict=True,
        )
        for indices, line, count in lists:
            near.append(indices[:count])
            apart.append(line[:count])
        return near, apart


def counts_of(
    rows: Array,
    level: float,
    nearby: Neighbors,
    distance: Distance,
) -> BallCounts:
    """Upper bounds on the number of examples that one candidate matches at a level.

    `nearby` holds the distance's reach at this level; `rows` are coded.

    Of squared errors: two examples in a ball of radius r lie within 2 r of each other, so 1 + the
    neighbors within 2 r bound its count. For K points in a ball, all squared distances sum to at
    most (K r)^2. So the squared distances from one of them (the medoid) sum to at most 2 K r^2. If
    few examples remain, the search covers all sets of neighbors and their smallest enclosing balls.

    Source: this project; docs/errata.md, "Ours".
    """
    reach = distance.reach(level)
    degree = nearby.degrees(reach)
    if reach in nearby.many:
        return BallCounts(degree, int(degree.max()), "neighbors")
    near, apart = nearby.within(reach)
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
    *reaches: float,
) -> Neighbors:
    """The neighbors at several reaches, from one pass over the distances.

    `blocks` are the rows of a matrix of distances, some at a time. Pairs are kept at the longest
    reach that has at most MOST_PAIRS of them; at longer ones rows are only counted.
    """
    shorter = sorted(reaches)
    reach = shorter.pop()
    near: list[Array] = []
    apart: list[Array] = []
    many: dict[float, list[int]] = {}
    pairs = 0
    for block in blocks:
        for line in block:
            for length, counts in many.items():
                counts.append(int(np.count_nonzero(line <= _limit(line, length))))
            inside = np.flatnonzero(line <= _limit(line, reach))
            # Stable: equal distances must not depend on the machine.
            order = inside[np.argsort(line[inside], kind="stable")]
            near.append(order.astype(np.int32))
            # Distances are rounded down, so equal examples may lie a little below 0.
            apart.append(np.maximum(0, line[order]))
            pairs += len(order)
        while pairs > MOST_PAIRS:
            many[reach] = [len(indices) for indices in near]
            # Below the shortest nothing is kept: distances are at least 0.
            reach = shorter.pop() if shorter else -1.0
            cut = [int(np.searchsorted(line, reach, "right")) for line in apart]
            # Copies, so that the longer lists do not stay in memory.
            near = [line[:count].copy() for line, count in zip(near, cut, strict=True)]
            apart = [line[:count].copy() for line, count in zip(apart, cut, strict=True)]
            pairs = sum(cut)
    counted = {length: np.array(counts) for length, counts in many.items()}
    return Neighbors(
        reach,
        near,
        apart,
        counted,
    )


def _limit(
    line: Array,
    reach: float,
) -> float:
    """A reach to compare distances with: of whole numbers a whole one, in half the time."""
    if line.dtype.kind == "f":
        return reach
    return int(min(reach, np.iinfo(line.dtype).max))


def _medoid(apart: Array, mean: float) -> int:
    """The largest number of points in a ball whose medoid is this point."""
    if len(apart) == 1:
        return 1
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
    linked = [np.sort(place[near[i]]) for i in order]
    around = _surroundings(linked)
    each = np.array([min(len(members), 2) for members in linked])
    for at in np.flatnonzero(each == 2).tolist():
        if len(linked[at]) > 2:  # of a pair the graph is known
            _, apart, neighbors, _ = around(at)
            each[at] = 1 + _count(neighbors, apart)
    best = 1
    calls = 0
    # The largest possible ball first: then the others end at once. Those that a place can be the
    # first of are counted when their turn may have come: of most places it never does.
    waiting = [(-bound, at, False) for at, bound in enumerate(each.tolist())]
    heapq.heapify(waiting)
    while waiting:
        bound, first, counted = heapq.heappop(waiting)
        if -bound <= best:
            break
        members, apart, _, later = around(first)
        if not counted:
            heapq.heappush(waiting, (-1 - _count(later, apart), first, True))
            continue
        stack = [([first], later)]
        while stack:
            chosen, left = stack.pop()
            # Colors fall, so once one member fails the bound, all that follow fail too.
            for other, colors in reversed(_colored(left, apart)):
                if len(chosen) + colors <= best:
                    break
                calls += 1
                if calls > CALLS:
                    return -bound, "colors", each[place]
                left ^= 1 << other
                named = [*chosen, int(members[other])]
                if fits(order[named].tolist()):
                    best = max(best, len(named))
                    stack.append((named, left & ~apart[other]))
    return best, "exact", each[place]


def _surroundings(near: list[Array]) -> Callable[[int], tuple[Array, list[int], int, int]]:
    """For a place in a graph, the graph of its neighbors, in numbers as short as they are few.

    Args:
        near: for each place its neighbors and itself, rising.

    Returns:
        For a place: the members of its graph, by member the bits of the others that it is not
        linked to, the bits of the place's neighbors, and the bits of those of higher places.
    """
    count = len(near)
    linked = np.zeros((count, (count + 7) // 8), np.uint8)
    for place, members in enumerate(near):
        line = np.zeros(count, bool)
        line[members] = True
        linked[place] = np.packbits(line, bitorder="little")
    if count <= SHORT:
        every = (1 << count) - 1
        apart = [every & bits for bits in _numbers(~linked)]

        def of_all(place: int) -> tuple[Array, list[int], int, int]:
            neighbors = every & ~apart[place] & ~(1 << place)
            later = neighbors >> place << place
            return np.arange(count), apart, neighbors, later

        return of_all

    def of_neighbors(place: int) -> tuple[Array, list[int], int, int]:
        members = near[place]
        members = members[members != place]
        byte = members >> 3
        bit = (1 << (members & 7)).astype(np.uint8)
        # Places rise with the number of neighbors, so those of one place are often near each other.
        held = linked[members, byte[0] : byte[-1] + 1]
        free = held.take(byte - byte[0], 1) & bit == 0
        neighbors = (1 << len(members)) - 1
        lower = int(np.searchsorted(members, place))
        apart = _numbers(np.packbits(free, axis=1, bitorder="little"))
        later = neighbors >> lower << lower
        return members, apart, neighbors, later

    return of_neighbors


def _numbers(bits: Array) -> list[int]:
    """Each row of packed bits as one number."""
    held = bits.tobytes()
    width = bits.shape[1]
    starts = range(0, len(held), max(1, width))
    return [int.from_bytes(held[start : start + width], "little") for start in starts]


def _count(
    left: int,
    apart: list[int],
) -> int:
    """The number of colors."""
    return sum(1 for _ in _colors(left, apart))


def _colors(left: int, apart: list[int]) -> Iterator[int]:
    """The members of each color, as bits, if a set is colored greedily."""
    while left:
        free = left
        colored = 0
        while free:
            lowest = free & -free
            colored |= lowest
            free &= apart[lowest.bit_length() - 1]
        left ^= colored
        yield colored


def _colored(left: int, apart: list[int]) -> list[tuple[int, int]]:
    """The members of a set, greedily colored, and the number of colors up to each of them."""
    return [
        (member, color)
        for color, members in enumerate(_colors(left, apart), 1)
        for member in range(members.bit_length())
        if members >> member & 1
    ]
