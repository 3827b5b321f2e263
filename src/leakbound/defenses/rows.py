"""Defenses on whole rows: clipping, averaging, signs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leakbound import check
from leakbound.defenses.base import Defense, State
from leakbound.random import Source
from leakbound.types import ClientContext, Unit, Update


def clip_rows(rows: Tensor, clip_norm: float) -> Tensor:
    """Each row (R, P) scaled down to L2 norm `clip_norm` where it is longer."""
    squares = rows.square().sum(1, keepdim=True)
    longer = squares > clip_norm**2
    norms = torch.where(longer, squares, 1.0).sqrt()  # the root of 0 has no finite slope
    return rows * torch.where(longer, clip_norm / norms, 1.0)


@dataclass(frozen=True, repr=False)
class Clip(Defense):
    """Scale the client's update down to L2 norm `clip_norm` where it is longer: G / max(1, |G|/C).

    Args:
        clip_norm: C, the largest L2 norm that is released, in gradient units.

    Guarantees: the L2 norm of the released row is at most `clip_norm`. No privacy: direction and
    sign of every coordinate survive, and a scale-invariant attack loses nothing.

    Source: Liu et al. 2025, GradClip.

    Example:
        >>> clip_rows(torch.tensor([[3.0, 4.0]]), 1.0)
        tensor([[0.6000, 0.8000]])
    """

    continuous = True
    accepts = frozenset({Unit.CLIENT, Unit.COHORT})
    keeps_law = False

    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        check.positive(clip_norm=self.clip_norm)

    def transform(
        self, update: Update, state: State, context: ClientContext | None, source: Source
    ) -> tuple[Update, State]:
        """Clip every row."""
        rows = clip_rows(update.rows, self.clip_norm)
        return update.opaque(rows, f"{self!r} came after the noise"), state

    def imitate(self, rows: Tensor) -> Tensor:
        """The same clipping, differentiable."""
        return clip_rows(rows, self.clip_norm)


@dataclass(frozen=True, repr=False)
class ClipExamples(Defense):
    """Scale every example's own gradient down to L2 norm `clip_norm`: the first link of DP-SGD.

    Args:
        clip_norm: the largest L2 norm of one example's gradient, in gradient units.

    Guarantees: adding or removing one example changes the sum of the rows by at most `clip_norm`
    in L2 norm. An example whose gradient is not finite adds nothing: an error in its place would
    tell of the example, and a server can choose weights for which some overflow.

    Raises:
        ValueError: rows of 16 bits, in which a norm is too coarse for the guarantee.

    Source: Abadi et al. 2016, algorithm 1.

    Example:
        >>> rows = Update(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), Unit.EXAMPLE, (1, 1))
        >>> sent, _ = ClipExamples(1.0).transform(rows, None, None, torch.Generator())
        >>> sent.rows, sent.bound
        (tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]]), 1.0)
    """

    continuous = True
    accepts = frozenset({Unit.EXAMPLE})
    keeps_law = False
    gives_bound = True

    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        check.positive(clip_norm=self.clip_norm)

    def transform(
        self, update: Update, state: State, context: ClientContext | None, source: Source
    ) -> tuple[Update, State]:
        """Clip every row and declare the bound."""
        rows = update.rows
        if rows.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{self!r} got gradients of type {rows.dtype}, in which norms are too coarse for "
                "its guarantee; train in float32"
            )
        if not bool(rows.sum().isfinite()):  # one entry that is not finite makes the sum so
            rows = torch.where(rows.isfinite().all(1, keepdim=True), rows, 0.0)
        rows = clip_rows(rows, self.clip_norm)
        reason = f"{self!r} came after the noise"
        return update.opaque(rows, reason, bound=self.clip_norm), state

    def imitate(self, rows: Tensor) -> Tensor:
        """The same clipping, differentiable."""
        return clip_rows(rows, self.clip_norm)


@dataclass(frozen=True, repr=False)
class Mean(Defense):
    """Average the rows of all examples into the client's one row.

    The number of examples is treated as public, as everywhere in leakbound.

    Guarantees: none of its own. A bound on what one example adds (`ClipExamples`) is kept, divided
    by the number of examples.

    Source: Abadi et al. 2016, algorithm 1 (the average before the noise).

    Example:
        >>> rows = Update(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), Unit.EXAMPLE, (1, 1))
        >>> sent, _ = Mean().transform(rows, None, None, torch.Generator())
        >>> sent.rows, sent.unit.noun
        (tensor([[2., 2.]]), 'client')
    """

    continuous = True
    accepts = frozenset({Unit.EXAMPLE})

    def returns(self, given: Unit) -> Unit:
        """One row per client."""
        return Unit.CLIENT

    def transform(
        self, update: Update, state: State, context: ClientContext | None, source: Source
    ) -> tuple[Update, State]:
        """Sum, then divide by the number of rows; the law and the bound follow."""
        return update.summed(Unit.CLIENT).scaled(1 / len(update.rows)), state

    def imitate(self, rows: Tensor) -> Tensor:
        """Average."""
        return rows.mean(0, keepdim=True)


@dataclass(frozen=True, repr=False)
class Sign(Defense):
    """Send only the sign of every coordinate (signSGD).

    Guarantees: none. Every released coordinate is -1, 0 or 1.

    Source: Bernstein et al. 2018.

    Example:
        >>> update = Update(torch.tensor([[0.3, -4.0, 0.0]]), Unit.CLIENT, (1,))
        >>> Sign().transform(update, None, None, torch.Generator())[0].rows
        tensor([[ 1., -1.,  0.]])
    """

    accepts = frozenset({Unit.CLIENT, Unit.COHORT})
    keeps_law = False

    def transform(
        self, update: Update, state: State, context: ClientContext | None, source: Source
    ) -> tuple[Update, State]:
        """Take signs."""
        return update.opaque(update.rows.sign(), f"{self!r} came after the noise"), state

    def imitate(self, rows: Tensor) -> Tensor:
        """A smooth sign, g / sqrt(g² + s²) with s the mean |g|: attackers need its slope."""
        smooth = rows.detach().abs().mean(1, keepdim=True).clamp_min(1e-12)
        return rows / (rows.square() + smooth.square()).sqrt()
