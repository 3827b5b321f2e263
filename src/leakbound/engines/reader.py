"""Read models: an `nn.Module` as typed layers, or the reason why it cannot be read.

Here nested `nn.Sequential`s are read module by module (`sequence`), for engines that take the
layers apart. `calls.read` reads any model from the functions that it calls. Each engine states the
kinds of layers that it supports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from leakbound.engines import activations
from leakbound.types import Task


class Unreadable(Exception):
    """Why a model or one of its layers cannot be read, or is not supported by an engine."""


class Kind(Enum):
    """What a layer computes; in brackets its options."""

    TENSOR = "a weight or a buffer, or a constant (tensor)"
    IDENTITY = "nothing"
    DROPOUT = "dropout that is switched off"
    SUM = "the sum of two values"
    PRODUCT = "the product of two values"
    MATRIX_PRODUCT = "products of matrices"
    SCALE = "the product with a number (factor)"
    PERMUTE = "dimensions in another order (order)"
    RESHAPE = "another shape (shape)"
    FLATTEN = "a flattening module (shape; whole: all but the examples)"
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
_SEQUENCES: WeakKeyDictionary[nn.Module, dict[Shape, Layers | str]] = WeakKeyDictionary()


def sequence(task: Task, shape: Shape) -> Layers:
    """The layers of nested `nn.Sequential`s, or of one layer alone, for examples of a shape (*S).

    Kept while the model lives.
    """
    known, key = _SEQUENCES.setdefault(task.model, {}), tuple(shape)
    if key not in known:
        try:
            known[key] = _sequence(task, key)
        except Unreadable as reason:
            known[key] = str(reason)
    found = known[key]
    if isinstance(found, str):
        raise Unreadable(found)
    return found


def _sequence(task: Task, shape: Shape) -> Layers:
    parts, layers, moving = _leaves(task.model), list[Layer](), False
    if parts is None:
        raise Unreadable("the model does not consist of nn.Sequential and layers of torch.nn only")
    if any(map(_altered, task.model.modules())):
        raise Unreadable("a module has hooks or its own forward")
    if len(list(task.model.named_parameters(remove_duplicate=False))) != len(task.layout):
        raise Unreadable("layers share weights")
    value = task.parameters.new_zeros(1, *shape)
    for at, (name, module) in enumerate(parts):
        layer = _of_module(module, name, (at,), at + 1, tuple(value.shape))
        try:
            with torch.no_grad():
                value = module(value)
        except Exception as error:  # a caller of the model on such inputs will see it
            raise Unreadable(f"{name} fails on its input: {error}") from error
        layers.append(replace(layer, after=tuple(value.shape[1:]), moving=moving))
        moving = moving or layer.owns
    return tuple(layers)


def _leaves(model: nn.Module, name: str = "") -> list[tuple[str, nn.Module]] | None:
    """The layers of nested `nn.Sequential`s by name; None if a module is not PyTorch's own."""
    if type(model) is not nn.Sequential:
        return [(name, model)] if type(model).__module__.startswith("torch.nn.modules") else None
    prefix, found = f"{name}." if name else "", list[tuple[str, nn.Module]]()
    for own, module in model._modules.items():  # `named_children` leaves out repeated modules
        parts = None if module is None else _leaves(module, prefix + own)
        if parts is None:
            return None
        found += parts
    return found


def _altered(module: nn.Module) -> bool:
    before = module._forward_pre_hooks or module._backward_pre_hooks
    return bool(before or module._forward_hooks or module._backward_hooks) or (
        "forward" in vars(module)
    )


def _of_module(
    module: nn.Module, name: str, sources: tuple[int, ...], output: int, before: Shape
) -> Layer:
    kind, options = _kind(module, before)
    prefix = f"{name}." if name else ""

    def full(*names: str) -> tuple[str | None, ...]:
        return tuple(None if getattr(module, own) is None else prefix + own for own in names)

    weights = full("weight", "bias") if kind in _WEIGHTED else ()
    owns = any(True for _ in module.parameters())  # frozen weights are buffers
    return Layer(kind, options, name, sources, output, before[1:], (), weights, (), owns)


def _kind(module: nn.Module, before: Shape) -> Found:
    function, kind = activations.of_module(module), type(module)
    if function is not None:
        return Kind.ACTIVATION, {"function": function}
    if kind in _DROPOUTS and not (module.training and getattr(module, "p", False)):
        return Kind.DROPOUT, {}
    for key in ((kind, len(before)), (kind, None)):
        if key in _MODULES:
            return _MODULES[key](module, before)
    raise Unreadable(f"{kind.__name__} has no kind for values of {len(before)} dimensions")


def _flatten(module: Any, before: Shape) -> Found:
    start, end = module.start_dim, module.end_dim
    if start < 1:
        raise Unreadable("a flatten does not keep the examples as the first dimension")
    last = end % len(before)
    shape = (*before[1:start], math.prod(before[start : last + 1]), *before[last + 1 :])
    whole = start == 1 and end in (-1, len(before) - 1)
    return Kind.FLATTEN, {"shape": shape, "whole": whole}


def _convolution(module: Any, _: Shape) -> Found:
    if module.padding_mode != "zeros":
        raise Unreadable("a convolution does not pad with zeros")
    how = (module.stride, module.padding, module.dilation, module.groups)
    return Kind.CONVOLUTION, convolution(module.kernel_size, *how)


def convolution(
    kernel: Sequence[Any], stride: Any, padding: Any, dilation: Any, groups: int, turned: Any = None
) -> Options:
    """The options of a convolution, from the size of its kernel and PyTorch's arguments.

    `turned`: a transposed convolution, with this padding of its output.
    """
    sides = len(kernel)
    dilation, padding = _numbers(dilation, sides), 0 if padding == "valid" else padding
    if isinstance(padding, str):
        spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if any(span % 2 for span in spans):
            raise Unreadable("a convolution pads one side more")
        padding = [span // 2 for span in spans]
    own = [_numbers(value, sides) for value in (stride, padding, dilation)]
    more = {} if turned is None else {"turned": _numbers(turned, sides)}
    return {"options": (*own, groups), **more}


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
    sizes = (_numbers(own, 2) for own in (kernel_size, stride, padding, dilation))
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
    sizes = (_numbers(own, 2) for own in (kernel_size, stride, padding))
    options = (*sizes, bool(ceil_mode), bool(count_include_pad), divisor_override)
    return Kind.AVERAGE_POOL, {"options": options}


def adaptive_pool(output_size: Any) -> Found:
    height, width = _numbers(output_size, 2)
    return Kind.ADAPTIVE_POOL, {"size": (height, width)}


def _by(make: Callable[..., Found], names: str) -> Callable[[Any, Shape], Found]:
    return lambda module, _: make(*(getattr(module, name) for name in names.split()))


_WEIGHTED = {Kind.LINEAR, Kind.CONVOLUTION}
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_SIZES = "kernel_size stride padding "
_MODULES: dict[tuple[Any, int | None], Callable[[Any, Shape], Found]] = {
    (nn.Identity, None): lambda *_: (Kind.IDENTITY, {}),
    (nn.Linear, None): lambda *_: (Kind.LINEAR, {}),
    (nn.Flatten, None): _flatten,
    (nn.Conv2d, 4): _convolution,
    (nn.MaxPool2d, 4): _by(max_pool, _SIZES + "dilation ceil_mode return_indices"),
    (nn.AvgPool2d, 4): _by(average_pool, _SIZES + "ceil_mode count_include_pad divisor_override"),
    (nn.AdaptiveAvgPool2d, 4): _by(adaptive_pool, "output_size"),
}
"""Modules by type and by the dimensions of their input, None for any."""


def without(layers: Layers, *kinds: Kind) -> Layers:
    """A sequence without the layers of some kinds that compute nothing."""
    kept = [layer for layer in layers if layer.kind not in kinds]
    return tuple(replace(own, sources=(at,), output=at + 1) for at, own in enumerate(kept))


def pools_first(layers: Layers, exactly: bool = True) -> Layers:
    """Move max pools before the increasing activations that they follow: same maxima, less work.

    `exactly`: the activation must also be monotone after rounding.
    """
    order = list(layers)
    for at, (first, second) in enumerate(pairwise(layers)):
        function = first.options.get("function")
        if function is None or second.kind is not Kind.MAX_POOL:
            continue
        alone = [layer for layer in layers if first.output in layer.sources] == [second]
        if alone and function.order in (("exactly",) if exactly else ("exactly", "up to rounding")):
            order[at] = _as(first, second)
            order[at + 1] = _as(second, first)
    return tuple(order)


def _as(place: Layer, layer: Layer) -> Layer:
    return replace(place, kind=layer.kind, options=layer.options, name=layer.name)


def plain_weights(module: nn.Module) -> bool:
    """Whether a layer is a plain Linear, or a plain Conv2d without groups, padded with zeros."""
    return type(module) is nn.Linear or (
        type(module) is nn.Conv2d
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )
