"""Attacks on the linear trap's output y = X / |X| + noise that know a prior of the examples.

What they attain on examples of the prior must stay below what its `log_kappa` allows.
"""

from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from leakbound.bounds import record_priors
from leakbound.bounds.identification import log_kappa_sphere
from leakbound.bounds.law import one, positive, single, whole

PURE_NOISE = 1e100
NORMS, REACH = 33, 3.5  # norms that the attack weighs for each part, over so many deviations
LIKELY = 4  # likely examples that a gallery's attack tries, besides the two means


@dataclass(frozen=True)
class Counted:
    """A rate with its 95 % Clopper-Pearson interval."""

    value: float
    low: float
    high: float


def counted(hits, n):
    low = stats.beta.ppf(0.025, hits, n - hits + 1) if hits else 0.0
    high = stats.beta.isf(0.025, hits + 1, n - hits) if hits < n else 1.0
    return Counted(hits / n, low, high)


def answer(examples, noise, generator):
    """The linear trap's output for examples (n, N): directions plus noise."""
    drawn = min(noise, PURE_NOISE) * generator.standard_normal(examples.shape)
    return examples / np.linalg.norm(examples, axis=1, keepdims=True) + drawn


def attained(prior, records, noise, eta, generator):
    guesses = prior.attack(answer(records, noise, generator), noise, eta=eta)
    return counted(int((((guesses - records) ** 2).mean(1) <= eta).sum()), len(records))


def success(prior, noise, eta, draws, generator):
    """How often the attack has an MSE of at most eta on examples of the prior."""
    return attained(prior, prior.sample(draws, generator), noise, eta, generator)


class KnownNorm(record_priors.Baseline):
    """Only the norm is known; the direction is uniform on the sphere."""

    name, basis = "known norm", None

    def __init__(self, dim, norm=1.0):
        single(whole, dim=dim)
        self.dim, self.norm = dim, single(positive, norm=norm)

    def sample(self, count, generator):
        drawn = generator.standard_normal((count, self.dim))
        return self.norm * drawn / np.linalg.norm(drawn, axis=1, keepdims=True)

    def attack(self, answers, noise, *, eta):
        """The output's direction at the radius |X| cos(theta); sin^2 theta = N eta / |X|^2."""
        radius = np.sqrt(np.maximum(0.0, self.norm**2 - self.dim * eta))
        return radius * answers / np.linalg.norm(answers, axis=1, keepdims=True)

    def log_kappa(self, eta):
        return one(np.asarray(log_kappa_sphere(dim=self.dim, eta=eta, norm=self.norm)))


class Part(record_priors.GaussianPart):
    @property
    def norms(self):
        """(NORMS,) norms that an example of this part may have."""
        projected = self.mean @ self.basis
        level = self.mean @ self.mean + self.spectrum.sum()
        off = self.mean @ self.mean - projected @ projected
        across = self.variances @ projected**2 + self.rest * off
        spread = np.sqrt(2 * (self.spectrum**2).sum() + 4 * across)
        low = np.sqrt(max(level - REACH * spread, level / 100))
        return np.linspace(low, np.sqrt(level + REACH * spread), NORMS)

    def sample(self, count, generator):
        normal = generator.standard_normal((count, len(self.mean)))
        root = np.sqrt(self.rest)
        longer = (normal @ self.basis) * (np.sqrt(self.variances) - root)
        return self.mean + root * normal + longer @ self.basis.T

    def posterior(self, answers, noise):
        """Log likelihood (n,), mean (n, N) and total variance (n,) given outputs, over `norms`.

        At norm r, r y = X + noise r xi is Gaussian. r has a flat prior over `norms`, and its
        likelihood has the factor r^N from the change of scale.
        """
        r = self.norms[:, None]
        added, others = (noise * r) ** 2, len(self.mean) - len(self.variances)
        inside, middle = answers @ self.basis, self.mean @ self.basis
        off = r[None] * inside[:, None] - middle  # (n, norms, k)
        whole_square = (answers**2).sum(1)[:, None] * r.T**2 + self.mean @ self.mean
        whole_square = whole_square - 2 * r.T * (answers @ self.mean)[:, None]
        beyond = np.maximum(0.0, whole_square - (off**2).sum(2))
        wide, rest = self.variances + added, self.rest + added[:, 0]
        log = -(off**2 / wide).sum(2) - np.log(wide).sum(1) - beyond / rest
        log = log / 2 - others * np.log(rest) / 2 + len(self.mean) * np.log(r.T)
        weight = special.softmax(log, 1)
        leading = (weight[..., None] * (off * (self.variances / wide))).sum(1)
        gain = self.rest / rest
        across, steady = (weight * gain * r.T).sum(1)[:, None], (weight * gain).sum(1)[:, None]
        orthogonal = across * answers - steady * self.mean
        mean = self.mean + orthogonal + (leading - orthogonal @ self.basis) @ self.basis.T
        left = (self.variances * added / wide).sum(1) + others * gain * added[:, 0]
        return special.logsumexp(log, 1), mean, weight @ left


class _Attacked:
    """A mixture that is drawn from and attacked."""

    @property
    def own(self):
        return [Part(p.mean, p.basis, p.variances, p.rest) for p in self.parts]

    def sample(self, count, generator):
        which = generator.choice(len(self.parts), count, p=self.weights)
        rows = np.empty((count, self.dim))
        for i, part in enumerate(self.own):
            rows[which == i] = part.sample(int((which == i).sum()), generator)
        return rows

    def attack(self, answers, noise, *, eta):
        """The posterior mean if its expected MSE is within eta, else that of the likeliest part."""
        found = [part.posterior(answers, min(noise, PURE_NOISE)) for part in self.own]
        log, means, left = (np.stack([f[i] for f in found], 1) for i in range(3))
        weight = special.softmax(log + np.log(self.weights), 1)
        middle = (weight[..., None] * means).sum(1)
        apart = ((means - middle[:, None]) ** 2).sum(2)
        error = (weight * (left + apart)).sum(1)
        likeliest = means[np.arange(len(means)), weight.argmax(1)]
        return np.where((error <= self.dim * eta)[:, None], middle, likeliest)


class Mixture(_Attacked, record_priors.Mixture):
    pass


class GaussianImages(_Attacked, record_priors.GaussianImages):
    pass


class Gallery(record_priors.Gallery):
    def sample(self, count, generator):
        return self.images[generator.choice(len(self.images), count, p=self.weights)]

    def attack(self, answers, noise, *, eta):
        """The candidate, out of several, whose ball holds the most posterior mass."""
        chance, rows = self.posterior(answers, noise), np.arange(len(answers))
        likely = np.argsort(-chance, 1)[:, :LIKELY]
        tries = [
            np.broadcast_to(self.weights @ self.images, answers.shape),
            chance @ self.images,
            *(self.images[likely[:, i]] for i in range(likely.shape[1])),
        ]
        mass = []
        for guess in tries:
            total = (guess**2).sum(1)[:, None] + (self.images**2).sum(1)
            far = total * (1 + 1e-9) - 2 * guess @ self.images.T
            mass.append((chance * (far <= self.dim * eta)).sum(1))
        return np.stack(tries)[np.argmax(mass, 0), rows]

    def posterior(self, answers, noise):
        """Weight (n, images) of each image, given answers (n, N)."""
        cosines = answers @ (self.images / np.linalg.norm(self.images, axis=1)[:, None]).T
        cosines -= cosines.max(1, keepdims=True)
        with np.errstate(over="ignore"):
            scaled = cosines / max(noise, 1e-150) / max(noise, 1e-150)
        return special.softmax(scaled + np.log(self.weights), 1)
