"""A layer that a malicious server puts before a model, and what is sent of it and of any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from leakbound.attacks.adaptive import undone
from leakbound.attacks.base import seen_task, summed
from leakbound.attacks.blind import public_examples
from leakbound.core import (
    Exact,
    Gaussian,
    Laplace,
    Law,
    NotApplicable,
    Observation,
    Server,
    Task,
    Unknown,
    Update,
)
from leakbound.covariance import Structured
from leakbound.task import shell

# This quantile of the units' energies is noise: few units change (bins) or are on (traps).
QUIET = 0.1


class Front(nn.Module):
    """output = inner(x + gain sum_i relu(W_i x + b_i)): the loss has the same derivative with
    respect to every unit that an image switches on. No weight comes after the units, so they take
    no share of a clip norm.

    A `steady` layer is a frozen one that holds W and b, plus a trained one that starts at 0, as
    adapters do. So local steps do not move its units, and rounding to the weights' type, even
    bfloat16, leaves the leading digits of its change.
    """

    def __init__(
        self,
        layer: nn.Linear,
        gain: float,
        kind: str,
        inner: nn.Module,
        *,
        steady: bool,
    ) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.frozen = shell(layer) if steady else None
        self.inner = inner
        self.gain = gain
        self.kind = kind
        # Of this module alone: `eval` would switch the inner model, too.
        self.training = False

    def forward(self, inputs: Tensor) -> Tensor:
        # Mixed precision would round the units, and float16 cannot hold them.
        with torch.autocast(inputs.device.type, enabled=False):
            seen = self.seen(inputs.to(self.layer.weight))
            units = self.layer(seen)
            if self.frozen is not None:
                units = units + self.frozen(seen)
            caught = units.relu().sum(1) * self.gain
            brighter = inputs + caught.view(-1, *[1] * (inputs.ndim - 1)).to(inputs)
        return self.inner(brighter)

    def seen(self, inputs: Tensor) -> Tensor:
        """What the layer takes of inputs (B, *S), as vectors."""
        return inputs.flatten(1)

    def weights(self, layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The layer's values by name, of a steady one those of both parts."""
        if self.frozen is None:
            return named("layer", layer)
        zeros = {name: torch.zeros_like(value) for name, value in layer.items()}
        return named("layer", zeros) | named("frozen", layer)

    def part(self, rows: Tensor) -> Tensor:
        """[W | b] (R, units, N + 1) of the trained layer, which comes first in rows (R, P)."""
        units, features = self.layer.weight.shape
        cut = units * features
        weight = rows[:, :cut].reshape(-1, units, features)
        return torch.cat([weight, rows[:, cut : cut + units, None]], 2)


def named(place: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of a part of a model, by their names in the whole."""
    return {f"{place}.{name}": value for name, value in values.items()}


def takes_numbers(task: Task) -> bool:
    """Whether a layer can be put before the model: token numbers cannot be multiplied."""
    return task.domain is None or task.domain.dtype.is_floating_point


GAIN = 100.0
"""The default gain for one step of SGD."""
STEADY_GAIN = 1e-6
"""The default gain for several: by more, the steps would move the units."""
SHARE_OF_EPSILON = 1e-6
"""Gradients this far below epsilon are divided by it alone. So the steps of Adam and similar, which
divide a gradient by its size plus epsilon, are sums of gradients.
"""
MOST_GROWTH = 1e20
"""Float32 holds no gradients of a much smaller gain."""


def gain_for(task: Task, stated: float | None) -> float:
    """The stated gain, or the default for the task's plan."""
    if stated is not None:
        return stated
    return GAIN if task.plan.is_gradient else small_gain(task, STEADY_GAIN)


def small_gain(task: Task, of_sgd: float) -> float:
    """A gain under which the task's optimizer adds gradients up."""
    plan = task.plan
    if plan.optimizer == "sgd":
        return of_sgd
    growth = 1.0
    if not plan.decoupled:
        # Decay adds a multiple of the change so far to a gradient, which epsilon divides, too.
        growth += plan.learning_rate * plan.weight_decay / plan.added
    return SHARE_OF_EPSILON * plan.added / min(growth ** (plan.steps - 1), MOST_GROWTH)


def in_front(
    task: Task,
    weight: Tensor,
    bias: Tensor,
    gain: float,
    kind: str,
    *,
    steady: bool = False,
) -> Task:
    """The task with a malicious layer of weight (units, N) and bias (units,) before its model. W
    and b are divided by (gain units): the image is brightened by the mean of relu(W_i x + b_i) for
    any gain, and the model still works. The task is unchanged if the model takes tokens.
    """
    if not takes_numbers(task):
        return task
    units, features = weight.shape
    model = Front(nn.Linear(features, units), gain, kind, task.model, steady=steady)
    scale = gain * units
    layer = {
        "weight": weight / scale,
        "bias": bias / scale,
    }
    return placed(task, model, model.weights(layer))


def placed(
    task: Task,
    model: nn.Module,
    own: Mapping[str, Tensor],
) -> Task:
    """The task with its model inside another (`inner`), whose `own` weights are given by name."""
    like = task.parameters
    values = named("inner", task.tensors())
    for name, value in own.items():
        values[name] = value.to(like)
    trained = dict(model.named_parameters())
    kept = task.kept
    if kept is not None:
        # No weight of the malicious layer is pruned.
        every = {name: torch.ones_like(value) for name, value in trained.items()}
        every |= named("inner", task.unflatten(kept))
        kept = torch.cat([value.flatten().bool() for value in every.values()])
    moved = replace(
        task,
        model=model.to(like),
        parameters=torch.cat([values[name].flatten() for name in trained]),
        kept=kept,
    )
    return replace(moved, buffers={n: v for n, v in values.items() if n not in moved.names})


def sent_by_attacker(
    observation: Observation,
    seen: Callable[[Observation], Task],
    holds: Callable[[Task], bool],
    *,
    lacks: str,
) -> Task:
    """The task that was `seen`, if a malicious server sent a model that holds its layer."""
    if observation.threat.server is not Server.MALICIOUS:
        raise NotApplicable("the server is honest: it sends the agreed model")
    task = seen(observation)
    if not takes_numbers(task):
        raise NotApplicable("a malicious layer takes numbers, and this model takes tokens")
    if not holds(task):
        raise NotApplicable(f"the model that was sent holds no {lacks}")
    if not observation.update.rows.isfinite().all():
        raise NotApplicable("the update is not finite")
    return task


def planted_task(observation: Observation, kind: str) -> Task:
    """The task with a `Front` of this kind before its model."""
    task = sent_by_attacker(
        observation,
        lambda seen: seen_task(seen if _steady(seen) else summed(seen)),
        lambda task: isinstance(task.model, Front) and task.model.kind == kind,
        lacks=f"{kind}: it has no public images to build one from",
    )
    if task.plan.optimizer == "lion":
        raise NotApplicable("a step of Lion shows signs of gradients, not their sizes")
    return task


def gradients_of(observation: Observation) -> Observation:
    """The observation of a sum of gradients: a steady layer's is one under every optimizer."""
    return observation if _steady(observation) else undone(observation)


def _steady(observation: Observation) -> bool:
    model = observation.task.model
    return isinstance(model, Front) and model.frozen is not None


def layer_of(task: Task) -> Tensor:
    """[W | b] (units, N + 1) of the malicious layer that was sent, float64."""
    model = task.model
    assert isinstance(model, Front)  # as planted_task found
    if model.frozen is None:
        return model.part(task.parameters[None])[0].double()
    held = [task.buffers[f"frozen.{name}"].flatten() for name, _ in model.frozen.named_buffers()]
    return model.part(torch.cat(held)[None])[0].double()


@dataclass(frozen=True, eq=False)
class Caught:
    """[dW | db] (units, N + 1) of one row of the update, float64, and 1 / variance of each.

    Precision is 0 where a value was withheld; a value withheld for its size is known to be small.
    Values without noise have the variance of rounding; noise of unknown distribution is taken as
    white.
    """

    values: Tensor
    precision: Tensor
    examples: int


def caught(
    observation: Observation,
    task: Task,
    *,
    differences: bool,
) -> list[Caught]:
    """What each row of the update holds of the malicious layer; each client's part of it, if the
    model keeps these apart. `differences`: most units equal their neighbor (bins); otherwise some
    units are empty (traps). These units show unknown noise.
    """
    update = observation.update
    assert isinstance(task.model, Front)  # as planted_task found
    part = task.model.part
    times = task.plan.total_weight
    values = part(update.rows / times).double()
    known = observation.noise_variance
    noise = None if known is None else part(known) / times**2
    seen = torch.ones_like(values)
    if update.mask is not None and observation.threat.defense_known:
        seen = part(update.mask).to(values)
    examples = update.examples if len(values) == len(update.rows) else observation.cohort
    clients = []
    for i, row in enumerate(values):
        rounding = 16 * torch.finfo(update.rows.dtype).eps * row.abs().max()
        variance = rounding.square().clamp_min(1e-300).expand_as(row)
        if noise is not None:
            variance = noise[i] + variance
        elif not isinstance(update.law, Exact):
            variance = variance + _scatter(row, differences)
        precision = seen[i] / variance
        if update.mask_private and not update.drawn:
            precision = precision + _pruned(row, seen[i])
        clients.append(Caught(row, precision, examples[i]))
    return clients


def _pruned(row: Tensor, seen: Tensor) -> Tensor:
    """1 / variance of values that were withheld for their size: uniform up to the smallest sent
    value. Weights and biases are separate, since pruning may have treated them separately.
    """
    least = torch.where(seen > 0, row.abs(), torch.inf)
    bound = torch.cat([least[:, :-1].amin().expand(row.shape[1] - 1), least[:, -1:].amin()[None]])
    # The variance of values that are uniform in +-bound is bound^2 / 3.
    return (seen == 0) * 3 / bound.square().clamp_min(1e-300)


def _scatter(row: Tensor, differences: bool) -> Tensor:
    if not differences or len(row) == 1:
        return row.square().mean(1).quantile(QUIET)
    # a difference has the noise of two units
    return (row.diff(dim=0).square().mean(1) / 2).quantile(QUIET)


def chosen(
    update: Update,
    index: Tensor,
    factor: Tensor,
) -> Update:
    """Some coordinates of an update, each times a public factor, with their distribution."""
    law: Law = update.law

    def at_index(values: float | Tensor) -> Tensor:
        wide = torch.as_tensor(
            values,
            dtype=torch.float64,
            device=index.device,
        )
        return wide.expand(update.rows.shape[-1:])[index]

    if isinstance(law, Gaussian) and isinstance(law.covariance, Structured):
        law = Unknown("the noise is correlated, but this attack takes it as independent")
    elif isinstance(law, Gaussian):
        law = replace(law, covariance=at_index(law.variance) * factor.square())
    elif isinstance(law, Laplace):
        law = replace(law, scale=at_index(law.scale) * factor.square().sqrt())
    mask = None if update.mask is None else update.mask[:, index]
    rows = (update.rows[:, index].double() * factor).to(update.rows)
    return replace(update, rows=rows, law=law, mask=mask)


@dataclass(frozen=True, eq=False)
class PixelPrior:
    """Mean and variance (N,), float64, of a pixel before the update is seen."""

    mean: Tensor
    variance: Tensor

    @staticmethod
    def of(observation: Observation) -> PixelPrior:
        """From the public images; uniform in the input range if none of them fit."""
        low, high = observation.task.input_range
        public = public_examples(observation)
        shape = observation.input_shape
        like = observation.update.rows.double()
        if public is None or public.size < 2:
            one = like.new_ones(shape).flatten()
            return PixelPrior(one * (low + high) / 2, one * (high - low) ** 2 / 12)
        pixels = public.inputs.flatten(1).to(like)
        # A pixel that is constant in public images may vary in private ones.
        return PixelPrior(pixels.mean(0), pixels.var(0) + 1e-3 * (high - low) ** 2)

    def fused(self, value: Tensor, variance: Tensor) -> Tensor:
        """The mean of each pixel after a measurement of it with Gaussian noise of that variance."""
        trust = torch.where(variance.isfinite(), self.variance / (self.variance + variance), 0)
        return torch.where(trust > 0, self.mean + trust * (value - self.mean), self.mean)

    def left(self, variance: Tensor) -> Tensor:
        """The variance of each pixel after a measurement with noise of the given variance."""
        return torch.where(
            variance.isfinite(),
            self.variance * variance / (self.variance + variance),
            self.variance,
        )
