"""What a defense is: a transformation of an update, composed by `chain`.

A defense is a frozen dataclass. It may change the task before gradients exist (`prepare`) and the
update afterwards (`transform`). What an attacker who knows it can do is part of it: `imitate` is
its noise-free, differentiable part, `infer` what the update gives away of `prepare`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from leakbound.random import Source
from leakbound.types import ClientContext, Guarantee, Task, Unit, Update

ANY_UNIT = frozenset(Unit)
State = Any


@dataclass(frozen=True)
class Defense:
    """Base of all defenses; by itself it changes nothing.

    Class attributes:
        accepts: the units whose rows it can take.
        keeps_law: a noise law declared before it is still known after it.
        law_survives_sums: its own noise law is still known after rows are added.
        needs_bound: it needs rows to which one example can add only a bounded amount.
        gives_bound: it makes rows such.
        uses_context: it reads the client's model and batch, so it is not post-processing.
    """

    accepts: ClassVar[frozenset[Unit]] = ANY_UNIT
    keeps_law: ClassVar[bool] = True
    needs_bound: ClassVar[bool] = False
    gives_bound: ClassVar[bool] = False
    uses_context: ClassVar[bool] = False
    law_survives_sums: ClassVar[bool] = True

    @property
    def guarantee(self) -> Guarantee:
        """What this defense promises on its own."""
        return Guarantee.NONE

    @property
    def cohort_size(self) -> int:
        """How many clients' updates it takes to run it."""
        return 1

    def returns(self, given: Unit) -> Unit:
        """The unit of the rows that come out."""
        return given

    def prepare(self, task: Task, source: Source) -> Task:
        """Change the task before gradients exist (dropout, local steps)."""
        return task

    def init(self, task: Task) -> State:
        """What one client keeps between rounds."""
        return None

    def transform(
        self, update: Update, state: State, context: ClientContext | None, source: Source
    ) -> tuple[Update, State]:
        """Change the update. `context` is None on the server's side."""
        return update, state

    def imitate(self, rows: Tensor) -> Tensor:
        """The deterministic part on rows (R, P), differentiable: what a knowing attacker uses."""
        return rows

    def infer(self, task: Task, update: Update) -> Task:
        """What an attacker who sees `update` learns of the task that `prepare` made."""
        return task

    def __repr__(self) -> str:
        return describe(self)


def describe(thing: Defense) -> str:
    """`Name(field=value, ...)` of a frozen dataclass, for records and messages."""
    inner = ", ".join(f"{f.name}={getattr(thing, f.name)!r}" for f in fields(thing))
    return f"{type(thing).__name__}({inner})"


@dataclass(frozen=True, repr=False)
class Chain(Defense):
    """Several defenses in order; itself a defense. Build it with `chain`."""

    links: tuple[Defense, ...] = ()

    def __post_init__(self) -> None:
        _check_order(self.links, self.starts)

    @property
    def starts(self) -> Unit:
        """EXAMPLE where some link wants every example's own gradient, else CLIENT."""
        wants = any(
            Unit.EXAMPLE in link.accepts and Unit.CLIENT not in link.accepts for link in self.links
        )
        return Unit.EXAMPLE if wants else Unit.CLIENT

    @property
    def cohort_size(self) -> int:
        """The largest cohort that a link asks for."""
        return max((link.cohort_size for link in self.links), default=1)

    @property
    def guarantee(self) -> Guarantee:
        """The strongest promise that survives the links after the one that makes it."""
        best, maker, unit = Guarantee.NONE, Defense(), self.starts
        for link in self.links:
            after = link.returns(unit)
            if best is Guarantee.DIFFERENTIAL_PRIVACY and link.uses_context:
                best = Guarantee.NONE
            lost = not link.keeps_law or (after is not unit and not maker.law_survives_sums)
            if best is Guarantee.RELEASE_LAW and lost:
                best = Guarantee.NONE
            if link.guarantee is Guarantee.DIFFERENTIAL_PRIVACY or (
                link.guarantee is Guarantee.RELEASE_LAW and best is Guarantee.NONE
            ):
                best, maker = link.guarantee, link
            unit = after
        return best

    def returns(self, given: Unit) -> Unit:
        """The unit after the last link."""
        for link in self.links:
            given = link.returns(given)
        return given

    def prepare(self, task: Task, source: Source) -> Task:
        """All links' `prepare`, in order."""
        for link in self.links:
            task = link.prepare(task, source)
        return task

    def init(self, task: Task) -> State:
        """One state a link."""
        return tuple(link.init(task) for link in self.links)

    def transform(
        self, update: Update, state: State, context: ClientContext | None, source: Source
    ) -> tuple[Update, State]:
        """All links' `transform`, in order."""
        after = []
        for link, own in zip(self.links, state or [None] * len(self.links), strict=True):
            update, own = link.transform(update, own, context, source)
            after.append(own)
        return update, tuple(after)

    def imitate(self, rows: Tensor) -> Tensor:
        """All links' `imitate`, in order."""
        for link in self.links:
            rows = link.imitate(rows)
        return rows

    def infer(self, task: Task, update: Update) -> Task:
        """All links' `infer`, in order."""
        for link in self.links:
            task = link.infer(task, update)
        return task

    def imitate_clients(self, clients: list[Tensor]) -> Tensor:
        """Noise-free rows that a server expects from several clients' plain rows."""
        client, cohort = self.split()
        return cohort.imitate(torch.cat([client.imitate(rows) for rows in clients]))

    def split(self) -> tuple[Chain, Chain]:
        """The links that run on each client, and those that run on the stacked rows of all."""
        at = next(
            (i for i, link in enumerate(self.links) if link.returns(Unit.CLIENT) is Unit.COHORT),
            len(self.links),
        )
        # The second part is not checked again: it starts on CLIENT rows and was checked as a whole.
        return Chain(self.links[:at]), Chain(self.links[at:])

    def __repr__(self) -> str:
        return " → ".join(repr(link) for link in self.links) if self.links else "none"


def chain(*links: Defense) -> Chain:
    """Compose defenses, first to last.

    Raises:
        ValueError: a link cannot take what the link before it returns; both are named.

    Example:
        >>> from leakbound.defenses import ClipExamples, GaussianMechanism, Mean
        >>> chain(ClipExamples(1.0), Mean(), GaussianMechanism(0.5)).guarantee.value
        'differential privacy'
        >>> chain(Mean(), ClipExamples(1.0))
        Traceback (most recent call last):
        ...
        ValueError: ClipExamples(clip_norm=1.0) takes one row per example, but Mean() before it \
returns one row per client; put ClipExamples(clip_norm=1.0) first
    """
    flat: list[Defense] = []
    for link in links:
        flat.extend(link.links if isinstance(link, Chain) else [link])
    return Chain(tuple(flat))


def _check_order(links: tuple[Defense, ...], start: Unit) -> None:
    unit, bounded = start, False
    before: Defense | None = None
    for link in links:
        if unit not in link.accepts:
            wanted = " or ".join(u.noun for u in sorted(link.accepts))
            source = f"{before!r} before it returns" if before else "the client gives"
            advice = (
                f"put {link!r} first"
                if min(link.accepts) < unit
                else f"put a link that makes {wanted} rows between them"
            )
            raise ValueError(
                f"{link!r} takes one row per {wanted}, but {source} one row per {unit.noun}; "
                f"{advice}"
            )
        if link.needs_bound and not bounded:
            source = f"{before!r} before it" if before else "the plain gradient"
            raise ValueError(
                f"{link!r} needs rows to which one example adds a bounded amount, but {source} "
                "bounds nothing; put ClipExamples before it"
            )
        if link.gives_bound:
            bounded = True
        elif not link.keeps_law:
            bounded = False
        unit, before = link.returns(unit), link
