"""One federated round: malicious change, prepare, client, defense, aggregate, observe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from leakbound import check
from leakbound._util import pictures
from leakbound.attacks.base import Attack
from leakbound.client import batch_statistics, respond
from leakbound.core import (
    Batch,
    NotApplicable,
    Observation,
    Server,
    Statistics,
    Task,
    ThreatModel,
    Update,
)
from leakbound.defenses.base import Chain, Defense, State, chain
from leakbound.domains import of_shape
from leakbound.domains.known import KnownValues, known_parts
from leakbound.engines.sensitivity import example_gradients
from leakbound.losses import named
from leakbound.randomness import SecureSource, Source

__all__ = ["Round", "observed", "play", "resolve", "send", "step"]


@dataclass(frozen=True, eq=False)
class Round:
    """The result of a round: the attacker's view, and what only the audit knows.

    `truth` meets the reconstruction only in `pairing`. `update` is the release with its true noise
    distribution and mask, and `defense` is resolved, for records and bounds. If the defense is not
    known, `observation` shows none of these. `number` is 1 for the first round, and `states` are
    what each client keeps for its next one.
    """

    observation: Observation
    truth: Batch
    update: Update
    defense: Chain
    number: int = 1
    states: tuple[State, ...] = ()

    @property
    def acts(self) -> bool:
        """Whether the defense protected this round of every client."""
        alone, _ = self.defense.sides
        return all(alone.acts(state) for state in self.states)

    def _repr_html_(self) -> str:
        held = f"kept aside for pairing, not shown: the true batch of {self.truth.size}"
        return self.observation._repr_html_() + pictures.note(held)


def send(
    task: Task,
    batch: Batch,
    defense: Defense,
    source: Source,
) -> Update:
    """One client's defended update, before any aggregation.

    Raises:
        ValueError: labels out of range, inputs or a gradient that are not finite.
    """
    return step(task, batch, resolve(defense, task, batch.size), source)[0]


def step(
    task: Task,
    batch: Batch,
    defense: Chain,
    source: Source,
    state: State = None,
) -> tuple[Update, State]:
    """One of several rounds of a client: as `send`, with a resolved defense.

    `state` is the result of the previous round, None in the first.
    """
    check.finite("inputs", batch.inputs)
    check.within("inputs", batch.inputs, task.input_range)
    named(task.loss).check(batch.labels, task.label_range)
    return respond(task, batch, defense, source, state, example_gradients)


def resolve(
    defense: Defense,
    task: Task,
    examples: int,
    previous: Chain | None = None,
) -> Chain:
    """The defense as a chain, with all values from public knowledge filled in."""
    return _as_chain(defense).resolve(task, examples, previous)


def play(
    task: Task,
    clients: Sequence[Batch],
    defense: Defense,
    sources: Sequence[Source],
    *,
    threat: ThreatModel | None = None,
    attack: Attack | None = None,
    auxiliary: Batch | None = None,
    after: Round | None = None,
) -> Round:
    """Run one round; return what the server sees, and separately what it must not see.

    `clients` holds one batch per client, as many as the defense's cohort needs. `sources` holds one
    source of randomness per client, and one more for the cohort's links. `threat` is what attackers
    know, by default labels (if they are not the input's own tokens) and defense. A malicious
    server's `attack` may change the model, and send each client another one
    (`Attack.plant_each`); the observation then holds the first client's. `auxiliary` is public data
    that the attacker has. `after` is the round of the same clients before this one: they continue
    from its states, and the server remembers it.

    Example:
        >>> from leakbound.defenses import SecureAggregation
        >>> from leakbound.randomness import stream
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> batches = [Batch(torch.rand(2, 1, 2, 2), torch.tensor([0, 1])) for _ in range(3)]
        >>> streams = [stream(0, "defense", i) for i in range(4)]
        >>> seen = play(Task.of(model), batches, SecureAggregation(3), streams).observation
        >>> seen.update.rows.shape, seen.cohort
        (torch.Size([1, 10]), (2, 2, 2))
    """
    hidden = named(task.loss).of_inputs
    defense = _as_chain(defense)
    threat = threat or ThreatModel(labels_known=not hidden)
    if hidden and threat.labels_known:
        raise ValueError(
            f"labels_known is True, but labels of the loss {named(task.loss).name!r} are the "
            "input's own tokens; give labels_known=False"
        )
    if len(clients) != defense.cohort_size:
        raise ValueError(
            f"clients holds {len(clients)} batches, but {defense!r} runs on {defense.cohort_size}"
        )
    if len(sources) != len(clients) + 1:
        raise ValueError(f"sources holds {len(sources)}; give one a client and one for the cohort")
    models = [task] * len(clients)
    if attack is not None and threat.server is Server.MALICIOUS:
        models = _sent_models(attack, task, defense, threat)
        task = models[0]
    earlier = None if after is None else after.defense
    defense = resolve(defense, task, max(batch.size for batch in clients), earlier)
    kept = [None] * len(clients) if after is None else after.states
    turns = zip(models, clients, sources[:-1], kept, strict=True)
    sent, states = zip(
        *(step(model, batch, defense, *more) for model, batch, *more in turns), strict=True
    )
    _, cohort = defense.sides
    update, _ = cohort.transform(Update.stack([*sent]), cohort.init(task), None, sources[-1])
    observation, truth = observed(
        update,
        task,
        clients,
        threat,
        defense=defense,
        auxiliary=auxiliary,
        statistics=_statistics(models, clients, defense) if threat.statistics_known else None,
        sent=_sent_weights(task, update, defense),
        history=() if after is None else _remembered(after),
    )
    number = 1 if after is None else after.number + 1
    return Round(observation, truth, update, defense, number, states)


def _sent_models(
    attack: Attack,
    task: Task,
    defense: Chain,
    threat: ThreatModel,
) -> list[Task]:
    """What a malicious server sends to each client, under the local plan that it knows of."""
    if not threat.defense_known:
        return attack.plant_each(task, defense.cohort_size)
    # What a client draws changes no plan.
    plan = defense.prepare(task, SecureSource()).plan
    if plan == task.plan:
        return attack.plant_each(task, defense.cohort_size)
    sent = attack.plant_each(replace(task, plan=plan), defense.cohort_size)
    return [replace(one, plan=task.plan) for one in sent]


def _sent_weights(
    task: Task,
    update: Update,
    defense: Chain,
) -> Tensor | None:
    """(1, P) the weights that the client sent, zero where withheld; None if it sends a change.

    A client that keeps weights of its own sends the others, as in PriPrune's protocol: exact zeros
    and the values of earlier rounds are visible in them.
    """
    keeps = any(link.changes_start for link in defense.links)
    trains_otherwise = any(link.changes_training for link in defense.links)
    if not keeps or trains_otherwise or len(update.rows) > 1 or defense.cohort_size > 1:
        return None
    weights = task.parameters - task.plan.learning_rate * update.rows
    return weights if update.mask is None else weights * update.mask


def _remembered(after: Round) -> tuple[Observation, ...]:
    """What the server saw up to and including a round, the oldest first."""
    last = after.observation
    # Each observation is kept once, and not again in the history of every later one.
    return (*last.history, replace(last, history=()))


def observed(
    update: Update,
    task: Task,
    clients: Sequence[Batch],
    threat: ThreatModel,
    *,
    defense: Chain,
    **more: Any,
) -> tuple[Observation, Batch]:
    """What an attacker sees of a release under a threat model, and separately the truth.

    `update` has its true noise distribution and mask. `clients` are the batches behind it.
    `defense` is resolved. `more` are other fields of the observation.
    """
    inputs = [b.inputs for b in clients]
    labels = [b.labels for b in clients]
    truth = Batch(torch.cat(inputs), torch.cat(labels))
    observation = Observation(
        update=update.seen(defense_known=threat.defense_known),
        task=task,
        cohort=tuple(batch.size for batch in clients),
        input_shape=tuple(truth.inputs.shape[1:]),
        threat=threat,
        labels=truth.labels.clone() if threat.labels_known else None,
        defense=defense if threat.defense_known else None,
        known=_known(task, truth.inputs, threat),
        **more,
    )
    return observation, truth


def _known(task: Task, inputs: Tensor, threat: ThreatModel) -> KnownValues | None:
    """The parts of the batch that the attacker has from elsewhere."""
    if not threat.known:
        return None
    domain = task.domain or of_shape(inputs.shape[1:], task.input_range)
    parts = known_parts(domain, threat.known)
    return KnownValues(parts, parts.values(inputs))


def _statistics(
    models: Sequence[Task],
    clients: Sequence[Batch],
    defense: Chain,
) -> dict[str, Statistics]:
    """The mean over clients of their batches' statistics."""
    odd = [link for link in defense.links if link.replaces_examples or link.changes_training]
    if odd:
        raise NotApplicable(
            f"{odd[0]!r} changes what the client trains on, and with it the statistics that it "
            "leaks: leave statistics_known out"
        )
    with torch.no_grad():
        pairs = zip(models, clients, strict=True)
        each = [batch_statistics(task, batch.inputs) for task, batch in pairs]
    means = {}
    for name in each[0]:
        mean, variance = zip(*(client[name] for client in each), strict=True)
        means[name] = (torch.stack(mean).mean(0), torch.stack(variance).mean(0))
    return means


def _as_chain(defense: Defense) -> Chain:
    return defense if isinstance(defense, Chain) else chain(defense)
