"""Noise of a declared law on every coordinate of an update."""

from __future__ import annotations

from dataclasses import dataclass

from leakbound import check
from leakbound.defenses.base import Defense, State
from leakbound.random import Source
from leakbound.types import ClientContext, Gaussian, Guarantee, Laplace, Update


@dataclass(frozen=True, repr=False)
class GaussianNoise(Defense):
    """Add independent N(0, noise_std²) to every coordinate.

    Args:
        noise_std: the noise's standard deviation.

    Units: `noise_std` is in gradient units (batch-mean loss).

    Guarantees: the release given the data is Gaussian with covariance noise_std² I. That is no
    differential privacy: the gradient is not bounded.

    Source: Liu et al. 2025 (systematic evaluation), GradNoise; Zhu et al. 2019, section 5.1.

    Example:
        >>> GaussianNoise(0.01).guarantee.value
        'known release law'
    """

    noise_std: float = 0.01

    def __post_init__(self) -> None:
        check.positive(noise_std=self.noise_std)

    @property
    def guarantee(self) -> Guarantee:
        """A known release law."""
        return Guarantee.RELEASE_LAW

    def transform(
        self, update: Update, state: State, context: ClientContext | None, source: Source
    ) -> tuple[Update, State]:
        """Add the noise and declare it."""
        return update.noised(Gaussian(self.noise_std * self.noise_std), source), state


@dataclass(frozen=True, repr=False)
class LaplaceNoise(Defense):
    """Add independent Laplace noise of standard deviation `noise_std` to every coordinate.

    Args:
        noise_std: the noise's standard deviation.

    Units: `noise_std` in gradient units; the law's scale is noise_std / sqrt(2), so that equal
    `noise_std` means equal noise energy as Gaussian noise.

    Guarantees: the release given the data is Laplace with that scale.

    Source: Zhu et al. 2019, section 5.1.

    Example:
        >>> LaplaceNoise(0.01).guarantee.value
        'known release law'
    """

    law_survives_sums = False

    noise_std: float = 0.01

    def __post_init__(self) -> None:
        check.positive(noise_std=self.noise_std)

    @property
    def guarantee(self) -> Guarantee:
        """A known release law."""
        return Guarantee.RELEASE_LAW

    def transform(
        self, update: Update, state: State, context: ClientContext | None, source: Source
    ) -> tuple[Update, State]:
        """Add the noise and declare it."""
        return update.noised(Laplace(self.noise_std / 2**0.5), source), state


@dataclass(frozen=True, repr=False)
class GaussianMechanism(Defense):
    """Add N(0, (noise_multiplier · bound)² I), where `bound` is what one example can add to a row.

    Needs a link before it that bounds every example's part (`ClipExamples`).

    Args:
        noise_multiplier: noise standard deviation over the most that one example adds.

    Guarantees: one release is the Gaussian mechanism with noise multiplier `noise_multiplier` for
    adding or removing one example: (epsilon, delta)-differentially private as dp-accounting's
    Gaussian event of that multiplier says. The batch size is public and stays the divisor of a
    mean, so a removed example counts as a gradient of zero; replacing one by another moves the mean
    by up to twice the bound.

    Source: Abadi et al. 2016, algorithm 1; Dwork and Roth 2014, appendix A.

    Example:
        >>> from leakbound.defenses import ClipExamples, Mean, chain
        >>> chain(ClipExamples(1.0), Mean(), GaussianMechanism(2.0)).guarantee.value
        'differential privacy'
    """

    needs_bound = True

    noise_multiplier: float = 1.0

    def __post_init__(self) -> None:
        check.positive(noise_multiplier=self.noise_multiplier)

    @property
    def guarantee(self) -> Guarantee:
        """Differential privacy, for adding or removing one example."""
        return Guarantee.DIFFERENTIAL_PRIVACY

    def transform(
        self, update: Update, state: State, context: ClientContext | None, source: Source
    ) -> tuple[Update, State]:
        """Add noise scaled to what one example can add."""
        if update.bound is None:
            raise ValueError(
                f"{self!r} got an update whose examples are not bounded; put ClipExamples before it"
            )
        std = self.noise_multiplier * update.bound
        return update.noised(Gaussian(std * std), source), state
