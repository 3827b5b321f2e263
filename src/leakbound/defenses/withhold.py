"""Defenses that withhold weights of a model: the largest, random ones, or a mix of both."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakbound import check
from leakbound.core import Exact, Refused, Task, Unit, Unknown, Update
from leakbound.defenses.base import Context, Defense, State
from leakbound.defenses.sparsification import LATE
from leakbound.randomness import Source, uniform
from leakbound.tensors import weight_spans

__all__ = ["ClientState", "Withhold"]

RULES = ("largest", "random", "mix")
BLOCK = 2**16
"""Number of weights processed together: a few arrays of this size fit the processor's cache."""
WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class ClientState:
    """The state of a client between rounds; tensors are (P,).

    Attributes:
        spans: (start, stop) of every tensor that may be withheld.
        exists: the weights that may be withheld: those of these tensors that are not `pruned`.
        weights: the client's weights after its last round, of which it sent `sent`.
        server, start: within a round, the received weights and the starting weights.
        rate: the learning rate of this round's local steps.
        own: the state of a specific defense.
    """

    spans: tuple[tuple[int, int], ...]
    exists: Tensor
    weights: Tensor | None = None
    sent: Tensor | None = None
    server: Tensor | None = None
    start: Tensor | None = None
    pruned: Tensor | None = None
    rate: float = 1.0
    own: Any = None


Started = tuple[ClientState, Tensor]
Masked = tuple[Tensor, ClientState]


class Withholding(Defense):
    """A defense that sends some weights and keeps the others for the client's next round."""

    accepts = frozenset({Unit.CLIENT})
    keeps_law = False
    keeps_bound = False
    data_dependent_law = True
    masks_by_value = True
    hides_law = True
    pseudo = True

    def init(self, task: Task) -> ClientState:
        spans = _spans(task)
        return ClientState(spans, _existing(task, spans), pruned=task.kept)

    def begin(
        self,
        task: Task,
        state: State,
        source: Source,
    ) -> tuple[Task, ClientState]:
        """Replace the server's weights by the client's where the client withheld them."""
        kept: ClientState = self.init(task) if state is None else state
        if kept.exists.shape != task.parameters.shape or kept.spans != _spans(task):
            raise Refused(
                f"state holds {len(kept.exists)} weights and the model {len(task.parameters)}; "
                "begin with the state of this model, or with None"
            )
        server = task.parameters
        weights = kept.weights
        if task.kept is not kept.pruned:
            exists = _existing(task, kept.spans)
            if weights is not None and not torch.equal(kept.exists, exists):
                # a weight that the model lacked in the last round has only the server's value
                weights = torch.where(kept.exists, weights, server)
            kept = replace(kept, exists=exists, weights=weights, pruned=task.kept)
        kept, start = self._start(kept, server, source)
        if task.kept is not None:
            start = start * task.kept
        rate = task.plan.learning_rate
        return task.with_parameters(start), replace(kept, server=server, start=start, rate=rate)

    def _start(
        self,
        kept: ClientState,
        server: Tensor,
        source: Source,
    ) -> Started:
        raise NotImplementedError

    def _mask(
        self,
        change: Tensor,
        kept: ClientState,
        source: Source,
    ) -> Masked:
        raise NotImplementedError

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> tuple[Update, ClientState]:
        """Send (server's weights - own weights) / rate where the mask says so; keep the rest."""
        kept: ClientState = state
        change = update.rows[0]
        mask, kept = self._mask(change, kept, source)
        if update.mask is not None:
            mask = mask & update.mask[0]
        late = False
        if kept.start is not None and kept.server is not None:
            late = not torch.equal(kept.server, kept.start)
            if late:
                update = update.opaque(update.rows, f"{self!r} came after the noise")
        rows, weights = self._trained(change, kept, mask, late)
        # `masked` on no coordinates gives the law after the mask; `rows` are masked already.
        before = None if update.mask is None else update.mask[:, :0]
        none = replace(update, rows=update.rows[:, :0], mask=before)
        by_value = self.masks_by_value
        drawn = self.draws_mask
        sent = none.masked(
            torch.ones_like(none.rows).bool(),
            by_value=by_value,
            drawn=drawn,
        )
        sent = replace(sent, rows=rows[None], mask=mask[None])
        if late and isinstance(sent.law, Exact):
            sent = replace(sent, law=Unknown(LATE))
        return sent, replace(
            kept,
            weights=weights,
            sent=mask,
            server=None,
            start=None,
        )

    @torch.no_grad()
    def _trained(
        self,
        change: Tensor,
        kept: ClientState,
        mask: Tensor,
        late: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The sent values in gradient units, zero where withheld, and the kept weights."""
        rows = torch.empty_like(change)
        weights = None
        start = kept.start
        server = kept.server
        if start is not None and self.pseudo:
            weights = torch.empty_like(start)
        for part in blocks(((0, len(change)),)):
            values = change[part]
            if start is not None and weights is not None:
                torch.add(
                    start[part],
                    values,
                    alpha=-kept.rate,
                    out=weights[part],
                )
            if late and start is not None and server is not None:
                values = torch.sub(server[part], start[part], out=rows[part])
                values.div_(kept.rate).add_(change[part])
            torch.mul(values, as_bytes(mask[part]), out=rows[part])
        return rows, weights


@dataclass(frozen=True, repr=False)
class Withhold(Withholding):
    """Withhold the fraction `rate` of the weights of every layer and send zeros instead.

    Exactly floor(rate * n) of a layer's n weights are withheld (of those that base pruning left).
    Biases and the scales of norms are always sent. The mask is visible as zeros. If it was chosen
    by value it is itself a release: in every layer all withheld gradients are at least as large as
    all sent ones. With `pseudo`, withheld values are only late: once a withheld weight is sent, its
    change holds the gradients of all rounds since it was last sent (docs/pruned_learning.md).

    Args:
        rule: withhold the weights whose loss gradient (the change over the local steps) is
            "largest" in magnitude, "random" ones, or a "mix" of both.
        rate: the fraction of a layer's weights that is withheld.
        pseudo: keep the withheld weights and continue from them in the next round (pseudo-pruning);
            else drop them and continue from the server's.
        scope: "layer", or "global" for the largest of the whole model.
        share: for a mix, the share of the rate that goes to the largest.

    Guarantees: exactly that many weights are withheld. No privacy.

    Source: Chu et al. 2024 (paper D), section 5.1, insights 1 and 2.

    Example:
        >>> from leakbound.randomness import stream
        >>> from leakbound.core import Task, Unit, Update
        >>> task = Task.of(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 1)))
        >>> top, row = Withhold(rate=0.5), torch.tensor([[1.0, -3.0, 2.0, 0.5, 9.0]])
        >>> sent, _ = top.transform(Update(row, Unit.CLIENT, (1,)), top.init(task), None, stream(0))
        >>> sent.rows.tolist()
        [[1.0, -0.0, 0.0, 0.5, 9.0]]
    """

    rule: str = "largest"
    rate: float = 0.3
    pseudo: bool = True
    scope: str = "layer"
    share: float = 0.5

    def __post_init__(self) -> None:
        check.one_of(RULES, rule=self.rule)
        check.fraction(rate=self.rate, share=self.share)
        if self.rate == 1:
            raise ValueError("rate is 1; no weight of any layer would be sent: give a rate below 1")
        check.one_of(["layer", "global"], scope=self.scope)

    @property
    def data_dependent_law(self) -> bool:  # type: ignore[override]
        return self.rule != "random"

    masks_by_value = data_dependent_law

    @property
    def draws_mask(self) -> bool:  # type: ignore[override]
        return self.rule != "largest"

    @property
    def hides_law(self) -> bool:  # type: ignore[override]
        """Whether it sends what earlier rounds withheld."""
        return self.pseudo

    def _start(
        self,
        kept: ClientState,
        server: Tensor,
        source: Source,
    ) -> Started:
        if kept.weights is None or kept.sent is None:
            return kept, server
        start = torch.empty_like(server)
        with torch.no_grad():
            for part in blocks(((0, len(server)),)):
                mask = kept.sent[part].logical_not().logical_and_(kept.exists[part])
                choose(mask, kept.weights[part], server[part], start[part])
        return kept, start

    def _mask(
        self,
        change: Tensor,
        kept: ClientState,
        source: Source,
    ) -> Masked:
        largest = {"largest": 1.0, "random": 0.0, "mix": self.share}[self.rule] * self.rate
        gone = torch.zeros_like(kept.exists)
        spans = kept.spans if self.scope == "layer" else ((0, len(change)),)
        draw = uniform(change.shape, source) if largest < self.rate else None
        for start, stop in spans:
            exists = kept.exists[start:stop]
            count = int(exists.count_nonzero())
            total = math.floor(self.rate * count + 1e-9)
            top = math.floor(largest * count + 1e-9) if largest < self.rate else total
            size = change[start:stop].abs()
            if count < len(size):
                # Below every size: a pruned weight is never among the largest.
                size.masked_fill_(exists.logical_not(), -1.0)
            gone[start:stop] = mask_of_largest(size, top)
            if draw is not None:
                left = exists & ~gone[start:stop]
                order = torch.where(left, draw[start:stop].to(left.device), -1.0)
                gone[start:stop] |= mask_of_largest(order, total - top)
        return gone.logical_not_(), kept


def _spans(task: Task) -> tuple[tuple[int, int], ...]:
    return tuple((start, stop) for _, start, stop in weight_spans(task))


def _existing(task: Task, spans: tuple[tuple[int, int], ...]) -> Tensor:
    """(P,) the weights that lie in the spans and that pruning left in the model."""
    exists = torch.zeros_like(task.parameters, dtype=torch.bool)
    for start, stop in spans:
        exists[start:stop] = True
    return exists if task.kept is None else exists & task.kept


def blocks(
    spans: tuple[tuple[int, int], ...],
    size: int = BLOCK,
) -> Iterator[slice]:
    """The spans in slices of `size`; the last slice of each may be shorter."""
    # BLOCK is a multiple of all that torch computes at once, so the bits are those of the whole:
    # torch computes the rest of a tensor one by one, and its last bits may differ.
    for start, stop in spans:
        for at in range(start, stop, size):
            yield slice(at, min(at + size, stop))


def as_bytes(mask: Tensor) -> Tensor:
    """The same memory as 0 and 1: torch converts these to floats faster than booleans."""
    return mask.view(torch.uint8)


def choose(
    mask: Tensor,
    yes: Tensor,
    no: Tensor,
    out: Tensor,
) -> None:
    """`torch.where` on a block, by bits: no branch, which a random mask makes slow."""
    whole = WHOLE[out.element_size()]
    bits = out.view(whole)
    other = no.view(whole)
    torch.bitwise_xor(yes.view(whole), other, out=bits)
    bits.mul_(as_bytes(mask).to(whole)).bitwise_xor_(other)


def mask_of_largest(values: Tensor, count: int) -> Tensor:
    """Mask of the `count` largest values; of ties, the first."""
    if count == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    place = len(values) - count
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        least = float(np.partition(values.detach().numpy(), place)[place])  # many times faster
    else:
        least = float(values.kthvalue(place + 1).values)
    mask = values > least
    missing = count - int(mask.count_nonzero())
    for part in blocks(((0, len(values)),)):
        if missing == 0:
            break
        equal = (values[part] == least).nonzero().squeeze(1)[:missing]
        mask[part][equal] = True
        missing -= len(equal)
    return mask
