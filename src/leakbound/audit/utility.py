"""What a defense costs: a short federated training under it, measured on held-out images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leakbound import client
from leakbound.audit.bench import Bench
from leakbound.audit.plan import UtilityCell, build_defense
from leakbound.defenses.base import Chain, State
from leakbound.protocol import resolve, step
from leakbound.random import permutation, stream
from leakbound.types import Batch, Task, Update

EVALUATED, TOGETHER = 1000, 100
"""Images that a loss is measured on, and how many go through the model at once: a few hundred
leave the processor's cache, which takes twice as long."""
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
    curve = [[0, bench.once(("loss", cell.model, cell.seed), lambda: _loss(task, bench))]]
    private = bench.splits["private"]
    for round_ in range(1, spec.rounds + 1):
        order = permutation(len(private), source)[: spec.clients * spec.batch_size]
        now = task.with_parameters(weights.detach().clone())
        parts = order.reshape(spec.clients, spec.batch_size)
        ready = resolve(defense, now, spec.batch_size, ready)
        updates = []
        for i, part in enumerate(parts):
            own = bench.batch(private[part])
            update, states[i] = step(now, own, ready, noise[i], states[i])
            updates.append(update)
        together = ready.sides[1]
        update, _ = together.transform(Update.stack(updates), together.init(now), None, noise[-1])
        weights.grad = update.rows.sum(0) / spec.clients
        optimizer.step()
        if round_ in (spec.rounds, *MARKS):
            curve.append([round_, _loss(task.with_parameters(weights.detach()), bench)])
    trained = task.with_parameters(weights.detach())
    return {"training_loss": curve[-1][1], "accuracy": _accuracy(trained, bench), "curve": curve}


def _loss(task: Task, bench: Bench) -> float:
    """Mean loss on up to 1,000 private images."""
    batch = bench.batch(bench.splits["private"][:EVALUATED])
    with torch.no_grad():
        return float(task.loss(_outputs(task, batch), batch.labels))


def _accuracy(task: Task, bench: Bench) -> float:
    """Accuracy on up to 1,000 test images."""
    batch = bench.batch(bench.splits["test"][:EVALUATED])
    return float((_outputs(task, batch).argmax(-1) == batch.labels).double().mean())


def _outputs(task: Task, batch: Batch) -> Tensor:
    with torch.no_grad():
        parts = list(torch.split(batch.inputs, TOGETHER))
        if task.coupled and len(parts) > 1 and len(parts[-1]) == 1:
            parts[-2:] = [torch.cat(parts[-2:])]  # one image alone has no statistics
        return torch.cat([client.forward(task, few) for few in parts])
