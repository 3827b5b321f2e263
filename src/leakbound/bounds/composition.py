"""Upper bounds on any attacker's success over many subsampled steps.

Two laws cover T steps of the Gaussian mechanism that sample the example at a rate q. `visible`: the
attacker sees which steps hold it. `subsampled`: the attacker does not. Both bound every attacker
and err upwards only: errors from rounding and cut tails are added.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike

from leakbound.bounds.identification import gaussian, log_blind
from leakbound.bounds.law import Array, RiskLaw, groups, non_negative, one, probability, rate, whole
from leakbound.bounds.privacy_loss import TAIL, curve, sealed
from leakbound.bounds.roots import crossing, edge, last_that, least_root

__all__ = ["subsampled", "visible"]

LEFT = 700.0
"""Left-out numbers of sampled steps weigh at most exp(-LEFT), or exp(-TAIL) if there are many."""
LEAST = 5e-324  # the smallest float above 0: logarithms stay finite
DUST = 1e-18
"""Share of the smallest result that rare numbers of sampled steps may weigh together; added."""
TOGETHER = 2**20
"""How many numbers `visible` processes at a time."""


@dataclass(frozen=True)
class Composed(RiskLaw):
    """gamma after several steps that each sample the example, with its inverses.

    All arguments broadcast. The inverses search separately for each entry. A kappa of at least
    gamma raises a ValueError, because no finite noise helps.
    """

    def __call__(
        self,
        noise_multiplier: ArrayLike,
        *,
        sampling_rate: ArrayLike,
        steps: ArrayLike,
        kappa: ArrayLike | None = None,
        log_kappa: ArrayLike | None = None,
    ) -> Any:
        """Upper bound on any attacker's probability to meet a goal of prior-only success kappa.

        The costly part is computed once for each pair of rate and steps, or, with hidden steps,
        once for each triple of rate, steps and noise.

        Args:
            noise_multiplier: noise standard deviation / clip norm.
            sampling_rate: probability that a step holds the example (Poisson sampling), in (0, 1].
            steps: number of steps, composed adaptively.
            kappa: prior-only success, in [0, 1]; or
            log_kappa: its natural logarithm.

        Example:
            >>> visible(1.0, sampling_rate=0.01, steps=[1, 1000], kappa=1e-3).round(4).tolist()
            [0.0012, 0.5122]
        """
        sigma, q, count, blind = np.broadcast_arrays(
            non_negative("noise_multiplier", noise_multiplier),
            rate("sampling_rate", sampling_rate),
            whole("steps", steps),
            log_blind(kappa, log_kappa),
        )
        bounds = np.empty(sigma.shape)
        for here, (some, number) in groups(q, count):
            bounds[here] = self._at(sigma[here], some, int(number), blind[here])
        return one(bounds)

    def rough(
        self,
        noise_multiplier: float,
        *,
        sampling_rate: float,
        steps: int,
        log_kappa: ArrayLike,
    ) -> Any:
        """The same for one training on a wider grid: also an upper bound, cheaper, less tight."""
        blind = np.atleast_1d(np.asarray(log_kappa, float))
        sigma = np.full(blind.shape, float(noise_multiplier))
        found = self._at(sigma, sampling_rate, steps, blind, rough=True)
        return one(found.reshape(np.shape(log_kappa)))

    @abstractmethod
    def _at(
        self,
        sigma: Array,
        q: float,
        count: int,
        blind: Array,
        rough: bool = False,
    ) -> Array:
        """The law for one rate and one number of steps, over (n,) noises and log kappas."""

    def noise_for(
        self,
        gamma: ArrayLike,
        *,
        sampling_rate: ArrayLike,
        steps: ArrayLike,
        kappa: ArrayLike | None = None,
        log_kappa: ArrayLike | None = None,
    ) -> Any:
        """The smallest noise multiplier, to 1e-5, with a bound of at most gamma; 0 for no noise."""
        q = rate("sampling_rate", sampling_rate)
        count = whole("steps", steps)
        target, blind, q, count = _targets(gamma, log_blind(kappa, log_kappa), q, count)
        multipliers = np.empty(target.shape)
        for here, (some, number) in groups(q, count):
            multipliers[here] = self._noise(target[here], some, int(number), blind[here])
        return one(multipliers)

    @abstractmethod
    def _noise(
        self,
        target: Array,
        q: float,
        count: int,
        blind: Array,
    ) -> Array:
        """`noise_for` for one rate and one number of steps, over (n,) targets and log kappas."""

    def rate_for(
        self,
        gamma: ArrayLike,
        *,
        noise_multiplier: ArrayLike,
        steps: ArrayLike,
        kappa: ArrayLike | None = None,
        log_kappa: ArrayLike | None = None,
    ) -> Any:
        """The largest sampling rate with a bound of at most gamma."""

        def solve(
            target: float,
            blind: float,
            sigma: float,
            number: float,
        ) -> float:
            excess = self._excess(target, blind)

            def at(place: float, rough: bool = False) -> float:
                return excess(sigma, min(1.0, float(np.exp(place))), int(number), rough)

            if at(0.0) <= 0:
                return 1.0
            fine = float(np.log((target - np.exp(blind)) / number))  # gamma < kappa + any sampled
            if isinstance(self, Visible):
                return float(np.exp(crossing(at, fine - 1e-6, 0.0)))
            return float(np.exp(edge(at, fine, 1, rough=lambda x: at(x, True), most=-fine)))

        sigma = non_negative("noise_multiplier", noise_multiplier)
        return _each(solve, gamma, log_blind(kappa, log_kappa), sigma, whole("steps", steps))

    def steps_for(
        self,
        gamma: ArrayLike,
        *,
        noise_multiplier: ArrayLike,
        sampling_rate: ArrayLike,
        kappa: ArrayLike | None = None,
        log_kappa: ArrayLike | None = None,
    ) -> Any:
        """The largest number of steps with a bound of at most gamma; 0 if none, at most 2^30."""

        def solve(
            target: float,
            blind: float,
            sigma: float,
            q: float,
        ) -> float:
            excess = self._excess(target, blind)

            def holds(count: int, rough: bool = False) -> bool:
                return excess(sigma, q, count, rough) <= 0

            if isinstance(self, Visible):
                return last_that(holds, 0)
            # The rough bound is never below the fine one, so its answer is a valid start.
            return last_that(holds, last_that(lambda count: holds(count, True), 0))

        sigma = non_negative("noise_multiplier", noise_multiplier)
        q = rate("sampling_rate", sampling_rate)
        largest = _each(solve, gamma, log_blind(kappa, log_kappa), sigma, q)
        return int(largest) if np.ndim(largest) == 0 else largest.astype(int)

    def _excess(self, target: float, blind: float) -> Callable[..., float]:
        """Log gamma minus log target, as a function of noise, rate, steps and roughness."""
        log = np.array([blind])
        goal = np.log(target)

        def excess(
            sigma: float,
            q: float,
            count: int,
            rough: bool = False,
        ) -> float:
            bound = float(self._at(np.array([sigma]), q, count, log, rough)[0])
            return float(np.log(max(bound, LEAST)) - goal)

        return excess


@dataclass(frozen=True)
class Visible(Composed):
    """sum_k Binom(k; steps, rate) Phi(Phi^-1(kappa) + sqrt(k) / noise): visible steps.

    Source: docs/errata.md, "the valid corridor"; Hayes et al. 2023.
    """

    def _at(
        self,
        sigma: Array,
        q: float,
        count: int,
        blind: Array,
        rough: bool = False,
    ) -> Array:
        k, mass, left = _sampled_steps(count, q)
        k, mass, left = _likely(k, mass, left, float(np.exp(blind.min(initial=0.0))))
        # Some rows at a time: the whole table of rows and counts may not fit.
        bounds = np.empty(sigma.size)
        rows = max(1, TOGETHER // len(k))
        start = scipy.special.ndtri_exp(blind)
        root = np.sqrt(k)
        for at in range(0, sigma.size, rows):
            part = slice(at, at + rows)
            noise = sigma[part, None]
            log = blind[part, None]
            with np.errstate(divide="ignore", invalid="ignore"):
                gain = np.where(k == 0, 0.0, root / noise)
                reached = scipy.special.log_ndtr(start[part, None] + gain)
            # At both ends inf - inf is NaN, and the two transforms would round kappa.
            reached = np.where(gain == np.inf, 0.0, np.where(gain == 0, log, reached))
            bounds[part] = np.exp(reached) @ mass + left
        return np.where(blind == 0, 1.0, np.minimum(1.0, bounds))

    def _noise(
        self,
        target: Array,
        q: float,
        count: int,
        blind: Array,
    ) -> Array:
        goal = np.log(target)

        def excess(place: Array) -> Array:
            bounds = self._at(np.exp(place), q, count, blind)
            return np.log(np.maximum(bounds, LEAST)) - goal

        free = self._at(np.zeros(target.shape), q, count, blind) <= target
        high = np.zeros(target.shape)
        while np.any(misses := (excess(high) > 0) & ~free):
            high = np.where(misses, high + 1 + np.abs(high), high)
        low = high - 0.25
        while np.any(meets := (excess(low) <= 0) & ~free):
            low = np.where(meets, low - 2 * (high - low), low)
        return np.where(free, 0.0, np.exp(least_root(excess, low, high)))


@dataclass(frozen=True)
class Subsampled(Composed):
    """sup P(E) with Q(E) <= kappa: P has the example in hidden steps, Q has it in none.

    The smaller of two bounds: the composed privacy loss from `curve`, and `visible`. The second
    also holds: for each set of k steps that hold the example, P is a normal distribution at
    distance sqrt(k) / noise from Q. So any E with Q(E) <= kappa has
    P(E | set) <= Phi(Phi^-1(kappa) + sqrt(k) / noise), and P(E) is the mean of these. It is exact
    at one step and at a rate of 1.

    Source: Doroshenko et al. 2022 (connect the dots); docs/errata.md, "subsampled".

    Example:
        >>> round(subsampled(1.0, sampling_rate=0.01, steps=1000, kappa=1e-3), 5)
        0.00407
    """

    def _at(
        self,
        sigma: Array,
        q: float,
        count: int,
        blind: Array,
        rough: bool = False,
    ) -> Array:
        bounds = visible._at(sigma, q, count, blind)
        if q == 1 or count == 1:
            return bounds
        for noise in np.unique(sigma[(sigma > 0) & (sigma < np.inf)]):
            here = sigma == noise
            composed = curve(float(noise), q, count, rough=rough)
            if composed is not None:
                bounds[here] = np.minimum(bounds[here], composed.gamma(blind[here]))
        return bounds

    def _noise(
        self,
        target: Array,
        q: float,
        count: int,
        blind: Array,
    ) -> Array:
        def solve(goal: float, log: float) -> float:
            start = float(visible._noise(np.array([goal]), q, count, np.array([log]))[0])
            if start == 0 or q == 1 or count == 1:
                return start
            excess = self._excess(goal, log)

            def at(x: float, rough: bool = False) -> float:
                return excess(float(np.exp(x)), q, count, rough)

            return float(
                np.exp(
                    edge(
                        at,
                        float(np.log(start)),
                        -1,
                        rough=lambda x: at(x, True),
                    )
                )
            )

        return np.array([solve(float(a), float(b)) for a, b in zip(target, blind, strict=True)])


@lru_cache(maxsize=64)
def _sampled_steps(steps: int, q: float) -> tuple[Array, Array, float]:
    """Numbers k, their binomial mass, and the mass left out (Bernstein's inequality).

    If rounding makes the masses sum to less than 1, they are scaled up to 1.
    """
    variance = steps * q * (1 - q)
    # Deep tails of many steps would be millions of numbers; a lighter cut is enough there.
    deep = LEFT if variance < 1e7 else TAIL
    reach = deep / 3 + np.sqrt((deep / 3) ** 2 + 2 * deep * variance)
    low = max(0.0, np.floor(steps * q - reach))
    high = min(steps, np.ceil(steps * q + reach))
    k = np.arange(low, high + 1)
    left = float(np.exp(-deep)) * ((low > 0) + (high < steps))
    mass = np.asarray(scipy.stats.binom.pmf(k, steps, q))
    return sealed(k), sealed(mass * max(1.0, 1 / float(mass.sum()))), left


def _likely(
    k: Array,
    mass: Array,
    left: float,
    least: float,
) -> tuple[Array, Array, float]:
    """Drop the numbers at both ends that weigh DUST * least together; they count as left out."""
    dust = DUST * least / 2
    below = np.cumsum(mass)
    above = np.cumsum(mass[::-1])
    first = int(np.searchsorted(below, dust))
    last = len(k) - int(np.searchsorted(above, dust))
    gone = float(mass[:first].sum() + mass[last:].sum()) * (1 + 1e-9)  # rounded up
    return k[first:last], mass[first:last], left + gone


def _targets(
    gamma: ArrayLike,
    blind: Array,
    *more: Array,
) -> list[Array]:
    """All arguments, broadcast, with the one check that all inverses need."""
    target, blind, *rest = np.broadcast_arrays(probability("gamma", gamma), blind, *more)
    # Without noise the bound is 1, with infinite noise kappa: nothing below kappa is reached.
    if np.any(blind >= np.log(target)):
        worst = int(np.argmax(blind - np.log(target)))
        raise ValueError(
            f"gamma is {target.flat[worst]:g}, not above the prior-only success kappa = "
            f"{np.exp(blind.flat[worst]):.6g}: no noise helps; give a larger gamma"
        )
    return [target, blind, *rest]


def _each(
    solve: Callable[..., float],
    gamma: ArrayLike,
    blind: Array,
    *more: Array,
) -> Any:
    """solve(gamma, log kappa, ...) for each entry."""
    parts = _targets(gamma, blind, *more)
    solutions = [solve(*map(float, each)) for each in zip(*(p.flat for p in parts), strict=True)]
    return one(np.reshape(np.array(solutions, float), parts[0].shape))


_FULL = gaussian.scope
visible = Visible(
    replace(
        _FULL,
        attackers=f"{_FULL.attackers}, who see which steps hold the example",
        known=f"{_FULL.known}; also the steps that hold it",
        equation="Hayes et al. 2023; docs/errata.md, the valid corridor",
    )
)
subsampled = Subsampled(
    replace(
        _FULL,
        attackers=f"{_FULL.attackers}, who do not see which steps hold the example",
        known="everything but the example, the noise and the steps that hold it",
        not_said="a bound where the server picks or sees the participants (take `visible`), for "
        "one given example, or for a sharper prior",
        equation="Hayes et al. 2023; Doroshenko et al. 2022",
    )
)
