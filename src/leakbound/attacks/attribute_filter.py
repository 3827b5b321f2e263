"""Attribute inference: the one thing that is not known of every example, a column or the label."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from leakbound import check
from leakbound._util.results import Fact
from leakbound.attacks.attribute import can_replay, check_memory, rank, replayed, rounding_of
from leakbound.attacks.base import (
    Attack,
    domain_of,
    expected_rows,
    outputs_of,
    probed,
    seen_task,
)
from leakbound.attacks.blind import VANISHED, public_examples
from leakbound.core import Batch, NotApplicable, Observation, Reconstruction, Task
from leakbound.domains import TableDomain
from leakbound.domains.known import LABEL, KnownValues
from leakbound.domains.table import Column
from leakbound.losses import named
from leakbound.randomness import normal

LEVELS = 20
"""Most levels of a column: each is one more training an example."""
MOST = 512
"""Most levels of all examples together."""
NEIGHBORS = 50
"""Public examples with the nearest known parts, of which levels are counted for the prior."""
PSEUDO = 5.0
"""How many examples the shares among all public ones count as, beside those of the neighbors."""
COUNTS = 0.01
"""Levels with a p-value up to this are read, as judges count facts."""
ASSUMES = (
    "they take part and all else of them is known, the client trains as declared, and what is not "
    "known of the others is as among public examples with like columns"
)


@dataclass(frozen=True, repr=False)
class AttributeFilter(Attack):
    """Read the one unknown column of every example, by training as the client did on each level.

    The attacker knows all other columns (`known` of the threat model) and the labels; or all
    columns, and asks for the labels (`known = "all"`). What each
    level of each example changes in the update is added up, and the levels of the others count as
    noise of this shape: a matched filter in their joint covariance. Each example is answered with
    its likeliest level. Where levels lie far apart, the answer is tested, too. What is read
    is a fact of the kind "attribute".

    Args:
        replays: number of trainings that measure by how much effects of levels do not add up.
        tests: trainings with each other level, for a p-value of 1 / (1 + tests) at least.
        tried: how many examples are tested: those whose levels differ most in what they change.
            Their p-values are multiplied by this number.

    Assumptions: the examples take part in the stated order, and their known columns are right.
        Nothing is tested unless the defense is known.

    Raises:
        NotApplicable: more is not known than one column or the label, or it is no category of a
            few levels.

    Source: this project; docs/risk.md, "What the attacker already knows".

    Example:
        >>> import leakbound as lb
        >>> data = lb.data.load("german")
        >>> model = torch.nn.Linear(data.inputs.shape[1], 2)
        >>> result = lb.simulate(
        ...     model,
        ...     data.batch(torch.arange(4)),
        ...     attack=AttributeFilter(tests=99, tried=1),
        ...     threat=lb.ThreatModel(known="all but foreign_worker"),
        ...     domain=data.domain,
        ... )
        >>> result.verdict
        'attribute exposed'
    """

    replays: int = 8
    tests: int = 199
    tried: int = 2

    def __post_init__(self) -> None:
        check.count(replays=self.replays, tests=self.tests, tried=self.tried)

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        known, column = _unknown_column(observation)
        labels = observation.labels
        if labels is None and not known.parts.everything:
            raise NotApplicable("the labels are not known, and each completion needs one")
        people = _OpenRows(known, labels, _priors(observation, known, column))
        effects = _Effects.measured(observation, people, self.replays, generator)
        scores = effects.scores(effects.seen(observation.update.rows.flatten()))
        answer = (scores + people.priors.log()).argmax(1)
        facts: tuple[Fact, ...] = ()
        if can_replay(observation):
            facts = self._facts(observation, people, effects, answer, column, generator)
        found = people.completed(answer)
        return Reconstruction(
            found.inputs.to(observation.update.rows),
            found.labels,
            problem=None if observation.update.rows.any() else VANISHED,
            facts=facts,
        )

    def _facts(
        self,
        observation: Observation,
        people: _OpenRows,
        effects: _Effects,
        answer: Tensor,
        column: Column,
        generator: torch.Generator,
    ) -> tuple[Fact, ...]:
        """The levels that are read, with their p-value."""
        # Chosen before the update is looked at.
        tried = effects.apart().argsort(descending=True)[: self.tried].tolist()
        p_values = {
            person: min(
                1.0,
                len(tried)
                * self._p_value(
                    observation, people, effects, person, int(answer[person]), generator
                ),
            )
            for person in tried
        }
        # The smallest one if none counts: it says how far from being read the best answer is.
        most = max(COUNTS, min(p_values.values()))
        found = sorted(person for person in tried if p_values[person] <= most)
        fact = Fact(
            kind="attribute",
            subject=column.name,
            items=tuple(column.names[int(answer[person])] for person in found),
            examples=tuple(found),
            count=len(found),
            level=max(p_values[person] for person in found),
            assumes=ASSUMES,
            sensitive=column.sensitive,
        )
        return (fact,)

    def _p_value(
        self,
        observation: Observation,
        people: _OpenRows,
        effects: _Effects,
        person: int,
        level: int,
        generator: torch.Generator,
    ) -> float:
        """The largest p-value of: this person has another level.

        As `attribute.Trainings.p_value`. If the update is farther from what all levels explain than
        every one of these trainings, something else is assumed wrongly, and the p-value is 1.
        """
        # Rounded as the trainings are: an update without rounding would fit better than they do.
        seen = effects.seen(observation.update.rows.flatten(), generator)
        largest = 0.0
        farthest = 0.0

        def behind(
            other: int,
            row: Tensor,
        ) -> float:
            scores = effects.scores(row)[person]
            return float(scores.max() - scores[other])

        def training(other: int) -> Tensor:
            nonlocal farthest
            levels = people.drawn(generator)
            levels[person] = other
            row = effects.seen(
                replayed(observation, people.completed(levels), generator),
                generator,
            )
            farthest = max(farthest, effects.distance(row))
            return row

        for other in range(people.priors.shape[1]):
            if other != level and largest <= COUNTS:
                run = partial(training, other)
                largest = max(largest, rank(partial(behind, other), seen, run, self.tests))
        return largest if effects.distance(seen) <= farthest else 1.0


@dataclass(frozen=True, eq=False)
class _OpenRows:
    """All examples but for one column, whose levels have the probabilities `priors` (N, L).

    Without `labels`, these are the levels.
    """

    known: KnownValues
    labels: Tensor | None
    priors: Tensor

    def completed(self, levels: Tensor) -> Batch:
        """Whole examples with these levels (N,)."""
        parts = self.known.parts
        values = self.known.values
        levels = levels.to(values.device)
        if self.labels is None:
            return Batch(values.reshape(-1, *parts.domain.shape), levels)
        unknown = nn.functional.one_hot(levels, parts.rest.shape[0])
        return Batch(parts.joined(values, unknown.to(values)), self.labels)

    def drawn(self, generator: torch.Generator) -> Tensor:
        """(N,) levels, drawn by their probabilities."""
        return torch.multinomial(self.priors, 1, generator=generator)[:, 0]


@dataclass(frozen=True, eq=False)
class _Effects:
    """What levels change in the update, in standard deviations of everything else.

    Attributes:
        base: (K,) the update with everybody's likeliest level.
        scale: (K,) standard deviations of noise, rounding, and what does not add up.
        rounding: (K,) that of rounding alone.
        kept: (K,) the coordinates of the update.
        of: (N, L, K) the changes, over `scale`.
        priors: (N, L).
    """

    base: Tensor
    scale: Tensor
    rounding: Tensor
    kept: Tensor
    of: Tensor
    priors: Tensor

    @staticmethod
    def measured(
        observation: Observation,
        people: _OpenRows,
        replays: int,
        generator: torch.Generator,
    ) -> _Effects:
        """By a training for each level of each example, and `replays` with drawn levels."""
        size, count = people.priors.shape
        check_memory(observation, size * count)
        task = seen_task(observation)
        usual = people.priors.argmax(1)
        train = partial(_expected, observation, task, people)
        base = train(usual)
        changes = base.new_zeros(size, count, len(base))
        for person in range(size):
            for level in range(count):
                if level != usual[person]:
                    levels = usual.clone()
                    levels[person] = level
                    changes[person, level] = train(levels) - base
        everyone = torch.arange(size)
        off = torch.zeros_like(base, dtype=torch.float64)
        for _ in range(replays):
            levels = people.drawn(generator)
            added = base + changes[everyone, levels].sum(0)
            off += (train(levels) - added).double().square() / replays
        rounding = rounding_of(observation, base).repeat(len(base) // len(task.parameters))
        variance = off + rounding.square()
        if observation.noise_variance is not None:
            variance = variance + observation.noise_variance.flatten()
        kept = torch.arange(len(base), device=base.device)
        if observation.update.mask is not None:
            kept = kept[observation.update.mask.flatten().bool()]
        scale = variance[kept].sqrt()
        of = changes[..., kept].double() / scale
        return _Effects(base[kept].double(), scale, rounding[kept], kept, of, people.priors)

    def seen(
        self,
        row: Tensor,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """(K,) an update (R P,) less the base, over `scale`; with `generator`, rounded."""
        values = row[self.kept].double()
        if generator is not None:
            values = values + self.rounding * normal(values.shape, generator, like=values)
        return (values - self.base) / self.scale

    @cached_property
    def _all(self) -> Tensor:
        """(N L, K)."""
        return self.of.flatten(0, 1)

    @cached_property
    def _gram(self) -> Tensor:
        """(N L, N L)."""
        return self._all @ self._all.T

    @cached_property
    def _roots(self) -> Tensor:
        """(N, L, L) F with F Fᵀ the covariance of the indicators of a person's levels."""
        root = self.priors.sqrt()
        return torch.diag_embed(root) - self.priors[:, :, None] * root[:, None, :]

    def _without(self, person: int | None) -> tuple[Tensor, Tensor]:
        """The mean (N L,) of the indicators of levels, and a root of their covariance.

        Both are 0 for one person, whose level is asked for.
        """
        mean = self.priors.clone()
        roots = self._roots.clone()
        if person is not None:
            mean[person] = 0
            roots[person] = 0
        return mean.flatten(), _block_diagonal(roots)

    @cached_property
    def _filters(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights (N, L, K), what they are compared with (N, L), and Gram matrices (N, L, L).

        The others' levels are taken as normal with their mean and covariance; the weights whiten
        by the inverse I - M (1 + Mᵀ M)⁻¹ Mᵀ of the covariance 1 + M Mᵀ (Woodbury).
        """
        size, count, _ = self.of.shape
        gram = self._gram
        weights = []
        centers = []
        grams = []
        for person in range(size):
            own = slice(person * count, (person + 1) * count)
            mean, root = self._without(person)
            inner = torch.eye(len(root), dtype=root.dtype) + root.T @ gram @ root
            taken = torch.linalg.solve(inner, root.T @ gram[:, own]).T @ root.T
            kept = torch.eye(len(root), dtype=root.dtype)[own] - taken
            inside = kept @ gram
            weights.append(kept @ self._all)
            grams.append(inside[:, own])
            centers.append(inside @ mean + inside[:, own].diagonal() / 2)
        return torch.stack(weights), torch.stack(centers), torch.stack(grams)

    def scores(self, row: Tensor) -> Tensor:
        """(N, L) log-likelihoods of every level, up to a constant for each person."""
        weights, centers, _ = self._filters
        return weights @ row - centers

    def apart(self) -> Tensor:
        """(N,) how far the likeliest level is from the nearest other, in standard deviations."""
        gram = self._filters[2]
        size = len(gram)
        usual = self.priors.argmax(1)
        everyone = torch.arange(size)
        own = gram.diagonal(dim1=1, dim2=2)
        apart = own + own[everyone, usual][:, None] - 2 * gram[everyone, usual]
        apart[everyone, usual] = math.inf
        return apart.amin(1).clamp_min(0).sqrt()

    def distance(self, row: Tensor) -> float:
        """How far an update is from what the levels of all explain, in variances a coordinate."""
        mean, root = self._without(None)
        off = row - mean @ self._all
        inner = torch.eye(len(root), dtype=root.dtype) + root.T @ self._gram @ root
        explained = torch.linalg.solve(inner, root.T @ (self._all @ off))
        left = off - (root @ explained) @ self._all
        return float((left.square().sum() + explained.square().sum()) / len(row))


def _block_diagonal(blocks: Tensor) -> Tensor:
    """(N L, N L) from blocks (N, L, L)."""
    size, count, _ = blocks.shape
    whole = blocks.new_zeros(size, count, size, count)
    everyone = torch.arange(size)
    whole[everyone, :, everyone] = blocks
    return whole.reshape(size * count, size * count)


def _expected(
    observation: Observation,
    task: Task,
    people: _OpenRows,
    levels: Tensor,
) -> Tensor:
    """(R P,) the update with these levels (N,), without noise."""
    batch = people.completed(levels)
    return expected_rows(observation, task, batch.inputs, batch.labels).detach().flatten()


def _unknown_column(observation: Observation) -> tuple[KnownValues, Column]:
    known = observation.known
    if known is None:
        raise NotApplicable("no columns are known; give all but one (`known` of the threat model)")
    placed = domain_of(observation.task, TableDomain).placed
    unknown = [column for column, start, _ in placed if not bool(known.parts.places[start])]
    if known.parts.everything:
        unknown = [Column(LABEL, "categorical", levels=_classes(observation))]
    if len(unknown) != 1:
        raise NotApplicable("more than one column of a table is not known")
    [column] = unknown
    if not column.categorical or len(column.names) > LEVELS:
        raise NotApplicable(
            f"what is not known, {column.name!r}, is no category of at most {LEVELS} levels"
        )
    if observation.examples * len(column.names) > MOST:
        raise NotApplicable(
            f"{observation.examples} examples with {len(column.names)} levels are more than {MOST} "
            "together"
        )
    return known, column


def _classes(observation: Observation) -> tuple[str, ...]:
    """What a label may be."""
    loss = named(observation.task.loss)
    if not loss.by_class or loss.dense:
        raise NotApplicable("the labels are not known, and they are no classes")
    count = outputs_of(observation) or probed(observation)[0].numel()
    return tuple(map(str, range(max(2, count))))


def _priors(
    observation: Observation,
    known: KnownValues,
    column: Column,
) -> Tensor:
    """(N, L) how likely each level is without the update; all equally without public examples."""
    count = len(column.names)
    public = public_examples(observation)
    if public is None:
        return torch.full((observation.examples, count), 1 / count, dtype=torch.float64)
    parts = known.parts
    levels = public.labels if parts.everything else parts.unknown(public.inputs).argmax(1)
    levels = levels.cpu()
    hot = nn.functional.one_hot(levels, count).double()
    overall = (hot.sum(0) + 1) / (len(hot) + count)
    apart = parts.part.costs(known.values, parts.values(public.inputs))
    near = apart.argsort(dim=1, stable=True)[:, :NEIGHBORS].cpu()
    counts = hot[near].sum(1) + PSEUDO * overall
    return counts / counts.sum(1, keepdim=True)
