"""The base class of defenses, and the `Chain` that composes several and checks their order.

A defense is a frozen dataclass. It may change the task before gradients exist (`prepare`) and the
update afterwards (`transform`). It also states what an attacker who knows it can do: `imitate` is
its noise-free, differentiable part; `infer` is what the update leaks about `prepare`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from leakbound.core import (
    ClientContext,
    Gaussian,
    Guarantee,
    Laplace,
    Task,
    Unit,
    Unknown,
    Update,
)
from leakbound.covariance import LowRank, Structured
from leakbound.randomness import Source, stream

ANY_UNIT = frozenset(Unit)
State = Any
Context = ClientContext | None
Sent = tuple[Update, State]


@dataclass(frozen=True)
class Defense:
    """Base of all defenses.

    Class attributes:
        accepts: the units whose rows it accepts.
        guarantee: what it guarantees on its own.
        cohort_size: the number of clients' updates that it needs.
        keeps_law: a noise distribution declared before it is still known after it.
        law_survives_sums: its noise distribution is still known after sums of rows or of such
            noise.
        needs_bound: it needs rows to which one example can add only a bounded amount.
        gives_bound: it makes rows bounded in this way.
        keeps_bound: bounded rows are still bounded after it.
        uses_context: it reads the client's model and batch, so it is not post-processing.
        draws_mask: it draws which coordinates are sent; sums and noise after it hide the draw.
        masks_by_value: it withholds coordinates that are chosen from the client's batch.
        hides_law: the distribution of its output is not known, for instance because a draw is not
            visible in it.
        keeps_mask: its noise falls only on what a mask before it still sends.
        data_dependent_law: its noise or mask is chosen from the client's batch, and leaks it.
        plain_gradient: its guarantee holds for the task as sent: no link may change training.
        law_of_rows: its data-dependent noise follows from the rows that it gets, not from examples.
        replaces_examples: it computes the rows again from examples other than the client's. Nothing
            may change rows before it, or read the client's examples after it.
        maps_basis: it changes the coordinates of rows, and a later link must undo this; None: it
            does not.
        unmaps_basis: it undoes a link with the same `maps_basis`; None: no link.
        continuous: its output is a continuous function of rows, so bounds from derivatives hold.
            False for a class that overrides `imitate`, unless the class sets it.
    """

    accepts: ClassVar[frozenset[Unit]] = ANY_UNIT
    guarantee: ClassVar[Guarantee] = Guarantee.NONE
    cohort_size: ClassVar[int] = 1
    keeps_law: ClassVar[bool] = True
    law_survives_sums: ClassVar[bool] = True
    needs_bound: ClassVar[bool] = False
    gives_bound: ClassVar[bool] = False
    keeps_bound: ClassVar[bool] = True
    uses_context: ClassVar[bool] = False
    draws_mask: ClassVar[bool] = False
    masks_by_value: ClassVar[bool] = False
    hides_law: ClassVar[bool] = False
    keeps_mask: ClassVar[bool] = False
    data_dependent_law: ClassVar[bool] = False
    plain_gradient: ClassVar[bool] = False
    law_of_rows: ClassVar[bool] = False
    replaces_examples: ClassVar[bool] = False
    maps_basis: ClassVar[Hashable] = None
    unmaps_basis: ClassVar[Hashable] = None
    continuous: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "imitate" in vars(cls) and "continuous" not in vars(cls):
            cls.continuous = False  # only the author of the class can say otherwise

    @property
    def changes_training(self) -> bool:
        """Whether it changes the task before gradients exist."""
        return type(self).prepare is not Defense.prepare

    @property
    def changes_start(self) -> bool:
        """Whether the client may start from weights other than those it was sent."""
        return type(self).begin is not Defense.begin

    @property
    def starts_late(self) -> bool:
        """Whether it may send first rounds as if it were not there."""
        return type(self).acts is not Defense.acts

    def returns(self, given: Unit) -> Unit:
        """The unit of the output rows."""
        return given

    def resolve(
        self,
        task: Task,
        examples: int,
        previous: Defense | None = None,
    ) -> Defense:
        """The defense with all values from public knowledge filled in.

        The server calls it before a round, once for all clients. It passes the task as it is sent
        (with public data if there are any), the size of a client's batch, and what `resolve`
        returned in the previous round.
        """
        return self

    def prepare(self, task: Task, source: Source) -> Task:
        """Change the task before gradients exist (dropout, local steps)."""
        return task

    def init(self, task: Task) -> State:
        """The state of one client between rounds."""
        return None

    def begin(
        self,
        task: Task,
        state: State,
        source: Source,
    ) -> tuple[Task, State]:
        """The task at the client's starting weights, after `prepare`, and the client's state.

        A defense that withholds weights replaces the server's by those that the client kept.
        """
        return task, state

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        """Change the update. `context` is None on the server's side."""
        return update, state

    def acts(self, state: State) -> bool:
        """Whether it protected the round that left this state of a client.

        A defense that needs some rounds before it has an effect says here whether it had one. An
        audit attacks the first round in which it acts.
        """
        return True

    def imitate(self, rows: Tensor) -> Tensor:
        """The deterministic part on rows (R, P), differentiable, as attackers who know it use it.

        Whether `rows` itself is returned depends only on the settings, never on its values.
        """
        return rows

    def noise_variance(
        self,
        task: Task,
        inputs: Tensor,
        labels: Tensor,
    ) -> Tensor | None:
        """(P,) the noise variance of a candidate, differentiable; None if data do not set it."""
        return None

    def infer(self, task: Task, update: Update) -> Task:
        """What an attacker who sees `update` learns about the task that `prepare` made."""
        return task

    def _sketch(self, update: Update) -> Update:
        """The effect of `transform` on the distribution of a tiny update, by class attributes."""
        after = self.returns(update.unit)
        if after is not update.unit:
            update = update.summed(after)
        if self.draws_mask or self.masks_by_value:
            every = torch.ones_like(update.rows).bool()
            update = update.masked(
                every,
                by_value=self.masks_by_value,
                drawn=self.draws_mask,
            )
        if not self.keeps_law:
            update = update.opaque(update.rows, f"{self!r} came after the noise")
        if self.guarantee is not Guarantee.NONE:
            noise = Gaussian(1.0) if self.law_survives_sums else Laplace(1.0)
            update = update.noised(
                noise,
                stream(0, "sketch"),
                keep_mask=self.keeps_mask,
            )
        if self.hides_law:
            update = replace(update, law=Unknown(f"{self!r} hides it"))
        return update

    def __repr__(self) -> str:
        inner = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
        return f"{type(self).__name__}({inner})"


@dataclass(frozen=True, repr=False, eq=False)
class Resolved(Defense):
    """The result of `resolve` for one model; it has the attributes of its settings.

    Attributes:
        settings: the defense that was resolved.
        examples: the batch size that it was resolved for.
        age: the number of rounds that it has served before this one.
    """

    settings: Any
    examples: int = field(default=0, kw_only=True)
    age: int = field(default=0, kw_only=True)

    @classmethod
    def reused(
        cls,
        previous: Defense | None,
        settings: Any,
        examples: int,
    ) -> Self | None:
        """`previous` for one more round if `settings.refresh` allows it; else None."""
        # What was resolved is for one batch size.
        if not isinstance(previous, cls) or previous.examples != examples:
            return None
        next_age = previous.age + 1
        return replace(previous, age=next_age) if next_age < settings.refresh else None

    def _sketch(self, update: Update) -> Update:
        return self.settings._sketch(update)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return repr(self.settings)


for _name in Defense.__annotations__:  # every class attribute of a defense, and nothing else
    setattr(Resolved, _name, property(attrgetter(f"settings.{_name}")))


@dataclass(frozen=True, repr=False, eq=False)
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
        # Links of chains become links of this one, so that the checks see all neighbors.
        nested = [link.links if isinstance(link, Chain) else (link,) for link in self.links]
        object.__setattr__(self, "links", tuple(link for part in nested for link in part))
        _check_training(self.links, self.starts)
        _check_units(self.links, self.starts)
        _check_bounds(self.links)
        _check_examples(self.links)

    @property
    def starts(self) -> Unit:
        """EXAMPLE if a link needs every example's separate gradient, else CLIENT."""
        wants = any(
            Unit.EXAMPLE in link.accepts and Unit.CLIENT not in link.accepts for link in self.links
        )
        return Unit.EXAMPLE if wants else Unit.CLIENT

    @property
    def cohort_size(self) -> int:  # type: ignore[override]
        """The largest cohort that a link needs."""
        return max((link.cohort_size for link in self.links), default=1)

    @property
    def guarantee(self) -> Guarantee:  # type: ignore[override]
        """The strongest guarantee that survives the other links."""
        for maker in self.links:
            # A link that reads the batch may mix examples before the noise, and after the noise it
            # is not post-processing. All others keep differential privacy.
            reading = any(link.uses_context for link in self.links if link is not maker)
            if maker.guarantee is Guarantee.DIFFERENTIAL_PRIVACY and not reading:
                return Guarantee.DIFFERENTIAL_PRIVACY
        known = isinstance(_sketched(self).law, Gaussian | Laplace)
        return Guarantee.KNOWN_NOISE if known else Guarantee.NONE

    @property
    def gives_bound(self) -> bool:  # type: ignore[override]
        return any(link.gives_bound for link in self.links)

    @property
    def data_dependent_law(self) -> bool:  # type: ignore[override]
        return any(link.data_dependent_law for link in self.links)

    @property
    def continuous(self) -> bool:  # type: ignore[override]
        return all(link.continuous for link in self.links)

    @property
    def starts_late(self) -> bool:
        return any(link.starts_late for link in self.links)

    @property
    def sides(self) -> tuple[Chain, Chain]:
        """The links that run on each client, and those that run on the stacked rows of all."""
        sums = [link.returns(Unit.CLIENT) is Unit.COHORT for link in self.links]
        at = sums.index(True) if True in sums else len(sums)
        return _Part(self.links[:at]), _Part(self.links[at:])

    def resolve(
        self,
        task: Task,
        examples: int,
        previous: Defense | None = None,
    ) -> Chain:
        before = previous.links if isinstance(previous, Chain) else (None,) * len(self.links)
        pairs = zip(self.links, before, strict=True)
        return Chain(tuple(link.resolve(task, examples, old) for link, old in pairs))

    def returns(self, given: Unit) -> Unit:
        for link in self.links:
            given = link.returns(given)
        return given

    def prepare(self, task: Task, source: Source) -> Task:
        for link in self.links:
            task = link.prepare(task, source)
        return task

    def init(self, task: Task) -> State:
        return tuple(link.init(task) for link in self.links)

    def begin(
        self,
        task: Task,
        state: State,
        source: Source,
    ) -> tuple[Task, State]:
        after = []
        for link, link_state in self._with_states(state):
            task, link_state = link.begin(task, link_state, source)
            after.append(link_state)
        return task, tuple(after)

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        after = []
        for link, link_state in self._with_states(state):
            update, link_state = link.transform(update, link_state, context, source)
            after.append(link_state)
        return update, tuple(after)

    def acts(self, state: State) -> bool:
        return all(link.acts(link_state) for link, link_state in self._with_states(state))

    def _with_states(self, state: State) -> Iterator[tuple[Defense, State]]:
        # A client has no state before its first round.
        return zip(self.links, state or [None] * len(self.links), strict=True)

    def imitate(self, rows: Tensor) -> Tensor:
        for link in self.links:
            rows = link.imitate(rows)
        return rows

    def infer(self, task: Task, update: Update) -> Task:
        for link in self.links:
            task = link.infer(task, update)
        return task

    def noise_variance(
        self,
        task: Task,
        inputs: Tensor,
        labels: Tensor,
    ) -> Tensor | None:
        """That of the one link with a data-dependent law; None unless there is exactly one."""
        # A law of the rows that a link gets (`law_of_rows`) is known only for the first link.
        links = [k for i, k in enumerate(self.links) if not (k.law_of_rows and i)]
        each = [link.noise_variance(task, inputs, labels) for link in links]
        known = [variance for variance in each if variance is not None]
        return known[0] if len(known) == 1 else None

    def __eq__(self, other: object) -> bool:
        return self.links == other.links if isinstance(other, Chain) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.links)

    def __repr__(self) -> str:
        return " → ".join(repr(link) for link in self.links) if self.links else "none"


class _Part(Chain):
    """Consecutive links of a checked chain; on their own they may fail the check."""

    def __post_init__(self) -> None:
        pass


class NoDefense(Chain):
    """Send the plain update.

    Guarantees: none.

    Source: the undefended client of federated averaging, McMahan et al. 2017.

    Example:
        >>> NoDefense().guarantee.value
        'none'
    """

    def __init__(self) -> None:
        super().__init__(())


def chain(*links: Defense) -> Chain:
    """Compose defenses, first to last.

    Raises:
        ValueError: a link cannot take what the link before it returns, or two links conflict; the
            message names both.

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
    # Only here: a part of a chain, as the contract checks cut it, may lack the link that undoes it.
    _check_basis(whole.links)
    return whole


def tiny_covariance(update: Update, *, correlated: bool) -> Structured:
    """An example covariance over the coordinates of a small update, for a `_sketch`."""
    like = update.rows
    width = like.shape[1]
    basis = torch.full((width, 1), width**-0.5).to(like)
    block = LowRank(0, width, basis, torch.ones(1).to(like))
    scale = torch.arange(1, width + 1).to(like)
    return Structured(scale, (block,) if correlated else ())


def _sketched(whole: Chain) -> Update:
    """A tiny update after the chain, by the rules of `Update`, of at most two unequal clients."""
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


def _check_training(links: tuple[Defense, ...], start: Unit) -> None:
    """At most one link decides where the client starts, and none breaks another's guarantee."""
    plain = next((link for link in links if link.plain_gradient), None)
    starts = [link for link in links if link.changes_start]
    if len(starts) > 1:
        raise ValueError(
            f"{starts[0]!r} and {starts[1]!r} both decide which weights the client keeps; leave "
            "one out"
        )
    if starts and plain is not None:
        raise ValueError(
            f"{starts[0]!r} lets the client start from its own weights, but the guarantee of "
            f"{plain!r} holds only for the weights that were sent; set its level in another way "
            "(noise_std)"
        )
    for link in links:
        if not link.changes_training:
            continue
        if start not in link.accepts:
            raise ValueError(
                f"{link!r} changes the local training of a whole client, but {_first(links)} one "
                f"row per {start.noun}; they cannot be combined"
            )
        if plain is not None:
            raise ValueError(
                f"{link!r} changes the local training, but the guarantee of {plain!r} holds only "
                "for the plain gradient; set its level in another way (noise_std)"
            )


def _first(links: tuple[Defense, ...]) -> str:
    """The link that decides what the client's rows are, for a message."""
    wants = next((repr(link) for link in links if Unit.CLIENT not in link.accepts), None)
    return f"{wants} later in the chain asks for" if wants else "the client gives"


def _check_units(links: tuple[Defense, ...], unit: Unit) -> None:
    """Every link takes the rows that the link before it returns."""
    before: Defense | None = None
    for link in links:
        if unit not in link.accepts:
            wanted = " or ".join(u.noun for u in sorted(link.accepts))
            source = f"{before!r} before it returns" if before else _first(links)
            advice = (
                f"put {link!r} first"
                if min(link.accepts) < unit
                else f"put a link that makes {wanted} rows before it"
            )
            raise ValueError(
                f"{link!r} takes one row per {wanted}, but {source} one row per {unit.noun}; "
                f"{advice}"
            )
        unit = link.returns(unit)
        before = link


def _check_bounds(links: tuple[Defense, ...]) -> None:
    """A link that needs bounded rows gets them."""
    bounded = False
    before: Defense | None = None  # if nothing bounds: the link that undid it, or the last link
    for link in links:
        if link.needs_bound and not bounded:
            source = f"{before!r} before it" if before else "the plain gradient"
            raise ValueError(
                f"{link!r} needs rows to which one example adds a bounded amount, but {source} "
                "bounds nothing; put ClipExamples before it"
            )
        if link.gives_bound:
            bounded = True
        elif not (link.keeps_law and link.keeps_bound) or link.uses_context:
            bounded = False
            before = link
        elif not bounded and before is None:
            before = link


def _check_examples(links: tuple[Defense, ...]) -> None:
    """Nothing changes rows before a link that recomputes them, or reads the true examples."""
    at = next((i for i, link in enumerate(links) if link.replaces_examples), None)
    if at is None:
        return
    anew = links[at]
    for link in links[:at]:
        if not link.changes_training:
            raise ValueError(
                f"{anew!r} recomputes the rows and would undo {link!r}; put {anew!r} first"
            )
    for link in links[at + 1 :]:
        if link.uses_context:
            raise ValueError(
                f"{link!r} reads the client's examples, which {anew!r} must hide; leave one out"
            )


def _check_basis(links: tuple[Defense, ...]) -> None:
    """Every link that changes the coordinates is undone by a later one, innermost first."""
    waiting: list[Defense] = []
    for link in links:
        if link.unmaps_basis is not None and waiting:
            opener = waiting.pop()
            if opener.maps_basis != link.unmaps_basis:
                raise ValueError(
                    f"{link!r} does not undo {opener!r} before it; give both the same settings"
                )
        if link.maps_basis is not None:
            waiting.append(link)
    if waiting:
        raise ValueError(
            f"{waiting[-1]!r} leaves rows in other coordinates, and nothing undoes it; put Color "
            "with the same settings after it"
        )
