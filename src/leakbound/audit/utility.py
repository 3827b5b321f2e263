"""The cost of a defense: a short federated training under it, measured on held-out images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leakbound import client
from leakbound._util.pools import quick
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


@dataclass(frozen=True, eq=False)
class Opening:
    """What the server sends out at the start of a round, numbered from 1.

    `parts` (clients, batch size) are the numbers of the images on which each client trains.
    """

    number: int
    task: Task
    defense: Chain
    parts: Tensor


Clients = Callable[[Opening], list[Update]]
"""The clients of one training: their updates in response to an opening, in order."""


def train(
    unit: TrainingUnit, context: PlanContext, clients: Clients | None = None
) -> dict[str, Any]:
    """Train for some rounds; measure training loss on private and accuracy on test images.

    Seeds name weights, batches and noise, so defenses are compared on the same draws. `curve` holds
    [round, training loss] before the first round, after 5, 10, 20, ... and after the last.
    """
    spec, defense = unit.utility, build_defense(unit.defense)
    clients = clients or _here(unit, context)
    task = context.task(unit.model, unit.seed)
    source = stream(unit.seed, "utility", "batches")
    noise = noise_of(unit, spec.clients)
    weights = task.parameters.clone()
    rule = torch.optim.SGD if spec.optimizer == "sgd" else torch.optim.Adam
    optimizer = rule([weights], lr=spec.learning_rate)
    ready: Chain | None = None
    curve = [[0, context.once(("loss", unit.model, unit.seed), lambda: _loss(task, context))]]
    private = context.splits["private"]
    for round_ in range(1, spec.rounds + 1):
        order = permutation(len(private), source)[: spec.clients * spec.batch_size]
        now = task.with_parameters(weights.detach().clone())
        ready = resolve(defense, now, spec.batch_size, ready)
        parts = private[order].reshape(spec.clients, spec.batch_size)
        updates = clients(Opening(round_, now, ready, parts))
        together = ready.sides[1]
        update, _ = together.transform(Update.stack(updates), together.init(now), None, noise)
        weights.grad = update.rows.sum(0) / spec.clients
        optimizer.step()
        if round_ in (spec.rounds, *MARKS):
            curve.append([round_, _loss(task.with_parameters(weights.detach()), context)])
    trained = task.with_parameters(weights.detach())
    return {"training_loss": curve[-1][1], "accuracy": _accuracy(trained, context), "curve": curve}


def noise_of(unit: TrainingUnit, client: int) -> torch.Generator:
    """The noise of one client, by its number; the number after the last is the cohort's."""
    return stream(unit.seed, "utility", "defense", client)


def _here(unit: TrainingUnit, context: PlanContext) -> Clients:
    noise = [noise_of(unit, i) for i in range(unit.utility.clients)]
    states: list[State] = [None] * unit.utility.clients

    def turns(opening: Opening) -> list[Update]:
        updates = []
        for i, part in enumerate(opening.parts):
            batch = context.batch(part)
            update, states[i] = step(opening.task, batch, opening.defense, noise[i], states[i])
            updates.append(update)
        return updates

    return turns


def _loss(task: Task, context: PlanContext) -> float:
    batch = context.batch(context.splits["private"][:EVALUATED])
    with torch.no_grad():
        return float(task.loss(_outputs(task, batch), batch.labels))


def _accuracy(task: Task, context: PlanContext) -> float:
    batch = context.batch(context.splits["test"][:EVALUATED])
    found = named(task.loss).hits(_outputs(task, batch), batch.labels)
    return float(found.double().mean())


def _outputs(task: Task, batch: Batch) -> Tensor:
    with torch.no_grad(), quick(task.model):
        parts = list(torch.split(batch.inputs, COUPLED if task.coupled else TOGETHER))
        if task.coupled and len(parts) > 1 and len(parts[-1]) == 1:
            parts[-2:] = [torch.cat(parts[-2:])]  # a single image has no statistics
        return torch.cat([client.forward(task, few) for few in parts])
