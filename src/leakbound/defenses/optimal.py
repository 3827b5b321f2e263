"""Paper A's optimal noise and optimal pruning: public forms, and forms for the client's batch.

The public forms use only the model and public data. The local forms, which the paper evaluates,
read the client's batch, and their pattern of noise or zeros leaks it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from leakbound import check
from leakbound.core import Gaussian, Guarantee, NotApplicable, Task, Unit, Unknown, Update
from leakbound.covariance import Structured
from leakbound.defenses.allocation import (
    RULES,
    keep_by_rate,
    keep_by_utility,
    prune_order,
    shape,
    with_floor,
    with_rms,
    with_utility,
)
from leakbound.defenses.base import (
    Chain,
    Context,
    Defense,
    Resolved,
    Sent,
    State,
    tiny_covariance,
)
from leakbound.defenses.public import LEAST, PublicShape, expected, public_shape
from leakbound.engines.sensitivity import Sensitivity, default_directions, moved, sensitivity
from leakbound.randomness import Source, bernoulli, normal, stream

FEWEST = 8
"""Minimum number of public images for an error bound."""


def _set_level(
    defense: Defense,
    default: float,
    levels: dict[str, float | None],
) -> None:
    """Reject two fields that set the same level; without any, set the first to its default."""
    names = [name for name, value in levels.items() if value is not None]
    if not names:
        object.__setattr__(defense, next(iter(levels)), default)
    elif len(names) > 1:
        raise ValueError(
            f"{names[0]} and {names[1]} are both given; they set the same level: give one"
        )


@dataclass(frozen=True, repr=False)
class _Local(Defense):
    """Common part of the local forms, which decide by the client's own batch, and leak it."""

    accepts = frozenset({Unit.CLIENT})
    keeps_law = False
    uses_context = True
    data_dependent_law = True

    directions: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # of the form beside this one
        check.given(check.count, directions=self.directions)

    def _kept(
        self,
        state: State,
        context: Context,
        source: Source,
    ) -> tuple[int, Any]:
        """How many rounds have used what a batch decided, this one too, and what it was."""
        age, chosen = state or (0, None)
        if chosen is not None and age < self.refresh:  # type: ignore[attr-defined]
            return age + 1, chosen
        if context is None:
            raise ValueError(f"{self!r} runs on a client, which has a batch; give its context")
        batch = context.batch
        task = context.task
        arguments = task, batch.inputs, batch.labels
        return 1, self._decided(
            sensitivity(*arguments, source, directions=self.directions),
            task,
        )

    def _decided(self, estimate: Sensitivity, task: Task) -> Any:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class _Noise(Defense):
    """Common parts of both forms: the level, its distribution over coordinates, rounding."""

    continuous = True
    keeps_law = False
    keeps_mask = True

    noise_std: float | None = None
    utility_std: float | None = None
    rule: str = "utility"
    layers: bool = False
    clamp: float | None = None
    rounding: bool = False
    refresh: int = 1

    def __post_init__(self) -> None:
        check.one_of(RULES, rule=self.rule)
        check.count(refresh=self.refresh)
        levels = self._levels()
        _set_level(self, 0.01, levels)
        check.given(check.positive, **levels, clamp=self.clamp)

    def _levels(self) -> dict[str, float | None]:
        return {"noise_std": self.noise_std, "utility_std": self.utility_std}

    @property
    def guarantee(self) -> Guarantee:  # type: ignore[override]
        """A known noise distribution; none if the update is rounded instead."""
        return Guarantee.NONE if self.rounding else Guarantee.KNOWN_NOISE

    def imitate(self, rows: Tensor) -> Tensor:
        return rows if self.clamp is None else rows.clamp(-self.clamp, self.clamp)

    def _sketch(self, update: Update) -> Update:
        some = tiny_covariance(update, correlated=False).diagonal
        return self._release(update, Gaussian(some, self.data_dependent_law), stream(0, "sketch"))

    def _scaled(self, ratio: Tensor, g2: Tensor) -> Tensor:
        level = self.noise_std if self.utility_std is None else self.utility_std
        assert level is not None  # one of the two is set when the defense is built
        held = torch.finfo(ratio.dtype)
        if not held.tiny < level * level * LEAST < held.max * LEAST**2:
            raise ValueError(
                f"the level of {self!r} is {level:.4g}; in {ratio.dtype} its variances would be 0 "
                "or infinite: give one that this type can hold, or a task of another type"
            )
        return (
            with_rms(ratio, level) if self.utility_std is None else with_utility(ratio, g2, level)
        )

    def _release(
        self,
        update: Update,
        law: Gaussian,
        source: Source,
    ) -> Update:
        rows = self.imitate(update.rows)
        if self.clamp is not None:
            update = update.opaque(rows, f"{self!r} came after other noise")
        if not self.rounding:
            keep = not isinstance(law.covariance, Structured)
            return update.noised(law, source, keep_mask=keep)
        step = torch.as_tensor(law.covariance).to(rows).sqrt()
        rounded = update.opaque(rounded_to(rows, step), f"{self!r} came after noise")
        if law.private and not isinstance(rounded.law, Unknown):
            steps = "the steps of the rounding depend on the private batch"
            rounded = replace(rounded, law=Unknown(steps))
        return rounded


def rounded_to(rows: Tensor, step: Tensor) -> Tensor:
    """Round every coordinate to the nearest multiple of `step` (P,), with slope 1.

    Source: the released code of Chen, Gursoy and Lei (its variant with rounding).
    """
    usable = step > 0
    nearest = torch.where(usable, (rows / step.clamp_min(1e-30)).round() * step, rows)
    return rows + (nearest - rows).detach()


@dataclass(frozen=True, repr=False)
class OptimalNoise(_Noise):
    """Add Gaussian noise, with more of it where gradients leak much and matter little to the loss.

    Only the model and public data decide how the noise is spread, so it leaks nothing about the
    client's data. Give one of three levels (by default noise_std = 0.01).

    Args:
        noise_std: the root mean square of all coordinates' standard deviations (paper A's noise
            scale), in gradient units.
        utility_std: as costly, to second order, as equal noise of that standard deviation
            (`allocation.with_utility`), for the expected gradient.
        error_floor: noise such that no attacker's mean squared error per pixel is below this value,
            in input units squared, on average over a Gaussian prior of the public pixels' mean
            variance. It holds for smooth models, is an estimate from public images without a
            margin, and does not hold with local steps. It needs 8 public images, refresh = 1 and no
            rounding.
        rule: "utility" is optimal at equal U2 (eq. 7), "energy" at equal RMS noise.
        layers: one variance per tensor.
        clamp: clamp every coordinate to [-clamp, clamp] first ("optimal DP-SGD", which is not
            differentially private).
        rounding: send the nearest multiple of the would-be standard deviation instead.
        refresh: number of rounds that use the same variances.
        correlation: "none"; "layers" or "low_rank" for correlated noise (rule "energy" only).
        rank: number of directions that "low_rank" adds.
        images: number of public images used.

    Guarantees: given the data, the release is Gaussian, and its covariance does not depend on the
    batch. No differential privacy, because the gradient is not bounded.

    Raises:
        NotApplicable: the task has no public data.

    Source: Chen, Gursoy and Lei, theorem 3.5 (global form).

    Example:
        >>> OptimalNoise(utility_std=0.02).guarantee.value
        'known noise distribution'
    """

    accepts = frozenset({Unit.CLIENT, Unit.COHORT})

    error_floor: float | None = None
    correlation: str = "none"
    rank: int = 16
    images: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        correlated = self._settings().correlation != "none"
        if correlated and (self.noise_std is None or self.rounding):
            raise ValueError(
                f"correlation is {self.correlation!r}; correlated noise is set by noise_std, and "
                "not rounded"
            )
        if self.error_floor is not None and (self.refresh > 1 or self.rounding):
            raise ValueError(
                f"error_floor is {self.error_floor!r} with refresh={self.refresh!r} and "
                f"rounding={self.rounding!r}; the bound is that of Gaussian noise for the model as "
                "it is: use refresh = 1 and no rounding"
            )

    @property
    def plain_gradient(self) -> bool:  # type: ignore[override]
        """Whether it guarantees an error bound, which local steps or dropped units would void."""
        return self.error_floor is not None

    def _sketch(self, update: Update) -> Update:
        if self.correlation == "none":
            return super()._sketch(update)
        some = Gaussian(tiny_covariance(update, correlated=True))
        return self._release(update, some, stream(0, "sketch"))

    def _levels(self) -> dict[str, float | None]:
        return {**super()._levels(), "error_floor": self.error_floor}

    def _settings(self) -> PublicShape:
        return PublicShape(
            self.rule, self.layers, self.clamp, self.correlation, self.rank, self.images
        )

    def resolve(
        self,
        task: Task,
        examples: int,
        previous: Defense | None = None,
    ) -> Defense:
        if again := FixedNoise.reused(previous, self, examples):
            return again
        return FixedNoise(
            self,
            self._covariance(task, examples),
            examples=examples,
        )

    def _covariance(self, task: Task, examples: int) -> Tensor | Structured:
        spread = public_shape(self._settings(), task, examples)
        if isinstance(spread, Structured):
            assert self.noise_std is not None  # checked when the defense was built
            return spread * self.noise_std**2
        known = expected(task, examples, self.images, self.clamp)
        if self.error_floor is None:
            return self._scaled(spread, known.g2)
        assert task.public is not None  # `expected` has used it
        pixels = task.public.inputs[: self.images].flatten(1)
        if len(pixels) < FEWEST:
            raise NotApplicable(
                f"error_floor is decided from {len(pixels)} public images; give at least {FEWEST} "
                "(the task's public data, and `images`)"
            )
        return with_floor(
            spread,
            known.s,
            self.error_floor,
            coordinates=examples * pixels.shape[1],
            prior_variance=float(pixels.var(0, correction=0).mean()),
        )


@dataclass(frozen=True, repr=False, eq=False)
class FixedNoise(Resolved):
    """`OptimalNoise` for one model: noise with a public covariance."""

    settings: OptimalNoise
    covariance: Tensor | Structured

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        return self.settings._release(update, Gaussian(self.covariance), source), state

    @property
    def continuous(self) -> bool:  # type: ignore[override]
        return not self.settings.rounding

    def imitate(self, rows: Tensor) -> Tensor:
        rows = self.settings.imitate(rows)
        if self.settings.rounding and isinstance(self.covariance, Tensor):
            return rounded_to(rows, self.covariance.to(rows).sqrt())
        return rows


@dataclass(frozen=True, repr=False)
class LocalOptimalNoise(_Local, _Noise):
    """Add optimal noise for this very batch; its variances depend on private data and leak them.

    This is the form that the paper evaluates. The noise pattern itself leaks, and no amount of
    noise hides it. See docs/sharp_edges/private_noise.md, and `OptimalNoise` for the public form.

    Args:
        noise_std: root mean square of the standard deviations, in gradient units.
        utility_std: as costly for this batch, to second order, as equal noise of that standard
            deviation.
        rule: "utility" is eq. 7, the paper's local form; see `allocation.shape`.
        layers: one variance per tensor.
        clamp: clamp every coordinate first; a clamped one gets no noise (theorem 3 of the earlier
            version).
        rounding: send the nearest multiple of the would-be standard deviation instead.
        refresh: number of rounds that use the variances of one batch.
        directions: random directions for each example's sensitivity; None: 10 in the whole batch,
            at least 2 each (`sensitivity.default_directions`).

    Guarantees: given the data, the release is Gaussian; its covariance depends on the batch.

    Source: Chen, Gursoy and Lei, algorithm 1 with eq. 7 (local form); `docs/errata.md`, A6, A12.

    Example:
        >>> LocalOptimalNoise(0.01).guarantee.value, LocalOptimalNoise(0.01).data_dependent_law
        ('known noise distribution', True)
    """

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        kept = self._kept(state, context, source)
        return self._release(update, Gaussian(kept[1].detach(), private=True), source), kept

    def _decided(self, estimate: Sensitivity, task: Task) -> Tensor:
        return self._variances(estimate.values, estimate.gradient, task)

    def noise_variance(
        self,
        task: Task,
        inputs: Tensor,
        labels: Tensor,
    ) -> Tensor:
        """The variances that a candidate would get, along fixed directions: differentiable."""
        count = self.directions or default_directions("per_sample", len(inputs))
        # The same in every call: fresh directions would make the objective of a search noisy.
        fixed = stream(0, "guess", "directions")
        directions = normal((count, *inputs.shape), fixed, like=inputs)
        gradient, changes = moved(task, inputs, labels, directions)
        return self._variances(changes.square().mean(0), gradient, task)

    def _variances(
        self,
        s: Tensor,
        g: Tensor,
        task: Task,
    ) -> Tensor:
        if self.clamp is not None:
            # A clamped coordinate does not change with the input.
            s = s * (g.abs() < self.clamp)
            g = self.imitate(g)
        spans = [(a, b) for _, _, a, b in task.layout] if self.layers else None
        g2 = g.square()
        return self._scaled(shape(s, g2, self.rule, spans), g2)


class OptimalDpSgd(Chain):
    """Clamp every coordinate, then add local optimal noise: paper A's "Optimal DP-SGD".

    It is not differentially private for any epsilon: a clamped coordinate gets no noise, so its
    sign is sent in the clear. For a DP guarantee use `WhitenedDpSgd`.

    Args:
        clamp: every coordinate is clamped to [-clamp, clamp] first.
        noise_std: root mean square of the standard deviations, in gradient units.

    Guarantees: as `LocalOptimalNoise`, a known noise distribution; no differential privacy.

    Source: Chen, Gursoy and Lei, long version (November 2024), theorem 3; `docs/errata.md`, A11 and
    A18.

    Example:
        >>> OptimalDpSgd(clamp=0.5).guarantee.value
        'known noise distribution'
    """

    def __init__(self, clamp: float = 1.0, noise_std: float = 0.1) -> None:
        super().__init__((LocalOptimalNoise(clamp=clamp, noise_std=noise_std),))


@dataclass(frozen=True, eq=False)
class _SentCoordinates:
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
    """Common part of both forms: how much is withheld."""

    rate: float | None = None
    utility_share: float | None = None
    threshold: float | None = None
    refresh: int = 1

    def __post_init__(self) -> None:
        check.count(refresh=self.refresh)
        shares = {"rate": self.rate, "utility_share": self.utility_share}
        _set_level(self, 0.7, {**shares, "threshold": self.threshold})
        check.given(check.fraction, **shares)
        check.given(check.positive, threshold=self.threshold)

    @property
    def draws_mask(self) -> bool:  # type: ignore[override]
        """Whether the coordinate in between is drawn."""
        return self.utility_share is not None

    def _choose(self, s: Tensor, g2: Tensor) -> _SentCoordinates:
        order = prune_order(s, g2)
        if self.utility_share is not None:
            return _SentCoordinates(*keep_by_utility(order, g2, self.utility_share))
        if self.threshold is not None:
            return _SentCoordinates(order <= self.threshold)
        assert self.rate is not None  # one of the three is set when the defense is built
        return _SentCoordinates(keep_by_rate(order, self.rate))


@dataclass(frozen=True, repr=False)
class OptimalPruning(_Pruning):
    """Withhold the coordinates that leak the most input relative to their value for the loss.

    Only the model and public data decide: the coordinates with the largest
    k = E||dg_i/dx||² / E g_i² are withheld. Give one of three levels (by default rate = 0.7).

    Args:
        rate: the fraction of all coordinates that is withheld, exactly floor(rate · P).
        utility_share: the part of the first-order utility E||g||² that is kept; the coordinate in
            between is sent with the probability that meets it exactly.
        threshold: withhold coordinates with a larger k.
        refresh: number of rounds that use the same mask.
        images: number of public images used.

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

    def _sketch(self, update: Update) -> Update:
        every = torch.ones_like(update.rows).bool()
        return update.masked(every, by_value=False, drawn=self.draws_mask)

    def resolve(
        self,
        task: Task,
        examples: int,
        previous: Defense | None = None,
    ) -> Defense:
        if again := FixedPruning.reused(previous, self, examples):
            return again
        known = expected(task, examples, self.images, None)
        return FixedPruning(
            self,
            self._choose(known.s, known.g2),
            examples=examples,
        )


@dataclass(frozen=True, repr=False, eq=False)
class FixedPruning(Resolved):
    """`OptimalPruning` for one model: a public mask."""

    continuous = True

    settings: OptimalPruning
    chosen: _SentCoordinates

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        drawn = self.draws_mask and 0 < self.chosen.chance < 1
        mask = self.chosen.draw(update.rows, source)
        return update.masked(mask, by_value=False, drawn=drawn), state

    def imitate(self, rows: Tensor) -> Tensor:
        mask = self.chosen.mask.clone()
        mask[self.chosen.between] |= self.chosen.chance > 0
        return rows * mask


@dataclass(frozen=True, repr=False)
class LocalOptimalPruning(_Local, _Pruning):
    """Withhold the coordinates of this very batch that leak the most; the mask leaks private data.

    This is the form that the paper evaluates: the coordinates with the largest
    k' = ||dg_i/dx|| / |g_i| of the batch are withheld.

    Args:
        rate: the fraction of all coordinates that is withheld, exactly floor(rate · P).
        utility_share: the part of the batch's ||g||² that is kept.
        threshold: withhold coordinates with a larger k'².
        refresh: number of rounds that use the mask of one batch.
        directions: random directions for each example's sensitivity; None: 10 in the whole batch,
            at least 2 each (`sensitivity.default_directions`).

    Guarantees: none; the server sees which coordinates are withheld.

    Source: Chen, Gursoy and Lei, algorithm 1, eq. 13; `docs/errata.md`, A13.

    Example:
        >>> LocalOptimalPruning(0.5).guarantee.value, LocalOptimalPruning(0.5).data_dependent_law
        ('none', True)
    """

    masks_by_value = True

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        kept = self._kept(state, context, source)
        mask = kept[1].draw(update.rows, source)
        return update.masked(mask, by_value=True, drawn=self.draws_mask), kept

    def _decided(self, estimate: Sensitivity, task: Task) -> _SentCoordinates:
        return self._choose(estimate.values, estimate.gradient.square())
