"""Bounds on reconstruction where the noise of rounds is correlated: Y = C G + sigma Z.

`correlation` has the factors C. In units of the bound on what a unit adds to one round, every
attacker faces a Gaussian mechanism with mu = Delta / sigma, also an adaptive one, and a linear trap
attains gamma* at the noise sigma / |C p|.

Source: Denisov et al. 2022; Choquette-Choo et al. 2023; docs/correlated_noise.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import fft, optimize, special

from leakbound import check
from leakbound.bounds.composition import subsampled
from leakbound.bounds.from_scratch import exact
from leakbound.bounds.identification import gaussian
from leakbound.bounds.law import Array, positive, probability, rate, scoped, single, whole
from leakbound.correlation import Factor, Pattern, Scheme, squared_sensitivity

__all__ = [
    "Factor",
    "Scheme",
    "attained",
    "balls_in_bins",
    "cyclic_poisson",
    "final_model",
    "noise_for",
    "own_rounds",
    "shuffled",
    "squared_sensitivity",
    "upper",
]

CELLS = 2**13
"""Grid of `balls_in_bins`: its excess falls with the square of this number."""
SLACK = 1e-12
"""More than a transform's rounding adds to a total variation there, for each bin."""


@scoped(
    replace(
        gaussian.scope,
        attackers="all attackers, who may adapt to all earlier releases and see all of them",
        known="everything but the unit and the noise, also the rounds in which it takes part",
        equation="Denisov et al. 2022; docs/correlated_noise.md",
    )
)
def upper(
    noise_multiplier: ArrayLike,
    *,
    factor: Factor,
    participation: Pattern | Scheme,
    kappa: ArrayLike | None = None,
    log_kappa: ArrayLike | None = None,
) -> Any:
    """Upper bound on any attacker's success, Phi(Phi^-1(kappa) + Delta / noise).

    Shapes: `noise_multiplier` and kappa broadcast.

    Args:
        noise_multiplier: sigma, standard deviation of the white noise on C G, over the bound on
            what the unit adds to one round.
        factor: C.
        participation: the rounds of the unit, or a scheme of all that are allowed.
        kappa: prior-only success, in [0, 1]; or
        log_kappa: its natural logarithm.

    Raises:
        ValueError: a number is outside its range.

    Source: Denisov et al. 2022, theorem 2.1 (adaptive releases).

    Example:
        >>> band = Factor.parse("band:4", 16)
        >>> round(upper(2.4, factor=band, participation=Scheme(separation=4), kappa=1e-3), 4)
        0.0191
    """
    sigma = positive("noise_multiplier", noise_multiplier, infinite=True)
    delta = factor.sensitivity(participation)
    return gaussian(sigma / delta, kappa=kappa, log_kappa=log_kappa)


@scoped(
    replace(
        exact.scope,
        attackers="all estimators of a linear trap's answers that hold the same vector each round",
        known="the example's norm, the noise multiplier, the factor and the unit's rounds",
    )
)
def attained(
    noise_multiplier: ArrayLike,
    *,
    factor: Factor,
    pattern: Pattern,
    dim: ArrayLike,
    eta: ArrayLike,
    norm: ArrayLike = 1.0,
) -> Any:
    """The success that the attack `correlated_trap` attains: gamma* at the noise sigma / |C p|.

    Shapes, `noise_multiplier` and errors as in `upper`; the other arguments as in
    `from_scratch.exact`.

    Source: docs/errata.md, "gamma*"; (C p)^T Y / |C p|^2 is sufficient for equal u.

    Example:
        >>> band = Factor.parse("band:4", 16)
        >>> round(attained(0.6, factor=band, pattern=[0, 4, 8, 12], dim=32, eta=0.5 / 32), 5)
        0.11651
    """
    sigma = positive("noise_multiplier", noise_multiplier, infinite=True)
    return exact(sigma / factor.attained(pattern), dim=dim, eta=eta, norm=norm)


def noise_for(
    gamma: ArrayLike,
    *,
    factor: Factor,
    participation: Pattern | Scheme,
    kappa: ArrayLike | None = None,
    log_kappa: ArrayLike | None = None,
) -> Any:
    """The least noise multiplier at which `upper` is at most gamma; arguments as there.

    Raises:
        ValueError: kappa is above gamma, so no noise can help.

    Source: `upper`, inverted.

    Example:
        >>> round(noise_for(0.0191, factor=Factor.parse("band:4", 16), participation=[0, 4, 8, 12],
        ...                 kappa=1e-3), 2)
        2.4
    """
    found = gaussian.noise_for(gamma, kappa=kappa, log_kappa=log_kappa)
    return found * factor.sensitivity(participation)


def own_rounds(factor: Factor, pattern: Pattern) -> float:
    """The noise of a mean over the unit's own releases, over sigma: weaker than 1 / |C p|.

    Source: docs/correlated_noise.md.

    Example:
        >>> round(own_rounds(Factor.parse("band:4", 16), [0, 4, 8, 12]), 4)
        0.6519
    """
    return float(np.linalg.norm(factor.inverse[list(pattern)].sum(0))) / len(pattern)


def final_model(factor: Factor, pattern: Pattern) -> float:
    """The noise of the sum of all releases, over sigma and the unit's number of rounds.

    Source: docs/correlated_noise.md.

    Example:
        >>> round(final_model(Factor.parse("band:4", 16), [0, 4, 8, 12]), 4)
        0.506
    """
    return float(np.linalg.norm(factor.inverse.sum(0))) / len(pattern)


def cyclic_poisson(
    noise_multiplier: ArrayLike,
    *,
    factor: Factor,
    groups: int,
    sampling_rate: ArrayLike,
    kappa: ArrayLike,
) -> Any:
    """Upper bound if round t draws each unit of group t mod b with probability b times the rate.

    Units stay in their group, so their rounds are b apart, where columns of C are disjoint.
    The attacker does not see who is drawn.

    Args:
        noise_multiplier: as in `upper`.
        factor: C, with a band of at most `groups`.
        groups: number of groups b.
        sampling_rate: the share q of all units in a round; b q is at most 1.
        kappa: prior-only success.

    Raises:
        ValueError: the band is wider than the groups, or a number is outside its range.

    Source: Choquette-Choo et al. 2023 (amplified banded matrix factorization), theorem 4.

    Example:
        >>> two = Factor.parse("none", 8)
        >>> round(cyclic_poisson(1.0, factor=two, groups=2, sampling_rate=0.1, kappa=1e-3), 5)
        0.00814
    """
    check.count(groups=groups)
    if factor.width > groups:
        raise ValueError(
            f"groups is {groups}, but the factor {factor.name} has a band of {factor.width}; give "
            "at least as many groups"
        )
    each = rate("groups * sampling_rate", groups * rate("sampling_rate", sampling_rate))
    sigma = positive("noise_multiplier", noise_multiplier, infinite=True)
    longest = float(np.sqrt(np.diag(factor.gram).max()))
    steps = -(-factor.rounds // groups)
    return subsampled(sigma / longest, sampling_rate=each, steps=steps, kappa=kappa)


def shuffled(noise_multiplier: ArrayLike, *, epochs: ArrayLike, kappa: ArrayLike) -> Any:
    """Upper bound for independent noise if every epoch visits each example once, in random order.

    Each epoch counts as one full-batch step: the order gives no amplification for an attacker who
    knows and may choose the other examples.

    Raises:
        ValueError: a number is outside its range.

    Source: this project (docs/correlated_noise.md).

    Example:
        >>> round(shuffled(1.0, epochs=10, kappa=1e-3), 6)
        0.528717
    """
    return gaussian(noise_multiplier, kappa=kappa, steps=whole("epochs", epochs))


def balls_in_bins(noise_multiplier: float, *, factor: Factor, bins: int, kappa: float) -> float:
    """Upper bound if each unit takes part in rounds j, j + bins, ... of one hidden, random bin j.

    Independent noise: the largest P(E) with Q(E) <= kappa, P the mean of normal distributions whose
    means lie on `bins` axes; for other factors the mean of `upper` over the bins, as if they were
    visible, without amplification. Both are rounded up.

    Args:
        noise_multiplier: as in `upper`, a single number.
        factor: C.
        bins: number of bins b.
        kappa: prior-only success, in (0, 1).

    Raises:
        ValueError: a number is outside its range.

    Source: Chua et al. 2024 (balls-and-bins sampling); Choquette-Choo et al. 2024.

    Example:
        >>> round(balls_in_bins(1.0, factor=Factor.parse("none", 10), bins=10, kappa=1e-3), 5)
        0.00433
    """
    sigma = single("noise_multiplier", positive("noise_multiplier", noise_multiplier))
    level = single("kappa", probability("kappa", kappa))
    check.count(bins=bins)
    parts = [range(j, factor.rounds, bins) for j in range(min(bins, factor.rounds))]
    lengths = np.array([factor.sensitivity(part) for part in parts] + [0.0] * (bins - len(parts)))
    visible = float(np.mean([gaussian(sigma / d, kappa=level) if d else level for d in lengths]))
    if factor.width > 1 or bins == 1:
        return visible
    hidden = _on_axes(float(lengths.max()) / sigma, bins, level)
    return min(visible, hidden)


def _on_axes(mu: float, bins: int, kappa: float) -> float:
    """The largest P(E) with Q(E) <= kappa: P moves one random of `bins` normal draws by mu.

    By duality it is at most t kappa + E_Q (L - t)^+ for every t, with L the likelihood ratio: the
    mean of `bins` lognormals.
    """
    reach = float(np.log(1 / kappa))

    def bound(log_t: float) -> float:
        return float(np.exp(log_t)) * (kappa + SLACK * bins) + _excess(
            mu, bins, float(np.exp(log_t))
        )

    found = optimize.minimize_scalar(bound, bounds=(-3.0, reach), method="bounded")
    return min(1.0, float(found.fun))


def _excess(mu: float, bins: int, t: float) -> float:
    """E (L - t)^+ for the mean L of `bins` lognormals of mean 1, rounded up.

    It is 1 - t + E (t - L)^+, for which only lognormals below t `bins` count. Each moves to
    the neighboring grid points so that its mean stays: the mean of a convex function rises.
    """
    cap = t * bins
    edges = np.linspace(0.0, cap, CELLS + 1)
    with np.errstate(divide="ignore"):
        place = np.log(edges) / mu + mu / 2
    below, moment = special.ndtr(place), special.ndtr(place - mu)  # of W <= edge: P, and E W
    mass, mean = np.diff(below), np.diff(moment)
    up = np.clip(mean / (cap / CELLS) - np.arange(CELLS) * mass, 0.0, mass)
    grid = np.zeros(CELLS + 1)
    grid[:-1] += mass - up
    grid[1:] += up
    short = float(_sum_of(grid, bins) @ (cap - edges))  # E (cap - sum)^+; W above the cap add 0
    return max(0.0, 1 - t + short / bins)


def _sum_of(grid: Array, count: int) -> Array:
    """The distribution of the sum of `count` draws on the grid's range (more is left out)."""
    size = int(fft.next_fast_len(2 * len(grid), real=True))

    def joined(a: Array, b: Array) -> Array:
        found = fft.irfft(fft.rfft(a, size) * fft.rfft(b, size), size)
        return np.asarray(np.maximum(0.0, found[: len(grid)]))

    total: Array | None = None
    while count:
        if count & 1:
            total = grid if total is None else joined(total, grid)
        count >>= 1
        grid = joined(grid, grid) if count else grid
    assert total is not None  # there is at least one draw
    return total
