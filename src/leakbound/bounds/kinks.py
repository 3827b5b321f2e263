"""Does the model have kinks? Where it has, its gradient jumps, and Cramér-Rao floors fail."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leakbound.client import forward, rows
from leakbound.types import Release, Task

SHARP = frozenset(
    {
        "_prelu_kernel",
        "abs",
        "adaptive_max_pool1d",
        "adaptive_max_pool2d",
        "adaptive_max_pool3d",
        "amax",
        "amin",
        "argmax",
        "argmin",
        "ceil",
        "clamp",
        "clamp_max",
        "clamp_min",
        "floor",
        "fmod",
        "fractional_max_pool2d",
        "ge",
        "gt",
        "hardshrink",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "le",
        "leaky_relu",
        "lt",
        "max",
        "max_pool1d",
        "max_pool2d",
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "maximum",
        "median",
        "min",
        "minimum",
        "prelu",
        "relu",
        "remainder",
        "round",
        "rrelu_with_noise",
        "selu",
        "sgn",
        "sign",
        "softshrink",
        "sort",
        "threshold",
        "topk",
        "trunc",
        "where",
    }
)
"""Operators with a kink or a jump in their values."""


JUMPS = frozenset(
    {"argmax", "argmin", "ceil", "floor", "fmod", "remainder", "round", "sgn", "sign", "trunc"}
)
"""Operators that jump: a defense that sends their results has no derivative to go by."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the name of every operator that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__.rstrip("_"))
        return func(*args, **(kwargs or {}))


def kinks(
    task: Task, inputs: Tensor, labels: Tensor, defense: Release | None = None
) -> tuple[str, ...]:
    """The operators of model and loss with kinks or jumps, and of the defense with jumps, by name.

    They are found by running both once, so that functional calls are seen too. A kink in what a
    defense does to the gradient (clipping) is none in the gradient's own sense: it does not jump.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2), torch.nn.ReLU())
        >>> kinks(Task.of(model), torch.zeros(1, 1, 2, 2), torch.tensor([0]))
        ('relu',)
    """
    with torch.no_grad(), _Watch() as watch:
        task.loss(forward(task, inputs), labels)
    found = watch.seen & SHARP
    if defense is not None:
        plain = rows(task, inputs, labels, defense.starts).detach()
        alone, together = defense.sides
        with torch.no_grad(), _Watch() as watch:
            together.imitate(alone.imitate(plain))
        found |= watch.seen & JUMPS
    return tuple(sorted(found))
