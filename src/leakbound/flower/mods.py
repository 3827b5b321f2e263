"""Every defense of a client as a Flower client mod, and the valid orders of mods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from logging import ERROR
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod

from leakbound import check, losses
from leakbound.defenses.base import Chain, Defense, chain
from leakbound.flower import messages
from leakbound.flower.compat import error_reply, log
from leakbound.flower.messages import SENT, only_arrays, read, write
from leakbound.flower.meter import LeakMeter
from leakbound.flower.nesting import Tapped, collecting, joined, listening, seal, unbroken
from leakbound.flower.setup import Setup, refuse_thawed, settings
from leakbound.protocol import resolve, step
from leakbound.random import Source, secure, stream
from leakbound.tensors import flat
from leakbound.types import (
    Batch,
    ClientContext,
    Gaussian,
    Guarantee,
    Laplace,
    LocalPlan,
    NotApplicable,
    Unit,
    Update,
)

MARK = "leakbound-experiment-only"
"""The metric of a reply whose noise came from a seed."""
LEAST_STEPS = 8
"""The least noise, in steps of a weight's floating-point grid."""
ANSWERED = "the reply of the train function"
CHANGING = frozenset({"LocalDpMod", "adaptiveclipping_mod", "fixedclipping_mod"})
MASKING = frozenset({"secagg_mod", "secaggplus_mod"})
"""Flower's own mods that replace the weights by masked vectors."""


class PrivateError(ValueError):
    pass


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

    def __init__(self, defense: Defense, setup: Setup, *, seed: int | None = None) -> None:
        self.defense = chain(defense)
        self.setup = setup
        self.seed = seed
        together = self.defense.sides[1].links
        if together:
            raise ValueError(
                f"{together[0]!r} runs on the updates of all clients, not in a mod; let Flower's "
                "SecAgg+ sum them"
            )
        if self.defense.returns(self.defense.starts) is not Unit.CLIENT:
            raise ValueError(
                f"{self.defense!r} leaves one row per example, but a client sends one row; put "
                "Mean() after it"
            )

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if not messages.is_train(message):
            return call_next(message, context)
        with collecting(defends=True) as inside:
            try:
                work = _DefendedRound(self, message, context, inside.depth)
            except Exception as error:
                return self._refuse(message, error)
            # without a need for them, a long training's batches would only fill the memory
            with listening() if _needs_batches(self.defense) else nullcontext([]) as tapped:
                reply = work.train(message, call_next)
        if reply.has_error():
            return reply
        try:
            within = unbroken(inside, reply, repr(self))
            whole = self.defense if within is None else combined(within, self.defense)
            update, ready = work.answer(reply, tapped)
            if self.seed is not None:
                messages.add_metrics(reply, {MARK: 1})
            seeded = self.seed is not None or inside.seeded
            made = (update, ready) if whole is self.defense else None
            seal(reply, whole, made, seeded=seeded)
        except Exception as error:
            return self._refuse(message, error)
        return reply

    def __repr__(self) -> str:
        return f"DefenseMod({self.defense!r})"

    def _refuse(self, message: Message, error: Exception) -> Message:
        log(ERROR, "%r: %s: %s", self, type(error).__name__, error)
        text = str(error)
        if isinstance(error, PrivateError) or not isinstance(error, ValueError | NotApplicable):
            text = "the update could not be defended; the client's log says why"
        return error_reply(message, f"{self!r}: {text}")


def computes_anew(defense: Chain) -> Defense | None:
    """The link for which the update is computed again; None if training is only edited."""
    if defense.starts is Unit.EXAMPLE:
        return next(link for link in defense.links if Unit.CLIENT not in link.accepts)
    return next((k for k in defense.links if k.replaces_examples or k.changes_training), None)


def combined(inner: Chain, outer: Chain) -> Chain:
    """Two mods' defenses as one chain; ValueError if one breaks what the other needs."""
    anew = computes_anew(outer)
    if anew is not None:
        raise ValueError(
            f"{anew!r} computes the update again and would undo {inner!r} inside it; put both into "
            "one DefenseMod, as a chain, or that of the former inside (after the other in the list)"
        )
    return chain(inner, outer)


def _is_tuned(defense: Chain) -> bool:
    return any(type(link).resolve is not Defense.resolve for link in defense.links)


def _needs_batches(defense: Chain) -> bool:
    reads = any(link.uses_context for link in defense.links)
    return reads or _is_tuned(defense) or computes_anew(defense) is not None


class _DefendedRound:
    """One client's round, from the server's message to the defended reply."""

    def __init__(self, mod: DefenseMod, message: Message, context: Context, depth: int) -> None:
        """Read and check the message and the stored state; decide from which weights to start."""
        self.defense, self.setup, self.context = mod.defense, mod.setup, context
        config = settings(message, context)
        self.source: Source = secure()
        if mod.seed is not None:
            number = config.get("server-round", message.metadata.group_id)
            self.source = stream(
                mod.seed, "flower", messages.client_of(context), str(number), depth
            )
        self.key, record = only_arrays(message.content, SENT)
        self.like = self.setup.state()
        named = read(record, self.like, what=SENT, most_bytes=self.setup.most_bytes)
        self.record = ArrayRecord(dict(record))  # the train function may empty the message's
        self.task = self.setup.task(named, config)
        self.start = self.task  # the task at the weights that the client starts from
        self.anew = computes_anew(self.defense)
        self.place = f"leakbound.defense.{depth}"
        self.owner = f"{self.defense!r} for a model of {len(self.task.parameters)} weights"
        self.state: Any = None
        self.previous: Chain | None = None  # as resolved in an earlier round
        stored = messages.load(context.state, self.place, self.owner, self.defense)
        if stored is not None:
            self.state, links = stored
            if links is not None:
                pairs = zip(links, self.defense.links, strict=True)
                self.previous = Chain(tuple(own if old is None else old for old, own in pairs))
        if self.anew is None:
            state = self.defense.init(self.task) if self.state is None else self.state
            self.start, self.state = self.defense.begin(self.task, state, self.source)

    def train(self, message: Message, call_next: ClientAppCallable) -> Message:
        if self.start is self.task:
            return call_next(message, self.context)
        weights = self.start.unflatten(self.start.parameters)
        given = message.content[self.key]
        message.content[self.key] = write(weights, self.record, self.like, SENT)
        try:
            return call_next(message, self.context)
        finally:
            message.content[self.key] = given

    def answer(self, reply: Message, tapped: Tapped) -> tuple[Update, Chain]:
        """Put the defended weights into the reply; return the update and its defense."""
        key, record = only_arrays(reply.content, ANSWERED)
        if odd := set(record) ^ set(self.record):
            raise ValueError(
                f"the array {min(odd)!r} is not in both {SENT} and {ANSWERED}; send back the "
                "arrays that were sent"
            )
        examples = _example_count(reply, tapped) if _is_tuned(self.defense) else 1
        ready = resolve(self.defense, self.task, examples, self.previous)
        if self.anew is None:
            rate = self.task.plan.learning_rate
            update = self._edited(ready, record, tapped)
        else:
            batch = _batch(tapped, self.task.plan, repr(self.anew), self.defense.starts)
            # the learning rate is public: it does not depend on this stream
            rate = ready.prepare(self.task, stream(0, "plan")).plan.learning_rate
            with _private():
                update, self.state = step(self.task, batch, ready, self.source, self.state)
        after = self.task.parameters - rate * update.rows[0]
        if not bool(torch.isfinite(after).all()):
            raise PrivateError(
                "the defended weights are not finite: is the learning rate too large?"
            )
        self._check_grid(update, rate)
        reply.content[key] = write(self.task.unflatten(after), self.record, self.like, SENT)
        self._keep(ready)
        return update, ready

    def _edited(self, ready: Chain, record: ArrayRecord, tapped: Tapped) -> Update:
        most = self.setup.most_bytes  # the set of numbers that overflow reveals the data
        named = read(record, self.like, what=ANSWERED, most_bytes=most, not_finite=PrivateError)
        refuse_thawed(self.task, self.task.frozen, named)
        after = flat(self.task, named, what=ANSWERED)
        rows = ((self.start.parameters - after) / self.task.plan.learning_rate)[None]
        reads = next((link for link in ready.links if link.uses_context), None)
        context = None
        if reads is not None:
            batch = _batch(tapped, self.task.plan, repr(reads), Unit.CLIENT)
            context = ClientContext(self.start, batch)
        with _private():
            if context is not None:
                check.finite("inputs", batch.inputs)
                check.within("inputs", batch.inputs, self.start.input_range)
                losses.named(self.start.loss).check(batch.labels, self.start.label_range)
            examples = max(1, sum(batch.size for batch in tapped))
            update = Update(rows, Unit.CLIENT, (examples,))
            update, self.state = ready.transform(update, self.state, context, self.source)
        return update

    def _check_grid(self, update: Update, rate: float) -> None:
        """Reject noise finer than the number grid of the sent weights: rounding would remove it."""
        law = update.law
        if not isinstance(law, Gaussian | Laplace):
            return
        spread = law.scale if isinstance(law, Laplace) else torch.as_tensor(law.variance).sqrt()
        kinds = {np.dtype(array.dtype) for array in self.record.values() if array.dtype}
        coarse = max((float(np.finfo(k).eps) for k in kinds if k.kind == "f"), default=2.0**-23)
        grid = coarse * self.task.parameters.abs().double()
        moved = rate * torch.as_tensor(spread).double().cpu().expand(1, len(grid))[0]
        lost = (moved > 0) & (moved < LEAST_STEPS * grid)
        if bool(lost.any()):
            text = (
                f"noise of standard deviation {float(moved[lost][0]):.3g} in weights (learning "
                f"rate {rate:g}) is lost in the rounding of weights of size "
                f"{float(self.task.parameters[lost][0].abs()):.3g}; give more noise, a larger "
                "learning rate, or send float64"
            )
            raise PrivateError(text) if law.private else ValueError(text)

    def _keep(self, ready: Chain) -> None:
        """Save the state, and the resolved defense if it serves for several rounds."""
        links = None
        if any(getattr(link, "refresh", 1) > 1 for link in self.defense.links):
            pairs = zip(ready.links, self.defense.links, strict=True)
            links = tuple(None if new is old else new for new, old in pairs)
        if links is not None or any(part is not None for part in self.state or ()):
            messages.save(self.context.state, self.place, self.owner, (self.state, links))


@contextmanager
def _private() -> Iterator[None]:
    """The values in an error of this block may reveal the data."""
    try:
        yield
    except ValueError as error:
        raise PrivateError(str(error)) from error


def _example_count(reply: Message, tapped: Tapped) -> int:
    """How many examples the client trained on: as tapped, otherwise from its reply."""
    if tapped:
        return sum(batch.size for batch in tapped)
    count = messages.first(messages.COUNTS, reply.content.metric_records.values())
    if isinstance(count, int) and count > 0:
        return count
    raise ValueError(
        "the number of examples that the client trained on is not known, but the defense uses it; "
        "call leakbound.flower.tap(inputs, labels) in the train loop, or send num-examples"
    )


def _batch(tapped: Tapped, plan: LocalPlan, who: str, unit: Unit) -> Batch:
    """The client's training examples, as one batch that the plan cuts in the same order."""
    if not tapped:
        raise ValueError(
            f"{who} needs the client's batch, but the train function showed none; call "
            "leakbound.flower.tap(inputs, labels) in it, in the thread in which the mod runs"
        )
    sizes = [batch.size for batch in tapped]
    if unit is Unit.EXAMPLE and (len(sizes) > 1 or plan.steps > 1):
        raise ValueError(
            f"{who} needs every example's gradient of one local step, but the train function took "
            f"{max(len(sizes), plan.steps)}; use a defense that edits the whole update, such as "
            "chain(Clip(5.0), GaussianNoise(0.02)), train one step on one batch of all examples, "
            "or use leakbound.opacus for DP-SGD in every local step"
        )
    size = plan.batch_size
    cut = len(sizes) == plan.steps and {*sizes[:-1], size} == {size} and sizes[-1] <= (size or 0)
    if len(sizes) > 1 and not cut:
        raise ValueError(
            f"{who} needs the client's training batches, but the train function showed other "
            f"batches than the Setup says (steps={plan.steps}, batch_size={size}); tap one batch, "
            "or give Setup the steps and the batch size"
        )
    return joined(tapped)


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
        name = _flowers(mod)
        if isinstance(mod, DefenseMod):
            _check_inside(mod, _flowers(inner))
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
        name = _flowers(mod)
        if isinstance(mod, DefenseMod) or name in CHANGING:
            raise ValueError(
                f"{name or repr(mod)} changes the weights after the LeakMeter evaluates them; put "
                "the LeakMeter before it in the list"
            )
    for mod in mods[at + 1 :]:
        if (name := _flowers(mod)) in MASKING:
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


def _flowers(mod: Any) -> str | None:
    thing = mod if hasattr(mod, "__name__") else type(mod)
    return str(thing.__name__) if str(thing.__module__).startswith("flwr.") else None
