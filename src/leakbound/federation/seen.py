"""What the server saw of a client, as an observation for attacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from leakbound.federation.plan import FederatedRound
from leakbound.types import Batch, Observation, ThreatModel


def observe(
    rounds: Sequence[FederatedRound],
    client: int,
    *,
    threat: ThreatModel | None = None,
    auxiliary: Batch | None = None,
) -> tuple[Observation, Batch]:
    """What the server saw of a client in the last of these rounds, and the truth beside it.

    The rounds before in which the client took part are its `history`. Under secure aggregation the
    server saw the sum of all who took part in the last round, and the truth is all of their images.

    Args:
        rounds: of one federation, in order; the client took part in the last.
        client: its number.
        threat: what the attacker is told.
        auxiliary: public data that the attacker has.

    Raises:
        ValueError: no rounds, or the client took no part in the last.
    """
    if not rounds:
        raise ValueError("rounds is empty; give at least the round that is to be attacked")
    threat, last = threat or ThreatModel(), rounds[-1]
    seen = [r for r in rounds if any(turn.client == client for turn in r.turns)]
    last.turn(client)
    past: tuple[Observation, ...] = ()
    for one in seen:
        observation, truth = _observation(one, client, threat, auxiliary, past)
        past = (*past, replace(observation, history=()))
    return observation, truth


def _observation(
    one: FederatedRound,
    client: int,
    threat: ThreatModel,
    auxiliary: Batch | None,
    past: tuple[Observation, ...],
) -> tuple[Observation, Batch]:
    turns = one.turns if one.total is not None else (one.turn(client),)
    truth = Batch(
        torch.cat([turn.batch.inputs for turn in turns]),
        torch.cat([turn.batch.labels for turn in turns]),
    )
    update = one.total if one.total is not None else turns[0].update
    observation = Observation(
        update=update.seen(defense_known=threat.defense_known),
        task=one.task if one.total is not None else turns[0].task,
        cohort=tuple(turn.batch.size for turn in turns),
        input_shape=tuple(truth.inputs.shape[1:]),
        threat=threat,
        labels=truth.labels.clone() if threat.labels_known else None,
        auxiliary=auxiliary,
        defense=one.defense if threat.defense_known else None,
        sent=turns[0].sent if one.total is None else None,
        history=past,
    )
    return observation, truth
