"""Generative gradient inversion: search a generator's latents, then copies of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from leakbound import check
from leakbound._util import user_code
from leakbound._util.modules import unfilled
from leakbound.attacks.base import Attack
from leakbound.attacks.matching.attack import GradientMatching
from leakbound.attacks.matching.images import Images, drawn
from leakbound.attacks.matching.loop import answer, begin, run
from leakbound.attacks.matching.objective import Objective
from leakbound.core import NotApplicable, Observation, Reconstruction, Task
from leakbound.domains import has_neighbors
from leakbound.randomness import normal

UNTRAINED = "untrained"


class Untrained(nn.Module):
    """A small network of upsampling convolutions from latents (N, `latent`) to images in [0, 1]."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        latent: int,
        width: int,
    ) -> None:
        super().__init__()
        self.latent = latent
        self.shape = shape
        self.width = width
        # Rounded up: the last doubling interpolates to the exact size.
        self.side = (-(-shape[1] // 4), -(-shape[2] // 4))
        self.first = nn.Linear(latent, 2 * width * self.side[0] * self.side[1])
        self.middle = nn.Conv2d(2 * width, width, 3, padding=1)
        self.norm = nn.GroupNorm(max(1, width // 8), width)
        self.late = nn.Conv2d(width, width, 3, padding=1)
        self.late_norm = nn.GroupNorm(max(1, width // 8), width)
        self.last = nn.Conv2d(width, shape[0], 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        x = nn.functional.leaky_relu(self.first(latents), 0.2)
        x = x.view(len(latents), 2 * self.width, *self.side)
        x = _doubled(x, (2 * self.side[0], 2 * self.side[1]))
        x = nn.functional.leaky_relu(self.norm(self.middle(x)), 0.2)
        x = nn.functional.leaky_relu(self.late_norm(self.late(_doubled(x, self.shape[1:]))), 0.2)
        return self.last(x).sigmoid()


class Generated(Images):
    """Images of a generator: the search moves its latents, or one copy of its weights per image."""

    def __init__(
        self,
        model: nn.Module,
        latents: Tensor,
        box: tuple[float, float],
        *,
        weights: bool,
    ) -> None:
        self.model = model
        self.box = box
        self.latents = latents
        self.copies = weights
        self.names = [name for name, _ in model.named_parameters()]
        if weights:
            start = [p.detach().expand(len(latents), *p.shape) for p in model.parameters()]
            self.variables = [p.clone().requires_grad_() for p in start]
        else:
            self.latents = latents.clone().requires_grad_()
            self.variables = [self.latents]

    def __call__(self) -> Tensor:
        low, high = self.box
        if not self.copies:
            output = self.model(self.latents)
        else:
            weights = dict(zip(self.names, self.variables, strict=True))
            output = vmap(self._one)(weights, self.latents)
        # A user's generator may leave [0, 1].
        return (low + (high - low) * output).clamp(low, high)

    def _one(self, weights: dict[str, Tensor], latent: Tensor) -> Tensor:
        return functional_call(self.model, weights, (latent[None],))[0]


def build(
    name: str,
    shape: tuple[int, ...],
    task: Task,
    generator: torch.Generator,
    latent: int,
) -> nn.Module:
    """The generator that a setting names, frozen, in eval mode, on the task's device: "untrained"
    with latents of size `latent`, or "package.module:build". `build(input_shape=(C, H, W))` returns
    a module that maps (N, latent) to images (N, C, H, W) in [0, 1], with an attribute `latent`.
    """
    if not has_neighbors(shape):
        raise NotApplicable("a generator of images needs inputs (C, H, W)")
    if name == UNTRAINED:
        model: Any = _untrained((shape[0], shape[1], shape[2]), latent, generator)
    else:
        with user_code.seeded(generator):
            model = user_code.find("generator", name)(input_shape=shape)
        if not isinstance(model, nn.Module) or not isinstance(getattr(model, "latent", None), int):
            raise ValueError(
                f"generator {name!r} returned {type(model).__name__}; return a torch.nn.Module "
                "with a whole number `latent`, the size of what it maps to images"
            )
    return model.to(task.parameters).eval().requires_grad_(False)


def _untrained(
    shape: tuple[int, int, int],
    latent: int,
    generator: torch.Generator,
) -> nn.Module:
    model = unfilled(lambda: Untrained(shape, latent, 32))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(drawn(name, p.shape, generator, p))
    return model


def _doubled(x: Tensor, size: tuple[int, ...]) -> Tensor:
    return nn.functional.interpolate(x, size=size, mode="bilinear")


@dataclass(frozen=True)
class Gias(Attack):
    """Invert the gradient with a generator of images as the prior.

    The attack first searches the latents from several starts and keeps the start with the lowest
    objective. With these latents fixed, it then searches one copy of the generator's weights per
    image.

    Args:
        generator: "untrained", or the user's "package.module:build" (a plan that names it runs
            code). `build(input_shape=(C, H, W))` returns a module that maps (N, latent) to images
            (N, C, H, W) in [0, 1], with an attribute `latent`.
        latent: the size of the untrained generator's latents.
        latent_steps, weight_steps: search steps of each stage.
        latent_rate, weight_rate: Adam's learning rate in each stage.
        restarts: starts of the first stage.
        distance, total_variation, batch_norm, statistics: as for `GradientMatching`.

    Raises:
        NotApplicable: the inputs are not images (C, H, W).

    Source: Jeon et al., "Gradient Inversion with Generative Image Prior", NeurIPS 2021.

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> batch = torch.linspace(0, 1, 16).reshape(1, 1, 4, 4), torch.tensor([2])
        >>> attack = Gias(latent_steps=5, weight_steps=5, restarts=1)
        >>> lb.simulate(model, batch, attack=attack).scores[0] > 10
        True
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

    @property
    def step_trainings(self) -> int:
        """A search asks after each step."""
        return 1

    def __post_init__(self) -> None:
        check.count(latent=self.latent, restarts=self.restarts)
        check.count(latent_steps=self.latent_steps, weight_steps=self.weight_steps)
        self._stage(1, self.latent_rate)  # checks the rest
        self._stage(1, self.weight_rate)

    def _stage(self, steps: int, rate: float) -> GradientMatching:
        names = ("distance", "total_variation", "batch_norm", "statistics")
        settings = {name: getattr(self, name) for name in names}
        more = 0.04 if self.total_variation else 0.0
        return GradientMatching(
            **settings,
            noise_variation=more,
            steps=steps,
            learning_rate=rate,
            signed=False,
        )

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        first = self._stage(self.latent_steps, self.latent_rate)
        second = self._stage(self.weight_steps, self.weight_rate)
        if not observation.update.rows.any():
            return first(observation, generator)
        task = observation.task
        starts = []
        for _ in range(self.restarts):
            model = build(self.generator, observation.input_shape, task, generator, self.latent)
            size = (observation.examples, int(model.latent))  # type: ignore[arg-type]
            latents = normal(size, generator, like=task.parameters)
            images = Generated(model, latents, task.input_range, weights=False)
            search = begin(
                first,
                Objective.of(first, observation),
                generator,
                images=images,
            )
            run(first, [search])
            search.recall()
            starts.append((float(search.best), images, search))
        _, images, first_search = min(starts, key=lambda start: start[0])
        latents = images.latents.detach()
        images = Generated(
            images.model,
            latents,
            task.input_range,
            weights=True,
        )
        search = begin(
            second,
            Objective.of(second, observation),
            generator,
            images=images,
        )
        search.labels = first_search.labels
        run(second, [search])
        search.trace = first_search.trace + search.trace
        return answer(search)
