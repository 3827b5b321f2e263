"""The leak meter as a Flower client mod: judges what is about to leave, on the client."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from leakbound import check
from leakbound._util import files
from leakbound.assess.record import UNDECIDED
from leakbound.defenses.base import Chain, Defense, chain
from leakbound.flower.arrays import only_arrays, read
from leakbound.flower.compat import error_reply
from leakbound.flower.seals import Inside, looking, unbroken
from leakbound.flower.setup import Setup, refuse_thawed, settings
from leakbound.flower.tap import Tap, listening
from leakbound.inspection import Finding, inspect
from leakbound.meter import Decision, Policy, Reading, measure
from leakbound.meter.reading import EXPERIMENT
from leakbound.protocol import resolve
from leakbound.random import stream
from leakbound.tensors import flat
from leakbound.types import Batch, Exact, Guarantee, Law, Task, Unit, Unknown, Update

REFUSED = "refused by the client's policy"
"""All that a refusal says."""
BROKEN = "the leak meter could not judge the update; the client's log says why"
ROUNDS = "leakbound.meter"
NOT_MEASURED = "the update could not be measured, and no bound is given"
logger = logging.getLogger("leakbound.meter")


class LeakMeter:
    """Tells a client what its update gives away, and lets it refuse; the outermost mod.

    On a `train` message it inspects the model that came before anything is trained, lets the mods
    inside and the train function run, attacks and bounds the very weights that are about to leave,
    and sends, warns or refuses by the policy. What it measures goes to the Python log
    "leakbound.meter" (warnings and refusals at WARNING, the rest at INFO) and, where a path is
    given, to a file on the client: not into the reply.

    A refusal is an error reply that says `REFUSED`. That a client refuses is itself decided from
    its data (unless the model's marks were the reason) and tells something of it; so is
    whether it stays silent under `on_refuse="send nothing useful"`, which a server sees that looks
    at single replies, as weights that did not change. Without public images in the setup, the
    model is inspected again after training, on random images of the shape that was tapped: of the
    client's data that decision knows the shape alone.

    A measurement that fails under differential privacy counts as undecided, since a server could
    make it fail on some data and not on other. Without, `BROKEN` is answered, or what the policy's
    `on_refuse` says.

    What a `DefenseMod` inside did, with the law of its noise, is known to the meter. The train
    function has to call `leakbound.flower.tap(inputs, labels)`, once a local step.

    Args:
        setup: what is trained, and how.
        policy: the client's rules.
        release: put `Reading.release()` into the reply's metrics (into the text of a refusal):
            knowingly given away.
        defense: what the train function itself does to the update, such as DP-SGD by Opacus; taken
            at your word. None where mods do all.
        every: measure in every so many rounds; the model is inspected in each.
        path: a JSON Lines file on the client that gets every reading, readable by its owner only.
            A file that is there must be one of such readings.
        log: where to write.

    Raises:
        ValueError: `path` is a file that leakbound did not write.

    Example:
        >>> from torch import nn
        >>> setup = Setup(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
        >>> LeakMeter(setup, Policy(on_leak="refuse")).policy.threshold_db
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
        log: logging.Logger = logger,
    ) -> None:
        check.count(every=every)
        self.setup, self.policy, self.release = setup, policy or Policy(), release
        self.defense = None if defense is None else chain(defense)
        self.every, self.log = every, log
        self.path = None if path is None else Path(path)
        if self.path is not None:
            files.check(self.path, key="client")

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Inspect, let the client train, measure, and send or refuse."""
        if message.metadata.message_type.split(".")[0] != "train":
            return call_next(message, context)
        try:
            record, task = self._sent(message, context)
            findings = inspect(task)
            before = self.policy.before(findings)
            number = _count(context)
        except Exception as error:
            return self._broken(message, error)
        if before.refused and self.policy.on_refuse == "error":
            self._tell(before, context, None, number)
            return self._refusal(message, None)
        with looking(adds=0) as inside, listening() as heard:
            reply = call_next(message, context)
        if reply.has_error():
            return reply
        try:
            if self.setup.public is None and heard.batches:
                findings = inspect(task, input_shape=tuple(heard.batches[0].inputs.shape[1:]))
                before = self.policy.before(findings)
            reading, decision = None, before
            if not before.refused and number % self.every == 0:
                given = self._given(task, record, reply, heard, inside, findings)
                reading, decision = self._measured(given)
            self._tell(decision, context, reading, number)
            return self._answer(message, reply, record, decision, reading)
        except Exception as error:
            broken = self._broken(message, error)
            quiet = self.policy.on_refuse != "error" and len(reply.content.array_records) == 1
            return _unchanged(reply, record) if quiet else broken

    def __repr__(self) -> str:
        return f"LeakMeter({self.policy!r})"

    def _sent(self, message: Message, context: Context) -> tuple[ArrayRecord, Task]:
        """What the server sent, copied (the train function may empty it), and as a task."""
        _, record = only_arrays(message.content, "the server's message")
        most = self.setup.most_bytes
        named = read(record, self.setup.state(), what="the server's message", most_bytes=most)
        return ArrayRecord(dict(record)), self.setup.task(named, settings(message, context))

    def _measured(self, given: dict[str, Any]) -> tuple[Reading | None, Decision]:
        """The reading of the weights in the reply; None where it fails on a private update.

        An error that the data decide would tell of them what the defense's noise does not cover.
        """
        try:
            reading = measure(**given)
        except Exception as error:
            if given["defense"].guarantee is not Guarantee.DIFFERENTIAL_PRIVACY:
                raise
            self.log.error("not measured: %s: %s", type(error).__name__, error)
            return None, self.policy.decide(UNDECIDED, given["findings"], NOT_MEASURED)
        return reading, reading.decision

    def _given(
        self,
        task: Task,
        record: ArrayRecord,
        reply: Message,
        heard: Tap,
        inside: Inside,
        findings: Sequence[Finding],
    ) -> dict[str, Any]:
        """What is measured, and how it was made."""
        batch = _batch(heard)
        within = unbroken(inside, reply, repr(self))
        last = inside.seals[-1] if inside.seals else None
        defense, law = within, _law(within)
        if last is not None and last.ready is not None:
            defense = last.ready
        if defense is None and self.defense is not None:
            defense = resolve(self.defense, task, batch.size)
            law = Unknown("the train function makes the noise, and the meter does not see its law")
        defense = defense or chain()
        rows, buffers = self._row(task, defense, record, reply)
        update = Update(rows, Unit.CLIENT, (batch.size,), law)
        if last is not None and last.released is not None:
            update = replace(last.released, rows=rows)
        return {
            "task": task,
            "update": update,
            "batch": batch,
            "defense": defense,
            "policy": self.policy,
            "source": stream(0, "meter"),
            "findings": findings,
            "buffers": buffers,
            "seeded": any(one.seeded for one in inside.seals),
        }

    def _row(
        self, task: Task, defense: Chain, record: ArrayRecord, reply: Message
    ) -> tuple[Tensor, bool]:
        """What leaves in gradient units (1, P), and whether buffers leave that changed."""
        what = "the reply"
        _, answered = only_arrays(reply.content, what)
        like, most = self.setup.state(), self.setup.most_bytes
        after = read(answered, like, what=what, most_bytes=most)
        sent = read(record, like, what="the server's message", most_bytes=most)
        plan = task.plan
        if any(link.changes_training for link in defense.links):
            plan = defense.prepare(task, stream(0, "plan")).plan  # of which nothing is drawn
        row = (task.parameters - flat(task, after, what=what)) / plan.learning_rate
        refuse_thawed(task, sent, after)
        others = set(after) & set(sent) - task.names
        buffers = any(not torch.equal(after[name], sent[name]) for name in others)
        return row[None], buffers

    def _answer(
        self,
        message: Message,
        reply: Message,
        record: ArrayRecord,
        decision: Decision,
        reading: Reading | None,
    ) -> Message:
        """The reply itself, or what the policy sends in its place."""
        if decision.refused and self.policy.on_refuse == "error":
            return self._refusal(message, reading)
        if decision.refused:
            reply = _unchanged(reply, record)
        if self.release and (reading is not None or decision.refused):
            _add(reply, _released(reading))
        return reply

    def _refusal(self, message: Message, reading: Reading | None) -> Message:
        if not self.release:
            return error_reply(message, REFUSED)
        told = json.dumps(_released(reading), sort_keys=True)
        return error_reply(message, f"{REFUSED}; released knowingly: {told}")

    def _broken(self, message: Message, error: Exception) -> Message:
        """What cannot be judged is not sent; texts that may tell of the data stay here."""
        self.log.error("%s: %s", type(error).__name__, error)
        return error_reply(message, BROKEN)

    def _tell(
        self, decision: Decision, context: Context, reading: Reading | None, number: int
    ) -> None:
        """The client's own log and file."""
        who = context.node_config.get("partition-id", context.node_id)
        verdict = "not measured" if reading is None else reading.verdict
        notes = () if reading is None else reading.notes
        told_too = tuple(note for note in notes if note == EXPERIMENT)
        words = "; ".join((*decision.reasons, *told_too)) or "nothing to say"
        level = logging.INFO if decision.action == "send" else logging.WARNING
        self.log.log(level, "client %s: %s (%s): %s", who, decision.action, verdict, words)
        if self.path is not None:
            told: dict[str, Any] = {"action": decision.action, "reasons": list(decision.reasons)}
            told |= {} if reading is None else reading.record()
            told |= {"schema": 1, "client": str(who), "round": number + 1}
            files.append(self.path, told, "client")


def _unchanged(reply: Message, record: ArrayRecord) -> Message:
    """The reply with the weights that came in the place of those that were trained."""
    key, _ = only_arrays(reply.content, "the reply")
    reply.content[key] = record
    return reply


def _law(within: Chain | None) -> Law:
    """Of several mods' work no law is known; of none's it is what the train function made."""
    return Exact() if within is None else Unknown("several mods made the update")


def _batch(heard: Tap) -> Batch:
    """All that was trained on, every example once.

    Raises:
        ValueError: nothing was tapped.
    """
    if not heard.batches:
        raise ValueError(
            "the train function showed no batch, and nothing can be judged; call "
            "leakbound.flower.tap(inputs, labels) in it, in the thread that the mods run in"
        )
    inputs = torch.cat([batch.inputs for batch in heard.batches]).cpu()
    labels = torch.cat([batch.labels for batch in heard.batches]).cpu()
    first: dict[bytes, int] = {}
    for i, image in enumerate(inputs):
        first.setdefault(image.contiguous().numpy().tobytes(), i)
    index = torch.tensor(sorted(first.values()))
    return Batch(inputs[index], labels[index])


def _count(context: Context) -> int:
    """How many train messages this node has answered before; kept on the node."""
    before = context.state.config_records.get(ROUNDS)
    number = 0 if before is None else int(str(before["rounds"]))
    context.state[ROUNDS] = ConfigRecord({"rounds": number + 1})
    return number


def _released(reading: Reading | None) -> dict[str, float]:
    """What a client releases; of a model that it refused before training, that it did."""
    if reading is None:
        return {"released-best-db": 0.0, "released-exposed": 0.0, "released-refused": 1.0}
    return reading.release()


def _add(reply: Message, numbers: dict[str, float]) -> None:
    records = reply.content.metric_records
    if records:
        next(iter(records.values())).update(numbers)
    else:
        reply.content["leakbound"] = MetricRecord(dict(numbers))
