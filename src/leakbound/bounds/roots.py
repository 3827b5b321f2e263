"""Search where a bound meets a target: few evaluations, and an evaluated result that holds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import optimize

from leakbound.bounds.law import Array

Excess = Callable[[float], float]
STEPS = 64
"""Number of halvings of a bisection: enough for the last bit of any bracket of float64."""
CLOSE = 5e-16
"""Tolerance of `least_root`, besides rounding; its places are logarithms."""
FAR = 60.0
"""How far from its start `edge` searches, in the logarithm of its argument."""
NEAR = 5e-6
"""Default tolerance of `edge`: relative to the result if it searches a logarithm."""
GUESS = 2e-4
"""Tolerance of the rough search; its distance from the exact edge is mostly larger."""
TRIES = 12
MOST_STEPS = 2**30


def least_where(
    holds: Callable[[Array], Array],
    low: Array,
    high: Array,
) -> Array:
    """The smallest x in [low, high] from which `holds` stays true, elementwise, never below it.

    `holds` must be monotone (false, then true) and true at `high`; the result satisfies it.
    """
    low, high = (np.array(end, dtype=float) for end in np.broadcast_arrays(low, high))
    for _ in range(STEPS):
        middle = low + (high - low) / 2  # (low + high) / 2 may overflow
        fine = holds(middle)
        high = np.where(fine, middle, high)
        low = np.where(fine, low, middle)
    return high


def least_root(
    excess: Callable[[Array], Array],
    low: Array,
    high: Array,
) -> Array:
    """The smallest x in [low, high] where `excess` is not positive, elementwise, never below it.

    `excess` is continuous and falls. It was evaluated at the result, which is `high` if it stays
    above 0. Chandrupatla's method (1997) takes about ten evaluations where bisection takes 64.
    Each entry's path depends on that entry alone.
    """
    # `a` is the latest place, so it starts at the end that is returned if nothing is found.
    a, b = (np.array(end, dtype=float) for end in np.broadcast_arrays(high, low))
    fa = excess(a)
    fb = excess(b)
    high = a
    never = fa > 0
    always = fb <= 0
    c = a
    fc = fa
    part = np.full(a.shape, 0.5)
    for _ in range(3 * STEPS):
        # Closer than this, excess is only rounding.
        near = np.minimum(np.abs(a), np.abs(b)) * 2.0**-51 + CLOSE
        open_ = (np.abs(b - a) > 2 * near) & (fa != 0) & (fb != 0) & ~never & ~always
        if not open_.any():
            break
        x = np.where(open_, a + part * (b - a), a)
        fx = excess(x)
        same = (fx > 0) == (fa > 0)
        c = np.where(same, a, b)
        fc = np.where(same, fa, fb)
        b = np.where(same | ~open_, b, a)
        fb = np.where(same | ~open_, fb, fa)
        a = np.where(open_, x, a)
        fa = np.where(open_, fx, fa)
        part = _next_part(a, fa, b, fb, c, fc, near)
    return np.where(never, high, np.where((fa <= 0) & ~always, a, b))


def _next_part(
    a: Array,
    fa: Array,
    b: Array,
    fb: Array,
    c: Array,
    fc: Array,
    near: Array,
) -> Array:
    """The next place, from a (0) to b (1): inverse quadratic, or the middle if that is unsafe."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        xi = (a - b) / (c - b)
        phi = (fa - fb) / (fc - fb)
        smooth = (phi**2 < xi) & ((1 - phi) ** 2 < 1 - xi)
        quadratic = fa / (fb - fa) * fc / (fb - fc)
        quadratic = quadratic + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        end = np.minimum(0.5, near / np.abs(b - a))
        part = np.where(smooth & np.isfinite(quadratic), quadratic, 0.5)
        return np.clip(part, end, 1 - end)


def inward(
    fits: Callable[[Array], Array],
    value: Array,
    sign: float,
) -> Array:
    """Move the value by some last bits, up (sign 1) or down (-1), to where it `fits` again.

    An inverse ends within rounding of its result; this puts it on the safe side. It changes the
    value by at most 2^-29 of itself.
    """
    moved = np.array(value, dtype=float)
    for step in range(23):
        wrong = ~fits(moved)
        if not wrong.any():
            break
        moved = np.where(wrong, moved * (1 + sign * 2.0 ** (step - 52)), moved)
    return moved


def crossing(
    excess: Excess,
    fine: float,
    bad: float,
) -> float:
    """Where `excess` turns positive between `fine` (it is not positive) and `bad` (it is).

    The result is on the safe side: excess was evaluated there and is 0 or less.
    """
    step = 1e-6 if bad > fine else -1e-6
    place = float(optimize.brentq(excess, fine, bad, xtol=1e-6, rtol=1e-12))
    # Brent stops on either side: go back to the safe one.
    while excess(place) > 0:
        place = place - step
        step = 2 * step
        if (place - fine) * step <= 0:
            return fine
    return place


def last_that(holds: Callable[[int], bool], guess: int) -> int:
    """The largest number that satisfies `holds`, at most 2^30, 0 if none; starts near `guess`."""
    low = min(guess, MOST_STEPS)
    step = 1
    # Steps double, so a poor start costs only its logarithm.
    while low > 0 and not holds(low):
        low = max(0, low - step)
        step = 2 * step
    high = low + 1
    step = 1
    while low < MOST_STEPS and high <= MOST_STEPS and holds(high):
        step *= 2
        low = high
        high = min(high + step, MOST_STEPS + 1)
    while high - low > 1 and low < MOST_STEPS:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def edge(
    excess: Excess,
    fine: float,
    way: float,
    *,
    rough: Excess,
    near: float = NEAR,
    most: float = FAR,
) -> float:
    """The farthest place from `fine`, to `near`, up to which `excess` is not positive.

    `excess` is continuous, falls to 0 or below towards `fine` (not evaluated there) and rises in
    the direction `way` (1 or -1). Places farther than `most` are not searched. The result was
    evaluated, or is `fine` or the last place. `rough` replaces `excess`, cheaper and less exact:
    the search starts at its edge, so that `excess` is evaluated only a few times. A poor
    replacement only costs evaluations.
    """
    start, slope = _rough_edge(rough, fine, way, most)
    # distances from fine
    good = 0.0
    bad = most
    place = start
    known = closed = False
    before: tuple[float, float] | None = None
    for _ in range(TRIES):
        value = excess(fine + way * place)
        good, bad = (place, bad) if value <= 0 else (good, place)
        known = known or value <= 0
        closed = closed or value > 0
        if (bad - good <= near) if closed else good >= most:
            return fine + way * good
        if before is not None and (value - before[1]) * (place - before[0]) > 0:
            slope = (value - before[1]) / (place - before[0])
        before = place, value
        root = place - value / slope if slope > 0 else 2 * place + near
        # Just beside the root, so that `good` and `bad` soon enclose it within `near`.
        aim = root - near / 4 if not known or good < root - near / 2 else root + near / 4
        inside = good + near / 8 < aim < bad - near / 8 if closed else aim > good
        if not inside:
            aim = (good + bad) / 2 if closed else 2 * good + near
        place = min(aim, most)
    if not closed:
        return fine + way * good
    return crossing(excess, fine + way * good, fine + way * bad)


def _rough_edge(
    rough: Excess,
    fine: float,
    way: float,
    most: float,
) -> tuple[float, float]:
    """Distance from `fine` at which the replacement turns positive, and its slope there."""

    def at(place: float) -> float:
        return rough(fine + way * place)

    low = 0.0
    high = 0.25
    first = at(low)
    if first > 0:  # a replacement that errs upwards may be positive next to the edge
        return 0.0, max(at(0.01) - first, 0.0) / 0.01
    last = at(high)
    while last <= 0 and high < most:
        low = high
        first = last
        high = min(most, 2 * high + 0.25)
        last = at(high)
    if last <= 0:
        return most, 0.0
    place = float(optimize.brentq(at, low, high, xtol=GUESS, rtol=1e-12))
    step = min(0.01, (high - low) / 2)
    return place, -at(place - step) / step
