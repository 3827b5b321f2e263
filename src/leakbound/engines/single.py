"""The exact attack step of one cell, on PyTorch's own kernels, for any model that can be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from leakbound import client
from leakbound.engines import norms, rules
from leakbound.engines.base import Pulled, kernels
from leakbound.engines.convolutions import convolution
from leakbound.engines.loss import LossHead, head
from leakbound.engines.reader import Kind, Layers, Shape, Unreadable, pools_first, read
from leakbound.engines.rules import Given, Rule
from leakbound.random import normal
from leakbound.types import Task

_KNOWN: WeakKeyDictionary[nn.Module, dict[Any, Layers | None]] = WeakKeyDictionary()
EXACT = (1e-7, 1e-7)
ROUNDED = (1e-2, 0.2)
"""What gradient and slopes may be off autograd's, of their length: in float64, and in the task's
own type, whose kernels differ, whose rounding grows in deep networks, and whose pools may tie."""
RULES: Mapping[Kind, Callable[..., Rule]] = {
    Kind.IDENTITY: rules.IdentityRule,
    Kind.DROPOUT: rules.IdentityRule,
    Kind.SUM: rules.SumRule,
    Kind.RESHAPE: rules.ReshapeRule,
    Kind.FLATTEN: rules.ReshapeRule,
    Kind.MEAN: rules.MeanRule,
    Kind.AVERAGE_POOL: rules.AveragePoolRule,
    Kind.ADAPTIVE_POOL: rules.AdaptivePoolRule,
    Kind.MAX_POOL: rules.MaxPoolRule,
    Kind.ACTIVATION: rules.ActivationRule,
    Kind.LINEAR: rules.LinearRule,
    Kind.CONVOLUTION: convolution,
    Kind.BATCH_NORM: norms.FixedNormRule,
    Kind.GROUP_NORM: norms.GroupNormRule,
    Kind.STANDARDIZED: norms.StandardizedRule,
}
"""The rules of all kinds of layers, by what they are given and their options."""


def plan(task: Task, input_shape: Shape, curved: bool = False) -> Layers | None:
    """The layers of the task's model for inputs (B, *S); None where autograd is needed.

    A plan was compared once with autograd, at random inputs, in float64 and in the task's type;
    where `curved`, the Hessian's product too. The answer is kept for as long as the model lives.

    Example:
        >>> task = Task.of(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
        >>> len(plan(task, (1, 1, 2, 2))), plan(Task.of(nn.Bilinear(4, 4, 2)), (1, 4))
        (2, None)
    """
    known = _KNOWN.setdefault(task.model, {})
    shape = tuple(input_shape[1:])
    key = (shape, kernels(), curved)
    if key not in known:
        known[key] = None if curved and not plan(task, input_shape) else _plan(task, shape, curved)
    return known[key]


class Single:
    """One cell: `base.Engine` with `cells` 1.

    Guarantees:
        The model and its buffers are never written to; nothing waits for the device.

    The gradient that `gradient` returns is overwritten by the next one.

    Args:
        task: the model at its weights.
        plan: see `plan`.
        row: a place (P,) for the gradient, and then for the Hessian's product with what is pulled:
            the slope of <gradient, cotangent> in the weights. The task's weights may be overwritten
            before a gradient, if `renew` is called then. None: no such product is made.

    Example:
        >>> task = Task.of(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
        >>> engine = Single(task, plan(task, (1, 1, 2, 2)))
        >>> images, labels = torch.ones(1, 1, 1, 2, 2), torch.tensor([[0]])
        >>> gradient = engine.gradient(images, labels)
        >>> gradient.shape, engine.pull(gradient).inputs.shape
        (torch.Size([1, 10]), torch.Size([1, 1, 1, 2, 2]))
    """

    cells = 1

    def __init__(self, task: Task, plan: Layers, row: Tensor | None = None) -> None:
        self.task, self.layers = task, plan
        tensors = task.tensors(task.parameters.detach())
        curved = row is not None
        self.row = torch.zeros_like(task.parameters, requires_grad=False) if row is None else row
        places = task.unflatten(self.row)
        self.rules: list[Rule] = []
        self.frozen: list[dict[str, Tensor]] = []
        for layer in self.layers:
            own = [name for name in layer.weights if name is not None and layer.owns]
            # what is frozen of a layer that is trained moves by zero; its gradient no one reads
            still = {name: torch.zeros_like(tensors[name]) for name in own if name not in places}
            unread = {name: torch.empty_like(value) for name, value in still.items()}
            self.frozen.append(still)
            given = Given(
                _chosen(layer.weights, tensors),
                _chosen(layer.buffers, task.buffers),
                _chosen(layer.weights, {**places, **unread}),
                layer.moving,
                curved,
            )
            self.rules.append(RULES[layer.kind](given, **layer.options))
        self.kept = None if task.kept is None else task.kept.to(task.parameters.dtype)
        self.head: LossHead | None = None

    @torch.no_grad()
    def renew(self) -> None:
        """Take in weights that were written over the old ones."""
        for rule in self.rules:
            rule.renew()

    @torch.no_grad()
    def gradient(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The batch-mean loss's gradient (1, P) at inputs (1, B, *S): see `base.Engine`."""
        values: list[Any] = [None] * (self.layers[-1].output + 1)
        values[0] = inputs[0].detach()
        for layer, rule in zip(self.layers, self.rules, strict=True):
            values[layer.output] = rule.forward(*[values[s] for s in layer.sources])
        output = self.layers[-1].output
        self.head = head(self.task.loss, values[output], labels[0].detach())
        deltas: list[Any] = [None] * len(values)
        deltas[output] = self.head.deltas
        for layer, rule in zip(reversed(self.layers), reversed(self.rules), strict=True):
            if layer.moving or layer.owns:
                back = rule.backward(deltas[layer.output])
                if back is not None:
                    _spread(deltas, layer.sources, back)
        if self.kept is not None:
            self.row.mul_(self.kept)
        return self.row[None]

    @torch.no_grad()
    def pull(self, cotangent: Tensor) -> Pulled:
        """The slopes of <gradient, cotangent>, cotangent (1, P): see `base.Engine`.

        Where there is a row for it, it holds the slope in the weights then. A pruned weight has one
        too, as far as the gradient of others would change with it.

        Raises:
            ValueError: before the first gradient.
        """
        if self.head is None:
            raise ValueError("pull was called before gradient; there are no inputs to pull on yet")
        row = cotangent[0] if self.kept is None else cotangent[0] * self.kept
        parts = self.task.unflatten(row)
        tangents: list[Any] = [None] * (self.layers[-1].output + 1)
        for layer, rule, still in zip(self.layers, self.rules, self.frozen, strict=True):
            if layer.weights:
                rule.directions = _chosen(layer.weights, {**parts, **still} if still else parts)
            tangents[layer.output] = rule.tangent(*[tangents[s] for s in layer.sources])
        output = self.layers[-1].output
        deltas: list[Any] = [None] * len(tangents)
        deltas[output], labels = self.head.moved(tangents[output])
        for layer, rule in zip(reversed(self.layers), reversed(self.rules), strict=True):
            _spread(deltas, layer.sources, rule.moved(deltas[layer.output]))
        inputs = deltas[0].clone(memory_format=torch.contiguous_format)
        return Pulled(inputs[None], None if labels is None else labels[None])


def _chosen(
    names: Sequence[str | None], tensors: Mapping[str, Tensor]
) -> tuple[Tensor | None, ...]:
    """The tensors of these names, None where there is none."""
    return tuple(None if name is None else tensors.get(name) for name in names)


def _spread(deltas: list[Any], sources: tuple[int, ...], back: Tensor) -> None:
    for source in sources:
        before = deltas[source]
        deltas[source] = back if before is None else before + back


def layers_of(task: Task, shape: Shape) -> Layers:
    """The layers of the task's model for inputs (B, *shape), not compared with autograd.

    Raises:
        Unreadable: the model has a part that the rules do not cover, or a trained weight that
            is not the business of exactly one of its layers.
    """
    layers = read(task, shape)
    for layer in layers:
        if layer.kind is Kind.LINEAR and len(layer.before) != 1:
            raise Unreadable(f"{layer.name} is a linear layer on values of several dimensions")
        if layer.kind is Kind.FLATTEN and not layer.options["whole"]:
            raise Unreadable(f"{layer.name} leaves some dimensions apart")
    return pools_first(layers)


def _plan(task: Task, shape: Shape, curved: bool) -> Layers | None:
    try:
        weights = _weights_of_no_one(task)
        plain = replace(task, public=None, loss=_waves, parameters=weights, kept=None)
        double = plain.to(task.parameters.device, torch.float64)
        found = layers_of(double, shape)
        checks = ((double, EXACT), (plain, ROUNDED))
        right = all(_agrees(own, found, shape, within, curved) for own, within in checks)
        return found if right else None
    except (torch.OutOfMemoryError, MemoryError):  # says nothing of the model
        raise
    except Exception:  # a user's model may raise anything while it is traced
        return None


def _weights_of_no_one(task: Task) -> Tensor:
    """Weights of no one's: what is inferred of a model must not depend on who asks first."""
    source, parts = torch.Generator().manual_seed(0), list[Tensor]()
    for _, shape, _, _ in task.layout:
        drawn = normal(shape, source, like=task.parameters)
        wide = len(shape) > 1
        part = drawn * (2 / shape[1:].numel()) ** 0.5 if wide else 0.5 + 0.1 * drawn
        parts.append(part.flatten())
    return torch.cat(parts)


def _waves(outputs: Tensor, _: Tensor) -> Tensor:
    """A loss with no special place."""
    return torch.sin(outputs).mean()


def _agrees(
    task: Task, found: Layers, shape: Shape, within: tuple[float, float], curved: bool
) -> bool:
    """Whether gradient and slopes are autograd's, at random inputs and a random cotangent."""
    source, weights = torch.Generator().manual_seed(0), task.parameters
    x = normal((2 if curved else 1, *shape), source, like=weights).requires_grad_()
    labels = torch.zeros(len(x), dtype=torch.long, device=x.device)
    leaf = weights.clone().requires_grad_()
    gradient = client.gradient(task, x, labels, leaf)
    cotangent = normal(gradient.shape, source, like=weights)
    wanted = torch.autograd.grad(gradient, (x, leaf) if curved else x, cotangent)
    if curved:  # the weights are written over others
        own = replace(task, parameters=torch.ones_like(weights))
        engine = Single(own, found, torch.empty_like(weights))
        own.parameters.copy_(weights)
        engine.renew()
    else:
        engine = Single(task, found)
    x = x.detach()
    mine = engine.gradient(x[None], labels[None])[0].clone()
    slopes = (engine.pull(cotangent[None]).inputs[0], engine.row)
    most = (within[0], within[1], within[1])
    pairs = zip((mine, *slopes), (gradient.detach(), *wanted), most, strict=False)
    return all(bool((one - other).norm() <= off * other.norm()) for one, other, off in pairs)
