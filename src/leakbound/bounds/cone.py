"""Probability that a noisy unit vector stays within an angle: the integral behind gamma*."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import special

from leakbound.bounds.law import Array

REACH = 9.6
"""Half-width in R of the relevant range: the log integrand falls at least as fast as -R^2 / 2."""
DOUBLES = 0.3 * 2.0 ** np.arange(6)
"""Panel edges in units of a width: that of Phi, that of the power of R, and 1."""
NODES = 12
HALVINGS = 32
"""Steps of the bisection for the mode, which has to lie only within its own width."""
ROOT = math.sqrt(2 / math.pi)
HALF = math.sqrt(0.5)
TOGETHER = 128
_X, _W = np.polynomial.legendre.leggauss(NODES)


def log_cone(
    inverse_noise: Any,
    cotangent: Any,
    dim: Any,
) -> Array:
    """Logarithm of P(angle(u, u + xi / a) <= theta) for a unit vector u in R^dim; broadcasts.

    a = 1 / noise multiplier, cotangent = cot theta (both may be infinite), xi is standard normal.
    R is the length of the part of xi orthogonal to u: chi with dim - 1 degrees of freedom,
    independent of the part along u. The result is log E Phi(a - R cot theta), a non-central t tail.
    Quadrature uses panels that shrink towards the mode of the log-concave integrand and towards the
    step of Phi. It is accurate to 1e-9 in tails of any depth.

    Source: Riess et al. (paper C) corrected: docs/errata.md, "gamma*".
    """
    a, c, n = np.broadcast_arrays(*(np.asarray(v, float) for v in (inverse_noise, cotangent, dim)))
    shape = a.shape
    flat = [v.ravel() for v in (a, c, n)]
    out = np.empty(flat[0].shape)
    for start in range(0, len(out), TOGETHER):
        part = slice(start, start + TOGETHER)
        out[part] = _log_cone(*(v[part] for v in flat))
    return out.reshape(shape)


def _log_cone(
    a: Array,
    c: Array,
    n: Array,
) -> Array:
    out = np.where(a == np.inf, 0.0, special.log_ndtr(a))  # n = 1, and the limit without noise
    out = np.where((n > 1) & (c == np.inf) & (a < np.inf), -np.inf, out)
    out = np.where((n > 1) & (c == -np.inf), 0.0, out)
    do = (n > 1) & np.isfinite(a) & np.isfinite(c)
    if do.any():
        out[do] = np.minimum(0.0, _integral(a[do, None], c[do, None], n[do, None] - 1))
    return out


def _integral(
    a: Array,
    c: Array,
    k: Array,
) -> Array:
    """Logarithm of the integral over R > 0 of chi_k(R) Phi(a - c R); arguments (n, 1)."""
    mode = _mode(a, c, k)
    phi = 1 / (1 + np.abs(c))
    power = _power_width(mode, k)
    # Panels are narrow where the integrand changes fast, and double from there.
    near = np.concatenate([0 * mode, phi * DOUBLES, -phi * DOUBLES], 1)
    wide = np.concatenate([w * DOUBLES for w in (power, -power, 1 + 0 * mode, -1 - 0 * mode)], 1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        step = np.where(c > 0, a / c, mode)
    step = np.where(np.isfinite(step), step, mode)
    low = np.maximum(0.0, mode - REACH)
    high = mode + REACH
    edges = np.concatenate([low, high, mode + near, mode + wide, step + near], 1)
    edges = np.sort(np.clip(edges, low, high), 1)
    half = (edges[:, 1:] - edges[:, :-1])[..., None] / 2
    r = (edges[:, :-1, None] + half * (1 + _X)).reshape(len(mode), -1)
    weight = (half * _W).reshape(len(mode), -1)
    # The largest value is taken out, so that exp neither overflows nor vanishes.
    top = _log_integrand(mode, a, c, k)
    with np.errstate(divide="ignore"):
        total = (weight * np.exp(_relative(r, mode, a, c, k))).sum(1)
        constant = (1 - k / 2) * np.log(2) - special.gammaln(k / 2)
        return (constant + top)[:, 0] + np.log(total)


def _power_width(mode: Array, k: Array) -> Array:
    """The width over which R^(k - 1) exp(-R^2 / 2) changes at the mode."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        width = 1 / np.hypot(np.sqrt(k - 1) / mode, (k - 1) / mode - mode)
    return np.where((k > 1) & (width < REACH), width, REACH)


def _log_integrand(
    r: Array,
    a: Array,
    c: Array,
    k: Array,
) -> Array:
    return special.xlogy(k - 1, r) - r**2 / 2 + special.log_ndtr(a - c * r)


def _relative(
    r: Array,
    mode: Array,
    a: Array,
    c: Array,
    k: Array,
) -> Array:
    """Log integrand at r minus that at the mode, without cancellation of large terms."""
    with np.errstate(divide="ignore", invalid="ignore"):
        growth = np.where(k > 1, (k - 1) * np.log(r / np.where(k > 1, mode, 1.0)), 0.0)
    far = special.log_ndtr(a - c * r) - special.log_ndtr(a - c * mode)
    return growth - (r - mode) * (r + mode) / 2 + far


def _mode(
    a: Array,
    c: Array,
    k: Array,
) -> Array:
    """The mode of the log-concave integrand: the root of its falling derivative."""
    s = np.sqrt(k - 1)
    length = np.hypot(1.0, c)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        # phi(z) / Phi(z) is below 0.8 - z for z < 0: the root of a quadratic, if c > 0
        least = 2 * s * (s / (0.8 * c + length * np.sqrt(0.64 * (c / length) ** 2 + 4 * s**2)))
        most = s + np.abs(c) * _mills(a)
    low = np.where(c > 0, np.maximum(least / 2, 1e-300), np.maximum(s, 1e-300))
    high = np.where(c > 0, np.maximum(s, low), np.maximum(most, low))
    low = np.log(low)
    high = np.log(high)
    with np.errstate(over="ignore", divide="ignore"):
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            r = np.exp(middle)
            rises = (k - 1) / r - r > c * _mills(a - c * r)
            low = np.where(rises, middle, low)
            high = np.where(rises, high, middle)
    return np.where((k == 1) & (c >= 0), 0.0, np.exp(low))


def _mills(z: Array) -> Array:
    """phi(z) / Phi(z), by erfcx because the logarithms cancel for z far below 0."""
    return ROOT / special.erfcx(-HALF * z)
