"""A convolutional network with a wide head: what paper B's feature attack is aimed at."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from leakbound import check
from leakbound.models import layers
from leakbound.models.convnet import convnet64
from leakbound.models.init import initialized
from leakbound.models.resnet import resnet18

BACKBONES = ("convnet", "convnet64", "resnet18")


def headed(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    generator: torch.Generator,
    backbone: str = "convnet",
    features: int = 32,
    width: int = 4096,
    activation: str = "relu",
    norm: str = "group",
) -> nn.Module:
    """A backbone to `features` numbers, then Linear to `width`, an activation, Linear to classes.

    Paper B inserts such a head into ResNet-18 with 512 features and a width of 16,384. The features
    are a linear layer's outputs *before* any activation: after a ReLU all lie in one orthant, and
    features that are nearly collinear cannot be told apart. For the same reason "convnet" has its
    norms behind the pools. Mean cosine of 200 digits' features at 4 initializations: 0.32 to 0.60;
    0.53 to 0.71 after a ReLU; 0.67 to 0.84 with norms before the activations. The initialization is
    the ordinary one; the head that the attack needs is planted by it.

    Parameters: the backbone's, `width` (features + 1) in `inner`, classes (width + 1) in `outer`.
    On (1, 28, 28) with 10 classes "convnet" has 55,104, and 231,242 with its head; on (3, 32, 32)
    with 10 classes, 512 features and width 16,384, "resnet18" has 11,431,488 and 20,000,330.

    Args:
        input_shape: (C, H, W) of one image.
        classes: the number of outputs.
        generator: where the initial weights come from.
        backbone: "convnet" is two 3x3 convolutions of 16 and 32 channels, each with a 2x2 average
            pool; "convnet64" and "resnet18" are the models of that name, their last layer giving
            the features.
        features: n, what enters the head.
        width: M, the head's hidden units.
        activation: of the head and the backbone, as for `mlp`.
        norm: of the backbone: "group", "batch" (in eval mode) or "none".

    Raises:
        ValueError: images too small for the backbone (4, 9 or 8 pixels a side).

    Source: paper B, Section 4 and appendix F.

    Example:
        >>> model = headed(input_shape=(1, 28, 28), classes=10, generator=torch.Generator())
        >>> model.inner, model.outer.out_features
        (Linear(in_features=32, out_features=4096, bias=True), 10)
    """
    layers.shape(input_shape, classes)
    check.one_of(BACKBONES, backbone=backbone)
    check.one_of(layers.ACTIVATIONS, activation=activation)
    check.one_of(layers.NORMS, norm=norm)
    check.count(features=features, width=width)
    below = _backbone(backbone, input_shape, features, generator, activation, norm)
    head = initialized(lambda: _head(features, width, classes, activation), generator)
    return nn.Sequential(OrderedDict(backbone=below, **dict(head.named_children()))).eval()


def _head(features: int, width: int, classes: int, activation: str) -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            inner=nn.Linear(features, width),
            activation=layers.activation(activation),
            outer=nn.Linear(width, classes),
        )
    )


def _backbone(
    name: str,
    input_shape: tuple[int, int, int],
    features: int,
    generator: torch.Generator,
    activation: str,
    norm: str,
) -> nn.Module:
    if name != "convnet":
        build = convnet64 if name == "convnet64" else resnet18
        return build(
            input_shape=input_shape,
            classes=features,
            generator=generator,
            norm=norm,
            activation=activation,
        )
    channels, height, width = layers.shape(input_shape, features, smallest=4)

    def small() -> nn.Module:
        parts: list[nn.Module] = []
        for before, after in ((channels, 16), (16, 32)):
            parts.append(nn.Conv2d(before, after, 3, padding=1))
            parts += [layers.activation(activation), nn.AvgPool2d(2)]
            if norm != "none":
                parts.append(layers.norm(norm, after))
        size = 32 * (height // 4) * (width // 4)
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(size, features))

    return initialized(small, generator)
