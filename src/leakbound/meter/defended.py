"""One round of a client under a defense, whichever framework carries its messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from leakbound import check, losses
from leakbound.core import (
    Batch,
    ClientContext,
    Gaussian,
    Laplace,
    LocalPlan,
    NotApplicable,
    Task,
    Unit,
    Update,
)
from leakbound.defenses.base import Chain, Defense
from leakbound.protocol import resolve, step
from leakbound.randomness import Source, stream

MARK = "leakbound-experiment-only"
"""Marks an update whose noise came from a seed."""
LEAST_STEPS = 8
"""The least noise, in steps of a sent value's floating-point grid."""
COARSE = 2.0**-23
"""The relative step of float32, where the type of what is sent is not known."""
NOT_DEFENDED = "the update could not be defended; the client's log says why"
Tapped = list[Batch]
"""The batches of one round of one client, in training order."""


class PrivateError(ValueError):
    """Its text may reveal the client's data: it stays in the client's log."""


class DefendedRound:
    """One client's round under a defense: the task received, and the update that may leave.

    `start` is the task at the weights from which the client trains. `stored` is `kept` of the
    previous round. `tap` is the name of the function that shows the client's batches.

    Raises:
        ValueError: the stored state does not belong to this model.
    """

    def __init__(
        self, defense: Chain, task: Task, source: Source, *, tap: str, stored: Any = None
    ) -> None:
        self.defense = defense
        self.task = task
        self.start = task
        self.source = source
        self.anew = computes_anew(defense)
        self.rate = task.plan.learning_rate
        self._tap = tap
        self._state = None
        self._previous = None
        if stored is not None:
            self._state, links = stored
            if links is not None:  # as resolved in an earlier round
                pairs = zip(links, defense.links, strict=True)
                self._previous = Chain(tuple(own if old is None else old for old, own in pairs))
        if self.anew is None:
            state = defense.init(task) if self._state is None else self._state
            self.start, self._state = defense.begin(task, state, source)

    def update(
        self, row: Tensor | None, tapped: Tapped, examples: int
    ) -> tuple[Update, Chain, Tensor]:
        """The defended update, its resolved defense and the change (P,) of the weights sent.

        `row` (P,) is (`start` - weights after training) / learning rate; None if it is not read.
        `examples` is how many examples the client trained on, for defenses that use it.

        Raises:
            PrivateError: the text may reveal the data.
            ValueError: the batches that the defense needs were not shown, or do not fit.
        """
        ready = resolve(self.defense, self.task, examples, self._previous)
        if self.anew is None:
            assert row is not None  # only updates that are computed again need none
            update = self._edited(ready, row, tapped)
        else:
            batch = self._batch(tapped, repr(self.anew), self.defense.starts)
            # the learning rate is public: it does not depend on this stream
            self.rate = ready.prepare(self.task, stream(0, "plan")).plan.learning_rate
            with _private():
                update, self._state = step(self.task, batch, ready, self.source, self._state)
        change = -self.rate * update.rows[0]
        if not bool(torch.isfinite(self.task.parameters + change).all()):
            raise PrivateError(
                "the defended weights are not finite: is the learning rate too large?"
            )
        return update, ready, change

    def check_grid(self, update: Update, sizes: Tensor, step: float = COARSE) -> None:
        """Reject noise finer than the grid of the sent values: rounding would remove it.

        `sizes` (P,) are what is sent (or close to it), and `step` the relative step of its type.
        """
        law = update.law
        rate = self.rate
        if not isinstance(law, Gaussian | Laplace):
            return
        spread = law.scale if isinstance(law, Laplace) else torch.as_tensor(law.variance).sqrt()
        grid = step * sizes.abs().double()
        moved = rate * torch.as_tensor(spread).double().cpu().expand(1, len(grid))[0]
        lost = (moved > 0) & (moved < LEAST_STEPS * grid)
        if bool(lost.any()):
            text = (
                f"noise of standard deviation {float(moved[lost][0]):.3g} in weights (learning "
                f"rate {rate:g}) is lost in the rounding of weights of size "
                f"{float(sizes[lost][0].abs()):.3g}; give more noise, a larger "
                "learning rate, or send float64"
            )
            raise PrivateError(text) if law.private else ValueError(text)

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

    def _edited(self, ready: Chain, row: Tensor, tapped: Tapped) -> Update:
        reads = next((link for link in ready.links if link.uses_context), None)
        context = None
        if reads is not None:
            batch = self._batch(tapped, repr(reads), Unit.CLIENT)
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

    def _batch(self, tapped: Tapped, who: str, unit: Unit) -> Batch:
        return _one_batch(tapped, self.task.plan, who, unit, self._tap)


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


def joined(tapped: Tapped) -> Batch:
    """All batches as one, on the CPU."""
    inputs = torch.cat([batch.inputs for batch in tapped]).cpu()
    return Batch(inputs, torch.cat([batch.labels for batch in tapped]).cpu())


def distinct(tapped: Tapped, tap: str) -> Batch:
    """All training examples, each once.

    Raises:
        ValueError: the train function showed none.
    """
    if not tapped:
        raise ValueError(
            "the train function showed no batch, so nothing can be evaluated; call "
            f"{tap}(inputs, labels) in it"
        )
    batch = joined(tapped)
    first: dict[bytes, int] = {}
    for i, image in enumerate(batch.inputs):
        first.setdefault(image.contiguous().numpy().tobytes(), i)
    index = torch.tensor(sorted(first.values()))
    return Batch(batch.inputs[index], batch.labels[index])


@contextmanager
def _private() -> Iterator[None]:
    """The values in an error of this block may reveal the data."""
    try:
        yield
    except ValueError as error:
        raise PrivateError(str(error)) from error


def _one_batch(tapped: Tapped, plan: LocalPlan, who: str, unit: Unit, tap: str) -> Batch:
    """The client's training examples, as one batch that the plan cuts in the same order."""
    if not tapped:
        raise ValueError(
            f"{who} needs the client's batch, but the train function showed none; call "
            f"{tap}(inputs, labels) in it, in the same process and thread"
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
