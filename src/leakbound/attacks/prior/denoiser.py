"""A small denoiser of public examples, a U-Net of images or else a perceptron; its training."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from leakbound import check
from leakbound._util import optimizers
from leakbound._util.modules import unfilled
from leakbound.core import Batch
from leakbound.domains import has_neighbors
from leakbound.randomness import normal, stream, uniform

UNITS = {True: 32, False: 128}
"""Channels at the first level for pictures; units of a layer for everything else."""
SMALLEST = 8
FOLDED = 16
"""Sides of images from which convolutions fit, and from which they work at half the resolution."""
# The noise level enters as sines and cosines of these frequencies.
WAVES = (1.0, 2.0, 4.0, 8.0)


class DenoisingBlock(nn.Module):
    """A residual block of two layers; `known` (noise level, class) shifts and scales channels."""

    def __init__(
        self,
        known: int,
        width: int,
        flat: bool,
    ) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1 if flat else math.gcd(8, width), width)
        self.film = nn.Linear(known, 2 * width)
        self.one = _layer(width, width, flat)
        self.two = _layer(width, width, flat)

    def forward(self, x: Tensor, known: Tensor) -> Tensor:
        scale, shift = self.film(known).view(len(x), -1, *[1] * (x.ndim - 2)).chunk(2, 1)
        inner = functional.silu(self.norm(x) * (1 + scale) + shift)
        return x + self.two(functional.silu(self.one(inner)))


class UNet(nn.Module):
    """Three levels for images (N, C, H, W), each of half the side of the one before."""

    def __init__(
        self,
        shape: tuple[int, ...],
        known: int,
        width: int,
    ) -> None:
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
        # Folding and two halvings need sides that they divide.
        side = 4 * self.fold
        x = functional.pad(
            x,
            (0, -width % side, 0, -height % side),
            mode="replicate",
        )
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

    def __init__(
        self,
        shape: tuple[int, ...],
        known: int,
        width: int,
    ) -> None:
        super().__init__()
        size = math.prod(shape)
        self.first = nn.Linear(size, width)
        self.last = nn.Linear(width, size)
        self.blocks = nn.ModuleList(DenoisingBlock(known, width, True) for _ in range(3))

    def forward(self, x: Tensor, known: Tensor) -> Tensor:
        inner = self.first(x.flatten(1))
        for block in self.blocks:
            inner = block(inner, known)
        return self.last(inner).view(x.shape)


class Denoiser(nn.Module):
    """The mean of a standardized example, given a copy of it with Gaussian noise of a known level.

    Standardized: minus `center`, over `scale`, both of public examples. `classes`: how many classes
    it knows; 0: none.

    Source: inputs and outputs are scaled by the noise level as in Karras et al. 2022 (EDM).
    """

    center: Tensor
    scale: Tensor

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int = 0,
        width: int = 0,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.classes = classes
        self.width = width or UNITS[pictured(shape)]
        self.register_buffer("center", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))
        net = UNet if pictured(shape) else Perceptron
        self.net = net(shape, 2 * len(WAVES) + classes, self.width)

    def forward(
        self,
        x: Tensor,
        sigma: Tensor,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Examples (N, *S) without their noise, whose standard deviations are `sigma` (N,)."""
        # EDM's input for the level: ln(sigma) / 4.
        level = sigma.log() / 4
        known = [wave(level * k) for k in WAVES for wave in (torch.sin, torch.cos)]
        labeled = x.new_zeros(len(x), self.classes)
        if labels is not None and self.classes:
            labeled = functional.one_hot(labels, self.classes).to(x)
        wide = sigma.view(-1, *[1] * (x.ndim - 1))
        total = 1 + wide.square()
        out = self.net(x / total.sqrt(), torch.cat([torch.stack(known, 1), labeled], 1))
        return x / total + out * wide / total.sqrt()


def pictured(shape: tuple[int, ...]) -> bool:
    """Whether convolutions fit: images of 8 x 8 pixels or more."""
    return has_neighbors(shape) and min(shape[1:]) >= SMALLEST


def _layer(
    before: int,
    after: int,
    flat: bool,
) -> nn.Module:
    return nn.Linear(before, after) if flat else nn.Conv2d(before, after, 3, padding=1)


LEAST = 0.01
MOST = 8.0
"""Noise levels, in standard deviations of the public examples."""
# Adam on 64 examples a step; the rate rises over the first steps, then falls along a cosine.
BATCH = 64
RATE = 2e-3
WARM = 50
DECAY = {True: 0.01, False: 1.0}
"""Of weights, for pictures and for everything else: without it a perceptron overfits to a few
hundred rows, and then moves other rows by more than their noise.
"""
SLOW = 0.99
"""How slowly the answer's weights follow those of the training."""
UNLABELED = 0.15
"""Share of the steps without labels, so that it also denoises examples of unknown classes."""

Watch = Callable[[int, float], bool]
"""Called after every step with the steps so far and the loss; True ends the training."""


def train_prior(
    public: Batch,
    *,
    classes: int = 0,
    steps: int = 2400,
    width: int = 0,
    seed: int = 0,
    watch: Watch | None = None,
) -> Denoiser:
    """Train a small denoiser on public examples: what it learns is a prior on private ones.

    Each step denoises 64 examples at noise levels drawn log-uniformly. The answer has the moving
    average of the weights, so a training that `watch` ends early is usable.

    Args:
        public: examples (N, *S) of real numbers, and their labels.
        classes: the number of classes, if labels (N,) are classes; 0: labels are not used.
        steps: training steps; 2,400 for images of 28 x 28 take some minutes on one CPU core.
        width: channels of the first level for images (default 32), units for others (128).
        seed: names the draws; the same seed gives the same weights on one machine.
        watch: called after every step with the steps so far and the loss; True ends the training.

    Source: denoising score matching (Vincent 2011), weighted as in Karras et al. 2022.

    Example:
        >>> public = Batch(torch.rand(20, 4), torch.zeros(20, dtype=torch.long))
        >>> prior = train_prior(public, steps=10, width=8)
        >>> prior(torch.zeros(2, 4), torch.ones(2)).shape
        torch.Size([2, 4])
    """
    check.count(steps=steps)
    if not public.inputs.is_floating_point() or len(public.inputs) < 2:
        raise ValueError("public has no numbers to denoise; give two or more examples of numbers")
    inputs = public.inputs.detach().cpu().float()
    labels = public.labels.cpu()
    labeled = bool(classes) and labels.ndim == 1 and not labels.is_floating_point()
    source = stream(seed, "learned prior")
    model = unfilled(lambda: Denoiser(tuple(inputs.shape[1:]), classes if labeled else 0, width))
    _begin(model, inputs, source)
    known = (inputs - model.center) / model.scale
    slow = [p.detach().clone() for p in model.parameters()]
    optimizer = optimizers.AdamW(
        model.parameters(),
        lr=RATE,
        weight_decay=DECAY[pictured(model.shape)],
        betas=(0.9, 0.99),
        fused=True,
    )
    for step in range(steps):
        loss = _loss(model, known, labels if labeled else None, source)
        rate = 0.5 * RATE * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / WARM)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # The average is short at first, so that the initial weights do not stay in it.
        share = 1 - min(SLOW, (step + 1) / (step + 10))
        torch._foreach_lerp_(slow, [p.detach() for p in model.parameters()], share)
        if watch is not None and watch(step + 1, float(loss.detach())):
            break
    with torch.no_grad():
        for p, average in zip(model.parameters(), slow, strict=True):
            p.copy_(average)
    return model.eval().requires_grad_(False)


def _loss(
    model: Denoiser,
    known: Tensor,
    labels: Tensor | None,
    source: torch.Generator,
) -> Tensor:
    """Of denoising some of the examples, at levels drawn log-uniformly."""
    at = (uniform((BATCH,), source) * len(known)).long()
    clean = known[at]
    low = math.log(LEAST)
    high = math.log(MOST)
    sigma = (low + (high - low) * uniform((BATCH,), source)).exp()
    wide = sigma.view(-1, *[1] * (clean.ndim - 1))
    if labels is not None:
        labels = labels[at] if uniform((1,), source) >= UNLABELED else None
    denoised = model(clean + wide * normal(clean.shape, source), sigma, labels)
    # EDM's weight, for data of variance 1.
    return ((denoised - clean).square() * (1 + 1 / wide.square())).mean()


def _begin(
    model: Denoiser,
    inputs: Tensor,
    source: torch.Generator,
) -> None:
    """Draw the weights, and measure what standardizes examples."""
    axes = (0, *range(2, inputs.ndim)) if pictured(model.shape) else (0,)
    center = inputs.mean(axes, keepdim=True)[0]
    scale = (inputs - center).square().mean(axes, keepdim=True)[0].sqrt()
    least = max(1e-6, 1e-3 * float(scale.max()))  # a column that is constant in public
    with torch.no_grad():
        model.center.copy_(center.expand(model.shape))
        model.scale.copy_(scale.clamp_min(least).expand(model.shape))
        for name, p in model.named_parameters():
            if p.ndim < 2:
                p.fill_(float(name.endswith("norm.weight")))
            elif ".two." in name or ".last." in name:
                p.zero_()  # blocks begin as the identity, and the answer as a linear shrinkage
            else:
                p.copy_(normal(p.shape, source) * p.shape[1:].numel() ** -0.5)
