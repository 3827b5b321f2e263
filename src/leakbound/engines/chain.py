"""The engine for plain chains of layers: every example goes through the model once.

However many directions an example has, its own forward and backward pass are made once, and only
the changes along the directions pass through the layers again. Kernels are chosen by hand: no
differentiation engine, max pools with the channels last, activations after the pools, and one
grouped convolution for the weight changes of several lanes.

The engine is used only where `plan` finds that it is right: a `nn.Sequential` of layers that it
knows by their exact types, without hooks, each once. Other models take the taps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from leakbound.engines import products, steps
from leakbound.engines.products import Forward
from leakbound.engines.squares import Power, matrix_like
from leakbound.engines.steps import Step, Weighted
from leakbound.task import weight_names
from leakbound.types import Task

_KNOWN = (nn.Linear, nn.Conv2d, nn.MaxPool2d, *steps.POINTWISE, *steps.STRAIGHT)
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout2d)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_SIZES: WeakKeyDictionary[nn.Module, dict[Any, int]] = WeakKeyDictionary()

Layers = tuple[tuple[str, nn.Module], ...]
"""The model's layers in order, with the names of their parameters' prefixes."""


def plan(task: Task, inputs: Tensor) -> Layers | None:
    """The layers of the task's model; None where the engine is not right."""
    layers: list[tuple[str, nn.Module]] = []
    if not _flat(task.model, "", layers):
        return None
    layers = [layer for layer in layers if type(layer[1]) not in _NOTHING]
    weighted = any(isinstance(module, nn.Linear | nn.Conv2d) for _, module in layers)
    named = sum(1 for _ in task.model.named_parameters(remove_duplicate=False))
    if not weighted or named != len(task.layout):  # no layer and no weight twice
        return None
    if not _examples_in_front([module for _, module in layers], inputs.ndim):
        return None
    return tuple(_pools_first(layers))


@dataclass(frozen=True, eq=False)
class Point:
    """A chain at n examples: all that does not depend on a direction.

    Attributes:
        names: the prefix of every step's parameters.
        made: the steps in order.
        output: (n, K).
        labels: (n,) or (n, K).
    """

    task: Task
    names: tuple[str, ...]
    made: tuple[Step, ...]
    output: Tensor
    labels: Tensor

    @staticmethod
    def at(task: Task, layers: Layers, inputs: Tensor, labels: Tensor) -> Point:
        """Pass the examples (n, *S) forward."""
        tensors = task.tensors(task.parameters.detach())
        made, out = [], inputs
        for name, module in layers:
            out, step = steps.take(module, out, _own(tensors, name, module))
            made.append(step)
        return Point(task, tuple(name for name, _ in layers), tuple(made), out, labels)

    @cached_property
    def deltas(self) -> tuple[Tensor, ...]:
        """The derivative of each example's own loss by the outputs of the steps.

        From the first step with trained weights on; of those before no one asks.
        """
        delta = steps.loss_delta(self.task.loss, self.output, self.labels)
        deltas = [delta]
        for step in reversed(self.made[_first(self.made) + 1 :]):
            delta = step.pull(delta)
            deltas.append(delta)
        return tuple(reversed(deltas))

    def outer(self) -> tuple[str, ...]:
        """The prefixes of the plain Linear layers."""
        pairs = zip(self.names, self.made, strict=True)
        return tuple(
            name
            for name, step in pairs
            if _trains(step) and products.is_outer(step.module, step.seen)
        )

    def inputs_moved(self, ways: Tensor) -> dict[str, Tensor]:
        """The changes (k, n, D) of what enters the plain Linear layers, along (k, n, *S)."""
        wanted, found, moved = self.outer(), {}, ways
        for name, step in zip(self.names, self.made, strict=True):
            if name in wanted:
                found[name] = moved
                if len(found) == len(wanted):
                    break
            moved = step.push(moved)
        return found

    def gradient(self) -> Tensor:
        """The sum (P,) of the examples' gradients."""
        parts = {}
        for name, step, delta in self._weighted():
            for part, value in products.gradient(step.module, step.seen, delta).items():
                parts[name + part] = value
        return self._joined(parts)

    def each(self, ways: Tensor | None = None) -> Tensor:
        """Every example's own gradient (n, P), or its change along its own direction (n, *S)."""
        found: list[tuple[str, dict[str, Tensor]]] = []
        if ways is None:
            for name, step, delta in self._weighted():
                found.append((name, products.each_gradient(step.module, step.seen, delta)))
        else:
            for name, step, delta, moved, change in self._moved(ways[None]):
                own = products.each_change(step.module, step.seen, moved, delta, change)
                found.append((name, own))
        parts = {name + part: value for name, own in found for part, value in own.items()}
        return torch.cat([parts[name].flatten(1) for name, *_ in self.task.layout], 1)

    def power(self, ways: Tensor, more: Mapping[str, Forward] | None = None) -> Power:
        """The sums (P,) over directions (k, n, *S) of each example's own squared changes.

        `more` is what further directions say of Linear inputs, by prefix: see `products.powers`.
        """
        total, norm, more = {}, {}, more or {}
        for name, step, delta, moved, change in self._moved(ways):
            told = more.get(name)
            found = products.powers(step.module, step.seen, moved, delta, change, told)
            for part, power in found.items():
                total[name + part], norm[name + part] = power
        return Power(self._joined(total), self._joined(norm))

    def power_of(self, more: Mapping[str, Forward]) -> Power:
        """What the further directions add to `power`, (P,); 0 for all but Linear weights."""
        shapes = {name: shape for name, shape, *_ in self.task.layout}
        total = {name: self.output.new_zeros(shape) for name, shape in shapes.items()}
        norm = dict(total)
        for name, _, delta in self._weighted():
            if name in more:
                part = f"{name}weight"
                total[part], norm[part] = more[name].power(delta)
        return Power(self._joined(total), self._joined(norm))

    def along(self, ways: Tensor) -> Tensor:
        """The change (k, P) of the sum of the gradients when all examples move at once."""
        parts = {}
        for name, step, delta, moved, change in self._moved(ways):
            found = products.changes(step.module, step.seen, moved, delta, change)
            for part, value in found.items():
                parts[name + part] = value.flatten(1)
        return torch.cat([parts[name] for name, *_ in self.task.layout], 1)

    def _weighted(self) -> Iterator[tuple[str, Weighted, Tensor]]:
        first = _first(self.made)
        for at, (name, step) in enumerate(zip(self.names, self.made, strict=True)):
            if _trains(step):
                yield name, step, self.deltas[at - first]

    def _moved(self, ways: Tensor) -> Iterator[tuple[str, Weighted, Tensor, Tensor, Tensor]]:
        """From the last weighted step to the first: name, step, delta, and both changes."""
        seen: list[Tensor | None] = []
        moved = ways
        for step in self.made:
            seen.append(moved if step.curved or _trains(step) else None)
            moved = step.push(moved)
        change = steps.loss_change(self.task.loss, self.output, self.labels, moved)
        first = _first(self.made)
        for at in reversed(range(first, len(self.made))):
            step, delta, before = self.made[at], self.deltas[at - first], seen.pop()
            if _trains(step):
                assert before is not None  # it was kept above
                yield self.names[at], step, delta, before, change
            if at > first:
                change = step.pull_moved(delta, change, before)

    def _joined(self, parts: dict[str, Tensor]) -> Tensor:
        return torch.cat([parts[name].reshape(-1) for name, *_ in self.task.layout])


def on_the_image(layers: Layers) -> str | None:
    """The prefix of a Linear whose input is the flattened image itself, if there is one."""
    for name, module in layers:
        if isinstance(module, nn.Linear):
            return name
        if not isinstance(module, nn.Flatten):
            return None
    return None


def lane_elements(task: Task, layers: Layers, one: Tensor) -> int:
    """About how many numbers one direction of one example (1, *S) needs, its own passes included.

    The answer is kept for as long as the task's model lives.
    """
    known = _SIZES.setdefault(task.model, {})
    key = (one.shape, one.dtype, one.device)
    if key not in known:
        tensors, kept, largest = task.tensors(task.parameters.detach()), one.numel(), 0
        for name, module in layers:
            out, step = steps.take(module, one, _own(tensors, name, module))
            largest = max(largest, one.numel() + out.numel())
            kept += 2 * out.numel() + one.numel() * (step.curved or _trains(step))
            one = out
        known[key] = kept + 2 * largest
    return known[key]


def _own(tensors: Mapping[str, Tensor], name: str, module: nn.Module) -> dict[str, Tensor]:
    return {part: tensors[name + part] for part in weight_names(module) if name + part in tensors}


def _first(made: list[Step] | tuple[Step, ...]) -> int:
    return next(at for at, step in enumerate(made) if _trains(step))


def _trains(step: Step) -> TypeGuard[Weighted]:
    """Whether it has weights of the gradient; frozen ones are buffers of a task's model."""
    return isinstance(step, Weighted) and any(True for _ in step.module.parameters())


def _flat(module: nn.Module, prefix: str, into: list[tuple[str, nn.Module]]) -> bool:
    """List the layers of nested `nn.Sequential`s; False where something else is met."""
    if any(getattr(module, name, None) for name in _HOOKS) or "forward" in vars(module):
        return False
    if type(module) is nn.Sequential:
        return all(_flat(m, f"{prefix}{name}.", into) for name, m in module._modules.items())
    into.append((prefix, module))
    return _understood(module)


def _understood(module: nn.Module) -> bool:
    if type(module) in _NOTHING:
        return not module.training
    if type(module) is nn.LeakyReLU and module.negative_slope < 0:
        return False
    if type(module) is nn.Flatten and module.start_dim < 1:
        return False
    if type(module) is nn.MaxPool2d and module.return_indices:
        return False
    return type(module) in _KNOWN and (type(module) is not nn.Conv2d or matrix_like(module))


def _examples_in_front(modules: list[nn.Module], dimensions: int) -> bool:
    """Whether every layer gets tensors with the examples in front."""
    for module in modules:
        if isinstance(module, nn.Flatten):
            last = module.end_dim % dimensions
            dimensions -= max(0, last - module.start_dim)
        elif isinstance(module, nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d | nn.AdaptiveAvgPool2d):
            if dimensions != 4:
                return False
        elif dimensions < 2:
            return False
    return dimensions == 2


def _pools_first(layers: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Max pools before the activations that keep order: a quarter of the work, the same result."""
    layers = list(layers)
    for at in range(1, len(layers)):
        before, this = layers[at - 1][1], layers[at][1]
        if isinstance(this, nn.MaxPool2d) and isinstance(before, steps.MONOTONE):
            layers[at - 1], layers[at] = layers[at], layers[at - 1]
    return layers
