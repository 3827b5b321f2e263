"""Evidence that an update is not that of plain SGD in full precision."""

from __future__ import annotations

from torch import Tensor

from leakbound.core import Exact, Observation, Task

EQUAL = 0.01
"""Sizes of entries that differ by less from the median size count as equal."""
SHARE = 0.5
"""From this share of equal sizes on, no sum of gradients is behind an update."""
FEW = 100
"""Fewer entries than this many may be equal by chance."""


def equal_sizes(task: Task, row: Tensor) -> float:
    """The share of nonzero entries of an update (P,) that have the median size of their tensor.

    A gradient's entries have many sizes. One step of Adam or AdamW from a fresh state moves every
    entry that has a gradient by the learning rate, sign descent always does, and weights rounded to
    half precision move by few sizes.

    Example:
        >>> import torch
        >>> from leakbound.core import Task
        >>> task = Task.of(torch.nn.Linear(20, 10))
        >>> gradient = torch.linspace(-1, 1, 210)
        >>> equal_sizes(task, gradient) < 0.1, equal_sizes(task, 1e-3 * gradient.sign())
        (True, 1.0)
    """
    total = equal = 0
    for part in task.unflatten(row).values():
        # An entry without a gradient stays 0 under every optimizer, so zeros show nothing.
        sizes = part[part != 0].abs().double()
        if len(sizes) < FEW:
            continue
        median = sizes.median()
        total += len(sizes)
        equal += int(((sizes - median).abs() <= EQUAL * median).sum())
    return equal / total if total else 0.0


def not_sgd(observation: Observation) -> str | None:
    """Why an update is no sum of gradients; None if nothing shows that, or noise was added."""
    if not isinstance(observation.update.law, Exact):
        return None
    shares = [equal_sizes(observation.task, row) for row in observation.update.rows]
    if min(shares) < SHARE:
        return None
    return (
        f"{min(shares):.1%} of the update's entries have the same size in their tensor, as after a "
        "step of Adam or AdamW, sign compression or rounding to half precision; this attack reads "
        "the updates of SGD"
    )
