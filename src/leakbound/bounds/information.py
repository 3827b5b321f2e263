"""Lower bounds on what stays unknown about an example when few bits are sent, over its prior."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from leakbound.bounds.law import Array, arguments, between, non_negative, one, whole
from leakbound.bounds.roots import inward, least_where

__all__ = ["fano", "gaussian_distortion", "shannon_lower_bound"]


def fano(information: ArrayLike, *, kappa: ArrayLike) -> Any:
    """Upper bound on the probability of a goal of prior-only success kappa, from bits (Fano).

    The largest p with p log2(p / kappa) + (1 - p) log2((1 - p) / (1 - kappa)) <= information, the
    bits that all sent data carry about the example. For one of M equally likely candidates, kappa
    is 1 / M.

    Source: Cover and Thomas, "Elements of Information Theory", section 2.10.

    Example:
        >>> round(fano(1.0, kappa=0.01), 3)
        0.277
    """
    bits, blind = arguments(information=information, kappa=kappa)

    def enough(p: Array) -> Array:
        nats = np.asarray(special.kl_div(p, blind) + special.kl_div(1 - p, 1 - blind))
        return nats >= (bits * math.log(2))

    full = -np.log2(blind) <= bits
    found = least_where(lambda p: enough(p) | (p >= 1), blind, np.ones_like(blind))
    found = inward(lambda p: enough(np.minimum(p, 1)) | (p >= 1) | full, found, 1.0)
    return one(np.asarray(np.where(full, 1.0, np.minimum(found, 1.0))))


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
    bits, n = non_negative("information", information), whole("dimension", dimension)
    h = between("entropy", entropy, -np.inf, np.finfo(float).max)
    with np.errstate(over="ignore"):
        return one(np.asarray(np.exp2(2 * (h - bits) / n) / (2 * math.pi * math.e)))


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
    bits = non_negative("information", information)
    values = np.sort(non_negative("variances", variances))[::-1]
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"variances has shape {values.shape}; give a list of finite numbers")
    some = values[values > 0]
    if not len(some):
        return one(np.zeros(bits.shape))
    logs = np.log2(some)
    total, count = np.cumsum(logs), np.arange(1, len(some) + 1)
    levels = (total - 2 * bits[..., None]) / count
    below = np.append(logs[1:], -np.inf)
    at = np.argmax(levels >= below, -1)
    level = np.exp2(np.take_along_axis(levels, at[..., None], -1))[..., 0]
    rest = np.append(np.cumsum(some[::-1])[::-1], 0.0)[at + 1]  # variances below the level
    return one(np.asarray((level * count[at] + rest) / len(values)))
