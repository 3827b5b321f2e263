"""The Edgeworth series that paper C's code uses for subsampled steps: to compare, never to trust.

It replaces the law of the summed privacy loss by a normal one with corrections from the cumulants.
Where hits are rare or the noise is small the sum is far from normal and the series errs, to both
sides. `composition.subsampled` is the bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.polynomial import hermite_e
from numpy.typing import ArrayLike
from scipy import special

from leakbound.bounds.law import (
    Array,
    Law,
    Scope,
    one,
    positive,
    probability,
    rate,
    single,
    whole,
)

REACH, NODES = 14.0, 20001
SPAN = 40.0
"""Thresholds are searched this many standard deviations around the mean."""
SERIES = {2: "3", 3: "4", 4: "5", 5: "33", 6: "34", 8: "333"}
WEIGHTS = {2: 6.0, 3: 24.0, 4: 120.0, 5: 72.0, 6: 144.0, 8: 1296.0}


@dataclass(frozen=True)
class Edgeworth(Law):
    """The order-5 Edgeworth approximation of `composition.subsampled`: no bound."""

    def __call__(
        self,
        noise_multiplier: ArrayLike,
        *,
        sampling_rate: float,
        steps: int,
        kappa: ArrayLike,
    ) -> Any:
        """Approximate power at level kappa, cut to [0, 1]; it may be too low as well as too high.

        Shapes: noise_multiplier and kappa broadcast.

        Args:
            noise_multiplier: noise standard deviation / clip norm, above 0.
            sampling_rate: the chance that a step holds the record.
            steps: how many.
            kappa: blind success, in (0, 1).

        Raises:
            ValueError: a number outside its range.

        Source: Zheng et al. 2020 and paper C's code, `rero_bound_sgm` (own derivation).

        Example:
            >>> round(edgeworth(1.0, sampling_rate=0.01, steps=1000, kappa=1e-3), 4)
            0.0041
        """
        q = single("sampling_rate", rate("sampling_rate", sampling_rate))
        count = single("steps", whole("steps", steps))
        sigma, level = np.broadcast_arrays(
            positive("noise_multiplier", noise_multiplier), probability("kappa", kappa)
        )
        found = [
            _power(1 / float(s), q, count, float(k))
            for s, k in zip(sigma.flat, level.flat, strict=True)
        ]
        return one(np.reshape(np.array(found), sigma.shape))


def cumulants(shift: float, sampling_rate: float) -> tuple[Array, Array]:
    """The first five cumulants of one step's privacy loss, with the record (P) and without (Q).

    Shapes: two arrays (5,).

    Args:
        shift: 1 / noise multiplier.
        sampling_rate: the chance that a step holds the record.

    Example:
        >>> there, back = cumulants(0.5, 1.0)
        >>> there[:2].round(6).tolist()
        [0.125, 0.25]
    """
    x = np.linspace(-REACH, REACH + shift, NODES)
    with np.errstate(divide="ignore"):
        stay, move = np.log1p(-sampling_rate), np.log(sampling_rate)
        loss = np.logaddexp(stay, move + shift * x - shift**2 / 2)
    back = np.exp(-(x**2) / 2)
    there = back * np.exp(loss)
    return _cumulants(loss, there), _cumulants(loss, back)


def _cumulants(loss: Array, weight: Array) -> Array:
    weight = weight / weight.sum()
    mean = float(loss @ weight)
    m2, m3, m4, m5 = (float((loss - mean) ** order @ weight) for order in (2, 3, 4, 5))
    return np.array([mean, m2, m3, m4 - 3 * m2**2, m5 - 10 * m3 * m2])


def _tail(z: Array, sums: Array) -> Array:
    """1 - F of the standardized sum, by the series; sums are its cumulants."""
    scaled = {str(order): sums[order - 1] / sums[1] ** (order / 2) for order in (3, 4, 5)}
    series = np.zeros(9)
    for degree, product in SERIES.items():
        series[degree] = np.prod([scaled[name] for name in product]) / WEIGHTS[degree]
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    return np.asarray(special.ndtr(-z) + density * hermite_e.hermeval(z, series))


def _power(shift: float, q: float, steps: float, kappa: float) -> float:
    there, back = (steps * found for found in cumulants(shift, q))
    low, high = -SPAN, SPAN
    for _ in range(200):  # the series need not fall: any crossing of the level is as good
        middle = (low + high) / 2
        low, high = (middle, high) if _tail(np.array(middle), back) > kappa else (low, middle)
    threshold = back[0] + high * np.sqrt(back[1])
    found = _tail((threshold - there[0]) / np.sqrt(there[1]), there)
    return float(np.clip(found, 0.0, 1.0))


edgeworth = Edgeworth(
    Scope(
        covers="none",
        attackers="none: an approximation, uncertified in both directions",
        prior="as `composition.subsampled`, which it approximates",
        known="as `composition.subsampled`",
        not_said="a bound from above or from below; use `composition.subsampled`",
        equation="paper C's code; docs/errata.md, Edgeworth",
    )
)
