"""Built-in networks: perceptrons, small convolutional ones, ResNet-18, a U-Net, the papers'."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count, pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate

from leakbound import check
from leakbound._util.modules import unfilled
from leakbound.models.blocks import (
    ACTIVATIONS,
    checked_shape,
    initialized,
    new_activation,
    new_norm,
)
from leakbound.randomness import normal


def mlp(
    *,
    input_shape: Sequence[int],
    classes: int,
    generator: torch.Generator,
    hidden: Sequence[int] = (128,),
    activation: str = "relu",
) -> nn.Module:
    """Linear layers with an activation between them; `hidden` () is softmax regression.

    Args:
        input_shape: of one example, such as (C, H, W), (C, T) or (n,).
        classes: the number of outputs.
        generator: the source of the initial weights.
        hidden: the widths of the hidden layers.
        activation: "relu", "leaky_relu", "sigmoid", "tanh" or "gelu".

    Example:
        >>> model = mlp(input_shape=(1, 8, 8), classes=10, generator=torch.Generator())
        >>> sum(p.numel() for p in model.parameters())
        9610
    """
    widths = [
        math.prod(checked_shape(input_shape, classes, form=None)),
        *hidden,
    ]
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
    input_shape: Sequence[int],
    classes: int,
    generator: torch.Generator,
    width: int = 1024,
    activation: str = "relu",
) -> nn.Module:
    """f(x) = A s(W x) without biases: W standard normal, A normal of standard deviation 1 / width.

    `width` (n + classes) parameters for n inputs. Paper B's theory is this network with one output,
    images of unit length and the summed square loss. The tensor attack needs this distribution of
    the weights; training does not start well from it.

    Args:
        input_shape: of one example, such as (C, H, W), (C, T) or (n,).
        classes: the number of outputs.
        generator: the source of the initial weights.
        width: hidden units.
        activation: as for `mlp`.

    Source: paper B, section 2 and assumption B.2.

    Example:
        >>> model = two_layer(input_shape=(1, 4, 4), classes=1, generator=torch.Generator())
        >>> sum(p.numel() for p in model.parameters())
        17408
    """
    inputs = math.prod(checked_shape(input_shape, classes, form=None))
    check.count(width=width)
    model = unfilled(
        lambda: nn.Sequential(
            OrderedDict(
                flatten=nn.Flatten(),
                inner=nn.Linear(inputs, width, bias=False),
                activation=new_activation(activation),
                outer=nn.Linear(width, classes, bias=False),
            )
        )
    )
    with torch.no_grad():
        for parameter, spread in zip(model.parameters(), (1.0, 1 / width), strict=True):
            parameter.copy_(spread * normal(parameter.shape, generator, like=parameter))
    return model.eval()


def lenet(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    generator: torch.Generator,
) -> nn.Module:
    """The LeNet of Deep Leakage from Gradients: three 5x5 convolutions, sigmoids, one linear layer.

    All weights and biases are uniform in +-0.5, far wider than usual; the attack's published
    success depends on it. Any input size works.

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
            parts += [
                nn.Conv2d(before, 12, 5, stride, padding=2),
                nn.Sigmoid(),
            ]
        # Two strides of 2 with padding 2 round up.
        features = 12 * -(-height // 4) * -(-width // 4)
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(features, classes))

    return initialized(build, generator, bound=0.5)


def simple_convnet(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    generator: torch.Generator,
) -> nn.Module:
    """Two 3x3 convolutions with max pools and two linear layers, LeakyReLU (slope 0.01) between.

    119,530 parameters on (1, 28, 28) with 10 classes; images have at least 4 x 4 pixels.

    Example:
        >>> model = simple_convnet(input_shape=(1, 28, 28), classes=10, generator=torch.Generator())
        >>> sum(p.numel() for p in model.parameters())
        119530
    """
    return _stacked(
        input_shape, classes, generator, "3x3: 32 M 64 M", hidden=(32,), activation="leaky_relu"
    )


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
    scales and shifts. Images have at least 9 x 9 pixels.

    Args:
        input_shape: (C, H, W) of one image.
        classes: the number of outputs.
        generator: the source of the initial weights.
        norm: "batch" (in eval mode, at running mean 0 and variance 1), "batch_training" (statistics
            of the batch, which couples its examples), "group" or "none".
        activation: as for `mlp`. The original code has "relu".

    Source: Geiping et al., "Inverting Gradients", NeurIPS 2020.
    """
    layers = "3x3: 64 128 128 256 256 256 M3 256 256 M3"
    return _stacked(
        input_shape,
        classes,
        generator,
        layers,
        norm=norm,
        activation=activation,
    )


class _ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(
        self,
        before: int,
        after: int,
        stride: int,
        norm: str,
        activation: str,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = new_norm(norm, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = new_norm(norm, after)
        self.activation = new_activation(activation)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False),
                new_norm(norm, after),
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = self.shortcut(x)
        out = self.activation(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return self.activation(out + identity)


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
        input_shape: (C, H, W) of one image, of at least 8 pixels a side, or 32 with the large stem.
        classes: the number of outputs.
        generator: the source of the initial weights.
        norm: "group" (each example separately), "batch" (in eval mode), "batch_training"
            (statistics of the batch, which couples its examples) or "none".
        stem: "small" is one 3x3 convolution; "large" is 7x7 with stride 2, then a max pool.
        width: channels of the first stage; the later ones have 2, 4 and 8 times as many.
        activation: as for `mlp`.

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.
    """
    smallest = {"small": 8, "large": 32}
    check.one_of(smallest, stem=stem)
    channels, *_ = checked_shape(input_shape, classes, smallest=smallest[stem])
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

    Paper B inserts this head into ResNet-18 with 512 features and a width of 16,384, and applies
    its feature attack to it. The initialization is the ordinary one; the attack builds the head
    that it needs. On (1, 28, 28) with 10 classes "convnet" has 55,104 parameters, 231,242 with its
    head.

    Args:
        input_shape: (C, H, W) of one image, of at least 4 (convnet), 9 or 8 pixels a side.
        classes: the number of outputs.
        generator: the source of the initial weights.
        backbone: "convnet" is two 3x3 convolutions of 16 and 32 channels, each with a 2x2 average
            pool; "convnet64" and "resnet18" are the models of that name, whose last layer gives the
            features.
        features: n, the size of the head's input.
        width: M, the head's hidden units.
        activation: of the head and the backbone, as for `mlp`.
        norm: of the backbone: "group", "batch" (in eval mode) or "none".

    Source: paper B, Section 4 and appendix F.

    Example:
        >>> model = headed(input_shape=(1, 28, 28), classes=10, generator=torch.Generator())
        >>> model.inner, model.outer.out_features
        (Linear(in_features=32, out_features=4096, bias=True), 10)
    """
    checked_shape(input_shape, classes)
    check.one_of(BACKBONES, backbone=backbone)
    check.count(features=features, width=width)
    below = BACKBONES[backbone](
        input_shape=input_shape,
        classes=features,
        generator=generator,
        norm=norm,
        activation=activation,
    )

    def head() -> nn.Module:
        inner = nn.Linear(features, width)
        outer = nn.Linear(width, classes)
        return nn.Sequential(
            OrderedDict(
                inner=inner,
                activation=new_activation(activation),
                outer=outer,
            )
        )

    above = initialized(head, generator)
    # `eval`: a new container is in training mode.
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

    The features are a linear layer's outputs before any activation, and the norms follow the pools:
    the attack cannot distinguish nearly collinear features. Mean cosine of 200 digits' features at
    4 initializations: 0.32 to 0.60; 0.53 to 0.71 after a ReLU, where all lie in one orthant; 0.67
    to 0.84 with norms before the activations.
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


def conv(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    generator: torch.Generator,
    depth: int = 2,
    width: float = 1.0,
    hidden: int | None = None,
    activation: str = "relu",
) -> nn.Module:
    """`depth` convolutions of padding 2 with 2x2 max pools, one hidden linear layer, one output.

    Parameters on (1, 28, 28) with 62 classes, as the paper states them; M is a pool:

        depth  count       convolutions
        1       3,815,566  3x3: 8 M
        2       6,603,710  5x5: 32 M 64 M
        4      13,657,406  5x5: 32 M 64 M, 3x3: 128 256 M
        6      25,324,350  5x5: 32 M 64 M, 3x3: 128 M 256 M 512 1024 M

    The paper describes depth 2 and only counts the others' parameters; their paddings and the
    positions of their pools are our choice. At PyTorch's default initial weights, depth 4 and 6
    hardly distinguish images: plain SGD may stay at chance for long; Adam does not.

    Args:
        input_shape: (C, H, W) of one image, of at least 4 x 4 pixels (any size at depth 1).
        classes: the number of outputs.
        generator: the source of the initial weights.
        depth: the number of convolutions: 1, 2, 4 or 6.
        width: the factor on the channels and the hidden units, each rounded, at least 1.
        hidden: hidden units; None: 2048 times `width`.
        activation: as for `mlp`.

    Source: paper D, Section 4 and appendix C.1.

    Example:
        >>> settings = dict(input_shape=(1, 28, 28), generator=torch.Generator())
        >>> sum(p.numel() for p in conv(classes=62, **settings).parameters())
        6603710
    """
    layers = _chosen(_CONV, depth)
    check.positive(width=width)
    units = _scaled(2048, width) if hidden is None else hidden
    return _stacked(
        input_shape,
        classes,
        generator,
        layers,
        padding=2,
        width=width,
        hidden=(units,),
        activation=activation,
    )


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

    Parameters on (3, 32, 32) with 10 classes, as the paper states them; M is a pool:

        depth  count      convolutions                                  hidden linear layers
        4      1,125,642  64 M 128 M                                    128
        6      1,814,538  64 M 128 M 256 M 512 M                        128
        9      6,436,106  64 M 128 M 256 M 512 M 512 512 M              256, 128
        11     9,385,994  64 M 128 M 256 256 M 512 512 M 512 512 M      256, 128

    The paper gives only counts and numbers of layers, so it is open which convolution of depth 9
    has no pool; here the fifth. At PyTorch's default initial weights the outputs of two images
    differ by about 1e-2 (depth 4) to 1e-5 (depth 11): gradients leak little of an image until a
    model is trained.

    Args:
        input_shape: (C, H, W) of one image; a side has at least 4 pixels (depth 4), 16 (6) or 32.
        classes: the number of outputs.
        generator: the source of the initial weights.
        depth: the number of layers with weights: 4, 6, 9 or 11.
        width: the factor on the channels and the hidden units, each rounded, at least 1.
        activation: as for `mlp`.

    Source: paper D, Section 4 and appendix C.1; Simonyan and Zisserman, ICLR 2015.

    Example:
        >>> model = vgg(input_shape=(3, 32, 32), classes=10, generator=torch.Generator())
        >>> sum(p.numel() for p in model.parameters())
        9385994
    """
    layers = _chosen(_VGG, depth)
    check.positive(width=width)
    hidden = [_scaled(units, width) for units in ((128,) if depth < 9 else (256, 128))]
    return _stacked(
        input_shape,
        classes,
        generator,
        layers,
        width=width,
        hidden=hidden,
        activation=activation,
    )


_CONV = {
    1: "3x3: 8 M",
    2: "5x5: 32 M 64 M",
    4: "5x5: 32 M 64 M 3x3: 128 256 M",
    6: "5x5: 32 M 64 M 3x3: 128 M 256 M 512 1024 M",
}
_VGG = {
    4: "3x3: 64 M 128 M",
    6: "3x3: 64 M 128 M 256 M 512 M",
    9: "3x3: 64 M 128 M 256 M 512 M 512 512 M",
    11: "3x3: 64 M 128 M 256 256 M 512 512 M 512 512 M",
}


def _chosen(table: dict[int, str], depth: int) -> str:
    if isinstance(depth, bool) or not isinstance(depth, int) or depth not in table:
        raise ValueError(f"depth is {depth!r}; give one of {', '.join(map(str, table))}")
    return table[depth]


def _scaled(units: int, width: float) -> int:
    return max(1, round(units * width))


def _stacked(
    input_shape: tuple[int, int, int],
    classes: int,
    generator: torch.Generator,
    layers: str,
    *,
    padding: int = 1,
    width: float = 1.0,
    hidden: Sequence[int] = (),
    norm: str = "none",
    activation: str,
) -> nn.Module:
    """Convolutions, then linear layers, each with its activation but the last.

    `layers` has the kernel ("3x3:") before the channels of its convolutions; "M" is a max pool of 2
    x 2, "M3" one of 3 x 3.
    """
    smallest = next(side for side in count(1) if _after(side, layers, padding) > 0)
    channels, height, columns = checked_shape(input_shape, classes, smallest=smallest)
    for units in hidden:
        check.count(hidden=units)

    def build() -> nn.Module:
        parts: list[nn.Module] = []
        before = channels
        for word in layers.split():
            if word.startswith("M"):
                parts.append(nn.MaxPool2d(int(word[1:] or 2)))
            elif word.endswith(":"):
                kernel = int(word[0])
            else:
                after = _scaled(int(word), width)
                parts.append(nn.Conv2d(before, after, kernel, padding=padding))
                if norm != "none":
                    parts.append(new_norm(norm, after))
                parts.append(new_activation(activation))
                before = after
        parts.append(nn.Flatten())
        features = before * _after(height, layers, padding) * _after(columns, layers, padding)
        widths = (features, *hidden)
        for inputs, outputs in pairwise(widths):
            parts += [nn.Linear(inputs, outputs), new_activation(activation)]
        return nn.Sequential(*parts, nn.Linear(widths[-1], classes))

    return initialized(build, generator)


def _after(
    side: int,
    layers: str,
    padding: int,
) -> int:
    """The side of an image after the layers; 0 if nothing remains."""
    for word in layers.split():
        if word.startswith("M"):
            side //= int(word[1:] or 2)
        elif word.endswith(":"):
            kernel = int(word[0])
        else:
            side += 2 * padding - kernel + 1
        if side < 1:
            return 0
    return side


class _Segmenter(nn.Module):
    """Two halvings and two doublings of the side, with the values of each side passed across."""

    def __init__(
        self,
        channels: int,
        classes: int,
        width: int,
        activation: str,
    ) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1),
                new_activation(activation),
            )

        self.first = block(channels, width)
        self.second = block(width, 2 * width)
        self.middle = block(2 * width, 2 * width)
        self.third = block(4 * width, width)
        self.last = block(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.first(x)
        # Odd sides round up; interpolation to the other branch's size undoes it.
        half = self.second(avg_pool2d(whole, 2, ceil_mode=True))
        wide = self.middle(avg_pool2d(half, 2, ceil_mode=True))
        wide = self.third(torch.cat([interpolate(wide, size=half.shape[2:]), half], 1))
        wide = self.last(torch.cat([interpolate(wide, size=whole.shape[2:]), whole], 1))
        return self.head(wide)


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
