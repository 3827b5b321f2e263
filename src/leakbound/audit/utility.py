"""The cost of a defense: a short federated training under it, measured on held-out images."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from leakbound import client
from leakbound._util import optimizers
from leakbound.assess.record import RoundInfo, short
from leakbound.audit.attacked_round import check_covers
from leakbound.audit.context import PlanContext
from leakbound.audit.plan import TrainingUnit, build_defense
from leakbound.core import Batch, Loss, Task, Update
from leakbound.defenses.base import Chain, State
from leakbound.losses import NamedLoss, named
from leakbound.protocol import resolve, step
from leakbound.pruning import bytes_sent, client_task, density, existing, next_task, turn_of
from leakbound.randomness import permutation, stream

EVALUATED = 1000
TOGETHER = 25
COUPLED = 100
"""Number of images for a loss, and number per model call. More per call do not fit the processor's
cache, which takes twice as long. Images that share statistics are processed 100 at a time."""
MARKS = tuple(5 * 2**i for i in range(16))


def train(unit: TrainingUnit, context: PlanContext) -> dict[str, Any]:
    """Train for some rounds; measure the loss on private and the quality on test examples.

    Seeds name weights, batches and noise, so defenses are compared on the same draws. `curve` holds
    [round, training loss] before the first round, after 5, 10, 20, ... and after the last.
    """
    spec = unit.utility
    defense = build_defense(unit.defense)
    scheme = unit.model.scheme
    check_covers(defense, scheme)
    task = context.task(unit.model, unit.seed)
    source = stream(unit.seed, "utility", "batches")
    # The last source is for links on the sum of all clients.
    *noises, noise = (stream(unit.seed, "utility", "defense", i) for i in range(spec.clients + 1))
    states: list[State] = [None] * spec.clients
    weights = task.parameters.clone()
    rule = optimizers.SGD if spec.optimizer == "sgd" else optimizers.Adam
    optimizer = rule([weights], lr=spec.learning_rate)
    ready: Chain | None = None
    curve = [[0, context.once(("loss", unit.model, unit.seed), lambda: _loss(task, context))]]
    private = context.splits["private"]
    sent = 0
    for round_ in range(1, spec.rounds + 1):
        order = permutation(len(private), source)[: spec.clients * spec.batch_size]
        # A copy: the optimizer changes the weights in place.
        now = task.with_parameters(weights.detach().clone())
        ready = resolve(defense, now, spec.batch_size, ready)
        updates = []
        turns = []
        for i, part in enumerate(private[order].reshape(spec.clients, spec.batch_size)):
            batch = _batch(part, context)
            own = client_task(scheme, now, batch, round_)
            update, states[i] = step(own, batch, ready, noises[i], states[i])
            updates.append(update)
            turns.append(turn_of(scheme, own, batch, update, round_))
            sent += bytes_sent(scheme, own, update, round_)
        together = ready.sides[1]
        update, _ = together.transform(Update.stack(updates), together.init(now), None, noise)
        weights.grad = update.rows.sum(0) / spec.clients
        optimizer.step()
        task = next_task(scheme, now, weights.detach().clone(), turns, round_)
        # A weight that the scheme restores starts at 0, wherever the server's steps were.
        weights.copy_(task.parameters)
        if round_ in (spec.rounds, *MARKS):
            curve.append([round_, _loss(task, context)])
    found = tested(task, context)
    measured: dict[str, Any] = {"training_loss": curve[-1][1], "curve": curve, **found}
    if scheme is not None:
        measured["pruned"] = RoundInfo(
            kept=round(density(task, existing(task)), 9),
            sent=round(sent / (spec.rounds * spec.clients)),
            dense=len(weights) * weights.element_size(),
            accuracy=short(found["accuracy"]),
        )
    return measured


def _loss(task: Task, context: PlanContext) -> float:
    batch = _batch(context.splits["private"][:EVALUATED], context)
    with torch.no_grad():
        return float(task.loss(_outputs(task, batch), batch.labels))


def tested(task: Task, context: PlanContext) -> dict[str, float | int | None]:
    batch = _batch(context.splits["test"][:EVALUATED], context)
    return quality(task.loss, _outputs(task, batch), batch.labels)


def quality(
    loss: Loss,
    output: Tensor,
    labels: Tensor,
) -> dict[str, float | int | None]:
    """How good outputs (B, K, ...) are for the labels, in ways that see rare classes.

    `accuracy`; `majority`, that of the best constant answer; `tested`, the number of answers;
    `balanced_accuracy`, the mean over classes of the share that is right; `auc`, the mean over
    classes of the area under the ROC curve, with `auc_error`, its standard error if outputs and
    labels are independent. The AUC is None for pixels and tokens.

    Example:
        >>> labels = torch.tensor([0, 0, 0, 1])
        >>> found = quality("cross_entropy", torch.tensor([[2.0, 0.0]] * 4), labels)
        >>> found["accuracy"], found["majority"], found["balanced_accuracy"], found["auc"]
        (0.75, 0.75, 0.5, 0.5)
    """
    named_loss = named(loss)
    predicted, true = named_loss.classified(output, labels)
    right = (predicted == true).double()
    counts = torch.bincount(true - true.min())
    recalls = [float(right[true == k].mean()) for k in torch.unique(true)]
    measured: dict[str, float | int | None] = {
        "accuracy": float(right.mean()),
        "majority": int(counts.max()) / len(true),
        "tested": len(true),
        "balanced_accuracy": sum(recalls) / len(recalls),
    }
    scored = _class_scores(named_loss, output, labels)
    areas = [] if scored is None else _areas(*scored)
    measured["auc"] = sum(area for area, _ in areas) / len(areas) if areas else None
    # The areas of several classes depend on each other, so their errors are not averaged out.
    measured["auc_error"] = sum(error for _, error in areas) / len(areas) if areas else None
    return measured


def _class_scores(
    loss: NamedLoss,
    output: Tensor,
    labels: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """Scores (B, K) that rise with the probability of each class, and which are true (B, K).

    None if labels are pixels, tokens or numbers.
    """
    if output.ndim > 2 or loss.targets not in ("classes", "binary"):
        return None
    if output[0].numel() == labels[0].numel():
        return output.reshape(len(output), -1), labels.reshape(len(labels), -1) > 0.5
    true = functional.one_hot(labels, output.shape[1]) > 0
    return output.double().softmax(1), true


def _areas(scores: Tensor, true: Tensor) -> list[tuple[float, float]]:
    """For each class with and without examples: the area, and its error without any relation.

    Source: Mann and Whitney 1947; ties count half.
    """
    areas = []
    for score, label in zip(scores.T, true.T, strict=True):
        positive = int(label.sum())
        negative = len(label) - positive
        if not positive or not negative:
            continue
        _, at, equal = score.double().cpu().unique(return_inverse=True, return_counts=True)
        # Equal scores share the mean of their ranks.
        ranks = (equal.cumsum(0) - (equal - 1) / 2)[at].numpy()
        # Less the smallest sum of ranks that so many examples can have.
        total = float(ranks[label.cpu().numpy()].sum()) - positive * (positive + 1) / 2
        error = math.sqrt((len(label) + 1) / (12 * positive * negative))
        areas.append((total / (positive * negative), error))
    return areas


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
