"""A round of a pruned training: what clients choose and report, and the server's next mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakbound.core import Batch, Task, Update
from leakbound.pruning.base import Pruning, prunable


@dataclass(frozen=True, eq=False)
class PrunedTurn:
    """What a client trained and sent in a round.

    Attributes:
        task: the model that it trained, with its own mask if it has one.
        update: what it sent; its mask shows what it withheld.
        report: (P,) importance scores that it also sent, zero where it withheld; None: none.
        size: its weight in the server's mean.
    """

    task: Task
    update: Update
    report: Tensor | None = None
    size: int = 1

    @property
    def shown(self) -> Tensor:
        """(P,) the weights of the client's model that it sent."""
        exists = existing(self.task)
        return exists if self.update.mask is None else exists & self.update.mask[0]

    @property
    def reported(self) -> Tensor:
        """(P,) where a client reports the importance of a weight: where it does not withhold it."""
        return self.shown | ~existing(self.task)


def client_task(
    scheme: Pruning | None,
    task: Task,
    batch: Batch,
    round_: int,
) -> Task:
    """The model that a client trains: the server's, or pruned by a mask of its own."""
    if scheme is None or not scheme.adjusts(round_):
        return task
    mask = scheme.client_mask(task, batch, round_)
    return task if mask is None else task.pruned(mask)


def turn_of(
    scheme: Pruning | None,
    task: Task,
    batch: Batch,
    update: Update,
    round_: int,
    size: int = 1,
) -> PrunedTurn:
    """What a client that trained `task` on a batch sent: its update, and a report if one is due."""
    turn = PrunedTurn(task, update, None, size)
    if scheme is None or not scheme.adjusts(round_):
        return turn
    report = scheme.report(task, batch, round_)
    return turn if report is None else replace(turn, report=report * turn.reported)


def next_task(
    scheme: Pruning | None,
    task: Task,
    weights: Tensor,
    turns: Sequence[PrunedTurn],
    round_: int,
) -> Task:
    """The model after a round.

    Args:
        scheme: None: nothing is pruned.
        task: the model as the server sent it in this round.
        weights: (P,) what the server made of the updates, before any mask.
        turns: what its clients trained and sent.
        round_: the round, from 1.
    """
    if scheme is None or not scheme.adjusts(round_):
        return task.with_parameters(weights)
    union = existing(task)
    for turn in turns:
        union = union | existing(turn.task)
    after = replace(task, parameters=weights * union)
    mask = scheme.server_mask(after, _mean_report(turns), round_)
    return replace(after, kept=None).pruned(mask)


def existing(task: Task) -> Tensor:
    """(P,) the weights that the model has."""
    return torch.ones_like(task.parameters).bool() if task.kept is None else task.kept


def withheld(task: Task, update: Update) -> float:
    """The share of the model's weights that a client withheld; biases do not count."""
    weights = prunable(task) & existing(task)
    if update.mask is None or not bool(weights.any()):
        return 0.0
    return float((weights & ~update.mask[0]).sum() / weights.sum())


def bytes_sent(
    scheme: Pruning | None,
    task: Task,
    update: Update,
    round_: int,
) -> int:
    """Bytes of a client's message: the weights that it sends, and what shows which they are.

    The mask of what it withholds takes a bit for each weight that the model has; the server's own
    mask takes nothing, as the client got it. `Pruning.added_bytes` of the scheme come on top.
    """
    turn = PrunedTurn(task, update)
    count = int(turn.shown.sum())
    there = int(existing(task).sum())
    bits = there if count < there else 0
    added = 0 if scheme is None else scheme.added_bytes(task, round_)
    return task.parameters.element_size() * count + math.ceil(bits / 8) + added


def _mean_report(turns: Sequence[PrunedTurn]) -> Tensor | None:
    """The mean of the reports by size, over those who sent each entry."""
    own = [turn.size * turn.report for turn in turns if turn.report is not None]
    shown = [turn.size * turn.reported for turn in turns if turn.report is not None]
    return torch.stack(own).sum(0) / torch.stack(shown).sum(0).clamp_min(1) if own else None
