"""Which engine a computation of a given shape takes: a rule of the model and the shapes alone.

Bits depend on the engine, so the choice must not depend on anything else, least of all on how many
cells run at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakbound.r_operator import bundle, single
from leakbound.r_operator.base import Engine, aligned
from leakbound.task import Task

SMALL = 8
"""Largest batch of one row that a bundle takes, of linear layers alone. Steps in those of autograd:
MLP, batch 1: eight bundled .30, single .46; batch 4: .41 and .50. With convolutions the single
engine's kernels win: SimpleConvNet, batch 1: eight bundled .52, one .72, single .57; batch 4 .67
and .55."""


@dataclass(frozen=True, eq=False)
class Choice:
    """One of two engines for a model.

    Attributes:
        chain: the model as a bundle takes it; None where PyTorch's own kernels are taken.
        plan: the model as a single engine takes it.
    """

    chain: bundle.Chain | None
    plan: single.Plan | None

    def engine(self, tasks: Sequence[Task], rows: int) -> Engine:
        """An engine for several tasks of one model, with so many rows each.

        Only a bundle takes more than one row.
        """
        if self.chain is None:
            assert self.plan is not None  # one of the two is there
            return single.Single(tasks[0], self.plan)
        weights = [task.parameters for task in tasks for _ in range(rows)]
        kept: Tensor | None = None
        if any(task.kept is not None for task in tasks):
            whole = torch.ones_like(tasks[0].parameters, dtype=torch.bool)
            masks = [whole if task.kept is None else task.kept for task in tasks]
            kept = torch.stack([mask for mask in masks for _ in range(rows)])
        stacked = aligned(len(weights), weights[0])
        return bundle.Bundle(self.chain, torch.stack(weights, out=stacked), kept)


def choose(task: Task, rows: int, shape: tuple[int, ...]) -> Choice | None:
    """The engine for rows of gradients, each of a batch (B, *S); None: autograd is needed."""
    chain = bundle.chain(task, len(shape))
    if chain is not None and (rows > 1 or (chain.linear and shape[0] <= SMALL)):
        return Choice(chain, None)
    plan = single.plan(task, shape) if rows == 1 else None
    return None if plan is None else Choice(None, plan)
