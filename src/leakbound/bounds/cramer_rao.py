"""Bayesian Cramer-Rao (van Trees) bounds on the error of a reconstruction.

x in R^m is the batch to reconstruct (m = batch size * inputs), and y is the release. J_D = E_x
J_F(x) is its Fisher information averaged over the prior, and J_P the Fisher information of the
prior: E||R(y) - x||^2 >= tr (J_D + J_P)^-1. Paper A's trace form has d, the number of parameters,
where m is right (errata 0.1); its lambda_1 is the largest eigenvalue (0.2). Every bound is capped
at the prior's variance.

Only an exact J_D gives a bound. From sampled images J_D is an estimate: the mean of an unbounded
quantity has no upper confidence limit for all distributions (Bahadur and Savage 1956). So rare
images with much information may put the true bound far below any estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import linalg

from leakbound.bounds.priors import Array, Prior, real, symmetric

ASSUMPTIONS = (
    "it bounds the average over the prior and the release's noise, not one image and no tail",
    "images of a batch are compared in their true order; an error after pairing can be lower",
    "the Fisher information is that of all the attacker sees, averaged over this prior",
    "the release distribution is smooth in x; a covariance that depends on x adds information",
)
TRACE = "paper A, Theorem 3.2 with m for d: m^2 / (tr J_D + m lambda_max(J_P))"
TIGHT = "paper A, Theorem 3.2 with m for d, tighter: m^2 / (tr J_D + tr J_P)"
FULL = "paper A, section 2.2, trace of the bound: tr (J_D + J_P)^-1"
VARIATIONAL = FULL + " >= 2 tr V - tr V (J_D + J_P) V"
_SHRINKAGES = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0)


@dataclass(frozen=True, eq=False)
class ErrorBound:
    """A lower bound on the mean squared error of every covered attacker.

    Attributes:
        name: "trace", "tight_trace", "full" or "weiss_weinstein".
        value: lower bound on E||R(y) - x||^2 / m, capped at the prior's; input units squared.
        prior, rests_on_prior: the prior's name, and whether the value depends on it.
        assumptions: sentences to check.
        equation: paper and equation.
        covers: "all" attackers, or "unbiased" ones (the flat prior); "estimate" if J_D was
            sampled, which proves nothing.
        per_pixel: (m,) the same for each input, the leak map; None if only a total is known.
        standard_error: of an estimate over its samples; it misses what no sample shows.
        confidence: of the bound over the draws behind it; None for exact bounds and estimates.
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
    confidence: float | None = None


def trace_bound(fisher_trace: float, prior: Prior) -> ErrorBound:
    """The bound of Theorem 3.2, corrected: m^2 / (tr J_D + m lambda_max(J_P)), over m.

    Units: `fisher_trace` tr J_D over all inputs, 1 / input units squared; infinite without noise.
        With a prior in k of m directions, k replaces m in the formula; the result is divided by m.

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
        >>> from leakbound.bounds.priors import GaussianPrior
        >>> tight_trace_bound(3.0, GaussianPrior([0.0, 0.0], [0.25, 1.0])).value
        0.25
    """
    known = float(_diagonal(prior)[0].sum())
    return _trace_floor("tight_trace", fisher_trace, known, prior, TIGHT)


def trace_bound_from_samples(
    traces: Any,
    prior: Prior,
    *,
    tight: bool = True,
) -> ErrorBound:
    """An estimate of a trace bound from the mean of tr J_F(x) over sampled images; not a bound.

    Args:
        traces: (n,) of independent images of the prior, n >= 2, 1 / input units squared.
        prior: what the attacker knows.
        tight: `tight_trace_bound`, else `trace_bound`.
    """
    values = real("traces", traces, 1)
    if len(values) < 2:
        raise ValueError("traces holds 1 sample; give at least 2")
    if values.min() < 0:
        raise ValueError(f"traces holds {values.min():.6g}; give values of at least 0")
    bound = (tight_trace_bound if tight else trace_bound)(float(values.mean()), prior)
    # The derivative of the bound in tr J_D, for the delta method.
    slope = (bound.value * prior.dimension / prior.rank) ** 2 / prior.dimension
    return _estimated(bound, slope * _standard_error(values[None]), len(values))


def full_bound(fisher: Any, prior: Prior) -> ErrorBound:
    """The van Trees bound tr (J_D + J_P)^-1 / m, with its leak map.

    Shapes: `fisher` J_D (m, m), or (k, k) in the prior's basis; 1 / input units squared.

    Assumptions: `fisher` is J_D; for an average of samples use `full_bound_from_samples`. In a
        linear-Gaussian model the bound equals the best attacker's error. Rounding errs downwards.

    Raises:
        ValueError: a wrong shape, NaN, not symmetric, or a negative eigenvalue.

    Source: paper A, section 2.2; van Trees, "Detection, Estimation, and Modulation Theory", 1968.

    Example:
        >>> from leakbound.bounds.priors import GaussianPrior
        >>> bound = full_bound([[1.0, 0.0], [0.0, 3.0]], GaussianPrior.isotropic([0, 0], 1.0))
        >>> round(bound.value, 9), bound.per_pixel.round(9).tolist()
        (0.375, [0.5, 0.25])
    """
    matrix = _projected("fisher", fisher, prior)
    known = bool(prior.information.any())
    root = np.linalg.inv(np.linalg.cholesky(prior.matrix)) if known else np.eye(prior.rank)
    values, vectors = np.linalg.eigh(root @ matrix @ root.T)
    if values[0] < -1e-8 * np.abs(values).max():
        raise ValueError(f"fisher has the eigenvalue {values[0]:.4g}; give one without any below 0")
    # Eigenvalues are raised by their rounding, which can only lower the bound.
    slack = prior.rank * np.finfo(np.float64).eps * np.abs(values).max()
    with np.errstate(divide="ignore"):
        errors = 1 / (float(known) + np.maximum(values, 0) + slack)
    directions = root.T @ vectors
    total = float((directions**2 @ errors).sum()) if np.isfinite(errors).all() else np.inf
    bound = _bound("full", total, prior, FULL)
    # The bound was capped, and a leak map would sum to more than it.
    if total > prior.variance * (1 + 1e-9):
        return bound
    in_pixels = directions if prior.basis is None else prior.basis @ directions
    return replace(bound, per_pixel=in_pixels**2 @ errors)


def full_bound_from_samples(fishers: Any, prior: Prior) -> ErrorBound:
    """An estimate of the full bound from J_F(x) of sampled images; not a bound.

    The inverse of a sample mean is too large on average. Instead, tr J^-1 >= 2 tr V - tr V J V for
    every symmetric V, linear in J, with equality at V = J^-1. One half of the samples chooses V,
    the other evaluates it without bias; then the halves change places.

    Args:
        fishers: n >= 4, iterable, of independent images of the prior; each as in `full_bound`.
        prior: what the attacker knows.

    Source: paper A, section 2.2; variational form of tr J^-1 (convex conjugate).
    """
    samples = np.array([_projected("fishers", fisher, prior) for fisher in fishers])
    if len(samples) < 4:
        raise ValueError(f"fishers holds {len(samples)} samples; give at least 4")
    if np.diagonal(samples, axis1=1, axis2=2).min() < 0:
        raise ValueError("fishers holds a negative diagonal entry; give J^T Sigma^-1 J")
    halves = (samples[::2], samples[1::2])
    known = prior.matrix
    gains = []
    for fit, test in (halves, halves[::-1]):
        choice = _choose(fit, known)
        even = test[: len(samples) // 2] + known  # equal halves, as `gains` becomes one array
        gains.append(2 * np.trace(choice) - np.einsum("nij,ij->n", even, choice @ choice))
    bound = _bound("full", float(np.mean(gains)), prior, VARIATIONAL)
    return _estimated(bound, _standard_error(np.array(gains)) / prior.dimension, len(samples))


def _trace_floor(
    name: str,
    trace: float,
    information: float,
    prior: Prior,
    law: str,
) -> ErrorBound:
    if not trace >= 0:
        raise ValueError(f"fisher_trace is {trace!r}; give a number of at least 0")
    total = float(trace) + information
    return _bound(name, prior.rank**2 / total if total > 0 else np.inf, prior, law)


def _bound(
    name: str,
    total: float,
    prior: Prior,
    law: str,
) -> ErrorBound:
    """A bound on the total error, from 0 to the prior's variance, over m."""
    value = max(0.0, min(float(total), prior.variance)) / prior.dimension
    known = prior.rests_on_prior
    assumptions = ASSUMPTIONS + prior.assumptions
    return ErrorBound(name, value, prior.name, known, assumptions, law, prior.covers)


def _estimated(
    bound: ErrorBound,
    error: float,
    number: int,
) -> ErrorBound:
    sentence = (
        f"the Fisher information is a mean over {number} sampled examples: rare ones with much "
        "information may put the true bound far below"
    )
    assumptions = (sentence, *bound.assumptions)
    return replace(
        bound,
        covers="estimate",
        assumptions=assumptions,
        standard_error=error,
    )


def _standard_error(values: Array) -> float:
    """Standard error of the mean of values (folds, n), as if folds err together."""
    return float(values.std(axis=1, ddof=1).mean() / np.sqrt(values.shape[1]))


def _projected(
    name: str,
    fisher: Any,
    prior: Prior,
) -> Array:
    """A Fisher information in the prior's k coordinates."""
    if prior.basis is None or np.shape(fisher) == (prior.rank, prior.rank):
        return symmetric(name, fisher, prior.rank)
    return prior.basis.T @ symmetric(name, fisher, prior.dimension) @ prior.basis


def _choose(samples: Array, known: Array) -> Array:
    """V near (J_P + E J)^-1, with the shrinkage and scale, tr V / tr V J V, best between halves."""
    halves = samples[::2].mean(0), samples[1::2].mean(0)
    best = 0.0
    answer = np.zeros_like(known)
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


def _shrunk_inverse(
    fisher: Array,
    known: Array,
    shrinkage: float,
) -> Array:
    """The inverse of J_P + J with J shrunk to its mean eigenvalue; 0 if it has no inverse."""
    mean = np.trace(fisher) / len(fisher) * np.eye(len(fisher))
    try:
        factor = linalg.cho_factor(known + (1 - shrinkage) * fisher + shrinkage * mean)
    except linalg.LinAlgError:
        return np.zeros_like(known)
    return linalg.cho_solve(factor, np.eye(len(fisher)))


def _diagonal(prior: Prior) -> tuple[Array, Array | None]:
    """J_P as a diagonal, and the basis in which it is diagonal."""
    if prior.information.ndim == 1:
        return prior.information, prior.basis
    values, vectors = np.linalg.eigh(prior.information)
    return values, vectors if prior.basis is None else prior.basis @ vectors
