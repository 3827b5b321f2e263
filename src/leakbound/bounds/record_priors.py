"""Priors of examples: attained success and prior-only success for what an attacker may know.

The file is one concept: the priors, and what public images alone say about each.

Each `RecordPrior` is one distribution of examples. Its `success` is attained by the prior's
posterior attack on the linear trap's output y = X / |X| + noise_multiplier * xi. Its `log_kappa`
bounds the prior-only success from above, which gives the upper bound on every attacker:
`corridor(..., prior=prior)`. In both, examples are drawn from the prior, and the attacker knows no
more about their norm than the prior says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy import special, stats

from leakbound import check
from leakbound.bounds.distances import Distance, SquaredError
from leakbound.bounds.from_scratch import exact
from leakbound.bounds.identification import log_kappa_sphere
from leakbound.bounds.law import Array, between, non_negative, one, positive, single, whole
from leakbound.bounds.roots import least_where

__all__ = [
    "Baseline",
    "EmpiricallyBoundedPrior",
    "Gallery",
    "GaussianImages",
    "KINDS",
    "KnownNorm",
    "MIN_EXAMPLES",
    "Mixture",
    "RecordPrior",
    "SuccessEstimate",
    "from_images",
    "densest_match_rate",
    "largest_match_rate",
]

KINDS = ("mixture", "gaussian", "gallery")
"""Kinds of priors that `from_images` takes from images."""
MIN_EXAMPLES = 64
"""Minimum number of examples for a prior."""
CONFIDENCE = 0.95
CHUNK = 256
"""Number of examples drawn and attacked at a time; limits the memory."""
PURE_NOISE = 1e100
"""Replaces an infinite noise multiplier when an output is drawn."""
NORMS = 33
"""Norms that the attack weighs for each part, over REACH standard deviations of |X|^2."""
REACH = 3.5
ROUNDING = 1e-9
"""Relative rounding of the sums behind the prior-only success; added, to keep an upper bound."""
LEAST_VARIANCE = 1e-12
"""Smallest variance of a direction, relative to the largest; keeps sums finite."""
LIKELY = 4
"""Number of likely examples that a gallery's attack tries as candidates, besides the two means."""
SLACK = 1e-9
"""Rounding of squared distances, relative to the squared norms, and of sums."""
MOST, TOGETHER = 5000, 512
"""Number of images that are compared with each other, and how many at once."""
STARTS, SHIFTS, WIDER = 16, 4, (1.0, 1.5, 2.5)
"""Of a mean-shift climb: images it starts at, its last steps, and radii in units of eta."""
MADE = 2
"""Images that a mean of images matches because it is made of them; they do not count."""
ROUNDED = 1e-14


@dataclass(frozen=True)
class SuccessEstimate:
    """A probability from n draws, with its 95 % interval; n is 0 if it is computed exactly."""

    value: float
    low: float
    high: float
    n: int

    @classmethod
    def of_counts(cls, hits: int, n: int) -> SuccessEstimate:
        """The rate with the Clopper-Pearson interval for `hits` out of n."""
        tail = (1 - CONFIDENCE) / 2
        low = float(stats.beta.ppf(tail, hits, n - hits + 1)) if hits else 0.0
        high = float(stats.beta.isf(tail, hits + 1, n - hits)) if hits < n else 1.0
        return cls(hits / n, low, high, n)

    @classmethod
    def of_chances(cls, values: Array) -> SuccessEstimate:
        """The mean of chances (n,) in [0, 1], n >= 2, with the empirical Bernstein interval.

        Source: Maurer and Pontil 2009.
        """
        n, mean = len(values), float(values.mean())
        log = np.log(4 / (1 - CONFIDENCE))
        wide = float(np.sqrt(2 * values.var(ddof=1) * log / n) + 7 * log / (3 * (n - 1)))
        return cls(mean, max(0.0, mean - wide), min(1.0, mean + wide), n)


Basis = Literal["sample", "examples", "fitted model"]


class Baseline(ABC):
    """What is known of examples: an upper bound on how often one candidate matches without update.

    Attributes:
        name: display name.
        dim: N.
        basis: what the bound rests on. "sample": public examples and no model of the data.
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


class RecordPrior(Baseline):
    """A model of examples, with its attack and its prior-only success.

    `success` is attained by one attack on the linear trap's output; another may do better. The
    bound from `log_kappa` covers all attackers, on average over this prior. It does not cover one
    given example, or attackers who know more, such as a norm that varies under the prior.
    """

    @abstractmethod
    def sample(self, count: int, generator: np.random.Generator) -> Array:
        """Examples (count, N) of the prior."""

    @abstractmethod
    def attack(self, answers: Array, noise_multiplier: float, *, eta: float) -> Array:
        """Reconstructions (n, N) of the examples behind outputs (n, N)."""

    def success(
        self, noise_multiplier: float, *, eta: float, draws: int, generator: np.random.Generator
    ) -> SuccessEstimate:
        """How often the attack has an MSE of at most eta on examples of the prior, by counting."""
        noise, eta, draws = _setting(noise_multiplier, eta, draws)
        hits = 0
        for start in range(0, draws, CHUNK):
            examples = self.sample(min(CHUNK, draws - start), generator)
            guesses = self.attack(answer(examples, noise, generator), noise, eta=eta)
            hits += int((((guesses - examples) ** 2).mean(1) <= eta).sum())
        return SuccessEstimate.of_counts(hits, draws)


def answer(examples: Array, noise_multiplier: float, generator: np.random.Generator) -> Array:
    """The linear trap's output for examples (n, N): directions plus noise."""
    noise = min(noise_multiplier, PURE_NOISE) * generator.standard_normal(examples.shape)
    return np.asarray(examples / np.linalg.norm(examples, axis=1, keepdims=True) + noise)


def _setting(noise: float, eta: float, draws: int, least: int = 1) -> tuple[float, float, int]:
    """The checked arguments of `success`, all single numbers."""
    return (
        single("noise_multiplier", non_negative("noise_multiplier", noise)),
        single("eta", positive("eta", eta)),
        int(single("draws", whole("draws", draws, least))),
    )


def flat_images(images: ArrayLike) -> Array:
    """Images of any shape as finite rows (n, N), in float64."""
    array = between("images", images, -np.inf, np.inf, closed=False)
    if array.ndim < 2 or 0 in array.shape:
        raise ValueError(f"images has shape {array.shape}; give (images, values)")
    return array.reshape(len(array), -1)


@dataclass(frozen=True)
class KnownNorm(RecordPrior):
    """Only the norm is known; the direction is uniform on the sphere. Nothing is sampled.

    Args:
        dim: N.
        norm: |X|, input units.

    Source: docs/errata.md, "gamma*".

    Example:
        >>> round(KnownNorm(16).success(0.5, eta=0.5 / 16).value, 4)
        0.0683
    """

    dim: int
    norm: float = 1.0

    name = "known norm"
    basis = None  # a norm says nothing about what the data look like

    def __post_init__(self) -> None:
        single("dim", whole("dim", self.dim))
        single("norm", positive("norm", self.norm))

    def sample(self, count: int, generator: np.random.Generator) -> Array:
        drawn = generator.standard_normal((count, self.dim))
        return np.asarray(self.norm * drawn / np.linalg.norm(drawn, axis=1, keepdims=True))

    def attack(self, answers: Array, noise_multiplier: float, *, eta: float) -> Array:
        """The output's direction at the radius |X| cos(theta); sin^2 theta = N eta / |X|^2."""
        radius = np.sqrt(np.maximum(0.0, self.norm**2 - self.dim * eta))
        return np.asarray(radius * answers / np.linalg.norm(answers, axis=1, keepdims=True))

    def success(
        self,
        noise_multiplier: float,
        *,
        eta: float,
        draws: int = 0,
        generator: np.random.Generator | None = None,
    ) -> SuccessEstimate:
        value = float(exact(noise_multiplier, dim=self.dim, eta=eta, norm=self.norm))
        return SuccessEstimate(value, value, value, 0)

    def log_kappa(self, eta: ArrayLike) -> Any:
        """Exact: the share of the sphere in the largest cap within eta."""
        return one(np.asarray(log_kappa_sphere(dim=self.dim, eta=eta, norm=self.norm)))


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
        mean, (n, dim) = rows.mean(0), rows.shape
        _, values, directions = np.linalg.svd(rows - mean, full_matrices=False)
        spectrum = values**2 / n
        k = min(components, dim, len(spectrum))
        rest = float(spectrum[k:].sum() / (dim - k)) if dim > k else 0.0
        least = max(LEAST_VARIANCE * float(spectrum[0]), 1e-200)
        return cls(mean, directions[:k].T, np.maximum(spectrum[:k], least), max(rest, least))

    @property
    def spectrum(self) -> Array:
        """All N variances."""
        return np.append(self.variances, np.full(self._others, self.rest))

    @property
    def norms(self) -> Array:
        """(NORMS,) norms that an example of this part may have."""
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
        normal = generator.standard_normal((count, len(self.mean)))
        root = np.sqrt(self.rest)
        longer = (normal @ self.basis) * (np.sqrt(self.variances) - root)
        return np.asarray(self.mean + root * normal + longer @ self.basis.T)

    def posterior(self, answers: Array, noise: float) -> tuple[Array, Array, Array]:
        """Log likelihood (n,), mean (n, N) and total variance (n,) given outputs, over `norms`.

        At norm r, r y = X + noise r xi is Gaussian. r has a flat prior over `norms`, and its
        likelihood has the factor r^N from the change of scale.
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
        leading = (weight[..., None] * (off * (self.variances / wide))).sum(1)
        gain = self.rest / rest
        across, steady = (weight * gain * r.T).sum(1)[:, None], (weight * gain).sum(1)[:, None]
        orthogonal = across * answers - steady * self.mean
        mean = self.mean + orthogonal + (leading - orthogonal @ self.basis) @ self.basis.T
        left = (self.variances * added / wide).sum(1) + self._others * gain * added[:, 0]
        return special.logsumexp(log, 1), mean, weight @ left

    def log_ball(self, square: Array) -> Array:
        """Chernoff bound on log P(|X - z|^2 <= square), any z: min over t of log E exp(t (s - Q)).

        By Anderson's inequality no ball holds more than the one at the mean. There Q = |X - mean|^2
        is a sum of variance * chi^2_1, and every t >= 0 gives a bound, whatever its rounding.
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


class Mixture(RecordPrior):
    """A mixture of Gaussian images: `from_samples` fits one part to each class or cluster.

    Args:
        parts: the Gaussians.
        weights: (parts,), up to a factor.

    Raises:
        ValueError: there is no part, a weight is 0 or less, or the number of weights differs.

    Source: this project; Anderson 1955 for the prior-only success.
    """

    def __init__(self, parts: Sequence[GaussianPart], weights: ArrayLike) -> None:
        w = positive("weights", weights)
        if not parts or w.shape != (len(parts),):
            raise ValueError(f"weights has shape {w.shape}; give one for each of {len(parts)}")
        self.parts, self.weights = tuple(parts), w / w.sum()
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
        rows, k = flat_images(images), int(single("components", whole("components", components)))
        groups = _clusters(rows, clusters) if labels is None else np.asarray(labels)
        if groups.shape != (len(rows),):
            raise ValueError(f"labels has shape {groups.shape}; give one for each of {len(rows)}")
        names, counts = np.unique(groups, return_counts=True)
        if counts.min() < 2:
            raise ValueError(f"class {names[counts.argmin()]} has 1 image; give 2 or more of each")
        return cls([GaussianPart.from_samples(rows[groups == name], k) for name in names], counts)

    def sample(self, count: int, generator: np.random.Generator) -> Array:
        which = generator.choice(len(self.parts), count, p=self.weights)
        rows = np.empty((count, self.dim))
        for i, part in enumerate(self.parts):
            rows[which == i] = part.sample(int((which == i).sum()), generator)
        return rows

    def attack(self, answers: Array, noise_multiplier: float, *, eta: float) -> Array:
        """The posterior mean if its expected MSE is within eta, else that of the likeliest part."""
        noise = min(noise_multiplier, PURE_NOISE)
        found = [part.posterior(answers, noise) for part in self.parts]
        log, means, left = (np.stack([f[i] for f in found], 1) for i in range(3))
        weight = special.softmax(log + np.log(self.weights), 1)
        middle = (weight[..., None] * means).sum(1)
        apart = ((means - middle[:, None]) ** 2).sum(2)
        error = (weight * (left + apart)).sum(1)
        likeliest = means[np.arange(len(means)), weight.argmax(1)]
        return np.asarray(np.where((error <= self.dim * eta)[:, None], middle, likeliest))

    def log_kappa(self, eta: ArrayLike) -> Any:
        """As in `RecordPrior`: the largest mass of a sum is at most the sum over the parts."""
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
    def from_samples(cls, images: ArrayLike, *, components: int) -> Self:  # type: ignore[override]
        """Mean and `components` leading directions of images; the rest share a variance."""
        k = int(single("components", whole("components", components)))
        return cls(GaussianPart.from_samples(flat_images(images), k))


def _clusters(rows: Array, clusters: int) -> Array:
    from sklearn.cluster import KMeans

    count = int(single("clusters", whole("clusters", clusters)))
    if count > len(rows):
        raise ValueError(f"clusters is {count}; give at most the number of images, {len(rows)}")
    return np.asarray(KMeans(count, n_init=3, random_state=0).fit_predict(rows))


class Gallery(RecordPrior):
    """The example is one of the images, with known weights.

    Args:
        images: (n, ...) the candidates, input units.
        weights: (n,) probability of each candidate, up to a factor; equal by default.

    Example:
        >>> prior = Gallery(np.eye(4))
        >>> found = prior.success(0.2, eta=0.1, draws=200, generator=np.random.default_rng(0))
        >>> found.value > 0.99, round(float(np.exp(prior.log_kappa(0.1))), 3)
        (True, 0.25)
    """

    def __init__(self, images: ArrayLike, weights: ArrayLike | None = None) -> None:
        rows = flat_images(images)
        w = np.ones(len(rows)) if weights is None else non_negative("weights", weights)
        if w.shape != (len(rows),) or not 0 < w.sum() < np.inf:
            raise ValueError(
                f"weights has shape {w.shape} and sum {w.sum():g}; give a finite one for each of "
                f"{len(rows)} images, not all 0"
            )
        rows, w = rows[w > 0], w[w > 0]
        norms = np.linalg.norm(rows, axis=1)
        if np.any(norms == 0):
            raise ValueError("images holds one of norm 0, which has no direction; leave it out")
        self.images, self.weights = rows, w / w.sum()
        self.name, self.dim = f"gallery of {len(rows)} images", int(rows.shape[1])
        self._mean = self.weights @ rows
        self._directions, self._squares = rows / norms[:, None], norms**2

    def sample(self, count: int, generator: np.random.Generator) -> Array:
        return np.asarray(self.images[generator.choice(len(self.images), count, p=self.weights)])

    def attack(self, answers: Array, noise_multiplier: float, *, eta: float) -> Array:
        """The candidate, out of several, whose ball holds the most posterior mass."""
        return self._best(answers, noise_multiplier, eta)[0]

    def success(
        self, noise_multiplier: float, *, eta: float, draws: int, generator: np.random.Generator
    ) -> SuccessEstimate:
        """Mean posterior mass within eta of the candidate; its expectation is the success."""
        noise, eta, draws = _setting(noise_multiplier, eta, draws, 2)
        found = []
        for start in range(0, draws, CHUNK):
            examples = self.sample(min(CHUNK, draws - start), generator)
            found.append(self._best(answer(examples, noise, generator), noise, eta)[1])
        return SuccessEstimate.of_chances(np.concatenate(found))

    def log_kappa(self, eta: ArrayLike) -> Any:
        """As in `RecordPrior`: a ball with an example in it lies in the double ball around it."""
        levels = positive("eta", eta, infinite=True)
        reach, most = 4 * self.dim * np.atleast_1d(levels).ravel(), np.zeros(levels.size)
        for start in range(0, len(self.images), CHUNK):
            part = slice(start, start + CHUNK)
            far = self._distances(self.images[part], self._squares[part])
            for i, radius in enumerate(reach):
                most[i] = max(most[i], ((far <= radius) @ self.weights).max())
        return one(np.log(np.minimum(1.0, most * (1 + SLACK))).reshape(levels.shape))

    def posterior(self, answers: Array, noise_multiplier: float) -> Array:
        """Weight (n, images) of each image, given answers (n, N)."""
        cosines = answers @ self._directions.T
        cosines -= cosines.max(1, keepdims=True)
        with np.errstate(over="ignore"):
            scaled = cosines / max(noise_multiplier, 1e-150) / max(noise_multiplier, 1e-150)
        return np.asarray(special.softmax(scaled + np.log(self.weights), 1))

    def _best(self, answers: Array, noise: float, eta: float) -> tuple[Array, Array]:
        """Candidates (n, N) and the posterior mass (n,) within eta of each."""
        chance, rows = self.posterior(answers, noise), np.arange(len(answers))
        likely = np.argsort(-chance, 1)[:, :LIKELY]
        tries = [
            np.broadcast_to(self._mean, answers.shape),
            chance @ self.images,
            *(self.images[likely[:, i]] for i in range(likely.shape[1])),
        ]
        mass = []
        for guess in tries:
            far = self._distances(guess, (guess**2).sum(1), -SLACK)
            mass.append((chance * (far <= self.dim * eta)).sum(1))
        best = np.argmax(mass, 0)
        return np.stack(tries)[best, rows], np.minimum(1.0, np.stack(mass)[best, rows])

    def _distances(self, points: Array, squares: Array, slack: float = SLACK) -> Array:
        """Squared distances (n, images), low by their rounding, or high for a negative slack."""
        total = squares[:, None] + self._squares
        return np.asarray(total * (1 - slack) - 2 * points @ self.images.T)


class EmpiricallyBoundedPrior(RecordPrior):
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
        >>> round(float(np.exp(EmpiricallyBoundedPrior(KnownNorm(2), groups).log_kappa(1e-3))), 3)
        0.5
    """

    def __init__(self, prior: RecordPrior, groups: Sequence[ArrayLike]) -> None:
        self.prior, self.groups = prior, [flat_images(images) for images in groups]
        self.name, self.dim = f"{prior.name}, no rarer than seen", prior.dim

    def sample(self, count: int, generator: np.random.Generator) -> Array:
        return self.prior.sample(count, generator)

    def attack(self, answers: Array, noise_multiplier: float, *, eta: float) -> Array:
        return self.prior.attack(answers, noise_multiplier, eta=eta)

    def success(
        self, noise_multiplier: float, *, eta: float, draws: int, generator: np.random.Generator
    ) -> SuccessEstimate:
        return self.prior.success(noise_multiplier, eta=eta, draws=draws, generator=generator)

    def log_kappa(self, eta: ArrayLike) -> Any:
        """The larger logarithm of the model's bound and of the share of images that match."""
        levels = positive("eta", eta, infinite=True)
        total = sum(len(group) for group in self.groups)
        share = [
            sum(len(g) / total * densest_match_rate(g, float(level)) for g in self.groups)
            for level in levels.ravel()
        ]
        with np.errstate(divide="ignore"):
            found = np.maximum(np.asarray(self.prior.log_kappa(levels)).ravel(), np.log(share))
        return one(np.minimum(0.0, found).reshape(levels.shape))


def from_images(
    images: ArrayLike, kind: str = "mixture", *, components: int = 32
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


def largest_match_rate(images: ArrayLike, eta: float) -> float:
    """The largest share of the other images within an MSE of eta of one; at most 5,000 are used."""
    few = _thinned(images)
    return 0.0 if len(few) < 2 else (int(_matching(few, few, eta).max()) - 1) / (len(few) - 1)


def densest_match_rate(images: ArrayLike, eta: float) -> float:
    """The largest share of images within an MSE of eta of a candidate; at most 5,000 are used.

    Candidates are the images and means of images; those that a candidate is made of do not count.
    A mean-shift climb starts at the mean of all and at those with the most images near.

    Example:
        >>> circle = np.linspace(0, 2 * np.pi, 100, endpoint=False)
        >>> rows = np.stack([np.cos(circle), np.sin(circle)], axis=1)
        >>> round(largest_match_rate(rows, 0.5), 2), round(densest_match_rate(rows, 0.5), 2)
        (0.32, 0.99)
    """
    few = _thinned(images)
    if len(few) < 2:
        return 0.0
    best = int(_matching(few, few, eta).max()) - 1
    starts = np.unique([_matching(few, few, k * eta).argsort()[-STARTS:] for k in WIDER[:2]])
    found, squares = np.vstack([few[starts], few.mean(0)]), np.square(few).mean(1)
    for width in WIDER[::-1] + (WIDER[0],) * SHIFTS:
        apart = _apart(found, few, squares)
        inside = (apart <= width * eta + ROUNDED).astype(float)
        count = inside.sum(1, keepdims=True)
        found = np.where(count > 0, inside @ few / np.maximum(count, 1), found)
        best = max(best, int(_matching(found, few, eta).max()) - MADE)
    return min(1.0, best / (len(few) - 1))


def _thinned(images: ArrayLike) -> Array:
    flat = flat_images(images)
    return flat[:: -(-len(flat) // MOST)]


def _apart(candidates: Array, rows: Array, squares: Array) -> Array:
    mean = np.square(candidates).mean(1)[:, None]
    return np.asarray(mean + squares - 2 * candidates @ rows.T / rows.shape[1])


def _matching(candidates: Array, rows: Array, eta: float) -> Array:
    """How many rows are within an MSE of eta of each candidate."""
    squares = np.square(rows).mean(1)
    parts = (candidates[at : at + TOGETHER] for at in range(0, len(candidates), TOGETHER))
    return np.concatenate([(_apart(p, rows, squares) <= eta + ROUNDED).sum(1) for p in parts])
