"""Columns of a table: how often each is right beside the prior-only baseline, and single rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from scipy.special import bdtrc

from leakbound._util.groups import T, grouped
from leakbound._util.intervals import holm, wilson
from leakbound._util.results import SequenceResult
from leakbound.assess.record import Assessment
from leakbound.report import tables
from leakbound.report.tables import (
    Configuration,
    ConfigurationPart,
    Names,
    ReportPart,
    ShareInterval,
)

SIGNIFICANT: Final = 0.01
"""The largest corrected p-value at which a column counts as revealed."""
MOST = 60
"""How many columns of one row a page shows."""


class ColumnShare(ReportPart, frozen=True):
    """Rows that attack and baseline have right; `p_value`: corrected, of no difference."""

    name: str
    unit: str
    sensitive: bool
    attack: ShareInterval
    baseline: ShareInterval
    p_value: float

    @property
    def revealed(self) -> bool:
        return self.p_value <= SIGNIFICANT


class ColumnTable(ConfigurationPart, frozen=True):
    """A configuration's strongest attack over all `rows`: sensitive columns, then by share.

    `fewest`: from fewer rows no column can be called revealed.
    """

    attack: str
    rows: int
    fewest: int
    columns: tuple[ColumnShare, ...]

    @property
    def few(self) -> bool:
        return self.rows < self.fewest

    @property
    def revealed(self) -> int:
        return sum(column.revealed for column in self.columns)


@dataclass(frozen=True)
class RowCell:
    """One value of a row as text; `truth` and `right` are None if the truth is not known.

    `agreement`: the share of the attack's searches that agree; None if it does not count them.
    """

    name: str
    sensitive: bool
    truth: str | None
    reconstruction: str
    right: bool | None
    agreement: float | None = None


@dataclass(frozen=True)
class RowTable:
    """The row or sequence at `place` of a batch; `more` columns or tokens are left out.

    `part`: "column", or "token", whose cells have the names of their places from 1 on.
    """

    place: int
    cells: tuple[RowCell, ...]
    more: int
    part: str = "column"

    @property
    def noun(self) -> str:
        return "row" if self.part == "column" else "sequence"

    @property
    def known(self) -> bool:
        return any(cell.truth is not None for cell in self.cells)

    @property
    def agreed(self) -> bool:
        return any(cell.agreement is not None for cell in self.cells)

    def first(self, most: int) -> RowTable:
        """Sensitive columns, then those that are right: `most` of them."""
        cells = [*self.cells]
        if self.part == "column":
            cells.sort(key=lambda cell: (not cell.sensitive, not cell.right))
        more = self.more + max(0, len(cells) - most)
        return RowTable(self.place, tuple(cells[:most]), more, self.part)


def column_tables(
    assessments: Iterable[Assessment],
    names: Names,
    rows: Iterable[Configuration],
) -> list[ColumnTable]:
    """A table for each configuration whose strongest attack has measured columns.

    P-values are corrected over the columns of all attacks, as the strongest is chosen by its
    result. Rows count as independent.
    """
    ran = grouped((names.key(a), a) for a in assessments if a.status == "ok" and a.columns)
    tables_made = []
    for row in rows:
        attacks = grouped((names.attack(a), a) for a in ran.get(row.key, ()))
        pairs = grouped(
            ((attack, column.name), both)
            for attack, some in attacks.items()
            for a in some
            for column in a.columns or ()
            for both in zip(column.matched, column.baseline, strict=False)
        )
        corrected = dict(
            zip(
                pairs,
                holm([paired(some) for some in pairs.values()]),
                strict=True,
            )
        )
        attack = str(row.strongest_attack)
        made = [
            ColumnShare(
                column.name,
                column.unit,
                column.sensitive,
                attack=_wilson_share([one for one, _ in pairs[attack, column.name]]),
                baseline=_wilson_share([other for _, other in pairs[attack, column.name]]),
                p_value=corrected[attack, column.name],
            )
            for column in (attacks[attack][0].columns or () if attack in attacks else ())
            if (attack, column.name) in pairs
        ]
        if made:
            made.sort(key=lambda one: (not one.sensitive, -one.attack.value, one.name))
            # From so few rows, even a perfect attack has a corrected p-value above the limit.
            fewest = math.ceil(math.log2(len(pairs) / SIGNIFICANT))
            tables_made.append(ColumnTable(*row.key, attack, made[0].attack.n, fewest, tuple(made)))
    return tables_made


def paired(pairs: Sequence[tuple[bool, bool]]) -> float:
    """The exact one-sided p-value of McNemar (1947): the first is right no more often.

    Example:
        >>> paired([(True, False)] * 5 + [(True, True)])
        0.03125
    """
    won = sum(a and not b for a, b in pairs)
    differ = sum(a != b for a, b in pairs)
    # `bdtrc` is the probability of more than its first argument.
    return float(bdtrc(won - 1, differ, 0.5)) if won else 1.0


def row_of(assessment: Assessment) -> RowTable | None:
    """The best reconstructed row or sequence; None if the record holds no values."""
    sequences = assessment.sequences
    scores = assessment.scores if sequences is None else assessment.scores[: len(sequences)]
    # Without the truth there are no scores: then the first row stands for all.
    place = max(range(len(scores)), key=lambda i: scores[i] or 0.0) if scores else 0
    if sequences:
        return _sequence(sequences[place], place)

    def at_place(values: Sequence[T]) -> T | None:
        return values[place] if place < len(values) else None

    cells = [
        RowCell(
            column.name,
            column.sensitive,
            at_place(column.truth),
            column.reconstruction[place],
            at_place(column.matched),
            at_place(column.agreement),
        )
        for column in sorted(assessment.columns or (), key=lambda column: not column.sensitive)
        if place < len(column.reconstruction)
    ]
    return RowTable(place, tuple(cells[:MOST]), max(0, len(cells) - MOST)) if cells else None


def _sequence(sequence: SequenceResult, place: int) -> RowTable:
    count = len(sequence.reconstruction)
    truth = sequence.truth or (None,) * count
    right = sequence.matched or (None,) * count
    shares = sequence.agreement or (None,) * count
    cells = tuple(
        RowCell(str(k), False, *values)
        for k, values in enumerate(
            zip(truth, sequence.reconstruction, right, shares, strict=True), 1
        )
    )
    return RowTable(place, cells[:MOST], max(0, count - MOST), "token")


def _wilson_share(hits: Sequence[bool]) -> ShareInterval:
    n = len(hits)
    count = sum(hits)
    return ShareInterval(count, n, count / n, *wilson(count, n), tables.LEVEL)
