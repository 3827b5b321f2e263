"""Noise of a declared distribution on every coordinate of an update."""

from __future__ import annotations

from dataclasses import dataclass

from leakbound import check
from leakbound.core import Gaussian, Guarantee, Laplace, Update
from leakbound.defenses.base import Context, Defense, Sent, State
from leakbound.randomness import Source


@dataclass(frozen=True, repr=False)
class GaussianNoise(Defense):
    """Add independent N(0, noise_std²) to every coordinate.

    Args:
        noise_std: standard deviation of the noise, in gradient units (batch-mean loss).

    Guarantees: given the data, the release is Gaussian with covariance noise_std² I. This is not
    differential privacy: the gradient is not bounded.

    Source: Liu et al. 2025 (systematic evaluation), GradNoise; Zhu et al. 2019, section 5.1.

    Example:
        >>> GaussianNoise(0.01).guarantee.value
        'known noise distribution'
    """

    guarantee = Guarantee.KNOWN_NOISE

    noise_std: float = 0.01

    def __post_init__(self) -> None:
        check.positive(noise_std=self.noise_std)

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        return update.noised(Gaussian(self.noise_std * self.noise_std), source), state


@dataclass(frozen=True, repr=False)
class LaplaceNoise(Defense):
    """Add independent Laplace noise of standard deviation `noise_std` to every coordinate.

    Args:
        noise_std: standard deviation of the noise, in gradient units. The scale of the distribution
            is noise_std / sqrt(2): equal `noise_std` means equal energy as for Gaussian noise.

    Guarantees: given the data, the release is Laplace with this scale.

    Source: Zhu et al. 2019, section 5.1.

    Example:
        >>> LaplaceNoise(0.01).guarantee.value
        'known noise distribution'
    """

    guarantee = Guarantee.KNOWN_NOISE
    law_survives_sums = False

    noise_std: float = 0.01

    def __post_init__(self) -> None:
        check.positive(noise_std=self.noise_std)

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        return update.noised(Laplace(self.noise_std / 2**0.5), source), state
