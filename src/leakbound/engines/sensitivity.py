"""How much every coordinate of a client's gradient reveals of its inputs: s_i = ||d g_i / d x||^2.

Plain chains of layers use the engine of `plain_chain`; other models use that of `taps` for sums of
squares, otherwise `torch.func`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from leakbound import check, client
from leakbound.core import NotApplicable, Task
from leakbound.engines import plain_chain, taps
from leakbound.engines.directions import Directions, RandomDirections, UnitDirections, fitting
from leakbound.engines.loss import closed
from leakbound.engines.plain_chain import ChainPasses, ChainPoint
from leakbound.engines.weight_changes import Forward, Power, power_of
from leakbound.randomness import Source, normal

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

ESTIMATORS = ("exact", "batch", "per_sample", "with_forward")
"""The estimators of `sensitivity`: every input by itself, the paper's, ours, and ours with more
directions that only pass forward.
"""

MOST_BYTES = 1_500_000_000
"""Memory for `example_products`."""

DIRECTIONS = {"batch": 10, "per_sample": 10, "with_forward": 4}
"""Directions for one example by default: the paper's number; the others rank coordinates at least
as well (Spearman correlation with the exact ranking 0.96 and more on SimpleConvNet).
"""


def default_directions(estimator: str, examples: int) -> int:
    """The default number of directions of `sensitivity` for a batch of `examples`.

    Examples have separate directions, so the product counts: 10 for `per_sample` (at least 2 each),
    4 for `with_forward`. The direction of `batch` moves all examples: 10 for every batch.

    Example:
        >>> [default_directions("per_sample", examples) for examples in (1, 4, 16)]
        [10, 3, 2]
    """
    if estimator == "batch":
        return DIRECTIONS["batch"]
    least = 2 if estimator == "per_sample" else 1
    return max(least, math.ceil(DIRECTIONS[estimator] / max(1, examples)))


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """Squared sensitivity of every gradient coordinate to the whole batch, with its error.

    `values` (P,) estimate s, `error` (P,) are their standard errors, zeros for `exact`.
    `relative_error` is the expected ||values - s|| / ||s|| from the same draws. `gradient` (P,) is
    g itself, up to rounding. `directions` does not count those that only pass forward.
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
            by itself. "with_forward" is "per_sample" with more directions for the weights of plain
            Linear layers, which cost only a forward pass: unbiased, but values below 0 become their
            standard error. A model that is not a plain chain of layers gets "per_sample" instead.
        directions: k, how many directions to average over; None: see `default_directions`, and
            `exact` instead of `per_sample` if an example has no more inputs than that.
        forward: for "with_forward", how many directions only pass forward; None: 4 for each other
            one.
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
    check.given(check.count, forward=forward)
    inputs = inputs.detach()
    parts = _plain(task, inputs, labels)
    given = (task, inputs, labels, chunk)
    passes = ChainPasses(*given, parts) if parts else AnyPasses(*given)
    if estimator == "batch":
        found = _batch(passes, source, directions)
    elif task.coupled:
        raise NotApplicable(
            "batch norm in training mode couples the examples, so no single example has a "
            "sensitivity; use the estimator 'batch'"
        )
    elif estimator == "exact":
        power, gradient = passes.powers(UnitDirections(inputs))
        values = power.total / len(inputs) ** 2
        found = Sensitivity(values, gradient, torch.zeros_like(values), 0.0, "exact", 0)
    else:
        more = forward or 4 * directions
        found = _drawn(passes, source, directions, more if estimator == "with_forward" else 0)
    return found if task.kept is None else found.of(task.kept)


def _drawn(passes: ChainPasses | AnyPasses, source: Source, k: int, forward: int) -> Sensitivity:
    name = "per_sample"
    more = None
    size = len(passes.inputs)
    if forward and isinstance(passes, ChainPasses):
        name = "with_forward"
        more = passes.forward_only(source, k, forward)
    power, gradient = passes.powers(RandomDirections(passes.inputs, source, k), more)
    # a draw is q = ||.||^2 chi2_1: its variance 2 ||.||^4 is two thirds of its mean square
    error = power.norm * (math.sqrt(2 / 3) / (k * size**2))
    values = power.total / (k * size**2)
    values = torch.where(values > 0, values, error)  # only `with_forward` can be below 0
    return Sensitivity(values, gradient, error, _relative(values, error), name, k)


def _batch(passes: ChainPasses | AnyPasses, source: Source, directions: int) -> Sensitivity:
    task = passes.task
    inputs = passes.inputs
    step = passes.chunk or fitting(_elements(task, inputs), inputs, limit=2**25)
    total = torch.zeros_like(task.parameters)
    for start in range(0, directions, step):
        count = min(step, directions - start)
        drawn = torch.stack([normal(inputs.shape, source, like=inputs) for _ in range(count)])
        total = total + passes.along(drawn).square().sum(0)
    values = total / directions
    spread = math.sqrt(2 / directions)
    relative = spread if bool((values > 0).any()) else 0.0
    return Sensitivity(values, passes.gradient(), values * spread, relative, "batch", directions)


def _relative(values: Tensor, error: Tensor) -> float:
    norm = torch.linalg.vector_norm
    variance = float(norm(error, dtype=torch.float64)) ** 2
    squares = float(norm(values, dtype=torch.float64)) ** 2 - variance  # E values^2 - variance
    return math.sqrt(variance / squares) if squares > 0 else 0.0


@dataclass(frozen=True, eq=False)
class AnyPasses:
    """As `ChainPasses`, for a batch and any model: through taps, otherwise by `torch.func`."""

    task: Task
    inputs: Tensor
    labels: Tensor
    chunk: int | None

    def powers(
        self, pairs: Directions, more: Mapping[str, Forward] | None = None
    ) -> tuple[Power, Tensor]:
        """As `ChainPasses.powers`; `more` is None here."""
        task = self.task
        inputs = self.inputs
        labels = self.labels
        found = taps.plan(task, inputs, labels)
        size = len(inputs)
        wide = found.elements if found else _elements(task, inputs[:1])
        sums: Power | None = None
        gradient: Tensor | None = None
        left = size if pairs.leading else 0
        covered = pairs.leading
        for places, tangents in pairs.rounds(self.chunk or fitting(wide, inputs)):
            x = inputs[places]
            y = labels[places]
            fresh = min(left, len(places))
            fast = taps.powers(task, found, x, y, tangents, fresh) if found else None
            if fast:
                part, first = fast
                if first is not None:
                    gradient = first / size if gradient is None else gradient + first / size
            else:
                part = power_of(pair_changes(task, x, y, tangents))
                covered = covered and not fresh
            sums = part if sums is None else sums.plus(part)
            left = left - fresh
        assert sums is not None  # a batch has at least one example
        return sums, self.gradient() if gradient is None or not covered else gradient

    def along(self, directions: Tensor) -> Tensor:
        return along(self.task, self.inputs, self.labels, directions).detach()

    def gradient(self) -> Tensor:
        return client.gradient(self.task, self.inputs, self.labels).detach()


def _elements(task: Task, inputs: Tensor) -> int:
    """Approximate count of numbers that `torch.func` needs for one direction of these inputs."""
    return 4 * len(task.parameters) + 64 * inputs.numel()


def pair_changes(task: Task, inputs: Tensor, labels: Tensor, tangents: Tensor) -> Tensor:
    """As `example_changes`, for any model that `torch.func` can differentiate."""

    def pair(image: Tensor, label: Tensor, tangent: Tensor) -> Tensor:
        def own(x: Tensor) -> Any:
            slope = grad(lambda flat: task.loss(client.forward(task, x[None], flat), label[None]))
            return slope(task.parameters)

        return cast(Tensor, jvp(own, (image,), (tangent,))[1])

    each: Tensor = vmap(pair)(inputs, labels, tangents)
    return each.detach()


def along(task: Task, inputs: Tensor, labels: Tensor, directions: Tensor) -> Tensor:
    """Change (k, P) of the gradient when the whole batch moves along each of directions (k, B, *S).

    Pure `torch.func`, differentiable in the inputs and in the directions.
    """
    return vmap(lambda way: client.input_jvp(task, inputs, labels, way))(directions)


def moved(task: Task, inputs: Tensor, labels: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient (P,) and its changes (k, P) as `along` gives them, up to rounding.

    Differentiable as `along` is. If no derivatives are needed, plain chains of layers use the
    engine of `plain_chain`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> x, directions = torch.ones(1, 1, 2, 2), torch.ones(3, 1, 1, 2, 2)
        >>> [part.shape for part in moved(Task.of(model), x, torch.tensor([0]), directions)]
        [torch.Size([10]), torch.Size([3, 10])]
    """
    traced = _traced(inputs, labels, directions, task.parameters)
    parts = None if traced else _plain(task, inputs, labels)
    if parts is None:
        changes = along(task, inputs, labels, directions)
        return client.pure_gradient(task, inputs, labels), changes
    with torch.no_grad():
        passes = ChainPasses(task, inputs, labels, None, parts)
        changes = passes.along(directions)
        gradient = passes.gradient()
    if task.kept is not None:
        return gradient * task.kept, changes * task.kept
    return gradient, changes


def _traced(*tensors: Tensor) -> bool:
    """Whether derivatives of a result from these may be requested, in any mode of PyTorch."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    floating = [t for t in tensors if t.is_floating_point()]
    back = torch.is_grad_enabled() and any(t.requires_grad for t in floating)
    return back or any(taps.parted(t)[1] is not None for t in floating)


@torch.no_grad()
def example_gradients(task: Task, inputs: Tensor, labels: Tensor) -> Tensor:
    """As `client.example_gradients`, (B, P), but not differentiable.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> example_gradients(Task.of(model), torch.ones(3, 4), torch.tensor([0, 1, 1])).shape
        torch.Size([3, 10])
    """
    parts = _plain(task, inputs, labels)
    if parts is None:
        return client.example_gradients(task, inputs, labels).detach()
    found = ChainPoint(task, parts, inputs.detach(), labels).each()
    return found if task.kept is None else found * task.kept


@torch.no_grad()
def example_products(task: Task, inputs: Tensor, labels: Tensor) -> Tensor | None:
    """Inner products (B, B) of `example_gradients` in float64, without these gradients; None if the
    model is no plain chain, or the examples at once take more than MOST_BYTES.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> example_products(Task.of(model), torch.ones(3, 4), torch.tensor([0, 1, 1])).shape
        torch.Size([3, 3])
    """
    large = _elements(task, inputs) * inputs.element_size() > MOST_BYTES
    parts = None if large or task.kept is not None else _plain(task, inputs, labels)
    return None if parts is None else ChainPoint(task, parts, inputs.detach(), labels).products()


@torch.no_grad()
def example_changes(task: Task, inputs: Tensor, labels: Tensor, directions: Tensor) -> Tensor:
    """Change (B, P) of every example's gradient along that example's direction (B, *S).

    Includes a pruned model's missing weights, as if they were present.
    """
    parts = _plain(task, inputs, labels)
    if parts is None:
        return pair_changes(task, inputs, labels, directions)
    return ChainPoint(task, parts, inputs.detach(), labels).each(directions)


def _plain(task: Task, inputs: Tensor, labels: Tensor) -> plain_chain.Parts | None:
    """The plain chain of a task whose loss is the examples' mean; a user's loss may weight them."""
    ignored = not labels.is_floating_point() and bool((labels < 0).any())
    if not closed(task.loss) or ignored:
        return None
    return plain_chain.plan(task, inputs)
