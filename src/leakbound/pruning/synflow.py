"""SynFlow: the mask chosen once, before the training, in many small steps and without data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import grad

from leakbound import check, client
from leakbound.pruning.base import Pruning, given_batch, gone, prunable, top
from leakbound.random import Source
from leakbound.types import Batch, Task


@dataclass(frozen=True)
class Synflow(Pruning):
    """Keep the weights on strong paths from input to output, in many small steps; reads no data.

    Every step scores the weights that are left by |w| dR/d|w|, R the sum of the outputs for an
    input of ones, of the model with all weights and buffers positive and all that is added (biases,
    running means) zero. It lowers the density exponentially, over all layers together. Of the batch
    only the shape is read.

    Args:
        rate: see `Pruning`.
        iterations: the number of steps.

    Assumptions: layers and activations that are linear for positive values, in eval mode, such as
    ReLU and pooling, one after the other. Then the scores of every layer add up to the same R, so
    none is cut while others have weights to give. Sigmoids and norms that take statistics of the
    input break it: a layer may be cut, which is refused.

    Raises:
        ValueError: no batch is given, or batch norm is in training mode.

    Source: Tanaka et al. 2020, SynFlow. Their models start with zero biases; with others, flow
    that starts inside the model lets the layers before it be cut.

    Example:
        >>> from leakbound.random import stream
        >>> task = Task.of(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)))
        >>> batch = Batch(torch.zeros(1, 1, 2, 2), torch.tensor([0]))
        >>> int(Synflow(rate=0.5).start(task, batch, stream(0)).sum())
        6
    """

    iterations: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check.count(iterations=self.iterations)

    def scores(self, task: Task, batch: Batch | None, source: Source) -> Tensor:
        """|w| dR/d|w| of every weight (P,), float64."""
        return _flow(_positive(task), given_batch(self, batch).inputs[:1])

    def _first(self, task: Task, batch: Batch | None, source: Source) -> Tensor:
        wide, among = _positive(task), prunable(task)
        image = given_batch(self, batch).inputs[:1]
        total, mask = int(among.sum()), torch.ones_like(among)
        for step in range(1, self.iterations + 1):
            last = step == self.iterations
            lowered = self.rate if last else 1 - (1 - self.rate) ** (step / self.iterations)
            scores = _flow(wide.pruned(mask), image)
            mask = ~among | top(scores, among & mask, total - gone(lowered, total))
        return mask


def _positive(task: Task) -> Task:
    """The task in float64, its weights and buffers positive, what it adds zero."""
    if task.coupled:
        raise ValueError(
            "the model has batch norm in training mode, where synflow reads the model in eval "
            "mode; call model.eval(), or use another scheme"
        )
    wide = replace(task, public=None).to(task.parameters.device, torch.float64)
    buffers = dict(wide.buffers)
    for name, value in wide.buffers.items():
        if value.is_floating_point():
            buffers[name] = value.abs() * (name.rpartition(".")[2] != "running_mean")
    weights = wide.parameters.abs()
    for name, _, start, stop in wide.layout:
        weights[start:stop] *= name.rpartition(".")[2] != "bias"
    return replace(wide, parameters=weights, buffers=buffers)


def _flow(task: Task, image: Tensor) -> Tensor:
    ones = torch.ones_like(image, dtype=torch.float64)
    slope: Tensor = grad(lambda flat: client.forward(task, ones, flat).sum())(task.parameters)
    return task.parameters * slope
