"""Rounding to the safe side: an upper bound never goes down, a lower one never up."""

from __future__ import annotations

import math


def rounded(value: float, digits: int, *, up: bool) -> float:
    """A number of so many significant digits, at least as large if `up`, else at most.

    Example:
        >>> rounded(0.00100449, 3, up=True), rounded(0.00100449, 3, up=False)
        (0.00101, 0.001)
    """
    if value == 0 or not math.isfinite(value):
        return value
    unit = 10.0 ** (math.floor(math.log10(abs(value))) + 1 - digits)
    if unit == 0 or not math.isfinite(unit):
        return value
    turned = (math.ceil if up else math.floor)(value / unit) * unit
    short = float(f"{turned:.{digits}g}")
    return short if (short >= value) == up or short == value else turned


def of_log(log: float) -> str:
    """A probability as text from its natural logarithm, however small; rounded up."""
    power = log / math.log(10)
    if power > -300:
        return most(math.exp(log))
    return f"1e{math.ceil(power):d}" if math.isfinite(power) else "0"


def most(value: float, digits: int = 3) -> str:
    """An upper bound as text."""
    return f"{rounded(value, digits, up=True):.{digits}g}"


def least(value: float, digits: int = 3) -> str:
    """A lower bound as text."""
    return f"{rounded(value, digits, up=False):.{digits}g}"
