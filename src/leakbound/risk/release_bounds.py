"""Bounds on every attacker for one release, from a model and a batch in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from leakbound._util import pictures
from leakbound.assess.record import Attained, Bound, CriterionInfo, Verdict
from leakbound.assess.verdict import verdict
from leakbound.report.template import Presented
from leakbound.risk.statement import of_attained, of_bounds

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class ReleaseBounds(Presented):
    """Bounds on every attacker for one release.

    Attributes:
        known: the leak map.
        bounds: the available bounds, on the error and on the probability of success.
        note: why others are missing.
        attained: success of the best known attack of the threat model's server.
        criterion: what counts as reconstructed.
    """

    bounds: tuple[Bound, ...]
    note: str | None
    criterion: CriterionInfo
    attained: Attained | None = None
    known: Tensor | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict from the bounds alone; never "exposed", because no attack was run."""
        return verdict((), self.bounds, attained=self.attained)

    @property
    def error(self) -> Bound | None:
        """The lower bound on the mean squared error, preferably one that covers all attackers.

        An estimate says so in `covers`; None if there is no bound (see `note`).
        """
        on_error = [bound for bound in self.bounds if bound.on_error]
        return max(on_error, key=lambda bound: bound.covers == "all", default=None)

    @property
    def probability(self) -> float | None:
        """Upper bound on any attacker's probability to reconstruct an example; None: not known."""
        return next((b.probability for b in self.bounds if b.probability is not None), None)

    @property
    def psnr(self) -> float | None:
        """The PSNR in dB that no attacker exceeds on average; None if none is proven."""
        return self.error.psnr if self.error is not None and self.error.covers == "all" else None

    def _figure(self) -> Figure:
        from leakbound.report import figures

        if self.known is None:
            raise ValueError(f"there is no leak map: {self.note or 'kind is not full'}")
        return figures.leak_map(self.known)

    def leak_map(self) -> Tensor | None:
        """How much of each value's uncertainty the release removes, (B, *S) in [0, 1].

        None without a full bound.
        """
        return self.known

    def _repr_html_(self) -> str:
        """The verdict, every bound as a sentence, and the leak map."""
        known = self.known
        attained = self.attained
        return pictures.block(
            self.verdict,
            *map(pictures.note, of_bounds(self.bounds, self.criterion.goal)),
            "" if attained is None else pictures.note(of_attained(attained, self.criterion.goal)),
            pictures.note(f"no bound: {self.note}") if self.note else "",
            "" if known is None else pictures.images(known, input_range=(0, 1), name="leak map"),
        )
