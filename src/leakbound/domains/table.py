"""Rows of a table: numbers with a tolerance, categories, and values that may be missing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from itertools import accumulate
from typing import ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from leakbound import check
from leakbound._util.results import ColumnResult
from leakbound.domains.base import Fields, PartsDomain, Score
from leakbound.randomness import normal

DECIMALS = (".", ",")
CHOICES = {
    "kind": ("continuous", "integer", "date", "categorical"),
    "encoding": ("onehot", "code", "embedding"),
    "decimal": DECIMALS,
    "censored": ("", "limit", "missing"),
}
"""What settings of a column may be."""
WHOLE = 0.49
NEAR = 0.05
"""Default tolerances: of whole numbers, and of others in units of the public spread."""
MISSING = "(missing)"
SLACK = 1e-6
"""Part by which an error may exceed a tolerance: rounding of float32 inputs."""
FARTHEST = 1e30
"""Limit of an input's absolute value."""
FAR = 1e3
ABSENT = -1e15
"""Codes of two levels of a category are this far apart; the code of a missing number."""
EPOCH = date(1970, 1, 1).toordinal()
FIRST_DAY, LAST_DAY = (day.toordinal() - EPOCH for day in (date.min, date.max))


@dataclass(frozen=True)
class Column:
    """One column of a table, its public facts, and how the model takes it.

    A number enters the model as (value - center) / scale. A category is stored as one share per
    level; `encoding` says what the model takes: these shares ("onehot"), the number of the level
    ("code"), or this number as an integer for an embedding ("embedding").

    Attributes:
        kind: "continuous", "integer", "date" or "categorical". A date counts as a whole number of
            days since 1970, also in `low`, `high`, `center` and `typical`.
        low, high: the smallest and largest valid number, in its own units. Public.
        levels: names of a categorical column's values.
        tolerance: error up to which a number counts as known, in its own units. Default: 0.49 for
            whole numbers, 0.05 of the spread for others.
        center, scale: of the model's input; default: `low` and `high - low`.
        missing: values may be missing: a number then has one more input, 1 if it is missing, and a
            category one more level.
        sensitive: shown first in reports.
        known: attackers have it from elsewhere, such as a birth date, unless they are said to know
            something else (`domains.known.as_marked`).
        typical, spread: median and IQR/1.349 (standard deviation if 0) of public rows.
        decimal: the decimal mark of numbers in a file, "." or ",". The other one, spaces and
            apostrophes may separate thousands.
        censored: what a number beyond a limit, such as "<0.5" or "90+", counts as in a file: the
            "limit" itself, or "missing"; "" refuses it.
        format: how a file writes dates, in the codes of `datetime.strptime`. A time of day after
            the date is left out. Two-digit years lie from 1969 to 2068, or a century earlier where
            the date is otherwise above `high`.
    """

    name: str
    kind: str = "continuous"
    low: float = 0.0
    high: float = 1.0
    levels: tuple[str, ...] = ()
    unit: str = ""
    tolerance: float | None = None
    center: float | None = None
    scale: float | None = None
    encoding: str = "onehot"
    missing: bool = False
    sensitive: bool = False
    known: bool = False
    typical: float | None = None
    spread: float | None = None
    decimal: str = "."
    censored: str = ""
    format: str = "%Y-%m-%d"

    def __post_init__(self) -> None:
        what = f"column {self.name!r}"
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(
                    f"{what} has {name} {value!r}; give one of {', '.join(map(repr, allowed))}"
                )
        if self.censored == "missing" and not self.missing:
            raise ValueError(f'{what} has censored "missing"; set missing = true too')
        if self.categorical:
            if len(set(self.levels)) < 2 or len(set(self.names)) != len(self.names):
                raise ValueError(
                    f"{what} has the levels {', '.join(self.levels) or '(none)'}; give two "
                    "different ones or more, or leave a constant column out"
                )
            return
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(
                f"{what} runs from {self.low} to {self.high}; give two finite values, the lower "
                "first, or leave a constant column out"
            )
        for name in ("tolerance", "scale", "spread"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{what} has {name} {value}; give a finite number above 0")
        farthest = max(abs(self.low - self.origin), abs(self.high - self.origin))
        if not farthest / self.unit_length < FARTHEST:
            raise ValueError(
                f"{what} runs from {self.low} to {self.high} with center {self.origin} and scale "
                f"{self.unit_length}, which float32 inputs cannot hold; give a larger scale"
            )
        if self.whole and (self.low % 1 or self.high % 1):
            raise ValueError(
                f"{what} runs from {self.low} to {self.high}, but its kind is {self.kind}; give "
                "whole numbers, or the kind continuous"
            )
        if self.kind == "date" and not FIRST_DAY <= self.low < self.high <= LAST_DAY:
            raise ValueError(
                f"{what} runs from day {self.low:g} to {self.high:g} since 1970; give dates from "
                f"{date.min} to {date.max}"
            )

    @property
    def categorical(self) -> bool:
        """Whether its values are levels, not numbers."""
        return self.kind == "categorical"

    @property
    def whole(self) -> bool:
        """Whether its values are whole numbers."""
        return self.kind in ("integer", "date")

    @property
    def names(self) -> tuple[str, ...]:
        """The levels, with one for missing values if they occur."""
        return (*self.levels, MISSING) if self.missing else self.levels

    @property
    def width(self) -> int:
        """How many numbers store one value."""
        return len(self.names) if self.categorical else 1 + self.missing

    @property
    def origin(self) -> float:
        """The value that the model takes as 0."""
        return self.low if self.center is None else self.center

    @property
    def unit_length(self) -> float:
        """The value of 1 in the model's input, in the column's units."""
        return self.high - self.low if self.scale is None else self.scale

    @property
    def allowed(self) -> float:
        """The tolerance in the column's units."""
        if self.tolerance is not None:
            return self.tolerance
        if self.whole:
            return WHOLE
        # Without public rows, a quarter of the range stands in for the spread.
        return NEAR * (self.spread or (self.high - self.low) / 4)

    def text(self, value: float) -> str:
        """A number in the column's units, or a date, as text.

        Example:
            >>> Column("born", "date", 0, 20_000).text(19_783), Column("share", unit="%").text(4.5)
            ('2024-03-01', '4.5 %')
        """
        if self.kind == "date":
            return str(day(value))
        shown = f"{round(value)}" if self.kind == "integer" else f"{value:.4g}"
        return f"{shown} {self.unit}" if self.unit else shown


@dataclass(frozen=True)
class TableDomain(PartsDomain):
    """Rows (n,) of a table, n numbers for m columns; the distance counts columns that differ.

    A column differs if numbers are farther apart than their tolerance, categories are not equal, or
    only one of both is missing.

    Example:
        >>> sex = Column("sex", "categorical", levels=("f", "m"))
        >>> domain = TableDomain((Column("age", "integer", 0, 100), sex))
        >>> a, b = torch.tensor([[0.5, 1, 0]]), torch.tensor([[0.51, 0.6, 0.4]])
        >>> domain.distance(a, b).tolist(), domain.rows(b)
        ([1.0], [('51', 'f')])
    """

    columns: tuple[Column, ...]
    dtype: torch.dtype = torch.float32
    name = "table"
    noun = "row"
    metric: ClassVar[Score] = "columns"
    what = "rows of a table with known columns"
    vocabulary = None
    padding = None

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise ValueError(f"columns are named {', '.join(names[:20])}; give each its own name")

    @cached_property
    def placed(self) -> tuple[tuple[Column, int, int], ...]:
        """Each column, and where it starts and ends in a row."""
        ends = [*accumulate(column.width for column in self.columns)]
        starts = [0, *ends]
        return tuple(zip(self.columns, starts, ends, strict=False))

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers that store one row."""
        return (sum(column.width for column in self.columns),)

    @cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Where each categorical column starts and ends in a row."""
        return tuple((start, stop) for column, start, stop in self.placed if column.categorical)

    @cached_property
    def box(self) -> tuple[Tensor, Tensor]:
        """(n,) the lowest and the highest input of each number that stores a row."""
        low = torch.zeros(self.shape)
        high = torch.ones(self.shape)
        for column, start, _ in self.placed:
            if not column.categorical:
                low[start] = (column.low - column.origin) / column.unit_length
                high[start] = (column.high - column.origin) / column.unit_length
        return low, high

    @cached_property
    def typical(self) -> tuple[Tensor, Tensor]:
        """(n,) the typical input of each number and its spread; 0 and 1 for categories."""
        center = torch.zeros(self.shape)
        scale = torch.ones(self.shape)
        low, high = self.box
        for column, start, stop in self.placed:
            if column.categorical:
                continue
            center[start] = (low[start] + high[start]) / 2
            scale[start] = (high - low)[start] / 4
            # Missing values are rare at the start of a search.
            scale[start + 1 : stop] = 0.1
            if column.typical is not None and column.spread is not None:
                center[start] = (column.typical - column.origin) / column.unit_length
                scale[start] = column.spread / column.unit_length
        return center, scale

    @property
    def input_range(self) -> tuple[float, float]:
        """The lowest and the highest input of all columns."""
        low, high = self.box
        return float(low.min()), float(high.max())

    def fitted(self, public: Tensor) -> TableDomain:
        """The same columns with the median and the spread of public rows (N, n)."""
        if len(public) == 0:
            return self
        held = public.detach().cpu().double()
        columns = []
        for column, start, _ in self.placed:
            values = held[:, start]
            if column.missing and not column.categorical:
                # What is stored for a missing number has no meaning.
                values = values[held[:, start + 1] < 0.5]
            if column.categorical or not len(values):
                columns.append(column)
                continue
            middle, spread = middle_and_spread(values)
            unit = column.unit_length
            typical = column.origin + unit * middle
            # A column with one value has spread 0, which `Column` refuses.
            columns.append(replace(column, typical=typical, spread=unit * spread or None))
        return replace(self, columns=tuple(columns))

    def project(self, x: Tensor) -> Tensor:
        """Clip numbers to their box and project categories onto the simplex; NaN becomes 0."""
        low, high = (edge.to(x) for edge in self.box)
        # Finite before the simplex: differences of infinities are NaN.
        finite = torch.nan_to_num(x, nan=0.0).clamp(-FARTHEST, FARTHEST)
        valid = finite.clamp(low, high)
        for start, stop in self.groups:
            valid[:, start:stop] = _simplex(finite[:, start:stop])
        return valid

    def hard(self, x: Tensor) -> Tensor:
        """The closest rows that a table can hold: one level per category, whole numbers."""
        rows = self.project(x)
        for column, start, stop in self.placed:
            if column.categorical:
                rows[:, start:stop] = _one_hot(rows[:, start:stop])
                continue
            if column.whole:
                unit = column.unit_length
                origin = column.origin
                # In float64: with a large origin, float32 would round to another whole number.
                whole = (rows[:, start].double() * unit + origin).round()
                rows[:, start] = ((whole - origin) / unit).to(rows)
            if column.missing:
                rows[:, start + 1] = (rows[:, start + 1] > 0.5).to(rows)
        return rows

    def start(self, n: int, source: torch.Generator) -> Tensor:
        """Normal about the typical row; categories nearly even."""
        center, scale = self.typical
        draw = normal((n, *self.shape), source)
        x = center + scale * draw
        for start, stop in self.groups:
            x[:, start:stop] = (0.1 * draw[:, start:stop]).softmax(-1)
        return self.project(x).to(self.dtype)

    def blind(self, public: Tensor | None) -> Tensor:
        """Median of every number and most frequent level of every category, of public rows."""
        if public is None or len(public) == 0:
            low, high = self.box
            return self.hard((low + high)[None] / 2)[0].to(self.dtype)
        held = public.detach()
        row = public.new_empty(self.shape)
        for column, start, stop in self.placed:
            part = held[:, start:stop]
            if column.categorical:
                row[start:stop] = _one_hot(part.mean(0)[None])[0]
                continue
            gone = part[:, 1] > 0.5 if column.missing else torch.zeros(len(part), dtype=torch.bool)
            kept = part[:, 0][~gone.to(part.device)]
            row[start] = kept.median() if len(kept) else 0.0
            row[start + 1 : stop] = float(gone.double().mean() > 0.5)
        return self.project(row[None])[0]

    def coded(self, x: Tensor) -> Tensor:
        """(..., m) one number for each column of rows (..., n): columns differ at a scale if these
        are farther apart than the scale. Float64 on the CPU; numbers in units of their tolerance.
        """
        x = x.detach().cpu().double()
        codes = torch.empty(
            *x.shape[:-1],
            len(self.columns),
            dtype=torch.float64,
        )
        for k, (column, start, stop) in enumerate(self.placed):
            if column.categorical:
                codes[..., k] = FAR * x[..., start:stop].argmax(-1)
                continue
            # A tolerance below rounding must not tell equal values apart.
            value = x[..., start] / (column.allowed / column.unit_length * (1 + SLACK) + 1e-12)
            gone = column.missing and x[..., start + 1] > 0.5
            codes[..., k] = torch.where(torch.as_tensor(gone), ABSENT, value)
        return codes

    def costs(self, a: Tensor, b: Tensor) -> Tensor:
        """(A, B) what pairing minimizes: columns that differ; ties by the scaled error."""
        low, high = (edge.double() for edge in self.box)
        one, two = ((x.detach().cpu().double() - low) / (high - low) for x in (a, b))
        apart = torch.cdist(one, two, p=1) / self.shape[0]
        # The second part is below 1, so it only breaks ties.
        return self.distances(a, b) + 0.5 * apart / (1 + apart)

    def frequencies(self, public: Tensor) -> dict[tuple[str, str], float]:
        """The share of public rows (N, n) with each level of each category."""
        shares = public.detach().double().mean(0).tolist() if len(public) else []
        return {
            (column.name, level): share
            for column, start, stop in self.placed
            if column.categorical
            for level, share in zip(column.names, shares[start:stop], strict=False)
        }

    @property
    def parts(self) -> int:
        """The number of columns."""
        return len(self.columns)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where each column starts and ends in a row."""
        return tuple((start, stop) for _, start, stop in self.placed)

    def rows(self, x: Tensor) -> list[tuple[str, ...]]:
        """The values of rows (N, n) as text, one for each column."""
        held = self.hard(x.detach().cpu())
        columns = [self._texts(k, held) for k in range(len(self.columns))]
        return list(zip(*columns, strict=True))

    def _texts(self, k: int, held: Tensor) -> list[str]:
        column, start, stop = self.placed[k]
        if column.categorical:
            return [column.names[at] for at in held[:, start:stop].argmax(-1).tolist()]
        values = column.origin + column.unit_length * held[:, start].double()
        gone = held[:, start + 1] > 0.5 if column.missing else torch.zeros(len(held))
        return [
            MISSING if lost else column.text(value)
            for value, lost in zip(values.tolist(), gone.tolist(), strict=True)
        ]

    def fields(
        self,
        truth: Tensor | None,
        guess: Tensor,
        baseline: Tensor | None = None,
    ) -> Fields:
        """The values of every column, and which match if the truth is known."""
        shown = self.hard(guess.detach().cpu())
        columns = [
            ColumnResult(
                name=column.name,
                unit=column.unit,
                sensitive=column.sensitive,
                reconstruction=tuple(self._texts(k, shown)),
            )
            for k, column in enumerate(self.columns)
        ]
        if truth is None:
            return Fields(columns=tuple(columns))
        check.finite("truth", truth)
        held = truth.detach().cpu()
        known = ~self.misses(held, shown)
        blind = None if baseline is None else ~self.misses(held, baseline)
        for k, column in enumerate(columns):
            columns[k] = msgspec.structs.replace(
                column,
                matched=tuple(known[:, k].tolist()),
                baseline=() if blind is None else tuple(blind[:, k].tolist()),
                truth=tuple(self._texts(k, held)),
            )
        return Fields(columns=tuple(columns))


def day(value: float) -> date:
    """The date so many days after 1970-01-01, or the first or last that there is."""
    return date.fromordinal(EPOCH + round(min(max(value, FIRST_DAY), LAST_DAY)))


def middle_and_spread(values: Tensor) -> tuple[float, float]:
    """The median; and IQR / 1.349, as of normal values, or the standard deviation if that is 0."""
    low, middle, high = np.quantile(values.numpy(), (0.25, 0.5, 0.75)).tolist()
    # The IQR ignores outliers; it is 0 where most values repeat.
    return middle, (high - low) / 1.349 or float(values.std(correction=0))


def _one_hot(shares: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(shares.argmax(-1), shares.shape[-1]).to(shares)


def _simplex(x: Tensor) -> Tensor:
    """The closest points of the probability simplex (Duchi et al. 2008, figure 1)."""
    # The formula would move valid points by its rounding.
    whole = (x.sum(-1, keepdim=True) - 1).abs() < 1e-5
    valid = whole & (x >= 0).all(-1, keepdim=True)
    moved = x - x.amax(-1, keepdim=True)  # the same closest point, without cancellation
    falling = moved.sort(-1, descending=True).values
    over = (falling.cumsum(-1) - 1) / torch.arange(1, x.shape[-1] + 1).to(x)
    last = (falling > over).sum(-1, keepdim=True) - 1
    return torch.where(valid, x, (moved - over.gather(-1, last)).clamp_min(0))
