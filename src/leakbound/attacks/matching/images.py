"""The variables of a search: the pixels, or the weights of a network that draws the images."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call

from leakbound.attacks.base import domain_of, uniform_inputs
from leakbound.attacks.blind import public_examples
from leakbound.attacks.matching.settings import MatchingSettings
from leakbound.core import NotApplicable, Observation, Task
from leakbound.domains import TableDomain, smooth_axes
from leakbound.domains.known import KnownValues
from leakbound.randomness import normal, uniform

LEAK = 0.2
NEAR = 0.1
"""Spread of the starts of series around the mean public one, in units of its own. L-BFGS on an LSTM
ends at 0.97 of that mean's error from there, at 1.15 from a spread of 0.3, at 3.6 from standard
normal starts (4 series of 48 times).
"""


class Images:
    """Images (N, *S) as a differentiable function of the variables that are optimized."""

    variables: list[Tensor]

    def __call__(self) -> Tensor:
        raise NotImplementedError

    def settle(self, box: tuple[float, float] | None) -> None:
        """After a step: move values outside the box back into it; none are by default."""


class Pixels(Images):
    """Every input value is a variable."""

    def __init__(self, start: Tensor) -> None:
        self.start = start.requires_grad_()
        self.variables = [self.start]

    def __call__(self) -> Tensor:
        return self.start

    def settle(self, box: tuple[float, float] | None) -> None:
        if box is not None:
            with torch.no_grad():
                self.start.clamp_(*box)


class DeepPrior(Images):
    """An untrained network draws the images from fixed noise; the search moves its weights (Ulyanov
    et al. 2018; paper B, section 4.2).

    Two halvings and two doublings of the side with skips between them; group norm, so that images
    do not mix. The output passes a sigmoid, so it lies in the input range.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        box: tuple[float, float],
        width: int,
        generator: torch.Generator,
        like: Tensor,
    ) -> None:
        if len(shape) != 4 or min(shape[2:]) < 8:
            raise NotApplicable("a deep image prior needs images (C, H, W) of 8 x 8 pixels or more")
        self.box = box
        # Uniform up to 0.1, as in Ulyanov et al. 2018.
        self.noise = 0.1 * uniform((shape[0], width, *shape[2:]), generator, like=like)
        with torch.device("meta"):  # no draw from the global random state
            self.network = _UNet(width, shape[1])
        named = dict(self.network.named_parameters())
        self.names = list(named)
        self.variables = [drawn(name, p.shape, generator, like) for name, p in named.items()]

    def __call__(self) -> Tensor:
        low, high = self.box
        weights = dict(zip(self.names, self.variables, strict=True))
        output = functional_call(self.network, weights, (self.noise,))
        return low + (high - low) * output.sigmoid()


class MixedRows(Images):
    """Rows of a table: a softmax for every categorical column, free numbers in public units.

    A sigmoid for numbers saturates, so they are not bounded during the search.

    Source: Vero et al. 2023 (TabLeak), softmax structural prior.
    """

    def __init__(
        self,
        domain: TableDomain,
        start: Tensor,
        like: Tensor,
    ) -> None:
        self.groups = domain.groups
        center, scale = domain.typical
        self.center = center.to(like)
        self.scale = scale.to(like)
        self.logits = start.requires_grad_()
        self.variables = [self.logits]

    def __call__(self) -> Tensor:
        x = self.center + self.scale * self.logits
        if not self.groups:
            return x
        parts = []
        at = 0
        for start, stop in self.groups:
            parts += [x[:, at:start], self.logits[:, start:stop].softmax(-1)]
            at = stop
        return torch.cat([*parts, x[:, at:]], 1)


class PartlyKnown(Images):
    """Other images, in which the parts that the attacker has from elsewhere stand fixed."""

    def __init__(self, images: Images, known: KnownValues, like: Tensor) -> None:
        self.images = images
        self.mask = known.mask
        self.values = known.filled(like.new_zeros(len(known.values), *self.mask.shape))
        self.variables = images.variables

    def __call__(self) -> Tensor:
        return torch.where(self.mask, self.values, self.images())

    def settle(self, box: tuple[float, float] | None) -> None:
        self.images.settle(box)


class _UNet(nn.Module):
    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.first = _convolution(width, width)
        self.down = nn.ModuleList([_convolution(width, width) for _ in range(2)])
        self.up = nn.ModuleList([_convolution(2 * width, width) for _ in range(2)])
        self.last = nn.Conv2d(width, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.first(x)]
        for down in self.down:
            levels.append(down(nn.functional.avg_pool2d(levels[-1], 2, ceil_mode=True)))
        x = levels.pop()
        for up in self.up:
            beside = levels.pop()
            wide = nn.functional.interpolate(
                x,
                size=beside.shape[2:],
                mode="bilinear",
            )
            x = up(torch.cat([wide, beside], 1))
        return self.last(x)


def _convolution(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1),
        nn.GroupNorm(math.gcd(4, after), after),
        nn.LeakyReLU(LEAK),
    )


def drawn(
    name: str,
    shape: torch.Size,
    generator: torch.Generator,
    like: Tensor,
) -> Tensor:
    """Weights of variance 2 / fan-in, scales of 1, shifts of 0."""
    if len(shape) > 1:
        start = normal(shape, generator, like=like) * (2 / shape[1:].numel()) ** 0.5
    else:
        start = like.new_full(shape, float(name.endswith("weight")))
    return start.requires_grad_()


def images_for(
    settings: MatchingSettings,
    task: Task,
    observation: Observation,
    generator: torch.Generator,
) -> Images:
    images = _images_for(settings, task, observation, generator)
    if observation.known is None:
        return images
    return PartlyKnown(images, observation.known, task.parameters)


def _images_for(
    settings: MatchingSettings,
    task: Task,
    observation: Observation,
    generator: torch.Generator,
) -> Images:
    shape = observation.batch_shape
    like = task.parameters
    if settings.image == "deep_prior":
        return DeepPrior(shape, task.input_range, settings.width, generator, like)
    if settings.image == "mixed":
        start = 0.1 * normal(shape, generator, like=like)
        return MixedRows(domain_of(task, TableDomain), start, like)
    if settings.initialization == "normal":
        noise = normal(shape, generator, like=like)
        public = public_examples(observation)
        along_time = len(smooth_axes(observation.input_shape)) == 1
        if not along_time or public is None:
            return Pixels(noise)
        known = public.inputs.to(like)
        return Pixels(known.mean(0) + NEAR * known.std(0, correction=0) * noise)
    return Pixels(uniform_inputs(task, shape, generator))
