"""Record what a model computes: every call of a PyTorch function, as it runs.

The model runs twice, on two and on three examples. Whole numbers that differ between the recordings
must depend on the number of examples, as the B in `view(B, 8, -1)` does; so calls can be repeated
for any number. Modules, hooks and Python code of the model run as usual, and only calls that lead
to tensors are kept. The recording is of one thread.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name

from leakbound import client
from leakbound.core import Task

_BRANCHES = {"__bool__", "__float__", "__index__", "__int__", "item", "numpy", "tolist"}
"""Functions by which Python learns the values of a tensor."""
_UNFOLDED = (functional.multi_head_attention_forward,)
"""PyTorch's own Python functions of which the calls inside are recorded."""


class Unrecordable(Exception):
    """Why a model's calls cannot be repeated on other inputs."""


@dataclass(frozen=True)
class Slot:
    """The place of a tensor among a call's arguments: number `at` of its sources."""

    at: int


@dataclass(frozen=True)
class PerExample:
    """A whole number that depends on the number of examples: `fixed` plus `each` for every one."""

    fixed: int
    each: int


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a function; its tensors are replaced by slots, and `part` chooses of its results.

    `sources` are values, by number, and `shapes` their shapes. `own`: the call writes to its first
    tensor.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    sources: tuple[int, ...]
    output: int
    shapes: tuple[tuple[int | PerExample, ...], ...]
    after: tuple[int | PerExample, ...]
    part: int | None = None
    own: bool = False

    @property
    def name(self) -> str:
        name: str = resolve_name(self.function) or getattr(self.function, "__name__", "a function")
        return name

    @property
    def before(self) -> tuple[int | PerExample, ...]:
        """The shape of the first source."""
        return self.shapes[0] if self.shapes else ()

    def of(self, tensors: tuple[Tensor, ...], examples: int) -> Tensor:
        """The result for other tensors and another number of examples."""

        def fill(value: Any) -> Any:
            if isinstance(value, Slot):
                tensor = tensors[value.at]
                return tensor.clone() if self.own and value.at == 0 else tensor
            if isinstance(value, PerExample):
                return value.fixed + value.each * examples
            return value

        arguments = _mapped(fill, self.arguments)
        returned = self.function(*arguments, **_mapped(fill, dict(self.options)))
        result: Tensor = returned if self.part is None else returned[self.part]
        return result


@dataclass
class Recording:
    """All calls of one run. Value 0 is the input, others are numbered as they appear.

    `named` are the weights and buffers that were used, by value; `constants` other tensors.
    """

    calls: list[Call] = field(default_factory=list)
    named: dict[int, str] = field(default_factory=dict)
    constants: dict[int, Tensor] = field(default_factory=dict)
    output: int = 0


class _Recorder(TorchFunctionMode):
    def __init__(self, inputs: Tensor, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {id(tensor): name for name, tensor in tensors.items()}
        self.numbers = {id(inputs): 0}
        self.kept: list[Any] = [inputs]  # no address is used twice
        self.made: set[int] = set()
        self.found = Recording()
        self.count = 1

    def __torch_function__(
        self,
        func: Any,
        types_: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _UNFOLDED:
            with self:
                return _unfolded(func)(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            with self:
                return _attention(*args, **kwargs)
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(id(tensor) in self.numbers for tensor in tensors):
            if name in _BRANCHES:
                raise Unrecordable(f"the model reads values in Python ({name})")
            if name in ("__setitem__", "__set__") or "out" in kwargs:
                raise Unrecordable(f"the model writes into a tensor ({name})")
        # the same values, wherever they lie in memory
        func = {Tensor.view: Tensor.reshape, Tensor.view_as: Tensor.reshape_as}.get(func, func)
        self._note(func, args, kwargs, tensors, result)
        return result

    def _note(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        result: Any,
    ) -> None:
        several = isinstance(result, tuple | list) and not isinstance(result, torch.Size)
        results = list(enumerate(result)) if several else [(None, result)]
        if not any(isinstance(value, Tensor) for _, value in results):
            return
        distinct = list({id(tensor): tensor for tensor in tensors}.values())
        places = {id(tensor): Slot(at) for at, tensor in enumerate(distinct)}
        arguments = _mapped(lambda value: places.get(id(value), value), tuple(args))
        options = _mapped(lambda value: places.get(id(value), value), kwargs)
        sources = tuple(self._number(tensor) for tensor in distinct)
        shapes = tuple(tuple(tensor.shape) for tensor in distinct)
        for part, value in results:
            if isinstance(value, Tensor):
                # An in-place call returns its first tensor. A new number shows later calls the
                # change.
                writes = bool(distinct) and value is distinct[0]
                place = (sources, self._new(value), shapes, tuple(value.shape), part, writes)
                self.found.calls.append(Call(func, arguments, options, *place))

    def _new(self, tensor: Tensor) -> int:
        self.kept.append(tensor)
        self.numbers[id(tensor)] = number = self.count
        self.count += 1
        return number

    def _number(self, tensor: Tensor) -> int:
        known = self.numbers.get(id(tensor))
        if known is not None:
            return known
        number = self._new(tensor)
        if id(tensor) in self.names:
            self.found.named[number] = self.names[id(tensor)]
        else:
            self.found.constants[number] = tensor
        return number


def _unfolded(function: Any) -> Any:
    """A Python function of PyTorch that does not hand over to a recorder, though its calls do."""
    namespace = {**function.__globals__, "has_torch_function": lambda *_: False}
    copy = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__  # the constructor does not take them
    return copy


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention in single steps."""
    if dropout_p or enable_gqa:
        raise Unrecordable("attention with dropout or with shared keys")
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        size = scores.shape[-2:]
        attn_mask = torch.ones(size, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value


def leaves(value: Any) -> Iterator[Any]:
    """What nested lists, dictionaries and slices hold."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(tuple(value.values()))
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A nested value with each leaf replaced."""
    if isinstance(value, tuple | list):
        parts = [_mapped(function, item) for item in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_mapped(function, item) for item in (value.start, value.stop, value.step)))
    return function(value)


def record(task: Task, shape: tuple[int, ...]) -> Recording:
    """What the task's model computes from any number of examples of a shape (*S).

    Raises:
        Unrecordable: the calls differ in more than numbers of examples, or depend on values.
    """
    sizes = (2, 3)  # not 1: such a side broadcasts, and `squeeze` drops it
    one, other = (_run(task, (size, *shape)) for size in sizes)
    same = len(one.calls) == len(other.calls) and one.named == other.named
    if not same or one.output != other.output or one.constants.keys() != other.constants.keys():
        raise Unrecordable("the model's calls depend on the number of examples")
    if any(other.constants[at] is not tensor for at, tensor in one.constants.items()):
        raise Unrecordable("a tensor of the model has no known origin")
    pairs = zip(one.calls, other.calls, strict=True)
    one.calls = [_joined(a, b, *sizes) for a, b in pairs]
    return one


def _run(task: Task, shape: tuple[int, ...]) -> Recording:
    tensors = task.tensors(task.parameters.detach())
    # Zeros suffice: a model whose calls depend on values is refused.
    inputs = task.parameters.new_zeros(shape)
    recorder = _Recorder(inputs, tensors)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(client.plain_attention())
        stack.enter_context(recorder)
        output = client.call(task, tensors, inputs)
    if id(output) not in recorder.numbers:
        raise Unrecordable("the output is not of a recorded call")
    recorder.found.output = recorder.numbers[id(output)]
    return recorder.found


def _joined(
    one: Call,
    other: Call,
    few: int,
    more: int,
) -> Call:
    """One call for any number of examples, of two."""

    def join(a: Any, b: Any) -> Any:
        if isinstance(a, tuple | list) and type(a) is type(b) and len(a) == len(b):
            parts = [join(*pair) for pair in zip(a, b, strict=True)]
            return parts if isinstance(a, list) else tuple(parts)
        if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
            return {key: join(a[key], b[key]) for key in a}
        if isinstance(a, slice) and isinstance(b, slice):
            return slice(*(join(getattr(a, k), getattr(b, k)) for k in ("start", "stop", "step")))
        # Not isinstance: True and False are ints too.
        if type(a) is int and type(b) is int and a != b:
            each = (b - a) // (more - few)
            return PerExample(a - each * few, each)
        if a is b or (type(a) is type(b) and a == b):
            return a
        raise Unrecordable(f"{one.name} has an argument that depends on the examples")

    if one.function != other.function or one.sources != other.sources or one.part != other.part:
        raise Unrecordable("the model's calls depend on the number of examples")
    names = ("arguments", "options", "shapes", "after")
    return replace(one, **{name: join(getattr(one, name), getattr(other, name)) for name in names})
