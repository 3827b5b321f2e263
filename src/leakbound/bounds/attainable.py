"""Lower bounds on what known attacks attain on examples like the public ones.

A malicious server builds its attack from one part of the public examples. Its success is counted
on the other part, so the confidence limits refer to the same data as a bound from a
`PublicSample`. Two attacks are counted: codebooks of several sizes, and the best linear estimator
behind a linear trap. The prior-only baselines are the mean and a random codeword.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from leakbound._util.codewords import codewords, covering
from leakbound.bounds import codebook
from leakbound.bounds.counting import CONFIDENCE, PublicSample, anchors, count_least
from leakbound.bounds.distances import Distance, SquaredError
from leakbound.bounds.law import Array, probability, single
from leakbound.bounds.record_priors import flat_images

__all__ = ["Attainable", "Reached"]

FEWEST = 8
BUILT = 2000
"""Maximum number of examples from which attacks are built; the others are counted."""
SIZES = tuple(2**power for power in range(11))
"""Sizes of the codebooks that are counted, besides the largest one (at most the last size)."""
DIRECTIONS = 150
"""Leading directions that one of the linear layers keeps; the other keeps all, and the norms."""
LAYERS = 2
CODEBOOK = "codebook"
LINEAR = "linear estimator"


@dataclass(frozen=True, eq=False)
class Reached:
    """Lower confidence limits at several thresholds; they hold jointly.

    Attributes:
        success: (n,) of the best attack.
        baseline: (n,) of the best prior-only baseline.
        attack: the best attack at each threshold.
    """

    success: Array
    baseline: Array
    attack: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Attainable:
    """The success that a malicious server's attacks attain on examples like these.

    Args:
        examples: (n, ...), independent draws from the private examples' distribution; 8 or more.
        confidence: of every lower limit, over the draw of the examples.
        thinness: lower bound on the density of private examples relative to these.
        distance: which candidates match, as in `PublicSample`. Codewords of others than the mean
            squared error are examples.
        guesses: number of candidates of the prior-only baseline, of which one has to match: the
            batch.

    Assumptions: the gradient is clipped per example, the noise is Gaussian, and the other examples
    of the batch are removed or known. The attacks do not use labels.

    Raises:
        ValueError: fewer than 8 examples, or values that are not finite.

    Source: this project; docs/risk.md.

    Example:
        >>> rows = np.random.default_rng(0).random((400, 2))
        >>> found = Attainable(rows).success([(1.0, 0.2)], 0.005)
        >>> found.attack, found.success.round(2).tolist(), found.baseline.round(2).tolist()
        (('codebook',), [0.7], [0.03])
    """

    examples: Array
    confidence: float = CONFIDENCE
    thinness: float = 1.0
    distance: Distance = field(default_factory=SquaredError)
    guesses: int = 1

    @staticmethod
    def of(sample: PublicSample) -> Attainable | None:
        """Attacks on the examples of a sample; None if it has fewer than 8."""
        if sample.n < FEWEST:
            return None
        return Attainable(
            sample.examples,
            sample.confidence,
            sample.thinness,
            sample.distance,
            sample.guesses,
        )

    def __post_init__(self) -> None:
        rows = flat_images(self.examples)
        if len(rows) < FEWEST:
            raise ValueError(f"examples holds {len(rows)}; give at least {FEWEST}")
        single(probability, confidence=self.confidence)
        # Random order, because data are often sorted by class.
        order = np.random.default_rng(2).permutation(len(rows))
        built = min(BUILT, len(rows) // 2)
        object.__setattr__(self, "_public", rows[order[:built]])
        object.__setattr__(self, "_held", rows[order[built:]])
        object.__setattr__(self, "_kept", {})

    @property
    def counted(self) -> int:
        """Number of examples on which success is counted."""
        return len(self._held)  # type: ignore[attr-defined]

    def success(
        self,
        hits: list[tuple[float, float]],
        eta: ArrayLike,
        *,
        parts: int = 1,
    ) -> Reached:
        """The best attack's success at each eta, and that of the prior-only baseline.

        Args:
            hits: (probability, noise multiplier) of what the attacker sees of one example, such as
                [(1.0, s)] for one full-batch step. Probabilities may sum to less than 1. A
                multiplier is 0 without noise, and infinite if the example takes no part.
            eta: mean squared errors, or levels of another distance, (n,) or a number.
            parts: the limits use one of this many parts of the failure probability.
        """
        chance = np.array([weight for weight, _ in hits])
        noise = np.array([s for _, s in hits])
        if not (noise >= 0).all() or not (chance >= 0).all() or chance.sum() > 1 + 1e-9:
            raise ValueError("hits holds a negative number, or probabilities that sum to over 1")
        levels = self.distance.levels(eta)
        places = anchors(levels)
        # Half of the failure probability for codebooks, half for the mean and the linear attacks.
        tail = (1 - self.confidence) / (2 * parts * len(places))
        held = self._held  # type: ignore[attr-defined]
        mean = self._public.mean(0)  # type: ignore[attr-defined]
        blind = self.distance.paired(np.broadcast_to(mean, held.shape), held)
        if np.isfinite(noise).any():
            errors = [blind, *(self._errors(chance, noise, layer) for layer in self._layers)]
        else:  # without the update, the linear estimators answer with the mean: no need of an SVD
            errors = [blind] * (1 + LAYERS)
        rows = []
        for level in places:
            sizes, limits = self._covered(float(level), tail)
            named = np.array([chance @ _named(noise, size) for size in sizes])
            counts = [int((error <= level).sum()) for error in errors]
            n = self.counted
            fixed, *lines = (
                count_least(count, n, confidence=1 - tail / len(errors)) for count in counts
            )
            by_book = float((limits * named).max())
            # Several fixed guesses are distinct random codewords; of few codewords, all of them.
            guess = max(fixed, float((limits * np.minimum(1, self.guesses / sizes)).max()))
            rows.append((by_book, max(lines), guess))
        # Success rises with eta: a limit at a smaller eta holds at a larger one.
        table = self.thinness * np.array(rows)[np.searchsorted(places, levels, "right") - 1]
        attack = tuple(LINEAR if line > book else CODEBOOK for book, line, _ in table)
        return Reached(table.max(1), table[:, 2], attack)

    def _covered(self, eta: float, tail: float) -> tuple[Array, Array]:
        """Codebook sizes, and lower limits on the share of examples that each one covers."""
        kept: dict[float, tuple[Array, Array]] = self._kept  # type: ignore[attr-defined]
        if eta not in kept:
            held = self._held  # type: ignore[attr-defined]
            near = self.distance.apart(held, self._words(eta)) <= eta
            most = near.shape[1]
            tried = [*(size for size in SIZES if size < most), most]
            kept[eta] = np.array(tried), np.array([near[:, :size].any(1).sum() for size in tried])
        sizes, counts = kept[eta]
        sure = 1 - tail / len(counts)
        return sizes, np.array([count_least(int(k), self.counted, confidence=sure) for k in counts])

    def _words(self, eta: float) -> Array:
        """Codewords made of the public part, the best first."""
        public = self._public  # type: ignore[attr-defined]
        if self.distance.squared:
            return codewords(public, eta, SIZES[-1])[0]
        chosen, _ = covering(self.distance.apart(public, public) <= eta, SIZES[-1])
        return public[chosen]

    @cached_property
    def _layers(self) -> list[_LinearAttack]:
        """The `LAYERS` linear layers that are tried."""
        public = self._public  # type: ignore[attr-defined]
        mean = public.mean(0)
        _, spread, axes = np.linalg.svd(public - mean, full_matrices=False)
        rank = max(1, int((spread > 1e-6 * max(spread[0], 1e-300)).sum()))
        spread = np.where(spread > 0, spread, 1.0)[:rank]
        layer = axes[:rank].T / spread**0.5
        few = min(rank, DIRECTIONS)
        largest = float(np.linalg.norm((public - mean) @ layer, axis=1).max())
        # The first layer clips every output; the second, scaled to the largest, keeps the norms.
        made = (layer[:, :few] * 1e6, layer / max(largest, 1e-300))
        return [_LinearAttack.of(public, mean, weight) for weight in made]

    def _errors(
        self,
        chance: Array,
        noise: Array,
        layer: _LinearAttack,
    ) -> Array:
        """Mean squared errors of a linear attack on the counted examples."""
        held = self._held  # type: ignore[attr-defined]
        draw = np.random.default_rng(3)
        # With the remaining probability the example takes no part.
        each = np.append(noise, math.inf)[
            np.searchsorted(np.cumsum(chance), draw.random(len(held)), "right")
        ]
        return self.distance.paired(layer.answers(held, each, draw), held)


@dataclass(frozen=True, eq=False)
class _LinearAttack:
    """A malicious linear layer, and the best linear estimator from its clipped, noisy output.

    Attributes:
        mean: (N,) of the public examples.
        weight: (N, d), of the layer; a large weight makes every output be clipped.
        middle, values, vectors: mean (d,) and covariance of the outputs, as its eigenvectors (d, d)
            and eigenvalues.
        both: (N, d) covariance of examples and outputs, in the basis of these eigenvectors.
    """

    mean: Array
    weight: Array
    middle: Array
    values: Array
    vectors: Array
    both: Array

    @staticmethod
    def of(
        public: Array,
        mean: Array,
        weight: Array,
    ) -> _LinearAttack:
        outputs = _clipped((public - mean) @ weight)
        middle = outputs.mean(0)
        values, vectors = np.linalg.eigh((outputs - middle).T @ (outputs - middle) / len(public))
        both = (public - mean).T @ (outputs - middle) @ vectors / len(public)
        # Rounding may leave eigenvalues a little below 0.
        return _LinearAttack(mean, weight, middle, values.clip(0), vectors, both)

    def answers(
        self,
        rows: Array,
        noise: Array,
        draw: np.random.Generator,
    ) -> Array:
        """Reconstructions (n, N) of rows, each under its own noise multiplier (n,)."""
        seen = (_clipped((rows - self.mean) @ self.weight) - self.middle) @ self.vectors
        spread = draw.standard_normal(seen.shape)
        part = np.isfinite(noise)
        coefficients = np.zeros_like(seen)
        s = noise[part, None]
        coefficients[part] = (seen[part] + s * spread[part]) / np.maximum(self.values + s**2, 1e-12)
        return self.mean + coefficients @ self.both.T


def _clipped(rows: Array) -> Array:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1.0)


def _named(noise: Array, size: int) -> Array:
    """Probability that the right one of `size` codewords is named, for each noise multiplier."""
    some = (noise > 0) & np.isfinite(noise)
    chance = np.where(noise > 0, 1.0 / size, 1.0)
    if some.any() and size > 1:
        chance[some] = codebook.identified(noise[some], codewords=size)
    return chance
