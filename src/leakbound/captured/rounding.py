"""How far rounding may have moved the entries of a captured update."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from leakbound import tensors
from leakbound.captured.capture import Capture
from leakbound.types import Task

HALVES = (torch.float16, torch.bfloat16)


def spread(capture: Capture, task: Task, rate: float | None) -> Tensor:
    """(P,) the standard deviation of each entry's rounding, in gradient units, generously.

    It follows from the types in which the update and the weights before were stored: of full
    precision one unit in the last place of each value, which leaves room for what training sums up;
    of half precision what rounding once does. Values of full precision that are all of half
    precision count as such, as mixed precision leaves them.
    """
    total = _of(capture.update, task, capture.name)
    if capture.kind != "gradient":
        weights = task.parameters.double()
        start = torch.full_like(weights, torch.finfo(task.parameters.dtype).eps) * weights.abs()
        if capture.before is not None:
            start = torch.maximum(start, _of(capture.before, task, "before"))
        total = torch.maximum(total, start) if capture.kind == "delta" else total + start
    return total / (rate or 1.0)


def coarsest(capture: Capture) -> float:
    """The relative precision of the coarsest tensor that the update was stored in."""
    kinds = [_kind(v) for v in capture.update.values() if v.is_floating_point()]
    return max((torch.finfo(kind).eps for kind in kinds), default=0.0)


def _of(named: Mapping[str, Tensor], task: Task, what: str) -> Tensor:
    own = {str(name): _spread(value) for name, value in named.items()}
    return tensors.flat(task, own, what=what).double()


def _spread(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    kind = _kind(value)
    about = torch.finfo(kind)
    least = value.detach().double().abs().clamp_min(about.smallest_normal)
    return least * about.eps * (0.25 if kind in HALVES else 1.0)


def _kind(value: Tensor) -> torch.dtype:
    """The type of a tensor's values, which may be a narrower one than its own."""
    if value.dtype in HALVES or not bool((value != 0).any()):
        return value.dtype
    for kind in HALVES:
        if torch.equal(value, value.to(kind).to(value.dtype)):
            return kind
    return value.dtype
