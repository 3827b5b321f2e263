"""Lower bounds on epsilon from what runs of a program showed.

For neighboring data, an (epsilon, delta)-private program keeps P(E) <= e^epsilon P'(E) + delta for
every event E. So confidence limits on both probabilities give one on epsilon. Below, `high` is a
lower limit on P(E) and `low` an upper limit on P'(E); both broadcast.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike
from scipy import special

from leakbound.bounds import conversions
from leakbound.bounds.counting import count_limit
from leakbound.bounds.law import Array

LEVELS = np.concatenate([[0.0], np.geomspace(0.01, 50.0, 160)])
"""The epsilons at which a privacy curve is compared with rates; any set gives valid bounds."""
QUIET = 0.05
LOUD = 1e3
"""Noise multipliers between which the one that fits is sought."""


@lru_cache(maxsize=32)
def count_limits(n: int, confidence: float) -> Array:
    """Upper confidence limits (n + 1,) on a share, for every count of 0 to n."""
    return np.array([count_limit(k, n, confidence=confidence) for k in range(n + 1)])


def epsilon_of_rates(
    high: ArrayLike,
    low: ArrayLike,
    delta: float,
) -> Any:
    """log((high - delta) / low): the least epsilon of any program with these rates.

    Source: Kairouz, Oh and Viswanath 2015, theorem 2.1.
    """
    least = np.maximum(np.asarray(high, float) - delta, 0.0)
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(least) - np.log(np.asarray(low, float)), 0.0)


def most_power(
    noise_multiplier: float,
    low: ArrayLike,
    **training: Any,
) -> Any:
    """The largest probability of an event that has probability `low` without the example.

    From the accountant's privacy curve: the least e^epsilon low + delta(epsilon), and the same for
    the complement. `training`: steps and sampling_rate of `conversions.delta`.
    """
    share = np.asarray(low, float)[..., None]
    each = conversions.delta(noise_multiplier, epsilon=LEVELS, **training)
    there = np.min(np.exp(LEVELS) * share + each, axis=-1)
    back = np.min(1 - np.exp(-LEVELS) * (1 - share - each), axis=-1)
    return np.minimum(np.minimum(there, back), 1.0)


def epsilon_of_steps(
    high: float,
    low: float,
    delta: float,
    **training: Any,
) -> float:
    """The epsilon of the noisiest Gaussian training with these rates; 0: any noise fits.

    It assumes Gaussian noise, of unknown size; `training` as in `most_power`.

    Source: Dong, Roth and Su 2022, corollary 1; Nasr et al. 2023.
    """
    quiet = QUIET
    loud = LOUD
    if high <= most_power(loud, low, **training):
        return 0.0
    for _ in range(24):
        middle = math.sqrt(quiet * loud)
        fits = high <= most_power(middle, low, **training)
        quiet, loud = (middle, loud) if fits else (quiet, middle)
    # The noisier end of the bracket, so the bisection can only lower epsilon.
    return float(conversions.epsilon(loud, delta=delta, **training))


def guess_p_value(
    epsilon: float,
    right: int,
    guesses: int,
    canaries: int,
    delta: float,
) -> float:
    """Upper bound on the probability of so many right guesses under (epsilon, delta)-privacy.

    Each of m canaries is included by a fair coin. The number of guesses r is fixed before the run.

    Source: Steinke, Nasr and Jagielski 2023, theorem 5.2: f(v) = P(Binomial(r, 1 / (1 +
    e^-epsilon)) >= v), plus 2 m delta max_i (f(v - i) - f(v)) / i.
    """
    tail = scipy.stats.binom.sf(np.arange(right, -1, -1) - 1, guesses, special.expit(epsilon))
    steps = (tail[1:] - tail[0]) / np.arange(1, right + 1)
    return min(1.0, float(tail[0] + 2 * canaries * delta * steps.max(initial=0.0)))


def epsilon_of_guesses(
    right: int,
    guesses: int,
    canaries: int,
    *,
    delta: float,
    confidence: float,
) -> float:
    """Lower confidence limit on epsilon from the right guesses of one run; see `guess_p_value`."""
    low = 0.0
    high = 64.0
    for _ in range(40):
        middle = (low + high) / 2
        refuted = guess_p_value(middle, right, guesses, canaries, delta) <= 1 - confidence
        low, high = (middle, high) if refuted else (low, middle)
    return low if low > 1e-9 else 0.0
