"""Statements of paper C in their corrected form that no other part of leakbound needs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from leakbound import check

Array = NDArray[Any]  # of float64


def rows_needed(clip_norm: ArrayLike, *, norm: ArrayLike) -> Any:
    """The smallest number M of rows of the linear trap with the least noise: ceil((C / |X|)^2).

    Source: paper C, Theorem IV.1, corrected (docs/errata.md, 3.1: the ratio is squared).
    """
    return np.ceil((np.asarray(clip_norm, float) / np.asarray(norm, float)) ** 2)


def separation(mixing: ArrayLike) -> Array:
    """The factor rho (B,) of unbiased separation of B examples that M rows mix by a known matrix.

    Row j of the linear trap sends sum_i mixing[i, j] X_i plus noise. Alone, example i is estimated
    with a variance of noise^2 / |a_i|^2; in a batch, with rho_i = |a_i|^2 [(A A^T)^-1]_ii times
    that. An attacker with a prior can do better.

    Shapes: (B, M) with M >= B and independent rows.

    Raises:
        ValueError: rows that depend on each other, or fewer columns than rows.

    Source: docs/errata.md, "batches"; least squares.
    """
    try:
        a = np.asarray(mixing, float)
    except ValueError:
        raise ValueError(f"mixing is {mixing!r}; give a matrix of numbers") from None
    if a.ndim != 2 or 0 in a.shape or not np.isfinite(a).all():
        raise ValueError(f"mixing has shape {a.shape}; give a finite matrix (examples, rows)")
    triangle = np.linalg.qr(a.T)[1]
    if a.shape[0] > a.shape[1] or np.linalg.matrix_rank(a) < a.shape[0]:
        raise ValueError(
            f"mixing of shape {a.shape} does not separate the examples; give at least as many "
            "independent rows of the linear trap as examples"
        )
    inverse = np.linalg.inv(triangle)  # (A A^T)^-1 = inverse inverse^T
    return np.asarray(np.maximum(1.0, (a**2).sum(1) * (inverse**2).sum(1)))


def auc(noise_multiplier: ArrayLike, *, dim: int, cosine: float = 0.0) -> Any:
    """How well updates that hold the same example are distinguished from those that do not: AUC.

    Phi((1 - cosine) / (noise sqrt(2 (2 + noise^2 N)))), the area under the curve of the inner
    product of two noisy unit vectors. For one example its mean is 1, for two examples of equal norm
    whose directions have the given cosine it is that cosine; its variance is noise^2
    (2 + noise^2 N) for equal ones. One attack: it does not say that no other statistic leaks more.

    Source: docs/errata.md, "matching"; normal approximation of the inner product's distribution.
    """
    sigma = np.asarray(noise_multiplier, float)
    if not (sigma >= 0).all():
        raise ValueError(f"noise_multiplier is {noise_multiplier!r}; give numbers of at least 0")
    check.count(dim=dim)
    if not isinstance(cosine, int | float) or not -1 <= cosine <= 1:
        raise ValueError(f"cosine is {cosine!r}; give a number from -1 to 1")
    if cosine == 1:
        return np.full(sigma.shape, 0.5)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        z = (1 - cosine) / (sigma * np.sqrt(2 * (2 + sigma**2 * dim)))
    return special.ndtr(np.nan_to_num(z, nan=0.0, posinf=np.inf))
