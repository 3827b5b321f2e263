"""DP-SGD with noise of a public shape: whiten, clip, add white noise, color again."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import astuple, dataclass

from torch import Tensor

from leakbound import check
from leakbound.core import Task, Update
from leakbound.covariance import Structured
from leakbound.defenses.base import (
    Chain,
    Context,
    Defense,
    Resolved,
    Sent,
    State,
    tiny_covariance,
)
from leakbound.defenses.dp_sgd import DpSgd
from leakbound.defenses.public import PublicShape, public_shape
from leakbound.randomness import Source


@dataclass(frozen=True, repr=False)
class Whiten(Defense):
    """Map every row y to S⁻¹ y, so that noise of the public covariance S Sᵀ becomes white.

    The covariance is chosen only from the model and public data and has mean variance 1, so that
    lengths keep their size. A chain that whitens must color again, with the same settings.

    Args:
        rule: see `allocation.shape`.
        correlation: "none"; "layers" or "low_rank" for correlated noise (rule "energy" only).
        rank: number of directions that "low_rank" adds.
        images: number of public images used.
        refresh: number of rounds that use the same covariance.

    Guarantees: none by itself: the map is public and can be undone. For the same reason it does not
    weaken the links after it, `ClipExamples` and the noise.

    Raises:
        NotApplicable: the task has no public data.

    Source: this project (`docs/whitened_dp.md`); the covariance from Chen, Gursoy and Lei, theorem
    3.5.

    Example:
        >>> from leakbound.defenses import ClipExamples, GaussianMechanism, Mean, chain
        >>> chain(Whiten(), ClipExamples(), Mean(), GaussianMechanism(), Color()).guarantee.value
        'differential privacy'
    """

    keeps_law = False
    keeps_bound = False

    rule: str = "energy"
    correlation: str = "none"
    rank: int = 16
    images: int = 64
    refresh: int = 1

    def __post_init__(self) -> None:
        check.count(refresh=self.refresh)
        self._settings()

    @property
    def maps_basis(self) -> Hashable:  # type: ignore[override]
        """Its settings: `Color` with the same settings undoes it."""
        return astuple(self)

    def _sketch(self, update: Update) -> Update:
        root = tiny_covariance(update, correlated=self.correlation != "none")
        return update.mapped(root, whiten=self.maps_basis is not None)

    def _settings(self) -> PublicShape:
        correlation = self.correlation
        rank = self.rank
        images = self.images
        return PublicShape(
            rule=self.rule,
            correlation=correlation,
            rank=rank,
            images=images,
        )

    def resolve(
        self,
        task: Task,
        examples: int,
        previous: Defense | None = None,
    ) -> Defense:
        if again := FixedMap.reused(previous, self, examples):
            return again
        shape = public_shape(self._settings(), task, examples)
        root = Structured.of(shape) if isinstance(shape, Tensor) else shape
        return FixedMap(self, root, examples=examples)


@dataclass(frozen=True, repr=False)
class Color(Whiten):
    """Map every row y to S y, which undoes `Whiten` with the same settings.

    Guarantees: none by itself, and it removes none: it is post-processing by a public map. Known
    white noise becomes known noise of the covariance S Sᵀ.

    Source: this project (`docs/whitened_dp.md`).

    Example:
        >>> import torch
        >>> from leakbound.core import Batch, Unit
        >>> public = Batch(torch.linspace(0, 1, 32).reshape(8, 4), torch.arange(8) % 2)
        >>> task = Task.of(torch.nn.Linear(4, 2), public=public)
        >>> update, source = Update(torch.ones(1, 10), Unit.EXAMPLE, (1,)), torch.Generator()
        >>> there, _ = Whiten().resolve(task, 1).transform(update, None, None, source)
        >>> back, _ = Color().resolve(task, 1).transform(there, None, None, source)
        >>> torch.allclose(there.rows, update.rows), torch.allclose(back.rows, update.rows)
        (False, True)
    """

    keeps_law = True

    @property
    def maps_basis(self) -> Hashable:  # type: ignore[override]
        return None

    @property
    def unmaps_basis(self) -> Hashable:  # type: ignore[override]
        return astuple(self)


@dataclass(frozen=True, repr=False, eq=False)
class FixedMap(Resolved):
    """`Whiten` or `Color` for one model."""

    continuous = True

    settings: Whiten
    root: Structured

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        return update.mapped(self.root, whiten=self.maps_basis is not None), state

    def imitate(self, rows: Tensor) -> Tensor:
        return self.root.color(rows) if self.maps_basis is None else self.root.whiten(rows)


class WhitenedDpSgd(Chain):
    """DP-SGD whose noise has a public covariance: whiten each example's gradient, clip, add noise.

    Args:
        clip_norm: L2 bound of every example's whitened gradient.
        noise_multiplier: noise standard deviation / the most that one example adds, in whitened
            coordinates.
        rule: how the covariance is spread; see `allocation.shape`.
        correlation: "none"; "layers" or "low_rank" for correlated noise (rule "energy" only).
        rank: number of directions that "low_rank" adds.
        images: number of public images used.
        refresh: number of rounds that use the same covariance.

    Guarantees: the Gaussian mechanism with that multiplier, for adding or removing one example, as
    `DpSgd`: the covariance is public, whitening is linear, and coloring is post-processing
    (docs/whitened_dp.md has the proof).

    Source: Abadi et al. 2016, algorithm 1; the covariance from Chen, Gursoy and Lei, theorem 3.5.

    Example:
        >>> WhitenedDpSgd(noise_multiplier=2.0).guarantee.value
        'differential privacy'
    """

    def __init__(
        self,
        clip_norm: float = 1.0,
        noise_multiplier: float = 1.0,
        rule: str = "energy",
        correlation: str = "none",
        rank: int = 16,
        images: int = 64,
        refresh: int = 1,
    ) -> None:
        outer = (rule, correlation, rank, images, refresh)
        super().__init__((Whiten(*outer), DpSgd(clip_norm, noise_multiplier), Color(*outer)))
