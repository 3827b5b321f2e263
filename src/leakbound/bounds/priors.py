"""Priors: what the attacker knows of the images before the release, with Fisher information.

A bound needs a prior's Fisher information J_P, its total variance and the coordinates of both. If
the prior has a `basis` Q (m, k), the bound covers Q^T x, and the attacker gets the rest for free.
The error in a subspace is at most the whole error, so the bound errs downwards. Q^T x must be
independent of the rest, as principal components of a Gaussian are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy import linalg

from leakbound import check

Array = NDArray[Any]  # of float64

SMOOTH = "the prior's density is smooth and vanishes at the boundary of its support"
LIMIT = (
    "no prior knowledge: proven for unbiased attackers; for all others only in the limit of images "
    "spread far wider than the noise"
)
_ROUNDING = 1e-10
CONSTANT = 1e-9
"""Directions with a smaller share of the largest variance are given to the attacker."""


@dataclass(frozen=True, eq=False)
class Prior:
    """The common form of all priors; use one of the named ones.

    Attributes:
        name: display name, such as "N(mean, 0.0952 I)".
        dimension: m, the number of inputs to reconstruct.
        information: J_P, (k, k), or its diagonal (k,) if all else is 0; 1 / input units squared.
        variance: tr Cov of the k coordinates, input units squared.
        basis: (m, k) orthonormal columns with k < m; None for the inputs themselves (k = m).
        rests_on_prior: False for the flat prior, which is a limit.
        covers: the attackers for which a bound with this prior is proven.
        assumptions: conditions on the images, as sentences to check.
    """

    name: str
    dimension: int
    information: Array
    variance: float
    basis: Array | None = None
    rests_on_prior: bool = True
    covers: str = "all"
    assumptions: tuple[str, ...] = (SMOOTH,)

    @property
    def rank(self) -> int:
        """k, the number of coordinates in which the bound is computed."""
        return len(self.information)

    @property
    def matrix(self) -> Array:
        """J_P as a full matrix (k, k)."""
        return self.information if self.information.ndim == 2 else np.diag(self.information)

    def repeat(self, batch: int) -> Prior:
        """The prior of `batch` independent images, one after the other, in blocks."""
        check.count(batch=batch)
        return joined([self] * batch, f"{batch} independent images of {self.name}")


def joined(parts: Sequence[Prior], name: str) -> Prior:
    """The joint prior of independent images, one after the other, in blocks."""
    if not parts:
        raise ValueError("parts is empty; give the prior of each image")
    alone = all(part.information.ndim == 1 for part in parts)
    bases = [np.eye(part.dimension) if part.basis is None else part.basis for part in parts]
    independent = ("the images of a batch are independent",) if len(parts) > 1 else ()
    return Prior(
        name=name,
        dimension=sum(part.dimension for part in parts),
        information=np.concatenate([part.information for part in parts])
        if alone
        else linalg.block_diag(*(part.matrix for part in parts)),
        variance=sum(part.variance for part in parts),
        basis=None if all(p.basis is None for p in parts) else linalg.block_diag(*bases),
        rests_on_prior=any(part.rests_on_prior for part in parts),
        covers=parts[0].covers,
        assumptions=(*parts[0].assumptions, *independent),
    )


class FlatPrior(Prior):
    """Only a total variance is known: J_P = 0, and bounds are capped at the variance.

    A uniform prior on a bounded set is *not* smooth: for U[0, 1] and noise of standard deviation 1
    the formula gives 1, above the prior's variance 1/12. The best attacker's error, 0.077, is below
    even the capped 0.083. So bounds with this prior cover unbiased attackers only.

    Args:
        dimension: m.
        variance: tr Cov(x) over all m inputs, input units squared.

    Source: paper A, after Theorem 3.2.
    """

    def __init__(self, dimension: int, variance: float) -> None:
        check.count(dimension=dimension)
        check.positive(variance=variance)
        name = "flat (limit of wide priors)"
        nothing = np.zeros(dimension)
        super().__init__(
            name, dimension, nothing, float(variance), None, False, "unbiased", (LIMIT,)
        )


class GaussianPrior(Prior):
    """N(mean, covariance), in the span of the directions that vary.

    A singular covariance is allowed: directions whose variance is at most 1e-9 times the largest
    (constant border pixels) are given to the attacker.

    Args:
        mean: (m,), input units.
        covariance: (m, m), or its diagonal (m,); input units squared.
        components: number of leading directions to keep; None keeps all that vary.

    Raises:
        ValueError: a wrong shape, NaN, not symmetric, a negative eigenvalue, or no variance at all.

    Source: paper A, Theorem 3.2 (J_P = I / s^2 for N(mean, s^2 I)).

    Example:
        >>> prior = GaussianPrior([0, 0, 0], [4.0, 0.0, 1.0])
        >>> prior.rank, prior.information.tolist(), prior.variance
        (2, [0.25, 1.0], 5.0)
    """

    mean: Array

    def __init__(
        self,
        mean: Any,
        covariance: Any,
        components: int | None = None,
    ) -> None:
        center = real("mean", mean, 1)
        m = len(center)
        values, vectors = _principal(covariance, m)
        keep = int((values > CONSTANT * values[0]).sum())
        if components is not None:
            check.count(components=components)
            keep = min(keep, components)
        kept = values[:keep]
        information = 1 / kept
        if keep == m:
            array = np.asarray(covariance, dtype=np.float64)
            # Without a basis, the information must be in the order of the inputs.
            information = 1 / array if array.ndim == 1 else (vectors / values) @ vectors.T
        same = np.ptp(kept) <= 1e-12 * kept[0]
        spread = f"{kept[0]:.4g} I" if same else "covariance"
        super().__init__(
            name=f"N(mean, {spread})" + (f" in {keep} of {m} directions" if keep < m else ""),
            dimension=m,
            information=information,
            variance=float(kept.sum()),
            basis=vectors[:, :keep] if keep < m else None,
        )
        object.__setattr__(self, "mean", center)

    @classmethod
    def isotropic(cls, mean: Any, variance: float) -> GaussianPrior:
        """N(mean, variance I): the variance of each input, not the total."""
        check.positive(variance=variance)
        center = real("mean", mean, 1)
        return cls(center, np.full(len(center), variance))

    @classmethod
    def from_samples(
        cls,
        samples: Any,
        components: int | None = None,
    ) -> GaussianPrior:
        """The Gaussian with the mean and covariance of public images (n, m), never private ones.

        With n <= m the span has at most n - 1 directions; the rest is given to the attacker.
        """
        data = real("samples", samples, 2)
        if len(data) < 2:
            raise ValueError(f"samples holds {len(data)} image; give at least two")
        covariance = np.cov(data, rowvar=False).reshape(data.shape[1], data.shape[1])
        return cls(data.mean(0), covariance, components)

    def draw(self, number: int, generator: np.random.Generator) -> Array:
        """Images (number, m) to average J_F over; the rest stays at its mean."""
        noise: Array = generator.standard_normal((number, self.rank))
        if self.information.ndim == 2:
            noise = noise @ np.linalg.inv(np.linalg.cholesky(self.information))
        else:
            noise = noise / np.sqrt(self.information)
        return cast(Array, self.mean + (noise if self.basis is None else noise @ self.basis.T))


def real(
    name: str,
    value: Any,
    dimensions: int,
) -> Array:
    """The value as a finite float64 array with this number of dimensions, not empty."""
    try:
        array = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is no array of numbers; give float64 numbers") from None
    if array.ndim != dimensions or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}; give {dimensions} dimensions, not empty")
    bad = int((~np.isfinite(array)).sum())
    if bad:
        raise ValueError(f"{name} holds {bad} entries that are NaN or infinite; check their source")
    return array


def symmetric(
    name: str,
    value: Any,
    size: int,
) -> Array:
    """The value as a symmetric matrix (size, size), without rounding errors."""
    matrix = real(name, value, 2)
    if matrix.shape != (size, size):
        raise ValueError(f"{name} has shape {matrix.shape}; give ({size}, {size})")
    if np.abs(matrix - matrix.T).max() > 1e-8 * np.abs(matrix).max():
        raise ValueError(f"{name} is not symmetric; give (A + A^T) / 2 if rounding did this")
    return (matrix + matrix.T) / 2


def _principal(
    matrix: Any,
    size: int,
    name: str = "covariance",
) -> tuple[Array, Array]:
    """Eigenvalues, largest first, and eigenvectors of a positive semidefinite matrix, not 0."""
    if np.ndim(matrix) == 1:
        diagonal = real(name, matrix, 1)
        if len(diagonal) != size:
            raise ValueError(f"{name} has shape {diagonal.shape}; give ({size},)")
        order = np.argsort(-diagonal, kind="stable")
        values = diagonal[order]
        vectors = np.eye(size)[:, order]
    else:
        values, vectors = np.linalg.eigh(symmetric(name, matrix, size))
        values = values[::-1]
        vectors = vectors[:, ::-1]
    if values[-1] < -_ROUNDING * np.abs(values).max():
        raise ValueError(f"{name} has the eigenvalue {values[-1]:.4g}; it must not be negative")
    if values[0] <= 0:
        raise ValueError(f"{name} is zero; give one with some variance")
    return values, vectors
