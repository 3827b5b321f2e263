"""LPIPS, a learned perceptual distance between images, from the user's weight file.

leakbound does not bundle, download or imitate it: without a file there is no such number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import conv2d, max_pool2d

from leakbound import check
from leakbound.domains import has_neighbors
from leakbound.metrics import Metric, Values
from leakbound.models.custom import read_weights
from leakbound.pairing import Paired

__all__ = ["Lpips"]

_EPSILON = 1e-10  # that of the package `lpips`
_RGB = 3


@dataclass(frozen=True)
class _Convolution:
    """One convolution with its ReLU; `pool`: side of the max pool (stride 2) before it, or 0."""

    name: str
    inputs: int
    outputs: int
    side: int = 3
    stride: int = 1
    padding: int = 1
    pool: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.outputs, self.inputs, self.side, self.side


_Slices = tuple[tuple[_Convolution, ...], ...]
_ALEX: _Slices = (
    (_Convolution("net.slice1.0", 3, 64, 11, stride=4, padding=2),),
    (_Convolution("net.slice2.3", 64, 192, 5, padding=2, pool=3),),
    (_Convolution("net.slice3.6", 192, 384, pool=3),),
    (_Convolution("net.slice4.8", 384, 256),),
    (_Convolution("net.slice5.10", 256, 256),),
)
_VGG: _Slices = (
    (_Convolution("net.slice1.0", 3, 64), _Convolution("net.slice1.2", 64, 64)),
    (
        _Convolution("net.slice2.5", 64, 128, pool=2),
        _Convolution("net.slice2.7", 128, 128),
    ),
    (
        _Convolution("net.slice3.10", 128, 256, pool=2),
        _Convolution("net.slice3.12", 256, 256),
        _Convolution("net.slice3.14", 256, 256),
    ),
    (
        _Convolution("net.slice4.17", 256, 512, pool=2),
        _Convolution("net.slice4.19", 512, 512),
        _Convolution("net.slice4.21", 512, 512),
    ),
    (
        _Convolution("net.slice5.24", 512, 512, pool=2),
        _Convolution("net.slice5.26", 512, 512),
        _Convolution("net.slice5.28", 512, 512),
    ),
)
_NETWORKS = {"alex": _ALEX, "vgg": _VGG}
_FIRST = {network[0][0].shape: name for name, network in _NETWORKS.items()}
_HEAD_NAMES = tuple((f"lin{i}.model.1.weight", f"lins.{i}.model.1.weight") for i in range(5))


@dataclass(frozen=True, eq=False)
class Lpips:
    """The distance of one weight file, version 0.1: AlexNet ("alex") or VGG-16 ("vgg").

    Values from different files are not comparable. It is computed in float64 on the CPU, one image
    at a time, so a value does not depend on the rest of its batch.

    Source: Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric",
        CVPR 2018.
    """

    name: str
    state: Mapping[str, Tensor]

    @classmethod
    def load(cls, path: Path) -> Lpips:
        """Read the state dict of the package `lpips`, `LPIPS(net="alex")` or `LPIPS(net="vgg")`.

        The last layers may be stored as `lin0...`, as `lins.0...` or as both. A missing file, or
        values that no trained LPIPS has, raise a `ValueError`.
        """
        both = {name for names in _HEAD_NAMES for name in names}
        state = read_weights(
            path,
            partial(_wanted, path),
            name="lpips_weights",
            ignored=both,
        )
        names = {alias: name for name, alias in _HEAD_NAMES}
        state = {names.get(name, name): tensor.double() for name, tensor in state.items()}
        for name, tensor in state.items():
            check.finite(f"lpips_weights {str(path)!r}: {name}", tensor)
        if any(float(state[name].min()) < 0 for name, _ in _HEAD_NAMES):
            raise ValueError(
                f"lpips_weights {str(path)!r} holds negative weights of the last layers, which a "
                "trained LPIPS never has; save a trained one"
            )
        if not float(state["scaling_layer.scale"].min()) > 0:
            raise ValueError(
                f"lpips_weights {str(path)!r} holds a scaling_layer.scale that is not above 0; "
                "save a trained LPIPS of version 0.1"
            )
        return cls(_FIRST[tuple(state["net.slice1.0.weight"].shape)], state)

    @property
    def smallest(self) -> int:
        """Minimum side of an image in pixels."""
        return {"alex": 31, "vgg": 16}[self.name]  # leaves one position to the last slice

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether images of that shape, (C, H, W), have a value: gray or RGB, and large enough."""
        return has_neighbors(shape) and shape[0] in (1, _RGB) and min(shape[1:]) >= self.smallest

    def metric(self, low: float = 0.0) -> Metric:
        """The metric for images with lowest value `low`."""
        about = f"learned perceptual distance ({self.name})"
        return Metric("lpips", partial(self.distances, low=low), False, "", about)

    def distances(
        self,
        paired: Paired,
        *,
        data_range: float,
        low: float = 0.0,
    ) -> Values:
        """The distance of each reconstruction, 0 or more; None if `takes` is False.

        Images are mapped from [low, low + data_range] to [-1, 1]; gray ones are repeated to RGB.
        """
        check.positive(data_range=data_range)
        if not self.takes(tuple(paired.inputs.shape[1:])):
            return [None] * len(paired.inputs)
        heads = [self.state[name].flatten() for name, _ in _HEAD_NAMES]
        values: Values = []
        for both in zip(paired.inputs, paired.truth.inputs, strict=True):
            slices = (
                self._features(2 * (image.detach().cpu().double() - low) / data_range - 1)
                for image in both
            )
            total = 0.0
            for weights, a, b in zip(heads, *slices, strict=True):
                total += float((weights @ (a - b).square().flatten(1)).mean())
            values.append(total)
        return values

    def _features(self, image: Tensor) -> list[Tensor]:
        """Each slice's output for one image in [-1, 1]: (C, H, W), of length 1 at each place."""
        x = image.expand(_RGB, -1, -1)[None]
        x = (x - self.state["scaling_layer.shift"]) / self.state["scaling_layer.scale"]
        outputs = []
        for part in _NETWORKS[self.name]:
            for layer in part:
                x = max_pool2d(x, layer.pool, 2) if layer.pool else x
                weight = self.state[f"{layer.name}.weight"]
                bias = self.state[f"{layer.name}.bias"]
                x = conv2d(x, weight, bias, layer.stride, layer.padding).relu()
            outputs.append(x[0] / (x[0].norm(dim=0) + _EPSILON))
        return outputs


def _wanted(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
) -> dict[str, Tensor]:
    """The tensors, without memory, that a file with these names and shapes should hold."""
    first = shapes.get("net.slice1.0.weight")
    if first not in _FIRST:
        raise ValueError(
            f"lpips_weights {str(path)!r} holds net.slice1.0.weight of shape {first}; give the "
            'state dict of lpips.LPIPS(net="alex") or lpips.LPIPS(net="vgg")'
        )
    wanted: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("scaling_layer.shift", "scaling_layer.scale"), (1, _RGB, 1, 1)
    )
    for part, (name, alias) in zip(_NETWORKS[_FIRST[first]], _HEAD_NAMES, strict=True):
        for layer in part:
            wanted[f"{layer.name}.weight"] = layer.shape
            wanted[f"{layer.name}.bias"] = (layer.outputs,)
        stored = alias if alias in shapes and name not in shapes else name
        wanted[stored] = (1, part[-1].outputs, 1, 1)
    return {name: torch.empty(shape, device="meta") for name, shape in wanted.items()}
