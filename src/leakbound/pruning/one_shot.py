"""Schemes that choose the mask once, before training: by one score, or in many small steps."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import grad, vjp

from leakbound import check, client
from leakbound.core import Batch, Task
from leakbound.pruning.base import (
    SCOPES,
    Pruning,
    full_gradient,
    given_batch,
    gone,
    keep_largest,
    prunable,
    top,
)
from leakbound.randomness import Source, uniform


@dataclass(frozen=True)
class OneShot(Pruning):
    """Base of the schemes that score every weight once and keep the highest.

    Args:
        scope: compare the scores of all weights ("global") or prune the rate of every tensor
            ("layer").
    """

    scope: str = "global"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(SCOPES, scope=self.scope)

    @abstractmethod
    def scores(
        self,
        task: Task,
        batch: Batch | None,
        source: Source,
    ) -> Tensor:
        """The score of every weight, (P,)."""

    def _first(
        self,
        task: Task,
        batch: Batch | None,
        source: Source,
    ) -> Tensor:
        scores = self.scores(task, batch, source)
        return keep_largest(task, scores, self.rate, self.scope)


@dataclass(frozen=True)
class Random(OneShot):
    """Keep random weights, all sets equally likely; reads no data and no weights.

    Example:
        >>> from leakbound.randomness import stream
        >>> task = Task.of(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)))
        >>> int((~Random(rate=0.5).start(task, None, stream(0))).sum())
        4
    """

    def scores(
        self,
        task: Task,
        batch: Batch | None,
        source: Source,
    ) -> Tensor:
        like = torch.zeros((), dtype=torch.float64, device=task.parameters.device)
        return uniform(task.parameters.shape, source, like=like)


@dataclass(frozen=True)
class Magnitude(OneShot):
    """Keep the weights of largest magnitude; reads no data.

    With untrained weights, scope "global" prunes most of the widest layers, because their weights
    start smallest.

    Source: Han et al. 2015.
    """

    def scores(
        self,
        task: Task,
        batch: Batch | None,
        source: Source,
    ) -> Tensor:
        return task.parameters.abs()


@dataclass(frozen=True)
class Snip(OneShot):
    """Keep the weights whose removal would change the loss most, to first order: |w dL/dw|.

    The mask leaks the batch from which it is chosen.

    Raises:
        ValueError: no batch is given.

    Source: Lee, Ajanthan and Torr 2019, SNIP.

    Example:
        >>> from leakbound.randomness import stream
        >>> task = Task.of(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)))
        >>> batch = Batch(torch.ones(2, 1, 2, 2), torch.tensor([0, 1]))
        >>> int(Snip(rate=0.5).start(task, batch, stream(0)).sum())
        6
    """

    reads_data = True

    def scores(
        self,
        task: Task,
        batch: Batch | None,
        source: Source,
    ) -> Tensor:
        given = given_batch(self, batch)
        return (task.parameters * full_gradient(task, given)).abs()


@dataclass(frozen=True)
class Grasp(OneShot):
    """Keep the weights with the highest w (H g), H the Hessian of the loss: the gradient's flow.

    The mask leaks the batch from which it is chosen.

    Args:
        temperature: divides the model's outputs; at the authors' 200 all classes are nearly equally
            likely.

    Raises:
        ValueError: no batch is given.

    Source: Wang, Zhang and Grosse 2020, GraSP, with the sign of the authors' code: their equation
        removes the highest -w (H g).
    """

    reads_data = True

    temperature: float = 200.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive(temperature=self.temperature)

    def scores(
        self,
        task: Task,
        batch: Batch | None,
        source: Source,
    ) -> Tensor:
        given = given_batch(self, batch)

        def loss(flat: Tensor) -> Tensor:
            outputs = client.forward(task, given.inputs, flat)
            return task.loss(outputs / self.temperature, given.labels)

        pulled = vjp(grad(loss), task.parameters)
        curved: Tensor = pulled[1](pulled[0])[0]  # the Hessian is symmetric
        return (task.parameters * curved).detach()


@dataclass(frozen=True)
class Synflow(Pruning):
    """Keep the weights on strong paths from input to output, in many small steps; reads no data.

    Every step scores the remaining weights by |w| dR/d|w|. R is the sum of the outputs for an input
    of ones, in the model with all weights and buffers positive and all additive terms (biases,
    running means) zero. The density falls exponentially, over all layers together. Only the batch's
    shape is used.

    Args:
        iterations: the number of steps.

    Assumptions: layers and activations that are linear for positive values, in eval mode, such as
        ReLU and pooling, one after the other. Then the scores of every layer add up to the same R,
        so no layer is cut while others have weights left. Sigmoids and norms with statistics of the
        input break this: a layer may be cut, which raises an error.

    Raises:
        ValueError: no batch is given, or batch norm is in training mode.

    Source: Tanaka et al. 2020, SynFlow. Their models start with zero biases; with other biases,
        flow that starts inside the model may cut the layers before it.

    Example:
        >>> from leakbound.randomness import stream
        >>> task = Task.of(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)))
        >>> batch = Batch(torch.zeros(1, 1, 2, 2), torch.tensor([0]))
        >>> int(Synflow(rate=0.5).start(task, batch, stream(0)).sum())
        6
    """

    iterations: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check.count(iterations=self.iterations)

    def scores(
        self,
        task: Task,
        batch: Batch | None,
        source: Source,
    ) -> Tensor:
        """|w| dR/d|w| of every weight (P,), float64."""
        return _flow(_positive(task), given_batch(self, batch).inputs[:1])

    def _first(
        self,
        task: Task,
        batch: Batch | None,
        source: Source,
    ) -> Tensor:
        wide = _positive(task)
        among = prunable(task)
        image = given_batch(self, batch).inputs[:1]
        total = int(among.sum())
        mask = torch.ones_like(among)
        for step in range(1, self.iterations + 1):
            last = step == self.iterations
            lowered = self.rate if last else 1 - (1 - self.rate) ** (step / self.iterations)
            scores = _flow(wide.pruned(mask), image)
            mask = ~among | top(scores, among & mask, total - gone(lowered, total))
        return mask


def _positive(task: Task) -> Task:
    """The task in float64, its weights and buffers positive, its additive terms zero."""
    if task.coupled:
        raise ValueError(
            "the model has batch norm in training mode, but synflow reads the model in eval "
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
