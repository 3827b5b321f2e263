"""Paired comparisons of what was measured seed by seed: means of differences with intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats


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


Levels = Iterable[tuple[Mapping[int, float], Mapping[int, float]]]
"""A family of defenses, level by level: training losses and errors, by seed."""


def at_equal_loss(ours: Levels, theirs: Levels) -> Gain | None:
    """How much higher our error is (in dB) where the training loss is the same, by seed.

    What a family gives for a loss is the largest error among its levels that cost no more, read
    linearly between the levels that raise it: a level that costs as much as a better one counts
    for nothing, however many there are. The difference is the mean over the losses that both
    families span. None where they do so in fewer than two seeds, or in half of them or fewer.

    Example:
        >>> ours = [({0: 1.0, 1: 1.0}, {0: 0.2, 1: 0.2}), ({0: 2.0, 1: 2.0}, {0: 2.0, 1: 2.0})]
        >>> theirs = [(loss, {0: 0.1, 1: 0.1}) for loss, _ in ours]
        >>> round(at_equal_loss(ours, theirs).mean, 2)
        8.01
    """
    found, shared = differences_at_equal_loss(ours, theirs)
    enough = len(found) >= 2 and 2 * len(found) > shared
    return gain(found) if enough else None


def differences_at_equal_loss(ours: Levels, theirs: Levels) -> tuple[list[float], int]:
    """What `at_equal_loss` takes the mean of, one a seed; and how many seeds there were."""
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
    return found, len(shared)


def _curve(points: list[tuple[float, float]], at: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The largest error so far, between the points (loss, error), sorted, that raise it."""
    raising = points[:1]
    for loss, error in points[1:]:
        if error > raising[-1][1]:
            raising.append((loss, error))
    losses, errors = zip(*raising, strict=True)
    return np.asarray(np.interp(at, losses, errors))
