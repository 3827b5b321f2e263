"""Confidence limits on a mean that are proved for every law of bounded values, at every n.

A player bets on the values one after the other that their mean is above m, with stakes that no
value can turn into debt: 1 + f (v - m) / (m - low) for a share f in [0, 1] and values of at least
low. If the mean is m or less, the capital has a mean of 1 at most, and so has the average capital
of several players; by Markov's inequality it exceeds 1 / (1 - confidence) with a probability of
1 - confidence at most. It falls as m rises, so the limit is the m at which it passes that number.

A limit on one side needs an end on the other side: no limit from samples holds for the upper mean
of values without an upper end (Bahadur and Savage 1956).

Source: Waudby-Smith and Ramdas, JRSS B 86(1), 2024, capital averaged over a grid of bets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import optimize, special

from leakbound.bounds.priors import real


def lower_limit(values: Any, low: Any, *, confidence: float = 0.99) -> float:
    """A lower confidence limit on the mean of independent values (n,) of at least `low`.

    Values may also depend on earlier ones: it is a limit on every number that is no smaller than
    the mean of each value given those before it. `low` is then one end for each value, (n,), known
    before the value.

    Raises:
        ValueError: no values, NaN, a value below its end, a confidence outside (0, 1).

    Example:
        >>> round(lower_limit([0.5] * 100, 0.0), 3)
        0.47
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence!r}; give a number between 0 and 1")
    found = real("values", values, 1)
    ends = np.broadcast_to(np.asarray(low, dtype=np.float64), found.shape)
    above = found - ends
    if not above.min() >= 0:
        raise ValueError("a value lies below its end `low`; the ends must hold for certain")
    start, stop = float(ends.max()), float(found.max())
    # players from the boldest to one who bets as little as n values of large variance ask for
    shares = 2.0 ** -np.arange(np.log2(len(found)) / 2 + 1)[:, None]

    def excess(mean: float) -> float:
        with np.errstate(divide="ignore"):  # a player who bets everything may lose it
            capital = np.log(1 - shares + shares * above / (mean - ends)).sum(1)
        return float(special.logsumexp(capital) - np.log(len(shares)) + np.log1p(-confidence))

    # just above `start` the capital is largest; where even that is too little, the end is left
    near = 1e-12 * (stop - start)
    if start + near <= start or excess(start + near) < 0:
        return start
    return max(start, float(optimize.brentq(excess, start + near, stop, xtol=near)) - 2 * near)


def upper_limit(values: Any, high: Any, *, confidence: float = 0.99) -> float:
    """An upper confidence limit on the mean of values of at most `high`; as `lower_limit`."""
    return -lower_limit(-real("values", values, 1), -np.asarray(high), confidence=confidence)
