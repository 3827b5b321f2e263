"""What counts as reconstructed: one rule for measured success, the baseline and the bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leakbound import check
from leakbound._util.decibels import EXTREME
from leakbound.assess.record import CriterionInfo
from leakbound.bounds.distances import ColumnMisses, Distance, GivenMetric, SquaredError
from leakbound.domains import Domain
from leakbound.domains.known import Known, known_parts


@dataclass(frozen=True)
class Criterion:
    """An example is reconstructed if the domain's distance to it is at most `within`.

    Measured success, the prior-only baseline, kappa and the bounds all use it, so that attacks and
    theorems share one axis.

    Attributes:
        domain: of what counts: whole examples, or the part that the attacker does not know.
        within: the largest distance.
        known: the parts that the attacker has from elsewhere; None if whole examples count.
        of_stranger: the same for who knows no part; None if this is it.
    """

    domain: Domain
    within: float
    known: Known | None = None
    of_stranger: Criterion | None = None

    def __post_init__(self) -> None:
        check.non_negative(within=self.within)

    @property
    def whole(self) -> Domain:
        """The domain of whole examples."""
        return self.domain if self.known is None else self.known.domain

    def counted(self, examples: Tensor) -> Tensor:
        """(N, *domain.shape) the part of whole examples (N, *whole.shape) that counts."""
        return examples if self.known is None else self.known.unknown(examples)

    def costs(self, a: Tensor, b: Tensor) -> Tensor:
        """(A, B) what the pairing of whole examples a with candidates b minimizes."""
        return self.domain.costs(self.counted(a), self.counted(b))

    @staticmethod
    def of(
        domain: Domain,
        *,
        psnr: float = 20.0,
        share: float = 0.9,
        known: str = "",
    ) -> Criterion:
        """The criterion of that domain: a PSNR in dB, or a `share` of right columns or tokens.

        Of a series, `psnr` is 20 log10 of scale over error on its worst channel. What the attacker
        has from elsewhere (`known`, as `known_parts` reads it) does not count.

        Example:
            >>> from leakbound.domains import of_shape
            >>> Criterion.of(of_shape((1, 28, 28)), psnr=25.0).info.text
            '25 dB PSNR or more'
        """
        check.positive(psnr=psnr)
        if psnr >= EXTREME:
            raise ValueError(f"psnr is {psnr:g}; give decibels, such as 20")
        stranger = Criterion(domain, domain.within(psnr=psnr, share=share))
        if not known:
            return stranger
        parts = known_parts(domain, known)
        within = parts.rest.within(psnr=psnr, share=share)
        return Criterion(parts.rest, within, parts, stranger)

    @property
    def error(self) -> float:
        """The largest mean squared error that meets it, in input units squared."""
        return float(f"{self.within**2:.14g}")  # 0.01 for 20 dB, not 0.010000000000000002

    @property
    def level(self) -> float:
        """The largest distance that meets it, as bounds measure it (`distance_of`)."""
        return self.error if self.domain.distance_is_rmse else self.within

    @property
    def info(self) -> CriterionInfo:
        return CriterionInfo(
            metric=self.domain.metric,
            # Rounded, because a threshold in dB went through a power and a logarithm.
            value=float(f"{self.domain.level(self.within):.12g}"),
            within=float(f"{self.within:.9g}"),
            of=self.domain.parts,
            known="" if self.known is None else self.known.text,
        )

    def met(
        self,
        truth: Tensor,
        guess: Tensor,
        baseline: Tensor,
    ) -> tuple[bool, ...]:
        """(N,) by paired example: it is reconstructed, and better than by the baseline.

        If the baseline reconstructs it equally well, the update is not the cause.
        """
        truth, guess, baseline = (self.counted(each) for each in (truth, guess, baseline))
        of_guess = self.domain.distance(truth, guess).tolist()
        other = self.domain.distance(truth, baseline).tolist()
        return tuple(a <= self.within and a < b for a, b in zip(of_guess, other, strict=True))


def distance_of(domain: Domain) -> Distance:
    """How bounds measure the distance of a domain, for examples as rows (n, values).

    Example:
        >>> from leakbound.domains import of_shape
        >>> type(distance_of(of_shape((1, 8, 8)))).__name__
        'SquaredError'
    """
    if domain.parts is not None:
        return ColumnMisses(
            lambda rows: domain.coded(_tensor(rows)).numpy(),
            domain.parts,
            domain.noun,
            domain.metric,
        )
    if domain.distance_is_rmse:
        return SquaredError()

    def of(*rows: NDArray[Any]) -> NDArray[Any]:
        a, b = (_tensor(row) for row in np.broadcast_arrays(*rows))
        one, two = (flat.reshape(-1, *domain.shape) for flat in (a, b))
        return np.asarray(domain.distance(one, two)).reshape(a.shape[:-1])

    return GivenMetric(of, domain.noun)


def _tensor(rows: NDArray[Any]) -> torch.Tensor:
    # A copy, because `from_numpy` warns of arrays that are read-only.
    return torch.tensor(np.ascontiguousarray(rows))
