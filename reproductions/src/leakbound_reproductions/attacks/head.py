"""The two-layer head A s(W z) of a model: where feature attacks apply, and its malicious form."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from leakbound import check
from leakbound.attacks.base import boxed
from leakbound.core import NotApplicable, Task
from leakbound.randomness import normal, stream, uniform

Activation = Callable[[Tensor], Tensor]

KNOWN: tuple[Activation, ...] = (
    torch.relu,
    torch.tanh,
    torch.sigmoid,
    functional.gelu,
    functional.softplus,
    functional.leaky_relu,
    functional.silu,
    functional.elu,
    functional.selu,
    functional.relu6,
    functional.hardtanh,
    functional.mish,
    lambda z: functional.gelu(z, approximate="tanh"),
)
"""Functions that a model's forward may call without a module."""
PROBES = 16


@dataclass(frozen=True, eq=False)
class Head:
    """The last two linear layers W (M, n) and A (K, M), and the elementwise function between them.

    `scale`: typical length of the input of W. `kept`: (M,) factors that the model applies to the
    hidden units after the activation (1 without dropout).
    """

    first: str
    second: str
    activation: Activation
    scale: float
    kept: Tensor


def head_layers(task: Task) -> tuple[str, str]:
    """Names of the last linear layer and of the one before it with matching outputs."""
    linear = [(n, m) for n, m in task.model.named_modules() if isinstance(m, nn.Linear)]
    if len(linear) < 2:
        raise NotApplicable("the model has no two linear layers: a feature head needs both")
    (first, below), (second, above) = linear[-2:]
    if below.out_features != above.in_features:
        raise NotApplicable(
            f"{first} has {below.out_features} outputs and {second} {above.in_features} inputs: "
            "the last two linear layers are no head with one activation between them"
        )
    if f"{second}.weight" not in task.names:
        raise NotApplicable(
            f"{second} is frozen: its gradient, which reveals features, is not sent"
        )
    return first, second


def find_head(task: Task, input_shape: tuple[int, ...], public: Tensor | None = None) -> Head:
    """The head, checked on public or uniformly random images: the input of A is s(W z)."""
    first, second = head_layers(task)
    low, high = task.input_range
    inputs = low + (high - low) * uniform(
        (PROBES, *input_shape), stream(0, "head", "probe"), like=task.parameters
    )
    if public is not None and len(public) and tuple(public.shape[1:]) == tuple(input_shape):
        inputs = boxed(public[:PROBES].to(task.parameters), task)
    model = own_copy(task)
    notes, modules = _noted(model, first, second, inputs)
    if any(len(note) != 1 for note in notes.values()):
        raise NotApplicable(f"the model does not call {first} and {second} once each")
    z, before, hidden = (notes[key][0] for key in ("z", "before", "hidden"))
    if z.ndim != 2 or before.shape != hidden.shape:
        raise NotApplicable(f"the input of {first} is not one vector per example")
    if not bool(torch.cat([z, hidden], 1).isfinite().all()):
        raise NotApplicable("the model's hidden units are not finite")
    activation = _matching(modules, before, hidden)
    kept = _factors(task.model.get_submodule(second), hidden)
    scale = float(z.double().norm(dim=1).mean())
    return Head(first, second, activation, max(scale, 1e-12), kept)


def _factors(above: nn.Module, hidden: Tensor) -> Tensor:
    """(M,) the effect of hooks on A, such as a mask of dropped units, on units that are all 1."""
    args: tuple[Any, ...] = (torch.ones_like(hidden[:1]),)
    for hook in above._forward_pre_hooks.values():
        changed = hook(above, args)
        if changed is not None:
            args = changed if isinstance(changed, tuple) else (changed,)
    return cast(Tensor, args[0][0].detach().double())


def own_copy(task: Task) -> nn.Module:
    """The task's model, apart from it, at the task's weights."""
    model = copy.deepcopy(task.model)
    with torch.no_grad():
        values = task.tensors()
        for name, own in (*model.named_parameters(), *model.named_buffers()):
            own.copy_(values[name])
    return model


def _noted(
    model: nn.Module, first: str, second: str, inputs: Tensor
) -> tuple[dict[str, list[Tensor]], list[nn.Module]]:
    """Inputs and outputs of both layers, and the modules without children that take W's output."""
    notes: dict[str, list[Tensor]] = {key: [] for key in ("z", "before", "hidden")}
    modules: list[nn.Module] = []
    below = model.get_submodule(first)
    above = model.get_submodule(second)

    def candidates(module: nn.Module, args: tuple[Any, ...]) -> None:
        same = notes["before"] and args and isinstance(args[0], Tensor)
        if same and args[0].shape == notes["before"][0].shape:
            modules.append(module)

    for module in model.modules():
        if module not in (below, above) and not any(True for _ in module.children()):
            module.register_forward_pre_hook(candidates)
    below.register_forward_pre_hook(lambda _, args: notes["z"].append(args[0]))
    below.register_forward_hook(lambda _, args, out: notes["before"].append(out.clone()))
    above.register_forward_pre_hook(
        lambda _, args: notes["hidden"].append(args[0].clone()), prepend=True
    )
    with torch.no_grad():
        model(inputs)
    return notes, modules


def _matching(modules: list[nn.Module], before: Tensor, hidden: Tensor) -> Activation:
    flat = before.double().reshape(-1)
    target = hidden.double().reshape(-1)
    tolerance = 1e-4 if before.dtype in (torch.float32, torch.float64) else 1e-1
    scale = float(target.abs().max()) + 1e-30
    tried: list[Activation] = [_plain(m) for m in modules] + list(KNOWN)
    for activation in tried:
        try:
            with torch.no_grad():
                found = activation(flat.clone())
        except (RuntimeError, ValueError, TypeError, IndexError):
            continue  # not a function of a vector: another layer
        close = found.shape == target.shape and float((found - target).abs().max())
        if close is not False and close <= tolerance * scale:
            return activation
    raise NotApplicable("between the last two linear layers there is no elementwise activation")


def _plain(module: nn.Module) -> Activation:
    """A module as a function of float64 tensors that changes nothing."""
    own = copy.deepcopy(module).double().cpu()
    own._forward_pre_hooks.clear()
    return lambda z: own(z.clone())


def special_head(task: Task, random: int, generator: torch.Generator) -> Task:
    """The task with a head that leaks its input: the last `random` hidden units made random.

    Their weights are standard normal, their biases zero, and row k of A is k / random on these
    units: their part of the logits is nearly the same for all inputs of one length.

    Raises:
        NotApplicable: the model has no head.
        ValueError: `random` exceeds the number of hidden units.

    Source: paper B, appendix F (the partition of errata 2.15).

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> planted = special_head(Task.of(model), 6, torch.Generator())
        >>> planted.unflatten(planted.parameters)["3.weight"][1, 2:]
        tensor([0.1667, 0.1667, 0.1667, 0.1667, 0.1667, 0.1667])
    """
    check.count(random=random)
    first, second = head_layers(task)
    flat = task.parameters.detach().clone()
    held = {name: value.clone() for name, value in task.frozen.items()}  # it sends these as well
    parts = {**held, **task.unflatten(flat)}
    weight = parts[f"{first}.weight"]
    above = parts[f"{second}.weight"]
    if random > len(weight):
        raise ValueError(f"random is {random}; the head has {len(weight)} hidden units")
    weight[-random:] = normal((random, weight.shape[1]), generator, like=weight)
    above[:, -random:] = planted_rows(len(above), random).to(above)[:, None]
    if f"{first}.bias" in parts:
        parts[f"{first}.bias"][-random:] = 0
    return replace(task.with_parameters(flat), buffers={**task.buffers, **held})


def planted_rows(classes: int, random: int) -> Tensor:
    """(K,) what `special_head` writes into the rows of A, float64."""
    return torch.arange(classes, dtype=torch.float64) / random


def random_units(task: Task, head: Head, random: int | None) -> tuple[Tensor, float]:
    """Indices of the hidden units with Gaussian weights and no bias, and their weights' standard
    deviation. The units are those that `special_head` made, recognized by their columns of A (all,
    if there are none), or the last `random`.
    """
    parts = task.tensors()
    weight = parts[f"{head.first}.weight"].double()
    above = parts[f"{head.second}.weight"].double()
    width = len(weight)
    if random is not None:
        if random > width:
            raise NotApplicable(f"the head has {width} hidden units, not {random} random ones")
        chosen = torch.arange(width - random, width, device=weight.device)
    else:
        chosen = _planted(above)
    bias = parts.get(f"{head.first}.bias")
    if bias is not None and bool((bias[chosen] != 0).any()):
        raise NotApplicable("the head's hidden units have biases; the attack needs units without")
    rows = weight[chosen]
    spread = float(rows.square().mean().sqrt())
    if spread == 0 or rows.shape[1] * len(rows) < 8:
        raise NotApplicable("the head has no random weights")
    normed = rows / spread
    error = 6 / math.sqrt(normed.numel())
    if abs(float(normed.mean())) > error or abs(float(normed.pow(4).mean()) - 3) > 10 * error:
        raise NotApplicable(
            "the head's weights are not Gaussian; a malicious server has to make some random"
        )
    return chosen, spread


def _planted(above: Tensor) -> Tensor:
    classes, width = above.shape
    every = torch.arange(width, device=above.device)
    if classes < 2:
        return every
    count = 1 / above[1, -1] if float(above[1, -1]) > 0 else above.new_zeros(())
    random = round(float(count))
    if not 1 <= random <= width or abs(float(count) - random) > 1e-3 * random:
        return every
    wanted = planted_rows(classes, random).to(above)[:, None]
    fits = torch.isclose(above, wanted.expand_as(above), rtol=1e-4, atol=1e-9).all(0)
    return every[fits] if int(fits.sum()) == random else every
