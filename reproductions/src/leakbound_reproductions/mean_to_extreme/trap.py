"""Real images through a linear trap, alone or with a norm sink: what its rows release.

Only the linear trap's rows are used, so noise on other parameters is not drawn. Their gradients are
computed in full, because they share the clip norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakbound import data
from leakbound.attacks import LinearTrap
from leakbound.attacks.trap import TrapReading
from leakbound.client import gradient
from leakbound.core import Task
from leakbound.models import resnet18
from leakbound.randomness import normal, permutation, stream

NORM = 1.01
CLIP = 1.0
NOISES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
PRINTED = (0.1, 1.0, 10.0)
"""Noise multipliers of the boxes in the paper's figures, among `NOISES`."""
CERTIFIED = (0.01, 0.1)
"""Noise multipliers of the certificates that decide a claim."""
KINDS = ("optimal", "linear layer of 1M", "ResNet-18")
DIMS = (4, 3072)
GROUPS = 32
"""Of the group norms that replace batch norms, as Opacus does it in the paper's code."""


@dataclass(frozen=True, eq=False)
class Records:
    """Images scaled to one norm, and the norms of their other gradients.

    Attributes:
        inputs: (n, C, H, W), float64, each of norm 1.01 as in paper C.
        rest: (n,) norm of the gradient of all parameters except the linear trap's, before clipping.
    """

    inputs: Tensor
    rest: Tensor

    def alone(self) -> Records:
        """The same images without a sink."""
        return Records(self.inputs, torch.zeros_like(self.rest))

    @property
    def flat(self) -> Tensor:
        """(n, N)."""
        return self.inputs.flatten(1)

    @property
    def beta(self) -> Tensor:
        """(n,) the factor of clipping to 1 for each gradient; the linear trap has one row."""
        return CLIP / torch.hypot(self.flat.norm(dim=1), self.rest).clamp_min(CLIP)


def images(source: data.Dataset, count: int) -> Tensor:
    """Real images scaled to norm 1.01, (count, C, H, W), float64.

    Args:
        source: from which they are chosen.
        count: how many.
    """
    bright = source.inputs.flatten(1).norm(dim=1) > 0
    dim = source.inputs[0].numel()
    index = permutation(len(source.labels), stream(0, "paper C", dim))
    index = index[bright[index]][:count]
    if len(index) < count:
        raise ValueError(
            f"color is {source.name!r}, with {len(index)} images; give {count} or more"
        )
    inputs = source.inputs[index].double()
    scaled: Tensor = NORM * inputs / inputs.flatten(1).norm(dim=1)[:, None, None, None]
    return scaled


def directions(dim: int, count: int, source: torch.Generator) -> Records:
    """Examples with uniform direction, for distributions that average over it."""
    drawn = normal((count, dim), source, like=torch.zeros(1, dtype=torch.float64))
    drawn = NORM * drawn / drawn.norm(dim=1, keepdim=True)
    return Records(drawn.reshape(count, 1, 1, dim), torch.zeros(count, dtype=torch.float64))


def release(found: Records, noise_multiplier: float, source: torch.Generator) -> Tensor:
    """What the server observes, (n, N): clipped inputs plus noise."""
    noise = normal(found.flat.shape, source, like=found.flat)
    return found.beta[:, None] * found.flat + CLIP * noise_multiplier * noise


def errors(
    found: Records,
    noise_multiplier: float,
    estimator: Callable[[TrapReading], Tensor],
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
    guess = [estimator(TrapReading(z, s, CLIP * noise_multiplier, NORM)) for z, s in rows]
    return (torch.stack(guess) - found.flat).square().mean(1)


def rest(inputs: Tensor, kind: str, *, side: int = 32) -> Tensor:
    """(n,) norms of the gradients of all other parameters, as in the authors' code.

    There the loss is the sum of the linear trap's output and the mean output of the other part: a
    linear layer of a million weights, or a residual network of 1,000 outputs.

    Args:
        inputs: (n, C, H, W).
        kind: one of `KINDS`, or "ResNet-101", the paper's, which needs transformers.
        side: pixels per side of the residual network's input.
    """
    model = _sink(kind, (inputs.shape[1], inputs.shape[2], inputs.shape[3]), side)
    if model is None:
        return torch.zeros(len(inputs), dtype=torch.float64)
    task = Task.of(model.eval(), loss=_mean)
    width = inputs[0].numel()
    found = []
    planted = LinearTrap("unbiased", rows=1, inside=True, features=width).plant(task)
    for image in inputs.float():
        row = gradient(planted, image[None], torch.zeros(1, dtype=torch.long))
        found.append(row[width:].double().norm())
    return torch.stack(found)


def _mean(output: Tensor, labels: Tensor) -> Tensor:
    return output.mean(1).sum()


class _Tiled(nn.Module):
    """Copies of a small image side by side, in three channels."""

    def __init__(self, times: int, channels: int) -> None:
        super().__init__()
        self.times = times
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, 3 // self.channels, self.times, self.times)


def _resnet18(side: int, source: torch.Generator) -> nn.Module:
    return resnet18(input_shape=(3, side, side), classes=1000, generator=source)


def _resnet101(side: int, source: torch.Generator) -> nn.Module:
    """ResNet-101 at random with group norms, for any `side`."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=[3, 4, 23, 3])
    config.num_labels = 1000

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ResNetForImageClassification(config)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.inner(x).logits
            return scores

    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=source)))
        network = Network()
    for module in [*network.modules()]:
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(GROUPS, child.num_features))
    return network


NETWORKS: dict[str, Callable[[int, torch.Generator], nn.Module]] = {
    "ResNet-18": _resnet18,
    "ResNet-101": _resnet101,
}


def _sink(kind: str, shape: tuple[int, int, int], side: int) -> nn.Module | None:
    """The norm sink: nothing, a linear layer of a million weights, or a residual network."""
    source = stream(0, "paper C", kind)
    if kind == "optimal":
        return None
    channels, high, wide = shape
    if kind in NETWORKS:
        inner = NETWORKS[kind](side, source)
        if (high, channels) == (2, 1):
            return nn.Sequential(_Tiled(side // 2, 1), inner)
        return inner if high == side else nn.Sequential(nn.Upsample(size=(side, side)), inner)
    width = channels * high * wide
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 1_000_000 // width, bias=False))
