"""What the attacker knows of the images before the release: priors with their Fisher information.

A bound needs a prior's Fisher information J_P, its total variance and the coordinates of both.
Where it has a `basis` Q (m, k), Q^T x is rebuilt and all else is handed to the attacker for free:
the error in a subspace is at most the whole, so the bound errs downwards. Q^T x must not depend on
what is handed over, as principal components of a Gaussian do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import linalg

from leakbound import check

Array = NDArray[Any]  # of float64

SMOOTH = "the prior's density is smooth and vanishes at the boundary of its support"
LIMIT = (
    "no prior knowledge: proved for unbiased attackers; for all others only in the limit of images "
    "spread far wider than the noise"
)
_ROUNDING = 1e-10


@dataclass(frozen=True, eq=False)
class Prior:
    """The common form of all priors; make one of the named ones.

    Attributes:
        name: for people, such as "N(mean, 0.0952 I)".
        dimension: m, the number of inputs that are rebuilt.
        information: J_P, (k, k), or its diagonal (k,) where all else is 0; 1 / input units squared.
        variance: tr Cov of the k coordinates, input units squared.
        basis: (m, k) orthonormal columns with k < m; None for the inputs themselves (k = m).
        rests_on_prior: False for the flat one, which is a limit.
        covers: the attackers for which a bound with this prior is proved.
        assumptions: what has to hold of the images, as sentences to check.
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
        """The prior of `batch` independent images, one after the other: all in blocks.

        Example:
            >>> GaussianPrior.isotropic(np.zeros(3), 2.0).repeat(4).variance
            24.0
        """
        check.count(batch=batch)
        return joined([self] * batch, f"{batch} independent images of {self.name}")


def joined(parts: Sequence[Prior], name: str) -> Prior:
    """The prior of independent images, one after the other, each with its own: all in blocks.

    Example:
        >>> two = [GaussianPrior.isotropic(np.zeros(3), level) for level in (1.0, 2.0)]
        >>> joined(two, "two classes").information.tolist()
        [1.0, 1.0, 1.0, 0.5, 0.5, 0.5]
    """
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
    """No knowledge but a total variance: J_P = 0, and bounds are capped at the variance.

    A uniform prior on a bounded set is *not* smooth: for U[0, 1] and noise of standard deviation 1
    the formula gives 1, above the prior's variance 1/12. The cap mends the absurdity, not the
    proof: the best attacker's error is 0.077 there, below the capped 0.083. So bounds with this
    prior cover unbiased attackers only.

    Args:
        dimension: m.
        variance: tr Cov(x) over all m inputs, input units squared.

    Raises:
        ValueError: a dimension under 1, a variance that is not a finite number above 0.

    Source: paper A, after Theorem 3.2.

    Example:
        >>> FlatPrior(1, 1 / 12).covers
        'unbiased'
    """

    def __init__(self, dimension: int, variance: float) -> None:
        check.count(dimension=dimension)
        check.positive(variance=variance)
        name, nothing = "flat (limit of wide priors)", np.zeros(dimension)
        super().__init__(
            name, dimension, nothing, float(variance), None, False, "unbiased", (LIMIT,)
        )


class GaussianPrior(Prior):
    """N(mean, covariance), in the span of the directions that vary.

    A singular covariance is fine: directions whose variance is at most `tolerance` times the
    largest (constant border pixels) are handed to the attacker.

    Args:
        mean: (m,), input units.
        covariance: (m, m), or its diagonal (m,); input units squared.
        components: keep at most so many leading directions; None keeps all that vary.
        tolerance: the smallest variance that is kept, relative to the largest.

    Raises:
        ValueError: a wrong shape, NaN, not symmetric, a negative eigenvalue, no variance at all.

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
        tolerance: float = 1e-9,
    ) -> None:
        center = real("mean", mean, 1)
        m = len(center)
        values, vectors = _principal(covariance, m)
        if not 0 <= tolerance < 1:
            raise ValueError(f"tolerance is {tolerance!r}; give a number of at least 0, below 1")
        keep = int((values > tolerance * values[0]).sum())
        if components is not None:
            check.count(components=components)
            keep = min(keep, components)
        kept = values[:keep]
        information = 1 / kept
        if keep == m:
            given = np.asarray(covariance, dtype=np.float64)
            information = 1 / given if given.ndim == 1 else (vectors / values) @ vectors.T
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
        """N(mean, variance I): the variance of each input, not the total.

        Example:
            >>> GaussianPrior.isotropic(np.zeros(2), 0.0952).name
            'N(mean, 0.0952 I)'
        """
        check.positive(variance=variance)
        center = real("mean", mean, 1)
        return cls(center, np.full(len(center), variance))

    @classmethod
    def from_samples(
        cls, samples: Any, components: int | None = None, tolerance: float = 1e-9
    ) -> GaussianPrior:
        """The Gaussian of the mean and covariance of public images (n, m), never private ones.

        With n <= m the span has at most n - 1 directions; the rest is handed to the attacker.

        Raises:
            ValueError: fewer than two images, NaN, or images that are all the same.
        """
        data = real("samples", samples, 2)
        if len(data) < 2:
            raise ValueError(f"samples holds {len(data)} image; give at least two")
        covariance = np.cov(data, rowvar=False).reshape(data.shape[1], data.shape[1])
        return cls(data.mean(0), covariance, components, tolerance)

    def draw(self, number: int, generator: np.random.Generator) -> Array:
        """Images (number, m) to average J_F over; what is handed over stays at its mean."""
        noise: Array = generator.standard_normal((number, self.rank))
        if self.information.ndim == 2:
            noise = noise @ np.linalg.inv(np.linalg.cholesky(self.information))
        else:
            noise = noise / np.sqrt(self.information)
        images: Array = self.mean + (noise if self.basis is None else noise @ self.basis.T)
        return images


class MixturePrior(Prior):
    """A mixture of Gaussians, with a certified bound on its Fisher information.

    Fisher information is convex in the density, so J_P <= sum_k w_k C_k^-1; this upper bound is
    what `information` holds, and a larger J_P only lowers a bound. `monte_carlo` estimates J_P.

    Args:
        weights: (K,), above 0, sum 1.
        means: (K, m), input units.
        covariances: (K, m, m), positive definite, input units squared.

    Raises:
        ValueError: a wrong shape, NaN, weights that are no weights, a singular covariance.

    Source: paper A, eq. (1); Cohen, "The Fisher information and convexity", 1968.

    Example:
        >>> prior = MixturePrior([0.5, 0.5], [[-1.0], [1.0]], [[[1.0]], [[0.5]]])
        >>> prior.information.tolist(), prior.variance
        ([[1.5]], 1.75)
    """

    weights: Array
    means: Array
    covariances: Array

    def __init__(self, weights: Any, means: Any, covariances: Any) -> None:
        shares, centers = real("weights", weights, 1), real("means", means, 2)
        spreads = real("covariances", covariances, 3)
        number, m = centers.shape
        if shares.shape != (number,) or spreads.shape != (number, m, m):
            raise ValueError(
                f"weights {shares.shape}, means {centers.shape} and covariances {spreads.shape} do "
                "not fit; give (K,), (K, m) and (K, m, m)"
            )
        if shares.min() <= 0 or abs(shares.sum() - 1) > 1e-9:
            raise ValueError(f"weights is {shares.tolist()}; give numbers above 0 with sum 1")
        for spread in spreads:
            values, _ = _principal(spread, m, "covariances")
            if values[-1] <= _ROUNDING * values[0]:
                raise ValueError("covariances holds a singular one; add a little to its diagonal")
        between = ((centers - shares @ centers) ** 2).sum(1)
        super().__init__(
            name=f"mixture of {number} Gaussians",
            dimension=m,
            information=np.einsum("k,kij->ij", shares, np.linalg.inv(spreads)),
            variance=float(shares @ (np.trace(spreads, axis1=1, axis2=2) + between)),
        )
        for name, value in (("weights", shares), ("means", centers), ("covariances", spreads)):
            object.__setattr__(self, name, value)

    def draw(self, number: int, generator: np.random.Generator) -> Array:
        """Images (number, m) of this prior, to average J_F over."""
        which = generator.choice(len(self.weights), size=number, p=self.weights)
        noise = generator.standard_normal((number, self.dimension, 1))
        roots: Array = np.linalg.cholesky(self.covariances)
        images: Array = self.means[which] + (roots[which] @ noise)[:, :, 0]
        return images

    def score(self, images: Any) -> Array:
        """Gradient of the log density at images (n, m); (n, m), 1 / input units."""
        points = real("images", images, 2)
        offsets = points[:, None] - self.means
        pulls = np.einsum("kij,nkj->nki", np.linalg.inv(self.covariances), offsets)
        logs = np.log(self.weights) - 0.5 * np.linalg.slogdet(self.covariances)[1]
        logs = logs - 0.5 * (offsets * pulls).sum(2)
        shares = np.exp(logs - logs.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        slopes: Array = -np.einsum("nk,nki->ni", shares, pulls)
        return slopes

    def monte_carlo(self, draws: int, generator: np.random.Generator) -> UserPrior:
        """The same prior with J_P = E[score score^T] estimated from draws of it.

        Tighter than convexity where the Gaussians overlap, but an estimate: it is scaled up by the
        largest relative difference of its two halves, so that it errs upwards.

        Raises:
            ValueError: fewer than ten draws a dimension.
        """
        if draws < 10 * self.dimension:
            raise ValueError(f"draws is {draws}; give at least {10 * self.dimension}")
        scores = self.score(self.draw(draws, generator))
        halves = [part.T @ part / len(part) for part in np.array_split(scores, 2)]
        estimate = scores.T @ scores / draws
        root = np.linalg.inv(np.linalg.cholesky(estimate))
        gap = np.linalg.eigvalsh(root @ (halves[0] - halves[1]) @ root.T)
        least = float(np.trace(np.linalg.inv(estimate))) / self.variance
        scale = max(1 + float(np.abs(gap).max()), least)
        sampled = (
            f"the prior's information is an estimate from {draws} draws, enlarged by its spread"
        )
        assumptions = (SMOOTH, sampled)
        return UserPrior(self.name, scale * estimate, self.variance, assumptions=assumptions)


class UserPrior(Prior):
    """A prior of which only the Fisher information and the variance are known.

    Args:
        name: for people.
        information: J_P or any upper bound on it, (k, k) or its diagonal (k,).
        variance: tr Cov of the k coordinates, input units squared.
        basis: (m, k) orthonormal columns, k < m; None where k = m.
        assumptions: what has to hold of the images.

    Raises:
        ValueError: a wrong shape, NaN, not positive definite, or a variance below tr J_P^-1, which
            no prior has.

    Example:
        >>> UserPrior("mine", [4.0, 4.0], 0.5).rank
        2
        >>> UserPrior("mine", [4.0, 4.0], 0.1)
        Traceback (most recent call last):
        ...
        ValueError: variance is 0.1, but information allows no prior below 0.5; mend either
    """

    def __init__(
        self,
        name: str,
        information: Any,
        variance: float,
        basis: Any = None,
        assumptions: tuple[str, ...] = (SMOOTH,),
    ) -> None:
        given = np.asarray(information)
        info = real("information", information, 1 if given.ndim == 1 else 2)
        values, _ = _principal(info, len(info), "information")
        if values[-1] <= 0:
            raise ValueError("information is singular; use FlatPrior where nothing is known")
        least = float((1 / values).sum())
        check.positive(variance=variance)
        if variance < least * (1 - 1e-9):
            allowed = f"information allows no prior below {least:.6g}; mend either"
            raise ValueError(f"variance is {variance:.6g}, but {allowed}")
        k, columns = len(info), None if basis is None else real("basis", basis, 2)
        if columns is not None:
            fits = columns.shape[1] == k < columns.shape[0]
            if not fits or np.abs(columns.T @ columns - np.eye(k)).max() > 1e-8:
                raise ValueError(
                    f"basis {columns.shape} is wrong; give {k} < m orthonormal columns"
                )
        size = k if columns is None else len(columns)
        super().__init__(name, size, info, float(variance), columns, assumptions=assumptions)


def real(name: str, value: Any, dimensions: int) -> Array:
    """The value as a finite float64 array of so many dimensions, not empty."""
    try:
        array = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is no array of numbers; give float64 numbers") from None
    if array.ndim != dimensions or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}; give {dimensions} dimensions, not empty")
    bad = int((~np.isfinite(array)).sum())
    if bad:
        raise ValueError(f"{name} holds {bad} entries that are NaN or infinite; check where from")
    return array


def symmetric(name: str, value: Any, size: int) -> Array:
    """The value as a symmetric matrix (size, size), rounding taken out."""
    matrix = real(name, value, 2)
    if matrix.shape != (size, size):
        raise ValueError(f"{name} has shape {matrix.shape}; give ({size}, {size})")
    if np.abs(matrix - matrix.T).max() > 1e-8 * np.abs(matrix).max():
        raise ValueError(f"{name} is not symmetric; give (A + A^T) / 2 if rounding did this")
    return (matrix + matrix.T) / 2


def _principal(matrix: Any, size: int, name: str = "covariance") -> tuple[Array, Array]:
    """Eigenvalues, largest first, and eigenvectors of a positive semidefinite matrix, not 0."""
    if np.ndim(matrix) == 1:
        diagonal = real(name, matrix, 1)
        if len(diagonal) != size:
            raise ValueError(f"{name} has shape {diagonal.shape}; give ({size},)")
        order = np.argsort(-diagonal, kind="stable")
        values, vectors = diagonal[order], np.eye(size)[:, order]
    else:
        values, vectors = np.linalg.eigh(symmetric(name, matrix, size))
        values, vectors = values[::-1], vectors[:, ::-1]
    if values[-1] < -_ROUNDING * np.abs(values).max():
        raise ValueError(f"{name} has the eigenvalue {values[-1]:.4g}; it must not be negative")
    if values[0] <= 0:
        raise ValueError(f"{name} is zero; give one with some variance")
    return values, vectors
