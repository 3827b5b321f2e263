"""The records of the study, looked up by their settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from leakbound_reproductions.priprune.cell import Record
from leakbound_reproductions.priprune.study import Cell

BySeed = dict[int, float]
CAP = 40.0
"""Cap of PSNR, in dB: better images look the same."""
ATTACKS = ("sgi", "ordered", "rounds", "mixed")
"""Attackers of a server that knows the base mask, the paper's first."""


@dataclass(frozen=True)
class Measured:
    """Experiments with their records."""

    pairs: Sequence[tuple[Cell, Record]]

    @staticmethod
    def of(cells: Iterable[Cell], records: Mapping[str, Record]) -> Measured:
        """Every experiment with its record; an experiment of two parts is in both."""
        return Measured([(cell, records[cell.id]) for cell in cells if cell.id in records])

    def where(self, **wanted: Any) -> Measured:
        """Those whose experiments have these settings."""
        return Measured(
            [
                (cell, record)
                for cell, record in self.pairs
                if all(getattr(cell, key) == value for key, value in wanted.items())
            ]
        )

    def values(self, key: str) -> list[Any]:
        """The experiments' values of a setting, in order of appearance."""
        return list(dict.fromkeys(getattr(cell, key) for cell, _ in self.pairs))

    def by_seed(self, value: Callable[[Record], float | None]) -> BySeed:
        """A number of each record, by seed; the mean if a seed has several records."""
        found: dict[int, list[float]] = {}
        for cell, record in self.pairs:
            number = value(record)
            if number is not None:
                found.setdefault(cell.seed, []).append(number)
        return {seed: fmean(numbers) for seed, numbers in sorted(found.items())}

    def leak(self, attack: str, measure: str = "psnr", round_: int | None = None) -> BySeed:
        """An attack's result, by seed: the mean over images and, without `round_`, over rounds."""
        return self.by_seed(lambda record: leaked(record, attack, measure, round_))

    def accuracy(self, key: str = "accuracy") -> BySeed:
        """Accuracy in percent, by seed."""
        return self.by_seed(lambda record: None if record[key] is None else 100 * record[key])

    def noted(self, what: str, round_: int) -> BySeed:
        """What was noted of a round ("accuracy" of the model, "rate" of withholding), by seed."""

        def of(record: Record) -> float | None:
            rows = (row for row in record["rounds"] if row["round"] == round_)
            return next((row[what] for row in rows), None)

        return self.by_seed(of)

    def strongest(self, round_: int, among: Sequence[str] = ATTACKS) -> tuple[str, BySeed]:
        """The attack with the highest mean PSNR in a round, and its result.

        Uses the seeds that all attacks of the round attacked; some attack only the first ones.
        """
        found = {attack: self.leak(attack, "psnr", round_) for attack in among}
        known = {attack: own for attack, own in found.items() if own}
        seeds = sorted(set.intersection(*(set(own) for own in known.values())))
        means = {attack: fmean(own[seed] for seed in seeds) for attack, own in known.items()}
        best = max(means, key=lambda attack: means[attack])
        return best, {seed: known[best][seed] for seed in seeds}

    def worst(self, among: Sequence[str] = ATTACKS) -> tuple[str, BySeed]:
        """The round and attack with the highest mean PSNR, as text, and its result.

        Uses the seeds that every round's attacks attacked.
        """
        marks = sorted({mark for cell, _ in self.pairs for mark in cell.marks})
        found = {mark: self.strongest(mark, among) for mark in marks}
        seeds = sorted(set.intersection(*(set(own) for _, own in found.values())))
        at = max(found, key=lambda mark: fmean(found[mark][1][seed] for seed in seeds))
        name, own = found[at]
        return f"round {at}, {name}", {seed: own[seed] for seed in seeds}


def gave_up(found: Measured, round_: int) -> float:
    """The share of the attacks in a round that report their own failure."""
    rows = [
        row
        for _, record in found.pairs
        for row in record["attacked"]
        if row["round"] == round_ and row["status"] == "ok"
    ]
    return fmean(row["problem"] is not None for row in rows) if rows else 0.0


def leaked(record: Record, attack: str, measure: str, round_: int | None = None) -> float | None:
    """The mean over images (and rounds) of a measure; "corrected" is NMI minus its chance level."""
    rows = [
        row
        for row in record["attacked"]
        if row["attack"] == attack and row["status"] == "ok" and round_ in (None, row["round"])
    ]
    each = [_values(row, measure) for row in rows]
    numbers = [v for values in each for v in values if v is not None]
    return fmean(numbers) if numbers else None


def _values(row: Record, measure: str) -> list[float | None]:
    if measure == "corrected":
        found: list[float | None] = row["chance"]["nmi"]["corrected"]
    elif measure in ("permuted", "unrelated"):
        found = row["chance"]["nmi"][measure]
    else:
        found = row[measure]
    if measure == "psnr":
        found = [None if v is None else min(v, CAP) for v in found]
    return found


def rate_of(cell: Cell) -> float:
    """The base rate in an experiment's scheme."""
    return float(cell.pruning.split("rate=")[1].split(",")[0])


def scheme_of(cell: Cell) -> str:
    """The name of an experiment's scheme."""
    return cell.pruning.split(",")[0]


def difference(ours: BySeed, theirs: BySeed) -> BySeed:
    """Ours minus theirs, for the seeds that both have."""
    return {seed: ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))}


def less(ours: BySeed, theirs: BySeed) -> list[float]:
    """Ours minus theirs, one number per seed."""
    return list(difference(ours, theirs).values())


def average(each: Sequence[BySeed]) -> BySeed:
    """By seed, the mean over several, for the seeds that all have."""
    seeds = set.intersection(*(set(own) for own in each))
    return {seed: fmean(own[seed] for own in each) for seed in sorted(seeds)}
