"""Patch inversion: one image from the first layer and the positions of a vision transformer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakbound.attacks.base import Attack, boxed, modules_of, seen_by, summed_task
from leakbound.core import Exact, NotApplicable, Observation, Reconstruction, Task
from leakbound.engines.path import unlike

AGREES = 1e-2
NEAREST = 0.5
"""Relative differences up to which the positions' gradients add up to the patch layer's bias', and
from which they are those of something else.
"""
STEEP = 1e-5
"""Singular values of the positions' gradients below this share of the largest count as zero."""
LEFT = 1e-3
"""The share of the patch layer's gradient that an exact answer may leave."""


@dataclass(frozen=True)
class PatchInversion(Attack):
    """Solve for the patches of one image behind a vision transformer with learned positions.

    A position is added to the output of the patch layer. So its gradient is that of the output at
    this patch, whatever follows. The gradient of the patch layer's weight is the sum over patches
    of these slopes times the patches: a linear system. It has one solution while there are fewer
    patches than the width (norms take a direction), and exact gradients give the image up to
    rounding, after any number of local steps. If pixels rounded to 8 bits explain the update as
    well, they are the answer: it is then exact.

    If the model may change the image before that layer, `problem` says so.

    Assumptions: one image; a convolution whose stride is its kernel, called on the image itself; a
        trained position for each patch. Noise is amplified by the condition of the system.

    Raises:
        NotApplicable: several images, or no such layer or positions.

    Source: this project; Lu et al. 2022 (APRIL) for attention without a norm before it.

    Example:
        >>> import leakbound as lb
        >>> given = dict(input_shape=(1, 8, 8), classes=3, generator=lb.stream(0, "model"))
        >>> model = lb.models.vit(width=16, **given)
        >>> batch = torch.linspace(0, 1, 64).reshape(1, 1, 8, 8), torch.tensor([1])
        >>> lb.simulate(model, batch, attack=PatchInversion()).scores[0] > 60
        True
    """

    def __call__(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        task = summed_task(observation)
        if observation.examples > 1:
            raise NotApplicable("the patches of several images add up: it is for one image")
        name, layer = patch_layer(task, observation.input_shape)
        sent = task.unflatten(observation.update.rows.sum(0).double())
        weight = sent[f"{name}.weight"].flatten(1)
        count = math.prod(
            s // k for s, k in zip(observation.input_shape[1:], layer.kernel_size, strict=True)
        )
        slopes, off = _positions(sent, f"{name}.bias", count, len(weight))
        values = torch.linalg.svdvals(slopes)
        rank = int((values > STEEP * values[0]).sum())
        # Rounding is a share of each row; noise is the same for all.
        size = weight.norm(dim=1, keepdim=True).clamp_min(1e-300)
        size = size if isinstance(observation.update.law, Exact) else torch.ones_like(size)
        patches = torch.linalg.pinv(slopes.T / size, rtol=STEEP) @ (weight / size)

        def left(patches: Tensor) -> Tensor:
            lost: Tensor = ((slopes.T @ patches - weight) / size).norm() / (weight / size).norm()
            return lost

        low, high = task.input_range
        # Images mostly have 8 bits; exact pixels remove what rounding left.
        whole = low + (high - low) * ((patches - low) / (high - low) * 255).round() / 255
        whole = whole.to(observation.update.rows).double()
        # The patches' own fit takes up to `rank` of the rows' freedom; rounding leaves the rest.
        fair = 2 * math.sqrt(len(weight) / max(len(weight) - rank, 1))
        patches = whole if left(whole) <= fair * left(patches) else patches
        image = nn.functional.fold(
            patches.T[None], observation.input_shape[1:], layer.kernel_size, stride=layer.stride
        )
        problem = None
        share = float(left(patches))
        if rank < count:
            problem = f"the gradients of {count} positions have rank {rank}: patches are mixed"
        elif share > LEFT or off > AGREES:
            shares = f"{share:.1g} of the first layer's gradient, positions {off:.1g} of its bias'"
            problem = f"patches leave {shares}: noise"
        problem = problem or unlike(task, observation.input_shape, name)
        inputs = boxed(image.to(observation.update.rows), task)
        return Reconstruction(inputs, observation.labels, share, (), problem)


def patch_layer(task: Task, shape: tuple[int, ...]) -> tuple[str, Any]:
    """The convolution over separate patches that the model calls on the image itself."""
    low, high = task.input_range
    probe = torch.linspace(low, high, math.prod(shape)).reshape(1, *shape).to(task.parameters)
    layers = modules_of(task, nn.Conv2d)
    with torch.no_grad():
        seen = seen_by(task, layers, probe)
    kept = [
        name
        for name, values in seen.items()
        if values is not None
        and torch.equal(values, probe)
        and layers[name].kernel_size == layers[name].stride
        and layers[name].groups == 1
        and {f"{name}.weight", f"{name}.bias"} <= task.names
    ]
    if not kept:
        raise NotApplicable("no trained convolution with a bias cuts the image into patches")
    return kept[0], layers[kept[0]]


def _positions(sent: dict[str, Tensor], bias: str, count: int, width: int) -> tuple[Tensor, float]:
    """(count, width) the gradients of the patches' positions, which add up to the bias'; and the
    relative difference.
    """
    nearest = torch.empty(0)
    least = NEAREST
    for value in sent.values():
        if value.shape[-1:] != (width,) or not count <= value.numel() // width <= count + 2:
            continue
        rows = value.reshape(-1, width)
        for start in range(len(rows) - count, -1, -1):
            candidate = rows[start : start + count]
            off = float(
                (candidate.sum(0) - sent[bias]).norm() / sent[bias].norm().clamp_min(1e-300)
            )
            if off < least:
                nearest = candidate
                least = off
    if not len(nearest):
        raise NotApplicable("no trained positions are added to the patches")
    return nearest, least
