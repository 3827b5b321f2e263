"""Points of a study: what each defense gave, seed by seed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from leakbound._util import files

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
    """What one defense at one level gave, by seed."""

    mse: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    psnr: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    early: dict[int, float] = field(default_factory=dict)
    late: dict[int, float] = field(default_factory=dict)
    accuracy: dict[int, float] = field(default_factory=dict)
    floor: dict[int, float] = field(default_factory=dict)
    curves: dict[int, dict[int, float]] = field(default_factory=dict)

    def strongest(self) -> dict[int, float]:
        """The lowest mean squared error of all attacks, and of the blind guess, by seed."""
        seeds = {seed for own in self.mse.values() for seed in own}
        return {s: min(own[s] for own in self.mse.values() if s in own) for s in sorted(seeds)}


def key_of(defense: Mapping[str, Any]) -> Key:
    """The key of a record's defense.

    Example:
        >>> key_of({"name": "gaussian_noise", "parameters": {"noise_std": 0.1}})
        Key(name='gaussian_noise', by='noise_std', level=0.1, variant='')
    """
    parameters = dict(defense["parameters"])
    by = next((name for name in LEVELS if name in parameters), "")
    level = float(parameters.pop(by)) if by else 0.0
    for name in ("scope", "refresh"):
        parameters.pop(name, None)
    variant = ",".join(str(parameters[name]) for name in sorted(parameters))
    return Key(defense["name"], by, level, variant)


def read(folder: Path) -> dict[Key, Point]:
    """The points of an audit's folder."""
    points: dict[Key, Point] = defaultdict(Point)
    for name in ("records.jsonl", "utility.jsonl"):
        path = folder / name
        if not path.exists():
            continue
        for line in files.read(path).splitlines():
            record = json.loads(line)
            if record["status"] == "failed":
                raise ValueError(f"a unit of {folder} failed: {record['reason']}")
            if record["status"] == "ok":
                _add(points[key_of(record["defense"])], record)
    return dict(points)


def _add(point: Point, record: Mapping[str, Any]) -> None:
    seed = record["seed"]
    if "unit" in record:
        marks = {int(number): loss for number, loss in record["curve"]}
        point.early[seed], point.late[seed] = marks[5], record["training_loss"]
        point.curves[seed] = marks
        point.accuracy[seed] = record["accuracy"]
        return
    attack = record["attack"]["name"]
    point.mse[attack][seed] = float(np.mean(record["metrics"]["mse"]))
    point.psnr[attack][seed] = float(np.mean(record["metrics"]["psnr"]))
    blind = [10 ** (-value / 10) for value in record["blind"]["psnr"]]  # inputs lie in [0, 1]
    point.mse["blind"][seed] = float(np.mean(blind))
    for bound in record["bounds"]:
        point.floor[seed] = float(bound["value"])
