"""What an update holds beside its gradients: the change that weight decay alone makes.

Where a weight gets no gradient, an optimizer with weight decay changes it by a function of the
weight before. Of SGD, AdamW and Lion it is a multiple of the weight; plain Adam, RMSprop and
Adagrad divide the decay like a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from leakbound.attacks.rounding import grid, type_near, unit_of
from leakbound.client import stepped
from leakbound.core import Exact, LocalPlan, NotApplicable, Observation, Task, Unit

ARITHMETIC = 8.0
"""Errors of an optimizer's own arithmetic in a step, in units of the last place."""
LARGE = 1e3
"""A defense that leaves rows of this many times the size as they are scales and clips nothing."""


def idle(
    plan: LocalPlan,
    weights: Tensor,
) -> Tensor:
    """The update (P,), in gradient units, of weights (P,) whose gradients are all zero.

    Example:
        >>> idle(LocalPlan(2, 0.1, weight_decay=0.5), torch.tensor([1.0, -2.0]))
        tensor([ 0.9750, -1.9500])
    """
    return [*_along(plan, weights)][-1]


def _along(
    plan: LocalPlan,
    weights: Tensor,
) -> Iterator[Tensor]:
    """What `idle` returns after each step."""
    total = torch.zeros_like(weights)
    state = None
    for step in range(1, plan.steps + 1):
        moved = weights - plan.learning_rate * total
        change, state = stepped(plan, step, torch.zeros_like(weights), moved, state)
        total = total + change
        yield total


def beside_decay(
    observation: Observation,
    task: Task,
) -> Observation:
    """The observation without what weight decay alone would have changed.

    `task` is what the attacker simulates. Of SGD, AdamW and Lion, gradients (or steps) are left; of
    other optimizers only whether a weight got a gradient: the rest is 0 where it got none. Rows and
    columns of matrices of which each entry is within its rounding become 0, as without decay. That
    of stored weights counts, once for every step.

    Raises:
        NotApplicable: sums of clients, or a defense that scales or clips the decay, too.

    Source: this project.
    """
    plan = task.plan
    if not plan.weight_decay:
        return observation
    update = observation.update
    if update.unit is not Unit.CLIENT:
        raise NotApplicable(f"decay of {plan.rule} is not undone in a sum of clients or examples")
    defense = observation.defense
    scaled = LARGE * update.rows
    if defense is not None and not torch.equal(defense.imitate(scaled), scaled):
        raise NotApplicable(
            f"the defense changes the weight decay of {plan.rule} with the gradients, so its part "
            "is not known"
        )
    alone = idle(plan, task.parameters.double())
    rows = update.rows.double() - alone
    if update.mask is not None:
        rows = rows * update.mask
    if isinstance(update.law, Exact):
        limit = _rounding(observation, plan, alone)
        for row, most in zip(rows, limit, strict=True):
            limits = task.unflatten(most)
            for name, part in task.unflatten(row).items():
                if part.ndim > 1:
                    moved = (part.abs() > limits[name]).flatten(1)
                    lines = part.flatten(1)
                    lines *= moved.any(1, keepdim=True) & moved.any(0)
    # No defense changes the task again, and its noise is still in the rows.
    left = replace(task, plan=replace(plan, weight_decay=0.0))
    changed = replace(update, rows=rows.to(update.rows))
    return replace(observation, update=changed, task=left, defense=None)


def _rounding(
    observation: Observation,
    plan: LocalPlan,
    alone: Tensor,
) -> Tensor:
    """(R, P) how far rounding may move an entry without a gradient, in gradient units."""
    update = observation.update
    weights = observation.task.parameters
    before = weights.double()
    # On its way to where it ends, a weight may be larger, and its rounding, too.
    most = before.abs()
    for total in _along(plan, before):
        torch.maximum(most, (before - plan.learning_rate * total).abs(), out=most)
    limits = []
    for at, row in enumerate(update.rows.double()):
        change = plan.learning_rate * row
        sent = None if observation.sent is None else observation.sent[at].double()
        kind = grid(change, before, sent) or weights.dtype
        unit = unit_of(most, kind)
        # A rounding of the first step may grow where a weight is small beside a step.
        unit = torch.maximum(unit, _grown(plan, before, alone, unit))
        # A client computes in the type of its weights; a change may have been rounded itself.
        part = ARITHMETIC * plan.steps * torch.finfo(kind).eps
        part += torch.finfo(type_near(change, row.dtype)).eps
        own = part * torch.maximum(row.abs(), alone.abs())
        limits.append((plan.steps + 1) * unit / plan.learning_rate + own)
    return torch.stack(limits)


def _grown(
    plan: LocalPlan,
    weights: Tensor,
    alone: Tensor,
    unit: Tensor,
) -> Tensor:
    """(P,) how far weights that differ by a unit before are apart after decay alone."""
    ends = []
    for sign in (-1.0, 1.0):
        changed = idle(plan, weights + sign * unit) - alone
        off = sign * unit - plan.learning_rate * changed
        ends.append(off.abs())
    return torch.maximum(*ends)
