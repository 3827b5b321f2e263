"""What the last layer's bias gradients of a captured update prove or refute of the labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leakbound.attacks.labels import last_layer
from leakbound.types import Exact, NotApplicable, Observation

BALANCED = 1e-3
"""The share of their absolute sum that the last bias's gradients may sum to."""


def classes(
    seen: Observation, spread: Tensor | None = None, precision: float = 0.0
) -> tuple[tuple[int, ...], str | None]:
    """Classes that occur: negative entries of the last bias; and a note where they cannot be right.

    Cross-entropy's gradients of the last bias are mean probabilities less the classes' shares: they
    sum to zero, and no more classes than examples are negative. Where either fails the update is
    another thing than was said, and no class is named.

    Args:
        seen: what was observed.
        spread: (P,) standard deviation of each entry's rounding.
        precision: relative, of the coarsest type of the file.

    Assumptions: cross-entropy; no label smoothing, weight decay, noise or adaptive optimizer.
    """
    try:
        layer = last_layer(seen)
    except NotApplicable:
        return (), None
    exact = isinstance(seen.update.law, Exact) and seen.update.mask is None
    if layer.bias is None or not exact or seen.threat.defense_known is False:
        return (), None
    bias, slack = layer.bias.double(), torch.full_like(layer.bias, 1e-6).double()
    if spread is not None:
        own = layer.task.unflatten(spread)[f"{layer.name}.bias" if layer.name else "bias"]
        slack = slack + 4 * own.to(slack)
    found = tuple(int(k) for k in (bias < -slack).nonzero().flatten())
    total, whole = float(bias.sum().abs()), float(bias.abs().sum())
    if total > max(BALANCED, 4 * precision) * whole + float(slack.square().sum().sqrt()):
        why = f"sum to {total / whole:.1%} of their absolute sum, and cross-entropy's to 0"
    elif len(found) > seen.examples:
        why = f"are negative for {len(found)} classes, more than there are examples"
    else:
        return found, None
    return (), (
        f"the gradients of the last layer's bias {why}: no class is certain; are these the kind "
        "(--kind delta for a change of the weights) and the weights before (--before) that belong "
        "to the file? Another loss, weight decay, Adam or undeclared noise would explain it too"
    )


def contradiction(told: Sequence[int], found: Sequence[int]) -> str | None:
    """A note where the labels that were told leave out a class that occurs."""
    lost = [label for label in found if label not in set(told)]
    if not lost:
        return None
    words = ", ".join(map(str, lost))
    return (
        f"the labels that were given do not hold {words}, which by the signs of the last layer's "
        "bias gradients occur (for plain cross-entropy, without weight decay or noise): check the "
        "labels, the kind and the weights before"
    )
