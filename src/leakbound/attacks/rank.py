"""What a model's gradient determines of its inputs: equations against unknowns.

The recursive attack R-GAP reconstructs the input x of a layer from its output z and the derivative
d of the loss there. W x = z are the weight constraints and d x' = dL/dW the gradient constraints,
both linear in x. The rank of d gradient / d inputs covers all layers together, without a recursion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import vmap

from leakbound import check
from leakbound.client import forward, input_jvp, layer_inputs, refuse_codes
from leakbound.losses import named
from leakbound.random import normal, uniform
from leakbound.types import Batch, NotApplicable, Task

CUT = 1e-9
LARGEST = 2**27
CHUNK = 16


@dataclass(frozen=True)
class LayerRank:
    """Equations that one layer gives for its input, for a whole batch.

    Attributes:
        unknowns: entries of the layer's input.
        weight_constraints: entries of its output.
        gradient_constraints: entries of its weight gradient; none if the weight is frozen.
        independent: an upper bound on how many of these two are independent: every pair of output
            channels ties a sum of weight constraints to a sum of gradient constraints.
        virtual_constraints: equations that earlier layers give: the input is a function of the
            narrowest input so far, and has no more degrees of freedom than that.
    """

    name: str
    unknowns: int
    weight_constraints: int
    gradient_constraints: int
    independent: int
    virtual_constraints: int

    @property
    def missing(self) -> int:
        """A lower bound on the equations missing to determine the layer's input."""
        return max(0, self.unknowns - self.independent - self.virtual_constraints)


@dataclass(frozen=True)
class RankReport:
    """What the gradient of a batch determines of its inputs, to first order.

    Attributes:
        layers: the linear and convolution layers, first to last.
        unknowns: entries of the batch.
        rank: of d gradient / d inputs, or the part of it that was found.
        rank_at_most: equal to `rank` if the whole Jacobian was computed.
        weakest: its smallest singular value that counts, over the largest.
        verdict: the conclusion, in a sentence.
    """

    layers: tuple[LayerRank, ...]
    unknowns: int
    rank: int
    rank_at_most: int
    weakest: float
    verdict: str

    def __str__(self) -> str:
        """Format the layers as a table, with the verdict."""
        heads = ("layer", "unknowns", "weight", "gradient", "independent", "virtual", "missing")
        body = [
            (
                layer.name,
                *map(str, (layer.unknowns, layer.weight_constraints, layer.gradient_constraints)),
                *map(str, (layer.independent, layer.virtual_constraints, layer.missing)),
            )
            for layer in self.layers
        ]
        wide = [max(map(len, column)) for column in zip(heads, *body, strict=True)]
        lines = []
        for first, *rest in (heads, *body):
            cells = [cell.rjust(w) for cell, w in zip(rest, wide[1:], strict=True)]
            lines.append("  ".join([first.ljust(wide[0]), *cells]))
        return "\n".join([*lines, self.verdict])


def rank_analysis(
    task: Task,
    input_shape: tuple[int, ...],
    batch_size: int,
    generator: torch.Generator,
    *,
    batch: Batch | None = None,
) -> RankReport:
    """Count every layer's equations, and the rank of d gradient / d inputs, for one exact gradient.

    The counts depend on shapes only. The rank holds at one batch: random inputs and labels unless
    one is given. Ranks are equal almost everywhere within a piece of a piecewise linear model.
    Singular values under 1e-9 of the largest do not count. If the Jacobian has more than 2^27
    entries, only random directions of the inputs are used, and the rank is a lower bound.

    Assumptions: one local step and no defense. If the rank is below the number of unknowns, inputs
        can move without changing the gradient, so no attack distinguishes them without a prior.
        Full rank determines the inputs near the truth, but does not mean that an attacker finds
        them.

    Raises:
        ValueError: the batch size is under 1.
        NotApplicable: the model has no linear or convolution layer, calls one several times, or
            takes integer codes, which have no derivative.

    Source: Zhu and Blaschko 2021 (R-GAP), rank analysis; the relations between the two kinds of
        constraints and the Jacobian are from this project.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, 4))
        >>> report = rank_analysis(Task.of(model), (1, 3, 3), 1, torch.Generator().manual_seed(0))
        >>> report.unknowns, report.rank, report.layers[0].missing
        (9, 9, 0)
    """
    check.count(batch_size=batch_size)
    refuse_codes(task, input_shape)
    wide = task.to(task.parameters.device, torch.float64)
    inputs, labels = _batch(wide, input_shape, batch_size, generator, batch)
    layers = tuple(_layers(wide, inputs))
    unknowns, parameters = inputs.numel(), len(task.parameters)
    directions = max(1, min(unknowns, LARGEST // parameters))
    most = min(unknowns, parameters)
    tangents = torch.eye(unknowns).to(inputs)
    if directions < unknowns:
        tangents = normal((directions, unknowns), generator, like=inputs)
    values = _singular(wide, inputs, labels, tangents)
    rank = int((values > CUT * values[0]).sum()) if float(values[0]) > 0 else 0
    weakest = float(values[rank - 1] / values[0]) if rank else 0.0
    at_most = rank if directions == unknowns or rank < directions else most
    return RankReport(
        layers, unknowns, rank, at_most, weakest, _verdict(unknowns, rank, at_most, weakest)
    )


def _batch(
    task: Task,
    input_shape: tuple[int, ...],
    size: int,
    generator: torch.Generator,
    batch: Batch | None,
) -> tuple[Tensor, Tensor]:
    if batch is not None:
        return batch.inputs.to(task.parameters), batch.labels.to(task.parameters.device)
    low, high = task.input_range
    inputs = low + (high - low) * uniform((size, *input_shape), generator, like=task.parameters)
    with torch.no_grad():
        output = forward(task, inputs)
    if not named(task.loss).by_class:
        return inputs, named(task.loss).searched(torch.zeros_like(output))
    labels = ((task.label_range or output.shape[-1]) * uniform((size,), generator)).long()
    return inputs, labels.to(inputs.device)


def _layers(task: Task, inputs: Tensor) -> Iterator[LayerRank]:
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    known = {name: m for name, m in task.model.named_modules() if isinstance(m, kinds)}
    if not known:
        raise NotApplicable("the model has no linear or convolution layer")
    try:
        with torch.no_grad():
            seen = layer_inputs(task, inputs, list(known))
    except ValueError as error:
        raise NotApplicable(str(error)) from error
    freedom = inputs.numel()
    for name, module in known.items():
        with torch.no_grad():
            outputs = module(seen[name]).numel()
        sent = (f"{name}.weight" if name else "weight") in task.names
        unknowns, weights = seen[name].numel(), module.weight.numel() if sent else 0
        freedom = min(freedom, unknowns)
        channels, across = len(module.weight), module.weight[0].numel()
        tied = sent and getattr(module, "groups", 1) == 1 and channels <= across
        ties = channels**2 if tied else 0
        most = min(outputs + weights - ties, _apart(module, unknowns, outputs, weights))
        independent = max(0, min(unknowns, most))
        yield LayerRank(name, unknowns, outputs, weights, independent, unknowns - freedom)


def _apart(module: nn.Module, unknowns: int, outputs: int, weights: int) -> int:
    """Upper bound from shapes on the rank of weight plus the rank of gradient constraints."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    if not isinstance(module, nn.Linear):
        return min(unknowns, outputs) + min(unknowns, weights)
    examples, (wide, across) = outputs // len(weight), weight.shape
    return examples * min(wide, across) + (across * min(wide, examples) if weights else 0)


def _singular(task: Task, inputs: Tensor, labels: Tensor, tangents: Tensor) -> Tensor:
    """Singular values, largest first, of the gradient's Jacobian along the tangents (k, B * D)."""

    def along(tangent: Tensor) -> Tensor:
        return input_jvp(task, inputs, labels, tangent)

    shaped = tangents.view(-1, *inputs.shape)
    parts = [vmap(along)(shaped[a : a + CHUNK]) for a in range(0, len(shaped), CHUNK)]
    jacobian = torch.cat(parts)
    if jacobian.shape[1] > jacobian.shape[0]:
        jacobian = torch.linalg.qr(jacobian.T, mode="r").R
    values: Tensor = torch.linalg.svdvals(jacobian)
    return values


def _verdict(unknowns: int, rank: int, at_most: int, weakest: float) -> str:
    if at_most < unknowns:
        return (
            f"The gradient leaves {unknowns - at_most} of {unknowns} input values free: without a "
            "prior, no attack determines the inputs."
        )
    if rank == unknowns:
        return (
            f"The gradient determines all {unknowns} input values near the truth (weakest "
            f"direction {weakest:.1g} of the strongest): the architecture protects none."
        )
    return (
        f"The gradient determines at least {rank} of {unknowns} input values; the rest of its "
        "Jacobian was not computed."
    )
