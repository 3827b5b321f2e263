"""Generators of images: the user's own, or an untrained one; as what a search moves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from leakbound._util import user_code
from leakbound.domains import has_neighbors
from leakbound.random import normal
from leakbound.types import NotApplicable, Task

UNTRAINED = "untrained"


class Untrained(nn.Module):
    """A small network of upsampling convolutions from latents (N, `latent`) to images in [0, 1]."""

    def __init__(self, shape: tuple[int, int, int], latent: int, width: int) -> None:
        super().__init__()
        self.latent, self.shape, self.width = latent, shape, width
        self.side = (-(-shape[1] // 4), -(-shape[2] // 4))
        self.first = nn.Linear(latent, 2 * width * self.side[0] * self.side[1])
        self.middle = nn.Conv2d(2 * width, width, 3, padding=1)
        self.norm = nn.GroupNorm(max(1, width // 8), width)
        self.late = nn.Conv2d(width, width, 3, padding=1)
        self.late_norm = nn.GroupNorm(max(1, width // 8), width)
        self.last = nn.Conv2d(width, shape[0], 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        """Images (N, C, H, W)."""
        x = nn.functional.leaky_relu(self.first(latents), 0.2)
        x = x.view(len(latents), 2 * self.width, *self.side)
        x = _doubled(x, (2 * self.side[0], 2 * self.side[1]))
        x = nn.functional.leaky_relu(self.norm(self.middle(x)), 0.2)
        x = nn.functional.leaky_relu(self.late_norm(self.late(_doubled(x, self.shape[1:]))), 0.2)
        drawn: Tensor = self.last(x).sigmoid()
        return drawn


class Generated:
    """Images of a generator: its latents move, or copies of its weights, one for each image."""

    def __init__(
        self, model: nn.Module, latents: Tensor, box: tuple[float, float], *, weights: bool
    ) -> None:
        self.model, self.box, self.latents = model, box, latents
        own = {name: p.detach() for name, p in model.named_parameters()}
        self.names, self.variables = list(own), []
        if weights:
            self.variables = [
                p.expand(len(latents), *p.shape).clone().requires_grad_() for p in own.values()
            ]
        else:
            self.latents = latents.clone().requires_grad_()
            self.variables = [self.latents]
        self.copies = weights

    def __call__(self) -> Tensor:
        """The images, in the box."""
        low, high = self.box
        if not self.copies:
            drawn: Tensor = self.model(self.latents)
        else:
            weights = dict(zip(self.names, self.variables, strict=True))
            drawn = vmap(self._one)(weights, self.latents)
        return (low + (high - low) * drawn).clamp(low, high)

    def _one(self, weights: dict[str, Tensor], latent: Tensor) -> Tensor:
        image: Tensor = functional_call(self.model, weights, (latent[None],))[0]
        return image

    def settle(self, box: tuple[float, float] | None) -> None:
        """Nothing: the images are clamped where they are drawn."""


def build(
    name: str, shape: tuple[int, ...], task: Task, generator: torch.Generator, latent: int
) -> nn.Module:
    """The generator that a setting names, frozen, in eval mode, on the task's device.

    Args:
        name: "untrained", or "package.module:build". `build(input_shape=(C, H, W))` returns a
            module that maps (N, latent) to images (N, C, H, W) in [0, 1], with an attribute
            `latent`.
        shape: of one image.
        task: whose device and type are taken.
        generator: draws the untrained weights.
        latent: size of the untrained generator's latents.

    Raises:
        NotApplicable: inputs that are no images.
        ValueError: the user's code does not import, or builds something else.
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
    return model.to(task.parameters).eval().requires_grad_(False)  # type: ignore[no-any-return]


def _untrained(shape: tuple[int, int, int], latent: int, generator: torch.Generator) -> nn.Module:
    with torch.device("meta"):  # no draw from the global random state
        empty = Untrained(shape, latent, 32)
    model = empty.to_empty(device="cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.copy_(normal(p.shape, generator) * (2 / p.shape[1:].numel()) ** 0.5)
            else:
                p.fill_(float("norm.weight" in name))
    return model


def _doubled(x: Tensor, size: tuple[int, ...]) -> Tensor:
    wide: Tensor = nn.functional.interpolate(x, size=size, mode="bilinear")
    return wide
