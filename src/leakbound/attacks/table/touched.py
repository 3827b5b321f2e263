"""Touched rows: the levels in a batch, from the weights of levels that have a gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from leakbound import check
from leakbound._util.results import LISTED, Fact
from leakbound.attacks.base import Answer, Attack, SentRow, each_row, parameter, rows_of, seen_task
from leakbound.attacks.blind import VANISHED
from leakbound.attacks.idle import beside_decay
from leakbound.attacks.span import above_noise
from leakbound.attacks.table.decoding import PREFIXES, decoded, prior_rows
from leakbound.attacks.table.view import Block, table_domain, view
from leakbound.core import NotApplicable, Observation, Reconstruction, Task
from leakbound.domains import Column, TableDomain
from leakbound.domains.arguments import looked_up
from leakbound.engines.path import unchanging
from leakbound.randomness import stream

CHANCE = 1e-3
ROWS = 4
"""Chance that noise alone touches a level; rows on which a model's modes are compared."""
ASSUMES = "the client carries no optimizer state from earlier rounds"


@dataclass(frozen=True)
class TouchedRows(Attack):
    """Read the levels in a batch from the weights of levels that have a gradient.

    Only a level that occurs in the batch has a gradient in its row of an embedding, or in its
    column of a linear layer that takes categories as one-hot groups. This holds for SGD and for
    Adam, after any number of local steps. With known noise, a level counts if noise alone gives its
    weights their length with a chance below 0.1 % over all levels of the layer. For one example
    these are its categories. Its numbers, and for a batch the combination of the levels, come from
    span decoding of the first linear layer, restricted to these levels. Where that does not apply,
    `problem` says that how they combine is not known.

    Args:
        prefixes: the largest number of prefixes that span decoding keeps.

    Assumptions: weight decay is known, and no optimizer state of earlier rounds, which change all
        weights. An example without gradient (all units off) touches none. Counts of levels are not
        inferred.
    `facts` has the touched levels of every column of which another level is not touched. It is
    empty if the model may change rows at random before the layer.

    Raises:
        NotApplicable: no table, or no trained layer that takes a column's levels one by one.

    Source: this project; Melis et al. 2019 for words.

    Example:
        >>> import leakbound as lb
        >>> from leakbound.domains import Column, TableDomain
        >>> levels = ("red", "green", "blue")
        >>> column = Column("color", "categorical", levels=levels, encoding="embedding")
        >>> layers = torch.nn.Embedding(3, 4), torch.nn.Flatten(), torch.nn.Linear(4, 2)
        >>> model, batch = torch.nn.Sequential(*layers), (torch.eye(3)[[2]], torch.tensor([0]))
        >>> domain = TableDomain((column,))
        >>> found = lb.simulate(model, batch, attack=TouchedRows(), domain=domain)
        >>> domain.rows(found.reconstruction)
        [('blue',)]
    """

    prefixes: int = PREFIXES

    def __post_init__(self) -> None:
        check.count(prefixes=self.prefixes)

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        observation = beside_decay(observation, seen_task(observation))
        task = seen_task(observation)
        domain = table_domain(task)
        tables = _tables(task, domain)
        each: list[dict[int, Tensor]] = []

        def one(row: SentRow) -> Answer:
            count = row.count
            blind = prior_rows(row, domain)
            if row.is_zero:
                return Answer(blind, VANISHED)
            touched = _touched(row, tables)
            each.append(touched)
            # More levels than examples: something else changed their weights.
            many = [start for start, rows in touched.items() if int(rows.sum()) > count]
            known = {k: rows for k, rows in touched.items() if k not in many and rows.any()}
            try:
                seen = view(task, domain)
                blocks = tuple(_among(block, known) for block in seen.levels)
                answer = decoded(row, replace(seen, levels=blocks), self.prefixes)
                reason = answer.problem
            except NotApplicable as error:
                answer = Answer(blind)
                reason = error.reason
            if answer.objective == answer.objective:  # rows were found
                return answer
            for start, rows in known.items():
                levels = rows.nonzero()[:, 0]
                turn = levels[torch.arange(count) % len(levels)]
                blind[:, start : start + len(rows)] = torch.eye(len(rows)).double()[turn]
            said = "numbers, and how the levels combine, are not known"
            if many:
                said += f"; {len(many)} columns have more touched levels than examples"
            return Answer(blind, f"{said} ({reason})")

        answer = each_row(observation, task, one)
        level = None if observation.noise_variance is None else CHANCE * len(each)
        # Only where no mode of the model changes rows at random before the layer.
        public = domain.start(ROWS, stream(0, "touched", "rows")).to(task.parameters)
        kept = {
            start: held
            for start, held in tables.items()
            if all(unchanging(task, public, one.weight.rpartition(".")[0]) for one in held)
        }
        return replace(answer, facts=_facts(domain, kept, each, level))

    def levels(self, observation: Observation) -> dict[str, tuple[str, ...]]:
        """The touched levels of each such column, in any row of the update."""
        observation = beside_decay(observation, seen_task(observation))
        task = seen_task(observation)
        domain = table_domain(task)
        tables = _tables(task, domain)
        each = [_touched(row, tables) for row in rows_of(observation, task)]
        return {
            column.name: tuple(column.names[k] for k in rows.nonzero()[:, 0].tolist())
            for column, rows in _by_column(domain, tables, each)
        }


def _by_column(
    domain: TableDomain,
    tables: Mapping[int, list[_Levels]],
    each: Sequence[Mapping[int, Tensor]],
) -> Iterator[tuple[Column, Tensor]]:
    """Every column whose levels have weights of their own, and which are touched (L,) in a row.

    A padding level has no gradient, so it does not count as touched.
    """
    for column, start, _ in domain.placed:
        if start not in tables:
            continue
        touched = torch.stack([levels[start] for levels in each]).any(0)
        for held in tables[start]:
            if held.padding is not None:
                touched = touched & (held.index != held.padding)
        yield column, touched


def _facts(
    domain: TableDomain,
    tables: Mapping[int, list[_Levels]],
    each: Sequence[Mapping[int, Tensor]],
    level: float | None,
) -> tuple[Fact, ...]:
    """The levels that occur, by column.

    If all levels of all columns are touched, something else may have changed them: weight decay, or
    an optimizer's state.
    """
    columns = [*_by_column(domain, tables, each)] if each else []
    if all(bool(touched.all()) for _, touched in columns):
        return ()
    facts = []
    for column, touched in columns:
        levels = touched.nonzero()[:, 0].tolist()
        if not levels:
            continue
        facts.append(
            Fact(
                kind="levels",
                subject=column.name,
                items=tuple(column.names[k] for k in levels[:LISTED]),
                count=len(levels),
                level=level,
                assumes=ASSUMES,
                sensitive=column.sensitive,
            )
        )
    return tuple(facts)


@dataclass(frozen=True, eq=False)
class _Levels:
    """Where a weight holds the levels of a column: in its rows `index` (L,), as an embedding, or in
    its columns (`across`), as a linear layer on one-hot categories. `padding` has no gradient.
    """

    weight: str
    index: Tensor
    across: bool = False
    padding: int | None = None

    def of(self, sent: Mapping[str, Tensor]) -> Tensor:
        """(L, width) their values in a flat vector's parts."""
        values = sent[self.weight]
        return (values.T if self.across else values)[self.index].double().cpu()


def _tables(task: Task, domain: TableDomain) -> dict[int, list[_Levels]]:
    """By the start of a column in a row, the weights that hold its levels one by one."""
    tables: dict[int, list[_Levels]] = {}
    for name, layer in task.model.named_modules():
        module: Any = layer
        if (weight := f"{name}.weight") in task.names:
            for index, start in looked_up(layer):
                known = _Levels(weight, index, padding=module.padding_idx)
                tables.setdefault(start, []).append(known)
    try:
        seen = view(task, domain)
        for block in seen.levels:
            one_hot = len(block.options) == len(block.places) > 1
            if one_hot and torch.equal(block.seen != 0, torch.eye(len(block.seen)) > 0):
                known = _Levels(
                    parameter(seen.name, "weight"),
                    block.places,
                    across=True,
                )
                tables.setdefault(block.start, [known])
    except NotApplicable:
        pass
    if not tables:
        raise NotApplicable("no trained layer takes the levels of a column one by one")
    return tables


def _touched(
    row: SentRow,
    tables: Mapping[int, list[_Levels]],
) -> dict[int, Tensor]:
    """By the start of a column, the levels (L,) bool that may be in the batch: everywhere their
    weights have a gradient, or are padding.
    """
    update = row.task.unflatten(row.values)
    spread = None if row.variance is None else row.task.unflatten(row.variance)
    every: dict[int, Tensor] = {}
    for start, held in tables.items():
        for levels_of in held:
            values = levels_of.of(update)
            if spread is None:
                touched = values.any(1)
            else:
                levels = update[levels_of.weight].shape[int(levels_of.across)]
                # The chance is for all levels of the layer together.
                chance = CHANCE / levels
                noise = levels_of.of(spread)
                touched = above_noise(row.observation, values, noise, chance)
            if levels_of.padding is not None:
                touched = touched | (levels_of.index == levels_of.padding)
            every[start] = touched & every.get(start, torch.ones_like(touched))
    return every


def _among(block: Block, known: dict[int, Tensor]) -> Block:
    """A block with only those options that may be in the batch."""
    rows = known.get(block.start)
    if rows is None or len(rows) != len(block.options):
        return block
    return block.among(rows)
