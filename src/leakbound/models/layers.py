"""What the builders share: the check of their arguments, activations and norms by name."""

from __future__ import annotations

import math

from torch import nn

from leakbound import check

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
}
"""Activations by name; LeakyReLU's slope is PyTorch's default 0.01. None works in place."""

NORMS = ("batch", "batch_training", "group", "none")


def shape(input_shape: tuple[int, int, int], classes: int, smallest: int = 1) -> tuple[int, ...]:
    """`input_shape` as (C, H, W), after a check of it and of `classes`.

    Raises:
        ValueError: not three whole numbers above 0, or a side below `smallest`.
    """
    check.count(classes=classes)
    numbers = tuple(input_shape)
    if len(numbers) != 3 or any(
        isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numbers
    ):
        raise ValueError(
            f"input_shape is {input_shape!r}; give (channels, height, width), whole numbers above 0"
        )
    if min(numbers[1:]) < smallest:
        raise ValueError(
            f"input_shape is {input_shape!r}; this model takes images of at least "
            f"{smallest} x {smallest} pixels: resize them or choose a smaller model"
        )
    return numbers


def activation(name: str) -> nn.Module:
    """A new activation module of the given name."""
    check.one_of(ACTIVATIONS, activation=name)
    return ACTIVATIONS[name]()


def norm(name: str, channels: int) -> nn.Module:
    """A new norm over `channels`: "batch", "batch_training", "group" or "none".

    "batch" has running statistics, as in eval mode; "batch_training" takes those of the batch.
    Group norm has 32 groups, or the largest power of two below that divides `channels`, and at
    least two channels a group: of one channel at one pixel, nothing but the shift would be left.
    """
    check.one_of(NORMS, norm=name)
    if name.startswith("batch"):
        return nn.BatchNorm2d(channels, track_running_stats=name == "batch")
    groups = math.gcd(32, channels)
    if groups == channels > 1:
        groups //= 2
    return nn.GroupNorm(groups, channels) if name == "group" else nn.Identity()
