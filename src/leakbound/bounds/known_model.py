"""Bound on all attackers who see the update of one known model from an honest server.

The server sends a model as it is. The update shows y = g + s z in units of the clip norm: g is an
example's clipped gradient, z is standard normal and s is the noise multiplier. The other examples
of the batch count as known. If the example is one of n equally likely public ones, the best
attacker chooses the ball of the criterion's radius with the most posterior mass. Their probability
of success, Z / n, needs only the inner products of the gradients. Z is a self-bounding function of
the public examples, so it also limits the success on new ones from the same distribution.

If a model's gradients of two examples hardly differ, the update hardly distinguishes them. Bounds
for any model (`counting`) cannot use this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import linalg, sparse

from leakbound.bounds.balls import counts_of, neighbors
from leakbound.bounds.bounded_mean import upper_limit
from leakbound.bounds.counting import CONFIDENCE, self_bounding_limit
from leakbound.bounds.distances import SquaredError
from leakbound.bounds.law import Array, non_negative, positive, probability, single, whole
from leakbound.bounds.record_priors import flat_images

__all__ = ["KnownModel"]

Indices = NDArray[np.int64]
TOO_LONG = 1e-6
"""How far a squared norm may exceed the squared clip norm, for gradients in float32."""
ROUNDING = 1e-9
BLOCK = 512
"""Number of draws at a time."""
REFINED = 12
"""Number of centers per draw whose balls get a tighter bound than their neighbors' sum."""
DENSE = 0.05
"""Share of pairs within reach above which a full matrix is faster than a sparse one."""
MOST = 5000
"""Maximum number of examples; the neighbors of more are not listed."""
QUIET = 1e-6
"""A smaller noise multiplier counts as no noise."""
LEAST_NOISE = 0.01
MOST_NOISE = 100.0
STEP = 0.01
"""Range of noise multipliers that `noise_for` searches, and their relative distance."""


@dataclass(frozen=True, eq=False)
class KnownModel:
    """What n public examples show about the updates of one model from an honest server.

    It holds if neither the model nor the clip norm was chosen from these public examples, for one
    release of an example in full. The other examples of a batch count as known.

    Args:
        examples: (n, ...), independent draws from the private examples' distribution.
        gram: (n, n) inner products of their clipped gradients, in units of the squared clip norm
            (`channel.clipped_gram`).
        labels: (n,), if the attacker knows the label.
        guesses: number of the attacker's candidates, of which one has to match.
        density: upper bound on the density of private examples relative to these.
        confidence: of a bound, over the draw of the public examples and the Monte Carlo draws; each
            uses half of the failure probability.
        draws: number of Monte Carlo draws.
        seed: of these draws.

    Raises:
        ValueError: gram has another shape, is not symmetric, or does not hold inner products of
            vectors of norm at most 1; labels has another length; a number is outside its range.

    Source: this project; Boucheron, Lugosi and Massart 2000 for the step to new examples.

    Example:
        >>> public = KnownModel(np.arange(400.0)[:, None], np.eye(400))
        >>> round(public.success_bound(1.0, eta=0.01), 2)
        0.06
    """

    examples: Array
    gram: Array
    labels: Array | None = None
    guesses: int = 1
    density: float = 1.0
    confidence: float = CONFIDENCE
    draws: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        rows = flat_images(self.examples)
        if len(rows) > MOST:
            raise ValueError(f"examples holds {len(rows)}; give at most {MOST}")
        object.__setattr__(self, "examples", rows)
        object.__setattr__(self, "gram", _checked(self.gram, len(rows)))
        if self.labels is not None:
            labels = np.asarray(self.labels).reshape(-1)
            if len(labels) != len(rows):
                raise ValueError(f"labels holds {len(labels)}; give one for each of {len(rows)}")
            object.__setattr__(self, "labels", labels)
        single(whole, guesses=self.guesses)
        single(probability, confidence=self.confidence)
        single(partial(whole, least=2), draws=self.draws)
        single(partial(whole, least=0), seed=self.seed)
        object.__setattr__(self, "_kept", {})

    @property
    def n(self) -> int:
        """Number of independent public examples."""
        return len(self.examples)

    @property
    def name(self) -> str:
        """What the bound rests on, as text."""
        known = "labels known" if self.labels is not None else "labels not known"
        sure = f"{self.confidence:.0%} confidence"
        return f"{self.n} public examples and this model's gradients, {sure}, {known}"

    def success_bound(self, noise_multiplier: float, eta: float) -> float:
        """Upper bound on any attacker's success on one release, averaged over new examples.

        Args:
            noise_multiplier: s, noise standard deviation / clip norm; 0: no noise, bound 1.
            eta: mean squared error up to which an example counts as reconstructed.

        Example:
            >>> public = KnownModel(np.arange(400.0)[:, None], np.eye(400))
            >>> [round(public.success_bound(s, eta=0.01), 2) for s in (0.0, 0.5, 2.0)]
            [1.0, 0.25, 0.03]
        """
        noise = single(non_negative, noise_multiplier=noise_multiplier)
        return self._fresh(noise, single(positive, eta=eta), 1, 0)

    def noise_for(self, gamma: float, eta: float) -> float:
        """The smallest noise multiplier found whose `success_bound` is at most gamma, to 1 %.

        The search halves a fixed grid. Each step has separate Monte Carlo draws and an equal part
        of their failure probability, so the statement holds at the resulting noise for every path
        of the search. The confidence over the public examples is not divided: success falls with
        the noise for every sample.

        Args:
            gamma: the accepted probability of a reconstruction.
            eta: mean squared error up to which an example counts as reconstructed.

        Returns:
            A noise multiplier from 0.01 to 100. Other draws change it by a few percent.

        Raises:
            ValueError: the bound is above gamma at a noise multiplier of 100.

        Example:
            >>> public = KnownModel(np.arange(100.0)[:, None], np.eye(100))
            >>> 0.95 < public.noise_for(0.2, eta=0.01) < 0.97
            True
        """
        wanted = single(probability, gamma=gamma)
        level = single(positive, eta=eta)
        last = math.ceil(math.log(MOST_NOISE / LEAST_NOISE) / math.log1p(STEP))
        grid = np.geomspace(LEAST_NOISE, MOST_NOISE, last + 1)
        looks = 1 + math.ceil(math.log2(last + 1))
        least = self._fresh(MOST_NOISE, level, looks, 1)
        if least > wanted:
            raise ValueError(
                f"gamma is {gamma:g}; {self.name} give at least {least:.3g} at a noise multiplier "
                f"of {MOST_NOISE:g}; give a larger gamma, or more public examples"
            )
        # the bound holds at high
        low = -1
        high = last
        for look in range(2, looks + 1):
            if high - low == 1:
                break
            middle = (low + high) // 2
            met = self._fresh(float(grid[middle]), level, looks, look) <= wanted
            low, high = (low, middle) if met else (middle, high)
        return float(grid[high])

    def _fresh(
        self,
        noise: float,
        level: float,
        looks: int,
        look: int,
    ) -> float:
        """The bound for new examples, with one of `looks` parts of the failure probability."""
        if noise < QUIET:
            return 1.0
        half = (1 - self.confidence) / 2
        seen = self.n * self._bayes(noise, level, half / looks, look)[1]
        limit = self_bounding_limit(seen, confidence=1 - half) / self.n
        return min(1.0, self.density * limit)

    def _bayes(
        self,
        noise: float,
        level: float,
        tail: float,
        look: int,
    ) -> tuple[float, float]:
        """If the example is one of these: the success of attackers whose candidates are public
        examples, by Monte Carlo, and an upper limit on every attacker's, Z / n.
        """
        if noise < QUIET:
            return self._bayes(QUIET, level, tail, look)[0], 1.0
        if math.isinf(noise):
            exact = [
                (len(group.place), group.masses(group.prior, self.guesses))
                for group in self._at(level)
            ]
            low, high = (sum(size * float(masses[k][0]) for size, masses in exact) for k in (0, 1))
            return low / self.n, min(1.0, high / self.n * (1 + ROUNDING))
        attained, most = self._values(noise, level, look)
        return float(attained.mean()), _limit(most, tail)

    def _values(
        self,
        noise: float,
        level: float,
        look: int,
    ) -> tuple[Array, Array]:
        """(draws,) each, independent: posterior mass of the best example's ball; of any, at most.

        The example is drawn uniformly, then its release. Known labels leave the class's examples.
        """
        source = np.random.default_rng((self.seed, look))
        chosen = source.integers(0, self.n, self.draws)
        low = np.empty(self.draws)
        high = np.empty(self.draws)
        for group in self._at(level):
            drawn = np.flatnonzero(np.isin(chosen, group.place))
            if not len(drawn):  # a class of few examples
                continue
            for part in np.split(drawn, range(BLOCK, len(drawn), BLOCK)):
                among = np.searchsorted(group.place, chosen[part])
                weights = group.posterior(among, noise, source)
                low[part], high[part] = group.masses(weights, self.guesses)
        return low, high

    @cached_property
    def _groups(self) -> list[tuple[Indices, Array]]:
        """The groups of examples that the attacker must distinguish; a root of their products."""
        places = [np.arange(self.n)]
        if self.labels is not None:
            places = [np.flatnonzero(self.labels == label) for label in np.unique(self.labels)]
        return [(place, _root(self.gram[np.ix_(place, place)])) for place in places]

    def _at(self, level: float) -> list[_Group]:
        kept: dict[float, list[_Group]] = self._kept  # type: ignore[attr-defined]
        if level not in kept:
            kept.clear()  # one threshold at a time: a group holds a matrix
            kept[level] = [
                _group(place, self.examples[place], root, level) for place, root in self._groups
            ]
        return kept[level]


@dataclass(frozen=True, eq=False)
class _Group:
    """The examples that the attacker must distinguish, at one threshold.

    Attributes:
        place: (m,) their indices among all examples, rising.
        root: (m, m) lower triangle L with the products of gradients L L'.
        each: (m,) no ball that holds example i holds more examples than `each[i]`.
        reached: (m, m) whether an example matches another one as a candidate.
        linked: (m, m) whether one ball may hold both.
        near: (m, k) the examples that one ball may hold with this one, padded with m.
    """

    place: Indices
    root: Array
    each: Indices
    reached: Array
    linked: Array
    near: Indices

    @cached_property
    def gram(self) -> Array:
        return self.root @ self.root.T

    @property
    def prior(self) -> Array:
        """(1, m) without an update."""
        return np.full((1, len(self.place)), 1 / len(self.place))

    def posterior(
        self,
        chosen: Indices,
        noise: float,
        source: np.random.Generator,
    ) -> Array:
        """(T, m) posterior masses, each for a release drawn from the chosen example (T,)."""
        normals = source.standard_normal((len(chosen), len(self.place)))
        # The root is triangular: half the work of a full product.
        mixed = linalg.blas.dtrmm(1.0, self.root, normals.T, lower=1).T
        # ln p(y | j) = (y.g_j - |g_j|^2 / 2) / s^2 + the same for all j, y.g_j = G_ij + s (L z)_j
        logs = (self.gram[chosen] - self.gram.diagonal() / 2) / noise**2 + mixed / noise
        weights = np.exp(logs - logs.max(1, keepdims=True))
        return weights / weights.sum(1, keepdims=True)

    def masses(self, weights: Array, guesses: int) -> tuple[Array, Array]:
        """(T,) each: the mass that candidate examples attain, and a bound for any candidate."""
        low = (self.reached @ weights.T).max(0)
        high = self._heaviest(weights)
        if guesses == 1:
            return low, high
        held = min(guesses * int(self.each.max()), len(self.place))
        ranked = -np.partition(
            -weights,
            (min(guesses, len(self.place)) - 1, held - 1),
            axis=1,
        )
        low = np.maximum(low, ranked[:, :guesses].sum(1))
        return low, np.minimum(1.0, np.minimum(guesses * high, ranked[:, :held].sum(1)))

    def _heaviest(self, weights: Array) -> Array:
        """(T,) an upper bound on the mass of any ball.

        If example i is the heaviest in a ball, the others are at most d_i - 1 of its neighbors and
        each weigh at most w_i. So their sum is below d_i w_i and below the sum of all neighbors.
        Only centers where both are large need the sharp bound. Those that are left after some
        rounds get the rough bound.
        """
        rough = np.minimum(self.each * weights, (self.linked @ weights.T).T)
        padded = np.concatenate([weights, np.zeros((len(weights), 1))], 1)
        best = np.zeros(len(weights))
        open_ = np.arange(len(weights))
        for _ in range(REFINED):
            center = rough[open_].argmax(1)
            best[open_] = np.maximum(best[open_], self._sharp(padded, open_, center))
            # This center has its sharp bound now.
            rough[open_, center] = 0.0
            open_ = open_[rough[open_].max(1) > best[open_]]
            if not len(open_):
                break
        return np.maximum(best, rough.max(1))

    def _sharp(
        self,
        padded: Array,
        draw: Indices,
        center: Indices,
    ) -> Array:
        """Upper bound, by draw, on the mass of a ball whose heaviest example is the center."""
        most = self.each[center]
        masses = padded[draw[:, None], self.near[center]]
        # A heavier example cannot lie in a ball whose heaviest one is the center.
        masses = np.where(masses <= padded[draw, center][:, None], masses, 0.0)
        largest = int(most.max())
        if largest < masses.shape[1]:
            masses = -np.partition(-masses, largest - 1, axis=1)[:, :largest]
        masses = np.cumsum(-np.sort(-masses, axis=1), axis=1)
        return masses[np.arange(len(masses)), np.minimum(most, masses.shape[1]) - 1]


def _group(
    place: Indices,
    rows: Array,
    root: Array,
    level: float,
) -> _Group:
    distance = SquaredError()
    nearby = neighbors(distance.among(rows), distance.reach(level), level)
    near = nearby.near
    each = counts_of(rows, level, nearby, distance).each.astype(np.int64)
    table = np.full((len(rows), max(map(len, near))), len(rows))
    for line, indices in zip(table, near, strict=True):
        line[: len(indices)] = indices
    reached, _ = nearby.within(level)
    return _Group(place, root, each, _matrix(reached), _matrix(near), table)


def _matrix(near: list[Array]) -> Array:
    """(m, m) ones at the pairs; sparse if there are few."""
    sizes = np.array([len(indices) for indices in near])
    columns = np.concatenate(near)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    shape = len(near), len(near)
    matrix = sparse.csr_matrix((np.ones(len(columns)), columns, starts), shape=shape)
    few = sizes.sum() < DENSE * len(near) ** 2
    return cast(Array, matrix if few else matrix.toarray())


def _root(gram: Array) -> Array:
    """The lower triangle L with L L' = gram, plus the smallest diagonal that rounding needs.

    The added diagonal is a separate coordinate for each example: it can only help the attacker.
    """
    # The rounding error of eigenvalues grows with n.
    added = 4 * np.finfo(float).eps * len(gram)
    while added <= TOO_LONG:
        try:
            return np.linalg.cholesky(gram + added * np.eye(len(gram)))
        except np.linalg.LinAlgError:
            added *= 10
    raise ValueError("gram has eigenvalues below 0; give inner products of vectors")


def _checked(gram: ArrayLike, n: int) -> Array:
    matrix = np.asarray(gram, np.float64)
    if matrix.shape != (n, n):
        raise ValueError(f"gram has shape {matrix.shape}; give ({n}, {n}) for {n} examples")
    if not np.isfinite(matrix).all() or not np.allclose(matrix, matrix.T, rtol=0, atol=TOO_LONG):
        raise ValueError("gram is not finite and symmetric; give inner products of vectors")
    longest = matrix.diagonal().max()
    if longest > 1 + TOO_LONG:
        raise ValueError(
            f"gram has {longest:.6g} on its diagonal; clip the gradients, and divide their "
            "products by the squared clip norm"
        )
    return (matrix + matrix.T) / 2


def _limit(values: Array, tail: float) -> float:
    """Upper confidence limit on the mean of independent values in [0, 1]."""
    kept = np.minimum(1.0, values * (1 + ROUNDING))
    return min(1.0, upper_limit(kept, 1.0, confidence=1 - tail))
