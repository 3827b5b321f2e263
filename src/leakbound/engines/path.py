"""The path from a model's input to a layer: which of its calls change what the layer gets.

A layer's gradient shows what the layer got. This is the client's example only if the model hands it
on. So the model runs on probes, every operation is watched, and a path is given only if each value
of the layer's input is one value of the example, times a constant, plus a constant. Everything else
on the way ends the path: other functions of the input, random draws, a branch on values, another
call of the layer. What cannot be watched ends it, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from leakbound import client
from leakbound._util import copies, generators
from leakbound.core import Task
from leakbound.randomness import stream, uniform

# A flip of probability 1/2 looks the same in all of these draws once in 500,000 times.
DRAWS = 20
"""Draws of the random generators for which a layer must get the same from an example."""
FEW = 3
"""The same, for a module that gets codes or features."""
CLOSE = 1e-5
"""How far the layer's input may be from the path's, relative to the largest value."""

_ATEN = torch.ops.aten
_MOVES = {
    _ATEN.view,
    _ATEN._unsafe_view,
    _ATEN.permute,
    _ATEN.transpose,
    _ATEN.t,
    _ATEN.clone,
    _ATEN.unsqueeze,
    _ATEN.squeeze,
    _ATEN.slice,
    _ATEN.select,
    _ATEN.split,
    _ATEN.unbind,
    _ATEN.split_with_sizes,
    _ATEN.cat,
    _ATEN.stack,
    _ATEN.detach,
    _ATEN.alias,
    _ATEN.expand,
}
"""Operations that only say where each value lies."""
_AFFINE = {
    _ATEN.add.Tensor,
    _ATEN.add.Scalar,
    _ATEN.add_.Tensor,
    _ATEN.add_.Scalar,
    _ATEN.sub.Tensor,
    _ATEN.sub.Scalar,
    _ATEN.sub_.Tensor,
    _ATEN.sub_.Scalar,
    _ATEN.mul.Tensor,
    _ATEN.mul.Scalar,
    _ATEN.mul_.Tensor,
    _ATEN.mul_.Scalar,
    _ATEN.rsub.Tensor,
    _ATEN.rsub.Scalar,
    _ATEN.neg.default,
}
_QUOTIENT = {_ATEN.div.Tensor, _ATEN.div.Scalar, _ATEN.div_.Tensor, _ATEN.div_.Scalar}
"""Operations that are affine in one argument if the others are constant; the latter in the first.
"""
_FORWARDS = (nn.Linear.forward, nn.Conv2d.forward, nn.Embedding.forward)
"""What layers may compute: subclasses often change their input themselves."""
_DEPENDS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_READS = {"numpy", "tolist", "data_ptr", "storage", "untyped_storage"} | {
    f"__{name}__" for name in ("array", "dlpack", "deepcopy", "reduce_ex")
}
"""By which the model's code learns values: tags of operations, and methods that are none."""

LAYER = "the input of the first layer was recovered; it may differ from the client's example"
"""What is said where a layer's input is known, and the path from the example to it is not."""


class NoPath(Exception):
    """Why a layer's input is not shown to be the example; it ends a sentence."""


class _Entered(Exception):
    """The layer was called; what follows it is not computed."""


@dataclass(frozen=True, eq=False)
class Path:
    """What a layer gets of an example x, all flattened: scale * x[index] + shift, in float64."""

    index: Tensor
    scale: Tensor
    shift: Tensor

    @property
    def plain(self) -> bool:
        """Whether the layer gets the values themselves, in their order."""
        return self.unscaled and bool((self.index.diff() == 1).all())

    @property
    def unscaled(self) -> bool:
        """Whether the layer gets the values themselves, in any order."""
        return bool((self.scale == 1).all() and (self.shift == 0).all())

    def of(self, examples: Tensor) -> Tensor:
        """(N, D) what the layer gets of examples (N, *S)."""
        flat = examples.flatten(1).double()
        values: Tensor = self.scale.to(flat) * flat[:, self.index.to(flat.device)]
        return values + self.shift.to(flat)

    def back(self, inputs: Tensor, ones: Tensor) -> Tensor:
        """(N, D) the examples behind what the layer got. Rows (N, D) and (N,) may be multiples of
        [input | 1]: these are the same multiples of the examples then.
        """
        shift = self.shift.to(inputs.device)
        scale = self.scale.to(inputs.device)
        return self._sorted((inputs.double() - ones.double()[:, None] * shift) / scale).to(inputs)

    def spread(self, inputs: Tensor, ones: Tensor) -> Tensor:
        """(N, D) the variances of `back`, from those of its arguments."""
        shift = self.shift.to(inputs.device)
        scale = self.scale.to(inputs.device)
        total = inputs.double() + ones.double()[:, None] * shift.square()
        return self._sorted(total / scale.square()).to(inputs)

    def folded(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (units, D) and bias with the same outputs, for a layer that gets the example."""
        shift = self.shift.to(weight.device)
        scale = self.scale.to(weight.device)
        moved = bias.double() + weight.double() @ shift
        return self._sorted(weight.double() * scale).to(weight), moved.to(bias)

    def _sorted(self, values: Tensor) -> Tensor:
        ordered = torch.empty_like(values)
        ordered[:, self.index.to(values.device)] = values
        return ordered

    def magnifies(self, low: float, high: float) -> float:
        """How much `back` magnifies relative errors, in units of the input's range."""
        most = max(float((self.scale * end + self.shift).abs().max()) for end in (low, high))
        return most / float(self.scale.abs().min()) / (high - low)


_PATHS: WeakKeyDictionary[nn.Module, dict[Any, tuple[Any, Path | str]]] = WeakKeyDictionary()
"""By model, then by layer and shape: the buffers that the path was traced with, and the path."""


def path_to(
    task: Task,
    shape: Sequence[int],
    name: str,
) -> Path:
    """The path from an example (*S) to the layer `name`, in every mode of the model.

    Raises:
        NoPath: the layer may get something else.
    """
    known = _PATHS.setdefault(task.model, {})
    key = (name, tuple(shape))
    # Running statistics scale and shift what the layer gets: other buffers, another path.
    if key not in known or known[key][0] is not task.buffers:
        try:
            known[key] = task.buffers, _path_to(task, tuple(shape), name)
        except NoPath as reason:
            # As text: the traceback of an exception would keep the model alive.
            known[key] = task.buffers, str(reason)
    result = known[key][1]
    if isinstance(result, str):
        raise NoPath(result)
    return result


def unlike(
    task: Task,
    shape: Sequence[int],
    name: str,
) -> str | None:
    """Why what the layer `name` got may differ from the flattened example (*S); None: it is it."""
    try:
        if path_to(task, shape, name).plain:
            return None
        return f"{LAYER}: the model changes it before the layer"
    except NoPath as reason:
        return f"{LAYER}: {reason}"


def _path_to(
    task: Task,
    shape: tuple[int, ...],
    name: str,
) -> Path:
    layer = task.model.get_submodule(name)
    if type(layer).forward not in _FORWARDS or "forward" in vars(layer):
        raise NoPath("the layer computes something else than a layer of its kind")
    paths: list[Path] = []
    for mode, model in _modes(task):
        each = list[Path]()
        failed = ""
        # Some models treat one example in another way, or mix it with that of the call before.
        for at, count in enumerate((1, 1, 2, 2)):
            try:
                each.append(_traced(task, model, _probes(task, count, shape, at), name))
            except NoPath:
                raise
            except Exception as error:  # batch norm in training mode takes no single value
                failed = str(error)
        # The given mode must run. Another mode that does not run cannot be the client's.
        if not each and not (paths and mode != "as given"):
            raise NoPath(f"the model does not run on probes ({failed})")
        paths += each
    first = paths[0]
    for other in paths[1:]:
        same = torch.equal(first.index, other.index) and torch.equal(first.scale, other.scale)
        if not same or not torch.equal(first.shift, other.shift):
            raise NoPath(
                "the model changes the input before the layer, and not always in the same way"
            )
    return first


def steady(
    task: Task,
    example: Tensor,
    name: str,
    path: Path,
) -> None:
    """Check forward that the layer gets from an example (1, *S) what the path says, in every mode
    and for DRAWS draws of the generators, bit by bit the same.

    Raises:
        NoPath: it does not.
    """
    example = example.to(task.parameters) if example.is_floating_point() else example
    wanted = path.of(example)
    first = None
    for _, model in _modes(task):
        tensors = _tensors(task)
        for count in (1, 2):
            batch = example.expand(count, *example.shape[1:])
            got = list[Tensor]()
            try:
                for draw in range(DRAWS):
                    drawing = generators.other_draws(task.parameters.device, draw)
                    with _watched(model, name) as seen, drawing:
                        _run(task, model, tensors, batch.clone())  # some write to their input
                    if len(seen) != 1:
                        raise NoPath("the model does not call the layer once")
                    got.append(seen[0].flatten(1)[:1])
            except NoPath:
                raise
            except Exception:  # as on probes
                continue
            first = got[0] if first is None else first
            if not all(torch.equal(first, values) for values in got):
                raise NoPath("the model draws at random before the layer, or its modes differ")
            break
    if first is None:
        raise NoPath("the model does not run on the answer")
    # Up to rounding only here: the path is in float64, and the model is not.
    off = (first.double() - wanted.to(first.device)).abs().max()
    if not bool(off <= CLOSE * wanted.abs().max().clamp_min(1e-30)):
        raise NoPath("the layer gets something else from the answer")


def unchanging(
    task: Task,
    inputs: Tensor,
    name: str,
    *,
    whole: bool = True,
) -> bool:
    """Whether a module gets the same from these inputs in every mode, with no random draw before.

    A path need not exist: the module may get codes, or features among others. Unless `whole`, only
    the first call is looked at, and what follows is not computed.
    """
    first: list[Tensor] | None = None
    fixed = task.frozen
    for mode, model in _modes(task):
        # A norm may change its statistics. Large models have large weights, which are not copied.
        kept = {k: v if k in fixed else v.clone() for k, v in task.buffers.items()}
        tensors = {**task.tensors(), **kept}
        for draw in range(FEW):
            drawn = list[bool]()
            watched = _watched(model, name, drawn, whole=whole)
            try:
                drawing = generators.other_draws(task.parameters.device, draw)
                end = suppress(_Entered)
                with drawing, watched as seen, torch.no_grad(), end:
                    client.call(
                        replace(task, model=model),
                        tensors,
                        inputs,
                        twice=False,
                    )
            except Exception:  # batch norm in training mode takes no single value
                if mode == "as given":
                    return False
                break
            first = seen if first is None else first
            same = len(seen) == len(first) and all(map(torch.equal, seen, first))
            if not seen or drawn[0] or not same:
                return False
    return True


def _modes(task: Task) -> Iterator[tuple[str, nn.Module]]:
    """Copies of the model as it was given, and in both modes: a client may train in either. One in
    which it was given already is left out.
    """
    yield "as given", copies.duplicate(task.model, shared=True)
    modules = list(task.model.modules())
    given = {module.training for module in modules}
    # A method of its own may do more than to set the flags.
    if not all(_sets_flags(module) for module in modules):
        given = set()
    if given != {True}:
        yield "training", copies.duplicate(task.model, shared=True).train()
    if given != {False}:
        yield "evaluation", copies.duplicate(task.model, shared=True).eval()


def _sets_flags(module: nn.Module) -> bool:
    methods = getattr(module.train, "__func__", None), getattr(module.eval, "__func__", None)
    return methods == (nn.Module.train, nn.Module.eval)


def _probes(
    task: Task,
    count: int,
    shape: tuple[int, ...],
    at: int,
) -> Tensor:
    source = stream(at, "path", "probes")
    if task.domain is not None:
        drawn = task.domain.start(count, source).to(task.parameters.device)
        return drawn.to(task.parameters) if drawn.is_floating_point() else drawn
    low, high = task.input_range
    return low + (high - low) * uniform((count, *shape), source, like=task.parameters)


def _tensors(task: Task) -> dict[str, Tensor]:
    """The model's tensors, each with memory of its own; trained ones have a gradient."""
    return {
        # The tracer identifies tensors by their memory; views of one vector would share it.
        key: value.detach().clone().requires_grad_(key in task.names)
        for key, value in task.tensors().items()
    }


def _run(
    task: Task,
    model: nn.Module,
    tensors: dict[str, Tensor],
    inputs: Tensor,
) -> None:
    """One forward pass as in a training."""
    with torch.enable_grad():
        client.call(replace(task, model=model), tensors, inputs, twice=False)


@contextmanager
def _watched(
    model: nn.Module,
    name: str,
    drawn: list[bool] | None = None,
    *,
    whole: bool = True,
) -> Iterator[list[Tensor]]:
    """What the layer gets; and whether numbers were drawn before. Unless `whole`, the run ends at
    the layer.
    """
    seen = list[Tensor]()
    before = generators.states()

    def note(
        _: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        seen.append(next(_tensors_in((args, kwargs))).detach().clone())
        if drawn is not None:
            drawn.append(generators.states() != before)
        if not whole:
            raise _Entered

    hook = model.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def _traced(
    task: Task,
    model: nn.Module,
    inputs: Tensor,
    name: str,
) -> Path:
    tensors = _tensors(task)
    layer = model.get_submodule(name)
    prefix = f"{name}." if name else ""
    weights = [tensors[prefix + key] for key in ("weight", "bias") if prefix + key in tensors]
    trained = [value for key, value in tensors.items() if key in task.names]
    tracer = _Tracer(inputs, weights, trained)
    with ExitStack() as stack:
        stack.enter_context(generators.other_draws(task.parameters.device, 0))
        before = generators.states()

        def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
            received = args[0] if len(args) == 1 and isinstance(args[0], Tensor) else None
            tracer.enter(received, drawn=generators.states() != before)

        def leave(*_: Any) -> None:
            tracer.inside = False

        hooks = [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
        for hook in hooks:
            stack.callback(hook.remove)
        stack.enter_context(_Handed(tracer))
        stack.enter_context(tracer)
        counted = _counted(model)
        _run(task, model, tensors, inputs)
    if counted != _counted(model):
        raise NoPath("the model counts its calls, and may change with them")
    return tracer.path(len(inputs))


def _counted(model: nn.Module) -> list[tuple[str, str, Any]]:
    """The numbers that a model keeps outside of its tensors."""
    return [
        (name, key, value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int | float | str)
    ]


_Place = tuple[int, int, tuple[int, ...], tuple[int, ...]]
_State = tuple[Tensor, Tensor, Tensor]
"""Where a tensor lies in memory; and the index, scale and shift of each of its values."""


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the values of the input through all operations, and what is made of them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else its first use imports PyTorch's compiler, which takes a second

    def __init__(
        self,
        inputs: Tensor,
        weights: Sequence[Tensor],
        trained: Sequence[Tensor],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside = False
        self.drawn = False
        self.problem: str | None = None
        self.entered: list[_State | str] = []
        self.kept: list[Any] = [inputs]  # no address is used twice
        self.own = {_memory(tensor) for tensor in weights}
        self.trained = {_memory(tensor) for tensor in trained}
        # What became of the input in each piece of memory that depends on it.
        self.derived = {_memory(inputs): "a copy"}
        index = torch.arange(inputs.numel()).reshape(inputs.shape)
        scale = torch.ones(inputs.shape, dtype=torch.float64)
        self.states: dict[_Place, _State] = {_place(inputs): (index, scale, 0 * scale)}

    def enter(self, received: Tensor | None, *, drawn: bool) -> None:
        """Note what the layer gets."""
        self.inside = True
        state = None if received is None else self.states.get(_place(received))
        if drawn or self.drawn:
            self.entered.append("the model draws at random before the layer")
        elif state is not None:
            self.entered.append(state)
        elif received is not None and _memory(received) in self.derived:
            how = self.derived[_memory(received)]
            self.entered.append(f"before the layer the model computes {how} of the input")
        else:
            self.entered.append("the layer gets something whose origin is not known")

    def path(self, count: int) -> Path:
        """The path that the run shows, for a number of examples."""
        if self.problem:
            raise NoPath(self.problem)
        if len(self.entered) != 1:
            raise NoPath(f"the model calls the layer {len(self.entered)} times")
        state = self.entered[0]
        if isinstance(state, str):
            raise NoPath(state)
        index, scale, shift = (part.reshape(count, -1) for part in state)
        size = math.prod(next(iter(self.kept)).shape[1:])
        every = torch.arange(count * size).reshape(count, size)
        if index.shape != every.shape or not torch.equal(index.sort(1).values, every):
            raise NoPath("the layer gets a part of the input only, or several examples at once")
        if not bool((scale != 0).all() and scale.isfinite().all() and shift.isfinite().all()):
            raise NoPath("before the layer the model multiplies some value by 0")
        rows = [index - every[:, :1], scale, shift]
        if not all(bool((part == part[:1]).all()) for part in rows):
            raise NoPath("the model treats examples of a batch in different ways")
        return Path(index[0], scale[0], shift[0])

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        # Looked up before the call, which may overwrite its arguments.
        operands = [*_tensors_in((args, kwargs))]
        places = [_place(tensor) for tensor in operands]
        states = [self.states.get(place) for place in places]
        memory = [place[0] for place in places]
        hows = [self.derived[piece] for piece in memory if piece in self.derived]
        result = func(*args, **kwargs)
        made = [*_tensors_in(result)]
        self.kept += [*operands, *made]
        # A draw from a private generator leaves the global ones as they were; the tag shows it.
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn = True
        if not self.inside and not self.own.isdisjoint(memory):
            self.problem = "the model uses the layer's weights elsewhere, too"
        written = {_memory(tensor) for tensor in _written(func, args, kwargs)}
        for place in [place for place in self.states if place[0] in written]:
            del self.states[place]  # other views of what is overwritten
        if not hows:
            return result
        if any(tag in func.tags for tag in _DEPENDS) or not made:
            self.problem = "the model's code reads values of the input, which may decide its path"
        name = func.overloadpacket.__name__
        followed = self._followed(func, args, kwargs, operands, states, made)
        how = next((text for text in hows if text != "a copy"), "a copy")
        if how == "a copy" and any(state is None for state in followed):
            how = repr(name)
        for piece in written | {_memory(tensor) for tensor in made}:
            self.derived[piece] = how
        for tensor, state in zip(made, followed, strict=True):
            if state is not None:
                self.states[_place(tensor)] = state
        return result

    def _followed(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        operands: Sequence[Tensor],
        states: Sequence[_State | None],
        made: Sequence[Tensor],
    ) -> list[_State | None]:
        """The states of the results; None where they are something else than the input's values."""
        nothing: list[_State | None] = [None] * len(made)
        on = [state for state in states if state is not None]
        packet = func.overloadpacket
        if packet in _MOVES and len(on) == len(operands):
            # The state has a memory layout of its own, on which `view` may fail.
            move = torch.reshape if packet in (_ATEN.view, _ATEN._unsafe_view) else func
            if packet is _ATEN.clone:
                return [on[0]]
            parts = [_replaced(args, [state[k] for state in on]) for k in range(3)]
            moved = [[*_tensors_in(move(*part, **kwargs))] for part in parts]
            return [tuple(state) for state in zip(*moved, strict=True)]
        if packet is _ATEN._to_copy and len(on) == 1:
            # A narrower type rounds, so the layer would not get the values themselves.
            wider = torch.promote_types(operands[0].dtype, made[0].dtype) == made[0].dtype
            return [on[0]] if wider and made[0].dtype != torch.bool else nothing
        affine = func in _AFFINE or (func in _QUOTIENT and states[0] is not None)
        # Another shape means broadcasting, which repeats values.
        if not affine or len(on) != 1 or made[0].shape != on[0][0].shape:
            return nothing
        at = next(k for k, state in enumerate(states) if state is not None)
        others = [tensor for k, tensor in enumerate(operands) if k != at]
        # Trained weights change during local steps, so they are not constants.
        constant = not any(_memory(other) in (*self.derived, *self.trained) for other in others)
        if not constant or not made[0].is_floating_point():
            return nothing
        index, scale, shift = on[0]

        def apply(values: Tensor) -> Tensor:
            numbers = [operand.detach().cpu().double() for operand in operands]
            numbers[at] = values.clone()
            result: Tensor = func(*_replaced(args, numbers), **kwargs)
            return result

        base = apply(shift)
        return [(index, apply(shift + scale) - base, base)]


class _Handed(TorchFunctionMode):
    """Sees methods that hand values to Python without an operation."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in _READS:
            held = {_memory(tensor) for tensor in _tensors_in((args, kwargs))}
            if not held.isdisjoint(self.tracer.derived):
                self.tracer.problem = "the model's code reads values of the input"
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    # Otherwise this would count as a read by the code of the model: see `_READS`.
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)


def _place(tensor: Tensor) -> _Place:
    with torch._C.DisableTorchFunction():
        shape = tuple(tensor.shape)
        stride = tuple(tensor.stride())
        # Views of one piece of memory hold different values of it, so the memory alone is no key.
        return _memory(tensor), int(tensor.storage_offset()), shape, stride


def _written(
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
) -> Iterator[Tensor]:
    """The arguments that an operation writes to."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            yield from _tensors_in(value)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _replaced(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Nested arguments with their tensors replaced in order."""
    left = iter(tensors)
    return tree_map_only(Tensor, lambda _: next(left), value)
