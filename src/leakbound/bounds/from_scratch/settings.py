"""From a real setting to the laws' noise multiplier, and what several sightings add."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from leakbound import check
from leakbound.bounds.cone import log_cone
from leakbound.bounds.from_scratch.laws import Exact, Unbiased, exact
from leakbound.bounds.law import Array, between, groups, non_negative, one, positive, rate, whole

Participation = Literal["visible", "hidden"]
TRIES, ZOOMS = 64, 4
"""Radii that `unknown_scale` tries at a time, and how often it looks closer around the best."""
DUST = 1e-17
"""Mass of numbers of sightings that is left out of a sum, towards less risk."""


def rows_needed(clip_norm: ArrayLike, *, norm: ArrayLike) -> Any:
    """The least number M of trap rows that reaches the floor on the noise: ceil((C / |X|)^2).

    Source: paper C, Theorem IV.1, corrected (docs/errata.md, 3.1: the ratio is squared).

    Example:
        >>> rows_needed(5.0, norm=1.0)
        25.0
    """
    return one(np.ceil((positive("clip_norm", clip_norm) / positive("norm", norm)) ** 2))


def effective_noise(
    noise_multiplier: ArrayLike,
    *,
    clip_norm: ArrayLike,
    norm: ArrayLike,
    rows: ArrayLike = 1,
    rest_norm: ArrayLike = 0.0,
    rho: ArrayLike = 1.0,
) -> Any:
    """The noise multiplier that the laws take, in a setting with few rows, a norm sink or a batch.

    The trap's M rows hold X each; clipping to C scales all of (rows, rest). What is left is
    noise * sqrt(rho max(C^2, M |X|^2 + rest^2) / (M |X|^2)), at least `noise_multiplier`.

    Shapes: all broadcast.

    Args:
        noise_multiplier: noise standard deviation / C.
        clip_norm: C.
        norm: |X| as the trap's layer sees it.
        rows: M.
        rest_norm: gradient norm of all other parameters before clipping (a norm sink); a trainable
            bias in the trap's layer makes it sqrt(M).
        rho: factor of the variance by which other records of the batch are removed; `separation`.

    Source: paper C, Theorem IV.1; docs/errata.md, C2 and C5.

    Example:
        >>> effective_noise(0.1, clip_norm=5.0, norm=1.0, rows=25)
        0.1
        >>> effective_noise(0.1, clip_norm=5.0, norm=1.0, rows=1)
        0.5
    """
    sigma, rows = non_negative("noise_multiplier", noise_multiplier), whole("rows", rows)
    c, r = positive("clip_norm", clip_norm), positive("norm", norm)
    rest, rho = non_negative("rest_norm", rest_norm), positive("rho", rho)
    if np.any(rho < 1):
        raise ValueError(f"rho is {float(np.min(rho)):g}; separating records never gains: give 1")
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        root = np.sqrt(rows)
        grown = sigma * np.sqrt(rho) * np.maximum(c / r / root, np.hypot(1.0, rest / r / root))
    return one(np.where(sigma == 0, 0.0, grown))


def separation(mixing: ArrayLike) -> Any:
    """The factor rho (B,) of unbiased separation of B records that M rows mix by a known matrix.

    Row j of the trap sends sum_i mixing[i, j] X_i plus noise; alone, record i is read with a
    variance of noise^2 / |a_i|^2, in company with rho_i = |a_i|^2 [(A A^T)^-1]_ii times that.
    A prior on the records can do better.

    Shapes: (B, M) with M >= B and independent rows.

    Raises:
        ValueError: rows that depend on each other, or fewer columns than rows.

    Source: docs/errata.md, "batches"; least squares.

    Example:
        >>> separation([[1.0, 0.0], [0.0, 2.0]])
        array([1., 1.])
    """
    a = between("mixing", mixing, -np.inf, np.inf, closed=False)
    if a.ndim != 2 or 0 in a.shape:
        raise ValueError(f"mixing has shape {a.shape}; give a matrix (records, rows)")
    triangle = np.linalg.qr(a.T)[1]
    if a.shape[0] > a.shape[1] or np.linalg.matrix_rank(a) < a.shape[0]:
        raise ValueError(
            f"mixing of shape {a.shape} does not tell the records apart; give at least as many "
            "independent rows of the trap as records"
        )
    inverse = np.linalg.inv(triangle)  # (A A^T)^-1 = inverse inverse^T
    return np.maximum(1.0, (a**2).sum(1) * (inverse**2).sum(1))


def averaged(
    noise_multiplier: ArrayLike,
    *,
    dim: int,
    eta: ArrayLike,
    steps: ArrayLike,
    sampling_rate: ArrayLike = 1.0,
    norm: ArrayLike = 1.0,
    participation: Participation = "visible",
    law: Exact | Unbiased = exact,
) -> Any:
    """Probability of success after several steps that each sample the record at a rate.

    visible: the attacker knows the k ~ Binom(steps, rate) steps that hold the record and averages
    those, noise / sqrt(k). hidden: it adds up all steps, noise * sqrt(steps) / k. With `exact`, k =
    0 leaves a blind guess; the unbiased estimator has nothing to say then, and is told k, by which
    it divides. One record's gradient alone, others removed, so this is an attained lower edge. For
    fixed sightings k call the law with noise / sqrt(k).

    Shapes: all numbers broadcast; each pair of rate and steps is summed at once.

    Raises:
        ValueError: as the law; sampling_rate outside (0, 1], steps that are no whole number.

    Source: paper C, section IV-C, corrected; docs/errata.md, C4 and "gamma*".

    Example:
        >>> round(averaged(0.5, dim=16, eta=0.5 / 16, steps=10, sampling_rate=0.1), 4)
        0.0976
    """
    check.one_of(("visible", "hidden"), participation=participation)
    sigma, n, e, r, count, q = np.broadcast_arrays(
        non_negative("noise_multiplier", noise_multiplier),
        whole("dim", dim),
        positive("eta", eta, infinite=True),
        positive("norm", norm),
        whole("steps", steps),
        rate("sampling_rate", sampling_rate),
    )
    found = np.empty(sigma.shape)
    for here, (number, some) in groups(count, q):
        own = sigma[here], n[here], e[here], r[here]
        found[here] = _mean_over_sightings(int(number), some, participation, law, *own)
    return one(found)


def _mean_over_sightings(
    count: int,
    q: float,
    participation: Participation,
    law: Exact | Unbiased,
    sigma: Array,
    n: Array,
    e: Array,
    r: Array,
) -> Array:
    """The law at what k sightings leave of the noise, (n,), averaged over k."""
    k, mass = (v[:, None] for v in _sightings(count, q))
    with np.errstate(divide="ignore", invalid="ignore"):
        noise = sigma / np.sqrt(k) if participation == "visible" else sigma * (np.sqrt(count) / k)
    noise = np.where(k == 0, np.inf, noise)
    return np.asarray(np.minimum(1.0, (mass * law(noise, dim=n, eta=e, norm=r)).sum(0)))


def unknown_scale(
    noise_multiplier: ArrayLike,
    *,
    dim: ArrayLike,
    eta: ArrayLike,
    norms: ArrayLike,
    weights: ArrayLike | None = None,
) -> Any:
    """Success of the attacker who knows the distribution of |X| and not |X| itself.

    y = X / |X| + noise tells nothing of |X|: he guesses a y / |y| with the one radius a that
    succeeds most often over `norms`. It is attained, so a lower edge; the upper one, with |X| told,
    is the mean of `exact` over the norms.

    Shapes: `norms` and `weights` (n,); all others broadcast, each a search of its own.

    Raises:
        ValueError: weights that are negative or sum to 0, norms of 0.

    Source: docs/errata.md, "unknown scale".

    Example:
        >>> known = exact(0.1, dim=16, eta=0.01)
        >>> bool(unknown_scale(0.1, dim=16, eta=0.01, norms=[1.0]) <= known + 1e-12)
        True
    """
    r = np.atleast_1d(positive("norms", norms))
    w = np.ones(r.shape) if weights is None else np.asarray(non_negative("weights", weights))
    if w.shape != r.shape or w.sum() <= 0:
        raise ValueError(f"weights has shape {w.shape}; give one for each of {len(r)} norms")
    w, top = w / w.sum(), r.max()
    r = r / top
    sigma, n, e = np.broadcast_arrays(
        non_negative("noise_multiplier", noise_multiplier),
        whole("dim", dim),
        positive("eta", eta),
    )
    cases = zip(sigma.flat, n.flat, e.flat, strict=True)
    found = [_best_radius(float(a), float(b), b * float(c) / top / top, r, w) for a, b, c in cases]
    return one(np.reshape(np.array(found), sigma.shape))


def _best_radius(sigma: float, n: float, error: float, r: Array, w: Array) -> float:
    """The most success of any one radius, against norms r of weights w."""
    inverse = np.inf if sigma == 0 else 1 / sigma

    def success(radius: Array) -> Array:
        return np.asarray(np.exp(_log_hit(inverse, n, radius[:, None], r, error)) @ w)

    # each norm's own best radius, and a grid between them; then closer around the best of all
    own = np.sqrt(np.maximum(0.0, 1 - error / r**2)) * r
    tries = np.unique(np.concatenate([np.arange(1, TRIES + 1) / TRIES, own[own > 0]]))
    found = float((w * (r**2 <= error)).sum())
    for _ in range(ZOOMS):
        hits = success(tries)
        found, at = max(found, float(hits.max())), int(hits.argmax())
        edges = tries[max(0, at - 1)], tries[min(len(tries) - 1, at + 1)]
        tries = np.linspace(*edges, TRIES)
    return min(1.0, found)


def _log_hit(inverse: float, n: float, radius: Array, r: Array, error: float) -> Array:
    """Log P(|radius y / |y| - X|^2 <= error) for each |X| = r."""
    gap = (error - (radius - r) ** 2) / (2 * radius * r)  # 1 less the cosine that is needed
    found = np.where(gap >= 2, 0.0, -np.inf)
    near = (gap > 0) & (gap < 2)
    some = gap[near]
    found[near] = log_cone(inverse, (1 - some) / np.sqrt(some * (2 - some)), n)
    return found


def _sightings(steps: int, q: float) -> tuple[Array, Array]:
    """Numbers of sightings and their probabilities; what is left out is below 1e-17 in all."""
    if q == 1:
        return np.array([float(steps)]), np.array([1.0])
    law = stats.binom(steps, q)
    low, high = law.ppf(DUST), steps - stats.binom(steps, 1 - q).ppf(DUST)
    k = np.arange(max(0.0, low), min(steps, high) + 1)
    return k, law.pmf(k)
