"""DP-SGD and its links: clip every example's gradient, average, add Gaussian noise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leakbound import check
from leakbound.core import Gaussian, Guarantee, Unit, Update
from leakbound.defenses.base import Chain, Context, Defense, Sent, State
from leakbound.randomness import Source


def clip_rows(rows: Tensor, clip_norm: float) -> Tensor:
    """Scale each row (R, P) that is longer than `clip_norm` down to this L2 norm."""
    squares = rows.square().sum(1, keepdim=True)
    longer = squares > clip_norm**2
    norms = torch.where(longer, squares, 1.0).sqrt()  # the root of 0 has no finite slope
    # as clip_norm / norms, whose forward derivative imports PyTorch's compiler (a second)
    shrink = torch.ops.aten.mul.Scalar(norms.reciprocal(), clip_norm)
    return rows * torch.where(longer, shrink, 1.0)


@dataclass(frozen=True, repr=False)
class Clip(Defense):
    """Scale the client's update down to L2 norm `clip_norm` if it is longer: G / max(1, |G|/C).

    Args:
        clip_norm: C, the largest released L2 norm, in gradient units.

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
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        rows = clip_rows(update.rows, self.clip_norm)
        return update.opaque(rows, f"{self!r} came after the noise"), state

    def imitate(self, rows: Tensor) -> Tensor:
        return clip_rows(rows, self.clip_norm)


@dataclass(frozen=True, repr=False)
class ClipCoordinates(Defense):
    """Clamp every coordinate of each row to [-limit, limit].

    With `GaussianNoise` after it, this is what the long version of paper A calls DP-SGD and
    compares its optimal noise with. DP-SGD clips the norm of each example's gradient instead
    (`ClipExamples`), which keeps its direction. A clamp changes the direction, and for d
    coordinates it bounds the norm by sqrt(d) · limit only.

    Args:
        limit: the largest size of a coordinate, in gradient units.

    Guarantees: no coordinate is larger than `limit`; one that is not a number counts as 0. One
    example changes the row of a client by at most 2 sqrt(d) · limit in L2 norm. If the rows are of
    examples, each adds at most sqrt(d) · limit to their sum. No privacy without noise.

    Source: Chen, Gursoy and Lei, long version (November 2024), section 3.4; `docs/errata.md`, A19.

    Example:
        >>> rows = Update(torch.tensor([[3.0, -0.5, -2.0, 1.0]]), Unit.CLIENT, (1,))
        >>> sent, _ = ClipCoordinates(1.0).transform(rows, None, None, torch.Generator())
        >>> sent.rows.tolist(), sent.bound
        ([[1.0, -0.5, -1.0, 1.0]], 4.0)
    """

    continuous = True
    keeps_law = False
    gives_bound = True

    limit: float = 1.0

    def __post_init__(self) -> None:
        check.positive(limit=self.limit)

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        # `clamp` keeps NaN, for which no bound would hold.
        rows = update.rows.nan_to_num(nan=0.0).clamp(-self.limit, self.limit)
        longest = self.limit * update.rows.shape[1] ** 0.5
        # An example that is added or removed moves a client's row between any two points of the
        # cube; the row of an example is its own.
        bound = longest if update.unit is Unit.EXAMPLE else 2 * longest
        return update.opaque(
            rows,
            f"{self!r} came after the noise",
            bound=bound,
        ), state

    def imitate(self, rows: Tensor) -> Tensor:
        return rows.clamp(-self.limit, self.limit)


@dataclass(frozen=True, repr=False)
class ClipExamples(Defense):
    """Scale every example's gradient down to L2 norm `clip_norm`: the first link of DP-SGD.

    Args:
        clip_norm: the largest L2 norm of one example's gradient, in gradient units.

    Guarantees: adding or removing one example changes the sum of the rows by at most `clip_norm`
    in L2 norm. An example whose gradient is not finite adds nothing.

    Raises:
        ValueError: rows have 16 bits, in which a norm is too coarse for the guarantee.

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
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        rows = update.rows
        if rows.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{self!r} got gradients of type {rows.dtype}, in which norms are too coarse for "
                "its guarantee; train in float32"
            )
        # A server can choose weights for which some examples overflow: an error would leak which.
        if not bool(rows.sum().isfinite()):  # one entry that is not finite makes the sum so
            rows = torch.where(rows.isfinite().all(1, keepdim=True), rows, 0.0)
        rows = clip_rows(rows, self.clip_norm)
        reason = f"{self!r} came after the noise"
        return update.opaque(rows, reason, bound=self.clip_norm), state

    def imitate(self, rows: Tensor) -> Tensor:
        return clip_rows(rows, self.clip_norm)


@dataclass(frozen=True, repr=False)
class Mean(Defense):
    """Average the rows of all examples into the client's one row.

    The number of examples counts as public, as everywhere in leakbound.

    Guarantees: none by itself. It keeps the bound on what one example adds (`ClipExamples`),
    divided by the number of examples.

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
        return Unit.CLIENT

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        return update.summed(Unit.CLIENT).scaled(1 / len(update.rows)), state

    def imitate(self, rows: Tensor) -> Tensor:
        return rows.mean(0, keepdim=True)


@dataclass(frozen=True, repr=False)
class GaussianMechanism(Defense):
    """Add N(0, (noise_multiplier · bound)² I), where `bound` is what one example can add to a row.

    It needs an earlier link that bounds every example's contribution (`ClipExamples`).

    Args:
        noise_multiplier: noise standard deviation / the most that one example adds.

    Guarantees: one release is the Gaussian mechanism with noise multiplier `noise_multiplier` for
    adding or removing one example: (epsilon, delta)-differentially private as in dp-accounting's
    Gaussian event with this multiplier. The batch size is public and stays the divisor of a mean,
    so a removed example counts as a zero gradient. Replacing one example by another moves the mean
    by up to twice the bound.

    Source: Abadi et al. 2016, algorithm 1; Dwork and Roth 2014, appendix A.

    Example:
        >>> from leakbound.defenses import chain
        >>> chain(ClipExamples(1.0), Mean(), GaussianMechanism(2.0)).guarantee.value
        'differential privacy'
    """

    guarantee = Guarantee.DIFFERENTIAL_PRIVACY
    needs_bound = True

    noise_multiplier: float = 1.0

    def __post_init__(self) -> None:
        check.positive(noise_multiplier=self.noise_multiplier)

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        std = self.noise_multiplier * self._bound(update)
        return update.noised(Gaussian(std * std), source), state

    def _bound(self, update: Update) -> float:
        if update.bound is None:
            raise ValueError(
                f"{self!r} got an update whose examples are not bounded; put ClipExamples before it"
            )
        return update.bound


class DpSgd(Chain):
    """Clip every example's gradient, average, add Gaussian noise: one step of DP-SGD.

    Args:
        clip_norm: L2 bound of every example's gradient.
        noise_multiplier: noise standard deviation / the most that one example adds. The noise on
            the batch mean has standard deviation noise_multiplier · clip_norm / batch size.

    Guarantees: the Gaussian mechanism with that multiplier, for adding or removing one example.

    Source: Abadi et al. 2016, algorithm 1.

    Example:
        >>> DpSgd(clip_norm=2.0, noise_multiplier=0.5)
        ClipExamples(clip_norm=2.0) → Mean() → GaussianMechanism(noise_multiplier=0.5)
    """

    def __init__(
        self,
        clip_norm: float = 1.0,
        noise_multiplier: float = 1.0,
    ) -> None:
        links = ClipExamples(clip_norm), Mean(), GaussianMechanism(noise_multiplier)
        super().__init__(links)
