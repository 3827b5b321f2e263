"""Confidence limits on a mean, proven for every distribution of bounded values and every n.

A player bets on the values, one after the other, that their mean is above m. The stake cannot lead
to debt: the capital is multiplied by 1 + f (v - m) / (m - low) for a share f in [0, 1] and values
of at least low. If the mean is m or less, the expected capital is at most 1; so is that of the
average over several players. By Markov's inequality the capital exceeds 1 / (1 - confidence) with
probability at most 1 - confidence. The capital falls as m rises, so the limit is the m at which it
crosses that number.

A one-sided limit needs a finite end on the other side: no limit from samples holds for the upper
mean of values without an upper end (Bahadur and Savage 1956).

Source: Waudby-Smith and Ramdas, JRSS B 86(1), 2024, capital averaged over a grid of bets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import optimize, special

from leakbound.bounds.priors import real


def lower_limit(
    values: Any,
    low: Any,
    *,
    confidence: float = 0.99,
) -> float:
    """A lower confidence limit on the mean of independent values (n,) of at least `low`.

    Values may depend on earlier ones. The result then limits every number that is at least the
    mean of each value given those before it. `low` may be one end for each value, (n,), known
    before the value.

    Raises:
        ValueError: no values, NaN, a value below its end, or a confidence outside (0, 1).

    Example:
        >>> round(lower_limit([0.5] * 100, 0.0), 3)
        0.47
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence!r}; give a number between 0 and 1")
    numbers = real("values", values, 1)
    ends = np.broadcast_to(np.asarray(low, dtype=np.float64), numbers.shape)
    above = numbers - ends
    if not above.min() >= 0:
        raise ValueError("a value lies below its end `low`; give ends that hold for every value")
    start = float(ends.max())
    stop = float(numbers.max())
    # from the boldest player to one whose bets suit n values of large variance
    shares = 2.0 ** -np.arange(np.log2(len(numbers)) / 2 + 1)[:, None]

    def excess(mean: float) -> float:
        with np.errstate(divide="ignore"):  # a player who bets everything may lose everything
            capital = np.log(1 - shares + shares * above / (mean - ends)).sum(1)
        return float(special.logsumexp(capital) - np.log(len(shares)) + np.log1p(-confidence))

    # the capital is largest just above `start`; if it is too small there, the end is the limit
    near = 1e-12 * (stop - start)
    if start + near <= start or excess(start + near) < 0:
        return start
    # Two tolerances less, so that the error of the root search cannot raise the limit.
    return max(
        start,
        float(optimize.brentq(excess, start + near, stop, xtol=near)) - 2 * near,
    )


def upper_limit(
    values: Any,
    high: Any,
    *,
    confidence: float = 0.99,
) -> float:
    """An upper confidence limit on the mean of values of at most `high`; see `lower_limit`."""
    return -lower_limit(
        -real("values", values, 1),
        -np.asarray(high),
        confidence=confidence,
    )
