"""Lower bounds on what stays unknown about an example when few bits are sent, over its prior."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[Any]  # of float64
HALVINGS = 100


def fano(information: ArrayLike, *, kappa: ArrayLike) -> Any:
    """Upper bound on the probability of a goal of prior-only success kappa, from bits (Fano).

    The largest p with p log2(p / kappa) + (1 - p) log2((1 - p) / (1 - kappa)) <= information, the
    bits that all sent data carry about the example. For one of M equally likely candidates, kappa
    is 1 / M. All broadcast.

    Source: Cover and Thomas, "Elements of Information Theory", section 2.10.

    Example:
        >>> round(fano(1.0, kappa=0.01), 3)
        0.277
    """
    bits, blind = np.broadcast_arrays(
        _within("information", information, 0, math.inf), _within("kappa", kappa, 0, 1)
    )
    if not np.all((blind > 0) & (blind < 1)):
        raise ValueError(f"kappa is {blind.flat[0]:g}; give numbers strictly between 0 and 1")
    low = blind
    high = np.ones(blind.shape)
    for _ in range(HALVINGS):  # `high` always has as many bits, or is 1
        p = (low + high) / 2
        nats = special.kl_div(p, blind) + special.kl_div(1 - p, 1 - blind)
        enough = nats >= bits * math.log(2)
        low = np.where(enough, low, p)
        high = np.where(enough, p, high)
    return _one(np.where(-np.log2(blind) <= bits, 1.0, high))


def shannon_lower_bound(information: ArrayLike, *, entropy: ArrayLike, dimension: ArrayLike) -> Any:
    """Smallest mean squared error per coordinate, given some bits: 2^(2 (h - I) / N) / (2 pi e).

    Shapes: broadcast.

    Args:
        information: I, bits about the whole example.
        entropy: h, the example's differential entropy in bits, in input units; may be negative.
        dimension: N, coordinates of an example.

    Assumptions: the prior has a density. Images of 256 levels have none: h is minus infinity and
        the bound is 0.

    Source: Cover and Thomas, "Elements of Information Theory", sections 8.6 and 10.3.

    Example:
        >>> h = 0.5 * np.log2(2 * np.pi * np.e * 9)  # N(0, 9)
        >>> round(shannon_lower_bound(1.0, entropy=h, dimension=1), 6)
        2.25
    """
    bits = _within("information", information, 0, math.inf)
    n = _within("dimension", dimension, 1)
    h = _within("entropy", entropy, -math.inf)
    with np.errstate(over="ignore"):
        return _one(np.exp2(2 * (h - bits) / n) / (2 * math.pi * math.e))


def gaussian_distortion(information: ArrayLike, variances: ArrayLike) -> Any:
    """The same for a Gaussian example, exactly: its distortion-rate function.

    By reverse water-filling over `variances` (N,), the eigenvalues of its covariance: the mean of
    min(variance, level). The level is such that the sum of 1/2 log2(variance / level) over the
    variances above it is the information. The result equals `shannon_lower_bound` if the level is
    below every variance, and is above it otherwise.

    Source: Cover and Thomas, "Elements of Information Theory", theorem 10.3.3.

    Example:
        >>> gaussian_distortion(1.0, [4.0, 1.0])
        1.0
    """
    bits = _within("information", information, 0, math.inf)
    values = np.sort(_within("variances", variances, 0))[::-1]
    if values.ndim != 1 or not len(values):
        raise ValueError(f"variances has shape {values.shape}; give a list of finite numbers")
    some = values[values > 0]
    if not len(some):
        return _one(np.zeros(bits.shape))
    logs = np.log2(some)
    total = np.cumsum(logs)
    count = np.arange(1, len(some) + 1)
    levels = (total - 2 * bits[..., None]) / count
    below = np.append(logs[1:], -np.inf)
    at = np.argmax(levels >= below, -1)
    level = np.exp2(np.take_along_axis(levels, at[..., None], -1))[..., 0]
    rest = np.append(np.cumsum(some[::-1])[::-1], 0.0)[at + 1]  # variances below the level
    return _one((level * count[at] + rest) / len(values))


def _within(name: str, value: ArrayLike, low: float, high: float = np.finfo(float).max) -> Array:
    array = np.asarray(value, float)
    good = (array >= low) & (array <= high)
    if not np.all(good):  # also NaN
        raise ValueError(f"{name} is {array[~good].flat[0]:g}; give numbers from {low:g} on")
    return array


def _one(value: Any) -> Any:
    """A float for a single number, the array for several."""
    return float(value) if np.ndim(value) == 0 else np.asarray(value)
