"""Two runs beside each other: what changed, on which pairs, and whether the comparison is fair."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from leakbound._util import files
from leakbound.assess.record import PROVED, VERDICTS, Record
from leakbound.report import strength, strength_table, tables
from leakbound.report.fair import Concern, concerns
from leakbound.report.folder import Run
from leakbound.report.paired import Difference, difference

Key = tuple[str, int, str]
"""Model, batch size and defense, as the page calls them."""
FILES = ("records.jsonl", "utility.jsonl")


@dataclass(frozen=True)
class VerdictPair:
    """One combination in both runs. `change`: 1 safer in the second, -1 less safe, 0 the same."""

    first: tables.Verdict
    second: tables.Verdict

    @property
    def change(self) -> int:
        """Which way the verdict moved."""
        before, after = (
            VERDICTS.index("exposed" if row.verdict == PROVED else row.verdict)
            for row in (self.first, self.second)
        )
        return (after > before) - (after < before)


@dataclass(frozen=True)
class AttackPair:
    """One attack on one combination in both runs, over the seeds that ran in both.

    `psnr`: the cells' mean PSNR in dB. `rmse`: the roots of their mean squared errors, in units of
    the inputs' range. `unpaired`: the seeds that have a value in one run only.
    """

    key: Key
    attack: str
    psnr: Difference | None
    rmse: Difference | None
    unpaired: int


@dataclass(frozen=True)
class StrengthPair:
    """S_D of one combination in both runs.

    `held_out`: the difference over shared rounds of the error of the attack that is best on all
    other rounds, which the round itself did not choose.
    """

    key: Key
    first: strength.Strength | None
    second: strength.Strength | None
    held_out: Difference | None


@dataclass(frozen=True)
class UtilityPair:
    """Test accuracy of one model under one defense, over the training seeds of both runs."""

    model: str
    defense: str
    accuracy: Difference


@dataclass(frozen=True)
class Comparison:
    """All that a page says of two runs.

    Attributes:
        concerns: why the comparison may not be fair, and what else differs.
        identical: the names of the record files that hold the same bytes in both.
        settings: (model, batch size, defense, attack) in both, and in one only.
        cells: how many cells are in both, and how many of these have equal records.
    """

    concerns: tuple[Concern, ...]
    identical: tuple[str, ...]
    verdicts: tuple[VerdictPair, ...]
    attacks: tuple[AttackPair, ...]
    strengths: tuple[StrengthPair, ...]
    utilities: tuple[UtilityPair, ...]
    both: int
    only: tuple[tuple[tuple[str, int, str, str, int], ...], ...]
    cells: tuple[int, int]


def compare(first: Run, second: Run) -> Comparison:
    """Two runs, paired by model, batch size, defense, attack and seed, whatever else differs."""
    cells = first.cells, _aligned(first.cells, second.cells)
    names = tables.Names([*cells[0], *cells[1]], [*first.trainings, *second.trainings])
    groups = _grouped(cells[0], names), _grouped(cells[1], names)
    shared = [key for key in groups[0] if key in groups[1]]
    pairs = [
        (groups[0][key][seed], groups[1][key][seed])
        for key in shared
        for seed in groups[0][key]
        if seed in groups[1][key]
    ]
    return Comparison(
        concerns=concerns(first, second, pairs),
        identical=tuple(name for name in FILES if _same_bytes(first, second, name)),
        verdicts=_verdicts(cells[0], cells[1], names),
        attacks=tuple(_attack(key, groups[0][key], groups[1][key]) for key in shared),
        strengths=_strengths(cells[0], cells[1], names),
        utilities=_utilities(first.trainings, second.trainings, names),
        both=len(shared),
        only=(_only(groups[0], groups[1]), _only(groups[1], groups[0])),
        cells=(len(pairs), sum(one == other for one, other in pairs)),
    )


def _aligned(first: Iterable[Record], second: Iterable[Record]) -> list[Record]:
    """The second run's cells, an attack of one setting in each run taken as the same attack."""
    hashes: tuple[dict[str, set[str]], dict[str, set[str]]] = ({}, {})
    second = list(second)
    for found, cells in zip(hashes, (first, second), strict=True):
        for cell in cells:
            found.setdefault(cell["attack"]["name"], set()).add(cell["attack"]["hash"])
    moved = {
        name: next(iter(own))
        for name, own in hashes[0].items()
        if len(own) == 1 and len(hashes[1].get(name, ())) == 1 and own != hashes[1][name]
    }
    return [
        cell | {"attack": cell["attack"] | {"hash": moved[cell["attack"]["name"]]}}
        if cell["attack"]["name"] in moved
        else cell
        for cell in second
    ]


def _grouped(
    cells: Iterable[Record], names: tables.Names
) -> dict[tuple[Key, str], dict[int, Record]]:
    """Cells by combination and attack, then by seed."""
    found: dict[tuple[Key, str], dict[int, Record]] = {}
    for cell in cells:
        key = (names.model(cell), cell["batch_size"], names.defense(cell)), names.attack(cell)
        found.setdefault(key, {})[cell["seed"]] = cell
    return found


def _verdicts(
    first: Sequence[Record], second: Sequence[Record], names: tables.Names
) -> tuple[VerdictPair, ...]:
    """Combinations in both: those that became less safe first, then safer, then the rest."""
    rows = [{_key(row): row for row in tables.verdicts(c, names)} for c in (first, second)]
    pairs = [VerdictPair(row, rows[1][key]) for key, row in rows[0].items() if key in rows[1]]
    return tuple(sorted(pairs, key=lambda pair: (-1, 1, 0).index(pair.change)))


def _key(row: tables.Verdict) -> Key:
    return row.model, row.batch_size, row.defense


def _attack(
    key: tuple[Key, str], first: Mapping[int, Record], second: Mapping[int, Record]
) -> AttackPair:
    values = [_values(own, lambda cell: tables.cell_value(cell, "psnr")) for own in (first, second)]
    errors = [_values(own, _rmse) for own in (first, second)]
    unpaired = len(values[0].keys() ^ values[1].keys())
    return AttackPair(*key, _over_seeds(*values), _over_seeds(*errors), unpaired)


def _values(
    cells: Mapping[int, Record], value: Callable[[Record], float | None]
) -> dict[int, float]:
    ran = {seed: value(cell) for seed, cell in cells.items() if cell["status"] == "ok"}
    return {seed: found for seed, found in ran.items() if found is not None}


def _rmse(cell: Record) -> float | None:
    return math.sqrt(fmean(strength.squares(cell, "metrics"))) if strength.ran(cell) else None


def _over_seeds(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    return difference([(first[seed], second[seed]) for seed in sorted(first) if seed in second])


def _strengths(
    first: Sequence[Record], second: Sequence[Record], names: tables.Names
) -> tuple[StrengthPair, ...]:
    found = []
    for cells in (first, second):
        sections = strength_table.sections(cells, (), names)
        found.append(
            {(s.model, s.batch_size, r.defense): r.found for s in sections for r in s.rows}
        )
    pairs = []
    for key, one in found[0].items():
        other = found[1].get(key)
        if key in found[1] and (one or other):
            rounds = _over_seeds(one.held_out, other.held_out) if one and other else None
            pairs.append(StrengthPair(key, one, other, rounds))
    return tuple(pairs)


def _utilities(
    first: Iterable[Record], second: Iterable[Record], names: tables.Names
) -> tuple[UtilityPair, ...]:
    found: list[dict[tuple[str, str], dict[int, float]]] = []
    for units in (first, second):
        own: dict[tuple[str, str], dict[int, float]] = {}
        for unit in units:
            if unit["status"] == "ok":
                key = names.model(unit), names.defense(unit)
                own.setdefault(key, {})[unit["seed"]] = float(unit["accuracy"])
        found.append(own)
    pairs = [(key, _over_seeds(own, found[1].get(key, {}))) for key, own in found[0].items()]
    return tuple(UtilityPair(*key, both) for key, both in pairs if both is not None)


def _only(
    own: Mapping[tuple[Key, str], Mapping[int, Record]],
    other: Mapping[tuple[Key, str], Mapping[int, Record]],
) -> tuple[tuple[str, int, str, str, int], ...]:
    """Settings, and seeds of shared settings, that one run has alone: each with its cells."""
    counts: Counter[tuple[str, int, str, str]] = Counter()
    for (key, attack), cells in own.items():
        counts[(*key, attack)] = len(cells.keys() - other.get((key, attack), {}).keys())
    return tuple((*setting, count) for setting, count in counts.items() if count)


def _same_bytes(first: Run, second: Run, name: str) -> bool:
    contents: list[Any] = []
    for run in (first, second):
        path = run.folder / name
        contents.append(files.read(path) if path.exists() else None)
    return bool(contents[0]) and contents[0] == contents[1]
