"""Paper A's optimal pruning: withhold what tells most of the input for what the loss needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakbound import check
from leakbound.defenses.allocation import keep_by_rate, keep_by_utility, prune_order
from leakbound.defenses.base import Defense, State
from leakbound.defenses.private import batch_sensitivity
from leakbound.defenses.public import expected
from leakbound.random import Source, bernoulli
from leakbound.types import ClientContext, Task, Unit, Update


@dataclass(frozen=True, eq=False)
class _Kept:
    """Which coordinates (P,) are sent; `between` only with probability `chance`."""

    mask: Tensor
    between: int = 0
    chance: float = 0.0

    def draw(self, rows: Tensor, source: Source) -> Tensor:
        mask = self.mask.expand_as(rows).clone()
        if 0 < self.chance < 1:
            like = torch.zeros((), device=rows.device)
            mask[:, self.between] = bernoulli((len(rows),), self.chance, source, like=like)
        elif self.chance == 1:
            mask[:, self.between] = True
        return mask


@dataclass(frozen=True, repr=False)
class _Pruning(Defense):
    """What both forms share: how much is withheld."""

    rate: float | None = None
    utility_share: float | None = None
    threshold: float | None = None
    refresh: int = 1

    def __post_init__(self) -> None:
        check.count(refresh=self.refresh)
        levels = {name: getattr(self, name) for name in ("rate", "utility_share", "threshold")}
        given = [name for name, value in levels.items() if value is not None]
        if not given:
            object.__setattr__(self, "rate", 0.7)
        elif len(given) > 1:
            raise ValueError(
                f"{given[0]} and {given[1]} are both given; they set the same level: give one"
            )
        if self.rate is not None:
            check.fraction(rate=self.rate)
        if self.utility_share is not None:
            check.fraction(utility_share=self.utility_share)
        if self.threshold is not None:
            check.positive(threshold=self.threshold)

    def _kept(self, s: Tensor, g2: Tensor) -> _Kept:
        order = prune_order(s, g2)
        if self.utility_share is not None:
            return _Kept(*keep_by_utility(order, g2, self.utility_share))
        if self.threshold is not None:
            return _Kept(order <= self.threshold)
        assert self.rate is not None  # one of the three is set when the defense is built
        return _Kept(keep_by_rate(order, self.rate))


@dataclass(frozen=True, repr=False)
class OptimalPruning(_Pruning):
    """Withhold the coordinates that tell most of the input for what they are worth to the loss.

    Which ones is decided from the model and public data alone: k = E||dg_i/dx||² / E g_i² is
    largest. Give one of three levels (by default rate = 0.7).

    Args:
        rate: the fraction of all coordinates that is withheld, exactly floor(rate · P).
        utility_share: the part of the first-order utility E||g||² that is kept; the coordinate in
            between is sent with the probability that meets it exactly.
        threshold: withhold where k is above it.
        refresh: use the same mask for so many rounds.
        images: how many public images decide.

    Guarantees: the mask is independent of the data. No privacy: what is sent is exact.

    Raises:
        NotApplicable: the task has no public data.

    Source: Chen, Gursoy and Lei, theorem 3.6.

    Example:
        >>> import leakbound as lb
        >>> images, source = torch.linspace(0, 1, 32).reshape(8, 1, 2, 2), lb.stream(0, "model")
        >>> public, batch = [lb.Batch(x, torch.arange(len(x)) % 2) for x in (images, images[2:4])]
        >>> model = lb.models.mlp(input_shape=(1, 2, 2), classes=2, hidden=(), generator=source)
        >>> task = Task.of(model, public=public)
        >>> played = lb.play(task, [batch], OptimalPruning(rate=0.3), [lb.stream(0)] * 2)
        >>> int((played.update.rows == 0).sum())  # of 10 weights
        3
    """

    accepts = frozenset({Unit.CLIENT, Unit.COHORT})

    images: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check.count(images=self.images)

    @property
    def draws_mask(self) -> bool:  # type: ignore[override]
        """Whether the coordinate in between is drawn."""
        return self.utility_share is not None

    def _sketch(self, update: Update) -> Update:
        every = torch.ones_like(update.rows).bool()
        return update.masked(every, by_value=False, drawn=self.draws_mask)

    def resolve(self, task: Task, examples: int, previous: Defense | None = None) -> Defense:
        """Decide the mask for this model, or keep that of an earlier round."""
        if isinstance(previous, FixedPruning) and previous.serves(self, examples):
            return replace(previous, age=previous.age + 1)
        known = expected(task, examples, self.images, None)
        return FixedPruning(self, self._kept(known.s, known.g2), examples=examples)


@dataclass(frozen=True, repr=False, eq=False)
class FixedPruning(Defense):
    """`OptimalPruning` for one model: a mask that everyone knows."""

    continuous = True
    accepts = frozenset({Unit.CLIENT, Unit.COHORT})

    settings: OptimalPruning
    kept: _Kept
    age: int = 0
    examples: int = 0

    def serves(self, settings: OptimalPruning, examples: int) -> bool:
        """Whether it may be used for one more round of batches of that size."""
        return self.examples == examples and self.age + 1 < settings.refresh

    def _sketch(self, update: Update) -> Update:
        return self.settings._sketch(update)

    @property
    def draws_mask(self) -> bool:  # type: ignore[override]
        """As the settings."""
        return self.settings.draws_mask

    def transform(
        self, update: Update, state: State, context: ClientContext | None, source: Source
    ) -> tuple[Update, State]:
        """Apply the mask."""
        drawn = self.draws_mask and 0 < self.kept.chance < 1
        mask = self.kept.draw(update.rows, source)
        return update.masked(mask, by_value=False, drawn=drawn), state

    def imitate(self, rows: Tensor) -> Tensor:
        """The rows where they may be sent."""
        mask = self.kept.mask.clone()
        mask[self.kept.between] |= self.kept.chance > 0
        return rows * mask

    def __repr__(self) -> str:
        return repr(self.settings)


@dataclass(frozen=True, repr=False)
class LocalOptimalPruning(_Pruning):
    """Optimal pruning for this very batch: the mask depends on private data and tells of them.

    As the paper evaluates it: k' = ||dg_i/dx|| / |g_i| of the batch is largest.

    Args:
        rate: the fraction of all coordinates that is withheld, exactly floor(rate · P).
        utility_share: the part of the batch's ||g||² that is kept.
        threshold: withhold where k'² is above it.
        refresh: use the mask of one batch for so many rounds.
        directions: random directions for each example's sensitivity; None: 10 in the whole batch,
            at least 2 each (`sensitivity.default_directions`).

    Guarantees: none; which coordinates are withheld is itself seen by the server.

    Source: Chen, Gursoy and Lei, algorithm 1, eq. 13; `docs/errata.md`, A13.

    Example:
        >>> LocalOptimalPruning(0.5).guarantee.value, LocalOptimalPruning(0.5).data_dependent_law
        ('none', True)
    """

    accepts = frozenset({Unit.CLIENT})
    keeps_law = False
    uses_context = True
    data_dependent_law = True

    directions: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.directions is not None:
            check.count(directions=self.directions)

    def _sketch(self, update: Update) -> Update:
        some, drawn = torch.ones_like(update.rows).bool(), self.utility_share is not None
        return update.masked(some, by_value=True, drawn=drawn)

    def transform(
        self, update: Update, state: State, context: ClientContext | None, source: Source
    ) -> tuple[Update, State]:
        """Estimate the batch's sensitivities and withhold by them."""
        age, kept = state or (0, None)
        if kept is None or age >= self.refresh:
            found = batch_sensitivity(self, context, source, self.directions)
            age, kept = 0, self._kept(found.values, found.gradient.square())
        mask, drawn = kept.draw(update.rows, source), self.utility_share is not None
        return update.masked(mask, by_value=True, drawn=drawn), (age + 1, kept)
