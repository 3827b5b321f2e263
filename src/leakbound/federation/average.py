"""The server's side of a round: the mean of what clients sent, and the new mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from leakbound.federation.plan import FederatedPlan, Turn
from leakbound.pruning import Pruning
from leakbound.types import Task, Update


def average(
    task: Task, turns: Sequence[Turn], sizes: list[int], total: Update | None, plan: FederatedPlan
) -> Tensor:
    """(P,) the new weights."""
    if total is not None:
        return task.parameters - plan.learning_rate * total.rows[0] / len(turns)
    weights, shown, all_ = _weighted(task, turns, sizes)
    if plan.aggregation == "plain":
        return weights / all_
    if plan.aggregation == "unchanged":
        return (weights + (all_ - shown) * task.parameters) / all_
    return torch.where(shown > 0, weights / shown.clamp_min(1), task.parameters)


def _weighted(task: Task, turns: Sequence[Turn], sizes: list[int]) -> tuple[Tensor, Tensor, float]:
    """Sum of the weights sent, sum of the sizes of those who sent each, sum of all sizes."""
    weights, shown = torch.zeros_like(task.parameters), torch.zeros_like(task.parameters)
    for turn, size in zip(turns, sizes, strict=True):
        assert turn.sent is not None  # only sums have none
        here = exists(turn.task)
        if turn.update.mask is not None:
            here = here & turn.update.mask[0]
        weights += size * turn.sent[0]
        shown += size * here
    return weights, shown, float(sum(sizes))


def adjusted(
    scheme: Pruning,
    task: Task,
    after: Task,
    turns: Sequence[Turn],
    sizes: list[int],
    plan: FederatedPlan,
    number: int,
) -> Task:
    """The model after the server has changed its mask."""
    union = task.kept
    for turn in turns:
        if turn.task.kept is not None and union is not None:
            union = union | turn.task.kept
    if union is not None and turns[0].sent is not None:
        dense = replace(task, kept=None)
        averaged = average(dense, turns, sizes, None, plan)
        after = replace(after, parameters=averaged * union, kept=task.kept)
    report = _mean_report(turns, sizes)
    return replace(after, kept=None).pruned(scheme.server_mask(after, report, number))


def _mean_report(turns: Sequence[Turn], sizes: list[int]) -> Tensor | None:
    """The mean of the reports by size, over those who sent each entry."""
    own, shown = [], []
    for turn, size in zip(turns, sizes, strict=True):
        if turn.report is not None:
            own.append(size * turn.report)
            shown.append(size * told(turn.task, turn.update))
    return torch.stack(own).sum(0) / torch.stack(shown).sum(0).clamp_min(1) if own else None


def told(task: Task, update: Update) -> Tensor:
    """(P,) where a client says how important a weight is: not where it withholds it."""
    if update.mask is None:
        return torch.ones_like(task.parameters).bool()
    return update.mask[0] | ~exists(task)


def exists(task: Task) -> Tensor:
    """(P,) the weights that the model has."""
    return torch.ones_like(task.parameters).bool() if task.kept is None else task.kept
