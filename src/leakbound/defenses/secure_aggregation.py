"""Secure aggregation: the server sees only the cohort's sum."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from leakbound import check
from leakbound.core import Unit, Update
from leakbound.defenses.base import Context, Defense, Sent, State
from leakbound.randomness import Source


@dataclass(frozen=True, repr=False)
class SecureAggregation(Defense):
    """Reveal to the server only the sum of `clients` updates.

    This is the ideal functionality, not the protocol: no dropouts, no colluding clients.

    Args:
        clients: number of updates in the sum.

    Guarantees: none about the sum itself. The attack sees one larger batch.

    Source: Bonawitz et al. 2017; Liu et al. 2025, section 3.3.

    Example:
        >>> SecureAggregation(4).returns(Unit.CLIENT).noun
        'cohort'
    """

    continuous = True
    accepts = frozenset({Unit.CLIENT})

    clients: int = 4

    def __post_init__(self) -> None:
        check.count(clients=self.clients)

    @property
    def cohort_size(self) -> int:  # type: ignore[override]
        return self.clients

    def returns(self, given: Unit) -> Unit:
        return Unit.COHORT

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        return update.summed(Unit.COHORT), state

    def imitate(self, rows: Tensor) -> Tensor:
        return rows.sum(0, keepdim=True)
