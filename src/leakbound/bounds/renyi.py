"""Earlier bounds, for comparison: errors of unbiased attackers, and gammas from Renyi privacy.

The bounds on errors do not hold for biased attackers: a zero image, shrinkage, a prior or a network
beats them. The gammas hold for every attacker and are looser than `identification.gaussian`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from leakbound.bounds.identification import gaussian, log_blind
from leakbound.bounds.law import Array, Scope, non_negative, one, scoped, whole

__all__ = ["balle_gamma", "dfil", "fisher_bound", "guo_bound", "hannun_loss", "renyi_gamma"]

RANK = 1e-12
"""Smaller eigenvalues, relative to the largest, count as 0: directions that are not released."""
_AT_ONE = Scope(
    covers="equivariant",
    attackers="unbiased attackers only",
    prior="the one example at which the Jacobian was taken",
    known="everything but the example and the noise",
    not_said="anything about biased attackers: a zero image, shrinkage, a prior, a network",
    equation="Hannun et al. 2021; Guo et al. 2022",
)
_PRIVATE = replace(
    gaussian.scope,
    attackers="all attackers of a mechanism with the stated privacy",
    equation="Balle et al. 2022",
)


@scoped(
    replace(
        _AT_ONE,
        prior="every example of a domain with the given diameters",
        equation="Guo et al. 2022",
    )
)
def guo_bound(
    noise_multiplier: ArrayLike, *, dim: int, diameters: ArrayLike, steps: ArrayLike = 1
) -> Any:
    """Smallest mean squared error of an unbiased attacker, from the 2-Renyi divergence.

    mean(diameters^2) / 4 / (e^epsilon - 1), epsilon = 4 steps / noise^2. Two examples are compared,
    so their clipped gradients differ by up to two clip norms.

    Shapes: noise_multiplier and steps broadcast; diameters a number or (dim,).

    Args:
        noise_multiplier: noise standard deviation / clip norm.
        dim: N, the number of values of one example.
        diameters: largest difference between two examples in each value, input units.
        steps: number of full-batch steps, composed adaptively.

    Returns:
        A lower bound on the error per value, squared input units; infinite without information,
        because then no unbiased attacker exists.

    Raises:
        ValueError: diameters has another shape, or a number is outside its range.

    Source: Guo et al. 2022, with the Gaussian mechanism's divergence of order 2
    (replacing one example).

    Example:
        >>> round(guo_bound(2.0, dim=4, diameters=1.0), 4)
        0.1455
    """
    sigma, count = non_negative("noise_multiplier", noise_multiplier), whole("steps", steps)
    n, wide = int(whole("dim", dim)), non_negative("diameters", diameters)
    if wide.shape not in ((), (n,)):
        raise ValueError(f"diameters has shape {wide.shape}; give a number or ({n},)")
    with np.errstate(divide="ignore", over="ignore"):
        square = float((wide**2).mean())
        power = np.asarray(np.expm1(4 * count / sigma**2))
        return one(np.where(square > 0, square / 4 / np.where(square > 0, power, 1.0), 0.0))


@scoped(_AT_ONE)
def fisher_bound(information: ArrayLike) -> Any:
    """Smallest mean squared error of an unbiased attacker at one example: tr(I^+) / N (Cramér-Rao).

    Directions without information are left out, not counted as known. Information adds over steps,
    and a step that samples the example at a rate q has at most q times its information. After full
    clipping of a linear trap the norm is not released: the bound is that on the tangent space.
    1 / dfil^2 is a weaker bound.

    Shapes: information (..., N, N), symmetric; the result (...).

    Args:
        information: Fisher information of the example, J^T J / (noise clip_norm)^2 with J the
            Jacobian of the clipped gradient.

    Raises:
        ValueError: information is not square and symmetric, or has a negative eigenvalue.

    Source: Hannun et al. 2021, Guo et al. 2022.

    Example:
        >>> fisher_bound([[4.0, 0.0], [0.0, 1.0]])
        0.625
    """
    values = _spectrum(information)
    inverse = np.divide(1.0, values, out=np.zeros_like(values), where=_released(values))
    return one(inverse.sum(-1) / values.shape[-1])


@scoped(_AT_ONE)
def hannun_loss(information: ArrayLike) -> Any:
    """eta: any unbiased estimate of any unit combination of inputs errs by at least 1 / eta (rms).

    It is the root of the largest eigenvalue of I. Shapes and errors as in `fisher_bound`.

    Source: Hannun et al. 2021.

    Example:
        >>> hannun_loss([[4.0, 0.0], [0.0, 1.0]])
        2.0
    """
    return one(np.sqrt(_spectrum(information)[..., -1]))


@scoped(_AT_ONE)
def dfil(information: ArrayLike) -> Any:
    """Diagonal Fisher information loss: sqrt(tr(I) / N), or sqrt(N tr(I)) / r for r directions.

    1 / dfil^2 is a weaker bound than `fisher_bound`. Shapes and errors as there.

    Source: Guo et al. 2022.

    Example:
        >>> round(dfil([[4.0, 0.0], [0.0, 1.0]]) ** 2, 9)
        2.5
    """
    values = _spectrum(information)
    rank = np.maximum(_released(values).sum(-1), 1)
    return one(np.sqrt(values.shape[-1] * values.sum(-1)) / rank)


@scoped(_PRIVATE)
def balle_gamma(
    epsilon: ArrayLike,
    *,
    order: ArrayLike = np.inf,
    kappa: ArrayLike | None = None,
    log_kappa: ArrayLike | None = None,
) -> Any:
    """Upper bound on the probability of a goal: (kappa e^epsilon)^((order - 1) / order).

    Shapes: all broadcast.

    Args:
        epsilon: of (order, epsilon) Renyi privacy, at least 0, against the run without it.
        order: above 1; infinite for pure epsilon-DP.
        kappa: prior-only success, in [0, 1]; or
        log_kappa: its natural logarithm.

    Raises:
        ValueError: an order of 1 or less, a negative epsilon, or a kappa outside [0, 1].

    Source: Balle et al. 2022.

    Example:
        >>> round(balle_gamma(np.log(3.0), kappa=0.1), 9)
        0.3
    """
    spent, degree = non_negative("epsilon", epsilon), np.asarray(order, float)
    if not np.all(degree > 1):
        raise ValueError(f"order is {order!r}; give numbers above 1, infinity for pure privacy")
    spent, blind = np.broadcast_arrays(spent, log_blind(kappa, log_kappa))
    most = np.where(spent == np.inf, 0.0, blind + np.where(spent == np.inf, 0.0, spent))
    return one(np.exp(np.minimum(0.0, most * (1 - 1 / degree))))


@scoped(_PRIVATE)
def renyi_gamma(
    noise_multiplier: ArrayLike,
    *,
    kappa: ArrayLike | None = None,
    log_kappa: ArrayLike | None = None,
    steps: ArrayLike = 1,
) -> Any:
    """`balle_gamma` of the Gaussian mechanism at its best order.

    exp(-(sqrt(log 1/kappa) - mu / sqrt 2)^2), mu = sqrt(steps) / noise; 1 if
    mu^2 / 2 >= log 1/kappa. Order a costs a mu^2 / 2 (add or remove one); the best is
    a = sqrt(2 log 1/kappa) / mu.

    Shapes: all broadcast.

    Args:
        noise_multiplier: noise standard deviation / clip norm.
        kappa: prior-only success, in [0, 1]; or
        log_kappa: its natural logarithm.
        steps: number of full-batch steps, composed adaptively.

    Raises:
        ValueError: kappa outside [0, 1], negative noise, steps below 1.

    Source: Balle et al. 2022, with the Gaussian mechanism's divergence.

    Example:
        >>> round(renyi_gamma(1.0, kappa=0.1), 4)
        0.5186
    """
    sigma, blind, count = np.broadcast_arrays(
        non_negative("noise_multiplier", noise_multiplier),
        log_blind(kappa, log_kappa),
        whole("steps", steps),
    )
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        room = np.sqrt(-blind) - np.sqrt(count / 2) / sigma
        return one(np.where(room > 0, np.exp(-(room**2)), 1.0))


def _spectrum(information: ArrayLike) -> Array:
    matrix = np.asarray(information, float)
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or not np.isfinite(matrix).all():
        raise ValueError(f"information has shape {matrix.shape}; give finite (..., N, N) matrices")
    size = np.abs(matrix).max(initial=0.0)
    if np.abs(matrix - matrix.swapaxes(-1, -2)).max(initial=0.0) > 1e-9 * size:
        raise ValueError("information is not symmetric; give J^T J / (noise clip_norm)^2")
    values = np.linalg.eigvalsh(matrix)
    if values.min(initial=0.0) < -1e-9 * size:
        raise ValueError(f"information has the eigenvalue {values.min():.3g}; give none below 0")
    return np.maximum(values, 0.0)


def _released(values: Array) -> Array:
    return np.asarray((values > RANK * values[..., -1:]) & (values > 0))
