"""The leak meter as a Flower client mod: evaluates an update on the client before it leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from leakbound import check
from leakbound.client_side.batches import Tapped, distinct, listening
from leakbound.client_side.metered import BROKEN, ClientMeter, logger
from leakbound.client_side.round import row_of
from leakbound.client_side.setup import Setup
from leakbound.core import Exact, Law, Task, Unit, Unknown, Update
from leakbound.defenses.base import Defense, NoDefense, chain
from leakbound.flower import messages
from leakbound.flower.compat import error_reply
from leakbound.flower.messages import REPLY, SENT, only_arrays, read, settings
from leakbound.flower.nesting import Inside, collecting, unbroken
from leakbound.inspection import LayerFinding, inspect
from leakbound.meter import Decision, Policy, Reading
from leakbound.protocol import resolve
from leakbound.randomness import stream

ROUNDS = "leakbound.meter"


class LeakMeter:
    """Report to a client what its update leaks, and let it refuse; the outermost mod.

    On a `train` message it inspects the received model before training and lets the inner mods and
    the train function run. It then attacks and bounds the weights that are about to leave, and
    sends, warns or refuses by the policy. Its measurements go to the Python log "leakbound.meter"
    and, if a path is given, to a file on the client, but not into the reply. The train function has
    to call `tap(inputs, labels)` once per local step.

    A refusal depends on the client's data (unless the model's marks were the reason) and so leaks
    something; so does silence under `on_refuse="send nothing useful"`. Without public images in the
    setup, the model is inspected again after training, on random images of the tapped shape. A
    measurement that fails under differential privacy counts as undecided, since a server could make
    it fail on some data only. Without differential privacy, the meter then refuses as the policy's
    `on_refuse` says.

    Args:
        setup: the model, the loss and the step size.
        policy: the client's rules.
        release: put `Reading.release()` into the reply's metrics (into the text of a refusal).
        defense: what the train function itself does to the update, such as DP-SGD by Opacus; not
            verified. None if mods do everything.
        every: measure the first `train` message, and every so many after it; the model is inspected
            in each round.
        path: a JSON Lines file on the client for every reading; only its owner can read it.

    Example:
        >>> from torch import nn
        >>> setup = Setup(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
        >>> LeakMeter(setup, Policy(on_leak="refuse")).meter.policy.psnr
        20.0
    """

    def __init__(
        self,
        setup: Setup,
        policy: Policy | None = None,
        *,
        release: bool = False,
        defense: Defense | None = None,
        every: int = 1,
        path: Path | str | None = None,
    ) -> None:
        check.count(every=every)
        self.setup = setup
        self.meter = ClientMeter(policy or Policy(), None if path is None else Path(path), release)
        self.defense = None if defense is None else chain(defense)
        self.every = every

    def __call__(
        self,
        message: Message,
        context: Context,
        call_next: ClientAppCallable,
    ) -> Message:
        if not messages.is_train(message):
            return call_next(message, context)
        policy = self.meter.policy
        who = messages.client_of(context)
        try:
            record = ArrayRecord(dict(only_arrays(message.content, SENT)[1]))  # it may be emptied
            sent = self._read(record, SENT)
            task = self.setup.task(sent, settings(message, context))
            findings = inspect(task)
            decision = policy.before(findings)
            number = _count(context)
        except Exception as error:
            return self._broken(message, error)
        reading: Reading | None = None
        # refused before training: an answer that no data of the client decides
        if decision.refused and policy.on_refuse == "error":
            self.meter.keep(who, number + 1, decision, reading)
            return error_reply(message, self.meter.refusal(decision, reading))
        with collecting(defends=False) as inside, listening() as tapped:
            reply = call_next(message, context)
        if reply.has_error():
            return reply
        try:
            # some marks show only at the shape of an input
            if self.setup.public is None and tapped:
                findings = inspect(task, input_shape=tuple(tapped[0].inputs.shape[1:]))
                decision = policy.before(findings)
            if not decision.refused and number % self.every == 0:
                reading, decision = self._measured(task, sent, reply, tapped, inside, findings)
            self.meter.keep(who, number + 1, decision, reading)
            if decision.refused and policy.on_refuse == "error":
                return error_reply(message, self.meter.refusal(decision, reading))
            if decision.refused:
                reply = _unchanged(reply, record)
            if numbers := self.meter.released(decision, reading):
                messages.add_metrics(reply, numbers)
            return reply
        except Exception as error:
            broken = self._broken(message, error)
            quiet = policy.on_refuse != "error" and len(reply.content.array_records) == 1
            return _unchanged(reply, record) if quiet else broken

    def __repr__(self) -> str:
        return f"LeakMeter({self.meter.policy!r})"

    def _read(self, record: ArrayRecord, what: str) -> dict[str, Tensor]:
        return read(
            record,
            self.setup.state(),
            what=what,
            most_bytes=self.setup.most_bytes,
        )

    def _measured(
        self,
        task: Task,
        sent: Mapping[str, Tensor],
        reply: Message,
        tapped: Tapped,
        inside: Inside,
        findings: Sequence[LayerFinding],
    ) -> tuple[Reading | None, Decision]:
        """The reading of the weights in the reply; None if it fails on a private update."""
        batch = distinct(tapped)
        defense = unbroken(inside, reply, repr(self))
        law: Law = Exact() if defense is None else Unknown("several mods made the update")
        made = inside.seals[-1].made if inside.seals else None
        if made is not None:
            defense = made[1]
        if defense is None and self.defense is not None:
            defense = resolve(self.defense, task, batch.size)
            law = Unknown("the train function adds noise of a distribution unknown to the meter")
        defense = defense or NoDefense()
        after = self._read(only_arrays(reply.content, REPLY)[1], REPLY)
        # the learning rate is public: it does not depend on this stream
        rate = defense.prepare(task, stream(0, "plan")).plan.learning_rate
        rows = row_of(task, sent, after, rate)[None]
        others = set(after) & set(sent) - task.names
        update = Update(rows, Unit.CLIENT, (batch.size,), law)
        if made is not None:
            update = replace(made[0], rows=rows)
        return self.meter.measured(
            task,
            update,
            batch,
            defense,
            findings,
            buffers=any(not torch.equal(after[name], sent[name]) for name in others),
            seeded=inside.seeded,
        )

    def _broken(self, message: Message, error: Exception) -> Message:
        """Send nothing that cannot be evaluated; texts that may reveal the data stay here."""
        logger.error("%s: %s", type(error).__name__, error)
        return error_reply(message, BROKEN)


def _unchanged(reply: Message, record: ArrayRecord) -> Message:
    key, _ = only_arrays(reply.content, REPLY)
    reply.content[key] = record
    return reply


def _count(context: Context) -> int:
    """How many train messages this node has answered before; stored on the node."""
    before = context.state.config_records.get(ROUNDS)
    number = 0 if before is None else int(str(before["rounds"]))
    context.state[ROUNDS] = ConfigRecord({"rounds": number + 1})
    return number
