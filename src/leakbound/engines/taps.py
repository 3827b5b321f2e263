"""The engine for per-example changes in any model whose layers can be tapped.

Every layer with parameters is tapped: its input and its output are recorded, the loss is
differentiated only with respect to the outputs, and forward-mode tangents run along. This takes one
forward and one backward pass, and no weight gradients. Each pair of an example and a direction is a
row. Layers are only observed: every parameter must belong to one layer without children, which is
called once, on one tensor with the examples as first dimension, and is used nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.grad import conv2d_input
from torch.overrides import TorchFunctionMode

from leakbound import client
from leakbound.core import Task
from leakbound.engines.weight_changes import (
    Power,
    Tapped,
    tapped_elements,
    tapped_gradient,
    tapped_powers,
)

_KNOWN: WeakKeyDictionary[nn.Module, dict[Any, TapPlan | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class TapPlan:
    """The layers to tap, and the approximate count of numbers for one pair.

    `twice`: the backward pass is differentiable, if the fast one has no tangent (group norm).
    """

    layers: tuple[str, ...]
    elements: int
    twice: bool = False


_Calls = dict[str, list[list[tuple[Any, int]]]]
"""Each layer's input and output at each call, with the tensors' version counters then."""


def plan(task: Task, inputs: Tensor, labels: Tensor) -> TapPlan | None:
    """The layers to tap for inputs (B, *S), or None if the generic path is needed."""
    known = _KNOWN.setdefault(task.model, {})
    key = (inputs.shape[1:], inputs.dtype, inputs.device)
    if key not in known:
        known[key] = _plan(task, inputs[:1].detach(), labels[:1])
    return known[key]


def powers(
    task: Task, found: TapPlan, inputs: Tensor, labels: Tensor, tangents: Tensor, fresh: int
) -> tuple[Power, Tensor | None] | None:
    """Sums (P,) over pairs (N, *S) of the squared changes of each example's own gradient.

    With them the sum of the first `fresh` pairs' gradients, if any. None if the model did not
    behave as planned.
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
        module = task.model.get_submodule(name)
        prefix = f"{name}." if name else ""
        own = _own(tensors, prefix)
        each = tapped_powers(module, tapped, own)
        sums |= {prefix + key: power for key, power in each.items()}
        if fresh:
            first = tapped_gradient(module, Tapped(*(part[:fresh] for part in tapped)), own)
            gradients |= {prefix + key: value for key, value in first.items()}

    def flat(parts: dict[str, Tensor]) -> Tensor:
        return torch.cat([parts[name].reshape(-1) for name, *_ in task.layout])

    both = (flat({name: power[at] for name, power in sums.items()}) for at in (0, 1))
    return Power(*both), flat(gradients) if fresh else None


def _own(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _run(
    task: Task, found: TapPlan, inputs: Tensor, labels: Tensor, tangents: Tensor
) -> dict[str, Tapped] | None:
    tensors = task.tensors(task.parameters.detach())
    with torch.enable_grad(), forward_ad.dual_level():
        moving = joined(inputs.detach().requires_grad_(), tangents)
        with _recorded(task.model, found.layers) as calls, ConstantWeights():
            output = client.call(task, tensors, moving)
            loss = task.loss(output, labels)
        taps = _fitting(calls, len(inputs))
        if taps is None:
            return None
        deltas = torch.autograd.grad(
            loss,
            [out for _, out in taps.values()],
            torch.full_like(loss, len(inputs)),  # every pair's own loss, not their mean
            create_graph=found.twice,
            materialize_grads=True,
        )
        return {
            name: Tapped(*_parted(a), *_parted(delta))
            for (name, (a, _)), delta in zip(taps.items(), deltas, strict=True)
        }


def _parted(dual: Tensor) -> tuple[Tensor, Tensor]:
    primal, tangent = parted(dual)
    primal = primal.detach()
    return primal, torch.zeros_like(primal) if tangent is None else tangent.detach()


def _fitting(calls: _Calls, rows: int) -> dict[str, tuple[Tensor, Tensor]] | None:
    """The input and output of each layer, or None.

    Each must be called once, with one tensor of `rows` rows in and one out, unchanged since.
    """
    found = {}
    for name, times in calls.items():
        if len(times) != 1 or len(times[0]) != 2:
            return None
        (a, _), (out, _) = times[0]
        whole = all(v >= 0 and t._version == v and t.ndim > 1 for t, v in times[0])
        if not whole or not len(a) == len(out) == rows or not out.requires_grad:
            return None
        found[name] = (a, out)
    return found


@contextmanager
def _recorded(model: nn.Module, names: tuple[str, ...]) -> Iterator[_Calls]:
    calls: _Calls = {name: [] for name in names}

    def hook(name: str) -> Any:
        def note(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            seen = (*args, *kwargs.values(), out)
            calls[name].append([(t, t._version if isinstance(t, Tensor) else -1) for t in seen])

        return note

    with ExitStack() as hooks:
        for name in names:
            layer = model.get_submodule(name)
            hooks.enter_context(layer.register_forward_hook(hook(name), with_kwargs=True))
        yield calls


def _plan(task: Task, image: Tensor, label: Tensor) -> TapPlan | None:
    model = task.model
    tied = sum(1 for _ in model.named_parameters(remove_duplicate=False)) != len(task.layout)
    if tied or "forward" in vars(model):
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
    # two sizes: a layer whose first dimension is not the examples cannot match both
    taps = _trial(task, names, image, 2)
    if taps is None or _trial(task, names, image, 3) is None:
        return None
    sizes = [tapped_elements(owners[name], a[:1], out[:1]) for name, (a, out) in taps.items()]
    for twice in (False, True):
        found = TapPlan(names, sum(sizes), twice)
        try:
            if _run(task, found, image, label, torch.ones_like(image)):
                return found
        except NotImplementedError:  # a layer without a tangent
            continue
    return None


def _trial(
    task: Task, names: tuple[str, ...], one: Tensor, rows: int
) -> dict[str, tuple[Tensor, Tensor]] | None:
    with torch.enable_grad():
        leaves = {
            name: value.detach().requires_grad_()
            for name, value in task.unflatten(task.parameters).items()
        }
        moving = one.repeat(rows, *[1] * (one.ndim - 1)).requires_grad_()
        with _recorded(task.model, names) as calls:
            output = client.call(task, {**task.buffers, **leaves}, moving)
        taps = _fitting(calls, rows)
        uses = _uses(output)
        for name, (a, _) in (taps or {}).items():
            own = _own(leaves, f"{name}." if name else "")
            alone = _uses(functional_call(task.model.get_submodule(name), own, (a.detach(),)))
            if any(uses[id(leaf)] != alone[id(leaf)] for leaf in own.values()):
                return None
    return taps


def _uses(output: Tensor) -> Counter[int]:
    """How often each leaf, by its id, enters the graph behind `output`."""
    uses: Counter[int] = Counter()
    todo = [output.grad_fn]
    met = {output.grad_fn}
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

    PyTorch's own forward-mode rules also push a zero change of the weights through the layer: three
    products where two suffice. Values and derivatives are PyTorch's up to rounding.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.linear and len(args) in (2, 3) and not kwargs:
            x, weight, bias = (*args, None)[:3]
            if _constant(weight) and _constant(bias):
                return _Constant.apply(x, weight, bias, None)  # type: ignore[no-untyped-call]
        if func is nn.functional.conv2d and len(args) == 7 and not kwargs:
            x, weight, bias, stride, padding, dilation, groups = args
            known = not isinstance(padding, str) and x.ndim == 4
            if known and _constant(weight) and _constant(bias):
                how = (stride, padding, dilation, groups)
                return _Constant.apply(x, weight, bias, how)  # type: ignore[no-untyped-call]
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


def _mapped(x: Tensor, weight: Tensor, bias: Tensor | None, how: Any) -> Tensor:
    if how is None:
        return nn.functional.linear(x, weight, bias)
    return nn.functional.conv2d(x, weight, bias, *how)


class _Constant(torch.autograd.Function):
    """A convolution, or a linear map if `how` is None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Any) -> Tensor:
        ctx.weight = weight
        ctx.how = how
        ctx.shape = x.shape
        return _mapped(x, weight, bias, how)

    @staticmethod
    def jvp(ctx: Any, x: Tensor, *_: Any) -> Tensor:
        return _mapped(x, ctx.weight, None, ctx.how)

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor) -> Any:
        def pulled(delta: Tensor) -> Any:
            if ctx.how is None:
                return delta @ ctx.weight
            return conv2d_input(ctx.shape, ctx.weight, delta, *ctx.how)  # type: ignore[no-untyped-call]

        plain, moved = parted(deltas[0])
        back = joined(pulled(plain), None if moved is None else pulled(moved))
        return back, None, None, None


# PyTorch's own two functions are not typed.


def joined(plain: Tensor, moved: Tensor | None) -> Tensor:
    if moved is None:
        return plain
    dual: Tensor = forward_ad.make_dual(plain, moved)  # type: ignore[no-untyped-call]
    return dual


def parted(dual: Tensor) -> tuple[Tensor, Tensor | None]:
    plain, moved = forward_ad.unpack_dual(dual)  # type: ignore[no-untyped-call]
    return plain, moved
