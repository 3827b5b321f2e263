"""Many subsampled steps: what no attacker exceeds when each step holds the record by chance.

Two laws for T steps of the Gaussian mechanism that sample the record at a rate q. `visible`: the
attacker sees which steps hold it. `subsampled`: it does not. Both bound every attacker and err
upwards only: what rounding and cut tails could take away is added.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special, stats

from leakbound.bounds.identification import log_blind
from leakbound.bounds.law import (
    Array,
    Law,
    Scope,
    non_negative,
    one,
    probability,
    rate,
    single,
    whole,
)
from leakbound.bounds.privacy_loss import TAIL, curve

LEFT = 700.0
"""Sightings left out of the sum weigh exp(-LEFT) at most, exp(-TAIL) where there are many."""
LEAST = 1e-300
MOST_STEPS = 2**30


@dataclass(frozen=True)
class Composed(Law):
    """gamma after several steps that sample the record, with its inverses."""

    @abstractmethod
    def __call__(
        self,
        noise_multiplier: ArrayLike,
        *,
        sampling_rate: float,
        steps: int,
        kappa: ArrayLike | None = None,
        log_kappa: ArrayLike | None = None,
    ) -> Any:
        """Most probability of reaching a goal whose blind success is kappa."""

    def noise_for(
        self,
        gamma: ArrayLike,
        *,
        sampling_rate: float,
        steps: int,
        kappa: ArrayLike | None = None,
        log_kappa: ArrayLike | None = None,
    ) -> Any:
        """The least noise multiplier whose bound is at most gamma; 0 where none is needed.

        Shapes: gamma and kappa broadcast. The answer meets gamma; it is the least to 1e-5.

        Raises:
            ValueError: kappa of gamma or above: no finite noise helps.

        Source: sheet H9, inverted.

        Example:
            >>> round(visible.noise_for(0.1, sampling_rate=1.0, steps=1, kappa=1 / 11), 2)
            18.65
        """
        q, count = one_rate(sampling_rate), one_steps(steps)

        def solve(target: float, blind: float) -> float:
            def excess(place: float) -> float:
                found = self(np.exp(place), sampling_rate=q, steps=count, log_kappa=blind)
                return float(np.log(max(found, LEAST)) - np.log(target))

            if self(0.0, sampling_rate=q, steps=count, log_kappa=blind) <= target:
                return 0.0
            fine = (
                0.0
                if self is visible
                else np.log(
                    visible.noise_for(target, sampling_rate=q, steps=count, log_kappa=blind)
                )
            )
            while excess(fine) > 0:
                fine += 1.0
            gap = 0.25
            while excess(fine - gap) <= 0:
                fine, gap = fine - gap, 2 * gap
            return float(np.exp(crossing(excess, fine, fine - gap)))

        return _each(solve, gamma, log_blind(kappa, log_kappa))

    def rate_for(
        self,
        gamma: ArrayLike,
        *,
        noise_multiplier: float,
        steps: int,
        kappa: ArrayLike | None = None,
        log_kappa: ArrayLike | None = None,
    ) -> Any:
        """The largest sampling rate whose bound is at most gamma.

        Raises:
            ValueError: kappa of gamma or above.

        Example:
            >>> q = visible.rate_for(0.2, noise_multiplier=1.0, steps=10, kappa=0.1)
            >>> round(visible(1.0, sampling_rate=q, steps=10, kappa=0.1), 4)
            0.2
        """
        sigma, count = float(non_negative("noise_multiplier", noise_multiplier)), one_steps(steps)

        def solve(target: float, blind: float) -> float:
            def excess(place: float) -> float:
                q = min(1.0, np.exp(place))
                found = self(sigma, sampling_rate=q, steps=count, log_kappa=blind)
                return float(np.log(max(found, LEAST)) - np.log(target))

            if excess(0.0) <= 0:
                return 1.0
            fine = np.log((target - np.exp(blind)) / count)  # gamma < kappa + P(any sighting)
            return float(np.exp(crossing(excess, fine - 1e-6, 0.0)))

        return _each(solve, gamma, log_blind(kappa, log_kappa))

    def steps_for(
        self,
        gamma: ArrayLike,
        *,
        noise_multiplier: float,
        sampling_rate: float,
        kappa: ArrayLike | None = None,
        log_kappa: ArrayLike | None = None,
    ) -> Any:
        """The largest number of steps whose bound is at most gamma: 0 if none, 2^30 at the most.

        Raises:
            ValueError: kappa of gamma or above.

        Example:
            >>> visible.steps_for(0.5, noise_multiplier=1.0, sampling_rate=1.0, kappa=0.01)
            5
        """
        sigma, q = (
            float(non_negative("noise_multiplier", noise_multiplier)),
            one_rate(sampling_rate),
        )

        def solve(target: float, blind: float) -> float:
            def holds(count: int) -> bool:
                return bool(self(sigma, sampling_rate=q, steps=count, log_kappa=blind) <= target)

            low, high = 0, 1
            while high <= MOST_STEPS and holds(high):
                low, high = high, 2 * high
            while high - low > 1 and low < MOST_STEPS:
                middle = (low + high) // 2
                low, high = (middle, high) if holds(middle) else (low, middle)
            return low

        found = _each(solve, gamma, log_blind(kappa, log_kappa))
        return int(found) if np.ndim(found) == 0 else found.astype(int)


@dataclass(frozen=True)
class Visible(Composed):
    """sum_k Binom(k; steps, rate) Phi(Phi^-1(kappa) + sqrt(k) / noise): the steps are seen."""

    def __call__(
        self,
        noise_multiplier: ArrayLike,
        *,
        sampling_rate: float,
        steps: int,
        kappa: ArrayLike | None = None,
        log_kappa: ArrayLike | None = None,
    ) -> Any:
        """Most probability of reaching a goal whose blind success is kappa, whoever attacks.

        Shapes: noise_multiplier and kappa broadcast.

        Args:
            noise_multiplier: noise standard deviation / clip norm.
            sampling_rate: the chance that a step holds the record (Poisson sampling), in (0, 1].
            steps: how many steps, composed adaptively.
            kappa: blind success, in [0, 1]; or
            log_kappa: its natural logarithm.

        Raises:
            ValueError: a rate or a kappa outside its range, steps below 1.

        Source: docs/errata.md, "the valid corridor"; Hayes et al. 2023.

        Example:
            >>> round(visible(1.0, sampling_rate=0.01, steps=1000, kappa=1e-3), 4)
            0.5122
        """
        q, count = one_rate(sampling_rate), one_steps(steps)
        sigma, blind = np.broadcast_arrays(
            non_negative("noise_multiplier", noise_multiplier), log_blind(kappa, log_kappa)
        )
        k, mass, left = _sightings(count, q)
        found = np.empty(sigma.size)
        with np.errstate(divide="ignore", invalid="ignore"):
            for place, (noise, log) in enumerate(zip(sigma.flat, blind.flat, strict=True)):
                gain = np.where(k == 0, 0.0, np.sqrt(k) / noise)
                reached = special.log_ndtr(special.ndtri_exp(log) + gain)
                reached = np.where(gain == np.inf, 0.0, np.where(gain == 0, log, reached))
                found[place] = mass @ np.exp(reached) + left
        return one(np.where(blind == 0, 1.0, np.minimum(1.0, found.reshape(sigma.shape))))


@dataclass(frozen=True)
class Subsampled(Composed):
    """sup P(E) with Q(E) <= kappa: P has the record in hidden steps, Q has it in none."""

    def __call__(
        self,
        noise_multiplier: ArrayLike,
        *,
        sampling_rate: float,
        steps: int,
        kappa: ArrayLike | None = None,
        log_kappa: ArrayLike | None = None,
    ) -> Any:
        """Most probability of reaching a goal whose blind success is kappa, whoever attacks.

        The least of two bounds: the composed privacy loss, from `curve`, and `visible`. The second
        holds as well: for each set of k steps that hold the record P is a normal law sqrt(k) /
        noise away from Q, so any E with Q(E) <= kappa has P(E | set) <= Phi(Phi^-1(kappa) + sqrt(k)
        / noise), and P(E) is the mean of these. It is exact at one step and at a rate of 1.

        Shapes: noise_multiplier and kappa broadcast.

        Raises:
            ValueError: as `visible`, whose arguments these are.

        Source: sheet H9; connect the dots 2207.04380; docs/errata.md, "subsampled".

        Example:
            >>> round(subsampled(1.0, sampling_rate=0.01, steps=1000, kappa=1e-3), 5)
            0.00407
        """
        q, count = one_rate(sampling_rate), one_steps(steps)
        sigma, blind = np.broadcast_arrays(
            non_negative("noise_multiplier", noise_multiplier), log_blind(kappa, log_kappa)
        )
        found = np.array(visible(sigma, sampling_rate=q, steps=count, log_kappa=blind))
        if q == 1 or count == 1:
            return one(found)
        for noise in np.unique(sigma[(sigma > 0) & (sigma < np.inf)]):
            here = sigma == noise
            composed = curve(float(noise), q, count)
            if composed is not None:
                found[here] = np.minimum(found[here], composed.gamma(blind[here]))
        return one(found)


def one_rate(value: float) -> float:
    """A single sampling rate in (0, 1]."""
    return single("sampling_rate", rate("sampling_rate", value))


def one_steps(value: int) -> int:
    """A single whole number of steps."""
    return int(single("steps", whole("steps", value)))


def _sightings(steps: int, q: float) -> tuple[Array, Array, float]:
    """Counts k, their binomial mass, and what is left out (Bernstein's inequality).

    Masses that rounding leaves below 1 in all are raised to it.
    """
    variance = steps * q * (1 - q)
    deep = LEFT if variance < 1e7 else TAIL
    reach = deep / 3 + np.sqrt((deep / 3) ** 2 + 2 * deep * variance)
    low, high = max(0.0, np.floor(steps * q - reach)), min(steps, np.ceil(steps * q + reach))
    k = np.arange(low, high + 1)
    left = float(np.exp(-deep)) * ((low > 0) + (high < steps))
    mass = np.asarray(stats.binom.pmf(k, steps, q))
    return k, mass * max(1.0, 1 / float(mass.sum())), left


def _each(solve: Callable[[float, float], float], gamma: ArrayLike, blind: Array) -> Any:
    """solve(gamma, log kappa) for each pair, with the one check that all inverses need."""
    target, blind = np.broadcast_arrays(probability("gamma", gamma), blind)
    if np.any(blind >= np.log(target)):
        worst = int(np.argmax(blind - np.log(target)))
        raise ValueError(
            f"gamma is {target.flat[worst]:g}, not above the blind success kappa = "
            f"{np.exp(blind.flat[worst]):.6g}: nothing helps; give a gamma above it"
        )
    found = [solve(float(t), float(b)) for t, b in zip(target.flat, blind.flat, strict=True)]
    return one(np.reshape(np.array(found, float), target.shape))


def crossing(excess: Callable[[float], float], fine: float, bad: float) -> float:
    """Where `excess` turns positive between a place where it is not and one where it is.

    The answer is on the safe side: excess was evaluated there and is 0 or less.
    """
    step = 1e-6 if bad > fine else -1e-6
    place = float(optimize.brentq(excess, fine, bad, xtol=1e-6, rtol=1e-12))
    while excess(place) > 0:
        place, step = place - step, 2 * step
        if (place - fine) * step <= 0:
            return fine
    return place


visible = Visible(
    Scope(
        covers="all",
        attackers="all attackers, models and gradient maps with a per-record norm of at most the "
        "clip norm, over adaptive steps, who see which steps hold the record",
        prior="averaged over the prior that kappa is computed for; other records fixed or known",
        known="everything but the record and the noise; also the steps that hold it",
        not_said="a bound for one given record, or for a sharper prior",
        equation="Hayes et al. 2023; docs/errata.md, the valid corridor",
    )
)
subsampled = Subsampled(
    Scope(
        covers="all",
        attackers="all attackers, models and gradient maps with a per-record norm of at most the "
        "clip norm, over adaptive steps, who do not see which steps hold the record",
        prior="averaged over the prior that kappa is computed for; other records fixed or known",
        known="everything but the record, the noise and the steps that hold it",
        not_said="a bound where the server picks or sees the participants (take `visible`), for "
        "one given record, or for a sharper prior",
        equation="sheet H9; Hayes et al. 2023; Doroshenko et al. 2022",
    )
)
