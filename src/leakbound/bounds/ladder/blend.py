"""The middle rungs of the prior ladder: Gaussian images, and mixtures of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from leakbound.bounds.ladder.rung import PURE_NOISE, Estimate, counted, edges, pictures
from leakbound.bounds.law import Array, Scope, least_where, one, positive, single, whole

NORMS = 33
"""Norms that the attack weighs for each part, over REACH standard deviations of |X|^2."""
REACH = 3.5
ROUNDING = 1e-9
"""Of the sums behind the blind success, relative: added, as that has to be an upper bound."""
FLOOR = 1e-12
"""The least variance of any direction, relative to the largest: keeps sums finite."""


@dataclass(frozen=True, eq=False)
class Part:
    """A Gaussian with k leading directions and one variance for the rest.

    Attributes:
        mean: (N,).
        basis: (N, k), orthonormal columns.
        variances: (k,), input units squared.
        rest: the variance in each of the other N - k directions.
    """

    mean: Array
    basis: Array
    variances: Array
    rest: float

    @classmethod
    def from_samples(cls, rows: Array, components: int) -> Part:
        """Moments of rows (n, N): principal components, and the mean variance of the rest."""
        mean, (n, dim) = rows.mean(0), rows.shape
        _, values, directions = np.linalg.svd(rows - mean, full_matrices=False)
        spectrum = values**2 / n
        k = min(components, dim, len(spectrum))
        rest = float(spectrum[k:].sum() / (dim - k)) if dim > k else 0.0
        least = max(FLOOR * float(spectrum[0]), 1e-200)
        return cls(mean, directions[:k].T, np.maximum(spectrum[:k], least), max(rest, least))

    @property
    def spectrum(self) -> Array:
        """All N variances."""
        return np.append(self.variances, np.full(self._others, self.rest))

    @property
    def norms(self) -> Array:
        """(NORMS,) norms that a record of it may have."""
        projected = self.mean @ self.basis
        level = self.mean @ self.mean + self.spectrum.sum()
        off = self.mean @ self.mean - projected @ projected
        across = self.variances @ projected**2 + self.rest * off
        spread = np.sqrt(2 * (self.spectrum**2).sum() + 4 * across)
        low = np.sqrt(max(level - REACH * spread, level / 100))
        return np.linspace(low, np.sqrt(level + REACH * spread), NORMS)

    @property
    def _others(self) -> int:
        return len(self.mean) - len(self.variances)

    def sample(self, count: int, generator: np.random.Generator) -> Array:
        """Draws (count, N)."""
        normal = generator.standard_normal((count, len(self.mean)))
        root = np.sqrt(self.rest)
        longer = (normal @ self.basis) * (np.sqrt(self.variances) - root)
        return np.asarray(self.mean + root * normal + longer @ self.basis.T)

    def posterior(self, answers: Array, noise: float) -> tuple[Array, Array, Array]:
        """Log likelihood (n,), mean (n, N) and total variance (n,) given answers, over `norms`.

        At norm r, r y = X + noise r xi is Gaussian; r itself has a flat prior over `norms`, and
        its likelihood the factor r^N of the change of scale.
        """
        r = self.norms[:, None]
        added = (noise * r) ** 2
        inside, middle = answers @ self.basis, self.mean @ self.basis
        off = r[None] * inside[:, None] - middle  # (n, norms, k)
        whole_square = (answers**2).sum(1)[:, None] * r.T**2 + self.mean @ self.mean
        whole_square = whole_square - 2 * r.T * (answers @ self.mean)[:, None]
        beyond = np.maximum(0.0, whole_square - (off**2).sum(2))
        wide, rest = self.variances + added, self.rest + added[:, 0]
        log = -(off**2 / wide).sum(2) - np.log(wide).sum(1) - beyond / rest
        log = log / 2 - self._others * np.log(rest) / 2 + len(self.mean) * np.log(r.T)
        weight = special.softmax(log, 1)
        kept = (weight[..., None] * (off * (self.variances / wide))).sum(1)
        gain = self.rest / rest
        across, steady = (weight * gain * r.T).sum(1)[:, None], (weight * gain).sum(1)[:, None]
        orthogonal = across * answers - steady * self.mean
        mean = self.mean + orthogonal + (kept - orthogonal @ self.basis) @ self.basis.T
        left = (self.variances * added / wide).sum(1) + self._others * gain * added[:, 0]
        return special.logsumexp(log, 1), mean, weight @ left

    def log_ball(self, square: Array) -> Array:
        """Chernoff bound on log P(|X - z|^2 <= square), any z: min over t of log E exp(t (s - Q)).

        The density is symmetric and unimodal about the mean, so by Anderson's inequality no ball
        holds more than the one at the mean; there Q = |X - mean|^2 is a sum of variance * chi^2_1,
        and every t >= 0 gives a bound, so rounding of the best one costs no validity.

        Shapes: (n,).
        """
        spectrum = self.spectrum
        far = np.full(square.shape, 600.0)

        def past(x: Array) -> Array:  # where the derivative in t has become positive
            shrunk = spectrum / (1 + 2 * np.exp(x)[:, None] * spectrum)
            return np.asarray(shrunk.sum(1) <= square)

        t = np.exp(least_where(past, -far, far))
        with np.errstate(over="ignore"):
            found = t * square - np.log1p(2 * t[:, None] * spectrum).sum(1) / 2
        return np.where(square >= spectrum.sum(), 0.0, np.minimum(0.0, found))


class Mixture:
    """A mixture of Gaussian images: `from_samples` fits one part to each class or cluster.

    Args:
        parts: the Gaussians.
        weights: (parts,), up to a factor.

    Raises:
        ValueError: no part, weights that are 0 or below or of another number.

    Source: this project; Anderson 1955 for the blind success.
    """

    said = "images from a mixture of {} Gaussians"

    def __init__(self, parts: list[Part], weights: ArrayLike) -> None:
        w = positive("weights", weights)
        if not parts or w.shape != (len(parts),):
            raise ValueError(f"weights has shape {w.shape}; give one for each of {len(parts)}")
        self.parts, self.weights = tuple(parts), w / w.sum()

    @classmethod
    def from_samples(
        cls,
        images: ArrayLike,
        labels: ArrayLike | None = None,
        *,
        components: int,
        clusters: int = 10,
        seed: int = 0,
    ) -> Self:
        """One Gaussian for each label, or for each cluster that k-means finds.

        Shapes: `images` (n, ...), `labels` (n,).

        Args:
            images: samples of the prior, public data.
            labels: their classes; without them, scikit-learn's k-means groups the images.
            components: leading directions of each part; the rest share one variance.
            clusters: number of groups where there are no labels.
            seed: of k-means.

        Raises:
            ValueError: a class of fewer than 2 images, or images that are all equal.
        """
        rows, k = pictures(images), int(single("components", whole("components", components)))
        groups = _clusters(rows, clusters, seed) if labels is None else np.asarray(labels)
        if groups.shape != (len(rows),):
            raise ValueError(f"labels has shape {groups.shape}; give one for each of {len(rows)}")
        names, counts = np.unique(groups, return_counts=True)
        if counts.min() < 2:
            raise ValueError(f"class {names[counts.argmin()]} has 1 image; give 2 or more of each")
        return cls([_fit(rows[groups == name], k) for name in names], counts)

    @property
    def informed(self) -> bool:
        """True: it is taken from data."""
        return True

    @property
    def name(self) -> str:
        """For people."""
        return f"mixture of {len(self.parts)} Gaussians"

    @property
    def dim(self) -> int:
        """N."""
        return len(self.parts[0].mean)

    @property
    def lower_scope(self) -> Scope:
        """What `success` covers."""
        return self._edges[0]

    @property
    def upper_scope(self) -> Scope:
        """What the edge from `log_kappa` covers."""
        return self._edges[1]

    @property
    def _edges(self) -> tuple[Scope, Scope]:
        prior = self.said.format(len(self.parts))
        attack = "the mean of the approximate posterior over norms, or of its likeliest part"
        return edges(prior, attack, "Chernoff's bound on the ball at each Gaussian's mean, summed")

    def sample(self, count: int, generator: np.random.Generator) -> Array:
        """Records (count, N) of the prior."""
        which = generator.choice(len(self.parts), count, p=self.weights)
        rows = np.empty((count, self.dim))
        for i, part in enumerate(self.parts):
            rows[which == i] = part.sample(int((which == i).sum()), generator)
        return rows

    def attack(self, answers: Array, noise_multiplier: float, *, eta: float) -> Array:
        """The posterior mean if its expected MSE is within eta, or else that of the likeliest part.

        Shapes: answers (n, N), guesses the same.
        """
        noise = min(noise_multiplier, PURE_NOISE)
        found = [part.posterior(answers, noise) for part in self.parts]
        log, means, left = (np.stack([f[i] for f in found], 1) for i in range(3))
        weight = special.softmax(log + np.log(self.weights), 1)
        middle = (weight[..., None] * means).sum(1)
        apart = ((means - middle[:, None]) ** 2).sum(2)
        error = (weight * (left + apart)).sum(1)
        likeliest = means[np.arange(len(means)), weight.argmax(1)]
        return np.asarray(np.where((error <= self.dim * eta)[:, None], middle, likeliest))

    def success(
        self, noise_multiplier: float, *, eta: float, draws: int, generator: np.random.Generator
    ) -> Estimate:
        """How often the attack comes within an MSE of eta of records of the prior.

        Raises:
            ValueError: eta of 0 or below, draws that are no whole number.
        """
        return counted(self, noise_multiplier, eta=eta, draws=draws, generator=generator)

    def log_kappa(self, eta: ArrayLike) -> Any:
        """Upper bound on the logarithm of the most mass within an MSE of eta of any point.

        The most of a sum is at most the sum of each part's most.

        Shapes: any.
        """
        levels = positive("eta", eta, infinite=True)
        square = self.dim * levels.ravel()
        each = np.stack([part.log_ball(square) for part in self.parts], 1)
        total = special.logsumexp(each, axis=1, b=self.weights)
        return one(np.asarray(np.minimum(0.0, total + ROUNDING).reshape(levels.shape)))


class GaussianImages(Mixture):
    """Images are Gaussian: one mean and one covariance.

    Example:
        >>> images = np.random.default_rng(0).normal(size=(500, 8)) + 1
        >>> rung = GaussianImages.from_samples(images, components=4)
        >>> round(float(np.exp(rung.log_kappa(0.1))), 3)
        0.004
    """

    said = "Gaussian images: a mean, leading directions, one variance for the rest"

    def __init__(self, part: Part) -> None:
        super().__init__([part], [1.0])

    @classmethod
    def from_samples(cls, images: ArrayLike, *, components: int) -> Self:  # type: ignore[override]
        """Mean and `components` leading directions of images (n, ...); the rest share a variance.

        Raises:
            ValueError: fewer than 2 images, or images that are all equal.
        """
        rows = pictures(images)
        return cls(_fit(rows, int(single("components", whole("components", components)))))

    @property
    def name(self) -> str:
        """For people."""
        return "Gaussian images"


def _fit(rows: Array, components: int) -> Part:
    if len(rows) < 2 or not np.ptp(rows, axis=0).any():
        raise ValueError(f"images: these {len(rows)} have no variance; give different ones")
    return Part.from_samples(rows, components)


def _clusters(rows: Array, clusters: int, seed: int) -> Array:
    from sklearn.cluster import KMeans

    count = int(single("clusters", whole("clusters", clusters)))
    if count > len(rows):
        raise ValueError(f"clusters is {count}; give at most the number of images, {len(rows)}")
    return np.asarray(KMeans(count, n_init=3, random_state=seed).fit_predict(rows))
