"""What a defense costs: a short federated training under it, measured on held-out images."""

from __future__ import annotations

from typing import Any

import torch

from leakbound import client
from leakbound.audit.bench import Bench
from leakbound.audit.plan import UtilityCell, build_defense
from leakbound.defenses.base import Chain, State
from leakbound.protocol import resolve, step
from leakbound.random import permutation, stream
from leakbound.types import Batch, Task, Update

EVALUATED = 1000
MARKS = tuple(5 * 2**i for i in range(16))


def train(cell: UtilityCell, bench: Bench) -> dict[str, Any]:
    """Train for some rounds; training loss on private images and accuracy on test images.

    The server takes one Adam (or SGD) step a round on the mean of the clients' defended updates.
    Seeds name weights, batches and noise, so defenses are compared on the same draws. `curve` holds
    [round, training loss] before the first round, after 5, 10, 20, ... and after the last.
    """
    spec, defense = cell.utility, build_defense(cell.defense)
    task = bench.task(cell.model, cell.seed)
    source = stream(cell.seed, "utility", "batches")
    noise = [stream(cell.seed, "utility", "defense", i) for i in range(spec.clients + 1)]
    weights = task.parameters.clone()
    rule = torch.optim.SGD if spec.optimizer == "sgd" else torch.optim.Adam
    optimizer = rule([weights], lr=spec.learning_rate)
    states: list[State] = [None] * spec.clients
    ready: Chain | None = None
    curve = [[0, _loss(task, bench)]]
    private = bench.splits["private"]
    for round_ in range(1, spec.rounds + 1):
        order = permutation(len(private), source)[: spec.clients * spec.batch_size]
        now = task.with_parameters(weights.detach().clone())
        parts = order.reshape(spec.clients, spec.batch_size)
        ready = resolve(defense, now, spec.batch_size, ready)
        updates = []
        for i, part in enumerate(parts):
            own = bench.dataset.batch(private[part])
            update, states[i] = step(now, own, ready, noise[i], states[i])
            updates.append(update)
        together = ready.sides[1]
        update, _ = together.transform(Update.stack(updates), together.init(now), None, noise[-1])
        weights.grad = update.rows.sum(0) / spec.clients
        optimizer.step()
        if round_ in (spec.rounds, *MARKS):
            curve.append([round_, _loss(task.with_parameters(weights.detach()), bench)])
    return {**evaluate(task.with_parameters(weights.detach()), bench), "curve": curve}


def evaluate(task: Task, bench: Bench) -> dict[str, float]:
    """Mean loss on up to 1,000 private images, accuracy on up to 1,000 test images."""
    loss = _loss(task, bench)
    _, accuracy = _score(task, bench.dataset.batch(bench.splits["test"][:EVALUATED]))
    return {"training_loss": loss, "accuracy": accuracy}


def _loss(task: Task, bench: Bench) -> float:
    return _score(task, bench.dataset.batch(bench.splits["private"][:EVALUATED]))[0]


def _score(task: Task, batch: Batch) -> tuple[float, float]:
    with torch.no_grad():
        output = client.forward(task, batch.inputs)
        loss = float(task.loss(output, batch.labels))
        right = float((output.argmax(-1) == batch.labels).double().mean())
    return loss, right
