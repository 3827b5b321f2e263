"""Read models: an `nn.Module` as typed layers, or the reason why it cannot be read.

Nested `nn.Sequential`s are read module by module (`sequence`). Any other model is traced with
torch.fx (`read`), which patches `nn.Module` for the whole process while it runs. So only attackers
trace; clients, which may run in threads, never do. Each engine states the kinds of layers that it
supports.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional

from leakbound.engines import activations
from leakbound.types import Task


class Unreadable(Exception):
    """Why a model or one of its layers cannot be read, or is not supported by an engine."""


class Kind(Enum):
    """What a layer computes; in brackets its options."""

    IDENTITY = "nothing"
    DROPOUT = "dropout that is switched off"
    SUM = "the sum of two values"
    RESHAPE = "another shape (shape)"
    FLATTEN = "a flattening module (shape; whole: all but the examples)"
    MEAN = "a mean over dimensions (dims, keep)"
    AVERAGE_POOL = "average pooling (options, as of avg_pool2d)"
    ADAPTIVE_POOL = "averages on a grid (size)"
    MAX_POOL = "max pooling (options, as of max_pool2d)"
    ACTIVATION = "a function of every element (function)"
    LINEAR = "a linear map of the last dimension"
    CONVOLUTION = "a convolution (options: stride, padding, dilation, groups)"
    BATCH_NORM = "a batch norm with fixed statistics (eps)"
    GROUP_NORM = "a group norm of images (groups, eps)"
    STANDARDIZED = "any other norm within each example (rows, shape, eps)"


Shape = tuple[int, ...]
Options = Mapping[str, Any]
Found = tuple[Kind, Options]


@dataclass(frozen=True)
class Layer:
    """One layer of a model: its kind and `options` map `sources` to the value `output`.

    Value 0 is the model's input. `before` and `after` are shapes of one example, of the first
    source and of the output. `weights` and `buffers` are full names, None for an absent one.
    `owns`: some weight is trained. `moving`: a source changes with the weights of earlier layers.
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


Layers = tuple[Layer, ...]
_SEQUENCES: WeakKeyDictionary[nn.Module, dict[Shape, Layers | str]] = WeakKeyDictionary()


def read(task: Task, shape: Shape) -> Layers:
    """The layers of the task's model from the input to the output, for examples of a shape (*S)."""
    if task.coupled:
        raise Unreadable("the examples affect each other")
    # a bare layer is for the bundle and the per-example engine; it has no names for this one
    plain = _leaves(task.model) is not None and type(task.model) is nn.Sequential
    layers = sequence(task, shape) if plain else _traced(task, shape)
    trained = [name for name, _ in task.model.named_parameters(remove_duplicate=False)]
    used = [name for layer in layers for name in layer.weights if name in trained]
    if sorted(used) != sorted(trained) or len(trained) != len(task.layout):
        raise Unreadable("a trained weight does not belong to exactly one layer")
    return layers


def sequence(task: Task, shape: Shape) -> Layers:
    """As `read` for nested `nn.Sequential`s or one layer alone; kept while the model lives."""
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


def _traced(task: Task, shape: Shape) -> Layers:
    model = task.model
    if any(map(_altered, model.modules())):
        raise Unreadable("a module has hooks or its own forward")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        graph = fx.Tracer().trace(model)
        # two examples, to detect a mix with other dimensions
        zeros = task.parameters.new_zeros(2, *shape)
        ShapeProp(fx.GraphModule(model, graph)).propagate(zeros)
    numbers: dict[fx.Node, int] = {}
    layers: list[Layer] = []
    moving: set[int] = set()
    for node in graph.nodes:
        if node.op == "output":
            last = node.args[0]
            if not isinstance(last, fx.Node) or last not in numbers:
                raise Unreadable("the output is not one tensor")
            return _needed(layers, numbers[last])
        if node.op == "placeholder":
            if numbers:
                raise Unreadable("the model has several inputs")
            numbers[node] = 0
        elif _shape(node) is not None:
            layer = _of_node(model, node, numbers)
            after, moves = (_shape(node) or ())[1:], any(s in moving for s in layer.sources)
            layer = replace(layer, after=after, moving=moves)
            numbers[node] = layer.output
            if layer.moving or layer.owns:
                moving.add(layer.output)
            layers.append(layer)
    raise Unreadable("the model has no output")


def _shape(node: fx.Node) -> Shape | None:
    """The shape of a tensor; None for a number, such as a size."""
    meta = node.meta.get("tensor_meta")
    if meta is None:
        return None
    if not hasattr(meta, "shape"):
        raise Unreadable(f"{node.name} returns several tensors")
    return tuple(meta.shape)


def _of_node(model: nn.Module, node: fx.Node, numbers: dict[fx.Node, int]) -> Layer:
    entering = [own for own in node.all_input_nodes if _shape(own) is not None]
    if any(own not in numbers for own in entering) or not entering:
        raise Unreadable(f"{node.name} depends on more than the input")
    output = max(numbers.values()) + 1
    sources: tuple[int, ...] = (numbers[entering[0]],)
    after, before = _shape(node) or (), _shape(entering[0]) or ()
    if after[:1] != before[:1]:
        raise Unreadable(f"{node.name} does not keep the examples as the first dimension")
    if node.op == "call_module":
        if len(node.args) != 1 or node.kwargs:
            raise Unreadable(f"{node.name} is called with options")
        name = str(node.target)
        return _of_module(model.get_submodule(name), name, sources, output, before)
    (kind, options), count = _of_call(node, before, after)
    sources = tuple(numbers[own] for own in node.args[:count] if isinstance(own, fx.Node))
    if len(sources) != count:
        raise Unreadable(f"{node.name} takes a constant")
    return Layer(kind, options, node.name, sources, output, before[1:])


def _needed(layers: Sequence[Layer], last: int) -> Layers:
    """The layers on whose values the output depends."""
    wanted, kept = {last}, list[Layer]()
    for layer in reversed(layers):
        if layer.output in wanted:
            wanted.update(layer.sources)
            kept.append(layer)
    return tuple(reversed(kept))


def _of_module(
    module: nn.Module, name: str, sources: tuple[int, ...], output: int, before: Shape
) -> Layer:
    kind, options = _kind(module, before)
    prefix = f"{name}." if name else ""

    def full(*names: str) -> tuple[str | None, ...]:
        return tuple(None if getattr(module, own) is None else prefix + own for own in names)

    weights = full("weight", "bias") if kind in _WEIGHTED else ()
    buffers = full("running_mean", "running_var") if kind is Kind.BATCH_NORM else ()
    owns = any(True for _ in module.parameters())  # frozen weights are buffers
    place = (sources, output, before[1:], ())
    return Layer(kind, options, name, *place, weights, buffers, owns)


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


def _batch_norm(module: Any, _: Shape) -> Found:
    if module.training or module.running_mean is None:
        raise Unreadable("a batch norm uses the batch's statistics")
    return Kind.BATCH_NORM, {"eps": module.eps}


def _group_norm(module: Any, before: Shape) -> Found:
    if len(before) == 4:
        return Kind.GROUP_NORM, {"groups": module.num_groups, "eps": module.eps}
    shape = (before[1], *[1] * (len(before) - 2))
    return Kind.STANDARDIZED, {"rows": module.num_groups, "shape": shape, "eps": module.eps}


def _layer_norm(module: Any, before: Shape) -> Found:
    shape = tuple(module.normalized_shape)
    front = len(before) - len(shape)
    if front < 1:
        raise Unreadable("a layer norm runs over the examples")
    rows, wide = math.prod(before[1:front]), (*[1] * (front - 1), *shape)
    return Kind.STANDARDIZED, {"rows": rows, "shape": wide, "eps": module.eps}


def _convolution(module: Any, _: Shape) -> Found:
    if module.padding_mode != "zeros":
        raise Unreadable("a convolution does not pad with zeros")
    padding = (0, 0) if module.padding == "valid" else module.padding
    if isinstance(padding, str):
        spans = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        if any(span % 2 for span in spans):
            raise Unreadable("a convolution pads one side more")
        padding = (spans[0] // 2, spans[1] // 2)
    options = (list(module.stride), list(padding), list(module.dilation), module.groups)
    return Kind.CONVOLUTION, {"options": options}


def _two(value: Any) -> list[int]:
    values = [value, value] if isinstance(value, int) else list(value)
    if len(values) != 2 or not all(type(v) is int for v in values):
        raise Unreadable(f"{value} is not one whole number or two")
    return values


# These two take the arguments of PyTorch's functions after the input.
def _max_pool(
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
    sizes = map(_two, (kernel_size, stride, padding, dilation))
    return Kind.MAX_POOL, {"options": (*sizes, bool(ceil_mode))}


def _average_pool(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: Any = False,
    count_include_pad: Any = True,
    divisor_override: Any = None,
) -> Found:
    sizes = map(_two, (kernel_size, kernel_size if stride is None else stride, padding))
    options = (*sizes, bool(ceil_mode), bool(count_include_pad), divisor_override)
    return Kind.AVERAGE_POOL, {"options": options}


def _adaptive_pool(output_size: Any) -> Found:
    height, width = _two(output_size)
    return Kind.ADAPTIVE_POOL, {"size": (height, width)}


def _by(make: Callable[..., Found], names: str) -> Callable[[Any, Shape], Found]:
    return lambda module, _: make(*(getattr(module, name) for name in names.split()))


_WEIGHTED = {Kind.LINEAR, Kind.CONVOLUTION, Kind.BATCH_NORM, Kind.GROUP_NORM, Kind.STANDARDIZED}
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_SIZES = "kernel_size stride padding "
_MODULES: dict[tuple[Any, int | None], Callable[[Any, Shape], Found]] = {
    (nn.Identity, None): lambda *_: (Kind.IDENTITY, {}),
    (nn.Linear, None): lambda *_: (Kind.LINEAR, {}),
    (nn.Flatten, None): _flatten,
    (nn.GroupNorm, None): _group_norm,
    (nn.LayerNorm, None): _layer_norm,
    (nn.Conv2d, 4): _convolution,
    (nn.BatchNorm2d, 4): _batch_norm,
    (nn.MaxPool2d, 4): _by(_max_pool, _SIZES + "dilation ceil_mode return_indices"),
    (nn.AvgPool2d, 4): _by(_average_pool, _SIZES + "ceil_mode count_include_pad divisor_override"),
    (nn.AdaptiveAvgPool2d, 4): _by(_adaptive_pool, "output_size"),
}
"""Modules by type and by the dimensions of their input, None for any."""
_POOLS: dict[Any, Callable[..., Found]] = {
    functional.avg_pool2d: _average_pool,
    functional.adaptive_avg_pool2d: _adaptive_pool,
    torch.max_pool2d: _max_pool,
    functional.max_pool2d: _max_pool,
}
_SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")
_RESHAPES = (torch.flatten, torch.reshape, "flatten", "reshape", "view")
_MEANS = (torch.mean, "mean")


def _of_call(node: fx.Node, before: Shape, after: Shape) -> tuple[Found, int]:
    """A function's kind and options, and how many tensors it takes."""
    target: Any = node.target
    if node.op not in ("call_function", "call_method"):
        raise Unreadable(f"{node.name} is not a layer")
    if target in _SUMS and len(node.args) == 2 and not node.kwargs:
        if any(_shape(own) != after for own in node.args if isinstance(own, fx.Node)):
            raise Unreadable(f"{node.name} adds different shapes")
        return (Kind.SUM, {}), 2
    if target in _RESHAPES and math.prod(before) == math.prod(after):
        return (Kind.RESHAPE, {"shape": after[1:]}), 1
    options: Sequence[Any] = node.args[1:]
    if any(isinstance(own, fx.Node) for own in (*options, *node.kwargs.values())):
        raise Unreadable(f"{node.name} has computed options")
    try:
        if target in _MEANS:
            return _mean(before, *options, **node.kwargs), 1
        if target in _POOLS and len(before) == 4:
            return _POOLS[target](*options, **node.kwargs), 1
        if target in activations.OF_CALLS:
            function = activations.OF_CALLS[target](*options, **node.kwargs)
            return (Kind.ACTIVATION, {"function": function}), 1
    except TypeError as error:
        raise Unreadable(f"{node.name} has unknown options") from error
    given = dict(zip(("p", "training"), options, strict=False)) | dict(node.kwargs)
    if target == "contiguous" or (target is functional.dropout and given.get("training") is False):
        return (Kind.IDENTITY, {}), 1
    raise Unreadable(f"{node.name} has no kind")


def _mean(before: Shape, dim: Any, keepdim: Any = False) -> Found:
    dims = [dim] if isinstance(dim, int) else list(dim)
    return Kind.MEAN, {"dims": tuple(d % len(before) for d in dims), "keep": bool(keepdim)}


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
