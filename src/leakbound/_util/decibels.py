"""Convert decibels to errors and back; the only place that does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

EXTREME = 300.0
"""Decibels beyond which an error is not a useful number."""
PSNR_CAP = 150.0
"""The PSNR of identical examples, in dB: records hold no infinity."""


def mse_of_psnr(psnr: Any, data_range: float = 1.0) -> Any:
    """The mean squared error R^2 / 10^(PSNR / 10) of a PSNR in dB, in squared input units.

    Args:
        psnr: a number or a numpy array in dB, cut at `EXTREME`; the result is 0 for infinity.
        data_range: R, high - low in input units.

    Example:
        >>> mse_of_psnr(20.0)
        0.01
    """
    if isinstance(psnr, np.ndarray):
        error = data_range**2 / 10 ** (np.clip(psnr, -EXTREME, EXTREME) / 10)
        return np.where(psnr == np.inf, 0.0, error)
    if psnr == math.inf:
        return 0.0
    # Without limits the power would overflow, or be 0 and divide by zero.
    return data_range**2 / 10 ** (max(min(psnr, EXTREME), -EXTREME) / 10)


def psnr_of_mse(mse: Any, data_range: float = 1.0) -> Any:
    """The PSNR 10 log10(R^2 / MSE) in dB: the inverse of `mse_of_psnr`; infinite for an MSE of 0.

    Example:
        >>> psnr_of_mse(0.01), psnr_of_mse(0.0)
        (20.0, inf)
    """
    if isinstance(mse, np.ndarray):
        with np.errstate(divide="ignore"):  # an exact candidate is no fault
            return 10 * np.log10(data_range**2 / mse)
    return 10 * math.log10(data_range**2 / mse) if mse > 0 else math.inf


def capped_psnr(mse: Any, data_range: float = 1.0) -> Any:
    """The PSNR of a reconstruction, or of a tensor of them, in dB, at most `PSNR_CAP`.

    Example:
        >>> capped_psnr(0.01), capped_psnr(0.0)
        (20.0, 150.0)
    """
    least = 10 ** (-PSNR_CAP / 10)
    error = mse / data_range**2
    if isinstance(error, float | int):
        return -10 * math.log10(max(error, least))
    return -10 * error.clamp_min(least).log10()


def root_of_psnr(psnr: float) -> float:
    """The root mean squared error 10^(-PSNR / 20), in units of the data's range.

    Example:
        >>> root_of_psnr(20.0)
        0.1
    """
    return float(10 ** (-psnr / 20))


def psnr_of_root(root: float) -> float:
    """The PSNR in dB: the inverse of `root_of_psnr`.

    Example:
        >>> psnr_of_root(0.1)
        20.0
    """
    return -20 * math.log10(root)
