"""Numbers as text: the only rule for terminals and pages.

What bounds something is rounded once, against us: an upper bound never goes down, a lower one never
up. A number below `FAINT` is shown as "<1e-9": its digits would suggest a precision that no
assumption about the data has. Files keep the exact number.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal

FAINT = 1e-9
BELOW = "<1e-9"
"""The smallest number that is shown with digits, and the text for smaller ones."""
UNKNOWN = "–"
"""The text for a number that is not known."""
_EVERY_DIGIT = Context(prec=800)  # of the largest and the smallest float


def rounded(
    value: float,
    digits: int,
    *,
    up: bool,
) -> float:
    """A number with `digits` significant digits, at least the value if `up`, else at most.

    The value is the decimal number that Python prints for it, so 0.0001 stays what it is.

    Example:
        >>> rounded(0.00100449, 3, up=True), rounded(0.00100449, 3, up=False)
        (0.00101, 0.001)
        >>> rounded(1e-4, 3, up=True), rounded(1e-7, 3, up=False)
        (0.0001, 1e-07)
    """
    if value == 0 or not math.isfinite(value):
        return value
    exact = Decimal(repr(float(value)))
    last = exact.adjusted() + 1 - digits
    return float(_to_place(exact, last, ROUND_CEILING if up else ROUND_FLOOR))


def format_upper(value: float | None, digits: int = 3) -> str:
    """An upper bound as text, with so many significant digits.

    Example:
        >>> format_upper(0.00100449), format_upper(2.51e-20), format_upper(None)
        ('0.00101', '<1e-9', '–')
    """
    return UNKNOWN if value is None else format_number(rounded(value, digits, up=True), digits)


def format_lower(value: float | None) -> str:
    """A lower bound as text, with three significant digits."""
    if value is None:
        return UNKNOWN
    return BELOW if 0 < value < FAINT else format_number(rounded(value, 3, up=False))


def format_upper_log(log: float) -> str:
    """A probability as text from its natural logarithm, however small; rounded up.

    Example:
        >>> format_upper_log(math.log(0.5)), format_upper_log(-900.0), format_upper_log(-math.inf)
        ('0.5', '<1e-9', '0')
    """
    if log == -math.inf:
        return "0"
    return BELOW if log < math.log(FAINT) else format_upper(math.exp(log))


def format_number(value: float | None, digits: int = 3) -> str:
    """A number that bounds nothing, with so many significant digits.

    Example:
        >>> format_number(1234.5), format_number(0.25), format_number(None)
        ('1.23e+03', '0.25', '–')
    """
    if value is None or math.isnan(value):
        return UNKNOWN
    return BELOW if 0 < value < FAINT else f"{value:.{digits}g}"


def format_fixed(
    value: float | None,
    digits: int = 1,
    *,
    up: bool | None = None,
) -> str:
    """A number with so many digits after the point; as a bound, rounded up or down.

    Example:
        >>> format_fixed(20.04), format_fixed(20.04, up=True), format_fixed(-0.04)
        ('20.0', '20.1', '0.0')
    """
    if value is None or math.isnan(value):
        return UNKNOWN
    if math.isinf(value):
        return f"{value}"
    how = {None: ROUND_HALF_EVEN, True: ROUND_CEILING, False: ROUND_FLOOR}[up]
    exact = _to_place(Decimal(repr(float(value))), -digits, how)
    return f"{exact + 0:f}"  # adding 0 turns a negative zero into zero


def format_percent(
    share: float | None,
    digits: int = 2,
    *,
    up: bool | None = None,
) -> str:
    """A share from 0 to 1 in percent; as the end of an interval, rounded up or down.

    0% and 100% are exact: no other share is rounded to the nearest of them.

    Example:
        >>> [format_percent(share) for share in (0, 1e-6, 0.00066, 0.9405, 0.99999, 1)]
        ['0%', '<0.01%', '0.07%', '94.05%', '>99.99%', '100%']
        >>> format_percent(0.301, 0, up=False), format_percent(0.301, 0, up=True)
        ('30%', '31%')
    """
    if share is None or math.isnan(share):
        return UNKNOWN
    # These are exact: digits would suggest a rounding.
    if share in (0, 1):
        return f"{share:.0%}"
    unit = 10.0**-digits
    text = format_fixed(_hundredfold(share), digits, up=up)
    if up is None and 0 < share < 1 and float(text) in (0, 100):
        below = format_fixed(unit, digits)
        above = format_fixed(100 - unit, digits)
        return f"<{below}%" if share < 0.5 else f">{above}%"
    return f"{text}%"


def format_interval(
    low: float,
    high: float,
    digits: int = 0,
) -> str:
    """The ends of an interval of shares in percent, rounded outwards.

    Example:
        >>> format_interval(0.0126, 0.9874), format_interval(0.25, 1.0)
        ('1 to 99%', '25 to 100%')
    """
    first = format_fixed(_hundredfold(low), digits, up=False)
    return f"{first} to {format_percent(high, digits, up=True)}"


def format_explained(share: float | None) -> str:
    """A share of an update in percent, rounded down, with digits for what is left.

    Example:
        >>> format_explained(0.5), format_explained(0.9999999), format_explained(1.0)
        ('50.0%', '99.99999%', '100%')
    """
    if share is None:
        return UNKNOWN
    share = min(max(share, 0.0), 1.0)
    left = 1 - share
    # The smaller the rest, the more digits show that there is one.
    scales = ((1, 1e-3), (3, 1e-6), (5, 0.0))
    digits = next(digits for digits, least in scales if left >= least)
    return format_percent(share, digits, up=False)


def _hundredfold(share: float) -> float:
    """A share in percent, without the rounding of a binary product."""
    return float(Decimal(repr(float(share))) * 100)


def _to_place(
    exact: Decimal,
    place: int,
    how: str,
) -> Decimal:
    """A number rounded to a multiple of 10 ** place."""
    return exact.quantize(
        Decimal(1).scaleb(place),
        rounding=how,
        context=_EVERY_DIGIT,
    )
