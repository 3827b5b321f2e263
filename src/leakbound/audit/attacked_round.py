"""Which round of a training an audit attacks: the first in which the defense has an effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from leakbound._util import optimizers
from leakbound.attacks import Attack
from leakbound.core import Batch, Guarantee, Refused, Server, Task, ThreatModel
from leakbound.defenses import Chain
from leakbound.defenses.base import State
from leakbound.protocol import Round, play, step
from leakbound.pruning import Pruning, client_task, next_task, turn_of
from leakbound.randomness import Source

MOST_ROUNDS = 100
"""How long an audit waits for a defense to have an effect."""
RATE = 0.002
"""Learning rate of the server's Adam in the rounds before the attacked one, as in `[utility]`."""
OTHERS = 3
"""How many other clients train in these rounds."""
Others = Callable[[int], Sequence[Batch]]
"""The batches of the other clients in a round, by its number."""


def attacked_round(
    task: Task,
    clients: Sequence[Batch],
    defense: Chain,
    sources: Sequence[torch.Generator],
    *,
    number: int | None = None,
    others: Others = lambda number: (),
    other_sources: Sequence[Source] = (),
    threat: ThreatModel,
    attack: Attack | None = None,
    auxiliary: Batch | None = None,
    scheme: Pruning | None = None,
) -> Round:
    """Play a training up to the attacked round, and return that round as `protocol.play` does.

    Before it, the clients hold the same batches in every round, and `others` hold new ones; the
    server takes a step of Adam along the mean of what all send. The server of these rounds is
    honest. With a defense that sums updates there are no other clients: the sum has all.

    `number` of the attacked round is 1 for the first; None is the first in which the defense has an
    effect on every client. `sources`, `threat`, `attack` and `auxiliary` are those of `play`, and
    `other_sources` has one source for each of the other clients. A `scheme` changes the mask of a
    pruned task where it adapts.

    Raises:
        Refused: the defense has no effect in the first `MOST_ROUNDS` rounds, or does not cover what
            the scheme makes clients send.
    """
    check_covers(defense, scheme)
    wanted = 1 if number is None and not defense.starts_late else number
    honest = replace(threat, server=Server.HONEST)
    sums = bool(defense.sides[1].links)
    weights = task.parameters.clone()
    server = optimizers.Adam([weights], lr=RATE)
    states: list[State] = [None] * len(other_sources)
    last: Round | None = None

    def played(threat: ThreatModel, attack: Attack | None) -> Round:
        return play(
            # Nothing that adapts runs on the sum of several clients.
            client_task(scheme, task, clients[0], at),
            clients,
            defense,
            sources,
            threat=threat,
            attack=attack,
            auxiliary=auxiliary,
            after=last,
        )

    for at in range(1, (wanted or MOST_ROUNDS) + 1):
        if at == wanted:
            return played(threat, attack)
        drawn = [source.get_state() for source in sources]
        now = played(honest, None)
        if wanted is None and now.acts:
            # It is the one: play it again, from the same draws, as the attacker wants it.
            for source, state in zip(sources, drawn, strict=True):
                source.set_state(state)
            return played(threat, attack)
        rows = [now.update.rows.sum(0)]
        turns = [turn_of(scheme, now.observation.task, clients[0], now.update, at)]
        for i, batch in enumerate([] if sums else others(at)):
            own = client_task(scheme, task, batch, at)
            sent, states[i] = step(own, batch, now.defense, other_sources[i], states[i])
            rows.append(sent.rows.sum(0))
            turns.append(turn_of(scheme, own, batch, sent, at))
        # The first row is the sum of all attacked clients, each other row is one client's.
        weights.grad = torch.stack(rows).sum(0) / (len(rows) - 1 + len(clients))
        server.step()
        task = next_task(scheme, task, weights.detach().clone(), turns, at)
        # A weight that the scheme restores starts at 0, wherever the server's steps were.
        weights = weights.copy_(task.parameters)
        last = now
    raise Refused(
        f"{defense!r} has no effect in the first {MOST_ROUNDS} rounds of a training, so none of "
        "them is attacked; name the round (rounds = N), or give other settings"
    )


def check_covers(defense: Chain, scheme: Pruning | None) -> None:
    """Reject a defense with a guarantee if clients send more than the update that it protects."""
    protects = bool(defense.sides[1].links) or defense.guarantee is not Guarantee.NONE
    if scheme is not None and scheme.adapts and protects:
        raise Refused(
            f"clients of {scheme!r} send masks or reports with their update, which {defense!r} "
            "does not cover; give a scheme that chooses its mask once"
        )
