"""The law of the correlation between the unbiased estimate of a linear trap and the truth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from leakbound.bounds.cone import log_cone
from leakbound.bounds.from_scratch.laws import LARGEST, SMALLEST
from leakbound.bounds.law import (
    Array,
    Law,
    Scope,
    between,
    inward,
    least_root,
    non_negative,
    one,
    probability,
    rate,
    whole,
)

FLAT = 28.0
"""Search range of `ncc_at` in artanh of the correlation: beyond it rounds to 1."""


@dataclass(frozen=True)
class Ncc(Law):
    """Normalized cross-correlation of the unbiased estimate with the truth."""

    def __call__(
        self, noise_multiplier: ArrayLike, *, dim: ArrayLike, ncc: ArrayLike, spread: ArrayLike = 1
    ) -> Any:
        """Probability that the correlation over pixels is at least `ncc`, exactly.

        Centering leaves dim - 1 coordinates, in which it is the cosine of an angle: the integral of
        `exact` again, with the record's centered part for its norm.

        Shapes: all broadcast.

        Args:
            noise_multiplier: as everywhere.
            dim: number of pixels, at least 2.
            ncc: correlation in (-1, 1).
            spread: |X - mean of X| / |X|, in (0, 1]; 1 where the pixels' mean is zero.

        Source: this project; paper C has the population value only (`population`).

        Example:
            >>> round(ncc(0.05, dim=784, ncc=0.6), 3)
            0.197
        """
        sigma, n = non_negative("noise_multiplier", noise_multiplier), whole("dim", dim, 2)
        level, part = _correlation(ncc), rate("spread", spread)
        with np.errstate(divide="ignore"):
            cotangent = level / np.sqrt((1 - level) * (1 + level))
            return one(np.exp(log_cone(part / sigma, cotangent, n - 1)))

    def population(
        self, noise_multiplier: ArrayLike, *, dim: ArrayLike, spread: ArrayLike = 1.0
    ) -> Any:
        """The correlation of infinitely many pixels: at most 1 / sqrt(1 + N noise^2).

        Source: paper C, Theorem on NCC.

        Example:
            >>> round(ncc.population(0.05, dim=784), 4)
            0.5812
        """
        sigma, n = non_negative("noise_multiplier", noise_multiplier), whole("dim", dim)
        part = rate("spread", spread)
        with np.errstate(over="ignore"):
            return one(1 / np.sqrt(1 + n * (sigma / part) ** 2))

    def noise_for(
        self, gamma: ArrayLike, *, dim: ArrayLike, ncc: ArrayLike, spread: ArrayLike = 1.0
    ) -> Any:
        """The least noise multiplier with which `ncc` is reached with probability gamma at most.

        Raises:
            ValueError: no finite noise does.

        Example:
            >>> round(ncc.noise_for(0.01, dim=784, ncc=0.5), 4)
            0.0734
        """
        gamma, n = probability("gamma", gamma), whole("dim", dim, 2)
        level, part = _correlation(ncc), rate("spread", spread)
        gamma, n, level, part = np.broadcast_arrays(gamma, n, level, part)
        cotangent = level / np.sqrt((1 - level) * (1 + level))
        if np.any(log_cone(0.0, cotangent, n - 1) >= np.log(gamma)):
            raise ValueError(
                "gamma is at most the chance that pure noise has this correlation: no finite noise "
                "helps; give a larger gamma or ncc"
            )
        logs = least_root(
            lambda x: log_cone(part * np.exp(-x), cotangent, n - 1) - np.log(gamma),
            np.full(gamma.shape, np.log(SMALLEST)),
            np.full(gamma.shape, np.log(LARGEST)),
        )

        def fits(s: Array) -> Array:
            return np.asarray(np.exp(log_cone(part / s, cotangent, n - 1)) <= gamma)

        return one(inward(fits, np.exp(logs), 1))

    def ncc_at(
        self,
        noise_multiplier: ArrayLike,
        *,
        dim: ArrayLike,
        gamma: ArrayLike,
        spread: ArrayLike = 1.0,
    ) -> Any:
        """The correlation that is reached with probability gamma.

        Example:
            >>> round(ncc.ncc_at(0.05, dim=784, gamma=0.5), 2)
            0.58
        """
        sigma, n = non_negative("noise_multiplier", noise_multiplier), whole("dim", dim, 2)
        gamma, part = probability("gamma", gamma), rate("spread", spread)
        sigma, n, gamma, part = np.broadcast_arrays(sigma, n, gamma, part)
        with np.errstate(divide="ignore"):
            a = part / sigma
        # a correlation of tanh(x) has a cotangent of sinh(x)
        edge = np.full(gamma.shape, FLAT)
        found = least_root(lambda x: log_cone(a, np.sinh(x), n - 1) - np.log(gamma), -edge, edge)
        return one(np.tanh(found))


def _correlation(value: ArrayLike) -> Array:
    return between("ncc", value, -1, 1, closed=False)


ncc = Ncc(
    Scope(
        covers="one",
        attackers="the unbiased estimate of the linear trap",
        prior="every fixed record of the given spread",
        known="the noise multiplier",
        not_said="what other estimators reach",
        equation="this project; population value: paper C (H12)",
    )
)
