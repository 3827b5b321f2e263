"""Plain convolutional networks: one for digits, one for small color images."""

from __future__ import annotations

import torch
from torch import nn

from leakbound import check
from leakbound.models import layers
from leakbound.models.init import initialized

_WIDTHS = tuple(64 * factor for factor in (1, 2, 2, 4, 4, 4, 4, 4))
_POOL_AFTER = (5, 7)


def simple_convnet(
    *, input_shape: tuple[int, int, int], classes: int, generator: torch.Generator
) -> nn.Module:
    """Two 3x3 convolutions with max pools and two linear layers, LeakyReLU (slope 0.01) between.

    119,530 parameters on (1, 28, 28) with 10 classes.

    Raises:
        ValueError: images under 4 x 4 pixels (two pools halve each side).

    Example:
        >>> model = simple_convnet(input_shape=(1, 28, 28), classes=10, generator=torch.Generator())
        >>> sum(p.numel() for p in model.parameters())
        119530
    """
    channels, height, width = layers.shape(input_shape, classes, smallest=4)

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1),
            nn.LeakyReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.LeakyReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (height // 4) * (width // 4), 32),
            nn.LeakyReLU(),
            nn.Linear(32, classes),
        )

    return initialized(build, generator)


def convnet64(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    generator: torch.Generator,
    norm: str = "batch",
    activation: str = "leaky_relu",
) -> nn.Module:
    """Eight 3x3 convolutions of 64 to 256 channels with two 3x3 max pools and one linear layer.

    The ConvNet of Inverting Gradients at width 64: channels 64, 128, 128, 256 x 5, a pool after the
    sixth and the eighth convolution, each of which divides the sides by 3 (32 -> 10 -> 3).
    Parameters on (3, 32, 32) with 10 classes:

        norm      count      why
        "batch"   2,904,970  2,878,720 in convolutions, 3,200 in norms, 23,050 in the last layer
        "group"   2,904,970  group norm, too, has one scale and one shift a channel
        "none"    2,901,770  without the 2 x 1,600 scales and shifts

    Args:
        input_shape: (C, H, W) of one image.
        classes: the number of outputs.
        generator: where the initial weights come from.
        norm: "batch" (in eval mode, at running mean 0 and variance 1), "batch_training" (statistics
            of the batch, which couples its examples), "group" or "none".
        activation: as for `mlp`. The original code has "relu".

    Raises:
        ValueError: images under 9 x 9 pixels.

    Source: Geiping et al., "Inverting Gradients", NeurIPS 2020.
    """
    channels, height, width = layers.shape(input_shape, classes, smallest=9)
    check.one_of(layers.NORMS, norm=norm)
    check.one_of(layers.ACTIVATIONS, activation=activation)

    def build() -> nn.Module:
        parts: list[nn.Module] = []
        before = channels
        for index, after in enumerate(_WIDTHS):
            parts.append(nn.Conv2d(before, after, 3, padding=1))
            if norm != "none":
                parts.append(layers.norm(norm, after))
            parts.append(layers.activation(activation))
            if index in _POOL_AFTER:
                parts.append(nn.MaxPool2d(3))
            before = after
        features = before * (height // 9) * (width // 9)
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(features, classes))

    return initialized(build, generator)
