"""How much every coordinate of a client's gradient reveals of its inputs: s_i = ||d g_i / d x||^2.

Models that can be read use the engine of `examples`; others use `torch.func`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from leakbound import check, client
from leakbound.core import NotApplicable, Task
from leakbound.engines import examples
from leakbound.engines.directions import Directions, RandomDirections, UnitDirections, fitting
from leakbound.engines.examples import ExamplePasses, ExampleRows
from leakbound.engines.loss import closed
from leakbound.engines.rules import Passes
from leakbound.randomness import Source, normal, stream

__all__ = [
    "ESTIMATORS",
    "Sensitivity",
    "along",
    "default_directions",
    "example_changes",
    "example_gradients",
    "example_products",
    "moved",
    "sensitivity",
]

ESTIMATORS = ("exact", "batch", "per_sample")
"""The estimators of `sensitivity`: every input by itself, the paper's, and ours."""

MOST_BYTES = 1_500_000_000
"""Memory for `example_products`."""

DIRECTIONS = 10
"""Directions by default: the paper's number."""


def default_directions(estimator: str, examples: int) -> int:
    """The default number of directions of `sensitivity` for a batch of `examples`.

    With `per_sample` examples have separate directions, so the product counts: 10, at least 2 for
    each. The direction of `batch` moves all examples: 10 for every batch.

    Example:
        >>> [default_directions("per_sample", examples) for examples in (1, 4, 16)]
        [10, 3, 2]
    """
    if estimator == "batch":
        return DIRECTIONS
    return max(2, math.ceil(DIRECTIONS / max(1, examples)))


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """Squared sensitivity of every gradient coordinate to the whole batch.

    `values` (P,) estimate s, and `gradient` (P,) is g itself, up to rounding. With k directions and
    B examples the relative standard error of a value is sqrt(2/k) for `batch`, between sqrt(2/(kB))
    and sqrt(2/k) for `per_sample`, and 0 for `exact`.
    """

    values: Tensor
    gradient: Tensor
    estimator: str
    directions: int

    def of(self, kept: Tensor) -> Sensitivity:
        """The estimate for a model that has only the weights where `kept` (P,) is True."""
        return replace(
            self,
            values=self.values * kept,
            gradient=self.gradient * kept,
        )


def sensitivity(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    source: Source,
    *,
    estimator: str = "per_sample",
    directions: int | None = None,
    chunk: int | None = None,
) -> Sensitivity:
    """Estimate s_i = ||d g_i / d x||^2 for every parameter i; x is the whole batch.

    Since g is the mean of the examples' gradients g_b, s_i = (1/B^2) sum_b ||d g_{b,i} / d x_b||^2.

    Args:
        task: model, weights and loss; the loss is a mean over the batch.
        inputs: (B, *S).
        labels: (B,) class numbers, or (B, K) probabilities.
        source: the source of random directions; `exact` draws none.
        estimator: "per_sample" gives every example a separate Gaussian direction and sums the
            squares (variance like 1 / (directions * B)). "batch" moves the whole batch along one
            direction at a time (the paper's: values / s is chi2_k / k). "exact" moves every input
            by itself.
        directions: k, how many directions to average over; None: see `default_directions`, and
            `exact` instead of `per_sample` if an example has no more inputs than that.
        chunk: how many examples' directions (for `batch`: directions) are computed at once; None:
            by a limit of about 64 MB (for `batch`: 128 MB).

    Raises:
        NotApplicable: batch norm in training mode, with an estimator other than `batch`.

    Source: Chen, Gursoy and Lei, "Optimal Defenses", section 3.5, lemma 3.8
    (`batch`, k = 10).

    Example:
        >>> from leakbound.randomness import stream
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> x, y = torch.ones(1, 1, 2, 2), torch.tensor([0])
        >>> sensitivity(Task.of(model), x, y, stream(0), estimator="exact").values.shape
        torch.Size([10])
    """
    check.one_of(ESTIMATORS, estimator=estimator)
    check.given(check.count, chunk=chunk)
    if directions is None:
        directions = 0 if estimator == "exact" else default_directions(estimator, len(inputs))
        if estimator == "per_sample" and inputs[0].numel() <= directions:
            estimator = "exact"
    elif estimator != "exact":
        check.count(directions=directions)
    inputs = inputs.detach()
    size = len(inputs)
    if estimator == "batch":
        values, gradient = _batch(task, inputs, labels, source, directions, chunk)
    elif task.coupled:
        raise NotApplicable(
            "batch norm in training mode couples the examples, so no single example has a "
            "sensitivity; use the estimator 'batch'"
        )
    elif estimator == "exact":
        directions = 0
        total, gradient = _squares(task, inputs, labels, UnitDirections(inputs), chunk)
        values = total / size**2
    else:
        drawn = RandomDirections(inputs, source, directions)
        total, gradient = _squares(task, inputs, labels, drawn, chunk)
        values = total / (directions * size**2)
    estimate = Sensitivity(values, gradient, estimator, directions)
    return estimate if task.kept is None else estimate.of(task.kept)


def _squares(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    pairs: Directions,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    """The sums (P,) over pairs of the squared changes of each example's gradient; the gradient."""
    total = torch.zeros_like(task.parameters)
    passes = examples.plan(task, inputs)
    if not _is_mean(task, inputs, labels):
        for part, directions in pairs.blocks(1):
            alone = inputs.new_zeros(1, *inputs.shape)
            # Times n, because the caller divides by n^2, as for a mean.
            alone[:, part] = len(inputs) * directions
            total += along(task, inputs, labels, alone)[0].detach().square()
    elif passes is not None:
        step = chunk or fitting(examples.elements(passes), inputs)
        return ExamplePasses(task, inputs, labels, passes, step).squares(pairs)
    else:
        step = chunk or fitting(_elements(task, inputs[:1]), inputs)
        for part, directions in pairs.blocks(step):
            for way in directions:
                total += pair_changes(task, inputs[part], labels[part], way).square().sum(0)
    return total, client.gradient(task, inputs, labels).detach()


@torch.no_grad()
def _is_mean(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
) -> bool:
    """Whether the batch's loss is the mean of each example's own; a user's loss may weight them."""
    if _known_mean(task, labels):
        return True
    outputs = client.forward(task, inputs)
    for values in (
        outputs,
        normal(outputs.shape, stream(0, "outputs"), like=outputs),
    ):
        pairs = zip(torch.split(values, 1), torch.split(labels, 1), strict=True)
        each = torch.stack([task.loss(*pair) for pair in pairs])
        if not torch.allclose(task.loss(values, labels), each.mean(), rtol=1e-4):
            return False
    return True


def _batch(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    source: Source,
    directions: int,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    step = chunk or fitting(_elements(task, inputs), inputs, limit=2**25)
    total = torch.zeros_like(task.parameters)
    for start in range(0, directions, step):
        count = min(step, directions - start)
        drawn = torch.stack([normal(inputs.shape, source, like=inputs) for _ in range(count)])
        with torch.no_grad():
            gradient, changes = moved(task, inputs, labels, drawn, chunk)
        total += changes.square().sum(0)
    return total / directions, gradient


def _elements(task: Task, inputs: Tensor) -> int:
    """Approximate count of numbers that `torch.func` needs for one direction of these inputs."""
    return 4 * len(task.parameters) + 64 * inputs.numel()


def pair_changes(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    tangents: Tensor,
) -> Tensor:
    """As `example_changes`, for any model that `torch.func` can differentiate."""

    def pair(
        image: Tensor,
        label: Tensor,
        tangent: Tensor,
    ) -> Tensor:
        def gradient(x: Tensor) -> Any:
            slope = grad(lambda flat: task.loss(client.forward(task, x[None], flat), label[None]))
            return slope(task.parameters)

        return cast(Tensor, jvp(gradient, (image,), (tangent,))[1])

    each: Tensor = vmap(pair)(inputs, labels, tangents)
    return each.detach()


def along(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    directions: Tensor,
) -> Tensor:
    """Change (k, P) of the gradient when the whole batch moves along each of directions (k, B, *S).

    Pure `torch.func`, differentiable in the inputs and in the directions.
    """
    return vmap(lambda way: client.input_jvp(task, inputs, labels, way))(directions)


def moved(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    directions: Tensor,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient (P,) and its changes (k, P) as `along` gives them, up to rounding.

    Differentiable as `along` is. If no derivatives are needed, most models use the engine of
    `examples`, `chunk` rows at a time.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> x, directions = torch.ones(1, 1, 2, 2), torch.ones(3, 1, 1, 2, 2)
        >>> [part.shape for part in moved(Task.of(model), x, torch.tensor([0]), directions)]
        [torch.Size([10]), torch.Size([3, 10])]
    """
    traced = _traced(inputs, labels, directions, task.parameters)
    passes = None if traced else _passes(task, inputs, labels)
    if passes is None:
        changes = along(task, inputs, labels, directions)
        return client.pure_gradient(task, inputs, labels), changes
    with torch.no_grad():
        step = chunk or fitting(examples.elements(passes), inputs)
        changes, gradient = ExamplePasses(task, inputs, labels, passes, step).along(directions)
    if task.kept is not None:
        return gradient * task.kept, changes * task.kept
    return gradient, changes


def _traced(*tensors: Tensor) -> bool:
    """Whether derivatives of a result from these may be requested, in any mode of PyTorch."""
    # Within a transform of `torch.func`, `requires_grad` shows nothing.
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    floating = [t for t in tensors if t.is_floating_point()]
    back = torch.is_grad_enabled() and any(t.requires_grad for t in floating)
    moving = (forward_ad.unpack_dual(t).tangent for t in floating)  # type: ignore[no-untyped-call]
    return back or any(tangent is not None for tangent in moving)


@torch.no_grad()
def example_gradients(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
) -> Tensor:
    """As `client.example_gradients`, (B, P), but not differentiable.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> example_gradients(Task.of(model), torch.ones(3, 4), torch.tensor([0, 1, 1])).shape
        torch.Size([3, 10])
    """
    passes = _passes(task, inputs, labels)
    if passes is None:
        return client.example_gradients(task, inputs, labels).detach()
    gradients = ExampleRows(task, passes, inputs.detach(), labels).each()
    return gradients if task.kept is None else gradients * task.kept


@torch.no_grad()
def example_products(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
) -> Tensor | None:
    """Inner products (B, B) of `example_gradients` in float64, without these gradients; None if the
    engine does not support the model, or the examples at once take more than MOST_BYTES.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> example_products(Task.of(model), torch.ones(3, 4), torch.tensor([0, 1, 1])).shape
        torch.Size([3, 3])
    """
    large = _elements(task, inputs) * inputs.element_size() > MOST_BYTES
    passes = None if large or task.kept is not None else _passes(task, inputs, labels)
    return None if passes is None else ExampleRows(task, passes, inputs.detach(), labels).products()


@torch.no_grad()
def example_changes(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    directions: Tensor,
) -> Tensor:
    """Change (B, P) of every example's gradient along that example's direction (B, *S).

    Includes a pruned model's missing weights, as if they were present.
    """
    passes = _passes(task, inputs, labels)
    if passes is None:
        return pair_changes(task, inputs, labels, directions)
    return ExampleRows(task, passes, inputs.detach(), labels).each(directions)


def _passes(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
) -> Passes | None:
    """Passes by the engine of examples, if the loss is the mean of each example's own."""
    whole = _known_mean(task, labels) and not task.coupled
    return examples.plan(task, inputs) if whole else None


def _known_mean(task: Task, labels: Tensor) -> bool:
    ignored = not labels.is_floating_point() and bool((labels < 0).any())
    return closed(task.loss) and not ignored
