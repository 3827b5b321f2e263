"""The networks of PriPrune's runs: Conv-1 to Conv-6 on FEMNIST, VGG-4 to VGG-11 on CIFAR-10."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, pairwise

import torch
from torch import nn

from leakbound import check
from leakbound.models.blocks import (
    ACTIVATIONS,
    checked_shape,
    initialized,
)
from leakbound.models.blocks import (
    activation as new_activation,
)

Stage = tuple[int, int, int, bool]
"""One convolution: its channels, kernel, padding, and whether a 2x2 max pool follows."""


def conv(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    generator: torch.Generator,
    depth: int = 2,
    width: float = 1.0,
    hidden: int | None = None,
    activation: str = "relu",
) -> nn.Module:
    """`depth` convolutions of padding 2 with 2x2 max pools, one hidden linear layer, one output.

    Parameters on (1, 28, 28) with 62 classes, those that the paper states; M is a pool:

        depth  count       convolutions
        1       3,815,566  3x3: 8 M
        2       6,603,710  5x5: 32 M 64 M
        4      13,657,406  5x5: 32 M 64 M, 3x3: 128 256 M
        6      25,324,350  5x5: 32 M 64 M, 3x3: 128 M 256 M 512 1024 M

    The paper describes depth 2 and only counts the parameters of the others. With 2048 hidden units
    these kernels and channels give its counts exactly. Paddings and places of the pools are our
    choice: padding 2 everywhere, early pools. The weights start by PyTorch's default distribution,
    at which depth 4 and 6 hardly distinguish images: plain SGD may stay at chance for long; Adam
    does not.

    Args:
        input_shape: (C, H, W) of one image.
        classes: the number of outputs.
        generator: where the initial weights come from.
        depth: the number of convolutions: 1, 2, 4 or 6.
        width: the factor on the channels and the hidden units, each rounded, at least 1.
        hidden: hidden units; None: 2048 times `width`.
        activation: as for `mlp`.

    Raises:
        ValueError: another depth, or images under 4 x 4 pixels (any size at depth 1).

    Source: paper D, Section 4 and appendix C.1.

    Example:
        >>> given = dict(input_shape=(1, 28, 28), generator=torch.Generator())
        >>> sum(p.numel() for p in conv(classes=62, **given).parameters())
        6603710
        >>> small = conv(classes=10, width=0.25, hidden=32, **given)
        >>> sum(p.numel() for p in small.parameters())
        28874
    """
    stages = _chosen(_CONV, depth)
    check.positive(width=width)
    units = _scaled(2048, width) if hidden is None else hidden
    return _stacked(input_shape, classes, generator, stages, width, (units,), activation)


def vgg(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    generator: torch.Generator,
    depth: int = 11,
    width: float = 1.0,
    activation: str = "relu",
) -> nn.Module:
    """3x3 convolutions of padding 1 with 2x2 max pools, then two or three linear layers; no norm.

    Parameters on (3, 32, 32) with 10 classes, those that the paper states; M is a pool:

        depth  count      convolutions                                  hidden linear layers
        4      1,125,642  64 M 128 M                                    128
        6      1,814,538  64 M 128 M 256 M 512 M                        128
        9      6,436,106  64 M 128 M 256 M 512 M 512 512 M              256, 128
        11     9,385,994  64 M 128 M 256 256 M 512 512 M 512 512 M      256, 128

    The paper gives no more than counts and numbers of layers. Its VGG-4 has one convolution by the
    text, but two by the count and the name. At depth 9 the count leaves open which convolution
    has no pool; here the fifth. The weights start by PyTorch's default distribution, at which the
    outputs of two images differ by about 1e-2 (depth 4) to 1e-5 (depth 11): gradients leak little
    of an image until a model is trained.

    Args:
        input_shape: (C, H, W) of one image.
        classes: the number of outputs.
        generator: where the initial weights come from.
        depth: the number of layers with weights: 4, 6, 9 or 11.
        width: the factor on the channels and the hidden units, each rounded, at least 1.
        activation: as for `mlp`.

    Raises:
        ValueError: another depth, or a side under 4 pixels (depth 4), 16 (6) or 32 (9 and 11).

    Source: paper D, Section 4 and appendix C.1; Simonyan and Zisserman, ICLR 2015.

    Example:
        >>> model = vgg(input_shape=(3, 32, 32), classes=10, generator=torch.Generator())
        >>> sum(p.numel() for p in model.parameters())
        9385994
    """
    stages = _chosen(_VGG, depth)
    check.positive(width=width)
    hidden = [_scaled(units, width) for units in ((128,) if depth < 9 else (256, 128))]
    return _stacked(input_shape, classes, generator, stages, width, hidden, activation)


def _stages(kernel: int, padding: int, words: str) -> tuple[Stage, ...]:
    """Convolutions with the given channels; "M" puts a pool after the last."""
    stages: list[Stage] = []
    for word in words.split():
        if word == "M":
            stages[-1] = (*stages[-1][:3], True)
        else:
            stages.append((int(word), kernel, padding, False))
    return tuple(stages)


_WIDE = _stages(5, 2, "32 M 64 M")
_CONV = {
    1: _stages(3, 2, "8 M"),
    2: _WIDE,
    4: (*_WIDE, *_stages(3, 2, "128 256 M")),
    6: (*_WIDE, *_stages(3, 2, "128 M 256 M 512 1024 M")),
}
_VGG = {
    4: _stages(3, 1, "64 M 128 M"),
    6: _stages(3, 1, "64 M 128 M 256 M 512 M"),
    9: _stages(3, 1, "64 M 128 M 256 M 512 M 512 512 M"),
    11: _stages(3, 1, "64 M 128 M 256 256 M 512 512 M 512 512 M"),
}


def _chosen(table: dict[int, tuple[Stage, ...]], depth: int) -> tuple[Stage, ...]:
    if isinstance(depth, bool) or not isinstance(depth, int) or depth not in table:
        raise ValueError(f"depth is {depth!r}; give one of {', '.join(map(str, table))}")
    return table[depth]


def _scaled(units: int, width: float) -> int:
    return max(1, round(units * width))


def _stacked(
    input_shape: tuple[int, int, int],
    classes: int,
    generator: torch.Generator,
    stages: Sequence[Stage],
    width: float,
    hidden: Sequence[int],
    activation: str,
) -> nn.Module:
    """Convolutions of `width` times the stages' channels, then linear layers with `hidden` units.

    Raises:
        ValueError: an image too small for the pools (it names the least size), a wrong activation,
            or `hidden` below 1.
    """
    smallest = next(side for side in count(1) if _after(side, stages) > 0)
    channels, height, columns = checked_shape(input_shape, classes, smallest=smallest)
    check.one_of(ACTIVATIONS, activation=activation)
    for units in hidden:
        check.count(hidden=units)

    def build() -> nn.Module:
        parts: list[nn.Module] = []
        before = channels
        for units, kernel, padding, pool in stages:
            after = _scaled(units, width)
            parts.append(nn.Conv2d(before, after, kernel, padding=padding))
            parts.append(new_activation(activation))
            if pool:
                parts.append(nn.MaxPool2d(2))
            before = after
        parts.append(nn.Flatten())
        features = before * _after(height, stages) * _after(columns, stages)
        for inputs, outputs in pairwise((features, *hidden)):
            parts += [nn.Linear(inputs, outputs), new_activation(activation)]
        return nn.Sequential(*parts, nn.Linear(hidden[-1], classes))

    return initialized(build, generator)


def _after(side: int, stages: Iterable[Stage]) -> int:
    """The side of an image after the stages; 0 where one leaves nothing."""
    for _, kernel, padding, pool in stages:
        side += 2 * padding - kernel + 1
        if pool:
            side //= 2
        if side < 1:
            return 0
    return side
