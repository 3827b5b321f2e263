"""The convolutional networks of PriPrune's FEMNIST runs: Conv-1, Conv-2, Conv-4 and Conv-6."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, pairwise

import torch
from torch import nn

from leakbound import check
from leakbound.models import layers
from leakbound.models.init import initialized

Stage = tuple[int, int, int, bool]
"""One convolution: its channels, kernel, padding, and whether a 2x2 max pool follows."""

_STAGES: dict[int, tuple[Stage, ...]] = {
    1: ((8, 3, 2, True),),
    2: ((32, 5, 2, True), (64, 5, 2, True)),
    4: ((32, 5, 2, True), (64, 5, 2, True), (128, 3, 2, False), (256, 3, 2, True)),
    6: (
        (32, 5, 2, True),
        (64, 5, 2, True),
        (128, 3, 2, True),
        (256, 3, 2, True),
        (512, 3, 2, False),
        (1024, 3, 2, True),
    ),
}


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

    The paper describes depth 2 and gives no more than the counts of the others. Their layouts were
    found from the counts: with 2048 hidden units these kernels and channels give them exactly.
    Paddings and places of the pools leave a choice: padding 2 everywhere, early pools.

    The weights start by PyTorch's default law, at which depth 4 and 6 hardly tell images apart:
    plain SGD may stay at chance for long; Adam does not.

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
    stages = chosen(_STAGES, depth)
    check.positive(width=width)
    if hidden is None:
        hidden = scaled(2048, width)
    return stacked(input_shape, classes, generator, stages, width, (hidden,), activation)


def chosen(table: dict[int, tuple[Stage, ...]], depth: int) -> tuple[Stage, ...]:
    """The layout of the given depth, or a ValueError that lists the depths."""
    if isinstance(depth, bool) or not isinstance(depth, int) or depth not in table:
        raise ValueError(f"depth is {depth!r}; give one of {', '.join(map(str, table))}")
    return table[depth]


def scaled(units: int, width: float) -> int:
    """`units` times `width`, rounded, at least 1."""
    return max(1, round(units * width))


def stacked(
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
    channels, height, columns = layers.shape(input_shape, classes, smallest=smallest)
    check.one_of(layers.ACTIVATIONS, activation=activation)
    for units in hidden:
        check.count(hidden=units)

    def build() -> nn.Module:
        parts: list[nn.Module] = []
        before = channels
        for units, kernel, padding, pool in stages:
            after = scaled(units, width)
            parts.append(nn.Conv2d(before, after, kernel, padding=padding))
            parts.append(layers.activation(activation))
            if pool:
                parts.append(nn.MaxPool2d(2))
            before = after
        parts.append(nn.Flatten())
        features = before * _after(height, stages) * _after(columns, stages)
        for inputs, outputs in pairwise((features, *hidden)):
            parts += [nn.Linear(inputs, outputs), layers.activation(activation)]
        return nn.Sequential(*parts, nn.Linear(hidden[-1], classes))

    return initialized(build, generator)


def _after(side: int, stages: Iterable[Stage]) -> int:
    for _, kernel, padding, pool in stages:
        side += 2 * padding - kernel + 1
        if pool:
            side //= 2
        if side < 1:
            return 0
    return side
