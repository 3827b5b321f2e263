"""What the risk laws share: their scope in words, and checks of array arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]  # of float64


@dataclass(frozen=True)
class Scope:
    """The statement that a law's number supports; it is printed with the number.

    Attributes:
        covers: "all" attackers (a bound), "trap" (all estimators of a linear trap's noisy output),
            "equivariant" (unbiased or translation-equivariant ones), "one" (a single attack),
            "attained" (a working attack) or "none" (an approximation).
        attackers: which attackers the number covers, as text.
        prior: which examples it holds for.
        known: what the attacker is assumed to know.
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
            f"covers {self.attackers}; examples: {self.prior}; known to the attacker: {self.known};"
            f" it does not say: {self.not_said} [{self.equation}]"
        )


@dataclass(frozen=True)
class RiskLaw:
    """A probability gamma as a function of the noise multiplier, with its scope and inverses.

    Attributes:
        scope: which attackers and examples the law covers, and what it does not say.
    """

    scope: Scope


def positive(
    name: str,
    value: ArrayLike,
    *,
    infinite: bool = False,
) -> Array:
    """Numbers above 0 as float64; infinity only on request."""
    return _inside(name, value, 0.0, False, np.inf, infinite, "above 0")


def non_negative(name: str, value: ArrayLike) -> Array:
    """Numbers of at least 0 as float64; infinity is a limit that all laws accept."""
    return _inside(name, value, 0.0, True, np.inf, True, "of at least 0")


def probability(
    name: str,
    value: ArrayLike,
    *,
    closed: bool = False,
) -> Array:
    """Numbers in (0, 1), or in [0, 1] if closed."""
    words = "between 0 and 1, both allowed" if closed else "strictly between 0 and 1"
    return _inside(name, value, 0.0, closed, 1.0, closed, words)


def between(
    name: str,
    value: ArrayLike,
    low: float,
    high: float,
    *,
    closed: bool = True,
) -> Array:
    """Numbers in [low, high], or in (low, high) if not closed."""
    words = f"from {low:g} to {high:g}" if closed else f"strictly between {low:g} and {high:g}"
    return _inside(name, value, low, closed, high, closed, words)


def rate(name: str, value: ArrayLike) -> Array:
    """Numbers in (0, 1]."""
    return _inside(name, value, 0.0, False, 1.0, True, "above 0 and at most 1")


def whole(
    name: str,
    value: ArrayLike,
    least: int = 1,
) -> Array:
    """Whole numbers of at least `least`, as float64 (exact up to 2^53)."""
    array = _inside(name, value, least, True, 2.0**53, True, f"whole, at least {least}")
    if np.any(array != np.floor(array)):
        bad = array[array != np.floor(array)].flat[0]
        raise ValueError(f"{name} is {bad:g}; give a whole number of at least {least}")
    return array


RULES: Mapping[str, Callable[[str, ArrayLike], Array]] = {
    "noise_multiplier": non_negative,
    "epsilon": non_negative,
    "delta": probability,
    "gamma": probability,
    "kappa": probability,
    "norm": positive,
    "eta": partial(positive, infinite=True),
    "sampling_rate": rate,
    "steps": whole,
    "dim": whole,
}
"""What an argument of a law may be, by its name, where the law says nothing else."""


def arguments(**values: ArrayLike) -> Sequence[Array]:
    """Arguments of a law, checked by `RULES`, and broadcast."""
    return np.broadcast_arrays(*(RULES[name](name, value) for name, value in values.items()))


def single(
    rule: Callable[[str, ArrayLike], Array],
    **value: ArrayLike,
) -> float:
    """The value of one argument that is a single number, checked by a rule.

    Example:
        >>> single(positive, eta=0.5)
        0.5
    """
    ((name, argument),) = value.items()
    checked = rule(name, argument)
    if checked.ndim:
        raise ValueError(f"{name} has shape {checked.shape}; give a single number")
    return float(checked)


def one(value: Array) -> Any:
    """A float for a single number, the array for several."""
    return float(value) if value.ndim == 0 else value


def groups(*parts: Array) -> Iterator[tuple[Any, tuple[float, ...]]]:
    """The positions of each combination of the arrays' values, and the combination.

    Example:
        >>> [(mask.tolist(), pair) for mask, pair in groups(np.array([1, 2, 1]))]
        [([True, False, True], (1.0,)), ([False, True, False], (2.0,))]
    """
    rows = np.stack([np.ravel(part) for part in parts], 1)
    kinds, place = np.unique(rows, axis=0, return_inverse=True)
    for number, kind in enumerate(kinds):
        yield np.reshape(place == number, parts[0].shape), tuple(float(v) for v in kind)


def _inside(
    name: str,
    value: ArrayLike,
    low: float,
    low_allowed: bool,
    high: float,
    high_allowed: bool,
    words: str,
) -> Array:
    try:
        array = np.asarray(value)
        # NumPy would convert booleans and text, which are errors of the caller.
        if array.dtype.kind not in "iuf":
            raise TypeError
        array = array.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is {value!r}; give a number or an array of numbers") from None
    good = (array >= low) if low_allowed else (array > low)
    good &= (array <= high) if high_allowed else (array < high)
    if not np.all(good):  # also NaN, which compares false
        raise ValueError(f"{name} is {array[~good].flat[0]:g}; give numbers {words}")
    return array
