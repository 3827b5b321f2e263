"""Statements against adversaries on held-out examples: what is counted, and when one is beaten."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import stats

from leakbound.assess.limits import GRID
from leakbound.risk import TrainingSetting, calibrate_setting

from .adversaries import ADVERSARIES, NOISE, Adversary, Array, errors
from .domains import Domain

PSNR = (18.0, 20.0, 22.0, 25.5, 28.0, 32.0)
NOISES = (0.1, 0.3, 0.5, 1.0, 2.0)
GAMMAS = (0.05, 0.01, 0.001)
LEAST = 1e-4
"""An adversary is above a statement if chance explains it less often than that."""
OPEN = 0.99
"""Statements from here on say nothing, and are not counted."""


def eta_of(psnr: float) -> float:
    return float(10 ** (-psnr / 10))


@dataclass(frozen=True, eq=False)
class Statement:
    """No attacker reaches `psnr` with a probability above `value`, under `noise`."""

    domain: Domain
    labeled: bool
    psnr: float
    noise: float
    value: float
    target: float | None = None

    @property
    def eta(self) -> float:
        return eta_of(self.psnr)


@dataclass(frozen=True, eq=False)
class Pair:
    """What an adversary reached against a statement: `hits` of `n` held-out examples."""

    statement: Statement
    adversary: str
    hits: int
    n: int

    def interval(self, tail: float) -> tuple[float, float]:
        """Clopper and Pearson 1934, `tail` on each side."""
        low = stats.beta.ppf(tail, self.hits, self.n - self.hits + 1) if self.hits else 0.0
        up = stats.beta.isf(tail, self.hits + 1, self.n - self.hits) if self.hits < self.n else 1.0
        return float(low), float(up)

    @cached_property
    def z(self) -> float:
        """How many standard errors of the statement the share lies above it."""
        value = self.statement.value
        return float((self.hits / self.n - value) / np.sqrt(value * (1 - value) / self.n))

    @cached_property
    def beaten(self) -> bool:
        return self.interval(LEAST)[0] > self.statement.value


def grid(
    domain: Domain,
    labeled: bool,
    psnrs: Iterable[float] = PSNR,
    noises: Iterable[float] = NOISES,
) -> Iterator[Statement]:
    """What the sample states at given noise; a statement near 1 says nothing and is left out."""
    for psnr in psnrs:
        for noise in noises:
            value = float(domain.stated[labeled].success_bound(noise, eta_of(psnr))[0][0])
            if value < OPEN:
                yield Statement(domain, labeled, psnr, noise, value)


def calibrated(domain: Domain, labeled: bool, psnr: float, gamma: float) -> Statement | None:
    """The least noise for a target; None where the sample keeps the target closed."""
    sample = domain.stated[labeled]
    setting = TrainingSetting(1.0, sample.dim, float(np.linalg.norm(domain.rows, axis=1).max()))
    try:
        found = calibrate_setting(f"psnr>={psnr} with probability<={gamma}", setting, prior=sample)
    except ValueError as closed:
        if f"{sample.n} public examples" not in str(closed):
            raise
        return None
    assert found.verdict == "protected from strangers"
    return Statement(domain, labeled, psnr, found.noise_multiplier, gamma, gamma)


def away(statement: Statement, adversary: Adversary) -> Array:
    """(n,) errors of its guesses at held-out examples, computed once for what they depend on."""
    domain, labeled = statement.domain, statement.labeled
    given = {"noise": statement.noise, "eta": statement.eta}
    key = (adversary.name, *(given[name] for name in sorted(adversary.needs)))

    def made() -> Array:
        source = np.random.default_rng(zlib.crc32(repr((domain.name, labeled, key)).encode()))
        fitted = adversary.fit(domain.public[labeled], statement.noise, statement.eta, source)
        return errors(fitted.answers(domain.held[labeled], source), domain.held_rows)

    found: Array = domain.held[labeled].once(key, made)
    return found


def attack(statement: Statement, adversaries: Iterable[Adversary] = ADVERSARIES) -> list[Pair]:
    """Every adversary against a statement."""
    found = []
    for adversary in adversaries:
        error = away(statement, adversary)
        hits = int((error <= statement.eta).sum())
        found.append(Pair(statement, adversary.name, hits, len(error)))
    return found


def mean_errors(
    statement: Statement, adversaries: Iterable[Adversary] = ADVERSARIES
) -> tuple[float, float, str]:
    """The bound on the mean error, the least upper limit (4 s.e.) that an adversary has, and who.

    Adversaries that aim at a threshold aim at the statement's.
    """
    levels = 10 ** (-np.array(GRID) / 10)
    bound = statement.domain.stated[statement.labeled].mean_error(statement.noise, levels)
    reached = []
    for adversary in adversaries:
        error = away(statement, adversary)
        reached.append((error.mean() + 4 * error.std() / np.sqrt(len(error)), adversary.name))
    least, name = min(reached)
    return bound, float(least), name


def with_update(adversaries: Iterable[Adversary] = ADVERSARIES) -> list[Adversary]:
    return [one for one in adversaries if one.needs & NOISE]


def without_update(adversaries: Iterable[Adversary] = ADVERSARIES) -> list[Adversary]:
    """Their success is that at any noise: they count once, against the lowest statement."""
    return [one for one in adversaries if not one.needs & NOISE]
