"""One client's answer to one train message, defended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from leakbound import check
from leakbound.defenses.base import Chain, Defense
from leakbound.flower.arrays import NotFinite, only_arrays, read, write
from leakbound.flower.setup import Setup, refuse_thawed, settings
from leakbound.flower.state import load, save
from leakbound.flower.tap import Tap
from leakbound.protocol import resolve, step
from leakbound.random import Source, stream
from leakbound.tensors import flat
from leakbound.types import (
    Batch,
    ClientContext,
    Gaussian,
    Laplace,
    LocalPlan,
    Task,
    Unit,
    Update,
)

MARK = "leakbound-experiment-only"
"""The metric of a reply whose noise came from a seed."""
LEAST_STEPS = 8
"""Noise has to reach over so many steps of the floating-point grid of a weight."""
SENT, ANSWERED = "the server's message", "the reply of the train function"


class PrivateError(ValueError):
    """An error whose text may tell of the client's data: it stays in the client's log."""


@dataclass
class Turn:
    """A client between the server's message and its reply.

    Attributes:
        defense: as it was given; what is public is filled in when the reply is there.
        key: of the message's array record, which is `record`.
        like: the model's state dict, for names, shapes and types.
        task: at the server's weights.
        own: at the weights that the client starts from.
        kept: where the state is kept in `context.state`.
        state: what the defense kept.
        previous: what was resolved in an earlier round.
        anew: the link for which the update is computed anew, None where training is edited.
        ready: the defense with all filled in; `released`: what it made, with its law; `rate`: of
            the local steps, by which the row becomes weights.
    """

    defense: Chain
    setup: Setup
    context: Context
    source: Source
    key: str
    record: ArrayRecord
    like: dict[str, Tensor]
    task: Task
    own: Task
    kept: str
    state: Any = None
    previous: Chain | None = None
    anew: Defense | None = None
    ready: Chain | None = None
    released: Update | None = None
    rate: float = 1.0

    @staticmethod
    def begin(
        defense: Chain,
        setup: Setup,
        message: Message,
        context: Context,
        source: Source,
        *,
        depth: int,
        anew: Defense | None,
    ) -> Turn:
        """Read and check the message and what was kept; decide which weights to start from."""
        key, record = only_arrays(message.content, SENT)
        like = setup.state()
        named = read(record, like, what=SENT, most_bytes=setup.most_bytes)
        task = setup.task(named, settings(message, context))
        record = ArrayRecord(dict(record))  # the train function may empty the message's
        kept = f"leakbound.defense.{depth}"
        turn = Turn(defense, setup, context, source, key, record, like, task, task, kept, anew=anew)
        stored = load(context.state, kept, turn._owner(), defense)
        if stored is not None:
            turn.state, links = stored
            turn.previous = None if links is None else _filled(links, defense)
        if anew is None:
            state = defense.init(task) if turn.state is None else turn.state
            turn.own, turn.state = defense.begin(task, state, source)
        return turn

    def train(self, message: Message, call_next: ClientAppCallable) -> Message:
        """The client's own training, from the weights that the defense lets it start from."""
        if self.own is self.task:
            return call_next(message, self.context)
        start = self.own.unflatten(self.own.parameters)
        given = message.content[self.key]
        message.content[self.key] = write(start, self.record, self.like, SENT)
        try:
            return call_next(message, self.context)
        finally:
            message.content[self.key] = given

    def answer(self, reply: Message, heard: Tap) -> None:
        """Put the defended weights into the reply, and keep what the next round needs."""
        key, record = only_arrays(reply.content, ANSWERED)
        if odd := set(record) ^ set(self.record):
            raise ValueError(
                f"the array {min(odd)!r} is not both in {SENT} and in {ANSWERED}; send back what "
                "was sent"
            )
        wants = any(type(link).resolve is not Defense.resolve for link in self.defense.links)
        examples = _examples(reply, heard) if wants else 1
        ready = resolve(self.defense, self.task, examples, self.previous)
        after = (
            self._edited(ready, record, heard) if self.anew is None else self._anew(ready, heard)
        )
        if not bool(torch.isfinite(after).all()):
            raise PrivateError(
                "the defended weights are not finite: is the learning rate too large?"
            )
        self._check_grid()
        fresh = self.task.unflatten(after)
        reply.content[key] = write(fresh, self.record, self.like, SENT)
        self._keep(ready)

    def _anew(self, ready: Chain, heard: Tap) -> Tensor:
        """The weights after the library's own client trained on the tapped batch."""
        batch = _batch(heard, self.task.plan, repr(self.anew), self.defense.starts)
        plan = self.task.plan
        if any(link.changes_training for link in ready.links):
            plan = ready.prepare(self.task, stream(0, "plan")).plan  # of which nothing is drawn
        try:
            update, self.state = step(self.task, batch, ready, self.source, self.state)
        except ValueError as error:
            raise PrivateError(str(error)) from error
        self.ready, self.released, self.rate = ready, update, plan.learning_rate
        return self.task.parameters - self.rate * update.rows[0]

    def _edited(self, ready: Chain, record: ArrayRecord, heard: Tap) -> Tensor:
        """The weights after the defense changed what the client's own training made."""
        rate, most = self.task.plan.learning_rate, self.setup.most_bytes
        try:
            named = read(record, self.like, what=ANSWERED, most_bytes=most)
        except NotFinite as error:  # which numbers overflow tells of the data
            raise PrivateError(str(error)) from error
        refuse_thawed(self.task, self.task.frozen, named)
        after = flat(self.task, named, what=ANSWERED)
        rows = ((self.own.parameters - after) / rate)[None]
        reads = next((link for link in ready.links if link.uses_context), None)
        batch = None
        if reads is not None:
            batch = _batch(heard, self.task.plan, repr(reads), Unit.CLIENT)
        try:
            context = None if batch is None else _context(self.own, batch)
            update = Update(rows, Unit.CLIENT, (max(1, heard.examples),))
            update, self.state = ready.transform(update, self.state, context, self.source)
        except ValueError as error:
            raise PrivateError(str(error)) from error
        self.ready, self.released, self.rate = ready, update, rate
        return self.task.parameters - rate * update.rows[0]

    def _check_grid(self) -> None:
        """Noise that is finer than the numbers in which weights are sent would not be there.

        Raises:
            ValueError: naming the noise, the learning rate and the type.
        """
        law = None if self.released is None else self.released.law
        if not isinstance(law, Gaussian | Laplace):
            return
        spread = law.scale if isinstance(law, Laplace) else torch.as_tensor(law.variance).sqrt()
        kinds = {np.dtype(array.dtype) for array in self.record.values() if array.dtype}
        coarse = max((float(np.finfo(k).eps) for k in kinds if k.kind == "f"), default=2.0**-23)
        step = coarse * self.task.parameters.abs().double()
        moved = self.rate * torch.as_tensor(spread).double().cpu().expand(1, len(step))[0]
        lost = (moved > 0) & (moved < LEAST_STEPS * step)
        if bool(lost.any()):
            text = (
                f"noise of standard deviation {float(moved[lost][0]):.3g} in weights (learning "
                f"rate {self.rate:g}) is lost in the rounding of weights of size "
                f"{float(self.task.parameters[lost][0].abs()):.3g}; give more noise, a larger "
                "learning rate, or send float64"
            )
            raise PrivateError(text) if law.private else ValueError(text)

    def _keep(self, ready: Chain) -> None:
        """Save the state, and what was resolved where it is to serve for several rounds."""
        links = None
        if any(getattr(link, "refresh", 1) > 1 for link in self.defense.links):
            pairs = zip(ready.links, self.defense.links, strict=True)
            links = tuple(None if new is old else new for new, old in pairs)
        if links is not None or any(part is not None for part in self.state or ()):
            save(self.context.state, self.kept, self._owner(), (self.state, links))

    def _owner(self) -> str:
        return f"{self.defense!r} for a model of {len(self.task.parameters)} weights"


def mark(reply: Message) -> None:
    """Say in the reply's metrics that its noise came from a seed."""
    records = reply.content.metric_records
    if records:
        next(iter(records.values()))[MARK] = 1
    else:
        reply.content["leakbound"] = MetricRecord({MARK: 1})


def _filled(links: tuple[Defense | None, ...], defense: Chain) -> Chain:
    pairs = zip(links, defense.links, strict=True)
    return Chain(tuple(own if old is None else old for old, own in pairs))


def _examples(reply: Message, heard: Tap) -> int:
    """How many examples the client trained on: as tapped, else as its reply says."""
    if heard.examples:
        return heard.examples
    for record in reply.content.metric_records.values():
        for key in ("num-examples", "num_examples"):
            count = record.get(key)
            if isinstance(count, int) and count > 0:
                return count
    raise ValueError(
        "how many examples the client trained on is not known, and the defense is tuned on it; "
        "call leakbound.flower.tap(inputs, labels) in the train loop, or send num-examples"
    )


def _batch(heard: Tap, plan: LocalPlan, who: str, unit: Unit) -> Batch:
    """What the client trained on, as one batch that the plan cuts in the same order.

    Raises:
        ValueError: nothing was tapped, or not what the plan says.
    """
    found = heard.batches
    if not found:
        raise ValueError(
            f"{who} reads the client's batch, and the train function showed none; call "
            "leakbound.flower.tap(inputs, labels) in it, in the thread that the mod runs in"
        )
    sizes = [batch.size for batch in found]
    if unit is Unit.EXAMPLE and (len(found) > 1 or plan.steps > 1):
        raise ValueError(
            f"{who} needs every example's gradient of one local step, and the train function took "
            f"{max(len(found), plan.steps)}; take a defense that edits the whole update, such as "
            "chain(Clip(5.0), GaussianNoise(0.02)), train one step on one batch of all examples, "
            "or use leakbound.opacus for DP-SGD in every local step"
        )
    size = plan.batch_size
    cut = len(found) == plan.steps and {*sizes[:-1], size} == {size} and sizes[-1] <= (size or 0)
    if len(found) > 1 and not cut:
        raise ValueError(
            f"{who} reads what the client trained on, and the train function showed other batches "
            f"than the Setup says (steps={plan.steps}, batch_size={size}); tap one batch, or give "
            "Setup the steps and the batch size"
        )
    return Batch(
        torch.cat([batch.inputs for batch in found]).cpu(),
        torch.cat([batch.labels for batch in found]).cpu(),
    )


def _context(task: Task, batch: Batch) -> ClientContext:
    check.finite("inputs", batch.inputs)
    check.within("inputs", batch.inputs, task.input_range)
    check.labels(batch.labels, task.label_range)
    return ClientContext(task, batch)
