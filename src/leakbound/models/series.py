"""Built-in networks for series (C, T): convolutions over time, and recurrent networks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from leakbound import check
from leakbound.models.blocks import ACTIVATIONS, SERIES, checked_shape, initialized, new_activation


def conv1d(
    *,
    input_shape: Sequence[int],
    classes: int,
    generator: torch.Generator,
    channels: Sequence[int] = (16, 32),
    kernel: int = 5,
    stride: int = 2,
    dilation: int = 1,
    pooling: str = "flat",
    activation: str = "tanh",
) -> nn.Module:
    """Convolutions over time, then one linear layer on all values or on their means.

    Args:
        input_shape: (C, T) of one series.
        classes: the number of outputs.
        generator: the source of the initial weights.
        channels: of each convolution.
        kernel: its length, an odd number; zeros are added at both ends, (kernel - 1) / 2 times its
            dilation.
        stride: of each convolution.
        dilation: that of convolution k (from 0) is `dilation` to the power k; 2 and stride 1 are
            those of temporal convolutional networks (without causality).
        pooling: "flat" (the linear layer sees every time) or "mean" (the mean over times).
        activation: as for `mlp`.

    Source: Bai, Kolter and Koltun 2018 (arXiv 1803.01271), for the dilations.

    Example:
        >>> settings = dict(input_shape=(1, 128), classes=5, generator=torch.Generator())
        >>> flat, mean = (conv1d(pooling=name, **settings) for name in ("flat", "mean"))
        >>> [sum(p.numel() for p in model.parameters()) for model in (flat, mean)]
        [7813, 2853]
    """
    before, times = checked_shape(input_shape, classes, form=SERIES)
    check.count(kernel=kernel, stride=stride, dilation=dilation)
    for width in channels:
        check.count(channels=width)
    check.one_of(("flat", "mean"), pooling=pooling)
    check.one_of(ACTIVATIONS, activation=activation)
    if kernel % 2 == 0 or not channels:
        raise ValueError(
            f"kernel is {kernel} and channels {tuple(channels)}; give an odd kernel and the "
            "channels of at least one convolution"
        )
    for _ in channels:
        times = (times - 1) // stride + 1

    def build() -> nn.Module:
        parts: list[nn.Module] = []
        for k, (inputs, outputs) in enumerate(pairwise((before, *channels))):
            wide = dilation**k
            padding = wide * (kernel - 1) // 2
            parts.append(nn.Conv1d(inputs, outputs, kernel, stride, padding, wide))
            parts.append(new_activation(activation))
        mean = pooling == "mean"
        parts += [nn.AdaptiveAvgPool1d(1)] if mean else []
        features = channels[-1] * (1 if mean else times)
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(features, classes))

    return initialized(build, generator)


class _Recurrent(nn.Module):
    """A recurrent layer over (N, C, T) and a linear layer on its last or its mean output."""

    def __init__(
        self,
        layer: nn.RNNBase,
        classes: int,
        pooling: str,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(layer.hidden_size, classes)
        self.pooling = pooling

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x.transpose(1, 2))[0]
        return self.head(outputs.mean(1) if self.pooling == "mean" else outputs[:, -1])


def lstm(
    *,
    input_shape: Sequence[int],
    classes: int,
    generator: torch.Generator,
    hidden: int = 32,
    layers: int = 1,
    pooling: str = "last",
) -> nn.Module:
    """Long short-term memory (LSTM) over the times of a series, then one linear layer.

    Args:
        input_shape: (C, T) of one series.
        classes: the number of outputs.
        generator: the source of the initial weights.
        hidden: hidden units.
        layers: recurrent layers, one on top of the other.
        pooling: "last" (the output at the last time) or "mean" (over all times).

    Source: Hochreiter and Schmidhuber 1997, in PyTorch's form.

    Example:
        >>> model = lstm(input_shape=(1, 48), classes=5, generator=torch.Generator())
        >>> sum(p.numel() for p in model.parameters())
        4645
    """
    return _recurrent(nn.LSTM, input_shape, classes, generator, hidden, layers, pooling)


def gru(
    *,
    input_shape: Sequence[int],
    classes: int,
    generator: torch.Generator,
    hidden: int = 32,
    layers: int = 1,
    pooling: str = "last",
) -> nn.Module:
    """Gated recurrent units (GRU) over the times of a series, then one linear layer.

    Arguments are those of `lstm`.

    Source: Cho et al. 2014, in PyTorch's form.

    Example:
        >>> model = gru(input_shape=(1, 48), classes=5, generator=torch.Generator())
        >>> sum(p.numel() for p in model.parameters())
        3525
    """
    return _recurrent(nn.GRU, input_shape, classes, generator, hidden, layers, pooling)


def _recurrent(
    kind: type[nn.LSTM] | type[nn.GRU],
    input_shape: Sequence[int],
    classes: int,
    generator: torch.Generator,
    hidden: int,
    layers: int,
    pooling: str,
) -> nn.Module:
    channels, _ = checked_shape(input_shape, classes, form=SERIES)
    check.count(hidden=hidden, layers=layers)
    check.one_of(("last", "mean"), pooling=pooling)
    settings = channels, hidden, layers
    return initialized(
        lambda: _Recurrent(kind(*settings, batch_first=True), classes, pooling), generator
    )
