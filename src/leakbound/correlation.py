"""Factors of noise that is correlated over rounds, and how far one unit moves what they release.

The mechanism is Y = C G + sigma Z: G (T, P) has the rounds' updates as rows, C is a public factor
and Z is white. The client or server releases G + sigma C^-1 Z, from which C gives Y back. A unit
(an example, or a client) adds u_i, |u_i| <= 1, in the rounds p_i of its pattern p.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import linalg

from leakbound import check

Array = NDArray[Any]  # of float64
Pattern = Sequence[int]
"""Rounds in which a unit takes part, from 0 on."""

MOST_ROUNDS = 2048
MOST_BYTES = 2**28
"""Largest number of rounds of a factor, and largest size of a file with one."""
FEW = 2000
DEEP = 256
"""`sensitivity` tries all patterns of a scheme if there are at most FEW, in at most DEEP rounds."""
SWEEPS = 2000
STILL = 1e-13
WORK = 10**9
TINY = 1e-12
"""Smaller diagonal entries, relative to the largest entry, count as none."""
WORDS = "none, root, tree, tree_prefixes, band:4, bisr:4, blt:0.9,0.5/0.1,0.2 or FILE.npy"


@dataclass(frozen=True)
class Scheme:
    """All patterns with at most `most` rounds that are at least `separation` apart.

    Args:
        most: the largest number of rounds of one unit; None: no limit.
        separation: the least difference of two rounds of one unit; 1: any two rounds.

    Raises:
        ValueError: a number below 1.

    Example:
        >>> Scheme(separation=4).most_of(16), Scheme(most=1).most_of(16)
        (4, 1)
    """

    most: int | None = None
    separation: int = 1

    def __post_init__(self) -> None:
        check.given(check.count, most=self.most)
        check.count(separation=self.separation)

    def most_of(self, rounds: int) -> int:
        """The largest number of rounds of a pattern among `rounds`."""
        fit = -(-rounds // self.separation)
        return fit if self.most is None else min(fit, self.most)

    def regular(self, rounds: int, start: int = 0) -> Pattern:
        """start, start + separation, ...: as many as the scheme allows."""
        return range(start, rounds, self.separation)[: self.most]

    def patterns(self, rounds: int) -> Iterator[Pattern]:
        """Every pattern to which no round can be added."""
        most = self.most_of(rounds)
        apart = self.separation

        def grow(pattern: tuple[int, ...], wide: bool) -> Iterator[Pattern]:
            start = pattern[-1] + apart if pattern else 0
            if len(pattern) == most or start >= rounds:
                yield pattern
                return
            for at in range(start, rounds):
                gap = wide or at - start >= apart  # one more round would fit: all must be used
                if gap and at + (most - len(pattern) - 1) * apart >= rounds:
                    return
                yield from grow((*pattern, at), gap)

        return grow((), False)


@dataclass(frozen=True, eq=False)
class Factor:
    """The public matrix C of a mechanism Y = C G + sigma Z over T rounds.

    Attributes:
        matrix: (n, T), n >= T, of full rank, such as a lower triangular T x T matrix, or one row
            for each node of a tree.
        name: the mechanism as `parse` reads it.

    Raises:
        ValueError: the matrix has entries that are not finite, another shape or no full rank.

    Example:
        >>> factor = Factor.parse("band:4", 16)
        >>> round(factor.sensitivity(Scheme(separation=4)), 6), round(factor.attained([0, 4]), 6)
        (2.439903, 1.725272)
    """

    matrix: Array = field(repr=False)
    name: str = "matrix"

    def __post_init__(self) -> None:
        kind = np.asarray(self.matrix).dtype
        if kind.kind not in "iuf":
            raise ValueError(f"{self.name} holds {kind}; give a matrix of numbers")
        matrix = np.array(self.matrix, dtype=np.float64)
        if matrix.ndim != 2 or not 0 < matrix.shape[1] <= min(MOST_ROUNDS, len(matrix)):
            raise ValueError(
                f"{self.name} has shape {matrix.shape}; give a matrix (n, T), n >= T, of 1 to "
                f"{MOST_ROUNDS} rounds T"
            )
        # The limit leaves room for the sums of squares in `gram`.
        if not np.isfinite(matrix).all() or np.abs(matrix).max() > 1e100:
            raise ValueError(f"{self.name} has an entry that is not finite; give finite numbers")
        if not _full_rank(matrix):
            raise ValueError(
                f"{self.name} has rank below its {matrix.shape[1]} rounds, so some rounds would "
                "have no noise; give a matrix of full rank"
            )
        # The cached properties must stay those of this matrix.
        matrix.setflags(write=False)
        object.__setattr__(self, "matrix", matrix)

    @classmethod
    def parse(cls, text: str, rounds: int) -> Factor:
        """The factor of a mechanism in words, over some rounds.

        none: independent noise. root: the Toeplitz square root of the prefix sums. band:B: its
        first B diagonals (BSR). bisr:B: the inverse of the first B diagonals of the inverse root
        (BISR). blt:THETA/OMEGA: 1, then sum_i omega_i theta_i^(t - 1) on diagonal t (BLT). tree: a
        row for each node of the binary tree (DP-FTRL). tree_prefixes: the nodes that plain online
        prefix sums reveal. A path of a .npy file: the first rounds of its matrix.

        Raises:
            ValueError: the words are not known, or do not fit the rounds.

        Source: Fichtenberger et al. 2023; Kalinin and Lampert 2024; McMahan et al. 2024; Kairouz et
        al. 2021.
        """
        check.count(rounds=rounds)
        if rounds > MOST_ROUNDS:
            raise ValueError(f"rounds is {rounds}; give at most {MOST_ROUNDS} for correlated noise")
        if text.endswith(".npy"):
            stored = cls.of_file(text)
            if stored.rounds < rounds:
                raise ValueError(f"{text} has {stored.rounds} rounds; give one of {rounds} or more")
            return stored.first(rounds)
        kind, _, rest = text.partition(":")
        try:
            return cls(_KINDS[kind](rounds, *([rest] if rest else [])), text)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"mechanism is {text!r}; give {WORDS}") from None

    @classmethod
    def of_file(cls, path: str | Path) -> Factor:
        """A factor from a NumPy file (.npy) with numbers; objects (pickles) are rejected.

        Raises:
            ValueError: the file is missing, too large, or no matrix of numbers.
        """
        try:
            if not Path(path).is_file():
                raise ValueError("it is no regular file")
            size = Path(path).stat().st_size
            if size > MOST_BYTES:
                raise ValueError(f"it has {size} bytes, more than {MOST_BYTES}")
            # mapped, because a header may name a size that the file does not have
            return cls(
                np.load(path, mmap_mode="r", allow_pickle=False),
                str(path),
            )
        except Exception as error:  # NumPy's reader of headers raises many kinds
            raise ValueError(f"{path}: {error}; give a .npy file with a matrix (n, T)") from None

    @property
    def rounds(self) -> int:
        """T."""
        return int(self.matrix.shape[1])

    def first(self, rounds: int) -> Factor:
        """What the first rounds alone release."""
        # Rows of another matrix, such as a tree, also depend on later rounds.
        part = self.triangular[:rounds, :rounds]
        return self if rounds == self.rounds else Factor(part, self.name)

    @cached_property
    def gram(self) -> Array:
        """(T, T) C^T C, on which all leakage depends."""
        return self.matrix.T @ self.matrix

    @cached_property
    def triangular(self) -> Array:
        """(T, T) the lower triangular factor of the same `gram`: the matrix itself, or rotated."""
        if _is_lower(self.matrix):
            return self.matrix
        # Reversed, because Cholesky gives L L^T, and L^T L is needed.
        return linalg.cholesky(self.gram[::-1, ::-1], lower=True).T[::-1, ::-1]

    @cached_property
    def inverse(self) -> Array:
        """(T, T) the inverse of `triangular`: the noise of round t is sigma times row t of it."""
        one = np.eye(self.rounds)
        return linalg.solve_triangular(self.triangular, one, lower=True)

    @cached_property
    def width(self) -> int:
        """The number of rounds from which on two columns are orthogonal (the band of C)."""
        return int(np.abs(np.subtract(*np.nonzero(self.gram))).max()) + 1

    @cached_property
    def falling(self) -> bool:
        """Whether C is a lower triangular Toeplitz matrix, nonnegative and decreasing."""
        row = self.matrix[:, 0]
        same = len(row) == self.rounds and bool((self.matrix == _lower(row)).all())
        return bool(same and row[-1] >= 0 and all(a >= b for a, b in pairwise(row)))

    @cached_property
    def loss(self) -> tuple[float, float]:
        """Mean squared and largest root mean squared error of the prefix sums, at sigma = 1."""
        squares = (np.cumsum(self.inverse, 0) ** 2).sum(1)
        return float(squares.mean()), math.sqrt(squares.max())

    def attained(self, pattern: Pattern) -> float:
        """|C p|: what a unit moves Y by if it adds the same vector in every round of a pattern."""
        return math.sqrt(self._part(pattern).sum())

    def sensitivity(self, participation: Pattern | Scheme) -> float:
        """Delta: the most that a unit moves Y by, over all its vectors and patterns, rounded up.

        It is exact if the columns of C have no negative products, if the patterns of a scheme keep
        them disjoint, or, up to the certificate of `squared_sensitivity`, if patterns are few.
        """
        if not isinstance(participation, Scheme):
            return math.sqrt(squared_sensitivity(self._part(participation)))
        scheme = participation
        # For falling columns the earliest regular pattern is the worst (Kalinin and Lampert 2024).
        if self.falling or scheme.most_of(self.rounds) == self.rounds:
            return self.sensitivity(scheme.regular(self.rounds))
        if self.width <= scheme.separation:
            return math.sqrt(self._largest(np.diag(self.gram)[None], scheme)[0])
        few = self._few(scheme)
        if few is None:
            return math.sqrt(self._rows_bound(scheme))
        best = 0.0
        for loose, pattern in few:
            if loose <= best:  # no later pattern has a larger bound
                break
            best = max(best, squared_sensitivity(self._part(pattern)))
        return math.sqrt(best)

    def worst(self, scheme: Scheme) -> Pattern:
        """The pattern with the largest |C p|; of very many patterns, the best regular one."""
        few = None if self.falling else self._few(scheme)
        if few is not None:
            return max((pattern for _, pattern in few), key=self.attained)
        starts = range(min(scheme.separation, self.rounds))
        return max((scheme.regular(self.rounds, start) for start in starts), key=self.attained)

    def weights(self, pattern: Pattern) -> Array:
        """(T,) weights on the releases whose sum is the best estimate of the same vector."""
        part = self.gram[:, list(pattern)].sum(1)
        return part / self.attained(pattern) ** 2

    def _part(self, pattern: Pattern) -> Array:
        places = [int(at) for at in pattern]
        if not places or {*places} - {*range(self.rounds)} or len({*places}) < len(places):
            raise ValueError(
                f"pattern is {places}; give different rounds from 0 to {self.rounds - 1}"
            )
        return self.gram[np.ix_(places, places)]

    def _few(self, scheme: Scheme) -> list[tuple[float, Pattern]] | None:
        """All patterns, those with the largest sum |Gamma| first; None if they are too many."""
        if self.rounds > DEEP and scheme.most_of(self.rounds) > 1:
            return None
        patterns = list(islice(scheme.patterns(self.rounds), FEW + 1))
        if len(patterns) > FEW:
            return None
        rows = [(float(np.abs(self._part(pattern)).sum()), pattern) for pattern in patterns]
        return sorted(rows, key=lambda row: -row[0])

    def _rows_bound(self, scheme: Scheme) -> float:
        """An upper bound on sum |Gamma_ij| over a scheme's patterns: each row at its worst."""
        size = np.abs(self.gram)
        places = np.arange(self.rounds)
        near = np.abs(np.subtract.outer(places, places)) < scheme.separation
        rows = np.diag(size).copy()
        if scheme.most != 1:
            rest = replace(scheme, most=None if scheme.most is None else scheme.most - 1)
            rows += self._largest(np.where(near, 0.0, size), rest)
        return float(self._largest(rows[None], scheme)[0])

    def _largest(self, weights: Array, scheme: Scheme) -> Array:
        """(m,) the largest sum of nonnegative weights (m, T) over a scheme's patterns."""
        most = scheme.most_of(self.rounds)
        apart = scheme.separation
        counted = most < -(-self.rounds // apart)
        before = [np.zeros((len(weights), most + 1 if counted else 1))]
        for at in range(self.rounds):
            earlier = before[max(0, at + 1 - apart)]
            if counted:
                earlier = np.concatenate([np.full((len(weights), 1), -np.inf), earlier[:, :-1]], 1)
            before.append(np.maximum(before[-1], earlier + weights[:, at, None]))
            if at >= apart:
                before[at - apart] = before[0][:0]  # no longer needed
        return before[-1].max(1)


def squared_sensitivity(gram: ArrayLike) -> float:
    """The most of sum_ij Gamma_ij <u_i, u_j> over vectors with |u_i| <= 1, rounded up.

    Gamma (k, k) is C^T C on a pattern. With Gamma >= 0 it is the sum of Gamma, at equal u_i.
    Otherwise it is max tr(Gamma S) over correlation matrices S. Coordinate ascent finds S. The
    result is the dual bound sum D for a diagonal D with D - Gamma positive semidefinite, or
    sum |Gamma_ij| if that is less: it holds even if the ascent did not converge.

    Raises:
        ValueError: Gamma is not square, symmetric and finite.

    Source: Choquette-Choo et al. 2023 (several participations); Goemans and Williamson 1995 (the
    relaxation, which is exact for vectors).

    Example:
        >>> round(squared_sensitivity([[1, -0.5, -0.5], [-0.5, 1, -0.5], [-0.5, -0.5, 1]]), 6)
        4.5
    """
    part = np.asarray(gram, dtype=np.float64)
    square = part.ndim == 2 and part.shape[0] == part.shape[1] and part.size > 0
    if not square or not np.isfinite(part).all() or not np.allclose(part, part.T):
        raise ValueError(f"gram has shape {part.shape}; give a finite, symmetric matrix (k, k)")
    loose = float(np.abs(part).sum())
    if (part >= 0).all():
        return loose
    count = len(part)
    # A solution of this rank exists (Barvinok 1995; Pataki 1998).
    draws = np.random.default_rng(0).standard_normal((count, int(np.sqrt(2 * count)) + 2))
    unit = draws / np.linalg.norm(draws, axis=1, keepdims=True)
    value = -np.inf
    for _ in range(min(SWEEPS, max(1, WORK // count**3))):  # the dual holds after any number
        for i in range(count):
            pull = part[i] @ unit - part[i, i] * unit[i]
            length = float(np.linalg.norm(pull))
            unit[i] = pull / length if length > 0 else unit[i]
        before = value
        value = float((unit * (part @ unit)).sum())
        if value - before <= STILL * loose:
            break
    dual = (unit * (part @ unit)).sum(1)
    least = float(np.linalg.eigvalsh(np.diag(dual) - part)[0])
    rounding = 1e-15 * count * loose
    # Raising each entry by the negative eigenvalue makes the dual feasible.
    return min(loose, float(dual.sum()) + count * (max(0.0, -least) + rounding))


def _bisr(rounds: int, width: str) -> Array:
    first = np.eye(rounds)[0]
    return _lower(
        linalg.solve_triangular(
            _lower(_power(rounds, 0.5, width)),
            first,
            lower=True,
        )
    )


def _blt(rounds: int, numbers: str) -> Array:
    theta, omega = (np.array([float(v) for v in part.split(",")]) for part in numbers.split("/"))
    if np.abs(theta).max() > 1 or theta.shape != omega.shape:
        raise ValueError(numbers)
    with np.errstate(over="ignore", invalid="ignore"):  # `Factor` rejects what is not finite
        return _lower(np.concatenate([[1.0], omega @ theta[:, None] ** np.arange(rounds - 1)]))


def _tree(rounds: int) -> Array:
    full = 1 << (rounds - 1).bit_length()  # other numbers of rounds are a part of the next power
    levels = [np.kron(np.eye(full >> s), np.ones(1 << s)) for s in range(full.bit_length())]
    nodes = np.concatenate(levels)[:, :rounds]
    return nodes[nodes.any(1)]


def _tree_prefixes(rounds: int) -> Array:
    """Row t is the node of the tree that ends in round t."""
    ends = np.arange(1, rounds + 1)[:, None]
    places = np.arange(rounds)
    return ((places < ends) & (places >= ends - (ends & -ends))) * 1.0


_KINDS: dict[str, Any] = {
    "none": np.eye,
    "root": lambda rounds: _lower(_power(rounds, -0.5)),
    "band": lambda rounds, width: _lower(_power(rounds, -0.5, width)),
    "bisr": _bisr,
    "blt": _blt,
    "tree": _tree,
    "tree_prefixes": _tree_prefixes,
}


def _power(
    rounds: int,
    power: float,
    width: str = "",
) -> Array:
    """The first coefficients of (1 - x)^power, up to `width` of them and then zeros."""
    most = int(width or rounds)
    check.count(width=most)
    steps = np.arange(1, rounds)
    row = np.concatenate([[1.0], np.cumprod((steps - 1 - power) / steps)])
    return row * (np.arange(rounds) < most)


def _lower(row: Array) -> Array:
    return linalg.toeplitz(row, np.zeros(len(row)))


def _is_lower(matrix: Array) -> bool:
    return len(matrix) == matrix.shape[1] and not np.triu(matrix, 1).any()


def _full_rank(matrix: Array) -> bool:
    if _is_lower(matrix):
        return bool(np.abs(np.diag(matrix)).min() > TINY * np.abs(matrix).max())
    try:
        root = np.diag(linalg.cholesky(matrix.T @ matrix))
    except linalg.LinAlgError:
        return False
    # Forming the product squares the condition number.
    return bool(root.min() > TINY**0.5 * root.max())
