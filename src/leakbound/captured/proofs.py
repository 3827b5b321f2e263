"""What a captured update proves or refutes about its client's labels and noise."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from leakbound import tensors
from leakbound._util.results import LISTED, Fact
from leakbound.attacks.labels import last_layer
from leakbound.attacks.rounding import HALVES, stored_type
from leakbound.captured.capture import Capture
from leakbound.core import (
    Exact,
    Gaussian,
    Laplace,
    NotApplicable,
    Observation,
    Task,
)
from leakbound.covariance import Structured
from leakbound.losses import named

PLAIN_LOSS = (
    "the loss is plain cross-entropy, without label smoothing, weight decay or optimizer state of "
    "earlier rounds"
)
ONE_BATCH = "it was one local step; after several they are weighted means over the steps"
BALANCED = 1e-3
"""The largest share of their absolute sum to which the last bias's gradients may sum."""
RARE = 1e-6
"""The declared noise has less energy than this bound allows with this probability."""


def missing_noise(seen: Observation) -> str | None:
    """A note if the update has less energy than the declared noise alone; None otherwise.

    A signal plus independent symmetric noise is seldom shorter than the noise alone (Anderson's
    inequality). Gaussian noise: the lower tail of chi-square; Laplace noise: Maurer's inequality
    for sums of positive variables.
    """
    law = seen.update.law
    rows = seen.update.rows.double()
    if not isinstance(law, Gaussian | Laplace) or law.private or not seen.threat.defense_known:
        return None
    if isinstance(law, Gaussian) and isinstance(law.covariance, Structured):
        white = law.covariance.whiten(rows)
    else:
        known = seen.noise_variance
        assert known is not None  # the distribution has a known variance
        variance = known.to(rows)
        white = rows[variance > 0] / variance[variance > 0].sqrt()
    count = white.numel()
    energy = float(white.square().sum())
    if not count:
        return None
    if isinstance(law, Gaussian):
        halves = torch.tensor((count / 2, energy / 2), dtype=torch.float64)
        absent = float(torch.special.gammainc(halves[0], halves[1])) < RARE
    else:  # the fourth moment is 6 at variance 1
        absent = energy < count - math.sqrt(2 * math.log(1 / RARE) * 6 * count)
    if not absent:
        return None
    share = energy / count
    shown = f"{share:.2%}" if share >= 1e-4 else f"{share:.1e}"
    return (
        f"the update has {shown} of the declared noise's energy: that noise was not added, so "
        "nothing that needs it holds; leave the defense out, or give the right one (and the "
        "right learning rate)"
    )


def classes(
    seen: Observation,
    spread: Tensor | None = None,
    precision: float = 0.0,
) -> tuple[tuple[int, ...], str | None]:
    """Classes that occur: negative entries of the last bias; and a note if they cannot be right.

    Cross-entropy's gradients of the last bias are mean probabilities minus the classes' shares.
    They sum to zero, and at most as many classes as examples are negative. If either fails (for
    label smoothing, weight decay, noise, an adaptive optimizer, another loss), no class is named.
    `spread` (P,) is each entry's rounding, `precision` that of the file's coarsest type.
    """
    if not seen.task.plan.is_sum:
        return (), None
    try:
        layer = last_layer(seen)
    except NotApplicable:
        return (), None
    exact = isinstance(seen.update.law, Exact) and seen.update.mask is None
    exact = exact and named(seen.task.loss).name == "cross_entropy"
    if layer.bias is None or not exact or seen.threat.defense_known is False:
        return (), None
    bias = layer.bias.double()
    slack = torch.full_like(layer.bias, 1e-6).double()
    if spread is not None:
        rounding = layer.task.unflatten(spread)[f"{layer.name}.bias".lstrip(".")]
        slack = slack + 4 * rounding.to(slack)
    negative = tuple((bias < -slack).nonzero().flatten().tolist())
    total = float(bias.sum().abs())
    whole = float(bias.abs().sum())
    # Independent roundings add up by their squares.
    if total > max(BALANCED, 4 * precision) * whole + float(slack.square().sum().sqrt()):
        why = f"sum to {total / whole:.1%} of their absolute sum, and cross-entropy's to 0"
    elif len(negative) > seen.examples:
        why = f"are negative for {len(negative)} classes, more than there are examples"
    else:
        return negative, None
    return (), (
        f"the gradients of the last layer's bias {why}: no class is certain; are these the kind "
        "(--kind delta for a change of the weights) and the weights before (--before) that belong "
        "to the file? Another loss, weight decay, Adam or undeclared noise would explain it too"
    )


def classes_fact(labels: tuple[int, ...]) -> tuple[Fact, ...]:
    """The fact that these classes occur among the labels."""
    if not labels:
        return ()
    items = tuple(map(str, labels[:LISTED]))
    return (
        Fact(
            kind="classes",
            items=items,
            count=len(labels),
            assumes=PLAIN_LOSS,
        ),
    )


def batch_statistics(capture: Capture) -> tuple[Fact, ...]:
    """The fact that an update holds running statistics that the client's batches have moved."""
    before = capture.before or {}
    moved = dict[str, int]()
    for name, value in capture.update.items():
        layer, _, kind = name.rpartition(".")
        if kind != "running_mean" or name not in before or before[name].shape != value.shape:
            continue
        changed = value if capture.kind == "delta" else value - before[name].to(value)
        if bool((changed != 0).any()) and bool(changed.isfinite().all()):
            moved[layer] = value.numel()
    if not moved:
        return ()
    return (
        Fact(
            kind="batch statistics",
            items=tuple(moved)[:LISTED],
            count=sum(moved.values()),
            assumes=ONE_BATCH,
        ),
    )


def spread(
    capture: Capture,
    task: Task,
    rate: float | None,
) -> Tensor:
    """(P,) the standard deviation of each entry's rounding, in gradient units, generously.

    Full precision: one unit in the last place of each value of the update and the weights before,
    which also covers the sums of the training. Half precision, or such values in wider types as
    mixed precision leaves them: the effect of one rounding.
    """
    total = _of(capture.update, task, capture.name)
    if capture.kind != "gradient":
        start = task.parameters.abs().mul_(torch.finfo(task.parameters.dtype).eps)
        if capture.before is not None:
            torch.maximum(
                start,
                _of(capture.before, task, "before"),
                out=start,
            )
        # A delta was rounded once; a difference of stored weights has the rounding of both.
        if capture.kind == "delta":
            torch.maximum(total, start, out=total)
        else:
            total += start
    return total.div_(rate or 1.0)


def coarsest(capture: Capture) -> float:
    kinds = [stored_type(v) for v in capture.update.values() if v.is_floating_point()]
    return max((torch.finfo(kind).eps for kind in kinds), default=0.0)


def _of(
    named: Mapping[str, Tensor],
    task: Task,
    what: str,
) -> Tensor:
    by_name = tensors.by_name(task, named, what=what)
    parts = []
    for name, *_ in task.layout:
        kind = stored_type(by_name[name])
        about = torch.finfo(kind)
        # One rounding is uniform over a step of the grid: its deviation is step / sqrt(12).
        share = about.eps * (0.25 if kind in HALVES else 1.0)
        # Below the smallest normal number, the grid is as coarse as there.
        size = by_name[name].detach().double().abs().clamp_min_(about.smallest_normal)
        parts.append(size.mul_(share).to(task.parameters).flatten())
    return torch.cat(parts)
