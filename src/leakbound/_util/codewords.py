"""The codewords of a codebook attack: centers of balls that cover most public examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]

MEANS = (1, 2, 3, 4, 6, 8, 12)
"""Numbers of close public examples that are averaged into a candidate."""
NEAR = 10**0.5
"""Factor on the criterion's squared error within which public examples are close: 5 dB less."""
PAIRS = 10
"""Maximum number of midpoints of pairs, for each public example."""
PART = 2000
"""Number of candidates whose errors are held at once."""
SLACK = 1.15
"""A candidate covers examples within this factor times the criterion's squared error."""


def codewords(
    public: ArrayLike,
    within: float,
    most: int,
) -> tuple[Array, Array]:
    """Codewords (M, N), the best first, and the share (M,) of examples that each covers first.

    Candidates are the public examples, means of 2 to 12 close ones, and midpoints of close pairs.
    A greedy search picks the codewords that cover the most public examples, at most `most`, or
    fewer if they cover all. The first m of them are the codebook of size m.

    Shapes: `public` (n, N); `within` is the criterion's mean squared error.

    Source: this project; Fano-style codebook, greedy maximum coverage.

    Example:
        >>> words, shares = codewords([[0.0], [0.2], [1.0]], within=0.013, most=5)
        >>> words.round(3).tolist(), shares.round(3).tolist()
        ([[0.1], [1.0]], [0.667, 0.333])
    """
    rows = np.asarray(public, float)
    squares = np.square(rows).sum(1)
    # The expanded square needs no array (n, n, N), but its rounding can fall below 0.
    distance = np.maximum(0, squares[:, None] + squares - 2 * rows @ rows.T) / rows.shape[1]
    np.fill_diagonal(distance, 0)  # rounding would leave an example away from itself
    sets = list(_candidates(distance, within))
    every = [members for part, _ in sets for members in part]
    chosen, shares = covering(np.concatenate([covered for _, covered in sets]), most)
    return np.stack([rows[every[number]].mean(0) for number in chosen]), shares


def covering(covers: Array, most: int) -> tuple[list[int], Array]:
    """Candidates that cover the most examples, at most `most`, and what each covers first.

    Shapes: `covers` (candidates, n); the shares sum to 1.

    Source: greedy maximum coverage.

    Example:
        >>> chosen, shares = covering(np.array([[True, False, False], [False, True, True]]), 2)
        >>> chosen, shares.round(2).tolist()
        ([1, 0], [0.67, 0.33])
    """
    # By example: each step below sums the rows of the examples that are newly covered.
    reached = np.ascontiguousarray(covers.T)
    gain = covers.sum(1)
    left = covers.any(0)
    chosen: list[int] = []
    first: list[int] = []
    while len(chosen) < most and left.any():
        best = int(gain.argmax())
        new = reached[:, best] & left
        chosen.append(best)
        first.append(int(new.sum()))
        left &= ~new
        # Only gains from newly covered examples change; to count all again would cost a full pass.
        gain = gain - reached[new].sum(0)
    return chosen, np.array(first) / sum(first)


def _candidates(distance: Array, within: float) -> Iterator[tuple[Array, Array]]:
    """Public examples (m, k) whose means are candidates, and whether (m, n) each covers which."""
    count = len(distance)
    near = NEAR * within
    yield np.arange(count)[:, None], distance <= SLACK * within
    yield from _near_means(distance, within)
    pairs = np.argwhere(np.triu(distance <= near, 1))
    closest = pairs[_smallest(distance[pairs[:, 0], pairs[:, 1]], PAIRS * count)]
    for start in range(0, len(closest), PART):
        pair = closest[start : start + PART]
        total = distance[pair[:, 0]] + distance[pair[:, 1]]
        yield pair, _errors(distance, pair, total) <= SLACK * within


def _near_means(distance: Array, within: float) -> list[tuple[Array, Array]]:
    """The means of an example and those closest to it: the means of few first."""
    count = len(distance)
    sizes = [k for k in MEANS[1:] if k <= count]
    order = np.stack([_smallest(row, max(sizes, default=1)) for row in distance])
    farthest = np.take_along_axis(distance, order, 1)
    found: dict[int, list[tuple[Array, Array]]] = {k: [] for k in sizes}
    for start in range(0, count, PART):
        nearest = order[start : start + PART]
        away = farthest[start : start + PART]
        total = distance[nearest[:, 0]]
        for k in range(2, max(sizes, default=1) + 1):
            # Whose k-th neighbor is too far has no larger mean either.
            close = away[:, k - 1] <= NEAR * within
            nearest = nearest[close]
            away = away[close]
            total = total[close] + distance[nearest[:, k - 1]]
            if k in found:
                members = nearest[:, :k]
                covered = _errors(distance, members, total) <= SLACK * within
                found[k].append((members, covered))
    return [part for k in sizes for part in found[k]]


def _smallest(values: Array, most: int) -> Array:
    """The places of the smallest values, in their order; of equal ones the first.

    So copies in the data, whose distances are equal, have one order on every machine.
    """
    places = np.arange(len(values))
    if most < len(values):
        places = np.flatnonzero(values <= np.partition(values, most - 1)[most - 1])
    return places[values[places].argsort(kind="stable")[:most]]


def _errors(distance: Array, members: Array, total: Array) -> Array:
    """Mean squared errors (m, n) of the means of members (m, k), from distances (n, n) and their
    sums over the members: |mean - x|^2 is the mean of |x_i - x|^2 minus half the mean of
    |x_i - x_j|^2.
    """
    among = distance[members[:, :, None], members[:, None]].mean((1, 2))
    return np.asarray(total / members.shape[1] - among[:, None] / 2)
