"""Every defense of a client as a Flower client mod."""

from __future__ import annotations

from contextlib import nullcontext
from logging import ERROR

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from leakbound.defenses.base import Chain, Defense, chain
from leakbound.flower.compat import error_reply, log
from leakbound.flower.seals import Inside, looking, seal, unbroken
from leakbound.flower.setup import Setup, settings
from leakbound.flower.tap import Tap, listening
from leakbound.flower.turn import PrivateError, Turn, mark
from leakbound.random import Source, secure, stream
from leakbound.types import NotApplicable, Unit


class DefenseMod:
    """Runs a defense on what a client sends: the new weights in its reply to `train` messages.

    The row that the defense sees is (weights before - weights after) / learning rate. Links that
    change what leaves (noise, clipping, pruning, withholding) edit what your training made, after
    any number of local steps. Links that need other records or another training (noisy copies,
    mixup, dropped units, local steps) compute the update anew from the batches that your train loop
    gave `tap`, and replace yours: this takes one tapped batch, or one a step of the Setup's plan.
    Links that need every example's gradient (DP-SGD) take one step on one tapped batch, and refuse
    a training of several; docs/flower.md has the table.

    Buffers, such as running statistics of batch norms, would leave undefended: the server's are
    sent back unchanged. Metrics leave as you wrote them, and so does the number of examples.
    Evaluate and query messages pass untouched.

    What goes wrong becomes an error reply that names the problem; what a text could tell of the
    client's data stays in the client's log. Errors of your own train function pass through.

    Args:
        defense: a chain or a single defense, its client's part alone.
        setup: what is trained, and how.
        seed: for experiments only: names every draw, and marks the replies' metrics with
            `leakbound-experiment-only`. By default noise comes from the operating system's entropy.

    Guarantees: those of the defense, for the weights.

    Raises:
        ValueError: links that run on the sum of all clients (secure aggregation).

    Example:
        >>> from torch import nn
        >>> from leakbound.defenses import Clip, GaussianNoise, SecureAggregation, chain
        >>> setup = Setup(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
        >>> DefenseMod(chain(Clip(1.0), GaussianNoise(0.1)), setup)
        DefenseMod(Clip(clip_norm=1.0) → GaussianNoise(noise_std=0.1))
        >>> DefenseMod(SecureAggregation(4), setup)
        Traceback (most recent call last):
        ...
        ValueError: SecureAggregation(clients=4) runs on the updates of all clients, not in a mod; \
let Flower's SecAgg+ sum them
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
                f"{self.defense!r} leaves one row per example, and a client sends one; put Mean() "
                "behind it"
            )

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Let the client train, and answer with the defended update."""
        if message.metadata.message_type.split(".")[0] != "train":
            return call_next(message, context)
        with looking() as inside:
            try:
                source = self._source(message, context, inside)
                turn = Turn.begin(
                    self.defense,
                    self.setup,
                    message,
                    context,
                    source,
                    depth=inside.depth,
                    anew=computes_anew(self.defense),
                )
            except Exception as error:
                return self._refuse(message, error)
            with listening() if self._listens() else nullcontext(Tap()) as heard:
                reply = turn.train(message, call_next)
        if reply.has_error():
            return reply
        try:
            whole = self._whole(unbroken(inside, reply, repr(self)))
            turn.answer(reply, heard)
            if self.seed is not None:
                mark(reply)
            alone = whole is self.defense
            made = (turn.released, turn.ready) if alone else (None, None)
            seeded = self.seed is not None or any(one.seeded for one in inside.seals)
            seal(reply, whole, *made, seeded=seeded)
        except Exception as error:
            return self._refuse(message, error)
        return reply

    def __repr__(self) -> str:
        return f"DefenseMod({self.defense!r})"

    def _listens(self) -> bool:
        """Whether the batches are needed; a long training's would fill the memory for nothing."""
        links = self.defense.links
        tuned = any(type(link).resolve is not Defense.resolve for link in links)
        reads = any(link.uses_context for link in links)
        return reads or tuned or computes_anew(self.defense) is not None

    def _whole(self, within: Chain | None) -> Chain:
        """All defenses up to this one, in order, checked as one chain."""
        if within is None:
            return self.defense
        return combined(within, self.defense)

    def _source(self, message: Message, context: Context, inside: Inside) -> Source:
        if self.seed is None:
            return secure()
        who = context.node_config.get("partition-id", context.node_id)
        number = settings(message, context).get("server-round", message.metadata.group_id)
        return stream(self.seed, "flower", str(who), str(number), inside.depth)

    def _refuse(self, message: Message, error: Exception) -> Message:
        log(ERROR, "%r: %s: %s", self, type(error).__name__, error)
        text = str(error)
        if isinstance(error, PrivateError) or not isinstance(error, ValueError | NotApplicable):
            text = "the update could not be defended; the client's log says why"
        return error_reply(message, f"{self!r}: {text}")


def computes_anew(defense: Chain) -> Defense | None:
    """The link for which the update is computed anew; None where training is only edited."""
    if defense.starts is Unit.EXAMPLE:
        return next(link for link in defense.links if Unit.CLIENT not in link.accepts)
    return next((k for k in defense.links if k.replaces_examples or k.changes_training), None)


def combined(inner: Chain, outer: Chain) -> Chain:
    """Two mods' defenses as one chain, the inner one's links first.

    Raises:
        ValueError: the order breaks what one of them needs or promises; both are named.
    """
    anew = computes_anew(outer)
    if anew is not None:
        raise ValueError(
            f"{anew!r} computes the update anew and would undo {inner!r} inside it; put both into "
            "one DefenseMod, as a chain, or that of the former inside (after the other in the list)"
        )
    return chain(inner, outer)
