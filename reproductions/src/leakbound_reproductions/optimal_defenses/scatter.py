"""The paper's measure of utility: the loss on a batch after a few steps on that batch.

Four clients share 64 images. In each step, the server averages their defended gradients and takes
one step of Adam (appendix C.1, figures 7 and 10). The added noise is stored layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from leakbound import client
from leakbound.audit.context import PlanContext
from leakbound.audit.plan import ModelSpec, build_defense
from leakbound.core import Batch, Gaussian, Task, Update
from leakbound.defenses.base import Chain
from leakbound.protocol import resolve, step
from leakbound.randomness import stream
from leakbound.registry import Spec

CLIENTS = 4
SHARE = 16
STEPS = 5
RATE = 1e-3


@dataclass(frozen=True)
class Descent:
    """The result of a few steps.

    Attributes:
        loss: on the 64 images, after the last step.
        before: the same before the first.
        noise: root mean square of the noise in each tensor, over steps and clients; empty if the
            defense adds none.
    """

    loss: float
    before: float
    noise: dict[str, float]


def descend(bench: PlanContext, model: ModelSpec, links: tuple[Spec, ...], seed: int) -> Descent:
    """Train on one batch for a few steps under a defense.

    Args:
        bench: the data.
        model: which, at the weights of the seed.
        links: the defense.
        seed: sets weights, images and noise, so that defenses are compared on the same ones.
    """
    task = bench.task(model, seed)
    parts = bench.batches(SHARE, CLIENTS, seed)
    defense = build_defense(links)
    sources = [stream(seed, "scatter", i) for i in range(CLIENTS)]
    states: list[Any] = [None] * CLIENTS
    weights = task.parameters.clone()
    ready = None
    optimizer = torch.optim.Adam([weights], lr=RATE)
    squares: list[dict[str, float]] = []
    for _ in range(STEPS):
        now = task.with_parameters(weights.detach().clone())
        ready = resolve(defense, now, SHARE, ready)
        updates = [_turn(now, parts, ready, sources, states, i) for i in range(CLIENTS)]
        weights.grad = torch.cat([update.rows for update in updates]).mean(0)
        optimizer.step()
        squares += [found for update in updates if (found := _squares(now, update))]
    names = squares[0] if squares else ()
    noise = {name: (sum(s[name] for s in squares) / len(squares)) ** 0.5 for name in names}
    return Descent(_loss(task.with_parameters(weights.detach()), parts), _loss(task, parts), noise)


def _turn(
    task: Task,
    parts: Sequence[Batch],
    defense: Chain,
    sources: Sequence[torch.Generator],
    states: list[Any],
    i: int,
) -> Update:
    update, states[i] = step(task, parts[i], defense, sources[i], states[i])
    return update


def _squares(task: Task, update: Update) -> dict[str, float]:
    """Mean variance of the noise in each tensor."""
    law: Any = update.law
    if not isinstance(law, Gaussian):
        return {}
    variance = torch.as_tensor(law.covariance)
    if variance.numel() == 1:
        variance = variance.expand(task.parameters.shape)
    return {n: float(v.mean()) for n, v in task.unflatten(variance.flatten()).items()}


def _loss(task: Task, parts: Sequence[Batch]) -> float:
    inputs = torch.cat([part.inputs for part in parts])
    labels = torch.cat([part.labels for part in parts])
    with torch.no_grad():
        return float(task.loss(client.forward(task, inputs), labels))
