"""Paper C's law of the unbiased estimator: P(MSE <= eta) = P(N/2, N eta / (2 tau^2)).

tau is the noise times the example's norm. It is exact for unbiased and translation-equivariant
estimators of the linear trap, for every fixed example. It is no bound on attackers: the zero image,
shrinkage and gamma* (`leakbound.bounds.from_scratch.exact`) do better. Errors eta are mean squared
errors in squared input units. All arguments broadcast.

Source: paper C, Theorem IV.5 and Corollaries IV.6 to IV.9 (H4 to H7).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special


def unbiased_success(
    noise_multiplier: ArrayLike, *, dim: ArrayLike, eta: ArrayLike, norm: ArrayLike = 1.0
) -> Any:
    """Probability that the unbiased estimator's MSE is at most eta.

    Example:
        >>> round(unbiased_success(0.1, dim=784, eta=0.01), 3)
        0.507
    """
    sigma, n, error, r = np.broadcast_arrays(*map(_floats, (noise_multiplier, dim, eta, norm)))
    with np.errstate(all="ignore"):
        scaled = (np.sqrt(error) / r / sigma) ** 2 * n / 2
    sure = (sigma == 0) | (error == np.inf)
    return _one(special.gammainc(n / 2, np.where(sure, np.inf, scaled)))


def unbiased_error(
    noise_multiplier: ArrayLike, *, dim: ArrayLike, gamma: ArrayLike, norm: ArrayLike = 1.0
) -> Any:
    """The MSE that the estimator attains with probability gamma.

    Example:
        >>> round(unbiased_error(0.1, dim=784, gamma=0.5), 6)
        0.009991
    """
    sigma, n, chance, r = map(_floats, (noise_multiplier, dim, gamma, norm))
    with np.errstate(over="ignore"):
        return _one((sigma * r * np.sqrt(special.gammaincinv(n / 2, chance) * 2 / n)) ** 2)


def unbiased_noise(
    gamma: ArrayLike, *, dim: ArrayLike, eta: ArrayLike, norm: ArrayLike = 1.0
) -> Any:
    """The noise multiplier at which the estimator attains eta with probability gamma.

    Example:
        >>> round(unbiased_noise(0.1, dim=1, eta=1.0), 3)
        7.958
    """
    chance, n, error, r = map(_floats, (gamma, dim, eta, norm))
    with np.errstate(divide="ignore", over="ignore"):
        return _one(np.sqrt(error) / r * np.sqrt(n / 2 / special.gammaincinv(n / 2, chance)))


def _floats(value: ArrayLike) -> Any:
    return np.asarray(value, float)


def _one(value: Any) -> Any:
    """A float for a single number, the array for several."""
    return float(value) if np.ndim(value) == 0 else np.asarray(value)
