"""Defenses that send some coordinates of an update: pruning, dropout, and top-k with a memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakbound import check
from leakbound.core import Exact, Task, Unit, Unknown, Update
from leakbound.defenses.base import Context, Defense, Sent, State
from leakbound.randomness import Source, bernoulli

LATE = "it holds what earlier rounds withheld"


def smallest(values: Tensor, rate: float) -> Tensor:
    """Mask of the floor(rate * n) smallest entries of a vector; of ties, the first."""
    count = math.floor(rate * len(values) + 1e-9)  # 0.29 * 100 < 29 in floats
    if not count:
        return torch.zeros_like(values, dtype=torch.bool)
    largest = values.kthvalue(count).values  # several times faster than sorting all
    mask = values < largest
    ties = values == largest
    if largest.isnan():  # above all numbers
        ties = values.isnan()
        mask = ~ties
    mask[ties.nonzero()[: count - int(mask.sum()), 0]] = True
    return mask


@dataclass(frozen=True, repr=False)
class MagnitudePruning(Defense):
    """Withhold the fraction `rate` of coordinates with the smallest magnitudes.

    Exactly floor(rate · n) of n coordinates are withheld; of ties, those with the lower index.

    Args:
        rate: the fraction of coordinates that is withheld.
        scope: "tensor" (this fraction of every tensor, as in GradAttack) or "global" (of the whole
            update).

    Guarantees: exactly that many coordinates are withheld. No privacy: the server sees which ones,
    and they depend on the data.

    Source: Liu et al. 2025, GradPrune; Zhu et al. 2019, section 5.2.

    Example:
        >>> update = Update(torch.tensor([[3.0, -1.0, 2.0, 0.5]]), Unit.CLIENT, (1,))
        >>> prune = MagnitudePruning(0.5, "global")
        >>> prune.transform(update, None, None, torch.Generator())[0].rows.tolist()
        [[3.0, -0.0, 2.0, 0.0]]
    """

    accepts = frozenset({Unit.CLIENT, Unit.COHORT})
    keeps_law = False
    data_dependent_law = True
    masks_by_value = True

    rate: float = 0.7
    scope: str = "tensor"

    def __post_init__(self) -> None:
        check.fraction(rate=self.rate)
        check.one_of(["tensor", "global"], scope=self.scope)

    def init(self, task: Task) -> State:
        """The tensors' places within a row, so that no client context is needed later."""
        return tuple((start, stop) for _, _, start, stop in task.layout)

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        if self.scope == "tensor" and state is None:
            raise ValueError("scope is 'tensor', but the state from init(task) was not given")
        spans = state if self.scope == "tensor" else ((0, update.rows.shape[1]),)
        mask = torch.ones_like(update.rows, dtype=torch.bool)
        for row, keep in zip(update.rows, mask, strict=True):
            for start, stop in spans:
                keep[start:stop] &= ~smallest(row[start:stop].abs(), self.rate)
        return update.masked(mask, by_value=True), state


@dataclass(frozen=True, repr=False)
class GradientDropout(Defense):
    """Withhold each coordinate with probability `rate`, independent of the data; no rescaling.

    Args:
        rate: the probability that a coordinate is withheld.

    Guarantees: the mask is independent of the data. No privacy.

    Source: Liu et al. 2025, GradDropout.

    Example:
        >>> from leakbound.randomness import stream
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
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        keep = bernoulli(
            update.rows.shape,
            1 - self.rate,
            source,
            like=update.rows,
        )
        return update.masked(keep, by_value=False, drawn=True), state


@dataclass(frozen=True, repr=False)
class TopK(Defense):
    """Withhold the fraction `rate` of coordinates that are smallest, and send them later.

    The client adds to its update g what it withheld before (its memory m, in gradient units). It
    sends all but the floor(rate · P) smallest coordinates of the sum, and keeps the rest:
    u = g + m, y = top(u), m' = u - y. Without `error_feedback` it is magnitude pruning of the whole
    update.

    From the second round on no noise distribution is declared. Withheld values are only late: the
    mean of T releases is the mean gradient up to ||m|| / T, and the memory stays below
    2 sqrt(r) / (1 - r) G at rate r and gradients of norm up to G. Fewer coordinates per round gain
    time, not privacy.

    Args:
        rate: the fraction of coordinates that is withheld.
        error_feedback: keep what is withheld for later rounds.

    Guarantees: exactly floor(rate · P) coordinates are withheld. No privacy.

    Source: Stich et al. 2018, "Sparsified SGD with memory", algorithm 1; Karimireddy et al. 2019,
    lemma 3 (the memory's bound).

    Example:
        >>> top, update = TopK(0.5), Update(torch.tensor([[1.0, 0.6]]), Unit.CLIENT, (1,))
        >>> first, memory = top.transform(update, None, None, torch.Generator())
        >>> second, memory = top.transform(update, memory, None, torch.Generator())
        >>> first.rows.tolist(), [round(v, 1) for v in second.rows[0].tolist()]
        ([[1.0, 0.0]], [0.0, 1.2])
    """

    accepts = frozenset({Unit.CLIENT})
    keeps_law = False
    data_dependent_law = True
    masks_by_value = True

    rate: float = 0.9
    error_feedback: bool = True

    def __post_init__(self) -> None:
        check.fraction(rate=self.rate)

    @property
    def hides_law(self) -> bool:  # type: ignore[override]
        return self.error_feedback

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        """Add the memory, send the largest, keep the rest; `state` is the memory (R, P)."""
        total = update.rows if state is None else update.rows + state
        keep = torch.stack([~smallest(row.abs(), self.rate) for row in total])
        # What an earlier link withheld is not sent, and stays in the memory.
        if update.mask is not None:
            keep = keep & update.mask
        held = update if state is None else update.opaque(total, f"{self!r} came after the noise")
        sent = held.masked(keep, by_value=True)
        late = state is not None and bool((state != 0).any())
        if late and isinstance(sent.law, Exact):
            sent = replace(sent, law=Unknown(LATE))
        return sent, total - sent.rows if self.error_feedback else None
