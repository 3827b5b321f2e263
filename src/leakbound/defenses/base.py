"""What a defense is: a transformation of an update, composed by `chain`.

A defense is a frozen dataclass. It may change the task before gradients exist (`prepare`) and the
update afterwards (`transform`). What an attacker who knows it can do is part of it: `imitate` is
its noise-free, differentiable part, `infer` what the update gives away of `prepare`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from leakbound.covariance import LowRank, Structured
from leakbound.defenses.order import check_order, check_pairs
from leakbound.random import Source, stream
from leakbound.types import (
    ClientContext,
    Gaussian,
    Guarantee,
    Laplace,
    Task,
    Unit,
    Unknown,
    Update,
)

ANY_UNIT = frozenset(Unit)
State = Any


@dataclass(frozen=True)
class Defense:
    """Base of all defenses; by itself it changes nothing.

    Class attributes:
        accepts: the units whose rows it can take.
        keeps_law: a noise law declared before it is still known after it.
        law_survives_sums: its own noise law is still known after rows, or more such noise, are
            added.
        needs_bound: it needs rows to which one example can add only a bounded amount.
        gives_bound: it makes rows such.
        keeps_bound: rows that were bounded still are after it.
        uses_context: it reads the client's model and batch, so it is not post-processing.
        draws_mask: it draws which coordinates are sent; sums and noise after it hide the draw.
        hides_draw: what it draws is not seen in the update, so no law is known with it.
        keeps_mask: its noise falls only on what a mask before it still sends.
        data_dependent_law: its noise or mask is chosen from the client's batch, and leaks it.
        plain_gradient: what it promises holds for the gradient of the task as it was sent, so no
            other link may change the local training.
        law_of_rows: its private law follows from the rows that it gets, not from the examples.
        replaces_examples: it computes the rows anew from other examples than the client's, so
            nothing may change rows before it, and nothing after it may read the client's examples.
        maps_basis: it changes the coordinates of rows; a later link that `unmaps_basis` the same
            must undo it. None where it does not.
        unmaps_basis: it undoes a link that `maps_basis` the same; None where it undoes nothing.
        continuous: what it makes of rows has no jumps, so that bounds from derivatives hold. False
            for a class that overrides `imitate`, unless it says otherwise.
    """

    accepts: ClassVar[frozenset[Unit]] = ANY_UNIT
    keeps_law: ClassVar[bool] = True
    needs_bound: ClassVar[bool] = False
    gives_bound: ClassVar[bool] = False
    keeps_bound: ClassVar[bool] = True
    uses_context: ClassVar[bool] = False
    law_survives_sums: ClassVar[bool] = True
    draws_mask: ClassVar[bool] = False
    hides_draw: ClassVar[bool] = False
    keeps_mask: ClassVar[bool] = False
    data_dependent_law: ClassVar[bool] = False
    plain_gradient: ClassVar[bool] = False
    replaces_examples: ClassVar[bool] = False
    law_of_rows: ClassVar[bool] = False
    maps_basis: ClassVar[Hashable] = None
    unmaps_basis: ClassVar[Hashable] = None
    continuous: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "imitate" in vars(cls) and "continuous" not in vars(cls):
            cls.continuous = False  # only who wrote it can say otherwise

    @property
    def changes_training(self) -> bool:
        """Whether it changes the task before gradients exist."""
        return type(self).prepare is not Defense.prepare

    @property
    def changes_start(self) -> bool:
        """Whether the client may start from other weights than those it was sent."""
        return type(self).begin is not Defense.begin

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

    def resolve(self, task: Task, examples: int, previous: Defense | None = None) -> Defense:
        """The defense with all that it takes from public knowledge filled in.

        Called by the server before a round, once for all clients; needs nothing of theirs.

        Args:
            task: the model as it is sent, with public data where there is some.
            examples: the size of a client's batch.
            previous: what `resolve` returned in the round before.
        """
        return self

    def prepare(self, task: Task, source: Source) -> Task:
        """Change the task before gradients exist (dropout, local steps)."""
        return task

    def init(self, task: Task) -> State:
        """What one client keeps between rounds."""
        return None

    def begin(self, task: Task, state: State, source: Source) -> tuple[Task, State]:
        """The task at the weights that the client starts from, and what it keeps.

        Called at the start of a round, after `prepare`. A defense that withholds weights puts
        those that the client kept in the place of those that the server sent.
        """
        return task, state

    def transform(
        self, update: Update, state: State, context: ClientContext | None, source: Source
    ) -> tuple[Update, State]:
        """Change the update. `context` is None on the server's side."""
        return update, state

    def imitate(self, rows: Tensor) -> Tensor:
        """The deterministic part on rows (R, P), differentiable: what a knowing attacker uses.

        Whether `rows` itself comes back depends on the settings alone, never on its values.
        """
        return rows

    def noise_variance(self, task: Task, inputs: Tensor, labels: Tensor) -> Tensor | None:
        """(P,) the variance that its private law would give a guess, differentiable; None: none."""
        return None

    def infer(self, task: Task, update: Update) -> Task:
        """What an attacker who sees `update` learns of the task that `prepare` made."""
        return task

    def _sketch(self, update: Update) -> Update:
        """What `transform` does to the law of a tiny update, by the attributes of the class."""
        after = self.returns(update.unit)
        if after is not update.unit:
            update = update.summed(after)
        if self.draws_mask:
            update = update.masked(torch.ones_like(update.rows).bool(), by_value=False, drawn=True)
        if not self.keeps_law:
            update = update.opaque(update.rows, f"{self!r} came after the noise")
        if self.guarantee is not Guarantee.NONE:
            noise = Gaussian(1.0) if self.law_survives_sums else Laplace(1.0)
            update = update.noised(noise, _tiny_source(), keep_mask=self.keeps_mask)
        if self.hides_draw:
            update = replace(update, law=Unknown(f"what {self!r} drew is not seen"))
        return update

    def __repr__(self) -> str:
        return describe(self)


def _tiny_source() -> Source:
    return stream(0, "sketch")


def tiny_covariance(update: Update, *, correlated: bool) -> Structured:
    """Some covariance over the coordinates of a small update, for a `_sketch`."""
    like = update.rows
    width = like.shape[1]
    basis = torch.full((width, 1), width**-0.5).to(like)
    block = LowRank(0, width, basis, torch.ones(1).to(like))
    scale = torch.arange(1, width + 1).to(like)
    return Structured(scale, (block,) if correlated else ())


def describe(thing: Defense) -> str:
    """`Name(field=value, ...)` of a frozen dataclass, for records and messages."""
    inner = ", ".join(f"{f.name}={getattr(thing, f.name)!r}" for f in fields(thing))
    return f"{type(thing).__name__}({inner})"


@dataclass(frozen=True, repr=False)
class Chain(Defense):
    """Several defenses in order; itself a defense. Build it with `chain`."""

    links: tuple[Defense, ...] = ()

    def __post_init__(self) -> None:
        odd = [link for link in self.links if not isinstance(link, Defense)]
        if odd:
            raise ValueError(
                f"a link is {odd[0]!r}, a {type(odd[0]).__name__}; give defenses, such as "
                "leakbound.defenses.GaussianNoise(0.1)"
            )
        nested = [link.links if isinstance(link, Chain) else (link,) for link in self.links]
        object.__setattr__(self, "links", tuple(link for part in nested for link in part))
        check_order(self.links, self.starts)

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
        """The strongest promise that survives the other links.

        Differential privacy survives all but links that read the client's batch (before the noise
        they may mix examples, after it they are no post-processing).
        """
        for maker in self.links:
            others = [link for link in self.links if link is not maker]
            private = maker.guarantee is Guarantee.DIFFERENTIAL_PRIVACY
            if private and not any(link.uses_context for link in others):
                return Guarantee.DIFFERENTIAL_PRIVACY
        known = isinstance(_sketched(self).law, Gaussian | Laplace)
        return Guarantee.RELEASE_LAW if known else Guarantee.NONE

    @property
    def gives_bound(self) -> bool:  # type: ignore[override]
        """Whether some link bounds what one example adds."""
        return any(link.gives_bound for link in self.links)

    @property
    def data_dependent_law(self) -> bool:  # type: ignore[override]
        """Whether some link's noise or mask is chosen from the client's batch."""
        return any(link.data_dependent_law for link in self.links)

    @property
    def sides(self) -> tuple[Chain, Chain]:
        """The links that run on each client, and those that run on the stacked rows of all."""
        at = next(
            (i for i, link in enumerate(self.links) if link.returns(Unit.CLIENT) is Unit.COHORT),
            len(self.links),
        )
        return _Part(self.links[:at]), _Part(self.links[at:])

    def resolve(self, task: Task, examples: int, previous: Defense | None = None) -> Chain:
        """The chain of all resolved links."""
        before = previous.links if isinstance(previous, Chain) else (None,) * len(self.links)
        pairs = zip(self.links, before, strict=True)
        return type(self)(tuple(link.resolve(task, examples, old) for link, old in pairs))

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

    def begin(self, task: Task, state: State, source: Source) -> tuple[Task, State]:
        """All links' `begin`, in order."""
        after = []
        for link, own in zip(self.links, state or [None] * len(self.links), strict=True):
            task, own = link.begin(task, own, source)
            after.append(own)
        return task, tuple(after)

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

    @property
    def continuous(self) -> bool:  # type: ignore[override]
        """Whether no link jumps."""
        return all(link.continuous for link in self.links)

    def infer(self, task: Task, update: Update) -> Task:
        """All links' `infer`, in order."""
        for link in self.links:
            task = link.infer(task, update)
        return task

    def noise_variance(self, task: Task, inputs: Tensor, labels: Tensor) -> Tensor | None:
        """That of the one link with a private law; None where there is none or more than one.

        A law of the rows that a link gets (`law_of_rows`) is known here for the first link alone.
        """
        links = [k for i, k in enumerate(self.links) if not (k.law_of_rows and i)]
        found = [link.noise_variance(task, inputs, labels) for link in links]
        known = [variance for variance in found if variance is not None]
        return known[0] if len(known) == 1 else None

    def __repr__(self) -> str:
        return " → ".join(repr(link) for link in self.links) if self.links else "none"


class _Part(Chain):
    """Consecutive links of a chain that was checked as a whole; alone they may not be in order."""

    def __post_init__(self) -> None:
        pass


def chain(*links: Defense) -> Chain:
    """Compose defenses, first to last.

    Raises:
        ValueError: a link cannot take what the link before it returns, or does not go with another
            one; both are named.

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
    whole = Chain(links)
    check_pairs(whole.links)
    return whole


def _sketched(whole: Chain) -> Update:
    """A tiny update after the whole chain, by the laws of `Update`: two unequal clients at most."""
    alone, together = whole.sides
    sent = []
    for count in (2, 3)[: whole.cohort_size]:
        single = whole.starts is not Unit.EXAMPLE
        examples = (count,) if single else (1,) * count
        update = Update(torch.ones(len(examples), 3), whole.starts, examples)
        for link in alone.links:
            update = link._sketch(update)
        sent.append(update)
    update = sent[0] if len(sent[0].rows) > 1 else Update.stack(sent)
    for link in together.links:
        update = link._sketch(update)
    return update
