"""Every defense of a client as a Flower client mod, and the valid orders of mods."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from logging import ERROR

import numpy as np
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod

from leakbound.client_side.batches import Tapped, listening
from leakbound.client_side.round import (
    COARSE,
    MARK,
    ClientRound,
    PrivateError,
    check_of_client,
    computes_anew,
    needs_batches,
    public_text,
)
from leakbound.client_side.setup import Setup
from leakbound.core import Guarantee, Update
from leakbound.defenses.base import Chain, Defense, chain
from leakbound.flower import messages
from leakbound.flower.compat import error_reply, flower_name, log
from leakbound.flower.messages import SENT, only_arrays, read, settings, write
from leakbound.flower.meter import LeakMeter
from leakbound.flower.nesting import collecting, given_to, seal, unbroken
from leakbound.randomness import Source, secure, stream

ANSWERED = "the reply of the train function"
CHANGING = frozenset({"LocalDpMod", "adaptiveclipping_mod", "fixedclipping_mod"})
MASKING = frozenset({"secagg_mod", "secaggplus_mod"})
"""Flower's own mods that replace the weights by masked vectors."""


class DefenseMod:
    """Run a defense on what a client sends: the new weights in its reply to `train` messages.

    The defense sees the row (weights before - weights after) / learning rate. Links that change
    what leaves edit the result of your training, after any number of local steps. Links that need
    other examples or another training compute the update again from the batches that your train
    loop gave to `tap`. Links that need every example's gradient (DP-SGD) take one step on one
    tapped batch; docs/flower.md has the table.

    Buffers, such as running statistics of batch norms, would leave without defense: the server's
    are sent back unchanged. Metrics and the number of examples leave unchanged. Errors become error
    replies; texts that could reveal the client's data stay in the client's log.

    Args:
        defense: a chain or a single defense; links on the sum of all clients raise an error.
        setup: the model, the loss and the step size.
        seed: for experiments only: determines every draw, and adds `leakbound-experiment-only` to
            the replies' metrics. By default noise comes from the operating system's entropy.

    Guarantees: those of the defense, for the weights. They take the number of examples as public:
        DP-SGD divides by it, and replies contain it.

    Example:
        >>> from torch import nn
        >>> from leakbound.defenses import Clip, GaussianNoise
        >>> setup = Setup(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
        >>> DefenseMod(chain(Clip(1.0), GaussianNoise(0.1)), setup)
        DefenseMod(Clip(clip_norm=1.0) → GaussianNoise(noise_std=0.1))
    """

    def __init__(
        self,
        defense: Defense,
        setup: Setup,
        *,
        seed: int | None = None,
    ) -> None:
        self.defense = chain(defense)
        self.setup = setup
        self.seed = seed
        check_of_client(self.defense, "a mod; let Flower's SecAgg+ sum them")

    def __call__(
        self,
        message: Message,
        context: Context,
        call_next: ClientAppCallable,
    ) -> Message:
        if not messages.is_train(message):
            return call_next(message, context)
        with collecting(defends=True) as inside:
            try:
                work = _FlowerRound(self, message, context, inside.depth)
            except Exception as error:
                return self._refuse(message, error)
            tapped: Tapped = []
            with ExitStack() as stack:
                # without a need for them, a long training's batches would only fill the memory
                if needs_batches(self.defense):
                    tapped = stack.enter_context(listening())
                reply = work.train(message, call_next)
        if reply.has_error():
            return reply
        try:
            within = unbroken(inside, reply, repr(self))
            whole = self.defense if within is None else combined(within, self.defense)
            weights_digest = given_to(inside, reply)
            update, ready = work.answer(reply, tapped)
            if self.seed is not None:
                messages.add_metrics(reply, {MARK: 1})
            seeded = self.seed is not None or inside.seeded
            made = (update, ready) if whole is self.defense else None
            rate = work.own.task.plan.learning_rate
            # sealed last: an outer mod compares its digest with what arrives
            seal(
                reply,
                whole,
                made=made,
                seeded=seeded,
                given=weights_digest,
                rate=rate,
            )
        except Exception as error:
            return self._refuse(message, error)
        return reply

    def __repr__(self) -> str:
        return f"DefenseMod({self.defense!r})"

    def _refuse(self, message: Message, error: Exception) -> Message:
        log(ERROR, "%r: %s: %s", self, type(error).__name__, error)
        return error_reply(message, f"{self!r}: {public_text(error)}")


def combined(inner: Chain, outer: Chain) -> Chain:
    """Two mods' defenses as one chain; ValueError if one breaks what the other needs."""
    anew = computes_anew(outer)
    if anew is not None:
        raise ValueError(
            f"{anew!r} computes the update again and would undo {inner!r} inside it; put both into "
            "one DefenseMod, as a chain, or that of the former inside (after the other in the list)"
        )
    return chain(inner, outer)


class _FlowerRound:
    """One client's round, from the server's message to the defended reply."""

    def __init__(
        self,
        mod: DefenseMod,
        message: Message,
        context: Context,
        depth: int,
    ) -> None:
        """Read and check the message and the stored state; decide from which weights to start."""
        self.setup = mod.setup
        self.context = context
        config = settings(message, context)
        source: Source = secure()
        if mod.seed is not None:
            number = config.get("server-round", message.metadata.group_id)
            source = stream(mod.seed, "flower", messages.client_of(context), str(number), depth)
        self.key, record = only_arrays(message.content, SENT)
        self.like = self.setup.state()
        sent = read(
            record,
            self.like,
            what=SENT,
            most_bytes=self.setup.most_bytes,
        )
        self.record = ArrayRecord(dict(record))  # the train function may empty the message's
        task = self.setup.task(sent, config)
        self.place = f"leakbound.defense.{depth}"
        self.owner = f"{mod.defense!r} for a model of {len(task.parameters)} weights"
        stored = messages.load(context.state, self.place, self.owner, mod.defense)
        self.own = ClientRound(mod.defense, task, sent, source, stored)

    def train(self, message: Message, call_next: ClientAppCallable) -> Message:
        weights = self.own.start_weights
        if not weights:
            return call_next(message, self.context)
        received = message.content[self.key]
        message.content[self.key] = write(weights, self.record, self.like, SENT)
        try:
            return call_next(message, self.context)
        finally:
            message.content[self.key] = received

    def answer(self, reply: Message, tapped: Tapped) -> tuple[Update, Chain]:
        """Put the defended weights into the reply; return the update and its defense."""
        key, record = only_arrays(reply.content, ANSWERED)
        # an array that only one side has would leave, or stay, without defense
        if odd := set(record) ^ set(self.record):
            raise ValueError(
                f"the array {min(odd)!r} is not in both {SENT} and {ANSWERED}; send back the "
                "arrays that were sent"
            )
        trained = None
        if self.own.anew is None:  # otherwise what was trained is not even read
            trained = read(
                record,
                self.like,
                what=ANSWERED,
                most_bytes=self.setup.most_bytes,
                not_finite=PrivateError,  # the set of numbers that overflow reveals the data
            )
        count = messages.first(messages.COUNTS, reply.content.metric_records.values())
        kinds = {np.dtype(array.dtype) for array in self.record.values() if array.dtype}
        update, ready, new = self.own.answer(
            trained,
            tapped,
            reported=count if isinstance(count, int) and count > 0 else None,
            step=max((float(np.finfo(k).eps) for k in kinds if k.kind == "f"), default=COARSE),
        )
        reply.content[key] = write(new, self.record, self.like, SENT)
        if (kept := self.own.kept(ready)) is not None:
            messages.save(self.context.state, self.place, self.owner, kept)
        return update, ready


def protected(mods: Sequence[Mod]) -> list[Mod]:
    """The mods unchanged, after `check_mods`: for `@app.train(mods=protected([...]))`."""
    check_mods(mods)
    return list(mods)


def check_mods(mods: Sequence[Mod]) -> None:
    """Raise an error if the order of mods undoes a defense or breaks its promise.

    The first mod of a list is the outermost: it sees a reply last. So the defenses of a list apply
    from its end to its start.

    Raises:
        ValueError: names both mods and the correct order.
    """
    _check_meter(mods)
    whole: Chain | None = None
    inner: Mod | None = None
    for mod in reversed(mods):
        name = flower_name(mod)
        if isinstance(mod, DefenseMod):
            _check_inside(mod, flower_name(inner))
            whole = mod.defense if whole is None else combined(whole, mod.defense)
        elif name in CHANGING and whole is not None and whole.guarantee is not Guarantee.NONE:
            raise ValueError(
                f"{name} changes the weights after {whole!r}, so the distribution of its noise no "
                f"longer holds; put it after {inner!r} in the list"
            )
        if isinstance(mod, DefenseMod) or name in CHANGING | MASKING:
            inner = mod


def _check_meter(mods: Sequence[Mod]) -> None:
    """A meter evaluates what leaves: no outer mod changes weights, no inner one masks them."""
    at = next((i for i, mod in enumerate(mods) if isinstance(mod, LeakMeter)), None)
    if at is None:
        return
    for mod in mods[:at]:
        name = flower_name(mod)
        if isinstance(mod, DefenseMod) or name in CHANGING:
            raise ValueError(
                f"{name or repr(mod)} changes the weights after the LeakMeter evaluates them; put "
                "the LeakMeter before it in the list"
            )
    for mod in mods[at + 1 :]:
        if (name := flower_name(mod)) in MASKING:
            raise ValueError(
                f"{name} masks the weights before the LeakMeter sees them; put {name} first in the "
                "list"
            )


def _check_inside(mod: DefenseMod, inner: str | None) -> None:
    if inner in MASKING:
        raise ValueError(
            f"{mod!r} is before {inner} and would change masked vectors; put {inner} first in "
            "the list"
        )
    anew = computes_anew(mod.defense)
    if inner in CHANGING and anew is not None:
        raise ValueError(
            f"{anew!r} computes the update again and would undo {inner} inside it; leave {inner} "
            "out"
        )
