"""Bound, attained success and epsilon for steps whose settings change.

A history is a list of `Part`: (noise multiplier, sampling rate, steps). Given how many steps of
each kind hold the example, the result is Gaussian. If the attacker does not see which steps do, the
privacy loss of all kinds is composed on one grid. Every error is on the side of more risk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike

from leakbound.bounds.conversions import log_delta
from leakbound.bounds.from_scratch import exact
from leakbound.bounds.law import Array, one
from leakbound.bounds.privacy_loss import Part, mixed_curve
from leakbound.bounds.roots import least_where

MOST = 16
"""Maximum number of kinds of steps; more are first merged, each merge towards more risk."""
LIGHT = 1e-17
STEP = 1e-3
"""Mass that an attained success leaves out, and the ratio to which it rounds down."""
FAINT = 1e-20
"""Mass of a cell that an upper bound leaves out; all of it counts as lost."""
WHOLE = 100.0
"""Width, in logarithms, above which all kinds become one."""
CELLS = 2**13
"""Number of cells of the grid on which weighted numbers of sampled steps are summed."""
DUST = 1e-15
"""Mass of sampled-step numbers left out at either end of a kind. It counts as success in the upper
bound and as failure in the attained success."""


def merged(
    history: Sequence[Part],
    most: int = MOST,
    *,
    more: bool = True,
) -> list[Part]:
    """Merge to at most `most` kinds of steps that leak at least (not `more`: at most) as much.

    Kinds that are close to each other become one, with their smallest noise and highest rate, or
    their largest noise and lowest rate. More noise is post-processing of less noise. So is a lower
    rate: replacing the output by one without the example with probability 1 - q / q' turns q' into
    q.
    """
    # First only what is equal up to rounding becomes one kind, then ever wider groups.
    width = 1e-9
    while True:
        kinds: dict[tuple[int, int], list[Part]] = {}
        for part in history:
            noise, rate, _ = part
            # Steps without noise have a kind of their own: their logarithm is infinite.
            level = -(2**31) if noise == 0 else math.floor(math.log(noise) / width)
            key = (level, math.floor(math.log(rate) / width)) if width < WHOLE else (0, 0)
            kinds.setdefault(key, []).append(part)
        if len(kinds) <= most:
            break
        width = max(2 * width, 1e-3)
    low, high = (min, max) if more else (max, min)
    rows = [zip(*parts, strict=True) for parts in kinds.values()]
    return sorted((low(noises), high(rates), sum(counts)) for noises, rates, counts in rows)


def sums(
    parts: Sequence[Part],
    weights: Sequence[float],
    *,
    up: bool,
) -> tuple[Array, Array]:
    """Values and masses of sum_i w_i k_i, k_i ~ Binom(T_i, q_i), rounded up or down to a grid.

    Each heaviest sampled kind has a separate grid, so that the cells of heavy kinds do not swamp
    light ones. No sampled step is exactly 0. At most `_lost` of the mass is left out.
    """
    order = sorted(range(len(parts)), key=lambda i: -weights[i])
    values = []
    masses = []
    none = 1.0
    for at, heaviest in enumerate(order):
        _, rate, steps = parts[heaviest]
        k, chances = _sampled_steps(rate, steps)
        rows = [(k[k > 0] * weights[heaviest], chances[k > 0] * none)]
        for i in order[at + 1 :]:  # lighter kinds, sampled or not
            count, mass = _sampled_steps(*parts[i][1:])
            rows.append((count * weights[i], mass))
        value, mass = _added(rows, up=up)
        values.append(value)
        masses.append(mass)
        none *= (1 - rate) ** steps
    mass = np.concatenate([*masses, [none]])
    return np.concatenate([*values, [0.0]]), mass / max(1.0, float(mass.sum()))


@lru_cache(maxsize=256)
def _sampled_steps(rate: float, steps: int) -> tuple[Array, Array]:
    """Numbers of sampled steps and their probabilities; no caller changes them."""
    low, high = scipy.stats.binom.ppf([DUST, 1 - DUST], steps, rate)
    k = np.arange(max(0.0, low - 1), min(steps, high + 1) + 1)
    return k, np.asarray(scipy.stats.binom.pmf(k, steps, rate))


def _added(
    rows: Sequence[tuple[Array, Array]],
    *,
    up: bool,
) -> tuple[Array, Array]:
    """The distribution of a sum of independent values, each rounded to one grid."""
    cell = sum(float(values[-1]) for values, _ in rows) / CELLS
    turn = np.ceil if up else np.floor
    mass = np.ones(1)
    for values, chances in rows:
        rounded = np.bincount(turn(values / cell).astype(int), weights=chances)
        mass = np.convolve(mass, rounded)
    return np.arange(len(mass)) * cell, mass


def _with_noise(parts: Sequence[Part]) -> tuple[list[Part], float]:
    """The parts with noise, and the probability that no step without noise holds the example."""
    none = float(np.prod([(1 - q) ** t for noise, q, t in parts if noise == 0]))
    return [part for part in parts if part[0] > 0], none


def _lost(parts: Sequence[Part], mass: Array) -> float:
    """Upper bound on the mass that `sums` leaves out."""
    return max(0.0, 1 - float(mass.sum())) + 4 * DUST * len(parts) ** 2


@lru_cache(maxsize=8)
def _gains(parts: tuple[Part, ...]) -> tuple[Array, Array, float]:
    """sum_i k_i / noise_i^2, rounded up: values, masses, and the mass that is left out."""
    value, mass = sums(parts, [noise**-2.0 for noise, *_ in parts], up=True)
    counts = mass > FAINT
    return value[counts], mass[counts], _lost(parts, mass) + float(mass[~counts].sum())


def _thinned(value: Array, mass: Array) -> tuple[Array, Array]:
    """Fewer values, none larger than before, for the exact law, which is slow at each value."""
    kept = (mass > LIGHT) & (value > 0)
    place, inverse = np.unique(np.floor(np.log(value[kept]) / STEP), return_inverse=True)
    masses = np.bincount(inverse, weights=mass[kept])
    rest = float(mass[value == 0].sum())
    return np.concatenate([[0.0], np.exp(place * STEP)]), np.concatenate([[rest], masses])


def visible_upper(parts: Sequence[Part], log_kappa: ArrayLike) -> Any:
    """Upper bound on success if the attacker sees which steps hold the example.

    It is the mean of Phi(Phi^-1(kappa) + sqrt(sum_i k_i / noise_i^2)) over the numbers k_i of
    sampled steps.
    """
    blind = np.asarray(log_kappa, float)
    (bare, none) = _with_noise(parts)
    if len(bare) < len(parts):
        rest = visible_upper(bare, blind) if bare else np.exp(blind)
        return one(np.where(blind == 0, 1.0, np.minimum(1.0, 1 - none + none * rest)))
    value, mass, left = _gains(tuple(parts))
    gain = np.sqrt(value)
    flat = blind.ravel()
    bounds = np.empty(flat.shape)
    for place, start in enumerate(scipy.special.ndtri_exp(flat)):
        # Without a sampled step kappa itself, which the two transforms would round.
        reached = np.where(value == 0, math.exp(flat[place]), scipy.special.ndtr(start + gain))
        bounds[place] = min(1.0, float(mass @ reached) + left)
    return one(np.where(blind == 0, 1.0, bounds.reshape(blind.shape)))


def visible_lower(
    parts: Sequence[Part],
    *,
    dim: int,
    eta: float,
    norm: float,
) -> float:
    """Attained success of a linear trap that averages the steps with the example, best weighted.

    With noiseless steps, an example in one of them is exact. Otherwise the prior-only baseline is
    used.
    """
    bare, none = _with_noise(parts)
    if len(bare) < len(parts):
        return 1 - none + none * float(exact(np.inf, dim=dim, eta=eta, norm=norm))
    value, mass = _thinned(
        *sums(
            parts,
            [noise**-2.0 for noise, *_ in parts],
            up=False,
        )
    )
    with np.errstate(divide="ignore"):
        noise = 1 / np.sqrt(value)
    return float(mass @ np.asarray(exact(noise, dim=dim, eta=eta, norm=norm)))


def hidden_lower(
    parts: Sequence[Part],
    *,
    dim: int,
    eta: float,
    norm: float,
) -> float:
    """Attained success of a linear trap that sums all steps, each kind weighted by q / noise^2."""
    if any(noise == 0 for noise, *_ in parts):
        return visible_lower(parts, dim=dim, eta=eta, norm=norm)
    weights = [rate / noise**2 for noise, rate, _ in parts]
    weights = [w / max(weights) for w in weights]
    spread = math.sqrt(
        sum(t * (w * noise) ** 2 for w, (noise, _, t) in zip(weights, parts, strict=True))
    )
    value, mass = _thinned(*sums(parts, weights, up=False))
    with np.errstate(divide="ignore"):
        noise = spread / value
    return float(mass @ np.asarray(exact(noise, dim=dim, eta=eta, norm=norm)))


def hidden_upper(parts: Sequence[Part], log_kappa: ArrayLike) -> Any:
    """Upper bound on success if the attacker does not see which steps hold the example."""
    blind = np.asarray(log_kappa, float)
    bound = np.asarray(visible_upper(parts, blind))
    do = np.isfinite(blind) & (blind < 0)
    composed = mixed_curve(parts) if do.any() else None
    if composed is None:
        return one(bound)
    sharper = composed.gamma(np.where(do, blind, -1.0))
    return one(np.where(do, np.minimum(bound, sharper), bound))


def epsilon(
    parts: Sequence[Part],
    delta: float,
    *,
    visible: bool,
) -> float:
    """The epsilon for a given delta over all steps, adding or removing an example."""
    bare, none = _with_noise(parts)
    if len(bare) < len(parts):
        if 1 - none >= delta:
            return math.inf
        return epsilon(bare, delta - (1 - none), visible=visible) if bare else 0.0
    value, mass, left = _gains(tuple(bare))
    gain = np.sqrt(value)

    def holds(level: Array) -> Array:
        mean_delta = left + mass @ np.exp(log_delta(gain, level))
        return mean_delta <= delta

    high = 1.0
    while not holds(np.array(high)) and high < 1e12:
        high *= 2
    least = float(least_where(holds, np.array(0.0), np.array(high)))
    curves = [] if visible else [mixed_curve(parts), mixed_curve(parts, "add")]
    if not curves or None in curves:
        return least

    def sampled(level: Array) -> Array:
        worst = np.maximum(*(np.asarray(c.at(level)) for c in curves if c is not None))
        return worst <= delta

    if not sampled(np.array(least)):
        return least
    return float(least_where(sampled, np.array(0.0), np.array(least)))
