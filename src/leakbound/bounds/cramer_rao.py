"""Bayesian Cramer-Rao (van Trees) bounds on the error of a reconstruction.

x in R^m is what is rebuilt (m = batch size * inputs), y the release, J_D = E_x J_F(x) its Fisher
information averaged over the prior, J_P the prior's own: E||R(y) - x||^2 >= tr (J_D + J_P)^-1.
Paper A's trace form has d, the number of parameters, where m is right (errata 0.1); its lambda_1
is the largest eigenvalue (0.2). Every bound is capped at the prior's variance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import linalg, stats

from leakbound import check
from leakbound.bounds.priors import Array, Prior, real, symmetric

Operator = Callable[[Array], Array]

ASSUMPTIONS = (
    "it bounds the average over the prior and the release's noise, not one image and no tail",
    "images of a batch are compared in their true order; an error after pairing can be lower",
    "the Fisher information is that of all the attacker sees and is averaged over this prior",
    "the release's law is smooth in x; a covariance that depends on x adds its own information",
)
TRACE = "paper A, Theorem 3.2 with m for d: m^2 / (tr J_D + m lambda_max(J_P))"
TIGHT = "paper A, Theorem 3.2 with m for d, tighter: m^2 / (tr J_D + tr J_P)"
FULL = "paper A, eq. (1): tr (J_D + J_P)^-1"
VARIATIONAL = FULL + " >= 2 tr V - tr V (J_D + J_P) V"
_SHRINKAGES = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0)


@dataclass(frozen=True, eq=False)
class ErrorBound:
    """A lower bound on the mean squared error of every attacker that it covers.

    Attributes:
        name: "trace", "tight_trace" or "full".
        value: lower bound on E||R(y) - x||^2 / m, capped at the prior's; input units squared.
        prior, rests_on_prior: its name, and whether the value depends on it.
        assumptions: sentences to check.
        equation: paper and equation.
        covers: "all" attackers, or "unbiased" ones (the flat prior).
        per_pixel: (m,) the same for each input, the leak map; None where only a total is known.
        standard_error: of the estimate behind the value where J_D was sampled; else None.
    """

    name: str
    value: float
    prior: str
    rests_on_prior: bool
    assumptions: tuple[str, ...]
    equation: str
    covers: str = "all"
    per_pixel: Array | None = None
    standard_error: float | None = None


def trace_bound(fisher_trace: float, prior: Prior) -> ErrorBound:
    """The bound of Theorem 3.2, corrected: m^2 / (tr J_D + m lambda_max(J_P)), over m.

    Units: `fisher_trace` tr J_D over all inputs, 1 / input units squared; infinite without noise.
        With a prior in k of m directions, k stands for m in the formula, and m divides at the end.

    Raises:
        ValueError: `fisher_trace` is negative or NaN.

    Source: paper A, Theorem 3.2 with errata 0.1 and 0.2.

    Example:
        >>> from leakbound.bounds.priors import GaussianPrior
        >>> trace_bound(6.0, GaussianPrior.isotropic([0.0, 0.0], 1.0)).value
        0.25
    """
    largest = float(_diagonal(prior)[0].max())
    return _trace_floor("trace", fisher_trace, prior.rank * largest, prior, TRACE)


def tight_trace_bound(fisher_trace: float, prior: Prior) -> ErrorBound:
    """The tighter trace bound, m^2 / (tr J_D + tr J_P), over m; else as `trace_bound`.

    Source: paper A, proof of Theorem 3.2, without its last step.

    Example:
        >>> from leakbound.bounds.priors import UserPrior
        >>> tight_trace_bound(3.0, UserPrior("uneven", [4.0, 1.0], 1.25)).value
        0.25
    """
    known = float(_diagonal(prior)[0].sum())
    return _trace_floor("tight_trace", fisher_trace, known, prior, TIGHT)


def trace_bound_from_samples(
    traces: Any, prior: Prior, *, tight: bool = True, confidence: float = 0.99
) -> ErrorBound:
    """A trace bound at an upper confidence limit of the mean of tr J_F(x) over sampled images.

    Args:
        traces: (n,) of independent images of the prior, 1 / input units squared.
        prior: what the attacker knows.
        tight: `tight_trace_bound`, else `trace_bound`.
        confidence: as in `full_bound_from_samples`.

    Raises:
        ValueError: fewer than two samples, negative or NaN ones, a confidence outside (0.5, 1).

    Source: as `trace_bound`.

    Example:
        >>> from leakbound.bounds.priors import GaussianPrior
        >>> trace_bound_from_samples([2.0] * 3, GaussianPrior.isotropic([0, 0], 1.0)).value
        0.5
    """
    values = real("traces", traces, 1)
    if values.min() < 0:
        raise ValueError(f"traces holds {values.min():.6g}; a Fisher information is never negative")
    error, margin = _spread("traces", values[None], confidence)
    bound = (tight_trace_bound if tight else trace_bound)(float(values.mean()) + margin, prior)
    slope = (bound.value * prior.dimension / prior.rank) ** 2 / prior.dimension
    return _marked(bound, slope * error, confidence)


def full_bound(fisher: Any, prior: Prior) -> ErrorBound:
    """The van Trees bound tr (J_D + J_P)^-1 / m, with its leak map.

    Shapes: `fisher` J_D (m, m), or (k, k) in the prior's basis; 1 / input units squared.

    Assumptions: `fisher` is J_D; for an average of samples use `full_bound_from_samples`. The
        bound is the best attacker's error in a linear-Gaussian model. Rounding errs downwards.

    Raises:
        ValueError: a wrong shape, NaN, not symmetric, a negative eigenvalue.

    Source: paper A, eq. (1); van Trees, "Detection, Estimation, and Modulation Theory", 1968.

    Example:
        >>> from leakbound.bounds.priors import UserPrior
        >>> bound = full_bound([[1.0, 0.0], [0.0, 3.0]], UserPrior("uneven", [1.0, 1.0], 2.0))
        >>> round(bound.value, 9), bound.per_pixel.round(9).tolist()
        (0.375, [0.5, 0.25])
    """
    matrix = _projected("fisher", fisher, prior)
    known = bool(prior.information.any())
    root = np.linalg.inv(np.linalg.cholesky(prior.matrix)) if known else np.eye(prior.rank)
    values, vectors = np.linalg.eigh(root @ matrix @ root.T)
    if values[0] < -1e-8 * np.abs(values).max():
        raise ValueError(f"fisher has the eigenvalue {values[0]:.4g}; it must not be negative")
    slack = prior.rank * np.finfo(np.float64).eps * np.abs(values).max()
    with np.errstate(divide="ignore"):
        errors = 1 / (float(known) + np.maximum(values, 0) + slack)
    directions = root.T @ vectors
    total = float((directions**2 @ errors).sum()) if np.isfinite(errors).all() else np.inf
    bound = _bound("full", total, prior, FULL)
    if total > prior.variance * (1 + 1e-9):
        return bound
    in_pixels = directions if prior.basis is None else prior.basis @ directions
    return replace(bound, per_pixel=in_pixels**2 @ errors)


def full_bound_from_samples(fishers: Any, prior: Prior, *, confidence: float = 0.99) -> ErrorBound:
    """The full bound from J_F(x) of sampled images, as a lower confidence limit.

    The inverse of a sample mean is too large on average. Instead, tr J^-1 >= 2 tr V - tr V J V for
    every symmetric V, linear in J and equal at V = J^-1: one half of the samples chooses V, the
    other evaluates it without bias, and the halves change places. The value is the mean less a t
    quantile of its standard error, at least 0.

    Args:
        fishers: n >= 4, iterable, of independent images of the prior; each as in `full_bound`.
        prior: what the attacker knows.
        confidence: one-sided, by a t quantile: approximate for few samples with heavy tails.

    Raises:
        ValueError: fewer than four, no Fisher matrices, a confidence outside (0.5, 1).

    Source: paper A, eq. (1); variational form of tr J^-1 (convex conjugate).

    Example:
        >>> from leakbound.bounds.priors import FlatPrior
        >>> round(full_bound_from_samples([np.eye(2)] * 8, FlatPrior(2, 9.0)).value, 6)
        1.0
    """
    samples = np.array([_projected("fishers", fisher, prior) for fisher in fishers])
    if len(samples) < 4:
        raise ValueError(f"fishers holds {len(samples)} samples; give at least 4")
    if np.diagonal(samples, axis1=1, axis2=2).min() < 0:
        raise ValueError("fishers holds a negative diagonal entry; give J^T Sigma^-1 J")
    halves, known = (samples[::2], samples[1::2]), prior.matrix
    gains = []
    for fit, test in (halves, halves[::-1]):
        choice = _choose(fit, known)
        even = test[: len(samples) // 2] + known
        gains.append(2 * np.trace(choice) - np.einsum("nij,ij->n", even, choice @ choice))
    return _sampled("fishers", np.array(gains), prior, confidence)


def matrix_free_bound(
    first: Sequence[Operator],
    second: Sequence[Operator],
    prior: Prior,
    rank: int,
    probes: int,
    generator: np.random.Generator,
    *,
    confidence: float = 0.99,
) -> ErrorBound:
    """The full bound from products with J_F(x) alone, for m too large for matrices.

    `first` chooses V = (J_P + c I + low rank)^-1 by randomized Rayleigh-Ritz; `second` evaluates
    2 tr V - tr V J V as tr V + z^T V (z - J V z) with random signs z, which is unbiased. Any V
    gives a valid bound, so a low rank, few probes or few images only loosen it.

    Args:
        first: functions (m, r) -> (m, r), each applying J_F(x_j) of one image of the prior.
        second: the same of other, independent images, at least two.
        prior: what the attacker knows; a diagonal J_P is never made full.
        rank: directions kept of J_D. Needs about 3 (rank + 5) products an image.
        probes: random vectors for each image.
        generator: draws the probes.
        confidence: as in `full_bound_from_samples`.

    Raises:
        ValueError: too few operators, one in both lists, a wrong shape, NaN.

    Source: as `full_bound_from_samples`; Halko et al., SIAM Review 53, 2011; Hutchinson, 1990.

    Example:
        >>> from leakbound.bounds.priors import GaussianPrior
        >>> prior, source = GaussianPrior.isotropic([0, 0], 1.0), np.random.default_rng(0)
        >>> one, two, three = (lambda block, k=k: k * block for k in (1.0, 1.0, 1.0))
        >>> round(matrix_free_bound([one], [two, three], prior, 2, 4, source).value, 6)
        0.5
    """
    check.count(rank=rank, probes=probes)
    rank = min(rank, prior.rank)
    if not first or {*map(id, first)} & {*map(id, second)}:
        raise ValueError("first is empty or shares operators with second; give independent images")
    precision, basis = _diagonal(prior)
    builders, judges = ([_bounded(one, basis) for one in part] for part in (first, second))
    signs = generator.choice([-1.0, 1.0], (prior.rank, probes))
    sketch = generator.standard_normal((prior.rank, min(prior.rank, rank + 5)))
    inverse = _low_rank_inverse(builders, precision, rank, signs, sketch)
    gains = []
    for operator in judges:
        signs = generator.choice([-1.0, 1.0], (prior.rank, probes))
        probe = inverse.apply(signs)
        rest = signs - operator(probe) - precision[:, None] * probe
        gains.append(inverse.trace() + float((probe * rest).sum()) / probes)
    return _sampled("second", np.array([gains]), prior, confidence)


def _trace_floor(name: str, trace: float, information: float, prior: Prior, law: str) -> ErrorBound:
    if not trace >= 0:
        raise ValueError(f"fisher_trace is {trace!r}; give a number of at least 0")
    total = float(trace) + information
    return _bound(name, prior.rank**2 / total if total > 0 else np.inf, prior, law)


def _bound(name: str, total: float, prior: Prior, law: str) -> ErrorBound:
    """A bound on the total error, at least 0 and at most the prior's variance, over m."""
    value = max(0.0, min(float(total), prior.variance)) / prior.dimension
    known, assumptions = prior.rests_on_prior, ASSUMPTIONS + prior.assumptions
    return ErrorBound(name, value, prior.name, known, assumptions, law, prior.covers)


def _sampled(name: str, gains: Array, prior: Prior, confidence: float) -> ErrorBound:
    """The full bound from values (folds, n) of the variational bound, as a lower limit."""
    error, margin = _spread(name, gains, confidence)
    bound = _bound("full", float(gains.mean()) - margin, prior, VARIATIONAL)
    return _marked(bound, error / prior.dimension, confidence)


def _marked(bound: ErrorBound, error: float, confidence: float) -> ErrorBound:
    sentence = f"J_D is sampled: a {confidence:.4g} confidence limit that takes its mean as normal"
    return replace(bound, assumptions=(*bound.assumptions, sentence), standard_error=error)


def _spread(name: str, values: Array, confidence: float) -> tuple[float, float]:
    """Standard error of the mean of values (folds, n), as if folds err together, and its margin."""
    folds, number = values.shape
    if number < 2:
        raise ValueError(f"{name} holds {folds * number} samples; give at least {2 * folds}")
    if not 0.5 < confidence < 1:
        raise ValueError(f"confidence is {confidence!r}; give a number between 0.5 and 1")
    error = float(values.std(axis=1, ddof=1).mean()) / number**0.5
    return error, float(stats.t.ppf(confidence, folds * (number - 1))) * error


def _projected(name: str, fisher: Any, prior: Prior) -> Array:
    """A Fisher information in the prior's k coordinates."""
    if prior.basis is None or np.shape(fisher) == (prior.rank, prior.rank):
        return symmetric(name, fisher, prior.rank)
    return np.asarray(prior.basis.T @ symmetric(name, fisher, prior.dimension) @ prior.basis)


def _choose(samples: Array, known: Array) -> Array:
    """V near (J_P + E J)^-1: shrinkage and scale, tr V / tr V J V, that do best between halves."""
    halves = samples[::2].mean(0), samples[1::2].mean(0)
    best, answer = 0.0, np.zeros_like(known)
    for shrinkage in _SHRINKAGES:
        gain = loss = 0.0
        for fit, test in (halves, halves[::-1]):
            choice = _shrunk_inverse(fit, known, shrinkage)
            gain += float(np.trace(choice))
            loss += float(((choice @ choice) * (known + test)).sum())
        if loss > 0 and gain**2 / loss > best:
            best = gain**2 / loss
            answer = gain / loss * _shrunk_inverse(samples.mean(0), known, shrinkage)
    return answer


def _shrunk_inverse(fisher: Array, known: Array, shrinkage: float) -> Array:
    """The inverse of J_P + J with J drawn towards its mean eigenvalue; 0 where there is none."""
    mean = np.trace(fisher) / len(fisher) * np.eye(len(fisher))
    try:
        factor = linalg.cho_factor(known + (1 - shrinkage) * fisher + shrinkage * mean)
    except linalg.LinAlgError:
        return np.zeros_like(known)
    return np.asarray(linalg.cho_solve(factor, np.eye(len(fisher))))


@dataclass(frozen=True, eq=False)
class _LowRank:
    """V = scale (diag(base) - W G W^T), with base (k,), W (k, r), G (r, r)."""

    base: Array
    wings: Array
    core: Array
    scale: float = 1.0

    def apply(self, block: Array) -> Array:
        low = self.wings @ (self.core @ (self.wings.T @ block))
        return np.asarray(self.scale * (self.base[:, None] * block - low))

    def trace(self) -> float:
        return self.scale * float(self.base.sum() - (self.wings @ self.core * self.wings).sum())


def _diagonal(prior: Prior) -> tuple[Array, Array | None]:
    """J_P as a diagonal, and the basis in which it is one."""
    if prior.information.ndim == 1:
        return prior.information, prior.basis
    values, vectors = np.linalg.eigh(prior.information)
    return values, vectors if prior.basis is None else prior.basis @ vectors


def _bounded(operator: Operator, basis: Array | None) -> Operator:
    """The operator in the coordinates of the basis, its answers checked."""

    def apply(block: Array) -> Array:
        given = block if basis is None else basis @ block
        answer = real("an operator's product", operator(given), 2)
        if answer.shape != given.shape:
            raise ValueError(f"an operator maps {given.shape} to {answer.shape}; keep the shape")
        return answer if basis is None else basis.T @ answer

    return apply


def _mean_product(operators: Sequence[Operator], block: Array) -> Array:
    return np.asarray(sum(operator(block) for operator in operators) / len(operators))


def _low_rank_inverse(
    operators: list[Operator], precision: Array, rank: int, signs: Array, sketch: Array
) -> _LowRank:
    """V near (J_P + E J)^-1: a Rayleigh-Ritz model of J, shrunk and scaled on other images."""
    size, probes = signs.shape
    fit, test = (operators[::2], operators[1::2]) if len(operators) > 1 else (operators, operators)
    image = _mean_product(fit, signs)
    weights = (precision + max(float((signs * image).mean()), 0.0))[:, None]
    best, answer = 0.0, _LowRank(np.zeros(size), np.zeros((size, 1)), np.zeros((1, 1)))
    if weights.min() <= 0:
        return answer
    sketch = _mean_product(fit, sketch / np.sqrt(weights))
    frame = np.linalg.qr(_mean_product(fit, sketch / weights))[0]
    moved = _mean_product(fit, frame)
    values, vectors = np.linalg.eigh((frame.T @ moved + moved.T @ frame) / 2)
    turn = vectors[:, -rank:]
    values, frame, moved = np.maximum(values[-rank:], 0), frame @ turn, moved @ turn
    outside, seen = signs - frame @ (frame.T @ signs), moved @ (frame.T @ signs)
    rest = max(float((outside * (image - seen)).sum()) / probes / max(size - rank, 1), 0.0)
    mean = (float(values.sum()) + rest * (size - rank)) / size
    products = _mean_product(test, signs) + precision[:, None] * signs
    for shrinkage in _SHRINKAGES:
        level = precision + (1 - shrinkage) * rest + shrinkage * mean
        if level.min() <= 0:
            continue
        wings = frame / level[:, None]
        change = np.diag((1 - shrinkage) * (values - rest))
        core = change @ np.linalg.inv(np.eye(rank) + frame.T @ wings @ change)
        choice = _LowRank(1 / level, wings, (core + core.T) / 2)
        once, gain = choice.apply(signs), choice.trace()
        loss = gain + float((choice.apply(once) * products - signs * once).sum()) / probes
        if loss > 0 and gain > 0 and gain**2 / loss > best:
            best, answer = gain**2 / loss, replace(choice, scale=gain / loss)
    return answer
