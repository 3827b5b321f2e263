"""A built-in vision transformer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from leakbound import check
from leakbound.models.blocks import IMAGE, checked_shape, initialized
from leakbound.models.language import TransformerBlock


class _VisionTransformer(nn.Module):
    """Patches, a class token and positions, then blocks; the class token's output is scored."""

    def __init__(
        self,
        channels: int,
        side: int,
        classes: int,
        patch: int,
        width: int,
        layers: int,
        heads: int,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.first = nn.Embedding(1, width)
        self.places = nn.Embedding(1 + (side // patch) ** 2, width)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, causal=False, rotary=False) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        first = self.first.weight.expand(len(x), 1, -1)
        x = torch.cat([first, x], 1) + self.places.weight
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x)[:, 0])
        return scores


def vit(
    *,
    input_shape: Sequence[int],
    classes: int,
    generator: torch.Generator,
    patch: int = 4,
    width: int = 96,
    layers: int = 3,
    heads: int = 4,
) -> nn.Module:
    """A vision transformer (pre-norm) on square patches, with learned positions and a class token.

    Args:
        input_shape: (C, H, W) of one square image.
        classes: the number of outputs.
        generator: the source of the initial weights.
        patch: side of a patch in pixels; it divides that of the image.
        width: of patches' vectors and layers.
        layers: number of blocks.
        heads: attention heads in each; they divide the width.

    Source: Dosovitskiy et al. 2021 (ViT), without dropout.

    Example:
        >>> model = vit(input_shape=(3, 32, 32), classes=10, generator=torch.Generator())
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    channels, height, side = checked_shape(input_shape, classes, form=IMAGE)
    check.count(patch=patch, width=width, layers=layers, heads=heads)
    if height != side or side % patch or width % heads:
        raise ValueError(
            f"input_shape is {tuple(input_shape)}, patch {patch}, width {width} and heads {heads}; "
            "give square images whose side is a multiple of patch, and a width that heads divides"
        )

    def build() -> nn.Module:
        return _VisionTransformer(channels, side, classes, patch, width, layers, heads)

    return initialized(build, generator)
