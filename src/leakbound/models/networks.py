"""Built-in networks: perceptrons, small convolutional networks, ResNet-18, and paper B's."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from leakbound import check
from leakbound.models.blocks import (
    ACTIVATIONS,
    NORMS,
    checked_shape,
    initialized,
)
from leakbound.models.blocks import (
    activation as new_activation,
)
from leakbound.models.blocks import (
    norm as new_norm,
)
from leakbound.random import normal


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
    widths = [math.prod(checked_shape(input_shape, classes)), *hidden]
    for width in hidden:
        check.count(hidden=width)
    check.one_of(ACTIVATIONS, activation=activation)

    def build() -> nn.Module:
        parts: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(widths):
            parts += [nn.Linear(before, after), new_activation(activation)]
        return nn.Sequential(*parts, nn.Linear(widths[-1], classes))

    return initialized(build, generator)


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
    of unit length and the summed square loss. The tensor attack needs this distribution of the
    weights; training does not start well from it.

    Args:
        input_shape: (C, H, W) of one image.
        classes: the number of outputs.
        generator: where the initial weights come from.
        width: hidden units.
        activation: as for `mlp`.

    Source: paper B, Section 3 and Assumption B.2.

    Example:
        >>> model = two_layer(input_shape=(1, 4, 4), classes=1, generator=torch.Generator())
        >>> sum(p.numel() for p in model.parameters())
        17408
    """
    inputs = math.prod(checked_shape(input_shape, classes))
    check.count(width=width)
    check.one_of(ACTIVATIONS, activation=activation)
    with torch.device("meta"):
        empty = nn.Sequential(
            OrderedDict(
                flatten=nn.Flatten(),
                inner=nn.Linear(inputs, width, bias=False),
                activation=new_activation(activation),
                outer=nn.Linear(width, classes, bias=False),
            )
        )
    model = empty.to_empty(device="cpu")
    with torch.no_grad():
        for parameter, spread in zip(model.parameters(), (1.0, 1 / width), strict=True):
            parameter.copy_(spread * normal(parameter.shape, generator, like=parameter))
    return model.eval()


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
    channels, height, width = checked_shape(input_shape, classes)

    def build() -> nn.Module:
        parts: list[nn.Module] = []
        for before, stride in ((channels, 2), (12, 2), (12, 1)):
            parts += [nn.Conv2d(before, 12, 5, stride, padding=2), nn.Sigmoid()]
        features = 12 * -(-height // 4) * -(-width // 4)
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(features, classes))

    return initialized(build, generator, bound=0.5)


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
    channels, height, width = checked_shape(input_shape, classes, smallest=4)

    def build() -> nn.Module:
        parts: list[nn.Module] = []
        for before, after in ((channels, 32), (32, 64)):
            parts += [nn.Conv2d(before, after, 3, padding=1), nn.LeakyReLU(), nn.MaxPool2d(2)]
        features = nn.Linear(64 * (height // 4) * (width // 4), 32)
        return nn.Sequential(*parts, nn.Flatten(), features, nn.LeakyReLU(), nn.Linear(32, classes))

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
    Parameters on (3, 32, 32) with 10 classes: 2,904,970, or 2,901,770 without a norm's 2 x 1,600
    scales and shifts.

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
    channels, height, width = checked_shape(input_shape, classes, smallest=9)
    check.one_of(NORMS, norm=norm)
    check.one_of(ACTIVATIONS, activation=activation)

    def build() -> nn.Module:
        parts: list[nn.Module] = []
        widths = (channels, 64, 128, 128, *[256] * 5)
        for number, (before, after) in enumerate(pairwise(widths), 1):
            parts.append(nn.Conv2d(before, after, 3, padding=1))
            if norm != "none":
                parts.append(new_norm(norm, after))
            parts.append(new_activation(activation))
            if number in (6, 8):
                parts.append(nn.MaxPool2d(3))
        features = widths[-1] * (height // 9) * (width // 9)
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(features, classes))

    return initialized(build, generator)


class _ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int, norm: str, activation: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = new_norm(norm, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = new_norm(norm, after)
        self.activation = new_activation(activation)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), new_norm(norm, after)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = self.shortcut(x)
        out = self.activation(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        result: Tensor = self.activation(out + identity)
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
    smallest = {"small": 8, "large": 32}
    check.one_of(smallest, stem=stem)
    channels, *_ = checked_shape(input_shape, classes, smallest=smallest[stem])
    check.one_of(NORMS, norm=norm)
    check.one_of(ACTIVATIONS, activation=activation)
    check.count(width=width)

    def build() -> nn.Module:
        size, stride, padding = (3, 1, 1) if stem == "small" else (7, 2, 3)
        parts: list[nn.Module] = [
            nn.Conv2d(channels, width, size, stride, padding, bias=False),
            new_norm(norm, width),
            new_activation(activation),
        ]
        if stem == "large":
            parts.append(nn.MaxPool2d(3, 2, padding=1))
        before = width
        for stage in range(4):
            after = width * 2**stage
            parts.append(_ResidualBlock(before, after, 2 if stage else 1, norm, activation))
            parts.append(_ResidualBlock(after, after, 1, norm, activation))
            before = after
        pool = nn.AdaptiveAvgPool2d(1)
        return nn.Sequential(*parts, pool, nn.Flatten(), nn.Linear(before, classes))

    return initialized(build, generator)


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

    Paper B inserts such a head into ResNet-18 with 512 features and a width of 16,384, and aims its
    feature attack at it. The initialization is the ordinary one; the attack builds the head that it
    needs. Parameters: the backbone's, `width` (features + 1) in `inner`, classes (width + 1) in
    `outer`. On (1, 28, 28) with 10 classes "convnet" has 55,104, and 231,242 with its head; on
    (3, 32, 32) with 10 classes, 512 features and width 16,384, "resnet18" has 11,431,488 and
    20,000,330.

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
    checked_shape(input_shape, classes)
    check.one_of(BACKBONES, backbone=backbone)
    check.one_of(ACTIVATIONS, activation=activation)
    check.one_of(NORMS, norm=norm)
    check.count(features=features, width=width)
    below = BACKBONES[backbone](
        input_shape=input_shape,
        classes=features,
        generator=generator,
        norm=norm,
        activation=activation,
    )

    def head() -> nn.Module:
        inner, outer = nn.Linear(features, width), nn.Linear(width, classes)
        return nn.Sequential(
            OrderedDict(inner=inner, activation=new_activation(activation), outer=outer)
        )

    above = initialized(head, generator)
    return nn.Sequential(OrderedDict(backbone=below, **dict(above.named_children()))).eval()


def _pooled_convnet(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    generator: torch.Generator,
    norm: str,
    activation: str,
) -> nn.Module:
    """The backbone "convnet".

    The features are a linear layer's outputs before any activation, and the norms are behind the
    pools: the attack cannot tell nearly collinear features apart. Mean cosine of 200 digits'
    features at 4 initializations: 0.32 to 0.60; 0.53 to 0.71 after a ReLU, where all lie in one
    orthant; 0.67 to 0.84 with norms before the activations.
    """
    channels, height, width = checked_shape(input_shape, classes, smallest=4)

    def build() -> nn.Module:
        parts: list[nn.Module] = []
        for before, after in ((channels, 16), (16, 32)):
            parts.append(nn.Conv2d(before, after, 3, padding=1))
            parts += [new_activation(activation), nn.AvgPool2d(2)]
            if norm != "none":
                parts.append(new_norm(norm, after))
        size = 32 * (height // 4) * (width // 4)
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(size, classes))

    return initialized(build, generator)


BACKBONES: dict[str, Callable[..., nn.Module]] = {
    "convnet": _pooled_convnet,
    "convnet64": convnet64,
    "resnet18": resnet18,
}
