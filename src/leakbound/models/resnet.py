"""ResNet-18 for small and for large images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leakbound import check
from leakbound.models import layers
from leakbound.models.init import initialized

_SMALLEST = {"small": 8, "large": 32}


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int, norm: str, activation: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = layers.norm(norm, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = layers.norm(norm, after)
        self.activation = layers.activation(activation)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), layers.norm(norm, after)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = self.shortcut(x)
        out = self.activation(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out = out + identity
        result: Tensor = self.activation(out)
        return result


def resnet18(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    generator: torch.Generator,
    norm: str = "group",
    stem: str = "small",
    width: int = 64,
    activation: str = "relu",
) -> nn.Module:
    """ResNet-18: four stages of two residual blocks, average pool, one linear layer.

    At width 64: 11,173,962 parameters on (3, 32, 32) with 10 classes and the small stem,
    11,689,512 with three channels, 1000 classes and the large stem, for either norm.

    Args:
        input_shape: (C, H, W) of one image.
        classes: the number of outputs.
        generator: where the initial weights come from.
        norm: "group" (every example for itself), "batch" (in eval mode),
            "batch_training" (statistics of the batch, which couples its examples) or "none".
        stem: "small" is one 3x3 convolution; "large" is 7x7 with stride 2, then a max pool.
        width: channels of the first stage; the later ones have 2, 4 and 8 times as many.
        activation: as for `mlp`.

    Raises:
        ValueError: a side under 8 pixels (small stem) or 32 (large).

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.
    """
    check.one_of(_SMALLEST, stem=stem)
    channels, *_ = layers.shape(input_shape, classes, smallest=_SMALLEST[stem])
    check.one_of(layers.NORMS, norm=norm)
    check.one_of(layers.ACTIVATIONS, activation=activation)
    check.count(width=width)

    def build() -> nn.Module:
        small = stem == "small"
        size, stride, padding = (3, 1, 1) if small else (7, 2, 3)
        parts: list[nn.Module] = [
            nn.Conv2d(channels, width, size, stride, padding, bias=False),
            layers.norm(norm, width),
            layers.activation(activation),
        ]
        if not small:
            parts.append(nn.MaxPool2d(3, 2, padding=1))
        before = width
        for stage in range(4):
            after = width * 2**stage
            parts.append(_Block(before, after, 1 if stage == 0 else 2, norm, activation))
            parts.append(_Block(after, after, 1, norm, activation))
            before = after
        pool = nn.AdaptiveAvgPool2d(1)
        return nn.Sequential(*parts, pool, nn.Flatten(), nn.Linear(before, classes))

    return initialized(build, generator)
