"""What counts as reconstructed: one rule for measured success, the baseline and the bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from leakbound import check
from leakbound._util.decibels import EXTREME, mse_of_psnr, psnr_of_mse
from leakbound.assess.record import CriterionInfo
from leakbound.domains import Domain


@dataclass(frozen=True)
class Criterion:
    """An example is reconstructed if the domain's distance to it is at most `within`.

    Measured success, the prior-only baseline, kappa and the bounds all use it, so that attacks and
    theorems share one axis.
    """

    domain: Domain
    within: float

    def __post_init__(self) -> None:
        check.positive(within=self.within)

    @staticmethod
    def of_psnr(psnr: float, domain: Domain) -> Criterion:
        """A PSNR of at least `psnr` dB: a root mean squared error of range / 10^(psnr/20)."""
        check.positive(psnr=psnr)
        if psnr >= EXTREME:
            raise ValueError(f"psnr is {psnr:g}; give decibels, such as 20")
        low, high = domain.input_range
        return Criterion(domain, math.sqrt(mse_of_psnr(psnr, high - low)))

    @property
    def error(self) -> float:
        """The largest mean squared error that meets it, in input units squared."""
        return float(f"{self.within**2:.14g}")  # 0.01 for 20 dB, not 0.010000000000000002

    @property
    def psnr(self) -> float:
        """The smallest PSNR that meets it, in dB."""
        low, high = self.domain.input_range
        return float(f"{psnr_of_mse(self.error, high - low):.12g}")

    @property
    def info(self) -> CriterionInfo:
        return CriterionInfo(value=self.psnr, within=float(f"{self.within:.9g}"))

    def met(self, truth: Tensor, guess: Tensor, baseline: Tensor) -> tuple[bool, ...]:
        """By paired example (N, *shape): it is reconstructed, and better than by the baseline.

        If the baseline reconstructs it equally well, the update is not the cause.
        """
        own = self.domain.distance(truth, guess).tolist()
        other = self.domain.distance(truth, baseline).tolist()
        return tuple(a <= self.within and a < b for a, b in zip(own, other, strict=True))
