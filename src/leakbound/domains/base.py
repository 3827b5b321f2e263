"""The interface of a domain; images (C, H, W), and inputs that are only numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from leakbound.random import uniform
from leakbound.task import Batch

_SHOWN, _VALUES = 8, 100
"""Number of examples whose values are shown, and number of values of each."""


@dataclass(frozen=True)
class ColumnErrors:
    """One column of a table over all examples, in its own units.

    `matched`: share of examples within the column's tolerance.
    """

    name: str
    mean: float
    worst: float
    matched: float
    truth: tuple[float, ...]
    reconstruction: tuple[float, ...]


@dataclass(frozen=True)
class Fields:
    """What a report shows of reconstructed examples; the domain decides which fields it fills.

    `pictures` are images (N, C, H, W) by name. `columns` has one entry per column. `values` are the
    first numbers of the first examples.
    """

    pictures: dict[str, Tensor] | None = None
    columns: tuple[ColumnErrors, ...] | None = None
    values: tuple[tuple[float, ...], ...] | None = None


@runtime_checkable
class Domain(Protocol):
    """The form of one example: what is valid, what is close, and the prior-only baseline."""

    @property
    def name(self) -> str:
        """The name in records, such as "images"."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example in the model's input."""

    @property
    def input_range(self) -> tuple[float, float]:
        """Range of its values, in the model's input units."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of its values."""

    def project(self, x: Tensor) -> Tensor:
        """Project onto valid examples (N, *shape); values that are not finite become the middle."""

    def start(self, n: int, source: torch.Generator) -> Tensor:
        """Starting points of searches: n valid examples (n, *shape)."""

    def blind(self, public: Batch | None) -> Tensor:
        """The best prior-only baseline (*shape): from public examples, or the middle."""

    def distance(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        """(N,) distance of paired examples, in natural units.

        `scale` scales tolerances, for domains that count: d_{s+t}(x, y) <= d_s(x, z) + d_t(z, y). A
        metric does not use it.
        """

    @property
    def has_neighbors(self) -> bool:
        """Whether neighboring values are similar; total variation and pictures rely on it."""

    @property
    def distance_is_rmse(self) -> bool:
        """Whether `distance` is the root mean squared error, which our bounds use."""

    @property
    def copies_count_once(self) -> bool:
        """Whether equal examples count as copies of one."""

    def fields(self, truth: Tensor | None, guess: Tensor) -> Fields:
        """What to show of paired examples, or of reconstructions without a known truth."""


@dataclass(frozen=True)
class NumberDomain:
    """Inputs of any shape in a box; they are close if their root mean squared error is small.

    Example:
        >>> domain = NumberDomain((3,))
        >>> domain.distance(torch.zeros(1, 3), torch.full((1, 3), 0.5)).tolist()
        [0.5]
    """

    shape: tuple[int, ...]
    input_range: tuple[float, float] = (0.0, 1.0)
    dtype: torch.dtype = torch.float32
    name = "values"
    has_neighbors, distance_is_rmse, copies_count_once = False, True, True

    def project(self, x: Tensor) -> Tensor:
        """Clip to the box; NaN becomes its middle."""
        low, high = self.input_range
        return torch.nan_to_num(x, nan=(low + high) / 2, posinf=high, neginf=low).clamp(low, high)

    def start(self, n: int, source: torch.Generator) -> Tensor:
        """Uniform over the box."""
        low, high = self.input_range
        return low + (high - low) * uniform((n, *self.shape), source).to(self.dtype)

    def blind(self, public: Batch | None) -> Tensor:
        """The mean public example, which has the smallest mean squared error; else the middle."""
        if public is not None and tuple(public.inputs.shape[1:]) == self.shape:
            return public.inputs.mean(0)
        return torch.full(self.shape, sum(self.input_range) / 2, dtype=self.dtype)

    def distance(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        """(N,) root mean squared error, in input units, float64 on the CPU."""
        apart = a.detach().cpu().double() - b.detach().cpu().double()
        return apart.square().flatten(1).mean(1).sqrt()

    def fields(self, truth: Tensor | None, guess: Tensor) -> Fields:
        """The first values of the first reconstructions."""
        rows = guess[:_SHOWN].detach().flatten(1)[:, :_VALUES].double().tolist()
        return Fields(values=tuple(tuple(float(f"{v:.4g}") for v in row) for row in rows))


@dataclass(frozen=True)
class ImageDomain(NumberDomain):
    """Images (C, H, W): values with similar neighbors, shown as pictures."""

    name = "images"
    has_neighbors = True

    def fields(self, truth: Tensor | None, guess: Tensor) -> Fields:
        """Pictures of both; values if an image is a single line."""
        if min(self.shape[1:]) == 1:
            return super().fields(truth, guess)
        shown = {} if truth is None else {"truth": truth}
        return Fields(pictures={**shown, "reconstruction": guess})
