"""The Edgeworth series that paper C's code uses for subsampled steps: for comparison, no bound.

It replaces the distribution of the summed privacy loss by a normal one with corrections from the
cumulants. Where an example is rarely sampled or the noise is small the sum is far from normal, and
the series errs in both directions. `composition.subsampled` is the bound.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.polynomial import hermite_e
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[Any]  # of float64

REACH = 14.0
NODES = 20001
SPAN = 40.0
"""Thresholds are searched this many standard deviations around the mean."""
HALVINGS = 60
"""Tolerance of that search: the last bit of a float64."""
SERIES = {2: "3", 3: "4", 4: "5", 5: "33", 6: "34", 8: "333"}
WEIGHTS = {2: 6.0, 3: 24.0, 4: 120.0, 5: 72.0, 6: 144.0, 8: 1296.0}


def edgeworth(
    noise_multiplier: ArrayLike, *, sampling_rate: ArrayLike, steps: ArrayLike, kappa: ArrayLike
) -> Any:
    """The order-5 Edgeworth approximation of `composition.subsampled`, cut to [0, 1]: no bound.

    Shapes: all broadcast; the cumulants are computed once for each pair of noise and rate.

    Args:
        noise_multiplier: noise standard deviation / clip norm, above 0.
        sampling_rate: the chance that a step holds the example.
        steps: how many.
        kappa: prior-only success, in (0, 1).

    Raises:
        ValueError: a number outside its range.

    Source: Zheng et al. 2020 and paper C's code, `rero_bound_sgm` (own derivation).

    Example:
        >>> round(edgeworth(1.0, sampling_rate=0.01, steps=1000, kappa=1e-3), 4)
        0.0041
    """
    arrays = (np.asarray(a, float) for a in (noise_multiplier, sampling_rate, steps, kappa))
    sigma, q, count, level = np.broadcast_arrays(*arrays)
    for name, value, good, allowed in (
        ("noise_multiplier", sigma, (sigma > 0) & np.isfinite(sigma), "above 0"),
        ("sampling_rate", q, (q > 0) & (q <= 1), "above 0 and at most 1"),
        ("steps", count, (count >= 1) & (count == np.floor(count)), "whole, at least 1"),
        ("kappa", level, (level > 0) & (level < 1), "strictly between 0 and 1"),
    ):
        if not good.all():
            raise ValueError(f"{name} is {value[~good].flat[0]:g}; give numbers {allowed}")
    found = np.empty(sigma.shape)
    for noise, some in {*zip(sigma.flat, q.flat, strict=True)}:
        here = (sigma == noise) & (q == some)
        found[here] = _power(1 / noise, some, count[here], level[here])
    return float(found) if found.ndim == 0 else found


def cumulants(shift: float, sampling_rate: float) -> tuple[Array, Array]:
    """The first five cumulants of one step's privacy loss, with the example (P) and without (Q).

    Shapes: two arrays (5,).

    Args:
        shift: 1 / noise multiplier.
        sampling_rate: the chance that a step holds the example.

    Example:
        >>> there, back = cumulants(0.5, 1.0)
        >>> there[:2].round(6).tolist()
        [0.125, 0.25]
    """
    x = np.linspace(-REACH, REACH + shift, NODES)
    with np.errstate(divide="ignore"):
        stay = np.log1p(-sampling_rate)
        move = np.log(sampling_rate)
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
    """1 - F of the standardized sum (n,), by the series; sums (5, n) are its cumulants."""
    scaled = {str(order): sums[order - 1] / sums[1] ** (order / 2) for order in (3, 4, 5)}
    series = np.zeros((9, *z.shape))
    for degree, product in SERIES.items():
        series[degree] = np.prod([scaled[name] for name in product], axis=0) / WEIGHTS[degree]
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    return np.asarray(special.ndtr(-z) + density * hermite_e.hermeval(z, series, tensor=False))


def _power(shift: float, q: float, steps: Array, kappa: Array) -> Array:
    there, back = (found[:, None] * steps for found in cumulants(shift, q))
    low = np.full(kappa.shape, -SPAN)
    high = np.full(kappa.shape, SPAN)
    for _ in range(HALVINGS):  # the series need not fall; any crossing of the level will do
        middle = (low + high) / 2
        above = _tail(middle, back) > kappa
        low = np.where(above, middle, low)
        high = np.where(above, high, middle)
    threshold = back[0] + high * np.sqrt(back[1])
    return np.clip(_tail((threshold - there[0]) / np.sqrt(there[1]), there), 0.0, 1.0)
