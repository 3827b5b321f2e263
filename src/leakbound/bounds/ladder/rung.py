"""What all rungs of the prior ladder share, and the lowest: the norm alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from leakbound.bounds.from_scratch.laws import exact
from leakbound.bounds.identification import gaussian, log_kappa_sphere
from leakbound.bounds.law import (
    Array,
    Scope,
    between,
    non_negative,
    one,
    positive,
    single,
    whole,
)

CONFIDENCE = 0.95
CHUNK = 256
"""Records that are drawn and attacked at a time: bounds the memory."""
PURE_NOISE = 1e100
"""Stands for an infinite noise multiplier where an answer is drawn."""


@dataclass(frozen=True)
class Estimate:
    """A probability that was estimated from draws.

    Attributes:
        value: the estimate.
        low, high: 95 % confidence interval, both sides; equal to the value where it is computed.
        n: number of draws; 0 where it is computed.
    """

    value: float
    low: float
    high: float
    n: int

    @classmethod
    def of_counts(cls, hits: int, n: int) -> Estimate:
        """Clopper-Pearson interval of `hits` out of n.

        Example:
            >>> Estimate.of_counts(0, 100).high < 0.037
            True
        """
        tail = (1 - CONFIDENCE) / 2
        low = float(stats.beta.ppf(tail, hits, n - hits + 1)) if hits else 0.0
        high = float(stats.beta.isf(tail, hits + 1, n - hits)) if hits < n else 1.0
        return cls(hits / n, low, high, n)

    @classmethod
    def of_chances(cls, values: Array) -> Estimate:
        """Mean of chances in [0, 1], with the empirical Bernstein interval (Maurer, Pontil 2009).

        Shapes: (n,) with n of at least 2.

        Example:
            >>> Estimate.of_chances(np.full(1000, 0.5)).high < 0.52
            True
        """
        n, mean = len(values), float(values.mean())
        log = np.log(4 / (1 - CONFIDENCE))
        wide = float(np.sqrt(2 * values.var(ddof=1) * log / n) + 7 * log / (3 * (n - 1)))
        return cls(mean, max(0.0, mean - wide), min(1.0, mean + wide), n)


class Rung(Protocol):
    """A prior of the records, with its attack and its blind success."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def dim(self) -> int:
        """N."""
        ...

    @property
    def informed(self) -> bool:
        """Whether it knows the data: what does not bounds no attacker who does."""
        ...

    @property
    def lower_scope(self) -> Scope:
        """What `success` covers."""
        ...

    @property
    def upper_scope(self) -> Scope:
        """What the edge from `log_kappa` covers."""
        ...

    def sample(self, count: int, generator: np.random.Generator) -> Array:
        """Records (count, N) of the prior."""
        ...

    def attack(self, answers: Array, noise_multiplier: float, *, eta: float) -> Array:
        """Guesses (n, N) of the records behind answers (n, N)."""
        ...

    def success(
        self, noise_multiplier: float, *, eta: float, draws: int, generator: np.random.Generator
    ) -> Estimate:
        """How often the attack comes within an MSE of eta of records of the prior."""
        ...

    def log_kappa(self, eta: ArrayLike) -> Any:
        """Upper bound on the logarithm of the most mass of the prior within an MSE of eta."""
        ...


def answer(records: Array, noise_multiplier: float, generator: np.random.Generator) -> Array:
    """What the linear trap's server sees of records (n, N): directions plus noise.

    Example:
        >>> answer(np.array([[3.0, 4.0]]), 0.0, np.random.default_rng(0))
        array([[0.6, 0.8]])
    """
    noise = min(noise_multiplier, PURE_NOISE) * generator.standard_normal(records.shape)
    return np.asarray(records / np.linalg.norm(records, axis=1, keepdims=True) + noise)


def counted(
    rung: Rung, noise: float, *, eta: float, draws: int, generator: np.random.Generator
) -> Estimate:
    """Success of a rung's attack on records of its own prior, by counting."""
    noise, eta, draws = setting(noise, eta, draws)
    hits = 0
    for start in range(0, draws, CHUNK):
        records = rung.sample(min(CHUNK, draws - start), generator)
        guesses = rung.attack(answer(records, noise, generator), noise, eta=eta)
        hits += int((((guesses - records) ** 2).mean(1) <= eta).sum())
    return Estimate.of_counts(hits, draws)


def setting(noise: float, eta: float, draws: int, least: int = 1) -> tuple[float, float, int]:
    """The checked arguments of `success`, all single numbers."""
    return (
        single("noise_multiplier", non_negative("noise_multiplier", noise)),
        single("eta", positive("eta", eta)),
        int(single("draws", whole("draws", draws, least))),
    )


def pictures(images: ArrayLike) -> Array:
    """Images as finite rows (n, N), whatever their shape, in float64."""
    array = between("images", images, -np.inf, np.inf, closed=False)
    if array.ndim < 2 or 0 in array.shape:
        raise ValueError(f"images has shape {array.shape}; give (images, values)")
    return array.reshape(len(array), -1)


def edges(prior: str, attack: str, kappa: str) -> tuple[Scope, Scope]:
    """The scopes of a rung's lower and upper edge."""
    lower = Scope(
        covers="attained",
        attackers=f"one attack on the linear trap's answer: {attack}",
        prior=prior,
        known="this prior and the noise multiplier",
        not_said="that no attacker does better; what it reaches where records follow another prior",
        equation="docs/risk.md, the ladder of priors",
    )
    upper = Scope(
        covers="all",
        attackers=gaussian.scope.attackers,
        prior=f"averaged over {prior}; blind success: {kappa}",
        known="this prior, and everything but the record and the noise",
        not_said="a bound for one given record, or for an attacker with a sharper prior or told "
        "more of the record, such as its norm where that varies",
        equation=gaussian.scope.equation,
    )
    return lower, upper


@dataclass(frozen=True)
class KnownNorm:
    """The norm and no more: direction uniform on the sphere. Both edges are computed, not drawn.

    Args:
        dim: N.
        norm: |X|, input units.

    Raises:
        ValueError: a dim that is no whole number, a norm of 0 or below.

    Source: docs/errata.md, "gamma*".

    Example:
        >>> rung = KnownNorm(16)
        >>> round(rung.success(0.5, eta=0.5 / 16).value, 4)
        0.0683
    """

    dim: int
    norm: float = 1.0

    def __post_init__(self) -> None:
        single("dim", whole("dim", self.dim))
        single("norm", positive("norm", self.norm))

    @property
    def informed(self) -> bool:
        """False: a norm says nothing about what the data look like."""
        return False

    @property
    def name(self) -> str:
        """For people."""
        return "known norm"

    @property
    def lower_scope(self) -> Scope:
        """What `success` covers: here all estimators of the trap's answer."""
        return exact.scope

    @property
    def upper_scope(self) -> Scope:
        """What the edge from `log_kappa` covers."""
        return edges("a direction uniform on the sphere of the norm", "", "a cap's share")[1]

    def sample(self, count: int, generator: np.random.Generator) -> Array:
        """Records (count, N) of uniform direction."""
        drawn = generator.standard_normal((count, self.dim))
        return np.asarray(self.norm * drawn / np.linalg.norm(drawn, axis=1, keepdims=True))

    def attack(self, answers: Array, noise_multiplier: float, *, eta: float) -> Array:
        """The answer's direction at the radius |X| cos(theta); sin^2 theta = N eta / |X|^2."""
        radius = np.sqrt(np.maximum(0.0, self.norm**2 - self.dim * eta))
        return np.asarray(radius * answers / np.linalg.norm(answers, axis=1, keepdims=True))

    def success(
        self,
        noise_multiplier: float,
        *,
        eta: float,
        draws: int = 0,
        generator: np.random.Generator | None = None,
    ) -> Estimate:
        """gamma*, which needs no draws."""
        value = float(exact(noise_multiplier, dim=self.dim, eta=eta, norm=self.norm))
        return Estimate(value, value, value, 0)

    def log_kappa(self, eta: ArrayLike) -> Any:
        """Exact: the share of the sphere in the largest cap within eta.

        Example:
            >>> round(float(np.exp(KnownNorm(2).log_kappa(0.25))), 4)
            0.25
        """
        return one(np.asarray(log_kappa_sphere(dim=self.dim, eta=eta, norm=self.norm)))
