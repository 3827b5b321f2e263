"""Generative gradient inversion: search a generator's latents, then copies of its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from leakbound import check
from leakbound.attacks.base import Attack
from leakbound.attacks.generators import UNTRAINED, Generated, build
from leakbound.attacks.matching import GradientMatching
from leakbound.attacks.search import Search
from leakbound.random import normal
from leakbound.types import Observation, Reconstruction


@dataclass(frozen=True)
class Gias(Attack):
    """Gradient inversion with a generative image prior.

    First the latents are searched, from several starts, of which the one with the lowest objective
    is kept; then, with the latents fixed, one copy of the generator's weights for each image. The
    answer is the best guess of the second stage by its own objective.

    Args:
        generator: "untrained", or "package.module:build" of the user (a plan that names it is
            code): see `generators.build`.
        latent: size of the untrained generator's latents.
        latent_steps, weight_steps: of each stage.
        latent_rate, weight_rate: Adam's learning rate in each stage.
        restarts: starts of the first stage.
        distance, total_variation, batch_norm, statistics: as for `GradientMatching`.

    Raises:
        NotApplicable: inputs that are no images (C, H, W).

    Source: Jeon et al., "Gradient Inversion with Generative Image Prior", NeurIPS 2021.

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> batch = lb.Batch(torch.linspace(0, 1, 16).reshape(1, 1, 4, 4), torch.tensor([2]))
        >>> task, sources = lb.Task.of(model, classes=3), [lb.stream(0, "a"), lb.stream(0, "b")]
        >>> seen = lb.play(task, [batch], lb.defenses.NoDefense(), sources).observation
        >>> attack = Gias(latent_steps=5, weight_steps=5, restarts=1)
        >>> attack(seen, lb.stream(0, "attack")).inputs.shape
        torch.Size([1, 1, 4, 4])
    """

    generator: str = UNTRAINED
    latent: int = 64
    latent_steps: int = 300
    weight_steps: int = 700
    latent_rate: float = 3e-2
    weight_rate: float = 3e-3
    restarts: int = 2
    distance: str = "cosine"
    total_variation: float = 1e-4
    batch_norm: float = 0.0
    statistics: str = "best"

    def __post_init__(self) -> None:
        check.count(latent=self.latent, restarts=self.restarts)
        check.count(latent_steps=self.latent_steps, weight_steps=self.weight_steps)
        self._stage(1, self.latent_rate), self._stage(1, self.weight_rate)  # checks the rest

    def _stage(self, steps: int, rate: float) -> GradientMatching:
        return GradientMatching(
            distance=self.distance,
            total_variation=self.total_variation,
            noise_variation=0.04 if self.total_variation else 0.0,
            steps=steps,
            learning_rate=rate,
            signed=False,
            batch_norm=self.batch_norm,
            statistics=self.statistics,
        )

    def __call__(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        """Run both stages."""
        first = self._stage(self.latent_steps, self.latent_rate)
        second = self._stage(self.weight_steps, self.weight_rate)
        if not bool((observation.update.rows != 0).any()):
            return first(observation, generator)
        task, shape = observation.task, observation.input_shape
        starts = []
        for _ in range(self.restarts):
            model = build(self.generator, shape, task, generator, self.latent)
            size = (observation.examples, int(model.latent))  # type: ignore[arg-type]
            latents = normal(size, generator, like=task.parameters)
            images = Generated(model, latents, task.input_range, weights=False)
            search = Search(first, observation, generator, images)
            search.adam()
            search.recall()
            starts.append((float(search.best), model, images.latents.detach(), search))
        _, model, latents, first_search = min(starts, key=lambda start: start[0])
        images = Generated(model, latents, task.input_range, weights=True)
        search = Search(second, observation, generator, images)
        search.labels = first_search.labels
        search.adam()
        search.trace = first_search.trace + search.trace
        return search.answer()
