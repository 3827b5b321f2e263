"""Priors of examples: the prior-only success for what an attacker may know.

Each `Baseline` is one distribution of examples. Its `log_kappa` bounds the prior-only success from
above, which gives the upper bound on every attacker: `corridor(..., prior=prior)`. Examples are
drawn from the prior, and the attacker knows no more about them than the prior says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from leakbound import check
from leakbound.bounds.distances import Distance, SquaredError
from leakbound.bounds.law import Array, between, non_negative, one, positive, single, whole
from leakbound.bounds.roots import least_where

__all__ = [
    "Baseline",
    "EmpiricallyBoundedPrior",
    "Gallery",
    "GaussianImages",
    "KINDS",
    "MIN_EXAMPLES",
    "Mixture",
    "from_images",
    "densest_match_rate",
    "largest_match_rates",
]

KINDS = ("mixture", "gaussian", "gallery")
"""Kinds of priors that `from_images` takes from images."""
MIN_EXAMPLES = 64
"""Minimum number of examples for a prior."""
CHUNK = 256
"""Number of images compared with all others at a time; limits the memory."""
ROUNDING = 1e-9
"""Relative rounding of the sums behind the prior-only success; added, to keep an upper bound."""
LEAST_VARIANCE = 1e-12
"""Smallest variance of a direction, relative to the largest; keeps sums finite."""
SLACK = 1e-9
"""Rounding of squared distances, relative to the squared norms, and of sums."""
MOST = 5000
TOGETHER = 512
"""Number of images that are compared with each other, and how many at once."""
STARTS = 16
SHIFTS = 4
WIDER = (1.0, 1.5, 2.5)
"""Of a mean-shift climb: images it starts at, its last steps, and radii in units of eta."""
MADE = 2
"""Images that a mean of images matches because it is made of them; they do not count."""
ROUNDED = 1e-14


Basis = Literal["sample", "known parts", "examples", "fitted model"]


class Baseline(ABC):
    """What is known of examples: an upper bound on how often one candidate matches without update.

    Attributes:
        name: display name.
        dim: N.
        basis: what the bound rests on. "sample": public examples and no model of the data. "known
            parts": the same, for an attacker who has parts of the example.
            "examples": these very examples. "fitted model": a model fitted to data. None: it
            knows nothing about the data, and bounds no attacker who does.
        distance: which candidates match.
    """

    name: str
    dim: int
    basis: Basis | None = "fitted model"
    distance: Distance = SquaredError()

    @abstractmethod
    def log_kappa(self, eta: ArrayLike) -> Any:
        """Upper bound on the logarithm of the largest mass within an MSE of eta of any point."""


def flat_images(images: ArrayLike) -> Array:
    """Images of any shape as finite rows (n, N), in float64."""
    array = between("images", images, -np.inf, np.inf, closed=False)
    if array.ndim < 2 or 0 in array.shape:
        raise ValueError(f"images has shape {array.shape}; give (images, values)")
    return array.reshape(len(array), -1)


@dataclass(frozen=True, eq=False)
class GaussianPart:
    """A Gaussian with k leading directions, and one variance in each of the other N - k.

    `mean` (N,), `basis` (N, k) orthonormal, `variances` (k,).
    """

    mean: Array
    basis: Array
    variances: Array
    rest: float

    @classmethod
    def from_samples(cls, rows: Array, components: int) -> GaussianPart:
        """Principal components of rows (n, N), and the mean variance of the rest."""
        if len(rows) < 2 or not np.ptp(rows, axis=0).any():
            raise ValueError(f"images: these {len(rows)} have no variance; give different ones")
        mean = rows.mean(0)
        (n, dim) = rows.shape
        _, values, directions = np.linalg.svd(rows - mean, full_matrices=False)
        spectrum = values**2 / n
        k = min(components, dim, len(spectrum))
        rest = float(spectrum[k:].sum() / (dim - k)) if dim > k else 0.0
        least = max(LEAST_VARIANCE * float(spectrum[0]), 1e-200)
        return cls(mean, directions[:k].T, np.maximum(spectrum[:k], least), max(rest, least))

    @property
    def spectrum(self) -> Array:
        """All N variances."""
        others = len(self.mean) - len(self.variances)
        return np.append(self.variances, np.full(others, self.rest))

    def log_ball(self, square: Array) -> Array:
        """Chernoff bound on log P(|X - z|^2 <= square), any z: min over t of log E exp(t (s - Q)).

        By Anderson's inequality no ball holds more than the one at the mean. There Q = |X - mean|^2
        is a sum of variance * chi^2_1, and every t >= 0 gives a bound, whatever its rounding.
        """
        spectrum = self.spectrum
        far = np.full(square.shape, 600.0)  # exp of both ends is a float

        def past(x: Array) -> Array:  # where the derivative in t has become positive
            shrunk = spectrum / (1 + 2 * np.exp(x)[:, None] * spectrum)
            return shrunk.sum(1) <= square

        t = np.exp(least_where(past, -far, far))
        with np.errstate(over="ignore"):
            bound = t * square - np.log1p(2 * t[:, None] * spectrum).sum(1) / 2
        return np.where(square >= spectrum.sum(), 0.0, np.minimum(0.0, bound))


class Mixture(Baseline):
    """A mixture of Gaussian images: `from_samples` fits one part to each class or cluster.

    Args:
        parts: the Gaussians.
        weights: (parts,), up to a factor.

    Raises:
        ValueError: there is no part, a weight is 0 or less, or the number of weights differs.

    Source: this project; Anderson 1955 for the prior-only success.
    """

    def __init__(
        self,
        parts: Sequence[GaussianPart],
        weights: ArrayLike,
    ) -> None:
        w = positive("weights", weights)
        if not parts or w.shape != (len(parts),):
            raise ValueError(f"weights has shape {w.shape}; give one for each of {len(parts)}")
        self.parts = tuple(parts)
        self.weights = w / w.sum()
        self.dim = len(parts[0].mean)
        self.name = f"mixture of {len(parts)} Gaussians"

    @classmethod
    def from_samples(
        cls,
        images: ArrayLike,
        labels: ArrayLike | None = None,
        *,
        components: int,
        clusters: int = 10,
    ) -> Self:
        """One Gaussian for each label, or for each cluster from k-means.

        Args:
            images: (n, ...) samples of the prior, public data.
            labels: (n,) their classes; without them, scikit-learn's k-means groups the images.
            components: number of leading directions of each part; the rest share one variance.
            clusters: number of groups without labels.
        """
        rows = flat_images(images)
        k = int(single(whole, components=components))
        groups = _clusters(rows, clusters) if labels is None else np.asarray(labels)
        if groups.shape != (len(rows),):
            raise ValueError(f"labels has shape {groups.shape}; give one for each of {len(rows)}")
        names, counts = np.unique(groups, return_counts=True)
        if counts.min() < 2:
            raise ValueError(f"class {names[counts.argmin()]} has 1 image; give 2 or more of each")
        return cls([GaussianPart.from_samples(rows[groups == name], k) for name in names], counts)

    def log_kappa(self, eta: ArrayLike) -> Any:
        """As in `Baseline`: the largest mass of a sum is at most the sum over the parts."""
        levels = positive("eta", eta, infinite=True)
        square = self.dim * levels.ravel()
        each = np.stack([part.log_ball(square) for part in self.parts], 1)
        total = special.logsumexp(each, axis=1, b=self.weights)
        return one(np.asarray(np.minimum(0.0, total + ROUNDING).reshape(levels.shape)))


class GaussianImages(Mixture):
    """Gaussian images: one mean and one covariance."""

    def __init__(self, part: GaussianPart) -> None:
        super().__init__([part], [1.0])
        self.name = "Gaussian images"

    @classmethod
    def from_samples(  # type: ignore[override]
        cls,
        images: ArrayLike,
        *,
        components: int,
    ) -> Self:
        """Mean and `components` leading directions of images; the rest share a variance."""
        k = int(single(whole, components=components))
        return cls(GaussianPart.from_samples(flat_images(images), k))


def _clusters(rows: Array, clusters: int) -> Array:
    from sklearn.cluster import KMeans

    count = int(single(whole, clusters=clusters))
    if count > len(rows):
        raise ValueError(f"clusters is {count}; give at most the number of images, {len(rows)}")
    return KMeans(count, n_init=3, random_state=0).fit_predict(rows)


class Gallery(Baseline):
    """The example is one of the images, with known weights.

    Args:
        images: (n, ...) the candidates, input units.
        weights: (n,) probability of each candidate, up to a factor; equal by default.

    Example:
        >>> prior = Gallery(np.eye(4))
        >>> round(float(np.exp(prior.log_kappa(0.1))), 3)
        0.25
    """

    def __init__(
        self,
        images: ArrayLike,
        weights: ArrayLike | None = None,
    ) -> None:
        rows = flat_images(images)
        w = np.ones(len(rows)) if weights is None else non_negative("weights", weights)
        if w.shape != (len(rows),) or not 0 < w.sum() < np.inf:
            raise ValueError(
                f"weights has shape {w.shape} and sum {w.sum():g}; give a finite one for each of "
                f"{len(rows)} images, not all 0"
            )
        rows = rows[w > 0]
        w = w[w > 0]
        norms = np.linalg.norm(rows, axis=1)
        if np.any(norms == 0):
            raise ValueError("images holds one of norm 0, which has no direction; leave it out")
        self.images = rows
        self.weights = w / w.sum()
        self.name = f"gallery of {len(rows)} images"
        self.dim = int(rows.shape[1])
        self._squares = norms**2

    def log_kappa(self, eta: ArrayLike) -> Any:
        """As in `Baseline`: a ball with an example in it lies in the double ball around it."""
        levels = positive("eta", eta, infinite=True)
        reach = 4 * self.dim * np.atleast_1d(levels).ravel()
        most = np.zeros(levels.size)
        for start in range(0, len(self.images), CHUNK):
            part = slice(start, start + CHUNK)
            total = self._squares[part, None] + self._squares  # distances, low by their rounding
            far = total * (1 - SLACK) - 2 * self.images[part] @ self.images.T
            for i, radius in enumerate(reach):
                most[i] = max(most[i], ((far <= radius) @ self.weights).max())
        return one(np.log(np.minimum(1.0, most * (1 + SLACK))).reshape(levels.shape))


class EmpiricallyBoundedPrior(Baseline):
    """A prior with at least the prior-only success that a candidate made of the given images has.

    A model fitted to images can treat near duplicates as far rarer than they are. An attacker who
    submits one such image, or the mean of several, would then beat the upper bound without the
    update. The candidate is the best that a climb finds (`densest_match_rate`).

    Args:
        prior: the model.
        groups: images (n, ...) of each group that the attacker can distinguish without the update,
            such as the classes if labels are known; each has its size as its weight.

    Example:
        >>> groups = [[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]
        >>> seen = EmpiricallyBoundedPrior(Gallery(np.eye(2)), groups)
        >>> round(float(np.exp(seen.log_kappa(1e-3))), 3)
        0.5
    """

    def __init__(self, prior: Baseline, groups: Sequence[ArrayLike]) -> None:
        self.prior = prior
        self.groups = [flat_images(images) for images in groups]
        self.name = f"{prior.name}, no rarer than seen"
        self.dim = prior.dim

    def log_kappa(self, eta: ArrayLike) -> Any:
        """The larger logarithm of the model's bound and of the share of images that match."""
        levels = positive("eta", eta, infinite=True)
        total = sum(len(group) for group in self.groups)
        share = [
            sum(len(g) / total * densest_match_rate(g, float(level)) for g in self.groups)
            for level in levels.ravel()
        ]
        with np.errstate(divide="ignore"):
            logs = np.maximum(np.asarray(self.prior.log_kappa(levels)).ravel(), np.log(share))
        return one(np.minimum(0.0, logs).reshape(levels.shape))


def from_images(
    images: ArrayLike,
    kind: str = "mixture",
    *,
    components: int = 32,
) -> EmpiricallyBoundedPrior:
    """A prior from public images, with at least the prior-only success of the best of them.

    Args:
        images: (n, ...) public ones, of the same kind as the private ones.
        kind: "mixture" (Gaussians), "gaussian" (one of them) or "gallery" (the images themselves).
        components: number of leading directions of the Gaussians.

    Raises:
        ValueError: an unknown kind, fewer than 64 images, or images that are all equal.

    Example:
        >>> public = np.random.default_rng(0).random((100, 4))
        >>> from_images(public, "gaussian", components=2).name
        'Gaussian images, no rarer than seen'
    """
    check.one_of(KINDS, kind=kind)
    flat = flat_images(images)
    if len(flat) < MIN_EXAMPLES:
        raise ValueError(f"images holds {len(flat)} examples; give at least {MIN_EXAMPLES}")
    if kind == "gallery":
        return EmpiricallyBoundedPrior(Gallery(flat), [flat])
    fit = GaussianImages if kind == "gaussian" else Mixture
    return EmpiricallyBoundedPrior(fit.from_samples(flat, components=components), [flat])


def largest_match_rates(images: ArrayLike, levels: Sequence[float]) -> list[float]:
    """The largest share of the other images within an MSE of each level of one; at most 5,000 are
    used, and distances are computed once.
    """
    few = _thinned(images)
    if len(few) < 2:
        return [0.0 for _ in levels]
    most = _matching(few, few, *levels).max(1)
    return [(int(count) - 1) / (len(few) - 1) for count in most]


def densest_match_rate(images: ArrayLike, eta: float) -> float:
    """The largest share of images within an MSE of eta of a candidate; at most 5,000 are used.

    Candidates are the images and means of images; those that a candidate is made of do not count.
    A mean-shift climb starts at the mean of all and at those with the most images near.

    Example:
        >>> circle = np.linspace(0, 2 * np.pi, 100, endpoint=False)
        >>> rows = np.stack([np.cos(circle), np.sin(circle)], axis=1)
        >>> round(largest_match_rates(rows, [0.5])[0], 2), round(densest_match_rate(rows, 0.5), 2)
        (0.32, 0.99)
    """
    few = _thinned(images)
    if len(few) < 2:
        return 0.0
    near = _matching(few, few, *(k * eta for k in WIDER[:2]))
    best = int(near[0].max()) - 1
    starts = np.unique([counts.argsort()[-STARTS:] for counts in near])
    candidates = np.vstack([few[starts], few.mean(0)])
    squares = np.square(few).mean(1)
    for width in WIDER[::-1] + (WIDER[0],) * SHIFTS:
        apart = _apart(candidates, few, squares)
        inside = (apart <= width * eta + ROUNDED).astype(float)
        count = inside.sum(1, keepdims=True)
        candidates = np.where(count > 0, inside @ few / np.maximum(count, 1), candidates)
        best = max(best, int(_matching(candidates, few, eta)[0].max()) - MADE)
    return min(1.0, best / (len(few) - 1))


def _thinned(images: ArrayLike) -> Array:
    flat = flat_images(images)
    return flat[:: -(-len(flat) // MOST)]


def _apart(
    candidates: Array,
    rows: Array,
    squares: Array,
) -> Array:
    mean = np.square(candidates).mean(1)[:, None]
    return mean + squares - 2 * candidates @ rows.T / rows.shape[1]


def _matching(
    candidates: Array,
    rows: Array,
    *levels: float,
) -> Array:
    """(levels, candidates) how many rows are within an MSE of each level of each candidate.

    Distances are computed once for all levels.
    """
    squares = np.square(rows).mean(1)
    counts = []
    for at in range(0, len(candidates), TOGETHER):
        apart = _apart(candidates[at : at + TOGETHER], rows, squares)
        counts.append([(apart <= level + ROUNDED).sum(1) for level in levels])
    return np.concatenate(counts, axis=1)
