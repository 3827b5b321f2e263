"""A built-in network that gives every pixel a class."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate

from leakbound import check
from leakbound.models.blocks import ACTIVATIONS, checked_shape, initialized, new_activation


class _Segmenter(nn.Module):
    """Two halvings and two doublings of the side, with the values of each side passed across."""

    def __init__(self, channels: int, classes: int, width: int, activation: str) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), new_activation(activation))

        self.first = block(channels, width)
        self.second = block(width, 2 * width)
        self.middle = block(2 * width, 2 * width)
        self.third = block(4 * width, width)
        self.last = block(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.first(x)
        half = self.second(avg_pool2d(whole, 2, ceil_mode=True))
        wide = self.middle(avg_pool2d(half, 2, ceil_mode=True))
        wide = self.third(torch.cat([interpolate(wide, size=half.shape[2:]), half], 1))
        wide = self.last(torch.cat([interpolate(wide, size=whole.shape[2:]), whole], 1))
        scores: Tensor = self.head(wide)
        return scores


def unet(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    generator: torch.Generator,
    width: int = 12,
    activation: str = "leaky_relu",
) -> nn.Module:
    """A small U-Net: images (N, C, H, W) to scores (N, K, H, W) of every pixel's class.

    Five 3x3 convolutions on three sizes, with average pools and nearest values between, and one 1x1
    convolution; no norm. The original has four halvings, two convolutions a size, and max pools.

    Args:
        input_shape: (C, H, W) of one image, of at least 4 x 4 pixels.
        classes: the number of classes of a pixel.
        generator: the source of the initial weights.
        width: channels of the largest size; the others have twice as many.
        activation: as for `mlp`.

    Source: Ronneberger, Fischer and Brox, "U-Net", MICCAI 2015.

    Example:
        >>> model = unet(input_shape=(1, 32, 32), classes=2, generator=torch.Generator())
        >>> model(torch.zeros(1, 1, 30, 32)).shape, sum(p.numel() for p in model.parameters())
        (torch.Size([1, 2, 30, 32]), 15770)
    """
    channels, *_ = checked_shape(input_shape, classes, smallest=4)
    check.count(width=width)
    check.one_of(ACTIVATIONS, activation=activation)
    return initialized(lambda: _Segmenter(channels, classes, width, activation), generator)
