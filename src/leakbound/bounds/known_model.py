"""Bound on all attackers who see the update of one known model, for an honest server.

The server sends a model as it is, and the update shows y = g + s z in units of the clip norm: g is
an example's clipped gradient, z standard normal and s the noise multiplier. The other examples of
the batch are taken as known. If the example is one of n public ones, each as likely, the best
attacker chooses the ball of the criterion's radius that holds most of the posterior. Their
probability of success, Z / n, needs the inner products of the gradients alone. Z is a self-bounding
function of the public examples, so it also limits the success on fresh ones of the same
distribution.

A model whose gradients of two examples hardly differ hides them from each other; bounds for any
model (`counting`) cannot use that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import linalg, sparse

from leakbound.bounds.balls import counts_of, neighbors
from leakbound.bounds.bounded_mean import upper_limit
from leakbound.bounds.counting import CONFIDENCE, self_bounding_limit
from leakbound.bounds.law import Array, non_negative, positive, probability, single, whole
from leakbound.bounds.record_priors import flat_images

__all__ = ["KnownModel"]

Indices = NDArray[np.int64]
TOO_LONG = 1e-6
"""By how much a squared norm may exceed the squared clip norm, for gradients in float32."""
ROUNDING = 1e-9
BLOCK = 512
"""Draws at a time."""
REFINED = 12
"""Centers a draw whose balls are bounded more sharply than by their neighbors' sum."""
DENSE = 0.05
"""Share of pairs within reach from which a full matrix is faster than a sparse one."""
MOST = 5000
"""Examples; the neighbors of more are not listed."""
QUIET = 1e-6
"""Noise multipliers below it count as no noise at all."""
LEAST_NOISE, MOST_NOISE, STEP = 0.01, 100.0, 0.01
"""The noise multipliers that `noise_for` looks at, and their relative distance."""


@dataclass(frozen=True, eq=False)
class KnownModel:
    """What n public examples show of the updates of one model, as an honest server sends it.

    It holds if neither the model nor the clip norm was chosen from these public examples, for one
    release of an example in full: in a batch the other examples are taken as known.

    Args:
        examples: (n, ...), drawn independently and like the private ones.
        gram: (n, n) inner products of their clipped gradients, in units of the squared clip norm
            (`channel.clipped_gram`).
        labels: (n,), where the attacker knows the label.
        guesses: of the attacker, of which one has to match.
        density: private examples lie at most so many times as densely as these.
        confidence: with which a bound holds, over the draw of the public examples and the Monte
            Carlo draws; each gets half of what it leaves.
        draws: Monte Carlo draws.
        seed: of these draws.

    Raises:
        ValueError: a matrix of another shape, that is not symmetric, or no matrix of inner products
            of vectors of norm 1 at most; labels of another number; numbers out of their range.

    Source: this project; Boucheron, Lugosi and Massart 2000 for the step to fresh examples.

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
        single("guesses", whole("guesses", self.guesses))
        single("confidence", probability("confidence", self.confidence))
        single("draws", whole("draws", self.draws, 2))
        single("seed", whole("seed", self.seed, 0))
        object.__setattr__(self, "_kept", {})

    @property
    def n(self) -> int:
        """Independent public examples."""
        return len(self.examples)

    @property
    def name(self) -> str:
        """What it rests on, for people."""
        known = "labels known" if self.labels is not None else "labels not known"
        sure = f"{self.confidence:.0%} confidence"
        return f"{self.n} public examples and this model's gradients, {sure}, {known}"

    def bayes(self, noise_multiplier: float, eta: float) -> tuple[float, float]:
        """The best attacker's success if the example is one of these, each as likely.

        Args:
            noise_multiplier: s, noise standard deviation / clip norm, above 0; infinite: no update.
            eta: mean squared error from which an example counts as reconstructed.

        Returns:
            What the attacker attains who guesses public examples, as a Monte Carlo estimate; and
            an upper limit on every attacker's success, at a confidence of 1 - (1 - confidence) / 2
            over the draws.

        Example:
            >>> low, high = KnownModel(np.arange(400.0)[:, None], np.eye(400)).bayes(0.5, eta=0.01)
            >>> round(low, 2), round(high, 2)
            (0.18, 0.19)
        """
        noise = positive("noise_multiplier", noise_multiplier, infinite=True)
        tail = (1 - self.confidence) / 2
        return self._bayes(single("noise_multiplier", noise), _level(eta), tail, 0)

    def success_bound(self, noise_multiplier: float, eta: float) -> float:
        """No attacker exceeds it on one release, on average over fresh examples.

        Args:
            noise_multiplier: s, noise standard deviation / clip norm; 0: no noise, bound 1.
            eta: mean squared error from which an example counts as reconstructed.

        Example:
            >>> public = KnownModel(np.arange(400.0)[:, None], np.eye(400))
            >>> [round(public.success_bound(s, eta=0.01), 2) for s in (0.0, 0.5, 2.0)]
            [1.0, 0.25, 0.03]
        """
        noise, level = non_negative("noise_multiplier", noise_multiplier), _level(eta)
        return self._fresh(single("noise_multiplier", noise), level, 1, 0)

    def noise_for(self, gamma: float, eta: float) -> float:
        """The least noise multiplier found whose `success_bound` is at most gamma, to 1 %.

        The search halves a fixed grid. Each step has Monte Carlo draws of its own and an equal
        part of their confidence, so the statement holds at the noise that comes out, by whatever
        steps it was found. The confidence over the public examples needs no parts: success falls
        with the noise for every sample.

        Args:
            gamma: the accepted probability of a reconstruction.
            eta: mean squared error from which an example counts as reconstructed.

        Returns:
            A noise multiplier from 0.01 to 100. With other draws it differs by a few percent.

        Raises:
            ValueError: the bound is above gamma at a noise multiplier of 100.

        Example:
            >>> public = KnownModel(np.arange(100.0)[:, None], np.eye(100))
            >>> 0.95 < public.noise_for(0.2, eta=0.01) < 0.97
            True
        """
        wanted, level = single("gamma", probability("gamma", gamma)), _level(eta)
        last = math.ceil(math.log(MOST_NOISE / LEAST_NOISE) / math.log1p(STEP))
        grid = np.geomspace(LEAST_NOISE, MOST_NOISE, last + 1)
        looks = 1 + math.ceil(math.log2(last + 1))
        least = self._fresh(MOST_NOISE, level, looks, 1)
        if least > wanted:
            raise ValueError(
                f"gamma is {gamma:g}; {self.name} give at least {least:.3g} at a noise multiplier "
                f"of {MOST_NOISE:g}; accept more, or give more public examples"
            )
        low, high = -1, last  # the bound holds at high
        for look in range(2, looks + 1):
            if high - low == 1:
                break
            middle = (low + high) // 2
            met = self._fresh(float(grid[middle]), level, looks, look) <= wanted
            low, high = (low, middle) if met else (middle, high)
        return float(grid[high])

    def _fresh(self, noise: float, level: float, looks: int, look: int) -> float:
        """The bound for fresh examples, with one part of the draws' confidence of so many looks."""
        if noise < QUIET:
            return 1.0
        half = (1 - self.confidence) / 2
        seen = self.n * self._bayes(noise, level, half / looks, look)[1]
        limit = self_bounding_limit(seen, confidence=1 - half) / self.n
        return min(1.0, self.density * limit)

    def _bayes(self, noise: float, level: float, tail: float, look: int) -> tuple[float, float]:
        """An estimate of what is attained, and an upper limit on Z / n."""
        if noise < QUIET:
            return self._bayes(QUIET, level, tail, look)[0], 1.0
        if math.isinf(noise):
            exact = [
                (len(own.place), own.masses(own.prior, self.guesses)) for own in self._at(level)
            ]
            low, high = (sum(size * float(found[k][0]) for size, found in exact) for k in (0, 1))
            return low / self.n, min(1.0, high / self.n * (1 + ROUNDING))
        attained, most = self._values(noise, level, look)
        return float(attained.mean()), _limit(most, tail)

    def _values(self, noise: float, level: float, look: int) -> tuple[Array, Array]:
        """(draws,) each, independent: posterior mass of the best example's ball; of any, at most.

        The example is drawn uniformly, then its release; known labels leave the class's examples.
        """
        source = np.random.default_rng((self.seed, look))
        chosen = source.integers(0, self.n, self.draws)
        low, high = np.empty(self.draws), np.empty(self.draws)
        for own in self._at(level):
            drawn = np.flatnonzero(np.isin(chosen, own.place))
            if not len(drawn):  # a class of few examples
                continue
            for part in np.split(drawn, range(BLOCK, len(drawn), BLOCK)):
                among = np.searchsorted(own.place, chosen[part])
                weights = own.posterior(among, noise, source)
                low[part], high[part] = own.masses(weights, self.guesses)
        return low, high

    @cached_property
    def _groups(self) -> list[tuple[Indices, Array]]:
        """Examples between which the attacker has to decide, and a root of their products."""
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
    """Examples between which the attacker has to decide, at one threshold.

    Attributes:
        place: (m,) which of all they are, rising.
        root: (m, m) lower triangle L with the products of gradients L L'.
        each: (m,) no ball that holds this example holds more.
        reached: (m, m) whether an example is matched by another as a guess.
        linked: (m, m) whether one ball may hold both.
        near: (m, k) the examples that one ball may hold with this one, filled up with m.
    """

    place: Indices
    root: Array
    each: Indices
    reached: Array
    linked: Array
    near: Indices

    @cached_property
    def gram(self) -> Array:
        return np.asarray(self.root @ self.root.T)

    @property
    def prior(self) -> Array:
        """(1, m) without an update."""
        return np.full((1, len(self.place)), 1 / len(self.place))

    def posterior(self, chosen: Indices, noise: float, source: np.random.Generator) -> Array:
        """(T, m) posterior masses, each for a release drawn from the chosen example (T,)."""
        normals = source.standard_normal((len(chosen), len(self.place)))
        mixed = linalg.blas.dtrmm(1.0, self.root, normals.T, lower=1).T
        # ln p(y | j) = (y.g_j - |g_j|^2 / 2) / s^2 + the same for all j, y.g_j = G_ij + s (L z)_j
        logs = (self.gram[chosen] - self.gram.diagonal() / 2) / noise**2 + mixed / noise
        weights = np.exp(logs - logs.max(1, keepdims=True))
        return np.asarray(weights / weights.sum(1, keepdims=True))

    def masses(self, weights: Array, guesses: int) -> tuple[Array, Array]:
        """(T,) each: the mass that guesses of examples attain, and no guesses exceed."""
        low, high = (self.reached @ weights.T).max(0), self._heaviest(weights)
        if guesses == 1:
            return low, high
        held = min(guesses * int(self.each.max()), len(self.place))
        ranked = -np.partition(-weights, (min(guesses, len(self.place)) - 1, held - 1), axis=1)
        low = np.maximum(low, ranked[:, :guesses].sum(1))
        return low, np.minimum(1.0, np.minimum(guesses * high, ranked[:, :held].sum(1)))

    def _heaviest(self, weights: Array) -> Array:
        """(T,) an upper bound on the mass of any ball.

        If example i is the heaviest in a ball, the others are among its neighbors, weigh no more
        each, and are d_i - 1 at most. That sum is below d_i w_i and below the sum of all
        neighbors, so only centers where both are large need it; of those that are left after some
        rounds, the rough bound is taken.
        """
        rough = np.minimum(self.each * weights, (self.linked @ weights.T).T)
        padded = np.concatenate([weights, np.zeros((len(weights), 1))], 1)
        best, open_ = np.zeros(len(weights)), np.arange(len(weights))
        for _ in range(REFINED):
            center = rough[open_].argmax(1)
            best[open_] = np.maximum(best[open_], self._sharp(padded, open_, center))
            rough[open_, center] = 0.0
            open_ = open_[rough[open_].max(1) > best[open_]]
            if not len(open_):
                break
        return np.asarray(np.maximum(best, rough.max(1)))

    def _sharp(self, padded: Array, draw: Indices, center: Indices) -> Array:
        """The mass of a ball whose heaviest example is the center, at most, by draw."""
        most = self.each[center]
        found = padded[draw[:, None], self.near[center]]
        found = np.where(found <= padded[draw, center][:, None], found, 0.0)
        largest = int(most.max())
        if largest < found.shape[1]:
            found = -np.partition(-found, largest - 1, axis=1)[:, :largest]
        found = np.cumsum(-np.sort(-found, axis=1), axis=1)
        return np.asarray(found[np.arange(len(found)), np.minimum(most, found.shape[1]) - 1])


def _group(place: Indices, rows: Array, root: Array, level: float) -> _Group:
    near, apart = neighbors(rows, 4 * level)
    each = counts_of(rows, level, near, apart).each.astype(np.int64)
    table = np.full((len(rows), max(map(len, near))), len(rows))
    for line, own in zip(table, near, strict=True):
        line[: len(own)] = own
    reached = neighbors(rows, level)[0]
    return _Group(place, root, each, _matrix(reached), _matrix(near), table)


def _matrix(near: list[Array]) -> Array:
    """(m, m) ones at the pairs, sparse where few are."""
    sizes = np.array([len(own) for own in near])
    columns, starts = np.concatenate(near), np.concatenate([[0], np.cumsum(sizes)])
    shape = len(near), len(near)
    found = sparse.csr_matrix((np.ones(len(columns)), columns, starts), shape=shape)
    few = sizes.sum() < DENSE * len(near) ** 2
    return cast(Array, found if few else found.toarray())


def _root(gram: Array) -> Array:
    """The lower triangle L with L L' = gram, and as little more on the diagonal as rounding needs.

    What is added is a coordinate of its own for each example: it can only help the attacker.
    """
    added = 4 * np.finfo(float).eps * len(gram)
    while added <= TOO_LONG:
        try:
            return np.linalg.cholesky(gram + added * np.eye(len(gram)))
        except np.linalg.LinAlgError:
            added *= 10
    raise ValueError("gram has eigenvalues below 0; give inner products of vectors")


def _checked(gram: ArrayLike, n: int) -> Array:
    found = np.asarray(gram, np.float64)
    if found.shape != (n, n):
        raise ValueError(f"gram has shape {found.shape}; give ({n}, {n}), as there are examples")
    if not np.isfinite(found).all() or not np.allclose(found, found.T, rtol=0, atol=TOO_LONG):
        raise ValueError("gram is not finite and symmetric; give inner products of vectors")
    longest = found.diagonal().max()
    if longest > 1 + TOO_LONG:
        raise ValueError(
            f"gram has {longest:.6g} on its diagonal; clip the gradients, and divide their "
            "products by the squared clip norm"
        )
    return np.asarray((found + found.T) / 2)


def _level(eta: float) -> float:
    return single("eta", positive("eta", eta))


def _limit(values: Array, tail: float) -> float:
    """Upper confidence limit on the mean of independent values in [0, 1]."""
    kept = np.minimum(1.0, values * (1 + ROUNDING))
    return min(1.0, upper_limit(kept, 1.0, confidence=1 - tail))
