"""The plain VGG networks of PriPrune's CIFAR-10 runs: VGG-4, VGG-6, VGG-9 and VGG-11."""

from __future__ import annotations

import torch
from torch import nn

from leakbound import check
from leakbound.models.conv import Stage, chosen, scaled, stacked


def _stages(*words: int | str) -> tuple[Stage, ...]:
    """3x3 convolutions of padding 1 with the given channels; "M" puts a pool after the last."""
    stages: list[Stage] = []
    for word in words:
        if isinstance(word, int):
            stages.append((word, 3, 1, False))
        else:
            stages[-1] = (*stages[-1][:3], True)
    return tuple(stages)


_STAGES: dict[int, tuple[Stage, ...]] = {
    4: _stages(64, "M", 128, "M"),
    6: _stages(64, "M", 128, "M", 256, "M", 512, "M"),
    9: _stages(64, "M", 128, "M", 256, "M", 512, "M", 512, 512, "M"),
    11: _stages(64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"),
}
_HIDDEN = {4: (128,), 6: (128,), 9: (256, 128), 11: (256, 128)}


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
    has no pool; here the fifth.

    The weights start by PyTorch's default law, at which the outputs of two images differ by about
    1e-2 (depth 4) to 1e-5 (depth 11): gradients leak little of an image until a model is trained.

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
    stages = chosen(_STAGES, depth)
    check.positive(width=width)
    hidden = [scaled(units, width) for units in _HIDDEN[depth]]
    return stacked(input_shape, classes, generator, stages, width, hidden, activation)
