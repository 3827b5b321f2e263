"""Touched rows: the levels in a batch, from the rows of embeddings that have a gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from leakbound import check
from leakbound.attacks.base import Attack, seen_task
from leakbound.attacks.blind import VANISHED
from leakbound.attacks.table.decoding import PREFIXES, Answer, decoded, each_row, prior_rows
from leakbound.attacks.table.view import Block, table_of, view
from leakbound.domains import TableDomain
from leakbound.domains.arguments import ColumnEmbedding, ColumnEmbeddingBag
from leakbound.types import NotApplicable, Observation, Reconstruction, Task

CHANCE = 1e-3


@dataclass(frozen=True)
class TouchedRows(Attack):
    """Read the levels in a batch from the rows of embeddings that have a gradient.

    Only a level that occurs in the batch has a gradient in its row of the embedding. With known
    noise, a row counts if noise alone gives it its length with a chance below 0.1 % over all rows.
    For one example these are its categories. Its numbers, and for a batch the combination of the
    levels, come from span decoding of the first linear layer, restricted to these levels. Without
    such a layer, `problem` says that how they combine is not known.

    Args:
        prefixes: the largest number of prefixes that span decoding keeps.

    Assumptions: no weight decay and no momentum of earlier rounds, which change all rows. An
        example without gradient (all units off) touches no row. Counts of levels are not inferred.

    Raises:
        NotApplicable: no table, or no trained embedding that is called with a column's codes.

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

    def __call__(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        task = seen_task(observation)
        domain = table_of(task)
        tables = _tables(task, domain)

        def one(at: int, count: int) -> Answer:
            blind = prior_rows(observation, domain, count)
            if not bool(observation.update.rows[at].any()):
                return blind, float("nan"), VANISHED
            touched = _touched(observation, task, tables, at)
            many = [start for start, rows in touched.items() if int(rows.sum()) > count]
            known = {k: rows for k, rows in touched.items() if k not in many and bool(rows.any())}
            try:
                seen = view(task, domain)
                own = replace(seen, levels=tuple(_among(block, known) for block in seen.levels))
                answer = decoded(observation, own, at, count, self.prefixes)
                reason = answer[2]
            except NotApplicable as error:
                answer, reason = (blind, float("nan"), None), error.reason
            if answer[1] == answer[1]:  # it has an objective: rows were found
                return answer
            for start, rows in known.items():
                found = rows.nonzero()[:, 0]
                turn = found[torch.arange(count) % len(found)]
                blind[:, start : start + len(rows)] = torch.eye(len(rows)).double()[turn]
            said = "numbers, and how the levels combine, are not known"
            if many:
                said += f"; {len(many)} columns have more touched levels than examples"
            return blind, float("nan"), f"{said} ({reason})"

        return each_row(observation, one)

    def levels(self, observation: Observation) -> dict[str, tuple[str, ...]]:
        """The touched levels of each column with a trained embedding, in any row of the update."""
        task = seen_task(observation)
        domain = table_of(task)
        tables = _tables(task, domain)
        count, found = len(observation.update.rows), {}
        each = [_touched(observation, task, tables, at) for at in range(count)]
        for column, (start, _) in zip(domain.columns, domain.places, strict=True):
            if start in tables:
                rows = torch.stack([own[start] for own in each]).any(0)
                found[column.name] = tuple(column.names[k] for k in rows.nonzero()[:, 0].tolist())
        return found


def _tables(task: Task, domain: TableDomain) -> dict[int, list[tuple[str, Tensor, int | None]]]:
    """By the start of a column in a row, the embeddings that look it up: the name of the weight,
    its row for each level, and its row without gradient (padding).
    """
    found: dict[int, list[tuple[str, Tensor, int | None]]] = {}
    for name, own in task.model.named_modules():
        module: Any = own
        if isinstance(own, ColumnEmbedding | ColumnEmbeddingBag) and f"{name}.weight" in task.names:
            for index, place in (look for call in module.looks for look in call or ()):
                if place is not None:
                    known = (f"{name}.weight", index.cpu(), module.padding_idx)
                    found.setdefault(place[0], []).append(known)
    if not found:
        raise NotApplicable("no trained embedding looks up a column of the table")
    return found


def _touched(
    observation: Observation,
    task: Task,
    tables: dict[int, list[tuple[str, Tensor, int | None]]],
    at: int,
) -> dict[int, Tensor]:
    """By the start of a column, the levels (L,) bool that may be in the batch: in each embedding,
    their rows have a gradient, or are padding.
    """
    update, noise = task.unflatten(observation.update.rows[at]), observation.noise_variance
    spread = None if noise is None else task.unflatten(noise[at])
    found: dict[int, Tensor] = {}
    for start, looks in tables.items():
        for name, index, padding in looks:
            values = update[name][index].double().cpu()
            if spread is None:
                touched = values.any(1)
            else:
                scaled = values.square() / spread[name][index].cpu().clamp_min(1e-300)
                limit = stats.chi2.isf(CHANCE / len(update[name]), values.shape[1])
                touched = scaled.sum(1) > float(limit)
            touched = touched | (index == padding) if padding is not None else touched
            found[start] = touched & found.get(start, torch.ones_like(touched))
    return found


def _among(block: Block, known: dict[int, Tensor]) -> Block:
    """A block with only those options that may be in the batch."""
    rows = known.get(block.start)
    if rows is None or len(rows) != len(block.options):
        return block
    return replace(block, options=block.options[rows], seen=block.seen[rows])
