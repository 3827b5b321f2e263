"""The layers of a model as inspection reads them: rows of weights, and what enters them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakbound.types import Task


@dataclass(frozen=True, eq=False)
class LayerRows:
    """Weights (k, d) of one layer, a row a unit; its bias (k,); which weights are not pruned.

    `below`: of a linear layer, how many units the linear layer before it has. `entering`: (d,) the
    size of the weights of the units that enter, of the layer before; None where they do not fit.
    """

    name: str
    rows: Tensor
    bias: Tensor | None
    kept: Tensor
    linear: bool
    below: int | None
    entering: Tensor | None


def layers(task: Task) -> list[LayerRows]:
    """The linear layers and convolutions of the model, in the order of its modules."""
    parts = task.tensors(task.parameters.detach())
    there = torch.ones_like(task.parameters, dtype=torch.bool) if task.kept is None else task.kept
    kept = task.unflatten(there)
    found: list[LayerRows] = []
    below: int | None = None
    size: Tensor | None = None
    for name, module in task.model.named_modules():
        key = f"{name}.weight" if name else "weight"
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and key in parts:
            rows = parts[key].flatten(1)
            bias = parts.get(f"{name}.bias" if name else "bias")
            linear = isinstance(module, nn.Linear)
            under = below if linear else None
            entering = _repeated(size, rows.shape[1])
            here = kept.get(key, torch.ones_like(parts[key], dtype=torch.bool)).flatten(1)
            found.append(LayerRows(name, rows, bias, here, linear, under, entering))
            size = _sizes(rows if entering is None else balanced(rows, entering))
            below = len(rows) if linear else below
    return found


def _repeated(size: Tensor | None, width: int) -> Tensor | None:
    """The sizes (k,) of units as those of what they send to rows of `width` weights."""
    if size is None or width % len(size):
        return None
    return size.repeat_interleave(width // len(size))


def _sizes(rows: Tensor) -> Tensor:
    """Norms (k,) of the rows over the largest; 1 for rows of zeros."""
    even, most = evened(rows)
    size: Tensor = most / most.max().clamp_min(5e-324) * even.norm(dim=1)
    return size.masked_fill(size == 0, 1.0)


def balanced(rows: Tensor, entering: Tensor) -> Tensor:
    """Rows (k, d) as they were if the units that enter had weights of size 1."""
    return evened(rows)[0] * entering


def evened(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (k, d) in float64, each over its largest entry, and these (k,); zeros stay zeros.

    What is told of the result by powers and products neither overflows nor underflows.

    Example:
        >>> evened(torch.tensor([[1e-30, -2e-30], [0.0, 0.0]]))[0].tolist()
        [[0.5, -1.0], [0.0, 0.0]]
    """
    wide = rows.double()
    most = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(len(wide))
    usable = (most > 0) & most.isfinite()
    even = (wide / most[:, None]).masked_fill(~usable[:, None], 0)
    return even, most.masked_fill(~usable, 0)


def head_of(layers: list[LayerRows]) -> str | None:
    """The output layer, whose rows no activation follows; None in a model of one layer."""
    linear = [layer.name for layer in layers if layer.linear]
    return linear[-1] if len(layers) > 1 and linear else None
