"""The small sigmoid network on which gradient inversion was first shown."""

from __future__ import annotations

import torch
from torch import nn

from leakbound.models import layers
from leakbound.models.init import initialized

_CHANNELS = 12


def lenet(
    *, input_shape: tuple[int, int, int], classes: int, generator: torch.Generator
) -> nn.Module:
    """The LeNet of Deep Leakage from Gradients: three 5x5 convolutions, sigmoids, one linear layer.

    All weights and biases are uniform in +-0.5, far wider than usual: the attack's published
    success rests on it. Any input size works.

    Source: Zhu, Liu and Han, "Deep Leakage from Gradients", NeurIPS 2019.

    Example:
        >>> model = lenet(input_shape=(3, 32, 32), classes=100, generator=torch.Generator())
        >>> sum(p.numel() for p in model.parameters())
        85036
    """
    channels, height, width = layers.shape(input_shape, classes)
    features = _CHANNELS * -(-height // 4) * -(-width // 4)

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, _CHANNELS, 5, stride=2, padding=2),
            nn.Sigmoid(),
            nn.Conv2d(_CHANNELS, _CHANNELS, 5, stride=2, padding=2),
            nn.Sigmoid(),
            nn.Conv2d(_CHANNELS, _CHANNELS, 5, stride=1, padding=2),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(features, classes),
        )

    return initialized(build, generator, bound=0.5)
