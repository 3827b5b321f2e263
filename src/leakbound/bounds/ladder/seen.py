"""A prior that is not trusted below what real images reach of one another."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from leakbound import check
from leakbound.bounds.ladder.blend import GaussianImages, Mixture
from leakbound.bounds.ladder.gallery import Gallery
from leakbound.bounds.ladder.rung import Estimate, Rung, pictures
from leakbound.bounds.law import Array, Scope, one, positive

KINDS = ("mixture", "gaussian", "gallery")
"""Priors that are taken from images."""
FEWEST = 64
"""Examples that a prior is taken from at least."""
MOST, TOGETHER = 5000, 512
"""Images that are compared with each other, and how many at once."""


class Seen:
    """A rung whose blind success is at least the largest share that one of some images reaches.

    A model that was fitted to images can hold near ones for far rarer than they are: an attacker
    with one such image, sent as a blind guess, would then beat the edge.

    Args:
        rung: the prior.
        groups: images (n, ...) of each group that the attacker can tell apart without the update,
            such as the classes where labels are known; each weighs by its size.

    Source: this project.

    Example:
        >>> from leakbound.bounds.ladder import KnownNorm
        >>> rung = Seen(KnownNorm(2), [[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
        >>> round(float(np.exp(rung.log_kappa(1e-3))), 3)
        0.5
    """

    def __init__(self, rung: Rung, groups: list[ArrayLike]) -> None:
        self.rung, self.groups = rung, [pictures(images) for images in groups]

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.rung.name}, no rarer than seen"

    @property
    def informed(self) -> bool:
        """True: it has seen data."""
        return True

    @property
    def dim(self) -> int:
        """N."""
        return self.rung.dim

    @property
    def lower_scope(self) -> Scope:
        """What `success` covers."""
        return self.rung.lower_scope

    @property
    def upper_scope(self) -> Scope:
        """What the edge from `log_kappa` covers."""
        return self.rung.upper_scope

    def sample(self, count: int, generator: np.random.Generator) -> Array:
        """Records (count, N) of the prior."""
        return self.rung.sample(count, generator)

    def attack(self, answers: Array, noise_multiplier: float, *, eta: float) -> Array:
        """The rung's."""
        return self.rung.attack(answers, noise_multiplier, eta=eta)

    def success(
        self, noise_multiplier: float, *, eta: float, draws: int, generator: np.random.Generator
    ) -> Estimate:
        """The rung's."""
        return self.rung.success(noise_multiplier, eta=eta, draws=draws, generator=generator)

    def log_kappa(self, eta: ArrayLike) -> Any:
        """Logarithm of the rung's bound or of what was seen, whichever is more.

        Shapes: any.
        """
        levels = positive("eta", eta, infinite=True)
        total = sum(len(group) for group in self.groups)
        seen = [
            sum(len(g) / total * alike(g, float(level)) for g in self.groups)
            for level in levels.ravel()
        ]
        with np.errstate(divide="ignore"):
            found = np.maximum(np.asarray(self.rung.log_kappa(levels)).ravel(), np.log(seen))
        return one(np.minimum(0.0, found).reshape(levels.shape))


def from_images(images: ArrayLike, kind: str = "mixture", *, components: int = 32) -> Seen:
    """A prior taken from public images, never trusted below what these reach of one another.

    Shapes: `images` (n, ...); the trailing sizes are one record's values.

    Args:
        images: public ones, of the same kind as the private ones.
        kind: "mixture" (Gaussians), "gaussian" (one of them) or "gallery" (the images themselves).
        components: leading directions of the Gaussians.

    Raises:
        ValueError: an unknown kind, fewer than 64 images, or images that are all equal.

    Source: this project.

    Example:
        >>> public = np.random.default_rng(0).random((100, 4))
        >>> from_images(public, "gaussian", components=2).name
        'Gaussian images, no rarer than seen'
    """
    check.one_of(KINDS, kind=kind)
    flat = pictures(images)
    if len(flat) < FEWEST:
        raise ValueError(f"images holds {len(flat)} examples; a prior takes at least {FEWEST}")
    if kind == "gallery":
        return Seen(Gallery(flat), [flat])
    fit = GaussianImages if kind == "gaussian" else Mixture
    return Seen(fit.from_samples(flat, components=components), [flat])


def alike(images: ArrayLike, eta: float) -> float:
    """The largest share of the other images within an MSE of eta of one; of 5,000 at most.

    Shapes: (n, ...).

    Example:
        >>> alike([[0.0], [0.1], [1.0]], 0.02)
        0.5
    """
    flat = pictures(images)
    few = flat[:: -(-len(flat) // MOST)]
    if len(few) < 2:
        return 0.0
    squares, most = np.square(few).mean(1), 0
    for start in range(0, len(few), TOGETHER):
        part = slice(start, start + TOGETHER)
        apart = squares[part, None] + squares - 2 * few[part] @ few.T / few.shape[1]
        most = max(most, int((apart <= eta + 1e-14).sum(1).max()) - 1)
    return most / (len(few) - 1)
