"""Bounds on reconstruction where the noise of rounds is correlated: Y = C G + sigma Z.

`correlation` has the factors C. In units of the bound on what a unit adds to one round, every
attacker, also an adaptive one, faces a Gaussian mechanism with mu = Delta / sigma, so the bound is
`identification.gaussian(sigma / factor.sensitivity(...))`. A linear trap attains gamma* at the
noise sigma / |C p|: `from_scratch.exact(sigma / factor.attained(...))`. This file has what random,
hidden participation takes away from that.

Source: Denisov et al. 2022; Choquette-Choo et al. 2023; docs/correlated_noise.md.
"""

from __future__ import annotations

import numpy as np
from scipy import fft, optimize, special

from leakbound import check
from leakbound.bounds.identification import gaussian
from leakbound.bounds.law import Array, positive, probability, single
from leakbound.correlation import Factor, Scheme, squared_sensitivity

__all__ = ["Factor", "Scheme", "balls_in_bins", "squared_sensitivity"]

CELLS = 2**13
"""Grid of `balls_in_bins`: its excess falls with the square of this number."""
SLACK = 1e-12
"""More than a transform's rounding adds to a total variation there, for each bin."""


def balls_in_bins(
    noise_multiplier: float,
    *,
    factor: Factor,
    bins: int,
    kappa: float,
) -> float:
    """Upper bound if each unit takes part in rounds j, j + bins, ... of one hidden, random bin j.

    Independent noise: the largest P(E) with Q(E) <= kappa, P the mean of normal distributions whose
    means lie on `bins` axes; for other factors the mean over the bins, as if they were
    visible, without amplification. Both are rounded up.

    Args:
        noise_multiplier: sigma, standard deviation of the white noise on C G, over the bound on
            what the unit adds to one round.
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
    sigma = single(positive, noise_multiplier=noise_multiplier)
    level = single(probability, kappa=kappa)
    check.count(bins=bins)
    parts = [range(j, factor.rounds, bins) for j in range(min(bins, factor.rounds))]
    lengths = np.array([factor.sensitivity(part) for part in parts] + [0.0] * (bins - len(parts)))
    visible = float(np.mean([gaussian(sigma / d, kappa=level) if d else level for d in lengths]))
    if factor.width > 1 or bins == 1:
        return visible
    hidden = _on_axes(float(lengths.max()) / sigma, bins, level)
    return min(visible, hidden)


def _on_axes(
    mu: float,
    bins: int,
    kappa: float,
) -> float:
    """The largest P(E) with Q(E) <= kappa: P moves one random of `bins` normal draws by mu.

    By duality it is at most t kappa + E_Q (L - t)^+ for every t, with L the likelihood ratio: the
    mean of `bins` lognormals.
    """
    reach = float(np.log(1 / kappa))

    def bound(log_t: float) -> float:
        return float(np.exp(log_t)) * (kappa + SLACK * bins) + _excess(
            mu, bins, float(np.exp(log_t))
        )

    # Every t gives a valid bound, so the search need not be exact.
    optimum = optimize.minimize_scalar(
        bound,
        bounds=(-3.0, reach),
        method="bounded",
    )
    return min(1.0, float(optimum.fun))


def _excess(
    mu: float,
    bins: int,
    t: float,
) -> float:
    """E (L - t)^+ for the mean L of `bins` lognormals of mean 1, rounded up.

    It is 1 - t + E (t - L)^+, for which only lognormals below t `bins` count. Each moves to
    the neighboring grid points so that its mean stays: the mean of a convex function rises.
    """
    cap = t * bins
    edges = np.linspace(0.0, cap, CELLS + 1)
    with np.errstate(divide="ignore"):
        place = np.log(edges) / mu + mu / 2
    # of W <= edge: P, and E W
    below = special.ndtr(place)
    moment = special.ndtr(place - mu)
    mass = np.diff(below)
    mean = np.diff(moment)
    up = np.clip(mean / (cap / CELLS) - np.arange(CELLS) * mass, 0.0, mass)
    grid = np.zeros(CELLS + 1)
    grid[:-1] += mass - up
    grid[1:] += up
    short = float(_sum_of(grid, bins) @ (cap - edges))  # E (cap - sum)^+; W above the cap add 0
    return max(0.0, 1 - t + short / bins)


def _sum_of(grid: Array, count: int) -> Array:
    """The distribution of the sum of `count` draws on the grid's range (more is left out)."""
    size = int(fft.next_fast_len(2 * len(grid), real=True))  # twice: no wrap-around

    def joined(a: Array, b: Array) -> Array:
        convolved = fft.irfft(fft.rfft(a, size) * fft.rfft(b, size), size)
        return np.maximum(0.0, convolved[: len(grid)])  # rounding of the transform

    total: Array | None = None
    while count:
        if count & 1:
            total = grid if total is None else joined(total, grid)
        count >>= 1
        grid = joined(grid, grid) if count else grid
    assert total is not None  # there is at least one draw
    return total
