"""Points of a study: the results of each defense, seed by seed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from leakbound.assess import Assessment, Damage, Training
from leakbound.assess import read as read_records
from leakbound.metrics import mse_of_psnr

LEVELS = ("noise_std", "utility_std", "rate")


@dataclass(frozen=True)
class Key:
    """One defense at one level: its name, what the level sets, the level, and a variant."""

    name: str
    by: str = ""
    level: float = 0.0
    variant: str = ""


@dataclass
class Point:
    """Results of one defense at one level, by seed."""

    mse: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    psnr: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    early: dict[int, float] = field(default_factory=dict)
    late: dict[int, float] = field(default_factory=dict)
    accuracy: dict[int, float] = field(default_factory=dict)
    floor: dict[int, float] = field(default_factory=dict)
    curves: dict[int, dict[int, float]] = field(default_factory=dict)

    def strongest(self) -> dict[int, float]:
        """The lowest mean squared error of all attacks and the prior-only baseline, by seed."""
        seeds = {seed for own in self.mse.values() for seed in own}
        return {s: min(own[s] for own in self.mse.values() if s in own) for s in sorted(seeds)}


def key_of(name: str, parameters: Mapping[str, Any]) -> Key:
    """The key of a record's defense.

    Example:
        >>> key_of("gaussian_noise", {"noise_std": 0.1})
        Key(name='gaussian_noise', by='noise_std', level=0.1, variant='')
    """
    parameters = dict(parameters)
    by = next((level for level in LEVELS if level in parameters), "")
    level = float(parameters.pop(by)) if by else 0.0
    for idle in ("scope", "refresh"):
        parameters.pop(idle, None)
    variant = ",".join(str(parameters[key]) for key in sorted(parameters))
    return Key(name, by, level, variant)


def read(folder: Path) -> dict[Key, Point]:
    """The points of an audit's folder."""
    points: dict[Key, Point] = defaultdict(Point)
    for path, kind in (
        (folder / "records.jsonl", Assessment),
        (folder / "utility.jsonl", Training),
    ):
        records: Iterable[Any] = read_records(path, kind) if path.exists() else ()
        for record in records:
            if isinstance(record, Damage):
                raise record
            if record.status == "failed":
                raise ValueError(f"a unit of {folder} failed: {record.reason}")
            if record.status == "ok":
                _add(points[key_of(record.defense.name, record.defense.parameters)], record)
    return dict(points)


def first_records(folder: Path) -> dict[Key, Assessment]:
    """The record of each defense in an audit's first round."""
    found: dict[Key, Assessment] = {}
    for record in read_records(folder / "records.jsonl", Assessment):
        if isinstance(record, Damage):
            raise record
        key = key_of(record.defense.name, record.defense.parameters)
        if key not in found or record.seed < found[key].seed:
            found[key] = record
    return found


def _add(point: Point, record: Assessment | Training) -> None:
    seed = record.seed
    if isinstance(record, Training):
        marks = {number: float("nan") if loss is None else loss for number, loss in record.curve}
        point.early[seed] = marks[5]
        point.late[seed] = record.training_loss or float("nan")
        point.curves[seed] = marks
        point.accuracy[seed] = record.accuracy or 0.0
        return
    attack = record.attack.name
    point.mse[attack][seed] = _mean(record.metrics["mse"])
    point.psnr[attack][seed] = _mean(record.scores)
    # inputs lie in [0, 1]
    point.mse["blind"][seed] = _mean([mse_of_psnr(v) for v in record.baseline if v is not None])
    for bound in record.bounds:
        point.floor[seed] = float(bound.value)


def _mean(values: Iterable[float | None]) -> float:
    return float(np.mean([value for value in values if value is not None]))
