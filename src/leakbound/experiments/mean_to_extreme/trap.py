"""Real images through a linear trap, alone or beside a norm sink: what its rows release.

Only the trap's rows are read, so noise on other parameters is not drawn; their gradients are
computed in full, as they share the clip norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakbound import data
from leakbound.attacks import LinearTrap
from leakbound.attacks.trap_estimators import Reading
from leakbound.client import gradient
from leakbound.models import resnet18
from leakbound.random import normal, permutation, stream
from leakbound.types import Batch, Task

IMAGES, TILES, NORM, CLIP = 500, 4000, 1.01, 1.0
NOISES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
KINDS = ("optimal", "linear layer of 1M", "ResNet-18")
DIMS = (4, 3072)


@dataclass(frozen=True, eq=False)
class Records:
    """Images scaled to one norm, and what else is in their gradients.

    Attributes:
        inputs: (n, C, H, W), float64, each of norm 1.01 as in paper C.
        rest: (n,) norm of the gradient of all parameters but the trap's, before clipping.
    """

    inputs: Tensor
    rest: Tensor

    @property
    def flat(self) -> Tensor:
        """(n, N)."""
        return self.inputs.flatten(1)

    @property
    def beta(self) -> Tensor:
        """(n,) what clipping to 1 multiplies each gradient by; one row in the trap."""
        return CLIP / torch.hypot(self.flat.norm(dim=1), self.rest).clamp_min(CLIP)


def records(dim: int, kind: str) -> Records:
    """500 tiles of photographs, gray 2 x 2 or color 32 x 32, and the norm sink's gradients."""
    size, channels = {4: (2, 1), 3072: (32, 3)}[dim]
    source = data.load("photos", size=size, channels=channels, limit=TILES)
    bright = source.inputs.flatten(1).norm(dim=1) > 0
    index = permutation(len(source.labels), stream(0, "paper C", dim))
    index = index[bright[index]][:IMAGES]
    inputs = source.inputs[index].double()
    inputs = NORM * inputs / inputs.flatten(1).norm(dim=1)[:, None, None, None]
    return Records(inputs, _rest(kind, inputs, source.labels[index] % 10))


def directions(dim: int, count: int, source: torch.Generator) -> Records:
    """Records whose direction is uniform, for the laws that average over it."""
    drawn = normal((count, dim), source, like=torch.zeros(1, dtype=torch.float64))
    drawn = NORM * drawn / drawn.norm(dim=1, keepdim=True)
    return Records(drawn.reshape(count, 1, 1, dim), torch.zeros(count, dtype=torch.float64))


def release(found: Records, noise_multiplier: float, source: torch.Generator) -> Tensor:
    """What the server reads, (n, N): clipped inputs plus noise."""
    noise = normal(found.flat.shape, source, like=found.flat)
    return found.beta[:, None] * found.flat + CLIP * noise_multiplier * noise


def errors(
    found: Records,
    noise_multiplier: float,
    estimator: Callable[[Reading], Tensor],
    source: torch.Generator,
    *,
    scale_known: bool = True,
) -> Tensor:
    """(n,) mean squared errors; without `scale_known` the sink's share of the norm is ignored."""
    seen = release(found, noise_multiplier, source)
    scale = found.beta
    if not scale_known:
        scale = CLIP / found.flat.norm(dim=1).clamp_min(CLIP)
    rows = zip(seen, scale.tolist(), strict=True)
    guess = [estimator(Reading(z, s, CLIP * noise_multiplier, NORM)) for z, s in rows]
    return (torch.stack(guess) - found.flat).square().mean(1)


def _rest(kind: str, inputs: Tensor, labels: Tensor) -> Tensor:
    _, channels, high, wide = inputs.shape
    model = _sink(kind, (channels, high, wide))
    if model is None:
        return torch.zeros(len(inputs), dtype=torch.float64)
    task = Task.of(model.eval(), classes=10)
    planted = LinearTrap("unbiased", rows=1, inside=True, features=inputs[0].numel()).plant(task)
    width, found = inputs[0].numel(), []
    for image, label in zip(inputs.float(), labels, strict=True):
        batch = Batch(image[None], label[None])
        row = gradient(planted, batch.inputs, batch.labels)
        found.append(row[width:].double().norm())
    return torch.stack(found)


def _sink(kind: str, shape: tuple[int, int, int]) -> nn.Module | None:
    """The model beside the trap: nothing, a linear layer of a million weights, or a ResNet-18."""
    source = stream(0, "paper C", kind)
    if kind == "ResNet-18":
        inner = resnet18(input_shape=(shape[0], 32, 32), classes=10, generator=source)
        return inner if shape[1] == 32 else nn.Sequential(nn.Upsample(size=(32, 32)), inner)
    if kind == "optimal":
        return None
    model = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(shape[0], 1000), nn.Linear(1000, 1000)
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(normal(weight.shape, source) / max(1, weight.shape[-1]) ** 0.5)
    return model
