"""Defense by attack: the median score of every pair, one table a model and batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leakbound.report.tables import AttackSummary, ErrorBoundRow, grouped


@dataclass(frozen=True)
class Square:
    """One pair; `level`: of 0 to 1, how strong its color is.

    `unreliable`: at least half of its experiments report that the attack did not converge.
    """

    row: AttackSummary
    level: float
    unreliable: bool


@dataclass(frozen=True)
class Heatmap:
    """Each line: a defense, a square or None for every attack, and what bounds every attacker.

    `more`: how many defenses are left out, those with the lowest scores.
    """

    model: str
    batch_size: int
    attacks: tuple[str, ...]
    lines: tuple[HeatLine, ...]
    more: int

    @property
    def bounded(self) -> bool:
        return any(bound for *_, bound in self.lines)


HeatLine = tuple[str, tuple[Square | None, ...], ErrorBoundRow | None]


def heatmaps(
    rows: Sequence[AttackSummary],
    attacks: Sequence[str],
    bounds: Mapping[tuple[str, int, str], ErrorBoundRow | None],
    top: float,
    most: int,
) -> list[Heatmap]:
    """Pairs that ran; an attack that nowhere applies to a model and batch size has no column.

    Scores from `top` on have the strongest color. All tables together have at most `most` lines.
    """
    ran = [row for row in rows if row.ran or row.failed]
    lowest = min((row.score.median for row in ran if row.score), default=0.0)
    made = []
    tables = grouped(((row.model, row.batch_size), row) for row in ran)
    for (model, size), own in tables.items():
        met = {row.attack for row in own}
        columns = tuple(attack for attack in attacks if attack in met)
        by_defense = grouped((row.defense, row) for row in own)
        lines: list[HeatLine] = []
        for defense, some in by_defense.items():
            known = {row.attack: _square(row, lowest, top) for row in some}
            squares = tuple(known.get(attack) for attack in columns)
            lines.append((defense, squares, bounds.get((model, size, defense))))
        if columns:
            shown = _highest(lines, most // len(tables))
            made.append(Heatmap(model, size, columns, shown, len(lines) - len(shown)))
    return made


def _highest(lines: list[HeatLine], most: int) -> tuple[HeatLine, ...]:
    """The lines as they are; of too many, those with the highest scores first."""

    def highest(line: HeatLine) -> float:
        scores = (one.row.score for one in line[1] if one)
        return max((score.median for score in scores if score), default=-math.inf)

    if len(lines) > most:
        lines.sort(key=highest, reverse=True)
    return tuple(lines[:most])


def _square(row: AttackSummary, lowest: float, top: float) -> Square:
    level = 0.0
    if row.score and lowest < top:
        level = (min(row.score.median, top) - lowest) / (top - lowest)
    return Square(row, round(level, 2), row.ran > 0 and 2 * row.did_not_converge >= row.ran)
