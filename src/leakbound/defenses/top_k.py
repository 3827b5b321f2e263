"""Sparsification with a memory: the largest coordinates now, the rest in later rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakbound import check
from leakbound.defenses.base import Defense, State
from leakbound.defenses.pruning import smallest
from leakbound.random import Source
from leakbound.types import ClientContext, Exact, Unit, Unknown, Update

REASON = "it holds what earlier rounds withheld"


@dataclass(frozen=True, repr=False)
class TopK(Defense):
    """Withhold the fraction `rate` of coordinates that are smallest, and send them later.

    The client adds to its update what it withheld before (its memory m), sends all but the
    floor(rate · P) smallest coordinates of the sum, and keeps the rest: u = g + m, y = top(u),
    m' = u - y. The first round is magnitude pruning of the whole update; without `error_feedback`
    every round is. Memory is in gradient units: sent weights are the same where the server's step
    does not change between rounds.

    The mask is told, so a matching attack leaves withheld coordinates out. From the second round on
    the release holds gradients of earlier weights and batches too, in a part that the attacker
    cannot tell, and no release law is declared. But what is withheld is only late: T releases sum
    up to the T gradients but for the memory that is left, and whoever sees all rounds of a client
    (or sends it the same weights again and again) gets the mean gradient up to ||m|| / T. As
    ||m'|| <= sqrt(r) (G + ||m||) at rate r and gradients of norm up to G, the memory stays below
    2 sqrt(r) / (1 - r) G. Fewer coordinates a round buy time, not privacy.

    Args:
        rate: the fraction of coordinates that is withheld.
        error_feedback: keep what is withheld for later rounds.

    Guarantees: exactly floor(rate · P) coordinates are withheld. No privacy.

    Source: Stich et al. 2018, "Sparsified SGD with memory", algorithm 1; Karimireddy et al. 2019,
    lemma 3 (the memory's bound).

    Example:
        >>> from leakbound.types import Unit, Update
        >>> top, update = TopK(0.5), Update(torch.tensor([[1.0, 0.6]]), Unit.CLIENT, (1,))
        >>> first, memory = top.transform(update, None, None, torch.Generator())
        >>> second, memory = top.transform(update, memory, None, torch.Generator())
        >>> first.rows.tolist(), [round(v, 1) for v in second.rows[0].tolist()]
        ([[1.0, 0.0]], [0.0, 1.2])
    """

    accepts = frozenset({Unit.CLIENT})
    keeps_law = False
    data_dependent_law = True

    rate: float = 0.9
    error_feedback: bool = True

    def __post_init__(self) -> None:
        check.fraction(rate=self.rate)

    def _sketch(self, update: Update) -> Update:
        sent = update.masked(torch.ones_like(update.rows).bool(), by_value=True)
        return replace(sent, law=Unknown(REASON)) if self.error_feedback else sent

    def transform(
        self, update: Update, state: State, context: ClientContext | None, source: Source
    ) -> tuple[Update, State]:
        """Add the memory, send the largest, keep the rest; `state` is the memory (R, P)."""
        total = update.rows if state is None else update.rows + state
        gone = math.floor(self.rate * total.shape[1] + 1e-9)
        keep = torch.stack([~smallest(row.abs(), gone) for row in total])
        if update.mask is not None:
            keep = keep & update.mask
        held = update if state is None else update.opaque(total, f"{self!r} came after the noise")
        sent = held.masked(keep, by_value=True)
        if isinstance(sent.law, Exact) and _any(state):
            sent = replace(sent, law=Unknown(REASON))
        memory = total - sent.rows if self.error_feedback else None
        return sent, memory


def _any(memory: Tensor | None) -> bool:
    return memory is not None and bool((memory != 0).any())
