"""The two-layer network of paper B's theory."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import nn

from leakbound import check
from leakbound.models import layers
from leakbound.random import normal


def two_layer(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    generator: torch.Generator,
    width: int = 1024,
    activation: str = "relu",
) -> nn.Module:
    """f(x) = A s(W x) without biases: W standard normal, A normal of standard deviation 1 / width.

    `width` (n + classes) parameters for n inputs. Paper B's theory is this with one output, images
    of unit length and the summed square loss; its law of the weights is what the tensor attack
    needs, and no law to train from.

    Args:
        input_shape: (C, H, W) of one image.
        classes: the number of outputs.
        generator: where the weights come from.
        width: hidden units.
        activation: as for `mlp`.

    Source: paper B, Section 3 and Assumption B.2.

    Example:
        >>> model = two_layer(input_shape=(1, 4, 4), classes=1, generator=torch.Generator())
        >>> sum(p.numel() for p in model.parameters())
        17408
    """
    inputs = math.prod(layers.shape(input_shape, classes))
    check.count(width=width)
    check.one_of(layers.ACTIVATIONS, activation=activation)
    with torch.device("meta"):
        empty = nn.Sequential(
            OrderedDict(
                flatten=nn.Flatten(),
                inner=nn.Linear(inputs, width, bias=False),
                activation=layers.activation(activation),
                outer=nn.Linear(width, classes, bias=False),
            )
        )
    model = empty.to_empty(device="cpu")
    with torch.no_grad():
        for parameter, spread in zip(model.parameters(), (1.0, 1 / width), strict=True):
            parameter.copy_(spread * normal(parameter.shape, generator, like=parameter))
    return model.eval()
