"""Which candidates match an example: up to a mean squared error, or to columns that may differ.

A distance d needs only d_(s+t)(x, y) <= d_s(x, z) + d_t(z, y), where s and t scale tolerances. So
two examples that one candidate matches within a level are within twice the level at twice the
tolerance. That is what bounds on the number of examples in one ball need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import spatial

from leakbound.bounds.law import Array, non_negative, positive

__all__ = ["ColumnMisses", "Distance", "GivenMetric", "SquaredError"]

ROUNDING = 1e-9
"""Rounding of squared distances, relative to the squared norms; it can only raise counts."""
BLOCK = 512
VALUES = 20_000_000
"""Number of rows, and of numbers, that are compared at a time."""
CACHED = 65_536
"""Pairs of rows whose codes are compared at a time: they stay in a core's cache."""
FEW = 40
"""Up to this many rows, comparing all of them is faster than a search."""


Fits = Callable[[list[int]], bool]
SQUARE = 2048
"""Most rows of which all squared distances are kept."""


class Distance(ABC):
    """How far candidates are from examples.

    Attributes:
        noun, axis: what one example, and the level, are called.
        squared: whether it is the mean squared error.
        columns: the number of columns or tokens, if the distance counts those that differ.
        parts: what these are called.
    """

    noun = "example"
    axis = "distance"
    squared = False
    columns: int | None = None
    parts: str = ""

    def levels(self, eta: ArrayLike) -> Array:
        """Checked levels up to which a candidate matches."""
        return np.atleast_1d(non_negative("eta", eta))

    def coded(self, rows: Array) -> Array:
        """Rows (n, N) as `among` and `fits` take them."""
        return rows

    @abstractmethod
    def paired(self, a: Array, b: Array) -> Array:
        """(n,) distances of candidates (n, N) and examples (n, N)."""

    @abstractmethod
    def apart(self, a: Array, b: Array) -> Array:
        """(A, B) distances of candidates (A, N) and examples (B, N)."""

    @abstractmethod
    def among(self, rows: Array) -> Iterator[Array]:
        """Blocks (k, n) of distances between coded examples at twice the tolerance.

        They are rounded so that counts can only grow.
        """

    def reach(self, level: float) -> float:
        """The largest distance of two examples that one candidate matches, as in `among`."""
        return 2 * level

    def mean(self, level: float) -> float:
        """The largest mean distance of examples in one ball to one of them, the medoid."""
        return self.reach(level)

    def fits(self, rows: Array, level: float) -> Fits:
        """A test whether one candidate may match all of some coded rows; False is proven."""
        return lambda chosen: True


class SquaredError(Distance):
    """The mean squared error over the values of an example."""

    axis = "mean squared error"
    squared = True

    def levels(self, eta: ArrayLike) -> Array:
        return np.atleast_1d(positive("eta", eta, infinite=True))

    def paired(self, a: Array, b: Array) -> Array:
        return np.square(a - b).mean(1)

    def apart(self, a: Array, b: Array) -> Array:
        squares = np.square(a).sum(1)[:, None] + np.square(b).sum(1)
        return (squares - 2 * a @ b.T) / a.shape[1]

    def among(self, rows: Array) -> Iterator[Array]:
        square = np.square(rows).sum(1)
        for start in range(0, len(rows), BLOCK):
            block = rows[start : start + BLOCK]
            sums = square[start : start + BLOCK, None] + square
            yield (sums * (1 - ROUNDING) - 2 * block @ rows.T) / rows.shape[1]

    def reach(self, level: float) -> float:
        return 4 * level

    def mean(self, level: float) -> float:
        """For K points in a ball of radius r, all squared distances sum to at most (K r)^2."""
        return 2 * level * (1 + ROUNDING)

    def fits(self, rows: Array, level: float) -> Fits:
        """Weights w >= 0 give a center, and w'Dw / 2 bounds the smallest squared radius below."""
        whole = _squares(rows) if len(rows) <= SQUARE else None

        def fit(chosen: list[int]) -> bool:
            at = np.array(chosen)
            apart = _squares(rows[at]) if whole is None else whole[at[:, None], at]
            for weights in _centers(apart):
                pulled = apart @ weights
                least = weights @ pulled / 2
                if least > level * (1 + ROUNDING):
                    return False
                if pulled.max() - least <= level:
                    return True
            return True  # undecided: counts as fitting, so the bound stays an upper bound

        return fit


def _squares(rows: Array) -> Array:
    return spatial.distance.cdist(rows, rows, "sqeuclidean") / rows.shape[1]


def _centers(apart: Array) -> Iterator[Array]:
    """Equal weights; then those of equal distances, without points of negative weights."""
    yield np.full(len(apart), 1 / len(apart))
    held = np.arange(len(apart))
    weights = np.zeros(len(apart))
    with suppress(np.linalg.LinAlgError):  # of equal points
        while (raw := np.linalg.solve(apart[held[:, None], held], np.ones(len(held)))).min() < 0:
            held = held[raw > raw.min()]
        weights[held] = raw / raw.sum()
        yield weights


@dataclass(frozen=True, eq=False)
class ColumnMisses(Distance):
    """The number of columns of a row, or of tokens of a sequence, that differ.

    Args:
        coded: from rows (n, N) to codes (n, columns): a column differs at a tolerance of s if its
            codes are farther apart than s.
        columns: their number.
        noun, parts: what one example is called, and its columns.

    Example:
        >>> distance = ColumnMisses(lambda rows: rows / 0.5, 2)
        >>> distance.apart(np.array([[0.0, 0.0]]), np.array([[0.4, 0.4], [0.4, 0.6]])).tolist()
        [[0, 1]]
    """

    coded: Callable[[Array], Array]  # type: ignore[assignment]
    columns: int
    noun: str = "row"
    parts: str = "columns"

    @property
    def axis(self) -> str:  # type: ignore[override]
        """The level: how many may differ."""
        return f"{self.parts} that may differ"

    def paired(self, a: Array, b: Array) -> Array:
        # Written so that NaN counts as a column that differs.
        return (~(np.abs(self.coded(a) - self.coded(b)) <= 1)).sum(1)

    def apart(self, a: Array, b: Array) -> Array:
        return np.concatenate(list(_misses(self.coded(a), self.coded(b), 1.0)))

    def among(self, rows: Array) -> Iterator[Array]:
        return _misses(rows, rows, 2 * (1 + ROUNDING))

    def mean(self, level: float) -> float:
        """If f of K rows match in a column, at most K^2 - f^2 pairs differ there, and K - f sums
        to at most K r over the m columns. The squares of K - f then sum to at least (K r)^2 / m.
        """
        return level * (2 - level / self.columns) * (1 + ROUNDING)

    def fits(self, rows: Array, level: float) -> Fits:
        """In no column does one value match more than the rows in one window of two tolerances."""

        def fit(chosen: list[int]) -> bool:
            missed = len(chosen) * self.columns - int(self.widest(rows[chosen]).sum())
            return missed <= level * len(chosen)

        return fit

    def widest(self, rows: Array) -> Array:
        """(columns,) the most coded rows that one value matches, for each column."""
        rising = np.sort(rows, 0)
        wide = 2 * (1 + ROUNDING)
        if len(rows) <= FEW:
            above = rising - rising[:, None]
            return ((above >= 0) & (above <= wide)).sum(1).max(0)
        ends = [np.searchsorted(column, column + wide, "right") for column in rising.T]
        return np.array([(end - np.arange(len(rows))).max() for end in ends])


@dataclass(frozen=True, eq=False)
class GivenMetric(Distance):
    """Any metric, such as the error on the worst channel of a series.

    Args:
        of: distances of rows (..., N) that broadcast.
        noun: what one example is called.
    """

    of: Callable[[Array, Array], Array]
    noun: str = "example"

    def paired(self, a: Array, b: Array) -> Array:
        return self.of(a, b)

    def apart(self, a: Array, b: Array) -> Array:
        return np.concatenate(list(self._blocks(a, b)))

    def among(self, rows: Array) -> Iterator[Array]:
        for block in self._blocks(rows, rows):
            yield block * (1 - ROUNDING)

    def _blocks(self, a: Array, b: Array) -> Iterator[Array]:
        step = max(1, VALUES // max(1, b.size))
        for start in range(0, len(a), step):
            yield self.of(a[start : start + step, None], b[None])


def _misses(
    a: Array,
    b: Array,
    scale: float,
) -> Iterator[Array]:
    """Blocks (k, B) of how many of the codes (A, m) and (B, m) are farther apart than the scale.

    In each column the codes that match one code follow each other in sorted order. So small whole
    numbers are compared: twenty times faster than distances of floats, with the same result. Eight
    columns of two values are compared at a time.
    """
    if len(a) * len(b) <= FEW**2:
        yield (~(np.abs(a[:, None] - b) <= scale)).sum(-1, dtype=np.uint16)
        return
    columns = [_ranked(codes, others, scale) for codes, others in zip(a.T, b.T, strict=True)]
    small = np.min_scalar_type(len(columns))  # adding bytes to bytes is fastest
    flags = [column[:2] for column in columns if _is_flag(*column)]
    columns = [column for column in columns if not _is_flag(*column)]
    packed = [_packed(flags[start : start + 8]) for start in range(0, len(flags), 8)]
    rows = max(1, CACHED // len(b))
    for start in range(0, len(a), rows):
        part = slice(start, start + rows)
        misses = np.zeros((len(a[part]), len(b)), small)
        for ranks, first, count in columns:
            # Below `first` the difference wraps around, and so is large.
            misses += (ranks - first[part, None] >= count[part, None]).view(np.uint8)
        for others, own in packed:
            misses += np.bitwise_count(others ^ own[part, None])
        yield misses


def _is_flag(
    ranks: Array,
    first: Array,
    count: Array,
) -> bool:
    """Whether a column has two values, and each code matches one of them."""
    return bool((ranks <= 1).all() and (count == 1).all())


def _packed(flags: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Up to eight columns of two values as bits, of the others and of the codes."""
    others = np.packbits([ranks for ranks, _ in flags], axis=0)[0]
    own = np.packbits([first for _, first in flags], axis=0)[0]
    return others, own


def _ranked(
    codes: Array,
    others: Array,
    scale: float,
) -> tuple[Array, Array, Array]:
    """The ranks of the others, and the first rank and the number of ranks that match each code."""
    values, ranks = np.unique(others, return_inverse=True)

    def least(beyond: Callable[[Array], Array]) -> Array:
        """(A,) the lowest rank whose value is `beyond` in its difference to a code."""
        low = np.zeros(len(codes), int)
        high = np.full(len(codes), len(values))
        while (low < high).any():
            middle = (low + high) // 2
            # Differences are rounded as in a comparison of all pairs. Those of NaN are beyond.
            found = beyond(values[np.minimum(middle, len(values) - 1)] - codes)
            high = np.where(found, np.minimum(middle, high), high)
            low = np.where(found, low, np.minimum(middle + 1, high))
        return low

    first = least(lambda apart: ~(apart < -scale))
    count = least(lambda apart: ~(apart <= scale)) - first
    # The smallest type: twice as many are compared at a time.
    kind = np.min_scalar_type(len(values))
    return ranks.reshape(-1).astype(kind), first.astype(kind), count.astype(kind)
