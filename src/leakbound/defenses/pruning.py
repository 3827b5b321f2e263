"""Defenses that withhold coordinates of an update: magnitude pruning and gradient dropout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leakbound import check
from leakbound.defenses.base import Defense, State
from leakbound.random import Source, bernoulli
from leakbound.types import ClientContext, Task, Unit, Update


def smallest(values: Tensor, count: int) -> Tensor:
    """Boolean mask of the `count` smallest entries of a vector; of equal ones, the first."""
    mask = torch.zeros_like(values, dtype=torch.bool)
    mask[torch.sort(values, stable=True).indices[:count]] = True
    return mask


@dataclass(frozen=True, repr=False)
class MagnitudePruning(Defense):
    """Withhold the fraction `rate` of coordinates that are smallest in magnitude.

    Exactly floor(rate · n) coordinates go (0.29 of 100 are 29), of every tensor (`scope="tensor"`,
    as GradAttack) or of the whole update (`scope="global"`); of equal magnitudes those with the
    lower index.

    Args:
        rate: the fraction of coordinates that is withheld.
        scope: "tensor" (that fraction of every tensor) or "global" (of the whole update).

    Guarantees: exactly that many coordinates are withheld. No privacy: which ones are withheld is
    itself visible to the server and depends on the data.

    Source: Liu et al. 2025, GradPrune; Zhu et al. 2019, section 5.2.

    Example:
        >>> smallest(torch.tensor([3.0, 0.0, 0.0, 1.0]), 2).tolist()
        [False, True, True, False]
    """

    accepts = frozenset({Unit.CLIENT, Unit.COHORT})
    keeps_law = False
    data_dependent_law = True

    rate: float = 0.7
    scope: str = "tensor"

    def __post_init__(self) -> None:
        check.fraction(rate=self.rate)
        check.one_of(["tensor", "global"], scope=self.scope)

    def _sketch(self, update: Update) -> Update:
        return update.masked(torch.ones_like(update.rows).bool(), by_value=True)

    def init(self, task: Task) -> State:
        """The tensors' places within a row, so that no client context is needed later."""
        return tuple((start, stop) for _, _, start, stop in task.layout)

    def transform(
        self, update: Update, state: State, context: ClientContext | None, source: Source
    ) -> tuple[Update, State]:
        """Prune every row on its own."""
        width = update.rows.shape[1]
        if self.scope == "tensor" and state is None:
            raise ValueError("scope is 'tensor', but the state from init(task) was not given")
        spans = state if self.scope == "tensor" else ((0, width),)
        mask = torch.ones_like(update.rows, dtype=torch.bool)
        for row, keep in zip(update.rows, mask, strict=True):
            for start, stop in spans:
                gone = math.floor(self.rate * (stop - start) + 1e-9)  # 0.29 * 100 < 29 in floats
                keep[start:stop] &= ~smallest(row[start:stop].abs(), gone)
        return update.masked(mask, by_value=True), state


@dataclass(frozen=True, repr=False)
class GradientDropout(Defense):
    """Withhold each coordinate with probability `rate`, independent of the data; no rescaling.

    Args:
        rate: the probability that a coordinate is withheld.

    Guarantees: the mask is independent of the data. No privacy.

    Source: Liu et al. 2025, GradDropout.

    Example:
        >>> from leakbound.random import stream
        >>> update = Update(torch.ones(1, 100), Unit.CLIENT, (1,))
        >>> sent, _ = GradientDropout(0.5).transform(update, None, None, stream(0))
        >>> sent.rows.unique()
        tensor([0., 1.])
    """

    draws_mask = True

    rate: float = 0.5

    def __post_init__(self) -> None:
        check.fraction(rate=self.rate)

    def transform(
        self, update: Update, state: State, context: ClientContext | None, source: Source
    ) -> tuple[Update, State]:
        """Draw the mask and apply it."""
        keep = bernoulli(update.rows.shape, 1 - self.rate, source, like=update.rows)
        return update.masked(keep, by_value=False, drawn=True), state
