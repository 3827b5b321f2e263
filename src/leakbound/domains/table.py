"""Rows of a table: columns in their own units, scaled into [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from leakbound import check
from leakbound.domains.base import ColumnErrors, Fields, ImageDomain

TOLERANCE = 0.01
"""The share of a column's range within which a value counts as known."""


@dataclass(frozen=True)
class Column:
    """One column in its own units: its smallest and largest value, and whether all are whole."""

    name: str
    low: float
    high: float
    whole: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(
                f"column {self.name!r} runs from {self.low} to {self.high}; give two finite "
                "values, the lower first, or leave a constant column out"
            )

    @property
    def width(self) -> float:
        """The width of 1 scaled unit, in the column's units."""
        return self.high - self.low

    @property
    def tolerance(self) -> float:
        """In scaled units: 1 % of the range, or what rounding to a whole number corrects."""
        return min(0.5, 0.49 / self.width) if self.whole else TOLERANCE


@dataclass(frozen=True)
class TableDomain(ImageDomain):
    """Rows of columns as images of one line (1, 1, n), n columns in public ranges."""

    columns: tuple[Column, ...] = ()

    name = "table"
    copies_count_once = False  # equal rows may belong to different people

    def fields(self, truth: Tensor | None, guess: Tensor) -> Fields:
        """Errors by column; without a truth the first values."""
        if truth is None:
            return super().fields(truth, guess)
        return Fields(columns=column_errors(self.columns, truth, guess))


def column_errors(
    columns: Sequence[Column], truth: Tensor, guess: Tensor
) -> tuple[ColumnErrors, ...]:
    """One entry per column in its own units: mean and largest error, share known, all values.

    `truth` and `guess` (N, *S) have one value per column for each example, scaled, in one order.

    Raises:
        ValueError: shapes do not fit, there is no example, or entries are not finite.

    Example:
        >>> import torch
        >>> ages = Column("age", 0.0, 100.0, whole=True)
        >>> [one] = column_errors([ages], torch.tensor([[0.5]]), torch.tensor([[0.52]]))
        >>> round(one.mean, 3), one.matched, one.truth
        (2.0, 0.0, (50.0,))
    """
    if truth.shape != guess.shape or truth.ndim < 2 or len(truth) == 0:
        raise ValueError(
            f"truth has shape {tuple(truth.shape)} and `guess` {tuple(guess.shape)}; give both as "
            "(N, n), with at least one example"
        )
    if len(columns) != truth[0].numel():
        raise ValueError(
            f"columns holds {len(columns)} entries; give one for each of {truth[0].numel()}"
        )
    check.finite("truth", truth)
    check.finite("guess", guess)
    true, own = (x.detach().cpu().double().flatten(1) for x in (truth, guess))
    found = []
    for place, column in enumerate(columns):
        off = (own[:, place] - true[:, place]).abs()
        found.append(
            ColumnErrors(
                name=column.name,
                mean=_short(float((off * column.width).mean())),
                worst=_short(float((off * column.width).max())),
                matched=_short(float((off <= column.tolerance).double().mean())),
                truth=_units(column, true[:, place]),
                reconstruction=_units(column, own[:, place]),
            )
        )
    return tuple(found)


def _units(column: Column, values: Tensor) -> tuple[float, ...]:
    return tuple(_short(column.low + column.width * value) for value in values.tolist())


def _short(value: float) -> float:
    return float(f"{value:.6g}")
