"""Rounds of federated training: every client's turn, the server's mean, the next model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from leakbound import check
from leakbound.defenses.base import Chain, State
from leakbound.defenses.withhold import ClientState
from leakbound.federation.average import adjusted, average, told
from leakbound.federation.plan import FederatedPlan, FederatedRound, Turn
from leakbound.protocol import resolve, step
from leakbound.random import Source, permutation, secure, stream
from leakbound.types import Batch, Task, Update


def train(
    task: Task,
    clients: Sequence[Batch],
    plan: FederatedPlan,
    *,
    rounds: int,
    seed: int | None,
    public: Batch | None = None,
) -> Iterator[FederatedRound]:
    """Train for some rounds; yields every round as it ends.

    Args:
        task: the model at its first weights; its local plan is replaced by that of `plan`.
        clients: what each client holds, at least one image.
        plan: how they train.
        rounds: how many.
        seed: names every draw of an experiment (who takes part, which images, masks and noise);
            None draws from the operating system's entropy, as a real client must.
        public: images that the server has, for schemes whose first mask needs some. Without them
            the first client's are taken, and the mask tells of them.

    Raises:
        ValueError: no clients, fewer than take part in a round, or what the scheme refuses.

    Source: Chu et al. 2024 (paper D), algorithm 1.

    Example:
        >>> from leakbound.defenses import Withhold
        >>> from leakbound.pruning import Random
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
        >>> data = [Batch(torch.rand(4, 1, 4, 4), torch.tensor([0, 1, 0, 1])) for _ in range(3)]
        >>> plan = FederatedPlan(Random(0.5), Withhold(rate=0.25))
        >>> (only,) = train(Task.of(model, classes=2), data, plan, rounds=1, seed=0)
        >>> int(only.task.kept.sum()), [turn.rate for turn in only.turns]
        (18, [0.25, 0.25, 0.25])
    """
    check.count(rounds=rounds)
    _check_clients(clients, plan)
    local = replace(
        task.plan,
        steps=plan.steps,
        learning_rate=plan.learning_rate,
        batch_size=plan.batch_size or None,
    )
    task = replace(task, plan=local)
    draws = _Draws(seed, len(clients))
    if plan.pruning is not None:
        _check_public(plan, public)
        task = task.pruned(plan.pruning.start(task, public or clients[0], draws.model))
    return _rounds(task, clients, plan, rounds, draws)


def _rounds(
    task: Task, clients: Sequence[Batch], plan: FederatedPlan, rounds: int, draws: _Draws
) -> Iterator[FederatedRound]:
    states: list[State] = [None] * len(clients)
    ready: Chain | None = None
    for number in range(1, rounds + 1):
        chosen = draws.chosen(plan.clients or len(clients))
        size = max(clients[i].size for i in chosen)
        ready = resolve(plan.defense, task, min(size, plan.batch_size * plan.steps or size), ready)
        turns = []
        for i in chosen:
            batch = _batch(clients[i], plan, draws.batches[i])
            turn, states[i] = _turn(i, task, batch, plan, ready, number, draws.noise[i], states[i])
            turns.append(turn)
        sizes = [clients[i].size for i in chosen]
        total = _sum(turns, task, ready, draws.model) if plan.sums else None
        after = task.with_parameters(average(task, turns, sizes, total, plan))
        if plan.pruning is not None and plan.pruning.adjusts(number):
            after = adjusted(plan.pruning, task, after, turns, sizes, plan, number)
        yield FederatedRound(number, task, tuple(turns), total, ready, after)
        task = after


class _Draws:
    """Every source of randomness of a federation, each with its name."""

    def __init__(self, seed: int | None, clients: int) -> None:
        def source(*path: str | int) -> Source:
            return secure() if seed is None else stream(seed, "federation", *path)

        self.model = source("model")
        self.noise = [source("defense", i) for i in range(clients)]
        lucky = seed if seed is not None else int(2**53 * float(secure().uniform(1)))
        self.batches = [stream(lucky, "federation", "batches", i) for i in range(clients)]
        self.order = stream(lucky, "federation", "clients")
        self.count = clients

    def chosen(self, size: int) -> list[int]:
        """Who takes part in the next round, in the order of their numbers."""
        if size >= self.count:
            return list(range(self.count))
        return sorted(permutation(self.count, self.order)[:size].tolist())


def _check_clients(clients: Sequence[Batch], plan: FederatedPlan) -> None:
    if not clients:
        raise ValueError("clients is empty; give what each client holds, one batch a client")
    if plan.clients > len(clients):
        raise ValueError(
            f"clients is {plan.clients} a round, but there are {len(clients)}; give at most that"
        )


def _check_public(plan: FederatedPlan, public: Batch | None) -> None:
    if public is None and plan.covers and plan.pruning is not None and plan.pruning.reads_data:
        raise ValueError(
            f"public is None, so {plan.pruning!r} would choose its mask from a client's images, "
            f"which {plan.defense!r} does not cover; give public images"
        )


def _batch(own: Batch, plan: FederatedPlan, source: torch.Generator) -> Batch:
    """The images of a round: one local step after another, all where there are not enough."""
    wanted = plan.batch_size * plan.steps
    if not wanted or wanted >= own.size:
        return own
    picked = permutation(own.size, source)[:wanted].to(own.labels.device)
    return Batch(own.inputs[picked], own.labels[picked])


def _turn(
    client: int,
    task: Task,
    batch: Batch,
    plan: FederatedPlan,
    ready: Chain,
    number: int,
    source: Source,
    state: State,
) -> tuple[Turn, State]:
    own, scheme = task, plan.pruning
    if scheme is not None and not scheme.adjusts(number):
        scheme = None
    mask = None if scheme is None else scheme.client_mask(task, batch, number)
    if mask is not None:
        own = task.pruned(mask)
    update, state = step(own, batch, ready, source, state)
    here = torch.ones_like(own.parameters, dtype=torch.bool) if own.kept is None else own.kept
    if update.mask is not None:
        here = here & update.mask[0]
    sent = None
    if not plan.sums:
        weights = own.parameters - plan.learning_rate * update.rows[0]
        sent = torch.where(here, weights, 0.0)[None]
    report = None if scheme is None else scheme.report(own, batch, number)
    if report is not None:
        report = report * told(own, update)
    kept = next((one for one in state if isinstance(one, ClientState)), None)
    return Turn(client, own, batch, update, sent, kept, report), state


def _sum(turns: Sequence[Turn], task: Task, ready: Chain, source: Source) -> Update:
    together = ready.sides[1]
    stacked = Update.stack([turn.update for turn in turns])
    return together.transform(stacked, together.init(task), None, source)[0]
