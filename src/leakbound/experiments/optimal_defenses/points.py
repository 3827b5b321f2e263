"""Points of a study: what each defense gave, seed by seed, and paired comparisons of them."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

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
        for line in path.read_text(encoding="utf-8").splitlines():
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
        point.accuracy[seed] = record["accuracy"]
        return
    attack = record["attack"]["name"]
    point.mse[attack][seed] = float(np.mean(record["metrics"]["mse"]))
    point.psnr[attack][seed] = float(np.mean(record["metrics"]["psnr"]))
    blind = [10 ** (-value / 10) for value in record["blind"]["psnr"]]  # inputs lie in [0, 1]
    point.mse["blind"][seed] = float(np.mean(blind))
    for bound in record["bounds"]:
        point.floor[seed] = float(bound["value"])


@dataclass(frozen=True)
class Gain:
    """A paired mean difference with its 95 % interval, by Student's t over seeds."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def word(self) -> str:
        """Holds, does not hold, or undecided: whether the interval excludes 0 and on which side."""
        if self.low > 0:
            return "holds"
        return "does not hold" if self.high < 0 else "undecided"


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Gain:
    """Ours - theirs over the seeds that both have.

    Example:
        >>> paired({0: 2.0, 1: 3.0, 2: 4.0}, {0: 1.0, 1: 1.0, 2: 1.0}).mean
        2.0
    """
    seeds = sorted(set(ours) & set(theirs))
    return gain([ours[s] - theirs[s] for s in seeds])


def gain(differences: Sequence[float]) -> Gain:
    """The mean of differences with its interval."""
    n = len(differences)
    if n < 2:
        raise ValueError(f"there are {n} seeds to compare; give at least 2")
    mean, spread = float(np.mean(differences)), float(np.std(differences, ddof=1))
    half = float(stats.t.ppf(0.975, n - 1)) * spread / math.sqrt(n)
    return Gain(mean, mean - half, mean + half, n)


def logs(values: Mapping[int, float]) -> dict[int, float]:
    """Decibels: ten times the decimal logarithm of errors, so that differences are PSNR."""
    return {seed: 10 * math.log10(value) for seed, value in values.items()}


def at_equal_loss(
    ours: Iterable[tuple[Mapping[int, float], Mapping[int, float]]],
    theirs: Iterable[tuple[Mapping[int, float], Mapping[int, float]]],
) -> Gain | None:
    """How much higher our error is (in dB) where the training loss is the same, by seed.

    Each family is a curve of (loss, error) over its levels; ours is read, by linear interpolation
    between neighbours in loss, at their points within the common range of losses. None where the
    ranges do not meet for two seeds.
    """
    own, other = list(ours), list(theirs)
    shared = set.intersection(*(set(a) & set(b) for a, b in own + other))
    found = []
    for seed in sorted(shared):
        mine = sorted((loss[seed], 10 * math.log10(error[seed])) for loss, error in own)
        yours = sorted((loss[seed], 10 * math.log10(error[seed])) for loss, error in other)
        low, high = max(mine[0][0], yours[0][0]), min(mine[-1][0], yours[-1][0])
        if low >= high:
            continue
        at = np.linspace(low, high, 20)
        found.append(float(np.mean(_curve(mine, at) - _curve(yours, at))))
    return gain(found) if len(found) >= 2 else None


def _curve(points: list[tuple[float, float]], at: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    losses, errors = zip(*points, strict=True)
    return np.asarray(np.interp(at, losses, errors))
