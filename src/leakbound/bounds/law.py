"""What the risk laws share: their scope in words, checks of array arguments, safe inverses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]  # of float64

STEPS = 64
"""Halvings of a bisection: enough for the last bit of any bracket of float64."""


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
class Law:
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
