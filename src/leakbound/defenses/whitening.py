"""DP-SGD with noise of a public shape: whiten, clip, add white noise, color again."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields, replace

from torch import Tensor

from leakbound import check
from leakbound.covariance import Structured
from leakbound.defenses.base import Chain, Defense, State, chain, tiny_covariance
from leakbound.defenses.dpsgd import dp_sgd
from leakbound.defenses.public import PublicShape, public_shape
from leakbound.random import Source
from leakbound.types import ClientContext, Task, Update


@dataclass(frozen=True, repr=False)
class Whiten(Defense):
    """Every row y becomes S⁻¹ y: in these coordinates noise of the public covariance S Sᵀ is white.

    The covariance is chosen from the model and public data alone and has mean variance 1, so that
    lengths keep their size.

    Args:
        rule: see `allocation.shape`.
        correlation: "none"; "layers" or "low_rank" for correlated noise (rule "energy" only).
        rank: how many directions "low_rank" adds.
        images: how many public images decide.
        refresh: use the same covariance for so many rounds.

    A chain that whitens must color again, with the same settings.

    Guarantees: none of its own: the map is public, and whoever knows it undoes it. For the same
    reason it takes nothing from the links behind it, `ClipExamples` and the noise.

    Raises:
        NotApplicable: the task has no public data.

    Source: this project (`docs/whitened_dp.md`); the covariance from Chen, Gursoy and Lei, theorem
    3.5.

    Example:
        >>> from leakbound.defenses import ClipExamples, GaussianMechanism, Mean
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
        """Its settings: `Color` of the same ones undoes it."""
        return self._values()

    def _values(self) -> Hashable:
        return tuple(getattr(self, field.name) for field in fields(Whiten))

    def _sketch(self, update: Update) -> Update:
        root = tiny_covariance(update, correlated=self.correlation != "none")
        return update.mapped(root, whiten=self.maps_basis is not None)

    def _settings(self) -> PublicShape:
        correlation, rank, images = self.correlation, self.rank, self.images
        return PublicShape(rule=self.rule, correlation=correlation, rank=rank, images=images)

    def resolve(self, task: Task, examples: int, previous: Defense | None = None) -> Defense:
        """Decide the covariance for this model, or keep that of an earlier round."""
        if isinstance(previous, FixedMap) and previous.serves(self, examples):
            return replace(previous, age=previous.age + 1)
        found = public_shape(self._settings(), task, examples)
        root = Structured.of(found) if isinstance(found, Tensor) else found
        return FixedMap(self, root, whiten=True, examples=examples)


@dataclass(frozen=True, repr=False)
class Color(Whiten):
    """Every row y becomes S y: undoes `Whiten` of the same settings.

    Guarantees: none of its own, and it takes none away: it is post-processing by a public map.
    Known white noise becomes known noise of the covariance S Sᵀ.

    Source: this project (`docs/whitened_dp.md`).

    Example:
        >>> import torch
        >>> from leakbound import models
        >>> from leakbound.types import Batch, Unit
        >>> public = Batch(torch.linspace(0, 1, 32).reshape(8, 1, 2, 2), torch.arange(8) % 2)
        >>> source = torch.Generator().manual_seed(0)
        >>> model = models.mlp(input_shape=(1, 2, 2), classes=2, hidden=(), generator=source)
        >>> task = Task.of(model, public=public)
        >>> update = Update(torch.ones(1, 10), Unit.EXAMPLE, (1,))
        >>> there, _ = Whiten().resolve(task, 1).transform(update, None, None, source)
        >>> back, _ = Color().resolve(task, 1).transform(there, None, None, source)
        >>> torch.allclose(there.rows, update.rows), torch.allclose(back.rows, update.rows)
        (False, True)
    """

    keeps_law = True

    @property
    def maps_basis(self) -> Hashable:  # type: ignore[override]
        """Nothing."""
        return None

    @property
    def unmaps_basis(self) -> Hashable:  # type: ignore[override]
        """Its settings: it undoes `Whiten` of the same ones."""
        return self._values()

    def resolve(self, task: Task, examples: int, previous: Defense | None = None) -> Defense:
        """Decide the covariance for this model."""
        return replace(super().resolve(task, examples, previous), whiten=False)  # type: ignore[call-arg]


@dataclass(frozen=True, repr=False, eq=False)
class FixedMap(Defense):
    """`Whiten` or `Color` for one model."""

    continuous = True
    keeps_bound = False

    settings: Whiten
    root: Structured
    whiten: bool
    age: int = 0
    examples: int = 0

    @property
    def keeps_law(self) -> bool:  # type: ignore[override]
        """White noise that is colored has a known law."""
        return not self.whiten

    @property
    def maps_basis(self) -> Hashable:  # type: ignore[override]
        """As the settings'."""
        return self.settings.maps_basis

    @property
    def unmaps_basis(self) -> Hashable:  # type: ignore[override]
        """As the settings'."""
        return self.settings.unmaps_basis

    def serves(self, settings: Whiten, examples: int) -> bool:
        """Whether it may be used for one more round of batches of that size."""
        return self.examples == examples and self.age + 1 < settings.refresh

    def _sketch(self, update: Update) -> Update:
        return self.settings._sketch(update)

    def transform(
        self, update: Update, state: State, context: ClientContext | None, source: Source
    ) -> tuple[Update, State]:
        """Map every row."""
        return update.mapped(self.root, whiten=self.whiten), state

    def imitate(self, rows: Tensor) -> Tensor:
        """The same map."""
        return self.root.whiten(rows) if self.whiten else self.root.color(rows)

    def __repr__(self) -> str:
        return repr(self.settings)


def whitened_dp_sgd(
    clip_norm: float = 1.0,
    noise_multiplier: float = 1.0,
    rule: str = "energy",
    correlation: str = "none",
    rank: int = 16,
    images: int = 64,
    refresh: int = 1,
) -> Chain:
    """DP-SGD whose noise has a public covariance: whiten each example's gradient, clip, add noise.

    Args:
        clip_norm: L2 bound of every example's whitened gradient.
        noise_multiplier: noise standard deviation over the most that one example adds, in whitened
            coordinates.
        rule: how the covariance is spread; see `allocation.shape`.
        correlation: "none"; "layers" or "low_rank" for correlated noise (rule "energy" only).
        rank: how many directions "low_rank" adds.
        images: how many public images decide.
        refresh: use the same covariance for so many rounds.

    Guarantees: the Gaussian mechanism with that multiplier, for adding or removing one example, as
    `dp_sgd`: the covariance is public, whitening is linear, and coloring is post-processing
    (docs/whitened_dp.md has the proof).

    Source: Abadi et al. 2016, algorithm 1; the covariance from Chen, Gursoy and Lei, theorem 3.5.

    Example:
        >>> whitened_dp_sgd(noise_multiplier=2.0).guarantee.value
        'differential privacy'
    """
    inner = dp_sgd(clip_norm, noise_multiplier)
    outer = (rule, correlation, rank, images, refresh)
    return chain(Whiten(*outer), inner, Color(*outer))
