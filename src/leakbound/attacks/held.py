"""A model that a malicious server holds still, so that every training adds gradients up."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from leakbound import client
from leakbound._util import copies
from leakbound.attacks.base import seen_task
from leakbound.attacks.planted import (
    STEADY_GAIN,
    chosen,
    named,
    small_gain,
    takes_numbers,
)
from leakbound.attacks.rounding import HALVES
from leakbound.core import LocalPlan, NotApplicable, Observation, Task
from leakbound.task import shell

FAR_BELOW = 1e-9
"""A share of epsilon beside which a gradient is nothing."""


class Held(nn.Module):
    """A model at frozen weights, plus `gain` times trained ones that start at 0, as adapters do.

    The gain is so small that no local step changes what the model computes. So the trained weights
    add up the gradients at the frozen ones. As they start at 0, rounding to their type leaves the
    leading digits. All is computed in float32 at least, under mixed precision too.
    """

    def __init__(self, model: nn.Module, gain: float) -> None:
        super().__init__()
        self.trained = copies.duplicate(model)
        self.held = shell(copies.duplicate(model).requires_grad_(False))
        self.gain = gain
        self.train(False)

    def train(self, mode: bool = True) -> Held:
        """Stay in evaluation mode, whatever the client asks for."""
        return super().train(False)

    def forward(self, inputs: Tensor) -> Tensor:
        wide = torch.promote_types(next(self.trained.parameters()).dtype, torch.float32)

        def widened(value: Tensor) -> Tensor:
            return value.to(wide) if value.is_floating_point() else value

        with torch.autocast(inputs.device.type, enabled=False):
            values = {name: widened(value) for name, value in self.held.named_buffers()}
            for name, value in self.trained.named_parameters():
                values[name] = values[name] + self.gain * widened(value)
            output: Tensor = functional_call(self.held, values, (widened(inputs),))
        return output


def needs_holding(task: Task) -> bool:
    """Whether an update is more than one gradient of separate examples, or is rounded away."""
    return not task.plan.is_gradient or task.coupled or task.parameters.dtype in HALVES


def prepared(task: Task) -> Task:
    """The task to change and then to `hold`: in float32 at least, and with the statistics of public
    examples in batch norms, in place of each batch's own. Unchanged if it needs no holding.
    """
    public = task.public
    if not needs_holding(task) or public is None or not takes_numbers(task):
        return task
    kind = nn.modules.batchnorm._BatchNorm
    wide = torch.promote_types(task.parameters.dtype, torch.float32)
    task = task.to(task.parameters.device, wide)
    norms = {}
    for name, module in task.model.named_modules():
        if isinstance(module, kind) and module.running_mean is None:
            norms[name] = module
    with torch.no_grad():
        inputs = public.inputs.to(task.parameters)
        seen = client.layer_inputs(task, inputs, [*norms])
    buffers = dict(task.buffers)
    for name, norm in norms.items():
        values = seen[name].transpose(0, 1).flatten(1)
        norm.running_mean = values.mean(1)
        norm.running_var = values.var(1)
        norm.track_running_stats = True
        norm.eval()
        buffers |= named(name, dict(norm.named_buffers()))
    return replace(task, buffers=buffers)


def hold(task: Task, agreed: Task) -> Task:
    """The `agreed` task with this one's model held still."""
    task = task.to(agreed.parameters.device, agreed.parameters.dtype)
    gain = small_gain(task, STEADY_GAIN)
    held = named("held", task.tensors())
    own = named("trained", task.buffers)
    return replace(
        agreed,
        model=Held(task.model, gain),
        parameters=torch.zeros_like(task.parameters),
        buffers=held | own,
    )


def _added(plan: LocalPlan) -> Tensor:
    """What all steps make of a gradient of 1, if every step has it and it is far below epsilon."""
    slope = torch.tensor(FAR_BELOW * plan.added, dtype=torch.float64)
    total = torch.zeros_like(slope)
    state = None
    for step in range(1, plan.steps + 1):
        moved = -plan.learning_rate * total
        change, state = client.stepped(
            plan,
            step,
            slope,
            moved,
            state,
        )
        total = total + change
    return total / slope


def unheld(observation: Observation) -> Observation:
    """The observation as one of the mean gradient at the held weights; others are unchanged."""
    task = seen_task(observation)
    model = task.model
    if not isinstance(model, Held):
        return observation
    plan = task.plan
    if plan.optimizer == "lion":
        raise NotApplicable("a step of Lion shows signs of gradients, not their sizes")
    like = observation.update.rows
    wide = torch.promote_types(like.dtype, torch.float32)
    update = replace(observation.update, rows=like.to(wide))
    factor = 1 / (model.gain * _added(plan))
    every = torch.arange(like.shape[1], device=like.device)
    update = chosen(
        update,
        every,
        factor.to(like.device),
    )
    values = {}
    for name, _ in model.held.named_buffers():
        values[name] = task.buffers[f"held.{name}"]
    flat = []
    for name, _ in model.trained.named_parameters():
        flat.append(values.pop(name).flatten())
    inner = replace(
        task,
        model=model.trained,
        parameters=torch.cat(flat),
        buffers=values,
        plan=LocalPlan(),
    )
    return replace(
        observation,
        task=inner.to(like.device, wide),
        update=update,
        defense=None,
        sent=None,
    )
