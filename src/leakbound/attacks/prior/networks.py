"""A small denoiser of images (a U-Net), and of rows, series and other inputs (a perceptron)."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from leakbound.domains import has_neighbors

UNITS = {True: 32, False: 128}
"""Channels at the first level for pictures; units of a layer for everything else."""
SMALLEST = 8
FOLDED = 16
"""Sides of images from which convolutions fit, and from which they work at half the resolution."""
WAVES = (1.0, 2.0, 4.0, 8.0)


class DenoisingBlock(nn.Module):
    """A residual block of two layers; `known` (noise level, class) shifts and scales channels."""

    def __init__(self, known: int, width: int, flat: bool) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1 if flat else math.gcd(8, width), width)
        self.film = nn.Linear(known, 2 * width)
        self.one = _layer(width, width, flat)
        self.two = _layer(width, width, flat)

    def forward(self, x: Tensor, known: Tensor) -> Tensor:
        scale, shift = self.film(known).view(len(x), -1, *[1] * (x.ndim - 2)).chunk(2, 1)
        inner = functional.silu(self.norm(x) * (1 + scale) + shift)
        return cast(Tensor, x + self.two(functional.silu(self.one(inner))))


class UNet(nn.Module):
    """Three levels for images (N, C, H, W), each of half the side of the one before."""

    def __init__(self, shape: tuple[int, ...], known: int, width: int) -> None:
        super().__init__()
        self.fold = 2 if min(shape[1:]) >= FOLDED else 1
        channels = shape[0] * self.fold**2
        sizes = (width, 2 * width, 4 * width)
        self.first = _layer(channels, width, False)
        self.last = _layer(width, channels, False)
        self.down = nn.ModuleList(DenoisingBlock(known, size, False) for size in sizes[:2])
        self.wider = nn.ModuleList(_layer(a, b, False) for a, b in pairwise(sizes))
        self.middle = nn.ModuleList(DenoisingBlock(known, sizes[2], False) for _ in range(2))
        self.narrower = nn.ModuleList(nn.Conv2d(b, a, 1) for a, b in pairwise(sizes))
        self.up = nn.ModuleList(DenoisingBlock(known, size, False) for size in sizes[:2])

    def forward(self, x: Tensor, known: Tensor) -> Tensor:
        height, width = x.shape[2:]
        side = 4 * self.fold
        x = functional.pad(x, (0, -width % side, 0, -height % side), mode="replicate")
        x = self.first(functional.pixel_unshuffle(x, self.fold))
        levels = []
        for block, wider in zip(self.down, self.wider, strict=True):
            levels.append(block(x, known))
            x = wider(functional.avg_pool2d(levels[-1], 2))
        for block in self.middle:
            x = block(x, known)
        for narrower, block in zip(reversed(self.narrower), reversed(self.up), strict=True):
            x = block(functional.interpolate(narrower(x), scale_factor=2.0) + levels.pop(), known)
        return functional.pixel_shuffle(self.last(x), self.fold)[:, :, :height, :width]


class Perceptron(nn.Module):
    """Residual layers for flattened inputs."""

    def __init__(self, shape: tuple[int, ...], known: int, width: int) -> None:
        super().__init__()
        size = math.prod(shape)
        self.first = nn.Linear(size, width)
        self.last = nn.Linear(width, size)
        self.blocks = nn.ModuleList(DenoisingBlock(known, width, True) for _ in range(3))

    def forward(self, x: Tensor, known: Tensor) -> Tensor:
        inner = self.first(x.flatten(1))
        for block in self.blocks:
            inner = block(inner, known)
        return cast(Tensor, self.last(inner).view(x.shape))


class Denoiser(nn.Module):
    """The mean of a standardized example, given a copy of it with Gaussian noise of a known level.

    Standardized: minus `center`, over `scale`, both of public examples. `classes`: how many classes
    it knows; 0: none.

    Source: inputs and outputs are scaled by the noise level as in Karras et al. 2022 (EDM).
    """

    center: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, ...], classes: int = 0, width: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.classes = classes
        self.width = width or UNITS[pictured(shape)]
        self.register_buffer("center", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))
        net = UNet if pictured(shape) else Perceptron
        self.net = net(shape, 2 * len(WAVES) + classes, self.width)

    def forward(self, x: Tensor, sigma: Tensor, labels: Tensor | None = None) -> Tensor:
        """Examples (N, *S) without their noise, whose standard deviations are `sigma` (N,)."""
        level = sigma.log() / 4
        known = [wave(level * k) for k in WAVES for wave in (torch.sin, torch.cos)]
        own = x.new_zeros(len(x), self.classes)
        if labels is not None and self.classes:
            own = functional.one_hot(labels, self.classes).to(x)
        wide = sigma.view(-1, *[1] * (x.ndim - 1))
        total = 1 + wide.square()
        out = self.net(x / total.sqrt(), torch.cat([torch.stack(known, 1), own], 1))
        return cast(Tensor, x / total + out * wide / total.sqrt())


def pictured(shape: tuple[int, ...]) -> bool:
    """Whether convolutions fit: images of 8 x 8 pixels or more."""
    return has_neighbors(shape) and min(shape[1:]) >= SMALLEST


def _layer(before: int, after: int, flat: bool) -> nn.Module:
    return nn.Linear(before, after) if flat else nn.Conv2d(before, after, 3, padding=1)
