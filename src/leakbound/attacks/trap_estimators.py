"""Estimators of an example X from z = scale X + noise, where |X| is known or assumed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

__all__ = ["TrapReading", "max_success_estimate", "shrinkage", "sphere_mean", "unbiased"]

STEPS = 1000


@dataclass(frozen=True, eq=False)
class TrapReading:
    """What all rows of a linear trap show together: z = scale X + N(0, noise_std^2 I).

    Attributes:
        mean: z (N,), float64.
        scale: the factor on the example; above 0.
        noise_std: standard deviation of the noise on every coordinate of z; 0 without noise.
        norm: |X| in input units, known or assumed; 0 or above.
    """

    mean: Tensor
    scale: float
    noise_std: float
    norm: float

    @property
    def noise_multiplier(self) -> float:
        """Noise over signal: noise_std / (scale |X|)."""
        signal = self.scale * self.norm
        if self.noise_std == 0:
            return 0.0
        return self.noise_std / signal if signal > 0 else math.inf

    @property
    def direction(self) -> Tensor:
        """The direction of z: z / |z|; zeros if z is zero."""
        largest = self.mean.abs().max()
        if not float(largest) > 0:
            return self.mean * 0
        inside = self.mean / largest
        unit: Tensor = inside / inside.norm()
        return unit


def unbiased(reading: TrapReading) -> Tensor:
    """Return z / scale, the best unbiased estimator; its error follows a chi-square distribution.

    Source: paper C, Theorem IV.1; docs/errata.md, C1.
    """
    return reading.mean / reading.scale


def shrinkage(reading: TrapReading) -> Tensor:
    """Return c z / scale, c = 1 / (1 + N noise^2), the multiple of least mean squared error.

    Source: James and Stein 1961, with a known norm.
    """
    noise = reading.noise_multiplier
    factor = 1 + reading.mean.numel() * noise * noise
    return reading.mean / reading.scale / factor


def sphere_mean(reading: TrapReading) -> Tensor:
    """The mean of X given z, X uniform on the sphere of radius |X|: the least mean squared error.

    The posterior of the direction is von Mises-Fisher with concentration |z| scale |X| /
    noise_std^2.

    Source: docs/errata.md, "gamma*" (the posterior of the direction).
    """
    noise = reading.noise_multiplier
    if noise == math.inf:
        return reading.mean * 0
    if noise == 0:
        return reading.norm * reading.direction
    length = float(reading.mean.norm()) / (reading.scale * reading.norm)
    ratio = bessel_ratio(reading.mean.numel(), length / noise / noise)
    return reading.norm * ratio * reading.direction


def max_success_estimate(reading: TrapReading, eta: float) -> Tensor:
    """|X| cos(theta) z / |z|, sin^2 theta = N eta / |X|^2: the most likely to achieve an MSE of
    eta.

    It attains gamma*. If N eta >= |X|^2, it is the zero image, which always succeeds.

    Source: docs/errata.md, "gamma*".
    """
    if reading.norm == 0:
        return reading.mean * 0
    error = reading.mean.numel() * (eta / reading.norm / reading.norm)
    return reading.norm * math.sqrt(max(0.0, 1 - error)) * reading.direction


def bessel_ratio(dim: int, concentration: float) -> float:
    """I_{dim/2}(k) / I_{dim/2 - 1}(k): the mean length of a von Mises-Fisher unit vector.

    Backward recurrence from a bound at an order a thousand higher (Amos 1974), whose error shrinks
    in each step: relative error below 1e-9 for all arguments.
    """
    k = concentration
    if k == math.inf:
        return 1.0
    if k == 0:
        return 0.0
    order = dim / 2 + STEPS
    ratio = k / (order - 0.5 + math.hypot(order + 0.5, k))
    for step in range(STEPS - 1, -1, -1):
        ratio = k / (dim + 2 * step + k * ratio)
    return ratio
