"""The engine of examples' own changes for any model whose layers can be tapped.

Every layer with parameters is tapped: its input and its output are recorded, the loss is
differentiated with respect to the outputs only, and forward-mode tangents ride along: one forward
and one backward pass, and no weight gradients. Each pair of an example and a direction is a row of
the batch.

No layer is read, only watched: the engine is used where `plan` finds that every parameter belongs
to one layer without children, which is called once, on one tensor with the examples in front, and
is used nowhere else. A model that is not so takes `torch.func`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.grad import conv2d_input
from torch.overrides import TorchFunctionMode

from leakbound import client
from leakbound.engines.weight_changes import (
    Power,
    Tapped,
    tapped_elements,
    tapped_gradient,
    tapped_powers,
)
from leakbound.types import Task

_KNOWN: WeakKeyDictionary[nn.Module, dict[Any, TapPlan | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class TapPlan:
    """What the engine knows of a model.

    Attributes:
        layers: the names of the layers to tap.
        elements: about how many numbers one pair takes.
        twice: the backward pass must itself be differentiable, as some layers (group norm) have
            no tangent in their fast one.
    """

    layers: tuple[str, ...]
    elements: int
    twice: bool = False


@dataclass(eq=False)
class _Record:
    """What one layer saw, with the tensors' version counters at that moment."""

    calls: int = 0
    plain: bool = True
    seen: list[tuple[Tensor, int]] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        """Called once, with one tensor in and one out, neither written to since."""
        return self.calls == 1 and self.plain and all(t._version == v for t, v in self.seen)

    @property
    def a(self) -> Tensor:
        return self.seen[0][0]

    @property
    def out(self) -> Tensor:
        return self.seen[1][0]


def plan(task: Task, inputs: Tensor, labels: Tensor) -> TapPlan | None:
    """The layers to tap for inputs (B, *S), or None where the generic path is needed.

    The answer is kept for as long as the task's model lives.
    """
    known = _KNOWN.setdefault(task.model, {})
    key = (inputs.shape[1:], inputs.dtype, inputs.device)
    if key not in known:
        known[key] = _plan(task, inputs[:1].detach(), labels[:1])
    return known[key]


def powers(
    task: Task, found: TapPlan, inputs: Tensor, labels: Tensor, tangents: Tensor, fresh: int
) -> tuple[Power, Tensor | None] | None:
    """Sums over pairs of the squared changes of each example's own gradient.

    Shapes:
        inputs, tangents (N, *S); labels (N, ...); the results (P,).

    Returns:
        The sums, and the sum of the gradients of the first `fresh` pairs, if any; None where the
        model behaved unlike its plan.
    """
    try:
        taps = _run(task, found, inputs, labels, tangents)
    except NotImplementedError:  # another loss than the plan's, without a tangent
        return None
    if taps is None:
        return None
    tensors = task.tensors(task.parameters.detach())
    sums: dict[str, Power] = {}
    gradients: dict[str, Tensor] = {}
    for name, tapped in taps.items():
        module, prefix = task.model.get_submodule(name), f"{name}." if name else ""
        own = _own(tensors, prefix)
        for key, power in tapped_powers(module, tapped, own).items():
            sums[prefix + key] = power
        if fresh:
            first = Tapped(*(t[:fresh] for t in (tapped.a, tapped.da, tapped.d, tapped.dd)))
            for key, value in tapped_gradient(module, first, own).items():
                gradients[prefix + key] = value

    def flat(parts: dict[str, Tensor]) -> Tensor:
        return torch.cat([parts[name].reshape(-1) for name, *_ in task.layout])

    total = flat({name: power.total for name, power in sums.items()})
    norm = flat({name: power.norm for name, power in sums.items()})
    return Power(total, norm), flat(gradients) if fresh else None


def _own(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _run(
    task: Task, found: TapPlan, inputs: Tensor, labels: Tensor, tangents: Tensor
) -> dict[str, Tapped] | None:
    tensors = task.tensors(task.parameters.detach())
    with torch.enable_grad(), forward_ad.dual_level():
        moving = joined(inputs.detach().requires_grad_(), tangents)
        with _recorded(task.model, found.layers) as records, ConstantWeights():
            output = client.call(task, tensors, moving)
            loss = task.loss(output, labels)
        if not all(_fits(record, len(inputs)) for record in records.values()):
            return None
        outs = [record.out for record in records.values()]
        deltas = torch.autograd.grad(
            loss,
            outs,
            torch.full_like(loss, len(inputs)),  # every pair's own loss, not their mean
            create_graph=found.twice,
            materialize_grads=True,
        )
        return {
            name: Tapped(*_parted(record.a), *_parted(delta))
            for (name, record), delta in zip(records.items(), deltas, strict=True)
        }


def _parted(dual: Tensor) -> tuple[Tensor, Tensor]:
    primal, tangent = parted(dual)
    primal = primal.detach()
    return primal, torch.zeros_like(primal) if tangent is None else tangent.detach()


def _fits(record: _Record, rows: int) -> bool:
    return (
        record.usable
        and record.out.requires_grad
        and all(t.ndim > 1 and len(t) == rows for t, _ in record.seen)
    )


@contextmanager
def _recorded(model: nn.Module, names: tuple[str, ...]) -> Iterator[dict[str, _Record]]:
    """Record inputs and outputs of the named layers; the hooks are gone afterwards."""
    records = {name: _Record() for name in names}
    handles = []

    def hook(record: _Record) -> Any:
        def note(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            record.calls += 1
            seen = [*args, *kwargs.values(), out]
            record.plain = len(seen) == 2 and all(isinstance(t, Tensor) for t in seen)
            if record.plain:
                record.seen = [(t, t._version) for t in seen]

        return note

    try:
        for name in names:
            module = model.get_submodule(name)
            handles.append(module.register_forward_hook(hook(records[name]), with_kwargs=True))
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _plan(task: Task, image: Tensor, label: Tensor) -> TapPlan | None:
    model = task.model
    if sum(1 for _ in model.named_parameters(remove_duplicate=False)) != len(task.layout):
        return None
    owners = {
        name: module
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    }
    for module in owners.values():
        hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        if next(module.children(), None) is not None or hooked:
            return None
    names = tuple(owners)
    # two sizes: a layer whose front dimension is not the examples cannot match both
    records = _trial(task, names, image, 2)
    if records is None or _trial(task, names, image, 3) is None:
        return None
    sizes = [tapped_elements(owners[name], r.a[:1], r.out[:1]) for name, r in records.items()]
    for twice in (False, True):
        found = TapPlan(names, sum(sizes), twice)
        try:
            if _run(task, found, image, label, torch.ones_like(image)):
                return found
        except NotImplementedError:  # a layer without a tangent
            continue
    return None


def _trial(task: Task, names: tuple[str, ...], one: Tensor, rows: int) -> dict[str, _Record] | None:
    with torch.enable_grad():
        leaves = {
            name: value.detach().requires_grad_()
            for name, value in task.unflatten(task.parameters).items()
        }
        moving = one.repeat(rows, *[1] * (one.ndim - 1)).requires_grad_()
        with _recorded(task.model, names) as records:
            output = client.call(task, {**task.buffers, **leaves}, moving)
        if not all(_fits(record, rows) for record in records.values()):
            return None
        uses = _uses(output)
        for name, record in records.items():
            prefix = f"{name}." if name else ""
            own = _own(leaves, prefix)
            alone = _uses(
                functional_call(task.model.get_submodule(name), own, (record.a.detach(),))
            )
            if any(uses[id(leaf)] != alone[id(leaf)] for leaf in own.values()):
                return None
    return records


def _uses(output: Tensor) -> Counter[int]:
    """How often each leaf, by its id, enters the graph behind `output`."""
    uses: Counter[int] = Counter()
    todo, met = [output.grad_fn], {output.grad_fn}
    while todo:
        node = todo.pop()
        for after, _ in () if node is None else node.next_functions:
            variable = getattr(after, "variable", None)
            if variable is not None:
                uses[id(variable)] += 1
            elif after is not None and after not in met:
                met.add(after)
                todo.append(after)
    return uses


class ConstantWeights(TorchFunctionMode):
    """While active, linear maps and 2-d convolutions treat their weights as constants.

    PyTorch's own forward-mode rules also push a zero change of the weights through the layer, which
    makes three products where two are due. Only calls on weights that neither require a gradient
    nor carry a tangent are replaced, and plain cross-entropy; values and derivatives are those of
    PyTorch up to rounding.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.linear and len(args) in (2, 3) and not kwargs:
            x, weight, bias = (*args, None)[:3]
            if _constant(weight) and _constant(bias):
                return _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        if func is nn.functional.conv2d and len(args) == 7 and not kwargs:
            x, weight, bias, stride, padding, dilation, groups = args
            known = not isinstance(padding, str) and x.ndim == 4
            if known and _constant(weight) and _constant(bias):
                how = (stride, padding, dilation, groups)
                return _Conv.apply(x, weight, bias, how)  # type: ignore[no-untyped-call]
        if func is nn.functional.cross_entropy and len(args) == 2 and not kwargs:
            x, labels = args
            whole = labels.ndim == 1 and not labels.is_floating_point()
            if x.ndim == 2 and whole and bool((labels >= 0).all()):
                # PyTorch's own tangent of this takes as long as a layer
                return -torch.log_softmax(x, 1).gather(1, labels[:, None]).mean()
        return func(*args, **(kwargs or {}))


def _constant(weight: Tensor | None) -> bool:
    if weight is None:
        return True
    return not weight.requires_grad and parted(weight)[1] is None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def jvp(ctx: Any, x: Tensor, *_: Any) -> Tensor:
        return nn.functional.linear(x, ctx.weight)

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor) -> Any:
        plain, moved = parted(deltas[0])
        return (
            joined(plain @ ctx.weight, None if moved is None else moved @ ctx.weight),
            None,
            None,
        )


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Any) -> Tensor:
        ctx.weight, ctx.how, ctx.shape = weight, how, x.shape
        return nn.functional.conv2d(x, weight, bias, *how)

    @staticmethod
    def jvp(ctx: Any, x: Tensor, *_: Any) -> Tensor:
        return nn.functional.conv2d(x, ctx.weight, None, *ctx.how)

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor) -> Any:
        def pulled(delta: Tensor) -> Tensor:
            back: Tensor = conv2d_input(  # type: ignore[no-untyped-call]
                ctx.shape, ctx.weight, delta, *ctx.how
            )
            return back

        plain, moved = parted(deltas[0])
        back = joined(pulled(plain), None if moved is None else pulled(moved))
        return back, None, None, None


# PyTorch's own two functions are not typed.


def joined(plain: Tensor, moved: Tensor | None) -> Tensor:
    """A tensor with its tangent, which may be None."""
    if moved is None:
        return plain
    dual: Tensor = forward_ad.make_dual(plain, moved)  # type: ignore[no-untyped-call]
    return dual


def parted(dual: Tensor) -> tuple[Tensor, Tensor | None]:
    """The tensor itself and its tangent, None where it carries none."""
    plain, moved = forward_ad.unpack_dual(dual)  # type: ignore[no-untyped-call]
    return plain, moved
