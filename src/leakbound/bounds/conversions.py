"""Convert a noise multiplier to (epsilon, delta) and mu-GDP.

Neighbors differ by one example that is added or removed, or replaced. Full batches have a closed
form, valid for epsilon up to 1e9 and delta down to 1e-300. Sampled batches use the composed privacy
loss, rounded upwards and never above the closed form without sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from leakbound.bounds.law import Array, arguments, groups, one
from leakbound.bounds.privacy_loss import LossCurve, Pair, curve
from leakbound.bounds.roots import least_where

__all__ = ["delta", "epsilon", "log_delta", "mu"]

Delta = Callable[[Array], Array]
"""delta as a function of epsilon."""


def mu(noise_multiplier: ArrayLike, *, steps: ArrayLike = 1) -> Any:
    """The mu of Gaussian differential privacy of full-batch steps: sqrt(steps) / noise.

    Source: Dong, Roth and Su 2022; docs/errata.md, C13.
    """
    sigma, count = arguments(noise_multiplier=noise_multiplier, steps=steps)
    with np.errstate(divide="ignore", over="ignore"):
        return one(np.sqrt(count) / sigma)


def delta(
    noise_multiplier: ArrayLike,
    *,
    epsilon: ArrayLike,
    steps: ArrayLike = 1,
    sampling_rate: ArrayLike = 1.0,
    replace: bool = False,
) -> Any:
    """The smallest delta for a given epsilon.

    Shapes: all broadcast.

    Args:
        noise_multiplier: noise standard deviation / clip norm.
        epsilon: of all steps together, at least 0.
        steps: number of steps, composed adaptively.
        sampling_rate: probability that a step holds an example (Poisson sampling, hidden).
        replace: neighbors differ by a replaced example, which moves a sum twice as far.

    Raises:
        ValueError: a number is outside its range.

    Source: Balle and Wang 2018, theorem 8; sampled: Doroshenko et al. 2022.

    Example:
        >>> round(delta(1.0, epsilon=1.0), 5)
        0.12694
    """
    sigma, level, q, count = arguments(
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        sampling_rate=sampling_rate,
        steps=steps,
    )
    full = np.asarray(mu(sigma / (1 + replace), steps=count))
    deltas = np.array(np.exp(log_delta(full, level)))
    for here, composed in _sampled(sigma, q, count, replace):
        deltas[here] = np.minimum(deltas[here], composed(level[here]))
    return one(deltas)


def epsilon(
    noise_multiplier: ArrayLike,
    *,
    delta: ArrayLike,
    steps: ArrayLike = 1,
    sampling_rate: ArrayLike = 1.0,
    replace: bool = False,
) -> Any:
    """The smallest epsilon for a given delta in (0, 1); 0 if none is needed.

    Shapes, arguments, errors and source as in `delta`.

    Example:
        >>> round(epsilon(1.0, delta=1e-5), 3)
        4.377
    """
    sigma, level, q, count = arguments(
        noise_multiplier=noise_multiplier,
        delta=delta,
        sampling_rate=sampling_rate,
        steps=steps,
    )
    epsilons = np.array(_full_epsilon(np.asarray(mu(sigma / (1 + replace), steps=count)), level))
    for here, composed in _sampled(sigma, q, count, replace):
        highest = epsilons[here]
        # The composed delta is rounded up and may exceed the closed form, which then stays.
        fits = composed(highest) <= level[here]

        def holds(
            e: Array,
            composed: Delta = composed,
            most: Array = level[here],
        ) -> Array:
            return composed(e) <= most

        least = least_where(holds, np.zeros_like(highest), highest)
        epsilons[here] = np.where(fits, least, highest)
    return one(epsilons)


def log_delta(mu: ArrayLike, epsilon: ArrayLike) -> Array:
    """Log of Phi(-u) - e^epsilon Phi(-v), u = epsilon / mu - mu / 2, v = u + mu; broadcasts.

    As e^epsilon phi(v) = phi(u), it is phi(u) times a difference of Mills ratios, without large
    terms.

    Source: Balle and Wang 2018, theorem 8.
    """
    m, e = np.broadcast_arrays(np.asarray(mu, float), np.asarray(epsilon, float))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        u = e / m - m / 2
        v = e / m + m / 2
        far = np.log(_mills(u) - _mills(v)) - u * u / 2 - np.log(2 * np.pi) / 2
        near = np.log1p(
            -np.exp(-u * u / 2 - np.log(2 * np.pi) / 2 - special.log_ndtr(-u)) * _mills(v)
        )
        # Each form is exact on its own side of 0 and cancels on the other.
        log = np.where(u > 0, far, special.log_ndtr(-u) + near)
    log = np.where((m == 0) | (e == np.inf), -np.inf, np.where(m == np.inf, 0.0, log))
    return np.where(np.isnan(log), -np.inf, np.minimum(log, 0.0))


def _mills(x: Array) -> Array:
    """Phi(-x) / phi(x)."""
    return np.sqrt(np.pi / 2) * special.erfcx(x / np.sqrt(2))


def _full_epsilon(m: Array, level: Array) -> Array:
    """Bisection over u: delta falls with u, from u = -mu / 2, where epsilon is 0."""
    finite = np.where(np.isfinite(m) & (m > 0), m, 1.0)
    low = -finite / 2
    high = np.maximum(-special.ndtri(level), -finite / 2)

    def holds(u: Array) -> Array:
        return log_delta(finite, finite * (u + finite / 2)) <= np.log(level)

    with np.errstate(over="ignore"):
        epsilons = finite * (least_where(holds, low, high) + finite / 2)
    epsilons = np.where(holds(low), 0.0, epsilons)
    return np.where(m == 0, 0.0, np.where(m == np.inf, np.inf, epsilons))


def _sampled(
    sigma: Array,
    q: Array,
    count: Array,
    replace: bool,
) -> Iterator[tuple[Any, Delta]]:
    """Positions of each kind of sampled steps that has a curve, and the larger delta of both
    directions.
    """
    if np.all(q == 1):
        return
    # "replace" is its own mirror; adding and removing are not.
    pairs: tuple[Pair, ...] = ("replace",) if replace else ("remove", "add")
    for here, (noise, some, number) in groups(sigma, q, count):
        if some == 1 or not 0 < noise < np.inf:
            continue
        made = [curve(noise, some, int(number), pair) for pair in pairs]
        curves = [composed for composed in made if composed is not None]
        if len(curves) == len(pairs):  # else the grid would be too coarse

            def largest(
                level: Array,
                curves: list[LossCurve] = curves,
            ) -> Array:
                return np.asarray(np.max([composed.at(level) for composed in curves], axis=0))

            yield here, largest
