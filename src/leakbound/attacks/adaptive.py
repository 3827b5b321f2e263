"""Updates of other optimizers than SGD: evidence of one, and the gradient behind its step.

Adam's first step moves a weight by r g / (|g| + epsilon), where g is the gradient and r the rate.
The epsilon keeps the sizes of gradients in the step: 1 - |step| / r is epsilon / (|g| + epsilon).
Stored weights round the step, so sizes are known as far as epsilon / |g| is above the rounding;
of larger gradients the sign is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakbound.attacks.base import seen_task
from leakbound.attacks.idle import beside_decay
from leakbound.attacks.rounding import deviation_of
from leakbound.core import Exact, Gaussian, LocalPlan, NotApplicable, Observation, Task, Unit

EQUAL = 0.01
"""Sizes of entries that differ by less from the median size count as equal."""
SHARE = 0.5
"""From this share of equal sizes on, no sum of gradients is behind an update."""
FEW = 100
"""Fewer entries than this many may be equal by chance."""


def equal_sizes(task: Task, row: Tensor) -> float:
    """The share of nonzero entries of an update (P,) that have the median size of their tensor.

    A gradient's entries have many sizes. One step of Adam or AdamW from a fresh state moves every
    entry that has a gradient by the learning rate, sign descent always does, and weights rounded to
    half precision move by few sizes.

    Example:
        >>> import torch
        >>> from leakbound.core import Task
        >>> task = Task.of(torch.nn.Linear(20, 10))
        >>> gradient = torch.linspace(-1, 1, 210)
        >>> equal_sizes(task, gradient) < 0.1, equal_sizes(task, 1e-3 * gradient.sign())
        (True, 1.0)
    """
    total = equal = 0
    for part in task.unflatten(row).values():
        # An entry without a gradient stays 0 under every optimizer, so zeros show nothing.
        sizes = part[part != 0].abs().double()
        if len(sizes) < FEW:
            continue
        median = sizes.median()
        total += len(sizes)
        equal += int(((sizes - median).abs() <= EQUAL * median).sum())
    return equal / total if total else 0.0


def not_sgd(observation: Observation) -> str | None:
    """Why an update is no sum of gradients; None if nothing shows that, or noise was added."""
    if not isinstance(observation.update.law, Exact):
        return None
    shares = [equal_sizes(observation.task, row) for row in observation.update.rows]
    if min(shares) < SHARE:
        return None
    return (
        f"{min(shares):.1%} of the update's entries have the same size in their tensor, as after a "
        "step of Adam or AdamW, sign compression or rounding to half precision; this attack reads "
        "the updates of SGD"
    )


ARITHMETIC = 2.0
"""Errors of an optimizer's own arithmetic, in units of the last place."""
CLEAR = 3.0
"""A gradient's size is known from this many roundings on."""
FITTED = 60
"""Rounds of the fit of an outer product to a step."""
UNSURE = 0.1
TOP = 0.99
"""The relative error of the bias's size from which the range gives the scale of an input, and the
share of inputs that are then inside of it.
"""
PRECISE = 1e-3
"""Errors of gradients are at least this share of their median: an attack may weigh by them."""


def undone(observation: Observation) -> Observation:
    """The observation with gradients in place of what the client's optimizer made of them.

    Known weight decay is subtracted. One step of Adam, AdamW, RMSprop or Adagrad becomes the
    gradient as far as the optimizer's epsilon shows it: `noise_variance` is the error that stored
    weights leave, and entries of which only the sign is known are withheld (they hold the least
    size that they have, twice). The error assumes that the client stored its weights in the type of
    the task's.

    Raises:
        NotApplicable: several steps of such an optimizer, noise, or a step without sizes (Lion).

    Source: this project.

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> batch = torch.linspace(0, 1, 16).reshape(1, 1, 4, 4), torch.tensor([2])
        >>> plan = LocalPlan(1, 1e-3, optimizer="adam")
        >>> seen = lb.simulate(model, batch, plan=plan).round.observation
        >>> gradient = lb.client.gradient(seen.task, *batch).detach()
        >>> found = undone(seen).update
        >>> torch.allclose(found.rows[found.mask], gradient[found.mask[0]], rtol=0.5, atol=1e-8)
        True
    """
    task = seen_task(observation)
    plan = task.plan
    if plan.is_sum:
        return observation
    update = observation.update
    if plan.optimizer == "sgd":
        return beside_decay(observation, task)
    check_one_step(observation)
    rows = step_rows(observation)
    step = Step.of(task, rows)
    keep = step.keep
    size = rows.double().abs()
    known = step.rest >= CLEAR * step.error
    least = plan.added / (CLEAR * step.error)
    gradient = torch.where(known, plan.added * size / step.rest, 2 * least) * rows.sign()
    # The slope of the gradient in the step.
    spread = (keep * gradient.abs() + plan.added).square() / plan.added * step.error / keep
    some = spread[known & (rows != 0)]
    if not len(some):
        raise NotApplicable(f"rounding hides the sizes of gradients in the step of {plan.rule}")
    spread = spread.clamp_min(PRECISE * float(some.median()))
    if plan.weight_decay and not plan.decoupled:
        gradient = gradient - plan.weight_decay * task.parameters
    changed = replace(
        update,
        rows=gradient.to(rows),
        law=Gaussian(spread.square().expand_as(rows)),
        mask=known.expand_as(rows),
    )
    # No defense changes the task again.
    left = replace(task, plan=LocalPlan())
    return replace(observation, update=changed, task=left, defense=None)


def step_rows(observation: Observation) -> Tensor:
    """The rows (R, P) of steps of an optimizer, without the decay that it subtracts beside them.

    Raises:
        NotApplicable: rows of several clients, or of examples.
    """
    task = seen_task(observation)
    if observation.update.unit is not Unit.CLIENT:
        raise NotApplicable(f"{task.plan.rule} is not undone in a sum of clients or for examples")
    if task.plan.decoupled:
        observation = beside_decay(observation, task)
    return observation.update.rows


def check_one_step(observation: Observation) -> None:
    """Reject updates that are not one step of an optimizer which shows sizes of gradients.

    Raises:
        NotApplicable: as `undone`.
    """
    plan = seen_task(observation).plan
    update = observation.update
    if plan.steps > 1 or (plan.batch_size or observation.examples) < max(observation.cohort):
        raise NotApplicable(
            f"the client takes {plan.steps} steps of {plan.rule}, whose update is no sum of "
            "gradients: what it leaks is undecided, not protected"
        )
    if not isinstance(update.law, Exact) or update.mask is not None:
        raise NotApplicable(f"noise or withheld entries hide the sizes in a step of {plan.rule}")
    if plan.optimizer == "lion":
        raise NotApplicable("a step of Lion shows signs of gradients, not their sizes")


@dataclass(frozen=True, eq=False)
class Step:
    """One step of an adaptive optimizer, (R, P), in its own units.

    `rest` is what a step lacks of the largest possible one: epsilon / (keep |g| + epsilon) plus an
    error of standard deviation `error`. `keep` is the share of a gradient's size that the
    denominator holds.
    """

    rest: Tensor
    error: Tensor
    signs: Tensor
    keep: float
    added: float

    @staticmethod
    def of(task: Task, rows: Tensor) -> Step:
        plan = task.plan
        keep = 1 / first_step(plan)
        # Decoupled decay rounds the weights once more.
        roundings = math.sqrt(2) if plan.decoupled else 1.0
        error = roundings * _rounding(task) / plan.learning_rate
        error = keep * (error + ARITHMETIC * torch.finfo(rows.dtype).eps)
        rest = 1 - keep * rows.double().abs()
        return Step(rest, error.expand_as(rest), rows.sign().double(), keep, plan.added)

    def outer(self, limit: float) -> Tensor | None:
        """The input (D,) of a layer whose gradient u [x | 1] is behind the step (h, D + 1).

        A likelihood fit of log |u_i| + log |x_j| by Fisher scoring, rows and columns in turn: every
        entry counts by what its `rest` says at the fitted size, so large gradients say little. The
        bias gives the scale. If it is uncertain, the largest inputs are set to `limit`, the largest
        absolute value of an input. None if no bias is there.
        """
        at = (self.signs != 0).any(1)
        sent = (self.signs != 0).any(0)
        if not bool(sent[-1]):
            return None
        rest, error, signs = (part[at][:, sent] for part in (self.rest, self.error, self.signs))
        start = (self.added / torch.maximum(rest, error / 2) - self.added).clamp_min(1e-300).log()
        rows = start.median(1).values
        columns = (start - rows[:, None]).median(0).values
        for _ in range(FITTED):
            rows = rows + self._moved(rows, columns, rest, error, 1)
            columns = columns + self._moved(rows, columns, rest, error, 0)
        weight, _ = self._scored(rows, columns, rest, error)
        sizes = (columns - columns[-1]).exp()[:-1]
        votes = (weight * signs * signs[:, -1:]).sum(0)[:-1]
        if float(weight[:, -1].sum()) < UNSURE**-2:
            sizes = sizes * limit / sizes.quantile(TOP)
        values = torch.zeros(len(sent) - 1, dtype=torch.float64)
        values[sent[:-1]] = sizes * votes.sign()
        return values

    def _scored(
        self,
        rows: Tensor,
        columns: Tensor,
        rest: Tensor,
        error: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The weight of each entry in the fit, and the step that it asks for."""
        fitted = self.added / ((rows[:, None] + columns).exp() + self.added)
        slope = (fitted * (1 - fitted)).clamp_min(1e-300)
        return (slope / error).square(), ((fitted - rest) / slope).clamp(-1, 1)

    def _moved(
        self,
        rows: Tensor,
        columns: Tensor,
        rest: Tensor,
        error: Tensor,
        over: int,
    ) -> Tensor:
        weight, step = self._scored(rows, columns, rest, error)
        total = weight.sum(over)
        return (weight * step).sum(over) / (total + 1e-12 * total.max())


def first_step(plan: LocalPlan) -> float:
    """How many learning rates an adaptive optimizer's first step moves a weight of large gradient.

    Example:
        >>> round(first_step(LocalPlan(optimizer="rmsprop")), 6), first_step(LocalPlan())
        (10.0, 1.0)
    """
    return 1 / math.sqrt(1 - plan.decays[1]) if plan.optimizer == "rmsprop" else 1.0


def _rounding(task: Task) -> Tensor:
    """(P,) the standard deviation of one rounding of each weight, as the client stores it."""
    parts = task.unflatten(task.parameters).values()
    return torch.cat([deviation_of(value).flatten() for value in parts])
