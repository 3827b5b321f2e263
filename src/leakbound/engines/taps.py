"""The fast engine: one forward and one backward pass with tangents, and no weight gradients.

Every layer with parameters is tapped: its input and its output are recorded, the loss is
differentiated with respect to the outputs only, and forward-mode tangents ride along. Examples
stay apart in the batch dimension ("lanes"), so that each can have its own direction.

The engine is used only where `plan` finds that it is right: every parameter belongs to one layer
without children, which is called once, on one tensor with the examples in front, and is used
nowhere else. A model that is not so takes the generic path.
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

from leakbound import client
from leakbound.engines.dual import joined, parted
from leakbound.engines.linear import ConstantWeights
from leakbound.engines.squares import (
    Power,
    Tapped,
    lane_elements,
    layer_gradient,
    layer_powers,
)
from leakbound.types import Task

_KNOWN: WeakKeyDictionary[nn.Module, dict[Any, Plan | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Plan:
    """What the engine knows of a model.

    Attributes:
        layers: the names of the layers to tap.
        lane_elements: about how many numbers one lane takes.
        twice: the backward pass must itself be differentiable, as some layers (group norm) have
            no tangent in their fast one.
    """

    layers: tuple[str, ...]
    lane_elements: int
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


def plan(task: Task, inputs: Tensor, labels: Tensor) -> Plan | None:
    """The layers to tap for inputs (B, *S), or None where the generic path is needed.

    The answer is kept for as long as the task's model lives.
    """
    known = _KNOWN.setdefault(task.model, {})
    key = (inputs.shape[1:], inputs.dtype, inputs.device)
    if key not in known:
        known[key] = _plan(task, inputs[:1].detach(), labels[:1])
    return known[key]


def powers(
    task: Task, found: Plan, inputs: Tensor, labels: Tensor, tangents: Tensor, fresh: int
) -> tuple[Power, Tensor | None] | None:
    """Sums over the lanes of the squared changes of each lane's own gradient.

    Shapes:
        inputs, tangents (N, *S); labels (N, ...); the results (P,).

    Returns:
        The sums, and the sum of the gradients of the first `fresh` lanes, if any; None where the
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
        for key, power in layer_powers(module, tapped, own).items():
            sums[prefix + key] = power
        if fresh:
            first = Tapped(*(t[:fresh] for t in (tapped.a, tapped.da, tapped.d, tapped.dd)))
            for key, value in layer_gradient(module, first, own).items():
                gradients[prefix + key] = value

    def flat(parts: dict[str, Tensor]) -> Tensor:
        return torch.cat([parts[name].reshape(-1) for name, *_ in task.layout])

    total = flat({name: power.total for name, power in sums.items()})
    norm = flat({name: power.norm for name, power in sums.items()})
    return Power(total, norm), flat(gradients) if fresh else None


def _own(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _run(
    task: Task, found: Plan, inputs: Tensor, labels: Tensor, tangents: Tensor
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
            torch.full_like(loss, len(inputs)),  # every lane's own loss, not their mean
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


def _fits(record: _Record, lanes: int) -> bool:
    return (
        record.usable
        and record.out.requires_grad
        and all(t.ndim > 1 and len(t) == lanes for t, _ in record.seen)
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


def _plan(task: Task, image: Tensor, label: Tensor) -> Plan | None:
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
    sizes = [lane_elements(owners[name], r.a[:1], r.out[:1]) for name, r in records.items()]
    for twice in (False, True):
        found = Plan(names, sum(sizes), twice)
        try:
            if _run(task, found, image, label, torch.ones_like(image)):
                return found
        except NotImplementedError:  # a layer without a tangent
            continue
    return None


def _trial(
    task: Task, names: tuple[str, ...], one: Tensor, lanes: int
) -> dict[str, _Record] | None:
    with torch.enable_grad():
        leaves = {
            name: value.detach().requires_grad_()
            for name, value in task.unflatten(task.parameters).items()
        }
        moving = one.repeat(lanes, *[1] * (one.ndim - 1)).requires_grad_()
        with _recorded(task.model, names) as records:
            output = client.call(task, {**task.buffers, **leaves}, moving)
        if not all(_fits(record, lanes) for record in records.values()):
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
