"""Paper B's Table 1: orders of the reconstruction error of a two-layer network under defenses.

An order leaves out its constant and its logarithms. It tells how an error changes with the setting
and bounds no error: for a floor see `two_layer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy import integrate

from leakbound import check
from leakbound.bounds.activations import ACTIVATIONS

__all__ = [
    "DEFENSES",
    "Condition",
    "Order",
    "Setting",
    "conditions",
    "lower_order",
    "mean_derivative",
    "upper_order",
]

DEFENSES = (
    "none",
    "local_aggregation",
    "noise",
    "clipping",
    "dp_sgd",
    "dropout",
    "pruning",
)
_UPPER = {
    "none": ("B sqrt(n / M)", "Theorem 3.1 (errata 2.2)"),
    "local_aggregation": ("B sqrt(n / M)", "Proposition 3.1"),
    "noise": ("(B + noise_std) sqrt(n / M)", "Proposition C.12 (errata 2.3, 2.8)"),
    "clipping": ("B sqrt(n / M)", "Proposition C.11"),
    "dp_sgd": ("(B + noise_std max(1, |G| / C)) sqrt(n / M)", "Proposition 3.3 (errata 2.8)"),
    "dropout": ("B sqrt(n / ((1 - rate) M))", "Section 3.4 (errata 2.9)"),
    "pruning": ("unknown", "Section 3.5"),
}
_LOWER = {
    "none": ("noise_std sqrt(n / M)", "Theorem 3.2"),
    "local_aggregation": ("noise_std sqrt(n / M)", "Proposition 3.2"),
    "noise": ("noise_std sqrt(n / M)", "Theorem 3.2"),
    "clipping": ("noise_std max(1, |G| / C) sqrt(n / M)", "Lemma E.1"),
    "dp_sgd": ("noise_std max(1, |G| / C) sqrt(n / M)", "Lemma E.1"),
    "dropout": ("noise_std sqrt(n / ((1 - rate) M))", "Section 3.4 (errata 2.9)"),
    "pruning": ("noise_std sqrt(n / ((1 - p_hat) M))", "Proposition 3.4 (errata 2.10)"),
}


@dataclass(frozen=True)
class Setting:
    """What the orders depend on.

    Attributes:
        inputs, width, batch: n, M and B.
        noise_std: of the noise on the gradient of the summed loss.
        gradient_norm, clip_norm: |G| and C, needed for clipping and DP-SGD.
        rate: the share of hidden units dropped.
        withheld_share: p_hat, the share of |J|_F^2 that pruning withholds.
        activation: for nu = E s^(k2)(z), which the conditions of the upper orders need.
        smallest_singular_value: pi_min, of the matrix of the B unit inputs.

    Raises:
        ValueError: a size that is no whole number above 0, or a number outside its range.
    """

    inputs: int
    width: int
    batch: int = 1
    noise_std: float = 0.0
    gradient_norm: float | None = None
    clip_norm: float | None = None
    rate: float = 0.0
    withheld_share: float = 0.0
    activation: str = "relu"
    smallest_singular_value: float = 1.0

    def __post_init__(self) -> None:
        check.count(inputs=self.inputs, width=self.width, batch=self.batch)
        check.non_negative(noise_std=self.noise_std)
        check.one_of(ACTIVATIONS, activation=self.activation)
        check.positive(smallest_singular_value=self.smallest_singular_value)
        for name in ("rate", "withheld_share"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name} is {value!r}; give a fraction of at least 0, below 1")
        if self.gradient_norm is not None:
            check.non_negative(gradient_norm=self.gradient_norm)
        if self.clip_norm is not None:
            check.positive(clip_norm=self.clip_norm)

    @property
    def clip_factor(self) -> float:
        """max(1, |G| / C)."""
        if self.gradient_norm is None or self.clip_norm is None:
            raise ValueError("gradient_norm or clip_norm is None; clipping needs both")
        return max(1.0, self.gradient_norm / self.clip_norm)


@dataclass(frozen=True)
class Condition:
    """An inequality that a statement needs, left >= right, constants and logarithms left out."""

    sentence: str
    left: float
    right: float

    @property
    def holds(self) -> bool:
        """Whether it is met with a constant of one."""
        return self.left >= self.right


@dataclass(frozen=True)
class Order:
    """How an error grows, with no constant: never a floor, and never a guarantee.

    Attributes:
        side: "upper" (the tensor attack's error) or "lower" (every estimator's).
        defense: one of `DEFENSES`.
        formula: in words.
        value: of the formula; None where no order is known.
        conditions: what it needs.
        equation: paper and statement.
    """

    side: str
    defense: str
    formula: str
    value: float | None
    conditions: tuple[Condition, ...]
    equation: str


def upper_order(defense: str, setting: Setting) -> Order:
    """The order of the tensor attack's error under a defense, paper B's Table 1.

    Raises:
        ValueError: an unknown defense; clipping without |G| and C.

    Source: paper B, Table 1, with errata 2.2, 2.8 and 2.9.

    Example:
        >>> upper_order("none", Setting(inputs=16, width=1600, batch=2)).value
        0.2
        >>> upper_order("pruning", Setting(inputs=16, width=1600)).value is None
        True
    """
    check.one_of(DEFENSES, defense=defense)
    formula, where = _UPPER[defense]
    if defense == "pruning":
        return Order("upper", defense, formula, None, (), f"paper B, {where}")
    own = _thinned(setting) if defense == "dropout" else setting
    factor = float(own.batch)
    if defense == "noise":
        factor += own.noise_std
    if defense == "dp_sgd":
        factor += own.noise_std * own.clip_factor
    value = factor * math.sqrt(own.inputs / own.width)
    return Order("upper", defense, formula, value, conditions(own), f"paper B, {where}")


def lower_order(defense: str, setting: Setting) -> Order:
    """The order of the least error of any unbiased estimator under a defense and Gaussian noise.

    Raises:
        ValueError: an unknown defense; clipping without |G| and C.

    Source: paper B, Table 1, with errata 2.5, 2.9 and 2.10.

    Example:
        >>> lower_order("dropout", Setting(inputs=16, width=1600, noise_std=5.0, rate=0.75)).value
        1.0
    """
    check.one_of(DEFENSES, defense=defense)
    formula, where = _LOWER[defense]
    value = setting.noise_std * math.sqrt(setting.inputs / setting.width)
    if defense in ("clipping", "dp_sgd"):
        value *= setting.clip_factor
    if defense == "dropout":
        value /= math.sqrt(1 - setting.rate)
    if defense == "pruning":
        value /= math.sqrt(1 - setting.withheld_share)
    return Order("lower", defense, formula, value, (), f"paper B, {where}")


def conditions(setting: Setting) -> tuple[Condition, Condition]:
    """What the upper orders need: B <= n^(1/4) and M >= n B^2 / (nu^2 pi_min^2).

    Source: paper B, Theorem B.6 and Proposition C.1; errata 2.2.
    """
    order = next(k for k in (2, 3) if abs(mean_derivative(setting.activation, k)) > 1e-9)
    nu = mean_derivative(setting.activation, order)
    needed = setting.inputs * setting.batch**2 / (nu * setting.smallest_singular_value) ** 2
    return (
        Condition("n^(1/4) >= B", setting.inputs**0.25, float(setting.batch)),
        Condition("M >= n B^2 / (nu pi_min)^2", float(setting.width), needed),
    )


def mean_derivative(activation: str, order: int) -> float:
    """E s^(order)(z) for a standard normal z, as E s(z) He_order(z): kinks need no care.

    Example:
        >>> round(mean_derivative("cubic", 3), 9), round(mean_derivative("relu", 2), 9)
        (6.0, 0.39894228)
    """
    check.one_of(ACTIVATIONS, activation=activation)
    check.count(order=order)
    parts, hermite = ACTIVATIONS[activation].parts, np.polynomial.hermite_e.HermiteE.basis(order)

    def integrand(z: float) -> float:
        value = parts(np.asarray(z))[0]
        return float(value * hermite(z) * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi))

    halves = ((-12.0, 0.0), (0.0, 12.0))
    return sum(float(integrate.quad(integrand, *half, epsabs=1e-13)[0]) for half in halves)


def _thinned(setting: Setting) -> Setting:
    """Dropout of hidden units is a narrower network (errata 2.9)."""
    return replace(setting, width=max(1, round((1 - setting.rate) * setting.width)), rate=0.0)
