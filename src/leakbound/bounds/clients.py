"""Laws of rounds that are no plain Gaussian: adaptive clips, pure privacy, batch sizes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike

from leakbound.bounds.identification import log_blind
from leakbound.bounds.law import between, one, positive, whole

__all__ = ["adaptive_mu", "batch_size_power", "pure"]


def adaptive_mu(
    noise_multiplier: float,
    *,
    bit_noise: float,
    norm_ratio: float = 1.0,
) -> float:
    """The mu of one round that releases the noisy sum and the noisy number of clipped clients.

    The noise of the sum is raised to z_v = (z^-2 - (2 s_b)^-2)^-1/2, so that both together are one
    Gaussian mechanism of multiplier z (Andrew et al. 2021). If the noise follows the next round's
    clip norm, the sum has (C_t / C_{t+1}) / z_v in place of 1 / z_v.

    Args:
        noise_multiplier: z, of both releases together.
        bit_noise: s_b, standard deviation of the noise on the number of clipped clients.
        norm_ratio: C_t / C_{t+1} if the noise follows the next norm; 1 if it follows this one.

    Raises:
        ValueError: z is at least 2 s_b, so no noise on the sum is enough.

    Source: Andrew et al. 2021, theorem 1; docs/federated_privacy.md.

    Example:
        >>> round(adaptive_mu(1.0, bit_noise=5.0), 5)
        1.0
        >>> round(adaptive_mu(1.0, bit_noise=5.0, norm_ratio=math.exp(0.1)), 5)
        1.10417
    """
    positive("bit_noise", bit_noise)
    positive("norm_ratio", norm_ratio)
    precision = float(positive("noise_multiplier", noise_multiplier)) ** -2 - (2 * bit_noise) ** -2
    if precision <= 0:
        raise ValueError(
            f"noise_multiplier is {noise_multiplier:g}, not below twice bit_noise, {bit_noise:g}: "
            "the number of clipped clients alone reveals more; give more bit_noise"
        )
    return math.sqrt(norm_ratio**2 * precision + (2 * bit_noise) ** -2)


def pure(
    epsilon: ArrayLike,
    *,
    kappa: ArrayLike | None = None,
    log_kappa: ArrayLike | None = None,
) -> Any:
    """Upper bound on any attacker's success after a mechanism of pure epsilon; broadcasts.

    min(e^epsilon kappa, 1 - e^-epsilon (1 - kappa)): the trade-off function of pure differential
    privacy at the prior-only success kappa.

    Source: Wasserman and Zhou 2010; Dong, Roth and Su 2022, proposition 3.

    Example:
        >>> pure([0.0, 1.0], kappa=0.1).round(4).tolist()
        [0.1, 0.2718]
    """
    level = between("epsilon", epsilon, 0.0, np.inf)
    blind = log_blind(kappa, log_kappa)
    with np.errstate(over="ignore", invalid="ignore"):
        rise = np.exp(np.minimum(0.0, level + blind))
        bound = np.minimum(rise, 1 + np.exp(-level) * np.expm1(blind))
    # An infinite epsilon plus a log kappa of minus infinity is NaN.
    return one(np.where(blind == -np.inf, np.where(level == np.inf, 1.0, bound), bound))


def batch_size_power(
    kappa: ArrayLike,
    *,
    batch: ArrayLike,
    weights: ArrayLike,
) -> Any:
    """How often the noise's level alone shows whether a batch has B or B - 1 rows, at level kappa.

    For noise z C / B, divided by the rows that were drawn, whose P squares are chi-squared: the
    test takes B - 1 for true above the quantile of B. It holds for any multiplier z. Then
    participation is visible, and no bound that counts on hidden batches holds.

    Shapes: all broadcast.

    Args:
        kappa: the test's level.
        batch: B, at least 2.
        weights: P, the number of noisy values.

    Source: this project (docs/federated_privacy.md).

    Example:
        >>> batch_size_power(1e-3, batch=60, weights=[1e4, 5.3e4]).round(3).tolist()
        [0.244, 0.991]
    """
    rows = whole("batch", batch, 2)
    count = whole("weights", weights)
    level = between("kappa", kappa, 0.0, 1.0)
    smaller = ((rows - 1) / rows) ** 2
    return one(np.asarray(scipy.stats.chi2.sf(scipy.stats.chi2.isf(level, count) * smaller, count)))
