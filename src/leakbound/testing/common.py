"""What all contract checks share: the error, a small task and batch, snapshots."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from leakbound.attacks.base import uniform_inputs
from leakbound.client import forward, unfit
from leakbound.core import Batch, Task
from leakbound.losses import named
from leakbound.models import mlp
from leakbound.randomness import stream, uniform

CHANCE = 1e-6
"""A statistical check fails if its observation has a probability below this."""

CLASSES = 3


class ContractError(AssertionError):
    """A defense or an attack violates its contract; the message says how."""


def require(holds: object, message: str) -> None:
    if not holds:
        raise ContractError(message)


def small_task() -> Task:
    """A perceptron on 6x6 images with 3 classes, in float64: 215 weights."""
    model = mlp(
        input_shape=(1, 6, 6),
        classes=CLASSES,
        generator=stream(0, "contract", "model"),
        hidden=(5,),
        activation="tanh",
    )
    images = uniform((12, 1, 6, 6), stream(0, "contract", "public"))
    public = Batch(images, torch.arange(12) % CLASSES)
    return Task.of(model, classes=CLASSES, public=public).to("cpu", torch.float64)


def given_or_small(
    task: Task | None,
    batch: Batch | None,
) -> tuple[Task, Batch]:
    """A caller's task and batch, or small ones."""
    if task is not None and batch is None:
        raise ValueError("batch is None; give a batch that fits your task")
    task = task or small_task()
    if not isinstance(task, Task):
        raise ValueError(f"task is a {type(task).__name__}; give a leakbound.Task")
    if batch is None:
        return task, small_batch(task)
    if not isinstance(batch, Batch):
        raise ValueError(f"batch is a {type(batch).__name__}; give leakbound.Batch(inputs, labels)")
    inputs = batch.inputs
    if inputs.is_floating_point():
        batch = Batch(inputs.to(task.parameters), batch.labels)
    try:
        with torch.no_grad():
            forward(task, batch.inputs)
    except Exception as error:
        raise ValueError(f"batch does not fit the task: {unfit(task, inputs, error)}") from error
    return task, batch


def small_batch(
    task: Task,
    like: Batch | None = None,
    *,
    seed: int = 0,
) -> Batch:
    """Random inputs of the task, shaped as `like` (otherwise two images of 6x6), with labels."""
    if task.domain is not None and not task.domain.dtype.is_floating_point:
        inputs = task.domain.start(2 if like is None else like.size, stream(seed, "contract"))
        inputs = inputs.to(task.parameters.device)
        if like is None or named(task.loss).of_inputs:
            return Batch(inputs, inputs.clone())
        return Batch(inputs, like.labels.clone())
    shape = (2, 1, 6, 6) if like is None else tuple(like.inputs.shape)
    labels = torch.arange(shape[0]) % CLASSES if like is None else like.labels.clone()
    return Batch(uniform_inputs(task, shape, stream(seed, "contract", "batch")), labels)


def check_settings(thing: object, name: str) -> None:
    frozen = dataclasses.is_dataclass(thing) and getattr(thing, "__dataclass_params__").frozen  # noqa: B009
    require(frozen, f"{name} is not a frozen dataclass; add @dataclass(frozen=True)")
    try:
        same = hash(thing) == hash(thing)
    except TypeError as error:
        raise ContractError(f"{name} cannot be hashed: {error}") from error
    require(same, f"{name} has a hash that changes")


def check_repr(thing: Any, name: str) -> None:
    """The repr names every field and its value, since records and hashes use it."""
    text = repr(thing)
    for field in dataclasses.fields(thing):
        shown = f"{field.name}={getattr(thing, field.name)!r}"
        require(shown in text, f"repr {text} of {name} does not show {shown}")


class Unchanged:
    """Stores tensors, models and random states, and detects later writes to them."""

    def __init__(
        self,
        task: Task,
        batch: Batch,
        *tensors: Tensor | None,
    ) -> None:
        self.task = task
        self.batch = batch
        self.tensors = [
            (t, t.clone())
            for t in (task.parameters, batch.inputs, batch.labels, *task.buffers.values(), *tensors)
            if t is not None
        ]
        self.weights = [(t, t.clone()) for t in task.model.state_dict().values()]
        # A hook shows in no tensor, but in what the model computes.
        self.output = self._forward()

    def _forward(self) -> Tensor:
        with torch.no_grad():
            return forward(self.task, self.batch.inputs)

    def check(self, name: str) -> None:
        for now, before in self.tensors:
            require(same_bits(now, before), f"{name} wrote to a tensor that it was given")
        for now, before in self.weights:
            require(same_bits(now, before), f"{name} wrote to the weights of the task's model")
        require(same_bits(self._forward(), self.output), f"{name} changed the task's model")


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal shape, type and entries, NaN equal to NaN; None equals None only."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(torch.nan_to_num(a, nan=0.1234), torch.nan_to_num(b, nan=0.1234)) and bool(
        (a.isnan() == b.isnan()).all()
    )
