"""What an attacker who has so many bits cannot do: name a record, or rebuild it with little error.

All functions cover all attackers, on average over the prior of records. The bits are the mutual
information of the record and all that was sent, such as `information.Leakage.value`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from leakbound.bounds.law import (
    Array,
    between,
    inward,
    least_where,
    non_negative,
    one,
    probability,
    whole,
)

__all__ = ["gaussian_floor", "shannon_lower_bound", "success"]

_2_PI_E = 2 * math.pi * math.e


def success(information: ArrayLike, *, kappa: ArrayLike) -> Any:
    """Most probability of a goal of blind success kappa, from so many bits (Fano).

    The largest p with p log2(p / kappa) + (1 - p) log2((1 - p) / (1 - kappa)) <= information. For
    one of M equally likely candidates kappa is 1 / M. It covers all attackers, on average over the
    records' prior.

    Shapes: broadcast.

    Raises:
        ValueError: kappa outside (0, 1), information below 0.

    Source: Cover and Thomas, "Elements of Information Theory", section 2.10.

    Example:
        >>> round(success(1.0, kappa=0.01), 3)
        0.277
    """
    bits, blind = np.broadcast_arrays(
        non_negative("information", information), probability("kappa", kappa)
    )

    def enough(p: Array) -> Array:
        return np.asarray(special.kl_div(p, blind) + special.kl_div(1 - p, 1 - blind)) >= (
            bits * math.log(2)
        )

    high = np.ones_like(blind)
    full = -np.log2(blind) <= bits
    found = least_where(lambda p: enough(p) | (p >= 1), blind, high)
    found = inward(lambda p: enough(np.minimum(p, 1)) | (p >= 1) | full, found, 1.0)
    return one(np.asarray(np.where(full, 1.0, np.minimum(found, 1.0))))


def shannon_lower_bound(information: ArrayLike, *, entropy: ArrayLike, dimension: ArrayLike) -> Any:
    """Least mean squared error per coordinate from so many bits: 2^(2 (h - I) / N) / (2 pi e).

    It covers all attackers, on average over the prior.

    Shapes: broadcast.

    Args:
        information: I, bits about the whole record.
        entropy: h, the record's differential entropy in bits, in input units; it may be negative.
        dimension: N, coordinates of a record.

    Assumptions: the prior has a density. Images of 256 levels have none: h is minus infinity and
        the floor 0.

    Source: Cover and Thomas, "Elements of Information Theory", sections 8.6 and 10.3.

    Example:
        >>> h = 0.5 * np.log2(2 * np.pi * np.e * 9)  # N(0, 9)
        >>> round(shannon_lower_bound(1.0, entropy=h, dimension=1), 6)
        2.25
    """
    bits, n = non_negative("information", information), whole("dimension", dimension)
    h = between("entropy", entropy, -np.inf, np.finfo(float).max)
    with np.errstate(over="ignore"):
        return one(np.asarray(np.exp2(2 * (h - bits) / n) / _2_PI_E))


def gaussian_floor(information: ArrayLike, variances: ArrayLike) -> Any:
    """The same for a Gaussian record, exactly: coordinates of small variance are not told at all.

    The distortion-rate function, by reverse water-filling: mean of min(variance, level), with the
    level where the sum of 1/2 log2(variance / level) over those above it is the information. It is
    `shannon_lower_bound` where the level is below every variance, and above it elsewhere.

    Shapes: information any; the answer the same.

    Args:
        information: bits about the whole record.
        variances: (N,) of the record, or the eigenvalues of its covariance; 0 is allowed.

    Source: Cover and Thomas, "Elements of Information Theory", theorem 10.3.3.

    Example:
        >>> gaussian_floor(1.0, [4.0, 1.0])
        1.0
    """
    bits = non_negative("information", information)
    values = np.sort(non_negative("variances", variances))[::-1]
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"variances has shape {values.shape}; give a list of finite numbers")
    told = values[values > 0]
    if not len(told):
        return one(np.zeros(bits.shape))
    logs = np.log2(told)
    total, count = np.cumsum(logs), np.arange(1, len(told) + 1)
    levels = (total - 2 * bits[..., None]) / count
    below = np.append(logs[1:], -np.inf)
    at = np.argmax(levels >= below, -1)
    level = np.exp2(np.take_along_axis(levels, at[..., None], -1))[..., 0]
    rest = np.append(np.cumsum(told[::-1])[::-1], 0.0)[at + 1]  # variances below the level
    return one(np.asarray((level * count[at] + rest) / len(values)))
