"""What a defense costs: a short federated training under it, measured on held-out images."""

from __future__ import annotations

import torch

from leakbound import client
from leakbound.audit.bench import Bench
from leakbound.audit.plan import UtilityCell, build_defense
from leakbound.protocol import send
from leakbound.random import permutation, stream
from leakbound.types import Batch, Task, Update

EVALUATED = 1000


def train(cell: UtilityCell, bench: Bench) -> dict[str, float]:
    """Train for some rounds; training loss on private images and accuracy on test images.

    The server takes one Adam step a round on the mean of the clients' defended updates. Seeds name
    weights, batches and noise, so defenses are compared on the same draws.
    """
    spec, defense = cell.utility, build_defense(cell.defense)
    task = bench.task(cell.model, cell.seed)
    cohort_side = defense.split()[1]
    source = stream(cell.seed, "utility", "batches")
    noise = [stream(cell.seed, "utility", "defense", i) for i in range(spec.clients + 1)]
    weights = task.parameters.clone()
    optimizer = torch.optim.Adam([weights], lr=spec.learning_rate)
    private = bench.splits["private"]
    for _ in range(spec.rounds):
        order = permutation(len(private), source)[: spec.clients * spec.batch_size]
        now = task.with_parameters(weights.detach().clone())
        parts = order.reshape(spec.clients, spec.batch_size)
        updates = [
            send(now, bench.dataset.batch(private[part]), defense, own)
            for part, own in zip(parts, noise[:-1], strict=True)
        ]
        update, _ = cohort_side.transform(
            Update.stack(updates), cohort_side.init(now), None, noise[-1]
        )
        weights.grad = update.rows.sum(0) / spec.clients
        optimizer.step()
    return evaluate(task.with_parameters(weights.detach()), bench)


def evaluate(task: Task, bench: Bench) -> dict[str, float]:
    """Mean loss on up to 1,000 private images, accuracy on up to 1,000 test images."""
    loss, _ = _score(task, bench.dataset.batch(bench.splits["private"][:EVALUATED]))
    _, accuracy = _score(task, bench.dataset.batch(bench.splits["test"][:EVALUATED]))
    return {"training_loss": loss, "accuracy": accuracy}


def _score(task: Task, batch: Batch) -> tuple[float, float]:
    with torch.no_grad():
        output = client.forward(task, batch.inputs)
        loss = float(task.loss(output, batch.labels))
        right = float((output.argmax(-1) == batch.labels).double().mean())
    return loss, right
