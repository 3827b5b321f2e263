"""Numbers as text, rounded to the safe side: an upper bound never goes down, a lower one never up.

A number below `FAINT` is shown as "<1e-9": its digits would suggest a precision that no assumption
about the data has. Files keep the exact number.
"""

from __future__ import annotations

import math

FAINT, BELOW = 1e-9, "<1e-9"
"""The smallest number that is shown with digits, and the text for smaller ones."""


def rounded(value: float, digits: int, *, up: bool) -> float:
    """A number with `digits` significant digits, at least the value if `up`, else at most.

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
    """A probability as text from its natural logarithm, however small; rounded up.

    Example:
        >>> of_log(math.log(0.5)), of_log(-900.0), of_log(-math.inf)
        ('0.5', '<1e-9', '0')
    """
    if log == -math.inf:
        return "0"
    return BELOW if log < math.log(FAINT) else most(math.exp(log))


def most(value: float, digits: int = 3) -> str:
    """An upper bound as text.

    Example:
        >>> most(0.00100449), most(2.51e-20)
        ('0.00101', '<1e-9')
    """
    return _faint(value) or f"{rounded(value, digits, up=True):.{digits}g}"


def least(value: float, digits: int = 3) -> str:
    """A lower bound as text."""
    return _faint(value) or f"{rounded(value, digits, up=False):.{digits}g}"


def short(value: float, digits: int = 3) -> str:
    """A number that bounds nothing, as text."""
    return _faint(value) or f"{value:.{digits}g}"


def percent(share: float) -> str:
    """A share from 0 to 1 in percent: 0% and 100% are exact, and a small share is not shown as 0.

    Example:
        >>> [percent(share) for share in (0, 1e-6, 0.00066, 0.9405, 0.99999, 1)]
        ['0%', '<0.01%', '0.07%', '94.05%', '>99.99%', '100%']
    """
    if share in (0, 1):
        return f"{share:.0%}"
    return "<0.01%" if share < 1e-4 else ">99.99%" if share > 0.9999 else f"{share:.2%}"


def _faint(value: float) -> str:
    return BELOW if 0 < value < FAINT else ""
