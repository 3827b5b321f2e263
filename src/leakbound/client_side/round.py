"""One round of a client under a defense, whichever framework carries its messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from leakbound import check, losses
from leakbound.client_side.batches import NAME, Tapped, one_batch
from leakbound.core import (
    ClientContext,
    Gaussian,
    Laplace,
    NotApplicable,
    Task,
    Unit,
    Update,
)
from leakbound.defenses.base import Chain, Defense
from leakbound.protocol import resolve
from leakbound.protocol import step as step_of
from leakbound.randomness import Source, stream
from leakbound.tensors import flat

MARK = "leakbound-experiment-only"
"""Marks an update whose noise came from a seed."""
LEAST_STEPS = 8
"""The least noise, in steps of a sent value's floating-point grid."""
COARSE = 2.0**-23
"""The relative step of float32, where the type of what is sent is not known."""
NOT_DEFENDED = "the update could not be defended; the client's log says why"


class PrivateError(ValueError):
    """Its text may reveal the client's data: it stays in the client's log."""


class ClientRound:
    """One client's round under a defense: the weights received, and the update that may leave.

    `sent` are the server's tensors by name, of which `task` holds the trained ones. `start` is the
    task at the weights from which the client trains. `stored` is `kept` of the previous round.

    Raises:
        ValueError: the stored state does not belong to this model.
    """

    def __init__(
        self,
        defense: Chain,
        task: Task,
        sent: Mapping[str, Tensor],
        source: Source,
        stored: Any = None,
    ) -> None:
        self.defense = defense
        self.task = task
        self.sent = sent
        self.start = task
        self.source = source
        self.anew = computes_anew(defense)
        self.rate = task.plan.learning_rate
        self._state: Any
        self._state, links = stored or (None, None)
        self._previous = None
        if links is not None:  # as resolved in an earlier round
            pairs = zip(links, defense.links, strict=True)
            self._previous = Chain(tuple(link if old is None else old for old, link in pairs))
        if self.anew is None:
            state = defense.init(task) if self._state is None else self._state
            self.start, self._state = defense.begin(task, state, source)

    @property
    def start_weights(self) -> dict[str, Tensor]:
        """The weights from which the client trains, where they are not those that were sent."""
        return {} if self.start is self.task else self.start.unflatten(self.start.parameters)

    def answer(
        self,
        trained: Mapping[str, Tensor] | None,
        tapped: Tapped,
        *,
        reported: int | None = None,
        is_change: bool = False,
        step: float = COARSE,
    ) -> tuple[Update, Chain, dict[str, Tensor]]:
        """The defended update, its resolved defense and the weights that may leave, by name.

        Args:
            trained: what training left, by name; None if the defense computes it again.
            tapped: the batches shown.
            reported: how many examples the client trained on, if it shows no batch.
            is_change: `trained`, and what leaves, are changes of the weights.
            step: the relative step of the type of what leaves.

        Raises:
            PrivateError: the text may reveal the data.
            ValueError: the batches that the defense needs were not shown, or do not fit.
        """
        examples = sum(batch.size for batch in tapped) or reported
        if examples is None and is_tuned(self.defense):
            raise ValueError(
                "the number of examples that the client trained on is not known, but the defense "
                f"uses it; call {NAME}(inputs, labels) in the train function, or report the number "
                "(Flower: num-examples)"
            )
        ready = resolve(self.defense, self.task, examples or 1, self._previous)
        if self.anew is None:
            assert trained is not None  # only updates that are computed again need none
            row = row_of(
                self.start,
                self.sent,
                trained,
                self.rate,
                is_change=is_change,
            )
            update = self._edited(ready, row, tapped)
        else:
            batch = one_batch(tapped, self.task.plan, repr(self.anew), self.defense.starts)
            # the learning rate is public: it does not depend on this stream
            self.rate = ready.prepare(self.task, stream(0, "plan")).plan.learning_rate
            with _private():
                update, self._state = step_of(self.task, batch, ready, self.source, self._state)
        change = -self.rate * update.rows[0]
        weights = self.task.parameters + change
        if not bool(torch.isfinite(weights).all()):
            raise PrivateError(
                "the defended weights are not finite: is the learning rate too large?"
            )
        # sending rounds to the type of the message, and rounded noise may be none
        self._check_grid(update, change if is_change else self.task.parameters, step)
        return update, ready, self.task.unflatten(change if is_change else weights)

    def _check_grid(
        self,
        update: Update,
        sizes: Tensor,
        step: float,
    ) -> None:
        """Reject noise finer than the grid of the sent values: rounding would remove it.

        `sizes` (P,) are what is sent (or close to it), and `step` the relative step of its type.
        """
        law = update.law
        if not isinstance(law, Gaussian | Laplace):
            return
        spread = law.scale if isinstance(law, Laplace) else torch.as_tensor(law.variance).sqrt()
        grid = step * sizes.abs().double()
        moved = self.rate * torch.as_tensor(spread).double().cpu().expand(1, len(grid))[0]
        lost = (moved > 0) & (moved < LEAST_STEPS * grid)
        if bool(lost.any()):
            kind = PrivateError if law.private else ValueError
            raise kind(
                f"noise of standard deviation {float(moved[lost][0]):.3g} in weights (learning "
                f"rate {self.rate:g}) is lost in the rounding of weights of size "
                f"{float(sizes[lost][0].abs()):.3g}; give more noise, a larger learning rate, or "
                "send float64"
            )

    def kept(self, ready: Chain) -> tuple[Any, tuple[Defense | None, ...] | None] | None:
        """What the next round needs: the state, and the resolved links if they serve for several.

        None if it needs nothing.
        """
        links = None
        if any(getattr(link, "refresh", 1) > 1 for link in self.defense.links):
            pairs = zip(ready.links, self.defense.links, strict=True)
            links = tuple(None if new is old else new for new, old in pairs)
        if links is None and all(part is None for part in self._state or ()):
            return None
        return self._state, links

    def _edited(
        self,
        ready: Chain,
        row: Tensor,
        tapped: Tapped,
    ) -> Update:
        context = None
        for link in ready.links:
            if context is None and link.uses_context:
                batch = one_batch(tapped, self.task.plan, repr(link), Unit.CLIENT)
                context = ClientContext(self.start, batch)
        with _private():
            if context is not None:
                check.finite("inputs", batch.inputs)
                check.within("inputs", batch.inputs, self.start.input_range)
                losses.named(self.start.loss).check(batch.labels, self.start.label_range)
            examples = max(1, sum(batch.size for batch in tapped))
            update = Update(row[None], Unit.CLIENT, (examples,))
            update, self._state = ready.transform(update, self._state, context, self.source)
        return update


def row_of(
    start: Task,
    sent: Mapping[str, Tensor],
    trained: Mapping[str, Tensor],
    rate: float,
    *,
    is_change: bool = False,
) -> Tensor:
    """(weights before - weights after) / learning rate, (P,).

    Raises:
        ValueError: training changed a weight that is frozen in the model of the Setup.
    """
    # a change of what the defense does not see would leave without noise
    for name in start.frozen:
        if name not in trained or name not in sent:
            continue
        before = torch.zeros_like(trained[name]) if is_change else sent[name]
        if not torch.equal(trained[name], before):
            raise ValueError(
                f"the train function changed {name!r}, which is frozen in the model of the Setup; "
                "call requires_grad_(True) on what is trained, in the model that Setup makes"
            )
    after = flat(start, trained, what="the result of training")
    return (-after if is_change else start.parameters - after) / rate


def computes_anew(defense: Chain) -> Defense | None:
    """The link for which the update is computed again; None if training is only edited."""
    if defense.starts is Unit.EXAMPLE:
        return next(link for link in defense.links if Unit.CLIENT not in link.accepts)
    return next((k for k in defense.links if k.replaces_examples or k.changes_training), None)


def check_of_client(defense: Chain, sums: str) -> None:
    """Reject a defense whose output is not one row of one client; `sums` says what sums clients.

    Raises:
        ValueError: names the link and the mend.
    """
    together = defense.sides[1].links
    if together:
        raise ValueError(f"{together[0]!r} runs on the updates of all clients, not in {sums}")
    if defense.returns(defense.starts) is not Unit.CLIENT:
        raise ValueError(
            f"{defense!r} leaves one row per example, but a client sends one row; put "
            "Mean() after it"
        )


def is_tuned(defense: Chain) -> bool:
    """Whether a link is resolved from the number of examples or from earlier rounds."""
    return any(type(link).resolve is not Defense.resolve for link in defense.links)


def needs_batches(defense: Chain) -> bool:
    """Whether a link reads the batches that the train function showed."""
    reads = any(link.uses_context for link in defense.links)
    return reads or is_tuned(defense) or computes_anew(defense) is not None


def public_text(error: Exception) -> str:
    """The text of an error that may leave the client."""
    if isinstance(error, PrivateError) or not isinstance(error, ValueError | NotApplicable):
        return NOT_DEFENDED
    return str(error)


@contextmanager
def _private() -> Iterator[None]:
    """The values in an error of this block may reveal the data."""
    try:
        yield
    except ValueError as error:
        raise PrivateError(str(error)) from error
