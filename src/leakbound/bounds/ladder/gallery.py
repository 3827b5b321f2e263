"""The sharpest rung of the prior ladder: the record is one of a gallery."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from leakbound.bounds.ladder.rung import CHUNK, Estimate, answer, edges, pictures, setting
from leakbound.bounds.law import Array, Scope, non_negative, one, positive

LIKELY = 4
"""The most likely records that the attack tries as its guess, besides the two means."""
SLACK = 1e-9
"""Rounding of squared distances, relative to the squared norms they come from, and of sums."""
_LOWER, _UPPER = edges(
    "the gallery, by its weights",
    "the guess, of the likeliest records and the means of posterior and prior, whose ball holds "
    "most posterior",
    "the most mass within twice the radius of a record",
)


class Gallery:
    """The record is one of the images, with known weights.

    Shapes: `images` (n, ...), `weights` (n,).

    Args:
        images: the candidates, input units.
        weights: how likely each is, up to a factor; equal by default.

    Raises:
        ValueError: an image of norm 0, weights that are negative or of another length.

    Source: this project; docs/risk.md, "the ladder of priors".

    Example:
        >>> rung = Gallery(np.eye(4))
        >>> found = rung.success(0.2, eta=0.1, draws=200, generator=np.random.default_rng(0))
        >>> found.value > 0.99, round(float(np.exp(rung.log_kappa(0.1))), 3)
        (True, 0.25)
    """

    def __init__(self, images: ArrayLike, weights: ArrayLike | None = None) -> None:
        rows = pictures(images)
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
        self._mean = self.weights @ rows
        self._directions, self._squares = rows / norms[:, None], norms**2

    @property
    def informed(self) -> bool:
        """True: it is taken from data."""
        return True

    @property
    def name(self) -> str:
        """For people."""
        return f"gallery of {len(self.images)} images"

    @property
    def dim(self) -> int:
        """N."""
        return int(self.images.shape[1])

    @property
    def lower_scope(self) -> Scope:
        """What `success` covers."""
        return _LOWER

    @property
    def upper_scope(self) -> Scope:
        """What the edge from `log_kappa` covers."""
        return _UPPER

    def sample(self, count: int, generator: np.random.Generator) -> Array:
        """Records (count, N) of the gallery."""
        return np.asarray(self.images[generator.choice(len(self.images), count, p=self.weights)])

    def attack(self, answers: Array, noise_multiplier: float, *, eta: float) -> Array:
        """The guess whose ball holds most posterior mass, of some."""
        return self._best(answers, noise_multiplier, eta)[0]

    def success(
        self, noise_multiplier: float, *, eta: float, draws: int, generator: np.random.Generator
    ) -> Estimate:
        """Mean posterior mass within eta of the guess: its expectation is the success.

        Shapes: numbers. Units: `eta` MSE in input units squared.

        Raises:
            ValueError: eta of 0 or below, fewer than 2 draws.
        """
        noise, eta, draws = setting(noise_multiplier, eta, draws, 2)
        found = []
        for start in range(0, draws, CHUNK):
            records = self.sample(min(CHUNK, draws - start), generator)
            found.append(self._best(answer(records, noise, generator), noise, eta)[1])
        return Estimate.of_chances(np.concatenate(found))

    def log_kappa(self, eta: ArrayLike) -> Any:
        """Upper bound on the logarithm of the most weight within an MSE of eta of any point.

        A ball that holds a record lies in the ball of twice the radius about that record.

        Shapes: any.
        """
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
        alike = answers @ self._directions.T
        alike -= alike.max(1, keepdims=True)
        with np.errstate(over="ignore"):
            scaled = alike / max(noise_multiplier, 1e-150) / max(noise_multiplier, 1e-150)
        return np.asarray(special.softmax(scaled + np.log(self.weights), 1))

    def _best(self, answers: Array, noise: float, eta: float) -> tuple[Array, Array]:
        """Guesses (n, N) and the posterior mass (n,) within eta of each."""
        chance, rows = self.posterior(answers, noise), np.arange(len(answers))
        likely = np.argsort(-chance, 1)[:, :LIKELY]
        blind = np.broadcast_to(self._mean, answers.shape)
        tries = [
            blind,
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
