"""The table of S_D: for each defense what the strongest attack leaves, beside the floors on it.

Errors are roots of mean squared errors in units of the inputs' range, from the records' PSNRs:
these are relative to that range for attacks, blind guesses and floors alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from leakbound.assess.record import Record
from leakbound.report.floors import is_floor
from leakbound.report.strength import NO_UPDATE, Strength, ran, rounds_of, square, strength
from leakbound.report.tables import Names

BLIND = "guess without update"
UNPROVED = "unproved"
_HUGE = 1e300


@dataclass(frozen=True)
class Least:
    """A floor on the mean squared error of single images, and how near the winner comes.

    Attributes:
        root: the root of the mean of the floors over `n` rounds, in units of the inputs' range.
        tightness: the winner's root mean squared error in these rounds over `root`; None where
            that is 0.
        name, prior: what the floor is and for which images it holds.
        n: the rounds that hold it.
    """

    root: float
    tightness: float | None
    name: str
    prior: str
    n: int


@dataclass(frozen=True)
class Row:
    """One defense: its S_D, and a floor or in a few words why none applies.

    `found` is None where no round has a result of every attack. `left_out`: rounds in which an
    attack has none; `missing`: attacks without any. `loss`: the mean training loss over the seeds
    that ran.
    """

    defense: str
    found: Strength | None
    left_out: int
    missing: tuple[str, ...]
    floor: Least | str
    loss: float | None

    @property
    def winner(self) -> str:
        """Who reached S_D, for reading."""
        if self.found is None:
            return "no round has a result of every attack"
        return BLIND if self.found.attack == NO_UPDATE else self.found.attack


@dataclass(frozen=True)
class Section:
    """The rows of one model and batch size."""

    model: str
    batch_size: int
    rows: tuple[Row, ...]


def sections(
    cells: Iterable[Record], trainings: Iterable[Record], names: Names
) -> tuple[Section, ...]:
    """One table for each model and batch size; none where no row has an S_D."""
    found: dict[tuple[str, int], dict[str, list[Record]]] = {}
    for cell in cells:
        rows = found.setdefault((names.model(cell), cell["batch_size"]), {})
        rows.setdefault(names.defense(cell), []).append(cell)
    losses = _losses(trainings, names)
    made = [
        Section(
            model, size, tuple(_row(d, own, names, losses.get((model, d))) for d, own in r.items())
        )
        for (model, size), r in found.items()
    ]
    return tuple(one for one in made if any(row.found for row in one.rows))


def _row(defense: str, cells: Sequence[Record], names: Names, loss: float | None) -> Row:
    attacks: dict[str, list[Record]] = {}
    for cell in cells:
        attacks.setdefault(names.attack(cell), []).append(cell)
    own = rounds_of(attacks)
    if not own.blind:
        return Row(defense, None, own.left_out, own.missing, "–", loss)
    result = strength(own.attacks, own.blind)
    winner = {**own.blind, **own.attacks.get(result.attack, {})}
    held = [cell for cell in cells if cell["seed"] in own.blind and ran(cell)]
    return Row(defense, result, own.left_out, own.missing, _floor(held, winner), loss)


def _floor(cells: Sequence[Record], winner: Mapping[int, Sequence[float]]) -> Least | str:
    """Of several floors on all attackers the one in most rounds, of these the highest.

    Where the attacks' cells of one round hold different floors (a malicious server changes the
    model), the lowest covers them all.
    """
    if any(len(errors) > 1 for errors in winner.values()):
        return "single examples only"
    known: dict[tuple[str, str], dict[int, list[float]]] = {}
    others: dict[str, None] = {}
    for cell in cells:
        for bound in filter(is_floor, cell.get("bounds") or []):
            if bound["covers"] != "all":
                others[bound["covers"]] = None
                continue
            level = 0.0 if bound["psnr"] is None else square(bound["psnr"])
            own = known.setdefault((bound["name"], bound["prior"]), {})
            own.setdefault(cell["seed"], []).append(level)
    made = []
    for (name, prior), by_round in known.items():
        root = math.sqrt(fmean(min(levels) for levels in by_round.values()))
        error = math.sqrt(fmean(value for seed in by_round for value in winner[seed]))
        made.append(Least(root, error / root if root else None, name, prior, len(by_round)))
    if made:
        return max(made, key=lambda one: (one.n, one.root))
    if not others:
        return "none"
    known_for = [words for words in others if words != UNPROVED]
    return f"only for {' and '.join(known_for)} attackers" if known_for else "not proved here"


def _losses(trainings: Iterable[Record], names: Names) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], list[float]] = {}
    for unit in trainings:
        if unit["status"] == "ok" and _is_number(unit.get("training_loss")):
            key = (names.model(unit), names.defense(unit))
            found.setdefault(key, []).append(unit["training_loss"])
    return {key: fmean(values) for key, values in found.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _HUGE
