"""The interface of a domain, and the domain of inputs of which only the shape is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from leakbound.task import Batch


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
    """What a report shows of reconstructed examples; which of these there are is the domain's.

    Attributes:
        pictures: name -> images (N, C, H, W).
        columns: one entry a column.
        values: the first numbers of the first examples.
    """

    pictures: dict[str, Tensor] | None = None
    columns: tuple[ColumnErrors, ...] | None = None
    values: tuple[tuple[float, ...], ...] | None = None


@runtime_checkable
class Domain(Protocol):
    """What one example is: what is valid, what is near, and what a guess without an update is.

    Attributes:
        name: for records, such as "images".
        shape: of one example as the model takes it.
        input_range: of its values, in the units that the model is fed.
        dtype: of its values.
    """

    @property
    def name(self) -> str:
        """For records."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""
        ...

    @property
    def input_range(self) -> tuple[float, float]:
        """Of its values."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of its values."""
        ...

    def project(self, x: Tensor) -> Tensor:
        """Onto valid examples (N, *shape); what is not finite becomes the middle."""
        ...

    def start(self, n: int, source: torch.Generator) -> Tensor:
        """Where searches begin: n valid examples (n, *shape)."""
        ...

    def blind(self, public: Batch | None) -> Tensor:
        """The best guess without an update (*shape): from public examples, or the middle."""
        ...

    def distance(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        """(N,) distance of paired examples, in natural units.

        `scale` is that of tolerances, for domains that count: d_{s+t}(x, y) <= d_s(x, z) +
        d_t(z, y). A metric has no use for it.
        """
        ...

    @property
    def has_neighbors(self) -> bool:
        """Whether neighboring values are alike: what total variation and pictures rest on."""
        ...

    @property
    def distance_is_rmse(self) -> bool:
        """Whether `distance` is the root mean squared error, which our bounds speak of."""
        ...

    @property
    def copies_count_once(self) -> bool:
        """Whether equal examples are copies of one."""
        ...

    def fields(self, truth: Tensor | None, guess: Tensor) -> Fields:
        """What to show of paired examples, or of reconstructions whose truth is not known."""
        ...
