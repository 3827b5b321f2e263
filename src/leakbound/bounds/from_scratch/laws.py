"""How well a record is rebuilt from scratch out of a linear trap's noisy gradient.

The attacker sees y = X / |X| + noise_multiplier * xi, xi standard normal in R^N. `exact` is the
best that any estimator does with y, `unbiased` the law of paper C, which only some estimators obey.
Errors eta are mean squared errors in the input's units squared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from leakbound.bounds.cone import log_cone
from leakbound.bounds.law import (
    Array,
    Law,
    Scope,
    inward,
    least_root,
    non_negative,
    one,
    positive,
    probability,
    whole,
)

SMALLEST, LARGEST = 1e-160, 1e12
"""Noise multipliers between which the inverses search."""
DEPTH = 745.0
"""Search range of the inverses in log odds of e = N eta / |X|^2."""


@dataclass(frozen=True)
class Unbiased(Law):
    """Law of the unbiased estimator: P(MSE <= eta) = P(N/2, N eta / (2 tau^2)), tau = noise |X|."""

    def __call__(
        self, noise_multiplier: ArrayLike, *, dim: ArrayLike, eta: ArrayLike, norm: ArrayLike = 1.0
    ) -> Any:
        """Probability that the unbiased estimator's MSE is at most eta.

        Shapes: all broadcast. Units: `eta` MSE in input units squared, `norm` |X| in input units.

        Raises:
            ValueError: eta or norm of 0 or below, a dim that is no whole number, NaN.

        Source: paper C, Theorem IV.5 and Corollary IV.6.

        Example:
            >>> round(unbiased(0.1, dim=784, eta=0.01), 3)
            0.507
        """
        sigma, n, eta, r = _arguments(noise_multiplier, dim, eta, norm)
        with np.errstate(all="ignore"):
            scaled = (np.sqrt(eta) / r / sigma) ** 2 * n / 2
        sure = (sigma == 0) | (eta == np.inf)
        return one(special.gammainc(n / 2, np.where(sure, np.inf, scaled)))

    def eta_at(
        self,
        noise_multiplier: ArrayLike,
        *,
        dim: ArrayLike,
        gamma: ArrayLike,
        norm: ArrayLike = 1.0,
    ) -> Any:
        """The MSE that is reached with probability gamma.

        Source: paper C, Corollary IV.6.

        Example:
            >>> round(unbiased.eta_at(0.1, dim=784, gamma=0.5), 6)
            0.009991
        """
        sigma, n = non_negative("noise_multiplier", noise_multiplier), whole("dim", dim)
        r, gamma = positive("norm", norm), probability("gamma", gamma)
        with np.errstate(over="ignore"):
            return one((sigma * r * np.sqrt(special.gammaincinv(n / 2, gamma) * 2 / n)) ** 2)

    def noise_for(
        self, gamma: ArrayLike, *, dim: ArrayLike, eta: ArrayLike, norm: ArrayLike = 1.0
    ) -> Any:
        """The noise multiplier at which eta is reached with probability gamma.

        Source: paper C, Corollary IV.9.

        Example:
            >>> round(unbiased.noise_for(0.1, dim=1, eta=1.0), 3)
            7.958
        """
        gamma, n = probability("gamma", gamma), whole("dim", dim)
        eta, r = positive("eta", eta), positive("norm", norm)
        with np.errstate(divide="ignore", over="ignore"):
            return one(np.sqrt(eta) / r * np.sqrt(n / 2 / special.gammaincinv(n / 2, gamma)))


@dataclass(frozen=True)
class Exact(Law):
    """gamma*: the best that any estimator does with the trap's answer, uniform direction."""

    def __call__(
        self, noise_multiplier: ArrayLike, *, dim: ArrayLike, eta: ArrayLike, norm: ArrayLike = 1.0
    ) -> Any:
        """Probability that the best estimator of X, |X| known, has an MSE of at most eta.

        With sin^2 theta = e = N eta / |X|^2, the best guess |X| cos(theta) y / |y| succeeds exactly
        if y lies within theta of X; e >= 1 gives 1, as the zero image then always succeeds. The
        relative error is below 1e-8 in tails of any depth (`log` for those below 1e-308).

        Shapes: all broadcast. Units: `eta` MSE in input units squared, `norm` |X| in input units.

        Raises:
            ValueError: eta or norm of 0 or below, a dim that is no whole number, NaN.

        Source: docs/errata.md, "gamma*"; it corrects paper C, Corollary IV.3 and IV.6.

        Example:
            >>> round(exact(0.5, dim=16, eta=0.5 / 16), 4)
            0.0683
        """
        logs = self.log(noise_multiplier, dim=dim, eta=eta, norm=norm)
        return one(np.exp(np.asarray(logs)))

    def log(
        self, noise_multiplier: ArrayLike, *, dim: ArrayLike, eta: ArrayLike, norm: ArrayLike = 1.0
    ) -> Any:
        """The natural logarithm of the same.

        Example:
            >>> round(exact.log(0.05, dim=3072, eta=0.037 / 3072), 3)
            -4077.52
        """
        sigma, n, eta, r = _arguments(noise_multiplier, dim, eta, norm)
        return one(_log_gamma(sigma, n, _relative_error(n, eta, r)))

    def eta_at(
        self,
        noise_multiplier: ArrayLike,
        *,
        dim: ArrayLike,
        gamma: ArrayLike,
        norm: ArrayLike = 1.0,
    ) -> Any:
        """The largest MSE that the best estimator reaches with probability gamma at most.

        It is the last number below |X|^2 / N, where the zero image takes over, if gamma is above
        the limit Phi(1 / noise multiplier) there, and 0 for N = 1 if not (a guess of the sign is
        all that counts).

        Example:
            >>> eta = exact.eta_at(0.0037, dim=3072, gamma=1e-3)
            >>> round(3072 * eta, 3), round(exact(0.0037, dim=3072, eta=eta), 6)
            (0.037, 0.001)
        """
        sigma, n = non_negative("noise_multiplier", noise_multiplier), whole("dim", dim)
        r, gamma = positive("norm", norm), probability("gamma", gamma)
        sigma, n, r, gamma = np.broadcast_arrays(sigma, n, r, gamma)
        target = np.log(gamma)
        high = np.full(sigma.shape, DEPTH)
        odds = -least_root(lambda x: _log_cone_at(sigma, n, -x) - target, -high, high)
        e = special.expit(odds)
        e = np.where(_log_cone_at(sigma, n, -high) > target, 0.0, e)
        with np.errstate(over="ignore", under="ignore"):
            found = e * r * r / n
        return one(
            inward(
                lambda x: (
                    (x == 0) | (np.exp(_log_gamma(sigma, n, _relative_error(n, x, r))) <= gamma)
                ),
                found,
                -1,
            )
        )

    def noise_for(
        self, gamma: ArrayLike, *, dim: ArrayLike, eta: ArrayLike, norm: ArrayLike = 1.0
    ) -> Any:
        """The least noise multiplier with which no estimator reaches eta more often than gamma.

        Raises:
            ValueError: no finite noise does: gamma is at most the chance of a blind guess.

        Example:
            >>> round(exact.noise_for(1e-3, dim=3072, eta=0.037 / 3072), 6)
            0.003687
        """
        gamma, n = probability("gamma", gamma), whole("dim", dim)
        eta, r = positive("eta", eta, infinite=True), positive("norm", norm)
        gamma, n, eta, r = np.broadcast_arrays(gamma, n, eta, r)
        e, target = _relative_error(n, eta, r), np.log(gamma)
        blind = _log_gamma(np.full(e.shape, LARGEST), n, e)
        if np.any(blind >= target):
            worst = np.argmax((blind - target).ravel())
            raise ValueError(
                f"gamma is {gamma.flat[worst]:g}, but a guess that sees nothing reaches eta = "
                f"{eta.flat[worst]:g} with probability {np.exp(blind.flat[worst]):.3g}: no finite "
                "noise helps; give a smaller eta or a larger gamma"
            )
        logs = least_root(
            lambda x: _log_gamma(np.exp(x), n, e) - target,
            np.full(e.shape, np.log(SMALLEST)),
            np.full(e.shape, np.log(LARGEST)),
        )
        return one(inward(lambda s: np.exp(_log_gamma(s, n, e)) <= gamma, np.exp(logs), 1))


def _arguments(
    noise_multiplier: ArrayLike, dim: ArrayLike, eta: ArrayLike, norm: ArrayLike
) -> tuple[Array, Array, Array, Array]:
    found = (
        non_negative("noise_multiplier", noise_multiplier),
        whole("dim", dim),
        positive("eta", eta, infinite=True),
        positive("norm", norm),
    )
    a, b, c, d = np.broadcast_arrays(*found)
    return a, b, c, d


def _relative_error(n: Array, eta: Array, r: Array) -> Array:
    """Relative error N eta / |X|^2, the squared sine of the angle that succeeds."""
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(n * (eta / r / r))


def _log_gamma(sigma: Array, n: Array, e: Array) -> Array:
    inside = np.where(e < 1, e, 0.5)
    with np.errstate(divide="ignore", over="ignore"):
        found = log_cone(1 / sigma, np.sqrt((1 - inside) / inside), n)
    return np.where((e >= 1) | (sigma == 0), 0.0, found)


def _log_cone_at(sigma: Array, n: Array, odds: Array) -> Array:
    """Log gamma* at log odds of e; cot^2 theta = (1 - e) / e = exp(-odds)."""
    with np.errstate(divide="ignore"):
        return log_cone(1 / sigma, np.exp(-odds / 2), n)


unbiased = Unbiased(
    Scope(
        covers="equivariant",
        attackers="unbiased and translation-equivariant estimators of the linear trap",
        prior="every fixed record",
        known="the scales, the noise multiplier, the clip norm",
        not_said="that no attacker does better: the zero image, shrinkage and gamma* do",
        equation="paper C, Corollaries IV.6-IV.9 (H4-H7)",
    )
)
exact = Exact(
    Scope(
        covers="trap",
        attackers="all estimators of the linear trap's noisy answer",
        prior="direction uniform on the sphere; so every attacker fails this often on some "
        "direction",
        known="the record's norm and the noise multiplier",
        not_said="a bound for one given image, for image priors or galleries, or for a server that "
        "chooses another gradient map",
        equation="gamma*, docs/errata.md (corrects paper C, Corollaries IV.3 and IV.6)",
    )
)
