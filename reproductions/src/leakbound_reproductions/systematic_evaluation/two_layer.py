"""The two-layer network of paper B: bounds from its gradient's Jacobian, and Table 1's orders.

f(x) = sum_j a_j s(w_j . x), loss sum_i (y_i - f(x_i))^2 over B examples x_i in R^n. Parameters are
laid out by hidden unit, (M, 1 + n): d loss / d a_j first, then d loss / d w_j. What is released is
that gradient, clipped, with Gaussian noise, in part; J (B n, M (1 + n)) is its derivative.

`local_bound` is a bound, and `bayes_bound` estimates one. An order (`upper_order`, `lower_order`)
leaves out its constant and its logarithms: it says how an error changes with the setting, and
bounds no error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import integrate

from leakbound import check
from leakbound.bounds import (
    ErrorBound,
    FlatPrior,
    GaussianPrior,
    full_bound,
    full_bound_from_samples,
    trace_bound,
)
from leakbound_reproductions.systematic_evaluation.activations import ACTIVATIONS

Array = NDArray[Any]  # of float64

LOCAL = (
    "these inputs, and estimators that are unbiased for all inputs near them",
    "the model's loss is the sum of (y - f)^2 and the attacker knows weights, targets and noise",
    "the noise is Gaussian, independent, of one standard deviation on every coordinate sent",
    "examples are compared in their true order; an error after pairing can be lower",
)
MASKED = "which coordinates are sent does not change near these inputs"
KINKED = "no hidden unit is non-smooth at these inputs; leaks through jumps are not counted"
KNOWN_NORM = "the estimator knows every norm |x_i|: errors along x_i are not counted"
PUBLIC_MASK = "which coordinates are sent does not depend on the data (dropout; not pruning)"
EXACT = "paper B, eq. (27) with errata 2.5: R_L^2 >= (1 / B) tr (J J^T / noise_std^2)^-1"
TRACE = "paper B, eq. (28) with errata 2.4, 2.5: R_L^2 >= noise_std^2 B n^2 / |J|_F^2"
BAYES = "paper A, section 2.2 (van Trees) with the Jacobian of paper B, Lemma D.6, errata 2.11"


@dataclass(frozen=True, eq=False)
class TwoLayer:
    """The network's weights: `inner` (M, n) holds w_j, `outer` (M,) holds a_j.

    Raises:
        ValueError: wrong shapes, NaN, or an unknown activation.
    """

    inner: Array
    outer: Array
    activation: str = "relu"

    def __post_init__(self) -> None:
        check.one_of(ACTIVATIONS, activation=self.activation)
        object.__setattr__(self, "inner", _real("inner", self.inner, 2))
        object.__setattr__(self, "outer", _real("outer", self.outer, 1))
        if len(self.inner) != len(self.outer):
            raise ValueError(
                f"outer holds {len(self.outer)} weights and inner {len(self.inner)} rows; "
                "give one of each for every hidden unit"
            )

    def kept(self, units: Array) -> TwoLayer:
        """The network of these hidden units alone, which is what a dropped-out client runs."""
        return TwoLayer(self.inner[units], self.outer[units], self.activation)


class _Derivatives:
    """Everything of one batch that the gradient and its Jacobian are made of."""

    def __init__(self, network: TwoLayer, inputs: Any, targets: Any) -> None:
        self.x = _real("inputs", inputs, 2)
        y = _real("targets", targets, 1)
        if self.x.shape != (len(y), network.inner.shape[1]):
            raise ValueError(
                f"inputs has shape {self.x.shape}; give (B, n) = "
                f"({len(y)}, {network.inner.shape[1]}), as targets and inner have it"
            )
        self.w = network.inner
        self.a = network.outer
        self.s, self.d, self.dd = ACTIVATIONS[network.activation].parts(self.x @ self.w.T)
        self.r = 2 * (self.s @ self.a - y)
        self.h = (self.d * self.a) @ self.w
        self.c = self.a * self.r[:, None] * self.d

    def outer(self, i: int) -> Array:
        """(M, n) the derivative of d loss / d a_j by x_i."""
        first = (self.r[i] * self.d[i])[:, None] * self.w
        return np.asarray(first + 2 * self.s[i][:, None] * self.h[i])

    def inner(self, i: int) -> Array:
        """(M, n) u_j: the derivative of d loss / d w_j by x_i is u_j x_i^T + c_j I."""
        first = 2 * self.d[i][:, None] * self.h[i]
        return np.asarray(self.a[:, None] * (first + self.r[i] * self.dd[i][:, None] * self.w))

    def gradient(self) -> Array:
        """(M, 1 + n)."""
        outer = self.r @ self.s
        inner = self.c.T @ self.x
        return np.concatenate([outer[:, None], inner], 1)

    def along(self, direction: Array) -> Array:
        """(B n,) the product of J with a direction (M, 1 + n) of parameters."""
        first = direction[:, 0]
        rest = direction[:, 1:]
        parts = [
            first @ self.outer(i) + (rest @ x) @ self.inner(i) + self.c[i] @ rest
            for i, x in enumerate(self.x)
        ]
        return np.concatenate(parts)

    def block(self, i: int, k: int, sent: Array) -> Array:
        """(n, n) the block of examples i and k of J diag(sent) J^T."""
        first = sent[:, :1]
        rest = sent[:, 1:]
        one = self.inner(i)
        other = self.inner(k)
        mixed = (one.T @ (self.c[k][:, None] * rest)) * self.x[i]
        turned = (other.T @ (self.c[i][:, None] * rest)) * self.x[k]
        answer = self.outer(i).T @ (first * self.outer(k)) + mixed + turned.T
        answer += one.T @ ((rest @ (self.x[i] * self.x[k]))[:, None] * other)
        return np.asarray(answer + np.diag((self.c[i] * self.c[k]) @ rest))


def gradient(network: TwoLayer, inputs: Any, targets: Any) -> Array:
    """The gradient (M, 1 + n) of the summed square loss: d / d a_j, then d / d w_j.

    Shapes: `inputs` (B, n), `targets` (B,).

    Source: paper B, lemma D.6; docs/errata.md, B11.
    """
    return _Derivatives(network, inputs, targets).gradient()


def jacobian(network: TwoLayer, inputs: Any, targets: Any) -> Array:
    """J (B n, M (1 + n)): the derivative of the gradient, dense; small networks only.

    Shapes: rows run over examples, then inputs; columns over units, each with a_j first, then w_j.

    Source: paper B, Lemma D.6 with errata 2.11, for any batch.
    """
    parts = _Derivatives(network, inputs, targets)
    size = len(parts.a)
    eye = np.eye(parts.x.shape[1])
    rows = []
    for i, x in enumerate(parts.x):
        inner = parts.inner(i)[:, :, None] * x + parts.c[i][:, None, None] * eye
        block = np.concatenate([parts.outer(i)[:, :, None], inner], 2)
        rows.append(block.transpose(1, 0, 2).reshape(len(eye), size * (1 + len(eye))))
    return np.concatenate(rows)


def energy(network: TwoLayer, inputs: Any, targets: Any) -> Array:
    """(M, 1 + n): each parameter's share of |J|_F^2, in O(B M n).

    Example:
        >>> network = TwoLayer([[1.0, 0.0], [0.5, 1.0]], [1.0, 2.0], "cubic")
        >>> data = ([[1.0, 2.0]], [0.0])
        >>> bool(np.isclose(energy(network, *data).sum(), (jacobian(network, *data) ** 2).sum()))
        True
    """
    parts = _Derivatives(network, inputs, targets)
    total = np.zeros((len(parts.a), 1 + parts.x.shape[1]))
    for i, x in enumerate(parts.x):
        inner = parts.inner(i)
        c = parts.c[i][:, None]
        total[:, 0] += (parts.outer(i) ** 2).sum(1)
        total[:, 1:] += (inner**2).sum(1)[:, None] * x**2 + 2 * inner * x * c + c**2
    return total


def withheld_share(network: TwoLayer, inputs: Any, targets: Any, mask: Any) -> float:
    """p_hat: the share of |J|_F^2 in the parameters that a mask (M, 1 + n) withholds.

    Source: paper B, Proposition 3.4 as Lemma E.3 has it (errata 2.10).
    """
    share = energy(network, inputs, targets)
    return float(1 - share[_sent(mask, share.shape) > 0].sum() / share.sum())


def fisher(
    network: TwoLayer,
    inputs: Any,
    targets: Any,
    *,
    noise_std: float,
    clip_norm: float | None = None,
    mask: Any = None,
) -> Array:
    """The Fisher information (B n, B n) of the release about the inputs, in O(B^2 M n^2).

    The gradient is scaled by 1 / max(1, |gradient| / clip_norm), noise is added, and the
    coordinates where `mask` (M, 1 + n) is False are withheld. The scale's own derivative counts:
    clipping removes the gradient's length, so the information is a little below that of the paper's
    factor max(1, |gradient| / clip_norm) on the noise.

    Raises:
        ValueError: wrong shapes, NaN, a noise_std or clip_norm that is not above 0.

    Source: paper B, theorem D.7 and lemmas E.1 and E.3; docs/errata.md, B17.
    """
    check.positive(noise_std=noise_std)
    parts = _Derivatives(network, inputs, targets)
    sent = _sent(mask, (len(parts.a), 1 + parts.x.shape[1]))
    size, n = parts.x.shape
    answer = np.empty((size, n, size, n))
    for i in range(size):
        for k in range(i + 1):
            answer[i, :, k] = parts.block(i, k, sent)
            answer[k, :, i] = answer[i, :, k].T
    whole = answer.reshape(size * n, size * n)
    if clip_norm is not None:
        whole = _clipped(whole, parts, sent, clip_norm)
    return np.asarray((whole + whole.T) / (2 * noise_std**2))


def _clipped(whole: Array, parts: _Derivatives, sent: Array, clip_norm: float) -> Array:
    """J_c diag(sent) J_c^T with J_c = scale (J - (J g) g^T / |g|^2), where clipping acts."""
    check.positive(clip_norm=clip_norm)
    given = parts.gradient()
    square = float((given**2).sum())
    if square <= clip_norm**2:
        return whole
    radial = parts.along(given) / square
    cross = np.outer(parts.along(sent * given), radial)
    inside = float((sent * given**2).sum()) * np.outer(radial, radial)
    return np.asarray(clip_norm**2 / square * (whole - cross - cross.T + inside))


def _sent(mask: Any, shape: tuple[int, ...]) -> Array:
    if mask is None:
        return np.ones(shape)
    given = np.asarray(mask)
    if given.shape != shape or given.dtype != bool:
        raise ValueError(f"mask is {given.dtype} of shape {given.shape}; give booleans {shape}")
    return given.astype(np.float64)


def local_bound(
    network: TwoLayer,
    inputs: Any,
    targets: Any,
    *,
    noise_std: float,
    clip_norm: float | None = None,
    mask: Any = None,
    norm_known: bool = False,
    trace: bool = False,
) -> ErrorBound:
    """The Cramér-Rao bound at these inputs, for estimators that are unbiased near them.

    `value` is the mean squared error of one input's entry; times n it is the paper's R_L^2. It is
    capped at the zero estimate's error. It does not hold for biased attackers: see `bayes_bound`.

    Shapes: `inputs` (B, n), `targets` (B,), `mask` (M, 1 + n).

    Args:
        network: the weights.
        inputs: at which the bound holds.
        targets: known to the attacker.
        noise_std: of the noise on what is sent, as in `fisher`.
        clip_norm: as in `fisher`.
        mask: as in `fisher`.
        norm_known: whether the estimator knows every |x_i|; the bound falls a little.
        trace: the coarser noise_std^2 B n^2 / |J|_F^2.

    Raises:
        ValueError: as `fisher`.

    Source: paper B, eq. (27) and (28), Theorem D.7, Lemmas E.1 and E.3; errata 2.4, 2.5, 2.10.

    Example:
        >>> network = TwoLayer(np.eye(2), [1.0, 1.0], "cubic")
        >>> bound = local_bound(network, [[0.6, 0.8]], [1.0], noise_std=0.01)
        >>> bound.covers, 0 < bound.value < 1e-4
        ('unbiased', True)
    """
    x = _real("inputs", inputs, 2)
    information = fisher(network, x, targets, noise_std=noise_std, clip_norm=clip_norm, mask=mask)
    if norm_known:
        frame = _tangent(x)
        information = frame.T @ information @ frame
    flat = FlatPrior(len(information), max(float((x**2).sum()), np.finfo(float).tiny))
    by_trace = trace_bound(float(np.trace(information)), flat)
    found = by_trace if trace else full_bound(information, flat)
    kinked = not ACTIVATIONS[network.activation].smooth
    cases = ((MASKED, mask is not None), (KNOWN_NORM, norm_known), (KINKED, kinked))
    return replace(
        found,
        value=found.value * len(information) / x.size,
        assumptions=(*LOCAL, *(sentence for sentence, holds in cases if holds)),
        equation=TRACE if trace else EXACT,
        per_pixel=None if norm_known else found.per_pixel,
    )


def _tangent(x: Array) -> Array:
    """(B n, B (n - 1)) an orthonormal basis of the directions that keep every |x_i|."""
    size, n = x.shape
    frame = np.zeros((size, n, size, n - 1))
    for i, row in enumerate(x):
        frame[i, :, i] = np.linalg.svd(row[None])[2][1:].T
    return frame.reshape(size * n, size * (n - 1))


def bayes_bound(
    network: TwoLayer,
    targets: Any,
    generator: np.random.Generator,
    *,
    noise_std: float,
    variance: float | None = None,
    draws: int = 32,
    clip_norm: float | None = None,
    mask: Any = None,
) -> ErrorBound:
    """An estimate of the van Trees bound for every attacker, where inputs are N(0, variance I).

    Args:
        network: the weights.
        targets: (B,), known to the attacker; they must not depend on the inputs.
        generator: draws the inputs at which the information is averaged.
        noise_std: of the noise on what is sent, as in `fisher`.
        variance: of one entry; None is 1 / n, inputs of about unit length.
        draws: inputs drawn, at least 4.
        clip_norm: as in `fisher`.
        mask: as in `fisher`; it must not depend on the data.

    Raises:
        ValueError: as `fisher`; an activation that is not smooth, whose gradient jumps with the
            inputs and leaks more than its derivative; fewer than 4 draws.

    Source: paper A, section 2.2; paper B, Lemma D.6.
    """
    if not ACTIVATIONS[network.activation].smooth:
        smooth = ", ".join(name for name, one in ACTIVATIONS.items() if one.smooth)
        raise ValueError(
            f"activation is {network.activation!r}, whose gradient jumps: a bound from its "
            f"derivative would be too high; take one of {smooth}"
        )
    y = _real("targets", targets, 1)
    n = network.inner.shape[1]
    spread = 1 / n if variance is None else variance
    prior = GaussianPrior.isotropic(np.zeros(n * len(y)), spread)
    drawn = prior.draw(draws, generator).reshape(draws, len(y), n)
    release = {"noise_std": noise_std, "clip_norm": clip_norm, "mask": mask}
    found = full_bound_from_samples([fisher(network, x, y, **release) for x in drawn], prior)
    sentences = (*found.assumptions, *LOCAL[1:3], *((PUBLIC_MASK,) if mask is not None else ()))
    return replace(found, assumptions=sentences, equation=BAYES)


DEFENSES = ("none", "local_aggregation", "noise", "clipping", "dp_sgd", "dropout", "pruning")
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
class OrderSetting:
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
    """How an error grows, with no constant: never a bound, and never a guarantee.

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


def upper_order(defense: str, setting: OrderSetting) -> Order:
    """The order of the tensor attack's error under a defense, paper B's Table 1.

    Raises:
        ValueError: an unknown defense; clipping without |G| and C.

    Source: paper B, Table 1, with errata 2.2, 2.8 and 2.9.

    Example:
        >>> upper_order("none", OrderSetting(inputs=16, width=1600, batch=2)).value
        0.2
        >>> upper_order("pruning", OrderSetting(inputs=16, width=1600)).value is None
        True
    """
    check.one_of(DEFENSES, defense=defense)
    formula, where = _UPPER[defense]
    if defense == "pruning":
        return Order("upper", defense, formula, None, (), f"paper B, {where}")
    own = setting
    if defense == "dropout":  # of hidden units: a narrower network (errata 2.9)
        width = max(1, round((1 - setting.rate) * setting.width))
        own = replace(setting, width=width, rate=0.0)
    factor = float(own.batch)
    if defense == "noise":
        factor += own.noise_std
    if defense == "dp_sgd":
        factor += own.noise_std * own.clip_factor
    value = factor * math.sqrt(own.inputs / own.width)
    return Order("upper", defense, formula, value, conditions(own), f"paper B, {where}")


def lower_order(defense: str, setting: OrderSetting) -> Order:
    """The order of the least error of any unbiased estimator under a defense and Gaussian noise.

    Raises:
        ValueError: an unknown defense; clipping without |G| and C.

    Source: paper B, Table 1, with errata 2.5, 2.9 and 2.10.

    Example:
        >>> thinned = OrderSetting(inputs=16, width=1600, noise_std=5.0, rate=0.75)
        >>> lower_order("dropout", thinned).value
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


def conditions(setting: OrderSetting) -> tuple[Condition, Condition]:
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
    """E s^(order)(z) for a standard normal z, as E s(z) He_order(z), also if s is not smooth.

    Example:
        >>> round(mean_derivative("cubic", 3), 9), round(mean_derivative("relu", 2), 9)
        (6.0, 0.39894228)
    """
    check.one_of(ACTIVATIONS, activation=activation)
    check.count(order=order)
    parts = ACTIVATIONS[activation].parts
    hermite = np.polynomial.hermite_e.HermiteE.basis(order)

    def integrand(z: float) -> float:
        value = parts(np.asarray(z))[0]
        return float(value * hermite(z) * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi))

    halves = ((-12.0, 0.0), (0.0, 12.0))
    return sum(float(integrate.quad(integrand, *half, epsabs=1e-13)[0]) for half in halves)


def _real(name: str, value: Any, dimensions: int) -> Array:
    array = np.array(value, dtype=np.float64)
    if array.ndim != dimensions or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}; give {dimensions} dimensions, not empty")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds entries that are NaN or infinite; check where from")
    return array
