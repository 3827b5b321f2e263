"""Federated training of a pruned model: clients send weights, a server averages and prunes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from leakbound import check
from leakbound.core import (
    Batch,
    Guarantee,
    LocalPlan,
    Observation,
    Task,
    ThreatModel,
    Unit,
    Update,
)
from leakbound.defenses import Chain, Defense, LocalAggregation, NoDefense, chain
from leakbound.defenses.withhold import ClientState
from leakbound.protocol import observed, resolve, step
from leakbound.pruning import PrunedTurn, Pruning, client_task, next_task, turn_of, withheld
from leakbound.randomness import Source, permutation, secure, stream

__all__ = ["AGGREGATIONS", "ClientTurn", "FederatedPlan", "FederatedRound", "observe", "train"]

AGGREGATIONS = ("masked", "plain", "unchanged")


@dataclass(frozen=True)
class FederatedPlan:
    """How a federation trains.

    If clients of an adaptive scheme send masks or reports with their update, neither noise nor
    secure aggregation covers these: the two together raise a ValueError.

    Args:
        pruning: the base scheme, which determines the model's weights; None keeps all.
        defense: what each client applies to what it sends.
        clients: how many take part in a round, drawn without replacement; 0 for all.
        batch_size: images of a local step; 0 takes all of the client's images.
        steps: local SGD steps per round.
        learning_rate: of the local steps. The server takes the clients' mean unchanged.
        aggregation: how the server averages weights that some clients withheld, with each client
            weighted by its number of images. "masked": over those who sent the weight; the server's
            own if nobody did. "plain": withheld ones count as zero (the paper's algorithm 1,
            literally). "unchanged": withheld ones count as the server's own; the only option under
            secure aggregation, where every client has the same weight.
    """

    pruning: Pruning | None = None
    defense: Defense = field(default_factory=NoDefense)
    clients: int = 0
    batch_size: int = 0
    steps: int = 1
    learning_rate: float = 0.1
    aggregation: str = "masked"

    def __post_init__(self) -> None:
        check.count(steps=self.steps)
        for name in ("clients", "batch_size"):
            if getattr(self, name):
                check.count(**{name: getattr(self, name)})
        check.positive(learning_rate=self.learning_rate)
        check.one_of(AGGREGATIONS, aggregation=self.aggregation)
        if not isinstance(self.defense, Defense):
            raise ValueError(f"defense is {self.defense!r}; give a defense, or NoDefense()")
        whole = chain(self.defense)
        if self.pruning is not None and self.pruning.adapts and self.covers:
            raise ValueError(
                f"pruning is {self.pruning!r}, whose clients send masks or reports with their "
                f"update, which {whole!r} does not cover; give a scheme that does not adapt"
            )
        if whole.sides[0].returns(whole.starts) is Unit.EXAMPLE:
            raise ValueError(
                f"defense is {whole!r}, which sends one row per example; put Mean() after it"
            )
        own = next((link for link in whole.links if isinstance(link, LocalAggregation)), None)
        if own is not None:
            raise ValueError(
                f"defense holds {own!r}, but the plan sets the local training; give its steps and "
                "learning_rate to the plan and leave it out"
            )
        size = whole.cohort_size
        if self.sums and self.aggregation != "unchanged":
            raise ValueError(
                f"aggregation is {self.aggregation!r}, but {self.defense!r} shows the server only "
                "a "
                'sum; give aggregation="unchanged"'
            )
        if self.sums and self.clients != size:
            raise ValueError(
                f"clients is {self.clients}, but {self.defense!r} runs on {size}; give as many"
            )

    @property
    def sums(self) -> bool:
        """Whether a link of the defense runs on the rows of all clients."""
        return bool(chain(self.defense).sides[1].links)

    @property
    def covers(self) -> bool:
        """Whether a link protects what clients send, by noise or by a sum with others."""
        links = chain(self.defense).links
        return self.sums or any(link.guarantee is not Guarantee.NONE for link in links)


@dataclass(frozen=True, eq=False)
class ClientTurn:
    """One client's part in a round.

    Attributes:
        client: its number.
        size: how many images it has: its weight in the server's mean.
        task: the model that it trained, with its own mask if it has one.
        batch: the images on which it trained: known to the audit, not to the server.
        update: what it sent in gradient units, (weights received - weights sent) / learning rate,
            with the true distribution and mask.
        sent: (1, P) the weights that it sent, zero where withheld or pruned; None if only a sum
            leaves the clients.
        kept: what it keeps for its next round, if a link of the defense withholds weights.
        report: (P,) importance scores that it also sent, zero where it withheld; None: none.
    """

    client: int
    size: int
    task: Task
    batch: Batch
    update: Update
    sent: Tensor | None
    kept: ClientState | None
    report: Tensor | None

    @property
    def rate(self) -> float:
        """The share of the model's weights that the client withheld, biases left out."""
        return withheld(self.task, self.update)

    @property
    def pruned(self) -> PrunedTurn:
        """Its part as the pruning scheme sees it."""
        return PrunedTurn(self.task, self.update, self.report, self.size)


@dataclass(frozen=True, eq=False)
class FederatedRound:
    """The result of one round.

    Attributes:
        number: 1 for the first.
        task: the model as the server sent it, with its mask `task.kept`.
        turns: the clients' parts, in the order of their numbers.
        total: the clients' sum if a link of the defense sums them; otherwise None.
        defense: the defense, resolved.
        after: the model after the round.
    """

    number: int
    task: Task
    turns: tuple[ClientTurn, ...]
    total: Update | None
    defense: Chain
    after: Task

    def turn(self, client: int) -> ClientTurn:
        """The part of a client; ValueError if it took none."""
        for turn in self.turns:
            if turn.client == client:
                return turn
        there = ", ".join(str(turn.client) for turn in self.turns)
        raise ValueError(f"client {client} took no part in round {self.number}; {there} did")

    def personal(self, client: int) -> Task:
        """The client's model for its next round: the new one, with the weights that it withheld."""
        kept = self.turn(client).kept
        if kept is None or kept.weights is None or kept.sent is None:
            return self.after
        own = torch.where(kept.sent, self.after.parameters, kept.weights)
        return self.after.with_parameters(own)


def train(
    task: Task,
    clients: Sequence[Batch],
    plan: FederatedPlan,
    *,
    rounds: int,
    seed: int | None,
    public: Batch | None = None,
) -> Iterator[FederatedRound]:
    """Train for some rounds; yields every round when it ends.

    Args:
        task: the model at its first weights; its local plan is replaced by that of `plan`.
        clients: the data of each client, at least one image.
        plan: how they train.
        rounds: how many rounds.
        seed: determines every draw of an experiment (who takes part, which images, masks and
            noise); None draws from the operating system's entropy, as a real client must.
        public: images that the server has, for schemes whose first mask needs some. Without them
            the first client's are used, and the mask leaks them.

    Source: Chu et al. 2024 (paper D), algorithm 1.

    Example:
        >>> from leakbound.pruning import Random
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
        >>> data = [Batch(torch.rand(4, 1, 4, 4), torch.tensor([0, 1, 0, 1])) for _ in range(3)]
        >>> (only,) = train(Task.of(model), data, FederatedPlan(Random(0.5)), rounds=1, seed=0)
        >>> int(only.task.kept.sum())
        18
    """
    check.count(rounds=rounds)
    if not clients:
        raise ValueError("clients is empty; give the data of each client, one batch per client")
    if plan.clients > len(clients):
        raise ValueError(
            f"clients is {plan.clients} a round, but there are {len(clients)}; give at most that"
        )
    local = LocalPlan(plan.steps, plan.learning_rate, plan.batch_size or None)
    task = replace(task, plan=local)
    draws = _Draws(seed, len(clients))
    if plan.pruning is not None:
        if public is None and plan.covers and plan.pruning.reads_data:
            raise ValueError(
                f"public is None, so {plan.pruning!r} would choose its mask from a client's "
                f"images, which {plan.defense!r} does not cover; give public images"
            )
        task = task.pruned(plan.pruning.start(task, public or clients[0], draws.model))
    return _rounds(task, clients, plan, rounds, draws)


def _rounds(
    task: Task, clients: Sequence[Batch], plan: FederatedPlan, rounds: int, draws: _Draws
) -> Iterator[FederatedRound]:
    states: list[Any] = [None] * len(clients)
    ready: Chain | None = None
    for number in range(1, rounds + 1):
        chosen = draws.chosen(plan.clients or len(clients))
        size = max(clients[i].size for i in chosen)
        ready = resolve(plan.defense, task, min(size, plan.batch_size * plan.steps or size), ready)
        turns = []
        for i in chosen:
            turn, states[i] = _turn(i, clients[i], task, plan, ready, number, draws, states[i])
            turns.append(turn)
        total = None
        if plan.sums:
            together = ready.sides[1]
            stacked = Update.stack([turn.update for turn in turns])
            total, _ = together.transform(stacked, together.init(task), None, draws.model)
            mean = task.parameters - plan.learning_rate * total.rows[0] / len(turns)
        else:
            mean = _mean(task, turns, plan.aggregation)
        after = next_task(plan.pruning, task, mean, [turn.pruned for turn in turns], number)
        yield FederatedRound(number, task, tuple(turns), total, ready, after)
        task = after


class _Draws:
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
        """The clients of the next round, in the order of their numbers."""
        if size >= self.count:
            return list(range(self.count))
        return sorted(permutation(self.count, self.order)[:size].tolist())


def _batch(own: Batch, plan: FederatedPlan, source: torch.Generator) -> Batch:
    """The images of a round: one local step after another; all if there are too few."""
    wanted = plan.batch_size * plan.steps
    if not wanted or wanted >= own.size:
        return own
    picked = permutation(own.size, source)[:wanted].to(own.labels.device)
    return Batch(own.inputs[picked], own.labels[picked])


def _turn(
    client: int,
    held: Batch,
    task: Task,
    plan: FederatedPlan,
    ready: Chain,
    number: int,
    draws: _Draws,
    state: Any,
) -> tuple[ClientTurn, Any]:
    """The part of a client in a round, and what it keeps."""
    batch = _batch(held, plan, draws.batches[client])
    own = client_task(plan.pruning, task, batch, number)
    update, state = step(own, batch, ready, draws.noise[client], state)
    sent = None
    if not plan.sums:
        weights = own.parameters - plan.learning_rate * update.rows[0]
        sent = torch.where(PrunedTurn(own, update).shown, weights, 0.0)[None]
    report = turn_of(plan.pruning, own, batch, update, number).report
    kept = next((one for one in state if isinstance(one, ClientState)), None)
    return ClientTurn(client, held.size, own, batch, update, sent, kept, report), state


def _mean(task: Task, turns: Sequence[ClientTurn], aggregation: str) -> Tensor:
    """(P,) the mean of the weights that the clients sent, by their sizes."""
    weights = torch.zeros_like(task.parameters)
    shown = torch.zeros_like(task.parameters)
    for turn in turns:
        assert turn.sent is not None  # only sums have none
        weights += turn.size * turn.sent[0]
        shown += turn.size * turn.pruned.shown
    total = float(sum(turn.size for turn in turns))
    if aggregation == "plain":
        return weights / total
    if aggregation == "unchanged":
        return (weights + (total - shown) * task.parameters) / total
    return torch.where(shown > 0, weights / shown.clamp_min(1), task.parameters)


def observe(
    rounds: Sequence[FederatedRound],
    client: int,
    *,
    threat: ThreatModel | None = None,
    auxiliary: Batch | None = None,
) -> tuple[Observation, Batch]:
    """What the server saw of a client in the last of these rounds, and the true batch.

    Earlier rounds in which the client took part are its `history`. Under secure aggregation the
    server saw the sum of all who took part in the last round, and the truth is all of their images.

    Args:
        rounds: of one federation, in order; the client took part in the last.
        client: its number.
        threat: what the attacker knows.
        auxiliary: the attacker's public data.
    """
    if not rounds:
        raise ValueError("rounds is empty; give at least the round to attack")
    threat = threat or ThreatModel()
    last = rounds[-1]
    seen = [r for r in rounds if any(turn.client == client for turn in r.turns)]
    last.turn(client)
    past: tuple[Observation, ...] = ()
    for one in seen:
        turns = one.turns if one.total is not None else (one.turn(client),)
        observation, truth = observed(
            one.total or turns[0].update,
            one.task if one.total is not None else turns[0].task,
            [turn.batch for turn in turns],
            threat,
            defense=one.defense,
            auxiliary=auxiliary,
            sent=turns[0].sent,
            history=past,
        )
        past = (*past, replace(observation, history=()))
    return observation, truth
