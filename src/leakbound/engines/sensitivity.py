"""How much every coordinate of a client's gradient tells of its inputs: s_i = ||d g_i / d x||^2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import vmap

from leakbound import check, client
from leakbound.engines import chain
from leakbound.engines.dual import parted
from leakbound.engines.examples import a_mean
from leakbound.engines.examples import changes as example_changes
from leakbound.engines.examples import gradients as example_gradients
from leakbound.engines.lanes import Draws, Lanes, Pixels, fitting, over_lanes
from leakbound.engines.passes import Passes
from leakbound.engines.products import Forward
from leakbound.engines.squares import Power
from leakbound.random import Source, normal
from leakbound.types import NotApplicable, Task

__all__ = [
    "ESTIMATORS",
    "Sensitivity",
    "along",
    "default_directions",
    "example_changes",
    "example_gradients",
    "moved",
    "sensitivity",
]

ESTIMATORS = ("exact", "batch", "per_sample", "with_forward")
"""What `sensitivity` knows: the oracle, the paper's estimator, ours, and ours with more directions
that pass forward only."""

DIRECTIONS = {"batch": 10, "per_sample": 10, "with_forward": 4}
"""Directions for one example by default: the paper's; the others rank coordinates at least as well
(Spearman correlation with the exact ranking .96 and more on SimpleConvNet)."""


def default_directions(estimator: str, examples: int) -> int:
    """How many directions `sensitivity` takes for a batch of so many examples, if none are given.

    Examples move along directions of their own, so a larger batch needs fewer of them: what counts
    is their product, 10 for `per_sample` (at least 2 each) and 4 for `with_forward`. The one
    direction of `batch` moves all examples, so there it is 10 for every batch, as in the paper.

    Example:
        >>> [default_directions("per_sample", examples) for examples in (1, 4, 16)]
        [10, 3, 2]
    """
    if estimator == "batch":
        return DIRECTIONS["batch"]
    least = 2 if estimator == "per_sample" else 1
    return max(least, math.ceil(DIRECTIONS[estimator] / max(1, examples)))


@dataclass(frozen=True)
class _How:
    estimator: str
    directions: int
    forward: int
    chunk: int | None


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """Squared sensitivity of every gradient coordinate to the whole batch, with its own error.

    Attributes:
        values: (P,) the estimate of s.
        gradient: (P,) the gradient g itself, as `client.gradient` gives it, up to rounding.
        error: (P,) the standard error of each value; zeros for `exact`.
        relative_error: the expected distance ||values - s|| / ||s|| (Euclidean, over all
            parameters), as estimated from the same draws; 0 for `exact`.
        estimator: the name of the estimator.
        directions: random directions used: over the batch for `batch`, for each example for
            `per_sample` and `with_forward`, those that pass forward only not counted; 0 for
            `exact`.
    """

    values: Tensor
    gradient: Tensor
    error: Tensor | None
    relative_error: float
    estimator: str
    directions: int

    def of(self, kept: Tensor) -> Sensitivity:
        """The estimate for a model that has only the weights where `kept` (P,) is True."""
        error = None if self.error is None else self.error * kept
        values = self.values * kept
        relative = self.relative_error
        if error is not None and self.estimator in ("per_sample", "with_forward"):
            relative = _relative(values, error)
        gradient = self.gradient * kept
        return replace(self, values=values, gradient=gradient, error=error, relative_error=relative)


def sensitivity(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    source: Source,
    *,
    estimator: str = "per_sample",
    directions: int | None = None,
    forward: int | None = None,
    chunk: int | None = None,
) -> Sensitivity:
    """Estimate s_i = ||d g_i / d x||^2 for every parameter i, x being the whole batch.

    As g is the mean of the examples' gradients g_b, s_i = (1/B^2) sum_b ||d g_{b,i} / d x_b||^2.

    Args:
        task: model, weights and loss; the loss is a mean over the batch.
        inputs: (B, *S).
        labels: (B,) class numbers, or (B, K) probabilities.
        source: where random directions come from; `exact` draws none.
        estimator: "per_sample" gives every example its own Gaussian direction and sums the squares
            (variance like 1 / (directions * B)); "batch" moves the whole batch along one direction
            at a time (the paper's: values / s is chi2_k / k); "exact" moves every input by itself.
            "with_forward" is "per_sample", with more directions for what the weights of plain
            Linear layers owe to their inputs: they cost a forward pass only. Unbiased but for
            values that would fall below 0, which become their standard error. Where the model is
            no plain chain of layers it is "per_sample", and the result says so.
        directions: k, how many directions to average over; `exact` ignores it. None: see
            `default_directions`, and `exact` in place of `per_sample` where an example has no more
            inputs than that.
        forward: for "with_forward", how many directions pass forward only; None: 4 for each other.
        chunk: how many examples' directions (for `batch`: directions) are computed at once; None
            chooses it from a limit of about 64 MB (for `batch`: 128 MB), or one at a time.

    Raises:
        ValueError: an unknown estimator, or a count below 1.
        NotApplicable: batch norm in training mode, with another estimator than `batch`.

    Source: Chen, Gursoy and Lei, "Optimal Defenses", section 3.3 (`batch`, k = 10).

    Example:
        >>> from leakbound.random import stream
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> x, y = torch.ones(1, 1, 2, 2), torch.tensor([0])
        >>> sensitivity(Task.of(model), x, y, stream(0), estimator="exact").values.shape
        torch.Size([10])
    """
    check.one_of(ESTIMATORS, estimator=estimator)
    if chunk is not None:
        check.count(chunk=chunk)
    if directions is None:
        directions = 0 if estimator == "exact" else default_directions(estimator, len(inputs))
        if estimator == "per_sample" and inputs[0].numel() <= directions:
            estimator = "exact"
    elif estimator != "exact":
        check.count(directions=directions)
    if forward is not None:
        check.count(forward=forward)
    how = _How(estimator, directions, forward or 4 * directions, chunk)
    found = _estimate(task, inputs.detach(), labels, source, how)
    return found if task.kept is None else found.of(task.kept)


def _estimate(task: Task, inputs: Tensor, labels: Tensor, source: Source, how: _How) -> Sensitivity:
    size, layers = len(inputs), chain.plan(task, inputs) if a_mean(task, labels) else None
    fast = Passes(task, layers, inputs, labels, how.chunk) if layers else None
    if how.estimator == "batch":
        return _batch(task, fast, inputs, labels, source, how)
    _refuse_coupled(task)

    def summed(lanes: Lanes, more: Mapping[str, Forward] | None = None) -> tuple[Power, Tensor]:
        if fast:
            return fast.over_lanes(lanes, more)
        return over_lanes(task, inputs, labels, lanes, chunk=how.chunk)

    if how.estimator == "exact":
        power, gradient = summed(Pixels(inputs))
        values = power.total / size**2
        return Sensitivity(values, gradient, torch.zeros_like(values), 0.0, "exact", 0)
    name, more, k = "per_sample", None, how.directions
    if how.estimator == "with_forward" and fast:
        name, more = "with_forward", fast.forward_only(source, k, how.forward)
    power, gradient = summed(Draws(inputs, source, k), more)
    # a draw is q = ||.||^2 chi2_1: its variance 2 ||.||^4 is two thirds of its mean square
    error = power.norm * (math.sqrt(2 / 3) / (k * size**2))
    values = power.total / (k * size**2)
    values = torch.where(values > 0, values, error)  # only `with_forward` can be below 0
    return Sensitivity(values, gradient, error, _relative(values, error), name, k)


def along(task: Task, inputs: Tensor, labels: Tensor, directions: Tensor) -> Tensor:
    """Change (k, P) of the gradient when the whole batch moves along each of k directions.

    Pure `torch.func`, differentiable in the inputs and in the directions.

    Shapes:
        inputs (B, *S); labels (B,) or (B, K); directions (k, B, *S).
    """

    def one(direction: Tensor) -> Tensor:
        return client.input_jvp(task, inputs, labels, direction)

    changes: Tensor = vmap(one)(directions)
    return changes


def moved(task: Task, inputs: Tensor, labels: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient (P,) and its changes (k, P) as `along` gives them, up to rounding.

    Differentiable as `along` is; where no one asks for slopes, plain chains of layers take the
    engine of `chain`.

    Shapes:
        inputs (B, *S); labels (B,) or (B, K); directions (k, B, *S).

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> x, ways = torch.ones(1, 1, 2, 2), torch.ones(3, 1, 1, 2, 2)
        >>> [part.shape for part in moved(Task.of(model), x, torch.tensor([0]), ways)]
        [torch.Size([10]), torch.Size([3, 10])]
    """
    values = not _traced(inputs, labels, directions, task.parameters)
    layers = chain.plan(task, inputs) if values and a_mean(task, labels) else None
    if layers is None:
        changes = along(task, inputs, labels, directions)
        return client.pure_gradient(task, inputs, labels), changes
    with torch.no_grad():
        passes = Passes(task, layers, inputs, labels, None)
        changes, gradient = passes.along(directions), passes.gradient()
    if task.kept is not None:
        return gradient * task.kept, changes * task.kept
    return gradient, changes


def _traced(*tensors: Tensor) -> bool:
    """Whether slopes of what is computed from these may be asked for, in any way of PyTorch's."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    floating = [t for t in tensors if t.is_floating_point()]
    back = torch.is_grad_enabled() and any(t.requires_grad for t in floating)
    return back or any(parted(t)[1] is not None for t in floating)


def _refuse_coupled(task: Task) -> None:
    if task.coupled:
        raise NotApplicable(
            "batch norm in training mode couples the examples, so that no one has a sensitivity of "
            "its own; take the estimator 'batch'"
        )


def _relative(values: Tensor, error: Tensor) -> float:
    norm = torch.linalg.vector_norm
    variance = float(norm(error, dtype=torch.float64)) ** 2
    squares = float(norm(values, dtype=torch.float64)) ** 2 - variance  # E values^2 - variance
    return math.sqrt(variance / squares) if squares > 0 else 0.0


def _batch(
    task: Task,
    fast: Passes | None,
    inputs: Tensor,
    labels: Tensor,
    source: Source,
    how: _How,
) -> Sensitivity:
    step = how.chunk
    if step is None:
        step = fitting(4 * len(task.parameters) + 64 * inputs.numel(), inputs, limit=2**25)
    total, directions = torch.zeros_like(task.parameters), how.directions
    for start in range(0, directions, step):
        count = min(step, directions - start)
        drawn = torch.stack([normal(inputs.shape, source, like=inputs) for _ in range(count)])
        moved = fast.along(drawn) if fast else along(task, inputs, labels, drawn).detach()
        total = total + moved.square().sum(0)
    values, spread = total / directions, math.sqrt(2 / directions)
    gradient = fast.gradient() if fast else client.gradient(task, inputs, labels).detach()
    error = values * spread
    relative = spread if bool((values > 0).any()) else 0.0
    return Sensitivity(values, gradient, error, relative, "batch", directions)
