"""Any model as typed layers, from the functions that it calls.

Functions that the engines know have a kind of layer of their own. All others are still layers:
`Kind.STRAIGHT` and `Kind.CURVED`, of which PyTorch differentiates each call alone. A weight that
several calls use, or a call of no known kind, is a layer itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from leakbound.core import Task
from leakbound.engines import activations
from leakbound.engines.reader import (
    Kind,
    Layer,
    Layers,
    Options,
    Shape,
    Unreadable,
    adaptive_pool,
    average_pool,
    convolution,
    max_pool,
)
from leakbound.engines.tape import Call, PerExample, Recording, Slot, leaves, record

_SEQUENCES: WeakKeyDictionary[nn.Module, dict[Shape, Layers | str]] = WeakKeyDictionary()


class KnownCall(NamedTuple):
    """A call's kind, and which of its arguments are values, weights and buffers."""

    kind: Kind
    options: Options
    sources: tuple[Any, ...]
    weights: tuple[Any, ...] = ()
    buffers: tuple[Any, ...] = ()


def read(task: Task, shape: Shape) -> Layers:
    """The layers of the task's model from the input to the output, for examples of a shape (*S).

    Raises:
        Unreadable: why the calls cannot be repeated on other inputs.
    """
    recording = record(task, shape)
    trained = task.names
    uses = Counter(source for call in recording.calls for source in call.sources)
    known = {call.output: _known(call, recording, uses) for call in recording.calls}
    inside = {number for at in known.values() if at for number in (*at.weights, *at.buffers)}
    layers: list[Layer] = []
    live = {0}
    moving = set[int]()
    # A trained weight that the model never uses still needs its zeros in the gradient.
    missing = trained - set(recording.named.values())
    loose = dict(enumerate(sorted(missing), 1 + max([0, *known]))) | {
        at: name for at, name in recording.named.items() if at not in inside
    }
    for at, name in loose.items():
        owns = name in trained
        layers.append(
            Layer(
                Kind.TENSOR,
                {},
                name,
                (),
                at,
                (),
                (),
                (name,),
                (),
                owns,
                live=owns,
            )
        )
    for at, tensor in recording.constants.items():
        constant = Layer(
            Kind.TENSOR,
            {"tensor": tensor},
            "a constant",
            (),
            at,
            (),
            live=False,
        )
        layers.append(constant)
    moving |= {layer.output for layer in layers if layer.owns}
    live |= moving
    for call in recording.calls:
        known_call = known[call.output] or _any_call(call, live)
        weights, buffers = (
            tuple(None if at is None else recording.named[at] for at in group)
            for group in (known_call.weights, known_call.buffers)
        )
        name = next((weight.rpartition(".")[0] for weight in weights if weight), call.name)
        owns = not trained.isdisjoint(weights)
        moves = not moving.isdisjoint(known_call.sources)
        lives = owns or not live.isdisjoint(known_call.sources)
        shapes = _example(call.before), _example(call.after)
        place = (known_call.sources, call.output, *shapes, weights, buffers, owns, moves, lives)
        layers.append(Layer(known_call.kind, known_call.options, name, *place))
        moving |= {call.output} if moves or owns else set()
        live |= {call.output} if lives else set()
    return _needed(layers, recording.output)


def sequence(task: Task, shape: Shape) -> Layers:
    """The layers of nested `nn.Sequential`s, or of one layer alone, by their modules' names.

    Layers that compute nothing are left out. Kept while the model lives.

    Raises:
        Unreadable: the model has another form.
    """
    known = _SEQUENCES.setdefault(task.model, {})
    key = tuple(shape)
    if key not in known:
        try:
            known[key] = _sequence(task, key)
        except Unreadable as reason:
            # As text: the traceback of an exception would keep the model alive.
            known[key] = str(reason)
    result = known[key]
    if isinstance(result, str):
        raise Unreadable(result)
    return result


def _sequence(task: Task, shape: Shape) -> Layers:
    parts = _leaves(task.model)
    if parts is None:
        raise Unreadable("the model does not consist of nn.Sequential and layers of torch.nn only")
    if any(map(_altered, task.model.modules())):
        raise Unreadable("a module has hooks or its own forward")
    if len(list(task.model.named_parameters(remove_duplicate=False))) != len(task.layout):
        raise Unreadable("layers share weights")
    try:
        layers = read(task, shape)
    except Exception as error:  # a caller of the model on such inputs will see it
        raise Unreadable(f"the model cannot be read: {error}") from error
    for layer in layers:
        if layer.kind in (Kind.STRAIGHT, Kind.CURVED):
            raise Unreadable(f"{layer.name} has no kind in this form")
    if len(layers) != len(parts):
        raise Unreadable("a module is more than one layer")
    pairs = zip(parts, layers, strict=True)
    kept = [(name, layer) for (name, _), layer in pairs if layer.kind is not Kind.IDENTITY]
    return tuple(
        replace(layer, name=name, sources=(at,), output=at + 1)
        for at, (name, layer) in enumerate(kept)
    )


def _leaves(
    model: nn.Module,
    name: str = "",
) -> list[tuple[str, nn.Module]] | None:
    """The layers of nested `nn.Sequential`s by name; None if a module is not PyTorch's own."""
    if type(model) is nn.Identity:
        return []
    if type(model) is not nn.Sequential:
        return [(name, model)] if type(model).__module__.startswith("torch.nn.modules") else None
    prefix = f"{name}." if name else ""
    layers = list[tuple[str, nn.Module]]()
    for key, module in model._modules.items():  # `named_children` leaves out repeated modules
        parts = None if module is None else _leaves(module, prefix + key)
        if parts is None:
            return None
        layers += parts
    return layers


def _altered(module: nn.Module) -> bool:
    before = module._forward_pre_hooks or module._backward_pre_hooks
    after = module._forward_hooks or module._backward_hooks
    return bool(before or after or "forward" in vars(module))


def _needed(layers: Sequence[Layer], last: int) -> Layers:
    """The layers on whose values the output depends, and all trained weights."""
    wanted = {last}
    kept = list[Layer]()
    for layer in reversed(layers):
        if layer.output in wanted or (layer.kind is Kind.TENSOR and layer.owns):
            wanted.update(layer.sources)
            kept.append(layer)
    if not kept or kept[0].output != last or kept[0].kind is Kind.TENSOR:
        raise Unreadable("the output does not depend on the input")
    return tuple(reversed(kept))


def _example(shape: Sequence[Any]) -> Shape:
    return tuple(side for side in shape[1:] if isinstance(side, int))


def _known(
    call: Call,
    run: Recording,
    uses: Counter[int],
) -> KnownCall | None:
    """The kind of a call, if it has one: its arguments are numbers of sources then."""
    make = _FUNCTIONS.get(call.function)
    if make is None or call.part is not None:
        return None
    try:
        at = make(call, *call.arguments, **call.options)
    except (TypeError, Unreadable):  # in a form that has no kind
        return None
    if at is None or not all(isinstance(argument, Slot) for argument in at.sources):
        return None
    groups = [
        tuple(
            call.sources[argument.at] if isinstance(argument, Slot) else argument
            for argument in group
        )
        for group in at[2:]
    ]
    values, weights, buffers = groups
    named = {number for number in (*weights, *buffers) if number is not None}
    # A shared weight is a layer of its own, where its gradients are added up.
    alone = all(uses[number] == 1 for number in weights if number is not None)
    fixed = not any(isinstance(option, PerExample) for option in leaves(at.options))
    if not named <= run.named.keys() or not named.isdisjoint(values) or not alone or not fixed:
        return None
    return KnownCall(at.kind, at.options, values, weights, buffers)


def _any_call(call: Call, live: set[int]) -> KnownCall:
    straight = call.function in _STRAIGHT
    # x - y is linear; x - 1 is only affine, and its tangent must not subtract 1 again.
    straight |= call.function in _DIFFERENCES and call.arguments == (Slot(0), Slot(1))
    # Padding is linear only if the border is 0.
    straight |= (
        call.function is functional.pad
        and not any(call.arguments[3:])
        and not (call.options.get("value"))
    )
    options = {"call": call, "live": tuple(source in live for source in call.sources)}
    return KnownCall(Kind.STRAIGHT if straight else Kind.CURVED, options, call.sources)


def _everywhere(*names: str) -> Iterator[Any]:
    """PyTorch's functions and methods of these names."""
    for owner in (torch, Tensor):
        for name in names:
            for form in (name, f"{name}_", f"__{name}__", f"__r{name}__", f"__i{name}__"):
                if hasattr(owner, form):
                    yield getattr(owner, form)


def _linear(
    _: Call,
    x: Any,
    weight: Any,
    bias: Any = None,
) -> KnownCall:
    return KnownCall(Kind.LINEAR, {}, (x,), (weight, bias))


_DEFAULTS = {
    **dict.fromkeys(("weight", "bias")),
    **dict.fromkeys(("stride", "dilation", "groups"), 1),
    **{"padding": 0, "training": False, "momentum": 0.1, "eps": 1e-5},
}
_Maker = Callable[..., "KnownCall | None"]


def _reads(names: str) -> Callable[[Callable[[Call, dict[str, Any]], KnownCall]], _Maker]:
    """A reader of a call from its arguments by name, with PyTorch's defaults."""

    def decorate(make: Callable[[Call, dict[str, Any]], KnownCall]) -> _Maker:
        def of(
            call: Call,
            *arguments: Any,
            **options: Any,
        ) -> KnownCall:
            named = dict(zip(names.split(), arguments, strict=False)) | options
            return make(call, _DEFAULTS | named)

        return of

    return decorate


def _convolution(call: Call, at: dict[str, Any]) -> KnownCall:
    settings = (at[name] for name in ("stride", "padding", "dilation", "groups"))
    turned = "transpose" in call.name
    more = (at.get("output_padding", 0),) if turned else ()
    options = convolution(call.shapes[at["weight"].at][2:], *settings, *more)
    return KnownCall(Kind.CONVOLUTION, options, (at["input"],), (at["weight"], at["bias"]))


@_reads("input running_mean running_var weight bias training momentum eps")
def _batch_norm(_: Call, at: dict[str, Any]) -> KnownCall:
    common = ({"eps": at["eps"]}, (at["input"],), (at["weight"], at["bias"]))
    if at["training"]:
        return KnownCall(Kind.BATCH_STATISTICS, *common)
    return KnownCall(Kind.BATCH_NORM, *common, (at["running_mean"], at["running_var"]))


@_reads("input normalized_shape weight bias eps")
def _layer_norm(_: Call, at: dict[str, Any]) -> KnownCall:
    options = {"shape": tuple(at["normalized_shape"]), "eps": at["eps"]}
    return KnownCall(Kind.LAYER_NORM, options, (at["input"],), (at["weight"], at["bias"]))


@_reads("input num_groups weight bias eps")
def _group_norm(_: Call, at: dict[str, Any]) -> KnownCall:
    options = {"groups": at["num_groups"], "eps": at["eps"]}
    return KnownCall(Kind.GROUP_NORM, options, (at["input"],), (at["weight"], at["bias"]))


def _sum(
    _: Call,
    input: Any,
    other: Any,
) -> KnownCall:
    return KnownCall(Kind.SUM, {}, (input, other))


def _softmax(
    _: Call,
    input: Any,
    dim: int,
    **more: Any,
) -> KnownCall | None:
    same = more.get("dtype") is None
    return KnownCall(Kind.SOFTMAX, {"dim": dim}, (input,)) if same else None


def _mean(
    call: Call,
    input: Any,
    dim: Any,
    keepdim: bool = False,
) -> KnownCall | None:
    sides = len(call.before)
    dims = tuple(d % sides for d in ([dim] if isinstance(dim, int) else dim))
    whole = 0 in dims  # the examples, too
    return None if whole else KnownCall(Kind.MEAN, {"dims": dims, "keep": keepdim}, (input,))


def _reshape(
    call: Call,
    input: Any,
    *_: Any,
    **__: Any,
) -> KnownCall | None:
    examples = PerExample(0, 1)
    ends = call.before[:1] == call.after[:1] == (examples,)
    shape = call.after[1:]
    fits = ends and not any(isinstance(side, PerExample) for side in (*shape, *call.before[1:]))
    return KnownCall(Kind.RESHAPE, {"shape": shape}, (input,)) if fits else None


def _dropout(
    _: Call,
    input: Any,
    p: float = 0.5,
    training: bool = True,
    **__: Any,
) -> KnownCall | None:
    return KnownCall(Kind.IDENTITY, {}, (input,)) if not training or p == 0 else None


def _activation(make: Any) -> Callable[..., KnownCall]:
    return lambda _, input, *options, **more: KnownCall(
        Kind.ACTIVATION, {"function": make(*options, **more)}, (input,)
    )


def _pool(make: Any) -> Callable[..., KnownCall | None]:
    def of(
        call: Call,
        input: Any,
        *options: Any,
        **more: Any,
    ) -> KnownCall | None:
        kind, chosen = make(*options, **more)
        return KnownCall(kind, chosen, (input,)) if len(call.before) == 4 else None

    return of


def _product(
    _: Call,
    input: Any,
    other: Any,
) -> KnownCall:
    if not isinstance(input, Slot):
        input, other = other, input
    if isinstance(other, int | float):
        return KnownCall(Kind.SCALE, {"factor": other}, (input,))
    return KnownCall(Kind.PRODUCT, {}, (input, other))


def _quotient(
    _: Call,
    input: Any,
    other: Any,
) -> KnownCall | None:
    number = isinstance(other, int | float) and bool(other)
    return KnownCall(Kind.SCALE, {"factor": 1 / other}, (input,)) if number else None


def _matrix_product(
    call: Call,
    input: Any,
    other: Any,
) -> KnownCall | None:
    one, two = (call.shapes[slot.at] for slot in (input, other))
    # `torch.bmm`, which the rule calls, does not broadcast.
    stacks = len(one) == len(two) > 2 and one[:-2] == two[:-2]
    return KnownCall(Kind.MATRIX_PRODUCT, {}, (input, other)) if stacks else None


def _permute(
    call: Call,
    input: Any,
    *dims: Any,
) -> KnownCall | None:
    order = dims[0] if len(dims) == 1 else dims
    sides = len(call.before)
    return KnownCall(Kind.PERMUTE, {"order": tuple(d % sides for d in order)}, (input,))


def _transpose(
    call: Call,
    input: Any,
    one: int,
    two: int,
) -> KnownCall:
    order = list(range(len(call.before)))
    order[one], order[two] = order[two], order[one]
    return KnownCall(Kind.PERMUTE, {"order": tuple(order)}, (input,))


_FUNCTIONS: dict[Any, _Maker] = {
    **{
        getattr(torch, f"conv{form}{sides}d"): _reads(f"input weight bias {names}")(_convolution)
        for sides in (1, 2, 3)
        for form, names in (
            ("", "stride padding dilation groups"),
            ("_transpose", "stride padding output_padding groups dilation"),
        )
    },
    **{function: _activation(make) for function, make in activations.OF_CALLS.items()},
    **dict.fromkeys(_everywhere("add"), _sum),
    **dict.fromkeys(_everywhere("mul"), _product),
    **dict.fromkeys((*_everywhere("div", "true_divide"), Tensor.__truediv__), _quotient),
    **dict.fromkeys(_everywhere("matmul", "bmm"), _matrix_product),
    **dict.fromkeys(_everywhere("permute"), _permute),
    **dict.fromkeys(_everywhere("transpose", "swapaxes", "swapdims"), _transpose),
    **dict.fromkeys((functional.softmax, torch.softmax, Tensor.softmax), _softmax),
    **dict.fromkeys(_everywhere("mean"), _mean),
    **dict.fromkeys(_everywhere("reshape", "flatten", "unflatten"), _reshape),
    functional.linear: _linear,
    functional.batch_norm: _batch_norm,
    functional.layer_norm: _layer_norm,
    functional.group_norm: _group_norm,
    functional.avg_pool2d: _pool(average_pool),
    functional.adaptive_avg_pool2d: _pool(adaptive_pool),
    **dict.fromkeys((torch.max_pool2d, functional.max_pool2d), _pool(max_pool)),
    **dict.fromkeys(
        (getattr(functional, f"dropout{of}") for of in ("", "1d", "2d", "3d")), _dropout
    ),
    Tensor.contiguous: lambda _, input, **__: KnownCall(Kind.IDENTITY, {}, (input,)),
}
"""How to read each function that has a kind, by its arguments."""
_DIFFERENCES = {*_everywhere("sub", "subtract")}
_NAMES = """
    reshape flatten unflatten reshape_as expand expand_as broadcast_to squeeze unsqueeze permute
    transpose movedim t cat concat stack hstack vstack chunk split unbind narrow select getitem
    index_select gather roll flip rot90 repeat repeat_interleave tile mean sum neg cumsum diff clone
    pixel_shuffle pixel_unshuffle
"""
_STRAIGHT = {
    *_everywhere(*_NAMES.split()),
    *(getattr(Tensor, name).__get__ for name in ("T", "mT")),
    functional.interpolate,
    *(getattr(functional, f"avg_pool{sides}d") for sides in (1, 2, 3)),
    *(getattr(functional, f"adaptive_avg_pool{sides}d") for sides in (1, 2, 3)),
    functional.unfold,
    functional.fold,
}
"""Functions that are linear in all their tensors of floating point together."""
