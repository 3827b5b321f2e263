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
    sets = [
        each[start : start + PART]
        for each in _candidates(distance, NEAR * within)
        for start in range(0, len(each), PART)
    ]
    covers = np.concatenate([_errors(distance, part) <= SLACK * within for part in sets])
    every = [members for part in sets for members in part]
    chosen, shares = covering(covers, most)
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


def _candidates(distance: Array, near: float) -> Iterator[Array]:
    """The public examples (m, k) whose means are candidates, for one k after another."""
    count = len(distance)
    # Stable: copies in the data have equal distances, and the order must not depend on the machine.
    order = distance.argsort(1, kind="stable")[:, : MEANS[-1]]
    farthest = np.take_along_axis(distance, order, 1)
    yield np.arange(count)[:, None]
    for k in MEANS[1:]:
        if k <= count:
            yield order[farthest[:, k - 1] <= near, :k]
    pairs = np.argwhere(np.triu(distance <= near, 1))
    closest = distance[pairs[:, 0], pairs[:, 1]].argsort(kind="stable")
    yield pairs[closest[: PAIRS * count]]


def _errors(distance: Array, members: Array) -> Array:
    """Mean squared errors (m, n) of the means of members (m, k), from distances (n, n) alone:
    |mean - x|^2 is the mean of |x_i - x|^2 minus half the mean of |x_i - x_j|^2.
    """
    k = members.shape[1]
    # One member at a time: an array (m, k, n) would take k times the memory.
    total = sum((distance[members[:, i]] for i in range(k)), np.zeros(()))
    among = distance[members[:, :, None], members[:, None]].mean((1, 2))
    return np.asarray(total / k - among[:, None] / 2)
