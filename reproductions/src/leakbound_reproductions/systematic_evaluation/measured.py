"""What the audits of the systematic evaluation measured, by defense."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from leakbound.assess import Assessment, Bound, Damage, Training
from leakbound.assess import read as read_records
from leakbound.report.best_attack import (
    BestAttackError,
    Rounds,
    best_attack_error,
    measured,
    rounds_of,
    squared_errors,
)
from leakbound_reproductions.systematic_evaluation.parts import (
    LONGER,
    LONGER_ABLATION,
    PRUNED_FEATURES,
    PUBLISHED,
    Part,
)

Where = tuple[str, str]
Table = dict[str, dict[str, dict[int, float]]]

R = TypeVar("R", Assessment, Training)

NAMES = {
    "clip": "clip",
    "gradient_dropout": "dropout",
    "gaussian_noise": "noise",
    "magnitude_pruning": "prune",
    "local_aggregation": "local steps",
    "quantization": "quantize, bits",
    "top_k": "top-k, withheld",
    "soteria": "Soteria",
    "mixup": "mixup",
    "dp_sgd": "DP-SGD",
}
LEVELS = ("clip_norm", "rate", "noise_std", "steps", "bits", "noise_multiplier")
HONEST = "honest"
ANY = "any"
UNAWARE = "unaware"
"""`UNAWARE`: any server, including one that does not know the defense."""
SERVERS = (HONEST, ANY)
MALICIOUS = ("malicious", "others-malicious")
"""The parts of a malicious server."""


@dataclass(frozen=True)
class Floor:
    """One attack on single images under noise, with the lower bound on the mean squared error.

    Attributes:
        noise_std: the noise.
        attack: the attack's name.
        errors: mean squared errors by round.
        floors: the estimated lower bound of each round (its weights), on the mean over images and
            noise.
    """

    noise_std: float
    attack: str
    errors: Mapping[int, float]
    floors: Mapping[int, float]


@dataclass(frozen=True)
class Measured:
    """Records of all parts, by data and part.

    Attributes:
        cells: the attacks' records.
        trainings: the trainings' records.
        names: by settings hash, the attack's name in the tables.
    """

    cells: Mapping[Where, Sequence[Assessment]]
    trainings: Mapping[Where, Sequence[Training]]
    names: Mapping[Where, Mapping[str, str]]

    @staticmethod
    def read(wanted: Iterable[Part], folder: Path) -> Measured:
        """Read the folder of the study."""
        cells = {}
        trainings = {}
        names = {}
        for part in wanted:
            at = part.data, part.name
            cells[at] = _lines(folder / part.data / part.name / "records.jsonl", Assessment)
            trainings[at] = _lines(folder / part.data / part.name / "utility.jsonl", Training)
            names[at] = part.attacks
        return Measured(cells, trainings, names)

    @property
    def data(self) -> list[str]:
        """The sets of images."""
        return list(dict.fromkeys(data for data, _ in self.cells))

    def batches(self, data: str) -> list[int]:
        """The batch sizes of the main table."""
        return sorted({cell.batch_size for cell in self.cells[data, "honest"]})

    def rounds(
        self, data: str, batch: int, server: str, *, longest: bool = False
    ) -> dict[str, Rounds]:
        """Errors by defense: of an honest server's attacks, of all, or including unaware ones.

        Args:
            data: the set of images.
            batch: the batch size.
            server: `HONEST`, `ANY` or `UNAWARE`.
            longest: with the longer searches, which only some defenses have. Comparing defenses by
                honest servers' attacks would then favor the others.
        """
        parts = ("honest", "others") + (MALICIOUS if server in (ANY, UNAWARE) else ())
        parts += (LONGER,) if longest else ()
        parts += (PUBLISHED,) if server == UNAWARE else ()
        found: dict[str, dict[str, list[Assessment]]] = {}
        for part in (p for p in parts if (data, p) in self.cells):
            name = self._attack(data, part)
            for cell in self.cells[data, part]:
                if cell.batch_size == batch:
                    own = found.setdefault(label(cell), {})
                    own.setdefault(name(cell), []).append(cell)
        return {defense: rounds_of(attacks) for defense, attacks in found.items()}

    def strengths(self, data: str, batch: int, server: str) -> dict[str, BestAttackError]:
        """S_D of every defense."""
        found = self.rounds(data, batch, server)
        return {
            d: best_attack_error(own.attacks, own.baseline)
            for d, own in found.items()
            if own.baseline
        }

    def trained(self, data: str, what: str = "training_loss") -> dict[str, dict[int, float]]:
        """By defense and seed: the loss (or accuracy) after the last round."""
        both = (*self.trainings[data, "honest"], *self.trainings.get((data, "others"), ()))
        own = [unit for unit in both if unit.status == "ok"]
        return {
            defense: {
                unit.seed: value for unit in units if (value := getattr(unit, what)) is not None
            }
            for defense, units in grouped(own, label).items()
        }

    def features(self, data: str, method: str) -> dict[str, dict[int, list[float]]]:
        """By defense and batch size: distances of the true features from the span found.

        Empty if the scale leaves features out.
        """
        part = "features" if method == "cocktail_party" else "tensors"
        if (data, part) not in self.cells:
            return {}
        name = self._attack(data, part)
        own = [cell for cell in self.cells[data, part] if name(cell) == method]
        return {
            defense: {
                size: [span for c in some if (span := _span(c)) is not None]
                for size, some in grouped(cells, lambda c: c.batch_size).items()
            }
            for defense, cells in grouped(own, label).items()
        }

    def ablation(self, data: str, *, longest: bool = False) -> Table:
        """By defense and variant of the attack: mean squared errors by round.

        Args:
            data: the set of images.
            longest: use the longest searches, which exist for few variants and defenses.
        """
        longer = longest and (data, LONGER_ABLATION) in self.cells
        parts = (LONGER_ABLATION,) if longer else ("ablation", "variants")
        found: Table = {}
        for part in (p for p in parts if (data, p) in self.cells):
            name = self._attack(data, part)
            for defense, cells in grouped(self.cells[data, part], label).items():
                own = {v: mean_errors(some) for v, some in grouped(cells, name).items()}
                found.setdefault(defense, {}).update(own)
        return found

    def floors(self, data: str) -> list[Floor]:
        """Every attack on single images, with its lower bound."""
        if (data, "floors") not in self.cells:
            return []
        found = []
        name = self._attack(data, "floors")
        for cells in grouped(self.cells[data, "floors"], label).values():
            for attack, some in grouped(cells, name).items():
                held = [c for c in some if c.status == "ok" and c.bounds]
                bounds = {c.seed: _floor(c) for c in held}
                found.append(
                    Floor(
                        cells[0].defense.parameters["noise_std"],
                        attack,
                        mean_errors(held),
                        {seed: bound.value for seed, bound in bounds.items()},
                    )
                )
        return found

    def _attack(self, data: str, part: str) -> Any:
        names = self.names[data, part]
        return lambda cell: names[cell.attack.hash]


def pruned_features(
    measured: Measured, data: str
) -> dict[tuple[int, str], dict[int, float | None]]:
    """By batch size and defense, for each round: the distance as in `Measured.features`.

    None if it cannot be evaluated: the attack failed, does not apply, or found no features.
    """
    found: dict[tuple[int, str], dict[int, float | None]] = {}
    for cell in measured.cells.get((data, PRUNED_FEATURES), ()):
        own = found.setdefault((cell.batch_size, label(cell)), {})
        own[cell.seed] = _span(cell)
    return found


def shorter(found: Measured) -> Measured:
    """The same without the longer searches."""
    longer = (LONGER, LONGER_ABLATION)
    return replace(found, cells={at: own for at, own in found.cells.items() if at[1] not in longer})


def failed(found: Measured) -> int:
    """How many attacks and trainings crashed."""
    attacks = sum(cell.status == "failed" for row in found.cells.values() for cell in row)
    return attacks + sum(u.status == "failed" for row in found.trainings.values() for u in row)


def chances(found: Measured, data: str, batch: int) -> dict[str, float]:
    """By defense: an upper bound on any attacker's probability of reaching the threshold."""
    worst: dict[str, float] = {}
    for cell in found.cells[data, "honest"]:
        for bound in cell.bounds:
            chance = bound.probability
            if cell.batch_size == batch and bound.covers == "all" and chance is not None:
                worst[label(cell)] = max(chance, worst.get(label(cell), 0.0))
    return worst


def label(record: Assessment | Training) -> str:
    """A defense's name in the tables, such as "clip 2"."""
    name = record.defense.name
    own = record.defense.parameters
    level = next((f" {own[key]:g}" for key in LEVELS if key in own), "")
    return str(NAMES.get(name, name)) + level


def family(defense: str) -> str:
    """A label without its level.

    Example:
        >>> family("local steps 3"), family("mixup")
        ('local steps', 'mixup')
    """
    return re.sub(r" [0-9.e-]+$", "", defense)


def mean_errors(cells: Iterable[Assessment]) -> dict[int, float]:
    """Mean squared error of each round that ran."""
    return {cell.seed: fmean(squared_errors(cell.scores)) for cell in cells if measured(cell)}


def grouped(records: Iterable[R], key: Any) -> dict[Any, list[R]]:
    """Records by a key, in the order of the first of each."""
    found: dict[Any, list[R]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def _lines(path: Path, kind: type[R]) -> list[R]:
    """The records of a file; raises an error if it is damaged."""
    found = []
    for record in read_records(path, kind) if path.exists() else ():
        if isinstance(record, Damage):
            raise record
        found.append(record)
    return found


def _span(cell: Assessment) -> float | None:
    return cell.features.span if cell.status == "ok" and cell.features is not None else None


def _floor(cell: Assessment) -> Bound:
    """The lower bound of an experiment; None for a probability."""
    bound: Bound = next(b for b in cell.bounds if b.on_error)
    return bound
