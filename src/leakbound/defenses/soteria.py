"""Soteria: withhold the columns of one linear layer's gradient that leak most of the input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap

from leakbound import check
from leakbound.client import layer_inputs
from leakbound.core import NotApplicable, Task, Unit, Update
from leakbound.defenses.base import Context, Defense, Sent, State
from leakbound.randomness import Source
from leakbound.task import weight_names

TOGETHER = 2**22
"""Number of input values that one vectorized pass may move at once."""


@dataclass(frozen=True, repr=False)
class Soteria(Defense):
    """Withhold the columns of a linear layer's weight gradient for the features that leak most.

    Let r be the layer's input (the data representation) for an example x. To zero r_i the input has
    to move by |r_i| / ||dr_i/dx|| (the shortest dx with dr_i · dx = -r_i). Of the F features, the
    floor(rate · F) with the largest distances, summed over the batch, are withheld; of ties, those
    with the lower index. The layer's bias and all other layers are sent as they are.

    An attacker who knows the defense leaves the withheld columns out of the match. The convolutions
    before the layer still leak the whole input.

    Args:
        rate: the fraction of the layer's input features.
        layer: the name of a linear layer, also if a server has wrapped the model in another one;
            None is the first layer whose input is not the model's input.

    Guarantees: none; the server sees which columns are withheld, and they depend on the data.

    Raises:
        ValueError: there is no such layer, its input is not one vector per example, or there is no
            context.

    Source: Sun et al. 2021, "Soteria", section 4 and algorithm 1 (p = 2); attacks on it: Balunovic
    et al. 2022, section 5, and Wang et al. 2022.

    Example:
        >>> Soteria(0.4).guarantee.value
        'none'
    """

    accepts = frozenset({Unit.CLIENT})
    keeps_law = False
    uses_context = True
    data_dependent_law = True
    masks_by_value = True

    rate: float = 0.4
    layer: str | None = None

    def __post_init__(self) -> None:
        check.fraction(rate=self.rate)

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        if context is None:
            raise ValueError(f"{self!r} runs on a client, which has a batch; give its context")
        task = context.task
        name = defended_layer(task, self.layer)
        reach = distances(task, context.batch.inputs, name).sum(0)
        gone = torch.sort(reach, descending=True, stable=True).indices
        gone = gone[: math.floor(self.rate * len(reach) + 1e-9)]  # 0.29 * 100 < 29 in floats
        mask = torch.ones_like(update.rows, dtype=torch.bool)
        for row in mask:
            weight = task.unflatten(row)[f"{name}.weight" if name else "weight"]
            weight[:, gone] = False  # a view: writes into the mask
        return update.masked(mask, by_value=True), state


def defended_layer(task: Task, layer: str | None = None) -> str:
    """The name of the linear layer that Soteria defends; nothing is sent for a frozen one."""
    linear: list[str] = []
    first: str | None = None
    for name, module in task.model.named_modules():
        if any(getattr(module, weight) is not None for weight in weight_names(module)):
            first = name if first is None else first
            sent = (f"{name}.weight" if name else "weight") in task.names
            if isinstance(module, nn.Linear) and sent:
                linear.append(name)
    if layer is not None:
        inside = [name for name in linear if name.endswith(f".{layer}")]
        if layer not in linear and len(inside) == 1:
            return inside[0]
        check.one_of(linear, layer=layer)
        return layer
    behind = [name for name in linear if name != first]
    if not behind:
        raise ValueError(
            "layer is None, but the model has no trained linear layer behind another layer whose "
            "input could be defended; name a layer, or use another defense"
        )
    return behind[0]


def representation(
    task: Task,
    inputs: Tensor,
    layer: str,
) -> Tensor:
    """The input (B, F) of a layer for inputs (B, *S), differentiable."""
    entering = layer_inputs(task, inputs, [layer])[layer]
    if entering.ndim != 2:
        raise ValueError(
            f"layer {layer!r} is used on {tuple(entering.shape)}; give one that is used once, on "
            "one vector per example"
        )
    return entering


def distances(
    task: Task,
    inputs: Tensor,
    layer: str,
) -> Tensor:
    """|r_i| / ||dr_i/dx||, (B, F): the input's first-order distance to a zero feature i.

    It is 0 if the feature is 0, and infinite if it is not 0 and does not depend on the input.
    """
    if task.coupled:
        raise NotApplicable(
            "batch norm in training mode couples the examples: no feature depends on one input only"
        )
    inputs = inputs.detach()

    def of(x: Tensor) -> Tensor:
        return representation(task, x, layer)

    with torch.no_grad():
        r = of(inputs)
        # One backward pass per feature, or one forward-mode pass per pixel, whichever are fewer.
        cheaper = _by_feature if r[0].numel() < inputs[0].numel() else _by_pixel
        squares = cheaper(of, inputs, r)
    return torch.where(r == 0, 0.0, r.abs() / squares.sqrt())


def _by_pixel(
    of: Callable[[Tensor], Tensor],
    inputs: Tensor,
    r: Tensor,
) -> Tensor:
    """||dr_i/dx||^2, (B, F), from one forward-mode pass per pixel."""
    size = len(inputs)
    numel = inputs[0].numel()

    def moved(pixel: Tensor) -> Tensor:
        tangent = nn.functional.one_hot(pixel, numel).to(inputs).reshape(inputs.shape[1:])
        change: Tensor = jvp(of, (inputs,), (tangent.expand_as(inputs),))[1]
        return change

    squares = torch.zeros_like(r)
    each = max(1, TOGETHER // (32 * size * numel))
    for start in range(0, numel, each):
        pixels = torch.arange(
            start,
            min(start + each, numel),
            device=inputs.device,
        )
        squares += vmap(moved)(pixels).square().sum(0)
    return squares


def _by_feature(
    of: Callable[[Tensor], Tensor],
    inputs: Tensor,
    r: Tensor,
) -> Tensor:
    """The same from one backward pass per feature."""
    squares = torch.empty_like(r)
    with torch.enable_grad():
        x = inputs.clone().requires_grad_()
        sums = of(x).sum(0)  # examples stay separate: each has its own gradient
        for i, total in enumerate(sums):
            (back,) = torch.autograd.grad(
                total,
                x,
                retain_graph=True,
                allow_unused=True,
            )
            squares[:, i] = 0.0 if back is None else back.flatten(1).square().sum(1)
    return squares
