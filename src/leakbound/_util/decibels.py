"""PSNR and mean squared error, one from the other: the only place that converts them."""

from __future__ import annotations

import math

EXTREME = 300.0
"""Decibels beyond which an error is no number of use; values are cut there."""


def squared_error(psnr: float, width: float = 1.0) -> float:
    """The mean squared error of a PSNR, for inputs in a range of `width`.

    Example:
        >>> squared_error(20.0)
        0.01
    """
    return float(width**2 / 10 ** (max(min(psnr, EXTREME), -EXTREME) / 10))


def psnr_of(error: float, width: float = 1.0) -> float | None:
    """The PSNR of a mean squared error; None of an error of 0.

    Example:
        >>> psnr_of(0.01), psnr_of(0.0)
        (20.0, None)
    """
    return 10 * math.log10(width**2 / error) if error > 0 else None
