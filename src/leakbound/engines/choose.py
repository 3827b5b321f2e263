"""The choice of an engine: it depends only on the model, the shapes and the machine's type.

Bits depend on the engine. So the choice must not depend on anything else, in particular not on how
many searches run at once: a search that may share a computation takes the engine for many, whether
others join or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakbound.engines import bundle, single
from leakbound.engines.base import Engine, aligned, kernels
from leakbound.engines.reader import Kind, Layers, Shape
from leakbound.task import Task

__all__ = ["Choice", "choose"]

SMALL = 8
"""Largest batch of one row that a bundle takes. Steps of linear layers only, relative to
autograd's: MLP, batch 1: eight bundled 0.30, single 0.46; batch 4: 0.41 and 0.50.
"""

LIGHT = 1.6e7
"""Operations of a forward pass up to which searches with convolutions share calls. A step of one of
eight relative to a step alone by the single engine, 28x28: LeNet 0.40 at batch 1, 0.51 at 2, 0.68
at 4, 1.1 at 8; SimpleConvNet 0.73, 0.91, then 1.13 at batch 4 (3e7 operations).
"""

LARGEST = 500_000
"""Parameters of a model from which its kernels are large enough to fill a processor alone. Steps
relative to autograd's (AVX2): 3.1 million in two linear layers, bundled 1.02, single 0.83; 800,000,
one of eight bundled 0.88 to 1.18, single 0.54 to 0.69; an MLP of 395,000, 0.51 to 0.84 and 0.53 to
0.70.
"""

ALONE = {Kind.CURVED: 2e7, Kind.STRAIGHT: 5e6}
"""Operations of a forward pass from which a call that PyTorch differentiates alone pays off. A step
relative to autograd's: eight linear layers of 512, each with a PReLU, 1.10 at batch 1 and 1.16 at
16 (9e6 operations a PReLU); GRU with 32 times 3.7; U-Net, four calls, 1.08 at batch 1 (1.1e7
operations in all) and 0.88 at 2.
"""


@dataclass(frozen=True, eq=False)
class Choice:
    """One of three engines for a model.

    `chain` is the model for a bundle, `plan` its layers for PyTorch's own kernels; one of them is
    None. `local`: the client takes several local steps, or minibatches.
    """

    chain: bundle.BundlePlan | None
    plan: Layers | None
    local: bool = False

    def engine(self, tasks: Sequence[Task], rows: int) -> Engine:
        """An engine for tasks of one model, with `rows` each; only a bundle takes several tasks."""
        if self.chain is None:
            assert self.plan is not None  # one of the two is set
            return (single.LocalSteps if self.local else single.Single)(tasks[0], self.plan)
        weights = [task.parameters for task in tasks for _ in range(rows)]
        kept: Tensor | None = None
        if any(task.kept is not None for task in tasks):
            whole = torch.ones_like(tasks[0].parameters, dtype=torch.bool)
            masks = [whole if task.kept is None else task.kept for task in tasks]
            kept = torch.stack([mask for mask in masks for _ in range(rows)])
        stacked = aligned(len(weights), weights[0])
        parameters = torch.stack(weights, out=stacked)
        return bundle.Bundle(self.chain, parameters, kept, tasks[0].loss)


def choose(
    task: Task,
    rows: int,
    shape: Shape,
    many: bool = False,
) -> Choice | None:
    """The engine for rows of gradients, each of a batch of shape (B, *S); None: use autograd.

    For a client with several local steps or minibatches, a row is the update. `many`: several
    searches may share the computation.

    Example:
        >>> import leakbound as lb
        >>> from leakbound import client
        >>> model = lb.models.lenet(input_shape=(1, 8, 8), classes=10, generator=lb.stream(0))
        >>> task = Task.of(model)
        >>> x, y = torch.rand(2, 1, 8, 8, generator=lb.stream(1)), torch.tensor([3, 1])
        >>> engine = choose(task, rows=1, shape=(2, 1, 8, 8)).engine([task], rows=1)
        >>> gradient = engine.gradient(x[None], y[None])
        >>> slope = engine.pull(torch.ones_like(gradient)).inputs
        >>> again = x.clone().requires_grad_()
        >>> (same,) = torch.autograd.grad(client.gradient(task, again, y).sum(), again)
        >>> torch.allclose(slope[0], same, rtol=1e-3, atol=1e-6)
        True
    """
    if kernels() == "autograd":
        return None
    # `LocalSteps` follows plain SGD, whose update is the sum of its gradients.
    if not task.plan.is_sum or (task.plan.momentum and task.plan.steps > 1):
        return None
    if task.plan.steps > 1 or (task.plan.batch_size or shape[0]) < shape[0]:
        plan = _paying(
            task,
            (task.plan.batch_size or shape[0], *shape[1:]),
            rows,
            curved=True,
        )
        return None if plan is None else Choice(None, plan, local=True)
    chain = bundle.chain(task, shape[1:])
    small = shape[0] <= SMALL and len(task.parameters) <= LARGEST
    if chain is not None and (
        rows > 1 or (small and (chain.linear or (many and bundle.work(task, shape) <= LIGHT)))
    ):
        return Choice(chain, None)
    plan = _paying(task, shape, rows)
    return None if plan is None else Choice(None, plan)


def _paying(
    task: Task,
    shape: Shape,
    rows: int,
    curved: bool = False,
) -> Layers | None:
    """The layers for the single engine, if it is faster than autograd: see `ALONE`."""
    layers = single.plan(task, shape, curved) if rows == 1 else None
    if layers is None:
        return None
    least = sum(ALONE.get(layer.kind, 0.0) for layer in layers if layer.live)
    return layers if not least or least <= bundle.work(task, shape) else None
