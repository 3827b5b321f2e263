"""Read models: an `nn.Module` as typed layers, or the reason why it cannot be read.

`calls.read` reads any model from the functions that it calls, and `calls.sequence` those that some
engines take apart. Each engine states the kinds of layers that it supports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any


class Unreadable(Exception):
    """Why a model or one of its layers cannot be read, or is not supported by an engine."""


class Kind(Enum):
    """What a layer computes; in brackets its options."""

    TENSOR = "a weight or a buffer, or a constant (tensor)"
    IDENTITY = "nothing, as dropout that is switched off"
    SUM = "the sum of two values"
    PRODUCT = "the product of two values"
    MATRIX_PRODUCT = "products of matrices"
    SCALE = "the product with a number (factor)"
    PERMUTE = "dimensions in another order (order)"
    RESHAPE = "another shape (shape)"
    MEAN = "a mean over dimensions (dims, keep)"
    AVERAGE_POOL = "average pooling (options, as of avg_pool2d)"
    ADAPTIVE_POOL = "averages on a grid (size)"
    MAX_POOL = "max pooling (options, as of max_pool2d)"
    ACTIVATION = "a function of every element (function)"
    SOFTMAX = "a softmax (dim)"
    LINEAR = "a linear map of the last dimension"
    CONVOLUTION = "a convolution (options: stride, padding, dilation, groups; turned: its output's)"
    BATCH_NORM = "a batch norm with fixed statistics (eps)"
    BATCH_STATISTICS = "a batch norm with the batch's statistics (eps)"
    GROUP_NORM = "a group norm (groups, eps)"
    LAYER_NORM = "a layer norm (shape, eps)"
    STRAIGHT = "another linear function (call)"
    CURVED = "any other function (call)"


Shape = tuple[int, ...]
Options = Mapping[str, Any]
Found = tuple[Kind, Options]


@dataclass(frozen=True)
class Layer:
    """One layer of a model: its kind and `options` map `sources` to the value `output`.

    Value 0 is the model's input. `before` and `after` are shapes of one example, of the first
    source and of the output. `weights` and `buffers` are full names, None for an absent one.
    `owns`: some weight is trained. `moving`: a source changes with the weights of earlier layers.
    `live`: the output changes with weights or with the input.
    """

    kind: Kind
    options: Options
    name: str
    sources: tuple[int, ...]
    output: int
    before: Shape
    after: Shape = ()
    weights: tuple[str | None, ...] = ()
    buffers: tuple[str | None, ...] = ()
    owns: bool = False
    moving: bool = False
    live: bool = True


Layers = tuple[Layer, ...]


def convolution(
    kernel: Sequence[Any],
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    turned: Any = None,
) -> Options:
    """The options of a convolution, from the size of its kernel and PyTorch's arguments.

    `turned`: a transposed convolution, with this padding of its output.
    """
    sides = len(kernel)
    dilation = _numbers(dilation, sides)
    padding = 0 if padding == "valid" else padding
    if isinstance(padding, str):
        spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if any(span % 2 for span in spans):
            raise Unreadable("a convolution pads one side more")
        padding = [span // 2 for span in spans]
    settings = [_numbers(value, sides) for value in (stride, padding, dilation)]
    more = {} if turned is None else {"turned": _numbers(turned, sides)}
    return {"options": (*settings, groups), **more}


def _numbers(value: Any, sides: int) -> list[int]:
    values = [value] * sides if isinstance(value, int) else list(value)
    values = values * sides if len(values) == 1 else values
    if len(values) != sides or not all(type(v) is int for v in values):
        raise Unreadable(f"{value} is not one whole number or {sides}")
    return values


# These take the arguments of PyTorch's functions after the input.
def max_pool(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: Any = False,
    return_indices: Any = False,
) -> Found:
    if return_indices:
        raise Unreadable("a max pool also returns its indices")
    stride = kernel_size if stride is None else stride
    sizes = (_numbers(value, 2) for value in (kernel_size, stride, padding, dilation))
    return Kind.MAX_POOL, {"options": (*sizes, bool(ceil_mode))}


def average_pool(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: Any = False,
    count_include_pad: Any = True,
    divisor_override: Any = None,
) -> Found:
    stride = stride or kernel_size
    sizes = (_numbers(value, 2) for value in (kernel_size, stride, padding))
    options = (*sizes, bool(ceil_mode), bool(count_include_pad), divisor_override)
    return Kind.AVERAGE_POOL, {"options": options}


def adaptive_pool(output_size: Any) -> Found:
    height, width = _numbers(output_size, 2)
    return Kind.ADAPTIVE_POOL, {"size": (height, width)}


def pools_first(layers: Layers, exactly: bool = True) -> Layers:
    """Move max pools before the increasing activations that they follow: same maxima, less work.

    `exactly`: the activation must also be monotone after rounding.
    """
    order = list(layers)
    for at, (first, second) in enumerate(pairwise(layers)):
        function = first.options.get("function")
        if function is None or second.kind is not Kind.MAX_POOL:
            continue
        # Any other user of the activation needs its values before pooling.
        alone = [layer for layer in layers if first.output in layer.sources] == [second]
        if alone and function.order in (("exactly",) if exactly else ("exactly", "up to rounding")):
            order[at] = _as(first, second)
            order[at + 1] = _as(second, first)
    return tuple(order)


def _as(place: Layer, layer: Layer) -> Layer:
    return replace(
        place,
        kind=layer.kind,
        options=layer.options,
        name=layer.name,
    )
