"""The multilayer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from leakbound import check
from leakbound.models import layers
from leakbound.models.init import initialized


def mlp(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    generator: torch.Generator,
    hidden: Sequence[int] = (128,),
    activation: str = "relu",
) -> nn.Module:
    """Linear layers with an activation between them; `hidden` () is softmax regression.

    Args:
        input_shape: (C, H, W) of one image.
        classes: the number of outputs.
        generator: where the initial weights come from.
        hidden: the widths of the hidden layers.
        activation: "relu", "leaky_relu", "sigmoid", "tanh" or "gelu".

    Example:
        >>> model = mlp(input_shape=(1, 8, 8), classes=10, generator=torch.Generator())
        >>> sum(p.numel() for p in model.parameters())
        9610
    """
    widths = [math.prod(layers.shape(input_shape, classes)), *hidden]
    for width in hidden:
        check.count(hidden=width)
    check.one_of(layers.ACTIVATIONS, activation=activation)

    def build() -> nn.Module:
        parts: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(widths):
            parts += [nn.Linear(before, after), layers.activation(activation)]
        return nn.Sequential(*parts, nn.Linear(widths[-1], classes))

    return initialized(build, generator)
