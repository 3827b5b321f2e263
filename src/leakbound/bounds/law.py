"""What the risk laws share: their scope in words, checks of array arguments, safe inverses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]  # of float64

STEPS = 64
"""Halvings of a bisection: enough for the last bit of any bracket of float64."""
CLOSE = 5e-16
"""How close `least_root` comes at least, beside rounding: its places are logarithms."""


@dataclass(frozen=True)
class Scope:
    """What may be said with a law's number; printed wherever the number is.

    Attributes:
        covers: "all" attackers (a bound), "trap" (all estimators of a linear trap's noisy answer),
            "equivariant" (unbiased or translation-equivariant ones), "one" (a single attack),
            "attained" (one that works: a lower edge) or "none" (an approximation).
        attackers: whom the number covers, as a sentence.
        prior: which records it holds for.
        known: what the attacker is taken to know.
        not_said: what the number does not say.
        equation: paper and equation.
    """

    covers: str
    attackers: str
    prior: str
    known: str
    not_said: str
    equation: str

    def __str__(self) -> str:
        return (
            f"covers {self.attackers}; records: {self.prior}; known to the attacker: {self.known}; "
            f"it does not say: {self.not_said} [{self.equation}]"
        )


@dataclass(frozen=True)
class RiskLaw:
    """A probability gamma as a function of the noise multiplier, with its scope and inverses.

    Attributes:
        scope: whom it covers, for which records, and what it does not say.
    """

    scope: Scope


def positive(name: str, value: ArrayLike, *, infinite: bool = False) -> Array:
    """Numbers above 0 as float64; infinity only where asked for."""
    return _inside(name, value, 0.0, False, np.inf, infinite, "above 0")


def non_negative(name: str, value: ArrayLike) -> Array:
    """Numbers of at least 0 as float64; infinity is a limit that all laws take."""
    return _inside(name, value, 0.0, True, np.inf, True, "of at least 0")


def probability(name: str, value: ArrayLike, *, closed: bool = False) -> Array:
    """Numbers inside (0, 1), or [0, 1] where closed."""
    words = "between 0 and 1, both allowed" if closed else "strictly between 0 and 1"
    return _inside(name, value, 0.0, closed, 1.0, closed, words)


def between(name: str, value: ArrayLike, low: float, high: float, *, closed: bool = True) -> Array:
    """Numbers in [low, high], or (low, high) where not closed."""
    words = f"from {low:g} to {high:g}" if closed else f"strictly between {low:g} and {high:g}"
    return _inside(name, value, low, closed, high, closed, words)


def rate(name: str, value: ArrayLike) -> Array:
    """Numbers in (0, 1]."""
    return _inside(name, value, 0.0, False, 1.0, True, "above 0 and at most 1")


def whole(name: str, value: ArrayLike, least: int = 1) -> Array:
    """Whole numbers of at least `least`, as float64 (exact up to 2^53)."""
    array = _inside(name, value, least, True, 2.0**53, True, f"whole, at least {least}")
    if np.any(array != np.floor(array)):
        bad = array[array != np.floor(array)].flat[0]
        raise ValueError(f"{name} is {bad:g}; give a whole number of at least {least}")
    return array


def single(name: str, value: Array) -> float:
    """The one number where a law takes no array."""
    if value.ndim:
        raise ValueError(f"{name} has shape {value.shape}; give a single number")
    return float(value)


def one(value: Array) -> Any:
    """A float for a single number, the array for several."""
    return float(value) if value.ndim == 0 else value


def groups(*parts: Array) -> Iterator[tuple[Any, tuple[float, ...]]]:
    """Where each combination of the arrays' values stands, and the combination.

    Example:
        >>> [(mask.tolist(), pair) for mask, pair in groups(np.array([1, 2, 1]))]
        [([True, False, True], (1.0,)), ([False, True, False], (2.0,))]
    """
    rows = np.stack([np.ravel(part) for part in parts], 1)
    kinds, place = np.unique(rows, axis=0, return_inverse=True)
    for number, kind in enumerate(kinds):
        yield np.reshape(place == number, parts[0].shape), tuple(float(v) for v in kind)


def least_where(holds: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """The least x in [low, high] from which `holds` stays true, elementwise, never below it.

    `holds` must be monotone (false, then true) and true at `high`; the answer satisfies it.
    """
    low, high = (np.array(edge, dtype=float) for edge in np.broadcast_arrays(low, high))
    for _ in range(STEPS):
        middle = low + (high - low) / 2
        fine = holds(middle)
        high, low = np.where(fine, middle, high), np.where(fine, low, middle)
    return high


def least_root(excess: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """The least x in [low, high] where `excess` is not positive, elementwise, never below it.

    `excess` is continuous and falls; the answer is a place where it was evaluated, or `high` where
    it stays above 0. Chandrupatla's method: some ten evaluations where bisection takes 64. Each
    entry's path depends on that entry alone.

    Source: Chandrupatla, Advances in Engineering Software 28(3), 1997.

    Example:
        >>> found = least_root(lambda x: 2 - x * x, np.array([0.0, 1.0]), np.array([2.0, 9.0]))
        >>> bool(np.abs(found - 2**0.5).max() < 1e-14)
        True
    """
    a, b = (np.array(edge, dtype=float) for edge in np.broadcast_arrays(high, low))
    fa, fb = excess(a), excess(b)
    high, never, always = a, fa > 0, fb <= 0
    c, fc, part = a, fa, np.full(a.shape, 0.5)
    for _ in range(3 * STEPS):
        near = np.minimum(np.abs(a), np.abs(b)) * 2.0**-51 + CLOSE
        open_ = (np.abs(b - a) > 2 * near) & (fa != 0) & (fb != 0) & ~never & ~always
        if not open_.any():
            break
        x = np.where(open_, a + part * (b - a), a)
        fx = excess(x)
        same = (fx > 0) == (fa > 0)
        c, fc = np.where(same, a, b), np.where(same, fa, fb)
        b, fb = np.where(same | ~open_, b, a), np.where(same | ~open_, fb, fa)
        a, fa = np.where(open_, x, a), np.where(open_, fx, fa)
        part = _next_part(a, fa, b, fb, c, fc, near)
    return np.where(never, high, np.where((fa <= 0) & ~always, a, b))


def _next_part(a: Array, fa: Array, b: Array, fb: Array, c: Array, fc: Array, near: Array) -> Array:
    """Where to look next, from a (0) to b (1): inverse quadratic, or the middle if it is unsafe."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
        smooth = (phi**2 < xi) & ((1 - phi) ** 2 < 1 - xi)
        quadratic = fa / (fb - fa) * fc / (fb - fc)
        quadratic = quadratic + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        edge = np.minimum(0.5, near / np.abs(b - a))
        found = np.where(smooth & np.isfinite(quadratic), quadratic, 0.5)
        return np.asarray(np.clip(found, edge, 1 - edge))


def inward(fits: Callable[[Array], Array], value: Array, sign: float) -> Array:
    """The value moved by some last bits, up (sign 1) or down (-1), to where it `fits` again.

    An inverse ends within rounding of its answer; this puts it on the safe side. At most 2^-29 of
    the value is given up.
    """
    found = np.array(value, dtype=float)
    for step in range(23):
        wrong = ~fits(found)
        if not wrong.any():
            break
        found = np.where(wrong, found * (1 + sign * 2.0 ** (step - 52)), found)
    return found


def _inside(
    name: str,
    value: ArrayLike,
    low: float,
    low_fine: bool,
    high: float,
    high_fine: bool,
    words: str,
) -> Array:
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "iuf":
            raise TypeError
        array = array.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is {value!r}; give a number or an array of numbers") from None
    good = (array >= low) if low_fine else (array > low)
    good &= (array <= high) if high_fine else (array < high)
    if not np.all(good):
        bad = array[~good].flat[0]
        raise ValueError(f"{name} is {bad:g}; give numbers {words}")
    return array
