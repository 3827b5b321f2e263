"""The exact attack step of one search, on PyTorch's own kernels, for any model that can be read.

A client that takes T steps of SGD shows the sum of g_0 to g_(T-1), each the gradient at the weights
after the steps before: w_t = w_0 - rate (g_0 + ... + g_(t-1)). The derivative of <shown, v> is that
of the sum of <g_t, v_t> with v_(T-1) = v and v_(t-1) = v_t - rate H_t v_t, where H_t is the Hessian
of step t's loss. H_t v_t is the derivative of <g_t, v_t> in the weights. The passes that pull v_t
back to the inputs give it for two more products: 9 forward passes' worth per step, and 7 for the
first.

Source: Pearlmutter 1994, "Fast exact multiplication by the Hessian"; the recursion is reverse
accumulation through gradient descent, as in Maclaurin et al. 2015, "Gradient-based hyperparameter
optimization through reversible learning".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from leakbound import client
from leakbound.core import Task
from leakbound.engines import norms, rules
from leakbound.engines.base import Pulled, kernels
from leakbound.engines.calls import read
from leakbound.engines.convolutions import convolution
from leakbound.engines.loss import LossHead, head
from leakbound.engines.reader import Kind, Layers, Shape, pools_first
from leakbound.engines.rules import Given, Passes, Rule, Some
from leakbound.randomness import normal

_KNOWN: WeakKeyDictionary[nn.Module, dict[Any, Layers | None]] = WeakKeyDictionary()
EXACT = (1e-7, 1e-7)
ROUNDED = (1e-2, 0.2)
"""Largest difference of gradient and derivatives from autograd's, relative to their length: in
float64, and in the task's own type, whose kernels differ, whose rounding grows in deep networks,
and whose pools may tie.
"""
RULES: Mapping[Kind, Callable[..., Rule]] = {
    Kind.TENSOR: rules.TensorRule,
    Kind.IDENTITY: rules.IdentityRule,
    Kind.SUM: rules.SumRule,
    Kind.PRODUCT: rules.ProductRule,
    Kind.MATRIX_PRODUCT: rules.MatrixProductRule,
    Kind.SCALE: rules.ScaleRule,
    Kind.RESHAPE: rules.ReshapeRule,
    Kind.PERMUTE: rules.PermuteRule,
    Kind.MEAN: rules.MeanRule,
    Kind.AVERAGE_POOL: rules.AveragePoolRule,
    Kind.ADAPTIVE_POOL: rules.AdaptivePoolRule,
    Kind.MAX_POOL: rules.MaxPoolRule,
    Kind.ACTIVATION: rules.ActivationRule,
    Kind.SOFTMAX: rules.SoftmaxRule,
    Kind.LINEAR: rules.LinearRule,
    Kind.CONVOLUTION: convolution,
    Kind.BATCH_NORM: norms.FixedNormRule,
    Kind.BATCH_STATISTICS: norms.BatchNormRule,
    Kind.GROUP_NORM: norms.GroupNormRule,
    Kind.LAYER_NORM: norms.LayerNormRule,
    Kind.STRAIGHT: rules.StraightCallRule,
    Kind.CURVED: rules.CurvedCallRule,
}
"""The rules of all kinds of layers, by their data and options."""


def plan(
    task: Task,
    input_shape: Shape,
    curved: bool = False,
) -> Layers | None:
    """The layers of the task's model for inputs (B, *S); None if autograd is needed.

    A plan is compared once with autograd, at random inputs, in float64 and in the task's type; if
    `curved`, the Hessian's product too. The answer is kept while the model lives.
    """
    known = _KNOWN.setdefault(task.model, {})
    shape = tuple(input_shape[1:])
    key = (shape, kernels(), curved)
    if key not in known:
        known[key] = None if curved and not plan(task, input_shape) else _plan(task, shape, curved)
    return known[key]


class Single:
    """One search: `base.Engine` with `num_searches` 1; each gradient overwrites the last one.

    The model and its buffers are never written to. `row` (P,) holds the gradient, and then the
    derivative of <gradient, cotangent> in the weights, which may be overwritten before a gradient.
    None: that derivative is not computed.
    """

    num_searches = 1

    def __init__(
        self,
        task: Task,
        plan: Layers,
        row: Tensor | None = None,
    ) -> None:
        self.task = task
        tensors = task.tensors(task.parameters.detach())
        curved = row is not None
        self.row = torch.zeros_like(task.parameters, requires_grad=False) if row is None else row
        places = task.unflatten(self.row)
        made: list[Rule] = []
        self.frozen: list[dict[str, Tensor]] = []
        for layer in plan:
            names = [name for name in layer.weights if name is not None and layer.owns]
            # frozen weights of a layer that is trained have change zero; their gradient is not used
            still = {name: torch.zeros_like(tensors[name]) for name in names if name not in places}
            unread = {name: torch.empty_like(value) for name, value in still.items()}
            self.frozen.append(still)
            weights = chosen(layer.weights, tensors)
            buffers = chosen(layer.buffers, task.buffers)
            gradients = chosen(layer.weights, {**places, **unread})
            data = Given(weights, buffers, gradients, layer.moving, curved)
            made.append(RULES[layer.kind](data, **layer.options))
        self.passes = Passes(plan, made)
        self.kept = None if task.kept is None else task.kept.to(task.parameters.dtype)
        self.head: LossHead | None = None
        self.along: Tensor | None = None

    @torch.no_grad()
    def gradient(self, inputs: Tensor, labels: Tensor) -> Tensor:
        output = self.passes.forward(inputs[0].detach())
        self.head = head(self.task.loss, output, labels[0].detach())
        self.passes.backward(self.head.deltas)
        if self.kept is not None:
            self.row.mul_(self.kept)
        return self.row[None]

    @torch.no_grad()
    def pull(self, cotangent: Tensor) -> Pulled:
        # pruned weights have derivatives, too: the gradient of other weights depends on them
        if self.head is None:
            raise ValueError("pull was called before gradient; call gradient first")
        # Views of a tensor that a search writes into again and again are made once.
        if self.kept is not None or cotangent is not self.along:
            self.along = cotangent
            row = cotangent[0] if self.kept is None else cotangent[0] * self.kept
            parts = self.task.unflatten(row)
            for (layer, rule), still in zip(self.passes.layers, self.frozen, strict=True):
                if layer.owns:
                    rule.directions = chosen(layer.weights, {**parts, **still} if still else parts)
        moved = self.passes.tangent(None)[self.passes.last]
        change, labels = self.head.moved(moved)
        # A copy, because rules such as max pools reuse the memory of their results.
        inputs = self.passes.moved(change)[0].clone(memory_format=torch.contiguous_format)
        return Pulled(inputs[None], None if labels is None else labels[None])


class LocalSteps:
    """One client's local plan: an `Engine` whose gradient is that of `client.local_update`."""

    num_searches = 1

    def __init__(self, task: Task, layers: Layers) -> None:
        self.task = task
        self.rate = task.plan.learning_rate
        self.start = task.parameters.detach()
        self.steps = [Single(task, layers)]  # its weights are fixed: no Hessian product
        row = torch.empty_like(self.start)  # each gradient is added up before the next is written
        self.total = torch.empty_like(self.start)
        self.along = torch.empty_like(self.start)
        for _ in range(1, task.plan.steps):
            step_task = replace(task, parameters=self.start.clone())
            self.steps.append(Single(step_task, layers, row))
        self.inputs: Tensor | None = None

    @torch.no_grad()
    def gradient(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.inputs = inputs.detach()
        self.labels = labels.detach()
        size = self.task.plan.batch_size or inputs.shape[1]
        parts = [slice(at, at + size) for at in range(0, inputs.shape[1], size)]
        self.parts = [parts[at % len(parts)] for at in range(len(self.steps))]
        for at, (step, part) in enumerate(zip(self.steps, self.parts, strict=True)):
            if at:
                # In place, because the rules hold views of these parameters.
                torch.sub(
                    self.start,
                    self.total,
                    alpha=self.rate,
                    out=step.task.parameters,
                )
            gradient = step.gradient(self.inputs[:, part], self.labels[:, part])[0]
            _ = self.total.add_(gradient) if at else self.total.copy_(gradient)
        return self.total[None]

    @torch.no_grad()
    def pull(self, cotangent: Tensor) -> Pulled:
        if self.inputs is None:
            raise ValueError("pull was called before gradient; call gradient first")
        along = self.along.copy_(cotangent[0])
        slopes = torch.zeros_like(self.inputs)
        soft = torch.zeros_like(self.labels) if self.labels.is_floating_point() else None
        for at in reversed(range(len(self.steps))):
            step = self.steps[at]
            part = self.parts[at]
            pulled = step.pull(along[None])
            slopes[:, part] += pulled.inputs
            if soft is not None and pulled.labels is not None:
                soft[:, part] += pulled.labels
            if at:
                along.sub_(step.row, alpha=self.rate)
        return Pulled(slopes, soft)


def chosen(names: Sequence[str | None], tensors: Mapping[str, Tensor]) -> Some:
    return tuple(None if name is None else tensors.get(name) for name in names)


def layers_of(task: Task, shape: Shape) -> Layers:
    """The layers of the task's model for inputs (B, *shape), not compared with autograd."""
    return pools_first(read(task, shape))


def _plan(
    task: Task,
    shape: Shape,
    curved: bool,
) -> Layers | None:
    try:
        weights = arbitrary_weights(task)
        # A loss in which no place is special.
        loss = lambda outputs, _: torch.sin(outputs).mean()  # noqa: E731
        plain = replace(
            task,
            public=None,
            parameters=weights,
            kept=None,
            loss=loss,
        )
        double = plain.to(task.parameters.device, torch.float64)
        for version, within in ((double, EXACT), (plain, ROUNDED)):
            layers = layers_of(version, shape)  # constants have the task's type
            if not _agrees(version, layers, shape, within, curved):
                return None
        return layers
    except (torch.OutOfMemoryError, MemoryError):  # does not depend on the model
        raise
    except Exception:  # a user's model may raise anything while it is traced
        return None


def arbitrary_weights(task: Task) -> Tensor:
    """Arbitrary weights: what is inferred of a model must not depend on the first caller."""
    source = torch.Generator().manual_seed(0)
    parts = list[Tensor]()
    for _, shape, _, _ in task.layout:
        drawn = normal(shape, source, like=task.parameters)
        # He initialization keeps the size of values; scales of norms stay away from 0.
        wide = len(shape) > 1
        part = drawn * (2 / shape[1:].numel()) ** 0.5 if wide else 0.5 + 0.1 * drawn
        parts.append(part.flatten())
    return torch.cat(parts)


def _agrees(
    task: Task,
    layers: Layers,
    shape: Shape,
    within: tuple[float, float],
    curved: bool,
) -> bool:
    """Whether gradient and derivatives equal autograd's, at random inputs and cotangent."""
    source = torch.Generator().manual_seed(0)
    weights = task.parameters
    size = 2 if curved or task.coupled else 1
    x = normal((size, *shape), source, like=weights).requires_grad_()
    labels = torch.zeros(len(x), dtype=torch.long, device=x.device)
    leaf = weights.clone().requires_grad_()
    gradient = client.gradient(task, x, labels, leaf)
    cotangent = normal(gradient.shape, source, like=weights)
    wanted = torch.autograd.grad(gradient, (x, leaf) if curved else x, cotangent)
    if curved:  # the weights are written over others
        twin = replace(task, parameters=torch.ones_like(weights))
        engine = Single(twin, layers, torch.empty_like(weights))
        twin.parameters.copy_(weights)
    else:
        engine = Single(task, layers)
    x = x.detach()
    mine = engine.gradient(x[None], labels[None])[0].clone()
    slopes = (engine.pull(cotangent[None]).inputs[0], engine.row)
    most = (within[0], within[1], within[1])
    pairs = zip(
        (mine, *slopes),
        (gradient.detach(), *wanted),
        most,
        strict=False,
    )
    return all(bool((one - other).norm() <= off * other.norm()) for one, other, off in pairs)
