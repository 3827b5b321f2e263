"""How well one example is reconstructed from the noisy gradient of a linear trap.

The trap f(X) = W X sends, in every row, X scaled to the clip norm. The attacker sees
y = X / |X| + noise_multiplier * xi, where xi is standard normal in R^N. `exact` is gamma*, the best
success of any estimator that uses y. `effective_noise` and `averaged` convert a real setting into
its arguments. Errors eta are mean squared errors in squared input units; norms are in input units.
All arguments broadcast unless a shape is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy
from numpy.typing import ArrayLike

from leakbound import check
from leakbound.bounds.cone import log_cone
from leakbound.bounds.law import (
    Array,
    RiskLaw,
    Scope,
    arguments,
    groups,
    non_negative,
    one,
    positive,
    rate,
    whole,
)
from leakbound.bounds.roots import inward, least_root

__all__ = ["averaged", "effective_noise", "exact", "typical_correlation"]

Participation = Literal["visible", "hidden"]
SMALLEST = 1e-160
LARGEST = 1e12
"""Range of noise multipliers in which the inverses search."""
DUST = 1e-17
"""Mass of numbers of sampled steps that is left out of a sum, which lowers the risk."""


@dataclass(frozen=True)
class ExactLaw(RiskLaw):
    """gamma*: the best success of any estimator behind the trap, for a uniform direction."""

    def __call__(
        self,
        noise_multiplier: ArrayLike,
        *,
        dim: ArrayLike,
        eta: ArrayLike,
        norm: ArrayLike = 1.0,
    ) -> Any:
        """Probability that the best estimator of X, |X| known, has an MSE of at most eta.

        With sin^2 theta = e = N eta / |X|^2, the best estimate |X| cos(theta) y / |y| succeeds
        exactly if y lies within theta of X. If e >= 1 the result is 1: the zero image always
        succeeds. The relative error is below 1e-8 in tails of any depth (use `log` below 1e-308).

        Source: docs/errata.md, "gamma*"; it corrects paper C, Corollary IV.3 and IV.6.

        Example:
            >>> round(exact(0.5, dim=16, eta=0.5 / 16), 4)
            0.0683
        """
        return one(np.exp(np.asarray(self.log(noise_multiplier, dim=dim, eta=eta, norm=norm))))

    def log(
        self,
        noise_multiplier: ArrayLike,
        *,
        dim: ArrayLike,
        eta: ArrayLike,
        norm: ArrayLike = 1.0,
    ) -> Any:
        """The natural logarithm of the same probability.

        Example:
            >>> round(exact.log(0.05, dim=3072, eta=0.037 / 3072), 3)
            -4077.52
        """
        sigma, n, eta, r = arguments(
            noise_multiplier=noise_multiplier,
            dim=dim,
            eta=eta,
            norm=norm,
        )
        return one(_log_gamma(sigma, n, _relative_error(n, eta, r)))

    def noise_for(
        self,
        gamma: ArrayLike,
        *,
        dim: ArrayLike,
        eta: ArrayLike,
        norm: ArrayLike = 1.0,
    ) -> Any:
        """The smallest noise multiplier at which no estimator attains eta more often than gamma.

        Raises:
            ValueError: no finite noise suffices, because gamma is at most the prior-only success.

        Example:
            >>> round(exact.noise_for(1e-3, dim=3072, eta=0.037 / 3072), 6)
            0.003687
        """
        gamma, n, eta, r = arguments(gamma=gamma, dim=dim, eta=eta, norm=norm)
        e = _relative_error(n, eta, r)
        target = np.log(gamma)
        blind = _log_gamma(np.full(e.shape, LARGEST), n, e)
        if np.any(blind >= target):
            worst = np.argmax((blind - target).ravel())
            raise ValueError(
                f"gamma is {gamma.flat[worst]:g}, but a prior-only baseline already meets eta = "
                f"{eta.flat[worst]:g} with probability {np.exp(blind.flat[worst]):.3g}: no finite "
                "noise helps; give a smaller eta or a larger gamma"
            )
        ends = (np.full(gamma.shape, np.log(edge)) for edge in (SMALLEST, LARGEST))
        logs = least_root(lambda x: _log_gamma(np.exp(x), n, e) - target, *ends)
        return one(inward(lambda s: np.exp(_log_gamma(s, n, e)) <= gamma, np.exp(logs), 1))


exact = ExactLaw(
    Scope(
        covers="trap",
        attackers="all estimators of the linear trap's noisy answer",
        prior="direction uniform on the sphere; so every attacker fails this often on some "
        "direction",
        known="the example's norm and the noise multiplier",
        not_said="a bound for one given image, for image priors or galleries, or for a server that "
        "chooses another gradient map",
        equation="gamma*, docs/errata.md (corrects paper C, Corollaries IV.3 and IV.6)",
    )
)


def effective_noise(
    noise_multiplier: ArrayLike,
    *,
    clip_norm: ArrayLike,
    norm: ArrayLike,
    rows: ArrayLike = 1,
    rest_norm: ArrayLike = 0.0,
    rho: ArrayLike = 1.0,
) -> Any:
    """The noise multiplier for the laws, in a setting with few rows, a norm sink or a batch.

    Each of the trap's M rows holds X; clipping to C scales all of (rows, rest). The result is
    noise * sqrt(rho max(C^2, M |X|^2 + rest^2) / (M |X|^2)), at least `noise_multiplier`.

    Args:
        noise_multiplier: noise standard deviation / C.
        clip_norm: C.
        norm: |X| at the input of the trap's layer.
        rows: M.
        rest_norm: gradient norm of all other parameters before clipping (a norm sink); a trainable
            bias in the trap's layer makes it sqrt(M).
        rho: factor by which removing the other examples of the batch scales the variance; >= 1.

    Source: paper C, Theorem IV.1; docs/errata.md, C2 and C5.

    Example:
        >>> effective_noise(0.1, clip_norm=5.0, norm=1.0, rows=1)
        0.5
    """
    sigma = non_negative("noise_multiplier", noise_multiplier)
    rows = whole("rows", rows)
    c = positive("clip_norm", clip_norm)
    r = positive("norm", norm)
    rest = non_negative("rest_norm", rest_norm)
    rho = positive("rho", rho)
    if np.any(rho < 1):
        raise ValueError(f"rho is {float(np.min(rho)):g}; give at least 1: separation never gains")
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        root = np.sqrt(rows)
        grown = sigma * np.sqrt(rho) * np.maximum(c / r / root, np.hypot(1.0, rest / r / root))
    # 0 times an overflowed factor is NaN.
    return one(np.where(sigma == 0, 0.0, grown))


def averaged(
    noise_multiplier: ArrayLike,
    *,
    dim: int,
    eta: ArrayLike,
    steps: ArrayLike,
    sampling_rate: ArrayLike = 1.0,
    norm: ArrayLike = 1.0,
    participation: Participation = "visible",
) -> Any:
    """Probability of success after several steps that each sample the example at a rate.

    visible: the attacker knows the k ~ Binom(steps, rate) steps that hold the example and averages
    them, noise / sqrt(k). hidden: the attacker sums all steps, noise * sqrt(steps) / k. k = 0
    leaves the prior-only baseline. The success is attained for one example's gradient alone, with
    the others removed. For a fixed k call `exact` with noise / sqrt(k).

    Raises:
        ValueError: as `exact`; sampling_rate outside (0, 1], or steps is not a whole number.

    Source: paper C, section IV-C, corrected; docs/errata.md, C4 and "gamma*".

    Example:
        >>> round(averaged(0.5, dim=16, eta=0.5 / 16, steps=10, sampling_rate=0.1), 4)
        0.0976
    """
    check.one_of(("visible", "hidden"), participation=participation)
    known = {"dim": dim, "eta": eta, "norm": norm, "steps": steps, "sampling_rate": sampling_rate}
    sigma, n, e, r, count, q = arguments(noise_multiplier=noise_multiplier, **known)
    success = np.empty(sigma.shape)
    for here, (number, some) in groups(count, q):
        kind = participation
        mass, factor = sightings(
            int(number),
            sampling_rate=float(some),
            participation=kind,
        )
        with np.errstate(invalid="ignore"):  # no noise and no sighting: 0 * inf
            noise = np.where(np.isinf(factor), np.inf, sigma[here] * factor)
        chances = exact(noise, dim=n[here], eta=e[here], norm=r[here])
        success[here] = np.minimum(1.0, (mass * chances).sum(0))
    return one(success)


def typical_correlation(
    noise_multiplier: ArrayLike,
    *,
    dim: ArrayLike,
    share: ArrayLike = 1.0,
) -> Any:
    """The normalized cross-correlation of X with the trap's answer X + noise |X| xi, typically.

    sqrt(share / (share + N noise^2)), where `share` in (0, 1] is the variance of X's values over
    their mean square. Half of all answers or more exceed it, so it is no bound. The law of a
    correlation c is that of `exact` for N - 1 values at eta = 1 - c^2 and norm sqrt(N - 1).

    Source: paper C, proposition A.2; docs/errata.md, C19.

    Example:
        >>> round(typical_correlation(0.05, dim=784), 3)
        0.581
    """
    sigma = non_negative("noise_multiplier", noise_multiplier)
    n = whole("dim", dim)
    part = rate("share", share)
    return one(1 / np.sqrt(1 + n * sigma**2 / part))


def sightings(
    steps: int,
    *,
    sampling_rate: float,
    participation: Participation,
) -> tuple[Array, Array]:
    """Probability of each number of sightings (K, 1), and the factor on the noise (K, 1).

    k visible sightings are averaged: 1 / sqrt(k). Hidden sightings are part of a sum of all steps:
    sqrt(steps) / k. Without a sighting the factor is infinite.
    """
    k, mass = (v[:, None] for v in _sampled_steps(steps, sampling_rate))
    with np.errstate(divide="ignore"):
        return mass, 1 / np.sqrt(k) if participation == "visible" else np.sqrt(steps) / k


def _sampled_steps(steps: int, q: float) -> tuple[Array, Array]:
    """Numbers of sampled steps and their probabilities; less than 1e-17 in total is left out."""
    if q == 1:
        return np.array([float(steps)]), np.array([1.0])
    law = scipy.stats.binom(steps, q)
    low = law.ppf(DUST)
    # The upper tail as the lower tail of the misses, because 1 - DUST rounds to 1.
    high = steps - scipy.stats.binom(steps, 1 - q).ppf(DUST)
    k = np.arange(max(0.0, low), min(steps, high) + 1)
    return k, law.pmf(k)


def _relative_error(
    n: Array,
    eta: Array,
    r: Array,
) -> Array:
    """E = N eta / |X|^2, the squared sine of the angle that succeeds."""
    with np.errstate(over="ignore", under="ignore"):
        # Divided twice, because r^2 may overflow or become 0.
        return n * (eta / r / r)


def _log_gamma(
    sigma: Array,
    n: Array,
    e: Array,
) -> Array:
    # Any valid number where the answer is 1 anyway: the root would be NaN.
    inside = np.where(e < 1, e, 0.5)
    with np.errstate(divide="ignore", over="ignore"):
        logs = log_cone(1 / sigma, np.sqrt((1 - inside) / inside), n)
    return np.where((e >= 1) | (sigma == 0), 0.0, logs)
