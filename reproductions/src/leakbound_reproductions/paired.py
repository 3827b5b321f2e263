"""Paired comparisons by seed: means of differences with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
        """Holds, does not hold or undecided: whether the interval excludes 0, and on which side."""
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
    mean = float(np.mean(differences))
    spread = float(np.std(differences, ddof=1))
    half = float(stats.t.ppf(0.975, n - 1)) * spread / math.sqrt(n)
    return Gain(mean, mean - half, mean + half, n)


EXACT = 1e-15
"""A mean squared error below this is rounding of single precision: the reconstruction is exact."""


def logs(values: Mapping[int, float]) -> dict[int, float]:
    """Decibels: ten times the decimal logarithm of errors, so that differences are PSNR.

    Exact reconstructions count as -150 dB, so that one of them does not decide a mean.

    Example:
        >>> logs({0: 0.1, 1: 0.0})
        {0: -10.0, 1: -150.0}
    """
    return {seed: 10 * math.log10(max(value, EXACT)) for seed, value in values.items()}
