"""The cost of a defense: a short federated training under it, measured on held-out images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from leakbound import client
from leakbound._util import optimizers
from leakbound.audit.context import PlanContext
from leakbound.audit.plan import TrainingUnit, build_defense
from leakbound.defenses.base import Chain, State
from leakbound.losses import named
from leakbound.protocol import resolve, step
from leakbound.random import permutation, stream
from leakbound.types import Batch, Task, Update

EVALUATED, TOGETHER, COUPLED = 1000, 25, 100
"""Number of images for a loss, and number per model call. More per call do not fit the processor's
cache, which takes twice as long. Images that share statistics are processed 100 at a time."""
MARKS = tuple(5 * 2**i for i in range(16))


def train(unit: TrainingUnit, context: PlanContext) -> dict[str, Any]:
    """Train for some rounds; measure training loss on private and accuracy on test images.

    Seeds name weights, batches and noise, so defenses are compared on the same draws. `curve` holds
    [round, training loss] before the first round, after 5, 10, 20, ... and after the last.
    """
    spec, defense = unit.utility, build_defense(unit.defense)
    task = context.task(unit.model, unit.seed)
    source = stream(unit.seed, "utility", "batches")
    *noises, noise = (stream(unit.seed, "utility", "defense", i) for i in range(spec.clients + 1))
    states: list[State] = [None] * spec.clients
    weights = task.parameters.clone()
    rule = optimizers.SGD if spec.optimizer == "sgd" else optimizers.Adam
    optimizer = rule([weights], lr=spec.learning_rate)
    ready: Chain | None = None
    curve = [[0, context.once(("loss", unit.model, unit.seed), lambda: _loss(task, context))]]
    private = context.splits["private"]
    for round_ in range(1, spec.rounds + 1):
        order = permutation(len(private), source)[: spec.clients * spec.batch_size]
        now = task.with_parameters(weights.detach().clone())
        ready = resolve(defense, now, spec.batch_size, ready)
        updates = []
        for i, part in enumerate(private[order].reshape(spec.clients, spec.batch_size)):
            update, states[i] = step(now, _batch(part, context), ready, noises[i], states[i])
            updates.append(update)
        together = ready.sides[1]
        update, _ = together.transform(Update.stack(updates), together.init(now), None, noise)
        weights.grad = update.rows.sum(0) / spec.clients
        optimizer.step()
        if round_ in (spec.rounds, *MARKS):
            curve.append([round_, _loss(task.with_parameters(weights.detach()), context)])
    trained = task.with_parameters(weights.detach())
    return {"training_loss": curve[-1][1], "accuracy": _accuracy(trained, context), "curve": curve}


def _loss(task: Task, context: PlanContext) -> float:
    batch = _batch(context.splits["private"][:EVALUATED], context)
    with torch.no_grad():
        return float(task.loss(_outputs(task, batch), batch.labels))


def _accuracy(task: Task, context: PlanContext) -> float:
    batch = _batch(context.splits["test"][:EVALUATED], context)
    found = named(task.loss).hits(_outputs(task, batch), batch.labels)
    return float(found.double().mean())


def _batch(places: Tensor, context: PlanContext) -> Batch:
    """Examples; images with the channels last, where pools take a tenth of the time."""
    batch = context.batch(places)
    if batch.inputs.ndim != 4:
        return batch
    # `contiguous` leaves images of one channel as they are
    return replace(batch, inputs=batch.inputs.to(memory_format=torch.channels_last))


def _outputs(task: Task, batch: Batch) -> Tensor:
    with torch.no_grad():
        parts = list(torch.split(batch.inputs, COUPLED if task.coupled else TOGETHER))
        if task.coupled and len(parts) > 1 and len(parts[-1]) == 1:
            parts[-2:] = [torch.cat(parts[-2:])]  # a single image has no statistics
        return torch.cat([client.forward(task, few) for few in parts])
