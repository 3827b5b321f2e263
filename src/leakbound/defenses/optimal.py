"""Paper A's optimal noise: its public form, its form for the client's own batch, and rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakbound import check
from leakbound.covariance import Structured
from leakbound.defenses.allocation import RULES, shape, with_floor, with_rms, with_utility
from leakbound.defenses.base import Defense, State, tiny_covariance
from leakbound.defenses.private import batch_sensitivity
from leakbound.defenses.public import LEAST, PublicShape, expected, public_shape
from leakbound.engines.sensitivity import default_directions, moved
from leakbound.random import Source, normal, stream
from leakbound.types import (
    ClientContext,
    Gaussian,
    Guarantee,
    NotApplicable,
    Task,
    Unit,
    Unknown,
    Update,
)

FEWEST = 8
"""Public images that an error floor is decided from."""


@dataclass(frozen=True, repr=False)
class _Noise(Defense):
    """What both forms share: how much noise, how it is spread over coordinates, rounding."""

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
        levels = {name: getattr(self, name) for name in self._levels()}
        given = [name for name, value in levels.items() if value is not None]
        if not given:
            object.__setattr__(self, "noise_std", 0.01)
        elif len(given) > 1:
            raise ValueError(
                f"{given[0]} and {given[1]} are both given; they set the same level: give one"
            )
        for name in given:
            check.positive(**{name: levels[name]})
        if self.clamp is not None:
            check.positive(clamp=self.clamp)

    def _levels(self) -> tuple[str, ...]:
        return ("noise_std", "utility_std")

    @property
    def guarantee(self) -> Guarantee:
        """A known release law; none where the update is rounded instead."""
        return Guarantee.NONE if self.rounding else Guarantee.RELEASE_LAW

    def imitate(self, rows: Tensor) -> Tensor:
        """The clamped rows."""
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
        if self.utility_std is not None:
            return with_utility(ratio, g2, self.utility_std)
        assert self.noise_std is not None  # one of the two is set when the defense is built
        return with_rms(ratio, self.noise_std)

    def _release(self, update: Update, law: Gaussian, source: Source) -> Update:
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
    """Every coordinate at its nearest multiple of `step` (P,), its slope that of the identity.

    Source: the released code of Chen, Gursoy and Lei (its variant with rounding).
    """
    usable = step > 0
    nearest = torch.where(usable, (rows / step.clamp_min(1e-30)).round() * step, rows)
    return rows + (nearest - rows).detach()


@dataclass(frozen=True, repr=False)
class OptimalNoise(_Noise):
    """Gaussian noise, more of it where gradients tell much of the input and the loss needs little.

    How it is spread is decided from the model and public data alone, so it tells nothing of the
    client's. Give one of three levels (by default noise_std = 0.01).

    Args:
        noise_std: the root mean square of all coordinates' standard deviations (paper A's noise
            scale), in gradient units.
        utility_std: as costly, to second order, as equal noise of that standard deviation
            (`allocation.with_utility`), for the expected gradient.
        error_floor: so much that no attacker's mean squared error a pixel is below it, on average
            over a Gaussian prior of the public pixels' mean variance; in input units squared. Of
            smooth models; an estimate from public images, without a margin; not with local steps.
            It needs 8 public images, refresh = 1 and no rounding.
        rule: "utility" is optimal at equal U2 (eq. 7), "energy" at equal RMS noise.
        layers: one variance a tensor.
        clamp: clamp every coordinate to [-clamp, clamp] first ("optimal DP-SGD", which is not
            differentially private).
        rounding: send the nearest multiple of what would be the standard deviation instead.
        refresh: use the same variances for so many rounds.
        correlation: "none"; "layers" or "low_rank" for correlated noise (rule "energy" only).
        rank: how many directions "low_rank" adds.
        images: how many public images decide.

    Guarantees: the release given the data is Gaussian, its covariance independent of the batch;
    no differential privacy, as the gradient is not bounded.

    Raises:
        NotApplicable: the task has no public data.

    Source: Chen, Gursoy and Lei, theorem 3.5 (global form).

    Example:
        >>> OptimalNoise(utility_std=0.02).guarantee.value
        'known release law'
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
                f"rounding={self.rounding!r}; the floor is that of Gaussian noise for the model as "
                "it is: use refresh = 1 and no rounding"
            )

    @property
    def plain_gradient(self) -> bool:  # type: ignore[override]
        """Whether a floor was asked for, which local steps or dropped units would void."""
        return self.error_floor is not None

    def _sketch(self, update: Update) -> Update:
        if self.correlation == "none":
            return super()._sketch(update)
        some = Gaussian(tiny_covariance(update, correlated=True))
        return self._release(update, some, stream(0, "sketch"))

    def _levels(self) -> tuple[str, ...]:
        return ("noise_std", "utility_std", "error_floor")

    def _settings(self) -> PublicShape:
        return PublicShape(
            self.rule, self.layers, self.clamp, self.correlation, self.rank, self.images
        )

    def resolve(self, task: Task, examples: int, previous: Defense | None = None) -> Defense:
        """Decide the covariance for this model, or keep that of an earlier round."""
        if isinstance(previous, FixedNoise) and previous.serves(self, examples):
            return replace(previous, age=previous.age + 1)
        found = public_shape(self._settings(), task, examples)
        if isinstance(found, Structured):
            assert self.noise_std is not None  # checked when the defense was built
            return FixedNoise(self, found * self.noise_std**2, examples=examples)
        known = expected(task, examples, self.images, self.clamp)
        if self.error_floor is None:
            return FixedNoise(self, self._scaled(found, known.g2), examples=examples)
        assert task.public is not None  # `expected` has used it
        pixels = task.public.inputs[: self.images].flatten(1)
        if len(pixels) < FEWEST:
            raise NotApplicable(
                f"error_floor is decided from {len(pixels)} public images; give at least {FEWEST} "
                "(the task's public data, and `images`)"
            )
        variance = float(pixels.var(0, correction=0).mean())
        covariance = with_floor(
            found,
            known.s,
            self.error_floor,
            coordinates=examples * pixels.shape[1],
            prior_variance=variance,
        )
        return FixedNoise(self, covariance, examples=examples)


@dataclass(frozen=True, repr=False, eq=False)
class FixedNoise(Defense):
    """`OptimalNoise` for one model: noise of a covariance that everyone knows."""

    accepts = frozenset({Unit.CLIENT, Unit.COHORT})
    keeps_law = False
    keeps_mask = True

    settings: OptimalNoise
    covariance: Tensor | Structured
    age: int = 0
    examples: int = 0

    def serves(self, settings: OptimalNoise, examples: int) -> bool:
        """Whether it may be used for one more round of batches of that size."""
        return self.examples == examples and self.age + 1 < settings.refresh

    @property
    def plain_gradient(self) -> bool:  # type: ignore[override]
        """As the settings'."""
        return self.settings.plain_gradient

    def _sketch(self, update: Update) -> Update:
        return self.settings._sketch(update)

    @property
    def guarantee(self) -> Guarantee:
        """As the settings'."""
        return self.settings.guarantee

    def transform(
        self, update: Update, state: State, context: ClientContext | None, source: Source
    ) -> tuple[Update, State]:
        """Clamp where asked for, add the noise and declare it."""
        return self.settings._release(update, Gaussian(self.covariance), source), state

    @property
    def continuous(self) -> bool:  # type: ignore[override]
        """Rounding jumps."""
        return not self.settings.rounding

    def imitate(self, rows: Tensor) -> Tensor:
        """The clamped, and where asked for rounded, rows."""
        rows = self.settings.imitate(rows)
        if self.settings.rounding and isinstance(self.covariance, Tensor):
            return rounded_to(rows, self.covariance.to(rows).sqrt())
        return rows

    def __repr__(self) -> str:
        return repr(self.settings)


@dataclass(frozen=True, repr=False)
class LocalOptimalNoise(_Noise):
    """Optimal noise for this very batch: its variances depend on private data and give them away.

    As the paper evaluates it. The noise pattern is an observation of its own, which no amount of
    noise covers: see docs/sharp_edges/private_noise.md, and `OptimalNoise` for the form without it.

    Args:
        noise_std: root mean square of the standard deviations, in gradient units.
        utility_std: as costly for this batch, to second order, as equal noise of that standard
            deviation.
        rule: "utility" is eq. 7, the paper's local form; see `allocation.shape`.
        layers: one variance a tensor.
        clamp: clamp every coordinate first; a clamped one gets no noise (theorem 3 of the earlier
            version).
        rounding: send the nearest multiple of what would be the standard deviation instead.
        refresh: use the variances of one batch for so many rounds.
        directions: random directions for each example's sensitivity; None: 10 in the whole batch,
            at least 2 each (`sensitivity.default_directions`).

    Guarantees: the release given the data is Gaussian; its covariance depends on the batch.

    Source: Chen, Gursoy and Lei, algorithm 1 with eq. 7 (local form); `docs/errata.md`, A6, A12.

    Example:
        >>> LocalOptimalNoise(0.01).guarantee.value, LocalOptimalNoise(0.01).data_dependent_law
        ('known release law', True)
    """

    accepts = frozenset({Unit.CLIENT})
    uses_context = True
    data_dependent_law = True

    directions: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.directions is not None:
            check.count(directions=self.directions)

    def transform(
        self, update: Update, state: State, context: ClientContext | None, source: Source
    ) -> tuple[Update, State]:
        """Estimate the batch's sensitivities, then add the noise; keep the variances a while."""
        age, covariance = state or (0, None)
        if covariance is None or age >= self.refresh:
            found = batch_sensitivity(self, context, source, self.directions)
            assert context is not None  # it was just asked for
            age, covariance = 0, self._variances(found.values, found.gradient, context.task)
        law = Gaussian(covariance.detach(), private=True)
        return self._release(update, law, source), (age + 1, covariance)

    def noise_variance(self, task: Task, inputs: Tensor, labels: Tensor) -> Tensor:
        """What a guess would have got, along fixed directions: differentiable."""
        count = self.directions or default_directions("per_sample", len(inputs))
        shape_of = (count, *inputs.shape)
        directions = normal(shape_of, stream(0, "guess", "directions"), like=inputs)
        gradient, changes = moved(task, inputs, labels, directions)
        return self._variances(changes.square().mean(0), gradient, task)

    def _variances(self, s: Tensor, g: Tensor, task: Task) -> Tensor:
        if self.clamp is not None:
            s, g = s * (g.abs() < self.clamp), self.imitate(g)
        spans = [(a, b) for _, _, a, b in task.layout] if self.layers else None
        g2 = g.square()
        return self._scaled(shape(s, g2, self.rule, spans), g2)


def optimal_dp_sgd(clamp: float = 1.0, noise_std: float = 0.1) -> LocalOptimalNoise:
    """Paper A's "Optimal DP-SGD": clamp every coordinate, then its local optimal noise.

    It is not differentially private for any epsilon: a clamped coordinate gets no noise, so its
    sign is sent in the clear. For a proof take `whitened_dp_sgd`.

    Args:
        clamp: every coordinate is clamped to [-clamp, clamp] first.
        noise_std: root mean square of the standard deviations, in gradient units.

    Guarantees: as `LocalOptimalNoise`, a known release law; no differential privacy.

    Source: the earlier version of Chen, Gursoy and Lei, theorem 3; `docs/errata.md`, A11.

    Example:
        >>> optimal_dp_sgd(clamp=0.5).guarantee.value
        'known release law'
    """
    return LocalOptimalNoise(clamp=clamp, noise_std=noise_std)
