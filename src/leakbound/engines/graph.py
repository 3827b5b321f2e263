"""What a model is made of: its layers in order, read from a trace, or None where one is unknown."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional

from leakbound.engines import rules
from leakbound.engines.convolutions import convolution
from leakbound.engines.norms import FixedNorm, GroupNorm, Standardized
from leakbound.engines.pointwise import Clamp, Gelu, Pointwise, Rectifier, Sigmoid, Silu, Tanh
from leakbound.engines.pointwise import of_module as activation_of

Make = Callable[[rules.Given], rules.Rule]


@dataclass(frozen=True)
class Step:
    """One layer of a model.

    Attributes:
        make: builds its rule.
        sources: the numbers of the values that enter; 0 is the model's input.
        output: the number of its own value.
        weights: the full names of its weights, None for one that it lacks.
        buffers: the full names of its buffers.
        owns: whether some of its weights are trained.
        moving: whether a source changes with the weights of steps before.
    """

    make: Make
    sources: tuple[int, ...]
    output: int
    weights: tuple[str | None, ...] = ()
    buffers: tuple[str | None, ...] = ()
    owns: bool = False
    moving: bool = False


class Unknown(Exception):
    """A part of the model that the rules do not cover."""


@dataclass(frozen=True)
class _Layer:
    make: Make
    weights: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()


def read(model: nn.Module, example: Tensor) -> tuple[Step, ...]:
    """The steps from the input to the output, for inputs like `example` (B, *S), B above 1.

    Raises:
        Unknown: the model has a part that the rules do not cover.
    """
    graph = _traced(model)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        ShapeProp(fx.GraphModule(model, graph)).propagate(example)
    numbers: dict[fx.Node, int] = {}
    steps: list[Step] = []
    moving: set[int] = set()
    for node in graph.nodes:
        if node.op == "output":
            last = node.args[0]
            if not isinstance(last, fx.Node) or last not in numbers:
                raise Unknown("the output is not one tensor")
            return _pruned(_pools_first(tuple(steps), numbers[last]), numbers[last])
        if node.op == "placeholder":
            if numbers:
                raise Unknown("the model has several inputs")
            numbers[node] = 0
        elif _shape(node) is not None:
            step = _step(model, node, numbers)
            step = replace(step, moving=any(s in moving for s in step.sources))
            numbers[node] = step.output
            if step.moving or step.owns:
                moving.add(step.output)
            steps.append(step)
    raise Unknown("the model has no output")


def _traced(model: nn.Module) -> fx.Graph:
    for name, module in model.named_modules():
        hooks = (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
        if any(hooks):
            raise Unknown(f"{name} has hooks")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fx.Tracer().trace(model)


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    """Of a tensor; None for a number, such as a size."""
    meta = node.meta.get("tensor_meta")
    if meta is None:
        return None
    if not hasattr(meta, "shape"):
        raise Unknown(f"{node.name} gives several tensors")
    return tuple(meta.shape)


def _step(model: nn.Module, node: fx.Node, numbers: dict[fx.Node, int]) -> Step:
    sources = [own for own in node.all_input_nodes if _shape(own) is not None]
    if any(own not in numbers for own in sources) or not sources:
        raise Unknown(f"{node.name} takes what is not known")
    output = max(numbers.values()) + 1
    shape, before = _shape(node) or (), _shape(sources[0]) or ()
    if shape[:1] != before[:1]:
        raise Unknown(f"{node.name} does not keep the examples in front")
    if node.op == "call_module":
        target = str(node.target)
        module = model.get_submodule(target)
        if len(node.args) != 1 or node.kwargs:
            raise Unknown(f"{node.name} is called with options")
        layer = _of_module(module, before)
        full = partial(_full, target, module)
        weights, buffers = map(full, layer.weights), map(full, layer.buffers)
        owns = any(True for _ in module.parameters())  # frozen weights are buffers
        before_it = (numbers[sources[0]],)
        return Step(layer.make, before_it, output, tuple(weights), tuple(buffers), owns)
    make, count = _of_call(node, before, shape)
    taken = tuple(numbers[own] for own in node.args[:count] if isinstance(own, fx.Node))
    if len(taken) != count:
        raise Unknown(f"{node.name} takes a constant")
    return Step(make, taken, output)


def _full(prefix: str, module: nn.Module, name: str) -> str | None:
    return None if getattr(module, name) is None else f"{prefix}.{name}"


def _of_module(module: nn.Module, before: tuple[int, ...]) -> _Layer:
    """The layer for a module that is fed values of the given shape."""
    function = activation_of(module)
    if function is not None:
        return _Layer(partial(rules.Elementwise, function=function))
    kind: Any = type(module)
    if kind in _NOTHING and not (module.training and getattr(module, "p", False)):
        return _Layer(rules.Identity)
    if (kind, len(before)) in _READERS:
        return _READERS[kind, len(before)](module, before)
    if kind in _ANY_SIZE:
        return _ANY_SIZE[kind](module, before)
    raise Unknown(f"{kind.__name__} has no rule for values of {len(before)} dimensions")


def _flatten(module: Any, before: tuple[int, ...]) -> _Layer:
    if module.start_dim != 1 or module.end_dim not in (-1, len(before) - 1):
        raise Unknown("a flatten leaves some dimensions")
    return _Layer(partial(rules.Reshape, shape=(math.prod(before[1:]),)))


def _batch_norm(module: Any, _: tuple[int, ...]) -> _Layer:
    if module.training or module.running_mean is None:
        raise Unknown("a batch norm takes the batch's statistics")
    make = partial(FixedNorm, eps=module.eps)
    return _Layer(make, ("weight", "bias"), ("running_mean", "running_var"))


def _group_norm(module: Any, before: tuple[int, ...]) -> _Layer:
    if len(before) == 4:
        make: Make = partial(GroupNorm, groups=module.num_groups, eps=module.eps)
    else:
        shape = (before[1], *[1] * (len(before) - 2))
        make = partial(Standardized, rows=module.num_groups, shape=shape, eps=module.eps)
    return _Layer(make, ("weight", "bias"))


def _layer_norm(module: Any, before: tuple[int, ...]) -> _Layer:
    shape = tuple(module.normalized_shape)
    front = len(before) - len(shape)
    if front < 1:
        raise Unknown("a layer norm runs over the examples")
    rows, wide = math.prod(before[1:front]), (*[1] * (front - 1), *shape)
    make = partial(Standardized, rows=rows, shape=wide, eps=module.eps)
    return _Layer(make, ("weight", "bias"))


def _convolution(module: Any, _: tuple[int, ...]) -> _Layer:
    if module.padding_mode != "zeros":
        raise Unknown("a convolution pads with other than zeros")
    padding = (0, 0) if module.padding == "valid" else module.padding
    if isinstance(padding, str):
        spans = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        if any(span % 2 for span in spans):
            raise Unknown("a convolution pads one side more")
        padding = (spans[0] // 2, spans[1] // 2)
    options = (list(module.stride), list(padding), list(module.dilation), module.groups)
    return _Layer(partial(convolution, options=options), ("weight", "bias"))


def _max_pool_module(module: Any, _: tuple[int, ...]) -> _Layer:
    if module.return_indices:
        raise Unknown("a max pool gives its indices too")
    options = (module.kernel_size, module.stride, module.padding, module.dilation)
    return _Layer(_max_pool(*options, module.ceil_mode))


def _average_pool_module(module: Any, _: tuple[int, ...]) -> _Layer:
    options = (module.kernel_size, module.stride, module.padding, module.ceil_mode)
    return _Layer(_average_pool(*options, module.count_include_pad, module.divisor_override))


def _two(value: Any) -> list[int]:
    values = [value, value] if isinstance(value, int) else list(value)
    if len(values) != 2 or not all(type(v) is int for v in values):
        raise Unknown(f"{value} is not one whole number or two")
    return values


def _max_pool(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: Any = False,
) -> Make:
    stride = kernel_size if stride is None else stride
    options = (_two(kernel_size), _two(stride), _two(padding), _two(dilation), bool(ceil_mode))
    return partial(rules.MaxPool, options=options)


def _average_pool(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: Any = False,
    count_include_pad: Any = True,
    divisor_override: Any = None,
) -> Make:
    stride = kernel_size if stride is None else stride
    options = (
        *(_two(kernel_size), _two(stride), _two(padding)),
        *(bool(ceil_mode), bool(count_include_pad), divisor_override),
    )
    return partial(rules.AveragePool, options=options)


def _adaptive_pool(output_size: Any) -> Make:
    height, width = _two(output_size)
    return partial(rules.AdaptiveAveragePool, size=(height, width))


_Reader = Callable[[Any, tuple[int, ...]], _Layer]
_READERS: dict[tuple[Any, int], _Reader] = {
    (nn.Linear, 2): lambda module, _: _Layer(rules.linear, ("weight", "bias")),
    (nn.Conv2d, 4): _convolution,
    (nn.BatchNorm2d, 4): _batch_norm,
    (nn.MaxPool2d, 4): _max_pool_module,
    (nn.AvgPool2d, 4): _average_pool_module,
    (nn.AdaptiveAvgPool2d, 4): lambda module, _: _Layer(_adaptive_pool(module.output_size)),
}
_ANY_SIZE: dict[Any, _Reader] = {
    nn.Flatten: _flatten,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
}
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_ACTIVATIONS: dict[Any, Callable[..., Pointwise]] = {
    functional.relu: lambda inplace=False: Rectifier(),
    torch.relu: Rectifier,
    "relu": Rectifier,
    functional.relu6: lambda inplace=False: Clamp(0.0, 6.0),
    functional.leaky_relu: lambda negative_slope=0.01, inplace=False: Rectifier(negative_slope),
    functional.sigmoid: Sigmoid,
    torch.sigmoid: Sigmoid,
    "sigmoid": Sigmoid,
    functional.tanh: Tanh,
    torch.tanh: Tanh,
    "tanh": Tanh,
    functional.gelu: lambda approximate="none": Gelu(approximate=approximate),
    functional.silu: lambda inplace=False: Silu(),
}
_POOLS: dict[Any, Callable[..., Make]] = {
    functional.avg_pool2d: _average_pool,
    functional.adaptive_avg_pool2d: _adaptive_pool,
    torch.max_pool2d: _max_pool,
    functional.max_pool2d: lambda *args, return_indices=False, **more: _max_pool(*args, **more),
}
_SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")
_RESHAPES = (torch.flatten, torch.reshape, "flatten", "reshape", "view")
_MEANS = (torch.mean, "mean")


def _of_call(node: fx.Node, before: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Make, int]:
    """How to build a function's rule, and how many tensors it takes."""
    target: Any = node.target
    if node.op not in ("call_function", "call_method"):
        raise Unknown(f"{node.name} is no layer")
    if target in _SUMS and len(node.args) == 2 and not node.kwargs:
        if any(_shape(own) != shape for own in node.args if isinstance(own, fx.Node)):
            raise Unknown(f"{node.name} adds different shapes")
        return rules.Plus, 2
    if target in _RESHAPES and math.prod(before) == math.prod(shape):
        return partial(rules.Reshape, shape=shape[1:]), 1
    options: Sequence[Any] = node.args[1:]
    if any(isinstance(own, fx.Node) for own in (*options, *node.kwargs.values())):
        raise Unknown(f"{node.name} has computed options")
    try:
        if target in _MEANS:
            return _mean(before, *options, **dict(node.kwargs)), 1
        if target in _POOLS and len(before) == 4:
            return _POOLS[target](*options, **node.kwargs), 1
        if target in _ACTIVATIONS:
            function = _ACTIVATIONS[target](*options, **node.kwargs)
            return partial(rules.Elementwise, function=function), 1
        if target == "contiguous" or _idle_dropout(node):
            return rules.Identity, 1
    except TypeError as error:
        raise Unknown(f"{node.name} has other options") from error
    raise Unknown(f"{node.name} has no rule")


def _idle_dropout(node: fx.Node) -> bool:
    given = dict(zip(("p", "training"), node.args[1:], strict=False)) | dict(node.kwargs)
    return node.target is functional.dropout and given.get("training") is False


def _mean(before: tuple[int, ...], dim: Any, keepdim: Any = False) -> Make:
    dims = [dim] if isinstance(dim, int) else list(dim)
    places = tuple(d % len(before) for d in dims)
    return partial(rules.Mean, dims=places, keep=bool(keepdim))


def _pruned(steps: tuple[Step, ...], last: int) -> tuple[Step, ...]:
    """Those on whose values the output depends."""
    wanted, kept = {last}, list[Step]()
    for step in reversed(steps):
        if step.output in wanted:
            wanted.update(step.sources)
            kept.append(step)
    return tuple(reversed(kept))


def _pools_first(steps: tuple[Step, ...], last: int) -> tuple[Step, ...]:
    """Max pools before the activation that they follow, where that gives the same maxima."""
    order = list(steps)
    for at, (first, second) in enumerate(pairwise(steps)):
        readers = [step for step in steps if first.output in step.sources]
        if readers == [second] and first.output != last and _swap(first, second):
            order[at] = replace(first, make=second.make)
            order[at + 1] = replace(second, make=first.make)
    return tuple(order)


def _swap(first: Step, second: Step) -> bool:
    function = first.make.keywords.get("function") if isinstance(first.make, partial) else None
    pool = second.make.func if isinstance(second.make, partial) else None
    return pool is rules.MaxPool and function is not None and function.monotone
