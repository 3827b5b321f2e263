"""How well one example is reconstructed from the noisy gradient of a linear trap.

The trap f(X) = W X sends, in every row, X scaled to the clip norm. The attacker sees
y = X / |X| + noise_multiplier * xi, where xi is standard normal in R^N. `exact` is gamma*, the best
success of any estimator that uses y. `unbiased` is paper C's law, which covers unbiased estimators
only. `ncc` is the law of the correlation. `effective_noise`, `averaged` and `unknown_scale` convert
a real setting into these. Errors eta are mean squared errors in squared input units; norms are in
input units. All arguments broadcast unless a shape is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import special, stats

from leakbound import check
from leakbound.bounds.cone import log_cone
from leakbound.bounds.law import (
    Array,
    RiskLaw,
    Scope,
    arguments,
    between,
    groups,
    non_negative,
    one,
    positive,
    probability,
    rate,
    whole,
)
from leakbound.bounds.roots import inward, least_root

__all__ = [
    "averaged",
    "effective_noise",
    "exact",
    "ncc",
    "unbiased",
    "unknown_scale",
]

Participation = Literal["visible", "hidden"]
SMALLEST, LARGEST = 1e-160, 1e12
"""Range of noise multipliers in which the inverses search."""
DEPTH = 745.0
"""Search range of `exact.eta_at` in log odds of e = N eta / |X|^2."""
FLAT = 28.0
"""Search range of `ncc.ncc_at` in artanh of the correlation; above it, the correlation is 1."""
TRIES, ZOOMS = 64, 4
"""Radii that `unknown_scale` tries at a time, and how often it refines around the best."""
DUST = 1e-17
"""Mass of numbers of sampled steps that is left out of a sum, which lowers the risk."""


@dataclass(frozen=True)
class UnbiasedLaw(RiskLaw):
    """Law of the unbiased estimator: P(MSE <= eta) = P(N/2, N eta / (2 tau^2)), tau = noise |X|."""

    def __call__(
        self, noise_multiplier: ArrayLike, *, dim: ArrayLike, eta: ArrayLike, norm: ArrayLike = 1.0
    ) -> Any:
        """Probability that the unbiased estimator's MSE is at most eta.

        Raises:
            ValueError: eta or norm of 0 or less, a dim that is not a whole number, or NaN.

        Source: paper C, Theorem IV.5 and Corollary IV.6.

        Example:
            >>> round(unbiased(0.1, dim=784, eta=0.01), 3)
            0.507
        """
        sigma, n, eta, r = arguments(noise_multiplier=noise_multiplier, dim=dim, eta=eta, norm=norm)
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
        """The MSE that the estimator attains with probability gamma.

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
        """The noise multiplier at which the estimator attains eta with probability gamma.

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
class ExactLaw(RiskLaw):
    """gamma*: the best success of any estimator behind the trap, for a uniform direction."""

    def __call__(
        self, noise_multiplier: ArrayLike, *, dim: ArrayLike, eta: ArrayLike, norm: ArrayLike = 1.0
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
        self, noise_multiplier: ArrayLike, *, dim: ArrayLike, eta: ArrayLike, norm: ArrayLike = 1.0
    ) -> Any:
        """The natural logarithm of the same probability.

        Example:
            >>> round(exact.log(0.05, dim=3072, eta=0.037 / 3072), 3)
            -4077.52
        """
        sigma, n, eta, r = arguments(noise_multiplier=noise_multiplier, dim=dim, eta=eta, norm=norm)
        return one(_log_gamma(sigma, n, _relative_error(n, eta, r)))

    def eta_at(
        self,
        noise_multiplier: ArrayLike,
        *,
        dim: ArrayLike,
        gamma: ArrayLike,
        norm: ArrayLike = 1.0,
    ) -> Any:
        """The largest MSE that the best estimator attains with probability at most gamma.

        It is the last number below |X|^2 / N, where the zero image takes over, if gamma is above
        the limit Phi(1 / noise multiplier) there. For N = 1 it is 0 otherwise (only the sign
        counts).

        Example:
            >>> eta = exact.eta_at(0.0037, dim=3072, gamma=1e-3)
            >>> round(3072 * eta, 3), round(exact(0.0037, dim=3072, eta=eta), 6)
            (0.037, 0.001)
        """
        level = {"norm": norm, "gamma": gamma}
        sigma, n, r, gamma = arguments(noise_multiplier=noise_multiplier, dim=dim, **level)
        target, high = np.log(gamma), np.full(sigma.shape, DEPTH)

        def excess(odds: Array) -> Array:  # cot^2 theta = (1 - e) / e = exp(-odds)
            with np.errstate(divide="ignore"):
                return np.asarray(log_cone(1 / sigma, np.exp(-odds / 2), n) - target)

        e = special.expit(-least_root(lambda x: excess(-x), -high, high))
        e = np.where(excess(-high) > 0, 0.0, e)
        with np.errstate(over="ignore", under="ignore"):
            found = e * r * r / n

        def fits(x: Array) -> Array:
            reached = np.exp(_log_gamma(sigma, n, _relative_error(n, x, r)))
            return np.asarray((x == 0) | (reached <= gamma))

        return one(inward(fits, found, -1))

    def noise_for(
        self, gamma: ArrayLike, *, dim: ArrayLike, eta: ArrayLike, norm: ArrayLike = 1.0
    ) -> Any:
        """The smallest noise multiplier at which no estimator attains eta more often than gamma.

        Raises:
            ValueError: no finite noise suffices, because gamma is at most the prior-only success.

        Example:
            >>> round(exact.noise_for(1e-3, dim=3072, eta=0.037 / 3072), 6)
            0.003687
        """
        gamma, n, eta, r = arguments(gamma=gamma, dim=dim, eta=eta, norm=norm)
        e, target = _relative_error(n, eta, r), np.log(gamma)
        blind = _log_gamma(np.full(e.shape, LARGEST), n, e)
        if np.any(blind >= target):
            worst = np.argmax((blind - target).ravel())
            raise ValueError(
                f"gamma is {gamma.flat[worst]:g}, but a prior-only baseline already meets eta = "
                f"{eta.flat[worst]:g} with probability {np.exp(blind.flat[worst]):.3g}: no finite "
                "noise helps; give a smaller eta or a larger gamma"
            )
        return _least_noise(
            lambda x: _log_gamma(np.exp(x), n, e), lambda s: _log_gamma(s, n, e), gamma
        )


@dataclass(frozen=True)
class NccLaw(RiskLaw):
    """Normalized cross-correlation of the unbiased estimate with the truth."""

    def __call__(
        self, noise_multiplier: ArrayLike, *, dim: ArrayLike, ncc: ArrayLike, spread: ArrayLike = 1
    ) -> Any:
        """Probability that the correlation over pixels is at least `ncc`, exactly.

        Centering leaves dim - 1 coordinates, in which the correlation is the cosine of an angle.
        This gives the integral of `exact`, with the example's centered part as its norm.

        Args:
            noise_multiplier: noise standard deviation / clip norm.
            dim: number of pixels, at least 2.
            ncc: correlation in (-1, 1).
            spread: |X - mean of X| / |X|, in (0, 1]; 1 if the pixels' mean is zero.

        Source: this project; paper C has the population value only (`population`).

        Example:
            >>> round(ncc(0.05, dim=784, ncc=0.6), 3)
            0.197
        """
        sigma, n = non_negative("noise_multiplier", noise_multiplier), whole("dim", dim, 2)
        cotangent, part = _cotangent(ncc), rate("spread", spread)
        with np.errstate(divide="ignore"):
            return one(np.exp(log_cone(part / sigma, cotangent, n - 1)))

    def population(
        self, noise_multiplier: ArrayLike, *, dim: ArrayLike, spread: ArrayLike = 1.0
    ) -> Any:
        """The correlation for infinitely many pixels: at most 1 / sqrt(1 + N noise^2).

        Source: paper C, Theorem on NCC.

        Example:
            >>> round(ncc.population(0.05, dim=784), 4)
            0.5812
        """
        sigma, n, part = arguments(noise_multiplier=noise_multiplier, dim=dim, spread=spread)
        with np.errstate(over="ignore"):
            return one(1 / np.sqrt(1 + n * (sigma / part) ** 2))

    def noise_for(
        self, gamma: ArrayLike, *, dim: ArrayLike, ncc: ArrayLike, spread: ArrayLike = 1.0
    ) -> Any:
        """The smallest noise multiplier that attains `ncc` with probability at most gamma.

        Raises:
            ValueError: no finite noise suffices.

        Example:
            >>> round(ncc.noise_for(0.01, dim=784, ncc=0.5), 4)
            0.0734
        """
        gamma, n, cotangent, part = np.broadcast_arrays(
            probability("gamma", gamma),
            whole("dim", dim, 2),
            _cotangent(ncc),
            rate("spread", spread),
        )
        if np.any(log_cone(0.0, cotangent, n - 1) >= np.log(gamma)):
            raise ValueError(
                "gamma is at most the chance that pure noise has this correlation: no finite noise "
                "helps; give a larger gamma or ncc"
            )
        return _least_noise(
            lambda x: log_cone(part * np.exp(-x), cotangent, n - 1),
            lambda s: log_cone(part / s, cotangent, n - 1),
            gamma,
        )

    def ncc_at(
        self,
        noise_multiplier: ArrayLike,
        *,
        dim: ArrayLike,
        gamma: ArrayLike,
        spread: ArrayLike = 1.0,
    ) -> Any:
        """The correlation that is attained with probability gamma.

        Example:
            >>> round(ncc.ncc_at(0.05, dim=784, gamma=0.5), 2)
            0.58
        """
        sigma, n, gamma, part = np.broadcast_arrays(
            non_negative("noise_multiplier", noise_multiplier),
            whole("dim", dim, 2),
            probability("gamma", gamma),
            rate("spread", spread),
        )
        with np.errstate(divide="ignore"):
            a = part / sigma
        # a correlation of tanh(x) has a cotangent of sinh(x)
        far = np.full(gamma.shape, FLAT)
        found = least_root(lambda x: log_cone(a, np.sinh(x), n - 1) - np.log(gamma), -far, far)
        return one(np.tanh(found))


unbiased = UnbiasedLaw(
    Scope(
        covers="equivariant",
        attackers="unbiased and translation-equivariant estimators of the linear trap",
        prior="every fixed example",
        known="the scales, the noise multiplier, the clip norm",
        not_said="that no attacker does better: the zero image, shrinkage and gamma* do",
        equation="paper C, Corollaries IV.6-IV.9 (H4-H7)",
    )
)
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


ncc = NccLaw(
    Scope(
        covers="one",
        attackers="the unbiased estimate of the linear trap",
        prior="every fixed example of the given spread",
        known="the noise multiplier",
        not_said="what other estimators attain",
        equation="this project; population value: paper C (H12)",
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
    sigma, rows = non_negative("noise_multiplier", noise_multiplier), whole("rows", rows)
    c, r = positive("clip_norm", clip_norm), positive("norm", norm)
    rest, rho = non_negative("rest_norm", rest_norm), positive("rho", rho)
    if np.any(rho < 1):
        raise ValueError(f"rho is {float(np.min(rho)):g}; give at least 1: separation never gains")
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        root = np.sqrt(rows)
        grown = sigma * np.sqrt(rho) * np.maximum(c / r / root, np.hypot(1.0, rest / r / root))
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
    law: ExactLaw | UnbiasedLaw = exact,
) -> Any:
    """Probability of success after several steps that each sample the example at a rate.

    visible: the attacker knows the k ~ Binom(steps, rate) steps that hold the example and averages
    them, noise / sqrt(k). hidden: the attacker sums all steps, noise * sqrt(steps) / k. With
    `exact`, k = 0 leaves the prior-only baseline. The unbiased estimator fails then; it is given k,
    by which it divides. The success is attained for one example's gradient alone, with the others
    removed. For a fixed k call the law with noise / sqrt(k).

    Raises:
        ValueError: as the law; sampling_rate outside (0, 1], or steps is not a whole number.

    Source: paper C, section IV-C, corrected; docs/errata.md, C4 and "gamma*".

    Example:
        >>> round(averaged(0.5, dim=16, eta=0.5 / 16, steps=10, sampling_rate=0.1), 4)
        0.0976
    """
    check.one_of(("visible", "hidden"), participation=participation)
    known = {"dim": dim, "eta": eta, "norm": norm, "steps": steps, "sampling_rate": sampling_rate}
    sigma, n, e, r, count, q = arguments(noise_multiplier=noise_multiplier, **known)
    found = np.empty(sigma.shape)
    for here, (number, some) in groups(count, q):
        own = participation
        mass, factor = sightings(int(number), sampling_rate=float(some), participation=own)
        with np.errstate(invalid="ignore"):  # no noise and no sighting: 0 * inf
            noise = np.where(np.isinf(factor), np.inf, sigma[here] * factor)
        chances = law(noise, dim=n[here], eta=e[here], norm=r[here])
        found[here] = np.minimum(1.0, (mass * chances).sum(0))
    return one(found)


def sightings(
    steps: int, *, sampling_rate: float, participation: Participation
) -> tuple[Array, Array]:
    """Probability of each number of sightings (K, 1), and the factor on the noise (K, 1).

    k visible sightings are averaged: 1 / sqrt(k). Hidden sightings are part of a sum of all steps:
    sqrt(steps) / k. Without a sighting the factor is infinite.
    """
    k, mass = (v[:, None] for v in _sampled_steps(steps, sampling_rate))
    with np.errstate(divide="ignore"):
        return mass, 1 / np.sqrt(k) if participation == "visible" else np.sqrt(steps) / k


def unknown_scale(
    noise_multiplier: ArrayLike,
    *,
    dim: ArrayLike,
    eta: ArrayLike,
    norms: ArrayLike,
    weights: ArrayLike | None = None,
) -> Any:
    """Success of an attacker who knows the distribution of |X| but not |X| itself.

    y = X / |X| + noise says nothing about |X|. The attacker's estimate is a y / |y| with the one
    radius a that succeeds most often over `norms`. This success is attained. The upper bound, with
    |X| known, is the mean of `exact` over the norms.

    Shapes: `norms` and `weights` (n,); all others broadcast, with a separate search for each entry.

    Raises:
        ValueError: weights are negative or sum to 0, or a norm is 0.

    Source: docs/errata.md, "unknown scale".

    Example:
        >>> known = exact(0.1, dim=16, eta=0.01)
        >>> bool(unknown_scale(0.1, dim=16, eta=0.01, norms=[1.0]) <= known + 1e-12)
        True
    """
    r = np.atleast_1d(positive("norms", norms))
    w = np.ones(r.shape) if weights is None else np.asarray(non_negative("weights", weights))
    if w.shape != r.shape or w.sum() <= 0:
        raise ValueError(f"weights has shape {w.shape}; give one for each of {len(r)} norms")
    w, top = w / w.sum(), r.max()
    r = r / top
    sigma, n, e = np.broadcast_arrays(
        non_negative("noise_multiplier", noise_multiplier),
        whole("dim", dim),
        positive("eta", eta),
    )
    cases = zip(sigma.flat, n.flat, e.flat, strict=True)
    found = [_best_radius(float(a), float(b), b * float(c) / top / top, r, w) for a, b, c in cases]
    return one(np.reshape(np.array(found), sigma.shape))


def _best_radius(sigma: float, n: float, error: float, r: Array, w: Array) -> float:
    """The largest success of any single radius, for norms r with weights w."""
    inverse = np.inf if sigma == 0 else 1 / sigma

    def success(radius: Array) -> Array:
        return np.asarray(np.exp(_log_hit(inverse, n, radius[:, None], r, error)) @ w)

    # each norm's best radius and a grid between them; then a finer grid around the best of all
    own = np.sqrt(np.maximum(0.0, 1 - error / r**2)) * r
    tries = np.unique(np.concatenate([np.arange(1, TRIES + 1) / TRIES, own[own > 0]]))
    found = float((w * (r**2 <= error)).sum())
    for _ in range(ZOOMS):
        hits = success(tries)
        found, at = max(found, float(hits.max())), int(hits.argmax())
        tries = np.linspace(tries[max(0, at - 1)], tries[min(len(tries) - 1, at + 1)], TRIES)
    return min(1.0, found)


def _log_hit(inverse: float, n: float, radius: Array, r: Array, error: float) -> Array:
    """Log P(|radius y / |y| - X|^2 <= error) for each |X| = r."""
    gap = (error - (radius - r) ** 2) / (2 * radius * r)  # 1 minus the required cosine
    found = np.where(gap >= 2, 0.0, -np.inf)
    near = (gap > 0) & (gap < 2)
    some = gap[near]
    found[near] = log_cone(inverse, (1 - some) / np.sqrt(some * (2 - some)), n)
    return found


def _sampled_steps(steps: int, q: float) -> tuple[Array, Array]:
    """Numbers of sampled steps and their probabilities; less than 1e-17 in total is left out."""
    if q == 1:
        return np.array([float(steps)]), np.array([1.0])
    law = stats.binom(steps, q)
    low, high = law.ppf(DUST), steps - stats.binom(steps, 1 - q).ppf(DUST)
    k = np.arange(max(0.0, low), min(steps, high) + 1)
    return k, law.pmf(k)


def _relative_error(n: Array, eta: Array, r: Array) -> Array:
    """E = N eta / |X|^2, the squared sine of the angle that succeeds."""
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(n * (eta / r / r))


def _log_gamma(sigma: Array, n: Array, e: Array) -> Array:
    inside = np.where(e < 1, e, 0.5)
    with np.errstate(divide="ignore", over="ignore"):
        found = log_cone(1 / sigma, np.sqrt((1 - inside) / inside), n)
    return np.where((e >= 1) | (sigma == 0), 0.0, found)


def _cotangent(ncc: ArrayLike) -> Array:
    """The cotangent of the angle whose cosine is the correlation."""
    level = between("ncc", ncc, -1, 1, closed=False)
    with np.errstate(divide="ignore"):
        return np.asarray(level / np.sqrt((1 - level) * (1 + level)))


def _least_noise(
    at_log: Callable[[Array], Array], at: Callable[[Array], Array], gamma: Array
) -> Any:
    """The smallest noise multiplier at which a law is at most gamma.

    Both functions give the logarithm of the law, of the noise's logarithm and of the noise.
    """
    target = np.log(gamma)
    logs = least_root(
        lambda x: at_log(x) - target,
        np.full(gamma.shape, np.log(SMALLEST)),
        np.full(gamma.shape, np.log(LARGEST)),
    )
    return one(inward(lambda s: np.exp(at(s)) <= gamma, np.exp(logs), 1))
