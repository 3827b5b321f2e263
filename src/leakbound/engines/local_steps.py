"""The exact attack step of one client's several local steps, or of its minibatches in turn.

A client that takes T steps of SGD shows the sum of g_0 to g_(T-1), each the gradient at the weights
that the ones before left: w_t = w_0 - rate (g_0 + ... + g_(t-1)). The slope of <shown, v> is that
of all <g_t, v_t> with v_(T-1) = v and v_(t-1) = v_t - rate H_t v_t, where H_t is the Hessian of
step t's loss. H_t v_t is the slope of <g_t, v_t> in the weights; the passes that pull v_t back to
the inputs give it for two products more: 9 forwards' worth a step, and 7 for the first.
Differentiating the backward passes takes as many, by slower kernels and a graph of all steps.

Source: Pearlmutter 1994, "Fast exact multiplication by the Hessian"; the recursion is reverse
accumulation through gradient descent, as in Maclaurin et al. 2015, "Gradient-based hyperparameter
optimization through reversible learning".
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from leakbound.engines.base import Pulled
from leakbound.engines.reader import Layers
from leakbound.engines.single import Single
from leakbound.types import Task


class LocalSteps:
    """One client's local plan: `base.Engine` with `cells` 1.

    Its gradient is `client.local_update`. A step costs what one of `Single` does and, but
    for the first, two products more; the first one's weights never change.

    Example:
        >>> from torch import nn
        >>> from leakbound import client
        >>> from leakbound.engines.single import plan
        >>> from leakbound.types import LocalPlan
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> task = Task.of(model, plan=LocalPlan(3, 0.1))
        >>> engine = LocalSteps(task, plan(task, (1, 1, 2, 2), curved=True))
        >>> images, labels = torch.ones(1, 1, 1, 2, 2), torch.tensor([[0]])
        >>> update = engine.gradient(images, labels)
        >>> wanted = client.local_update(task, images[0], labels[0])
        >>> bool(torch.allclose(update[0], wanted)), engine.pull(update).inputs.shape
        (True, torch.Size([1, 1, 1, 2, 2]))
    """

    cells = 1

    def __init__(self, task: Task, layers: Layers) -> None:
        self.task, self.rate = task, task.plan.learning_rate
        self.start = task.parameters.detach()
        self.steps = [Single(task, layers)]
        row = torch.empty_like(self.start)  # each gradient is added up before the next is written
        self.total, self.along = torch.empty_like(self.start), torch.empty_like(self.start)
        for _ in range(1, task.plan.steps):
            own = replace(task, parameters=self.start.clone())
            self.steps.append(Single(own, layers, row))
        self.inputs: Tensor | None = None

    @torch.no_grad()
    def gradient(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The update (1, P) of inputs (1, B, *S) and their labels: see `base.Engine`."""
        self.inputs, self.labels = inputs.detach(), labels.detach()
        size = self.task.plan.batch_size or inputs.shape[1]
        parts = [slice(at, at + size) for at in range(0, inputs.shape[1], size)]
        self.parts = [parts[at % len(parts)] for at in range(len(self.steps))]
        for at, (step, part) in enumerate(zip(self.steps, self.parts, strict=True)):
            if at:
                torch.sub(self.start, self.total, alpha=self.rate, out=step.task.parameters)
                step.renew()
            own = step.gradient(self.inputs[:, part], self.labels[:, part])[0]
            _ = self.total.add_(own) if at else self.total.copy_(own)
        return self.total[None]

    @torch.no_grad()
    def pull(self, cotangent: Tensor) -> Pulled:
        """The slopes of <update, cotangent>, cotangent (1, P): see `base.Engine`.

        Raises:
            ValueError: before the first gradient.
        """
        if self.inputs is None:
            raise ValueError("pull was called before gradient; there are no inputs to pull on yet")
        along, slopes = self.along.copy_(cotangent[0]), torch.zeros_like(self.inputs)
        soft = torch.zeros_like(self.labels) if self.labels.is_floating_point() else None
        for at in reversed(range(len(self.steps))):
            step, part = self.steps[at], self.parts[at]
            pulled = step.pull(along[None])
            slopes[:, part] += pulled.inputs
            if soft is not None and pulled.labels is not None:
                soft[:, part] += pulled.labels
            if at:
                along.sub_(step.row, alpha=self.rate)
        return Pulled(slopes, soft)
