"""How a federation trains, and what its rounds leave."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from leakbound import check
from leakbound.defenses import Chain, Defense, LocalAggregation, NoDefense, chain
from leakbound.defenses.withhold import ClientState
from leakbound.pruning import Pruning, prunable
from leakbound.types import Batch, Guarantee, Task, Unit, Update

AGGREGATIONS = ("masked", "plain", "unchanged")


@dataclass(frozen=True)
class FederatedPlan:
    """How a federation trains.

    Args:
        pruning: the base scheme, which says which weights the model has; None keeps all.
        defense: what each client does to what it sends.
        clients: how many take part in a round, drawn without replacement; 0 for all.
        batch_size: images of a local step; 0 takes all that a client has.
        steps: local SGD steps a round.
        learning_rate: of the local steps. The server takes the clients' mean as it is.
        aggregation: how the server averages weights that some clients withheld, each client
            weighted by its number of images. "masked": over those who sent the weight, the
            server's own where nobody did. "plain": withheld ones count as zero (the paper's
            algorithm 1, literally). "unchanged": withheld ones count as the server's own, the only
            way under secure aggregation, where the server sees the sum alone (and every client
            counts the same, whatever its number of images).

    Raises:
        ValueError: settings that do not go together. Clients of a scheme that adapts send masks or
            reports beside their update, which neither noise nor secure aggregation covers: with
            either, it is refused.
    """

    pruning: Pruning | None = None
    defense: Defense = field(default_factory=NoDefense)
    clients: int = 0
    batch_size: int = 0
    steps: int = 1
    learning_rate: float = 0.1
    aggregation: str = "masked"

    def __post_init__(self) -> None:
        if self.clients:
            check.count(clients=self.clients)
        if self.batch_size:
            check.count(batch_size=self.batch_size)
        check.count(steps=self.steps)
        check.positive(learning_rate=self.learning_rate)
        check.one_of(AGGREGATIONS, aggregation=self.aggregation)
        self._check_defense()

    @property
    def sums(self) -> bool:
        """Whether a link of the defense runs on the rows of all clients."""
        return bool(chain(self.defense).sides[1].links)

    @property
    def covers(self) -> bool:
        """Whether a link covers what clients send, by noise or by a sum with others."""
        links = chain(self.defense).links
        return self.sums or any(link.guarantee is not Guarantee.NONE for link in links)

    def _check_defense(self) -> None:
        if not isinstance(self.defense, Defense):
            raise ValueError(
                f"defense is {self.defense!r}; give a defense, or NoDefense() for none"
            )
        whole = chain(self.defense)
        if self.pruning is not None and self.pruning.adapts and self.covers:
            raise ValueError(
                f"pruning is {self.pruning!r}, whose clients send masks or reports beside their "
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
                f"aggregation is {self.aggregation!r}, but {self.defense!r} shows the server a sum "
                'alone; give aggregation="unchanged"'
            )
        if self.sums and self.clients != size:
            raise ValueError(
                f"clients is {self.clients}, but {self.defense!r} runs on {size}; give as many"
            )


@dataclass(frozen=True, eq=False)
class Turn:
    """One client's part in a round.

    Attributes:
        client: its number.
        task: the model that it trained, with its own mask where it has one.
        batch: the images that it trained on: what the audit knows and the server does not.
        update: what it sent in gradient units, (weights got - weights sent) / learning rate, with
            the true law and mask.
        sent: (1, P) the weights that it sent, zero where withheld or pruned; None where only a sum
            leaves the clients.
        kept: what it keeps for its next round, where a link of the defense withholds weights.
        report: (P,) importance scores that it sent besides, zero where it withheld; None: none.
    """

    client: int
    task: Task
    batch: Batch
    update: Update
    sent: Tensor | None
    kept: ClientState | None
    report: Tensor | None

    @property
    def rate(self) -> float:
        """The share of the model's weights that the client withheld, biases left out."""
        exists = prunable(self.task)
        if self.task.kept is not None:
            exists = exists & self.task.kept
        if self.update.mask is None or not bool(exists.any()):
            return 0.0
        return float((exists & ~self.update.mask[0]).sum() / exists.sum())


@dataclass(frozen=True, eq=False)
class FederatedRound:
    """What one round leaves.

    Attributes:
        number: 1 for the first.
        task: the model as the server sent it, with its mask `task.kept`.
        turns: the clients' parts, in the order of their numbers.
        total: the clients' sum where a link of the defense sums them; None elsewhere.
        defense: the defense, resolved.
        after: the model after the round.
    """

    number: int
    task: Task
    turns: tuple[Turn, ...]
    total: Update | None
    defense: Chain
    after: Task

    def turn(self, client: int) -> Turn:
        """The part of a client; ValueError where it took none."""
        for turn in self.turns:
            if turn.client == client:
                return turn
        there = ", ".join(str(turn.client) for turn in self.turns)
        raise ValueError(f"client {client} took no part in round {self.number}; {there} did")

    def personal(self, client: int) -> Task:
        """The model that a client goes on with: the new one, with the weights that it withheld."""
        kept = self.turn(client).kept
        if kept is None or kept.weights is None or kept.sent is None:
            return self.after
        own = torch.where(kept.sent, self.after.parameters, kept.weights)
        return self.after.with_parameters(own)
