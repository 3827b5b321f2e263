"""Every example's own gradient, and its change along a direction of its own: values only.

Plain chains of layers take the engine of `chain`, all other models `torch.func`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leakbound import client
from leakbound.engines import chain, lanes
from leakbound.types import Task


@torch.no_grad()
def gradients(task: Task, inputs: Tensor, labels: Tensor) -> Tensor:
    """As `client.example_gradients`, (B, P), but without slopes of its own.

    Shapes:
        inputs (B, *S); labels (B,) class numbers, or (B, K) probabilities.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> gradients(Task.of(model), torch.ones(3, 1, 2, 2), torch.tensor([0, 1, 1])).shape
        torch.Size([3, 10])
    """
    layers = chain.plan(task, inputs) if a_mean(task, labels) else None
    if layers is None:
        return client.example_gradients(task, inputs, labels).detach()
    found = chain.Point.at(task, layers, inputs.detach(), labels).each()
    return found if task.kept is None else found * task.kept


@torch.no_grad()
def changes(task: Task, inputs: Tensor, labels: Tensor, directions: Tensor) -> Tensor:
    """Change (B, P) of every example's own gradient along its own direction (B, *S).

    Of a pruned model's missing weights too, as if they were there.
    """
    layers = chain.plan(task, inputs) if a_mean(task, labels) else None
    if layers is None:
        return lanes.changes(task, inputs, labels, directions)
    return chain.Point.at(task, layers, inputs.detach(), labels).each(directions)


def a_mean(task: Task, labels: Tensor) -> bool:
    """Whether the loss is known to be the mean of the examples' own, of any part of the batch too.

    A user's may weigh examples by the whole batch, as PyTorch's does with class weights.
    """
    named = not labels.is_floating_point()
    ignored = named and bool((labels < 0).any())
    return task.loss is torch.nn.functional.cross_entropy and not ignored
