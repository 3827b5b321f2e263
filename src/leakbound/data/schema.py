"""Schemas of tables: read from TOML, written as TOML, and drafted from a CSV or Parquet file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from leakbound import check
from leakbound._util import files
from leakbound._util.text import printable, toml
from leakbound.data import rows
from leakbound.domains import Column, TableDomain
from leakbound.random import stream, uniform

DAYS = "days"
"""Unit of a column of whole numbers whose values may also be dates: days since 1970."""
FEW, MOST_LEVELS, LONGEST_LEVEL = 20, 1_000, 200
"""Most values of whole numbers that may be categories; most levels, and characters of a level."""
NUMERIC = 0.99
"""Share of a column's present values that must be numbers if it is to count as one of numbers."""
EXACT = 2**22
"""Range up to which float32 inputs tell whole numbers apart with room to spare."""
SAMPLE, SAMPLES = 100_000, 10_000_000
"""Rows that give medians, at most, and what is kept of all columns together."""
HEAD = """\
# A draft. Check every column, then set confirmed = true.
# - low and high are those of the file: give public limits, such as 0 to 120 years.
# - sensitive = true shows a column first in reports.
# - A number may also have: unit, tolerance, center, scale. A category: encoding.
"""
_TYPES = {
    **dict.fromkeys(("name", "kind", "unit", "encoding", "target", "delimiter"), (str, "a text")),
    **dict.fromkeys(("missing", "sensitive", "confirmed"), (bool, "true or false")),
    **dict.fromkeys(("levels", "classes", "ignore"), (list, "a list of texts")),
}
"""Of a key: the type of its value, and its name. The other keys are numbers."""
Watch = Callable[[int, int], object]


@dataclass(frozen=True)
class Schema:
    """The columns of a table, its label, and what is left out.

    Attributes:
        columns: those that the model takes, in its order.
        target: name of the label's column.
        classes: the label's levels; () if the label is a number.
        ignore: names of columns that are not read.
        confirmed: whether a person has checked it; otherwise no table is loaded.
        delimiter: of a CSV file: a comma, a semicolon or a tab.
        notes: comments by column name, in a draft.

    Example:
        >>> age = Column("age", "integer", 0, 120)
        >>> print(Schema((age,), "sick", ("no", "yes"), confirmed=True).text())
        confirmed = true
        delimiter = ","
        target = "sick"
        classes = ["no", "yes"]
        ignore = []
        <BLANKLINE>
        [[columns]]
        name = "age"
        kind = "integer"
        low = 0
        high = 120
        sensitive = false
        <BLANKLINE>
    """

    columns: tuple[Column, ...]
    target: str
    classes: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    confirmed: bool = False
    delimiter: str = ","
    notes: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = [column.name for column in TableDomain(self.columns).columns]
        for name in (self.target, *self.ignore):
            if name in names:
                raise ValueError(
                    f"column {name!r} has two places in columns, target and ignore; give it one"
                )
            names.append(name)
        if not self.target:
            raise ValueError("target is empty; give the name of the label's column")
        if len(self.classes) == 1 or len(set(self.classes)) != len(self.classes):
            raise ValueError(
                f"classes are {', '.join(self.classes)}; give two different ones or more, or none "
                "if the label is a number"
            )
        check.one_of(rows.DELIMITERS, delimiter=self.delimiter)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a schema from TOML.

        Raises:
            ValueError: the file, a key or a value is not as it should be; the message names it.
        """
        what = f"schema {str(path)!r}"
        table = files.read_toml(Path(path), what)
        try:
            given = table.pop("columns", [])
            if not isinstance(given, list) or not all(isinstance(row, dict) for row in given):
                raise ValueError("columns is no list of tables; write each below [[columns]]")
            known = [f.name for f in fields(cls) if f.name not in ("columns", "notes")]
            settled = _checked("the schema", table, known)
            if "target" not in settled:
                raise ValueError('it has no target; add target = "NAME" with the label\'s column')
            return cls(tuple(map(_column, given)), **settled)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None

    @classmethod
    def confirmed_by(cls, path: Path | str) -> Self:
        """As `load`, but a draft is refused: no verdict rests on one."""
        found = cls.load(path)
        if not found.confirmed:
            raise ValueError(
                f"schema {str(path)!r} is a draft, on which no verdict rests; set confirmed = true "
                "after you checked it"
            )
        return found

    @property
    def domain(self) -> TableDomain:
        """What a row is."""
        return TableDomain(self.columns)

    def text(self) -> str:
        """The schema as TOML, with its notes as comments; `load` gives the same schema."""
        notes = {name: f"  # {printable(note)}" for name, note in self.notes.items() if note}
        ignored = [f"  {toml(name)},{notes.get(name, '')}" for name in self.ignore]
        lines = [
            f"confirmed = {toml(self.confirmed)}",
            f"delimiter = {toml(self.delimiter)}",
            f"target = {toml(self.target)}{notes.get(self.target, '')}",
            f"classes = {toml(self.classes)}",
            *(["ignore = [", *ignored, "]"] if ignored else ["ignore = []"]),
        ]
        for column in self.columns:
            lines += ["", "[[columns]]", *_lines(column, notes.get(column.name, ""))]
        return ("" if self.confirmed else HEAD) + "\n".join(lines) + "\n"

    def save(self, path: Path) -> None:
        """Write it to a file; a file that leakbound did not write stays unchanged.

        Raises:
            ValueError: such a file is there, or the place cannot be written.
        """
        with files.writing(path):
            files.write(files.folder(path.parent) / path.name, self.text().encode())

    @classmethod
    def infer(
        cls, path: Path | str, target: str | None = None, *, watch: Watch = lambda done, size: None
    ) -> Self:
        """Draft the schema of a CSV or Parquet file; memory does not grow with its rows.

        A column of numbers has numbers in 99 % of its present values or more. Text is a category of
        up to 1,000 levels. Identifiers, free text, constant and empty columns are ignored. Ranges
        and levels are exact; medians and spreads are those of up to 100,000 random rows.

        Args:
            path: the file.
            target: name of the label's column; by default the last that can be one.
            watch: called with the part of the file that has been read, and with its size.

        Raises:
            ValueError: the file is no table, or no column is left; the message names the line.
        """
        what = f"table {str(path)!r}"
        try:
            with rows.opened(Path(path)) as table:
                return cls(**_draft(_seen(table, watch), target), delimiter=table.delimiter)
        except OSError as error:
            raise ValueError(
                f"{what} cannot be read: {error.strerror or error}; check the path"
            ) from None
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None


def _checked(where: str, row: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in row.items():
        if key not in known:
            raise ValueError(f"{where} has no key {key!r}; {check.closest(key, known)}")
        kind, words = _TYPES.get(key, (float, "a finite number"))
        right = type(value) is kind or (kind is float and type(value) is int)
        if kind is float and right:
            right = -1e308 <= value <= 1e308
        if not right or (kind is list and not all(isinstance(item, str) for item in value)):
            raise ValueError(f"{where}: {key} is {str(value)[:60]!r}; give {words}")
        found[key] = tuple(value) if kind is list else kind(value)
    return found


def _column(row: Mapping[str, Any]) -> Column:
    name = row.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"a column has name {name!r}; give the name in the file's header")
    return Column(**_checked(f"column {name!r}", row, [f.name for f in fields(Column)]))


def _lines(column: Column, note: str) -> Iterator[str]:
    """The keys of a column that a reader must see, and those that differ from their default."""
    shown = {"kind", "sensitive", *(["levels"] if column.categorical else ["low", "high"])}
    for key in fields(column):
        value = getattr(column, key.name)
        if key.name in shown or value != key.default:
            if column.kind == "integer" and isinstance(value, float) and value.is_integer():
                value = int(value)
            yield f"{key.name} = {toml(value)}{note if key.name == 'kind' else ''}"


@dataclass
class _Seen:
    """What the rows so far say about one column.

    `sample` has NaN where there is no number; `codes` says that some begin with 0, as 0815 does.
    """

    name: str
    sample: NDArray[Any]
    parse: Callable[[Sequence[str]], NDArray[Any]] = rows.numbers
    numbers: int = 0
    texts: int = 0
    missing: int = 0
    low: float = np.inf
    high: float = -np.inf
    whole: bool = True
    levels: set[str] | None = field(default_factory=set)
    codes: bool = False
    first: str = ""

    def add(self, block: rows.RowBlock, at: NDArray[Any], place: NDArray[Any]) -> None:
        values = block.values[self.name]
        found = self.parse(values)
        if not self.numbers and not self.texts and np.isnan(found).all():
            dates = rows.days(values)
            if not np.isnan(dates).all():
                self.parse, found = rows.days, dates
        empty = np.isnan(found)
        texts = [k for k in np.flatnonzero(empty).tolist() if values[k] not in rows.MISSING]
        if texts and not self.first:
            self.first = f"{values[texts[0]][:40]!r} in {block.word} {block.lines[texts[0]]}"
        self.texts += len(texts)
        self.missing += int(empty.sum()) - len(texts)
        known = found[~empty]
        if len(known):
            self.numbers += len(known)
            self.low = min(self.low, float(known.min()))
            self.high = max(self.high, float(known.max()))
            self.whole = self.whole and not (known % 1).any()
        self.sample[place] = found[at]
        if self.levels is not None:
            new = set(values) - rows.MISSING - self.levels
            self.codes |= any(code.isdecimal() and code[:1] == "0" < code for code in new)
            short = all(len(level) <= LONGEST_LEVEL for level in new)
            within = short and len(self.levels) + len(new) <= MOST_LEVELS
            self.levels = self.levels | new if within else None

    @property
    def few(self) -> tuple[str, ...]:
        """The values of whole numbers that may be categories."""
        known = self.levels or ()
        one = self.whole and self.parse is rows.numbers and not self.texts
        return tuple(sorted(known, key=float)) if one and 1 < len(known) <= FEW else ()

    def draft(self) -> tuple[Column | None, str]:
        """The column, or None to ignore it; what a person should know about it."""
        present, levels = self.numbers + self.texts, self.levels
        if not self.name:
            return None, "it has no name"
        if not present:
            return None, "every value is missing"
        if levels is not None and len(levels) == 1:
            return None, f"every value is {next(iter(levels))!r}"
        if self.numbers >= NUMERIC * present and not self.codes:
            return self._number()
        if levels is None:
            comma = all(map(str.isdecimal, self.first.partition(" ")[0].strip("'-").split(",")))
            return None, (
                f"numbers with a comma, such as {self.first}: write a decimal point"
                if comma
                else f"over {MOST_LEVELS} texts, or one of over {LONGEST_LEVEL} characters: an "
                "identifier, or free text"
            )
        if len(levels) == present > FEW:
            return None, "text that no two rows share: an identifier"
        names = tuple(sorted(levels))
        return Column(self.name, "categorical", levels=names, missing=self.missing > 0), ""

    def _number(self) -> tuple[Column | None, str]:
        if self.low == self.high:
            return None, f"every value is {self.low:g}"
        dates, notes = self.parse is rows.days, []
        whole = self.whole and self.high - self.low <= EXACT
        column = Column(
            self.name,
            "integer" if whole else "continuous",
            self.low,
            self.high,
            unit=DAYS if dates else "",
            missing=self.missing > 0,
        )
        sample = self.sample[~np.isnan(self.sample)]
        if len(sample):
            with np.errstate(over="ignore"):
                low, middle, high = np.quantile(sample, (0.25, 0.5, 0.75)).tolist()
                spread = float(f"{(high - low) / 1.349 or sample.std():.6g}")
            known = spread if 0 < spread < np.inf else None
            column = replace(column, typical=float(f"{middle:.6g}"), spread=known)
        if dates:
            notes.append("dates, as days since 1970")
        elif self.few:
            notes.append(f"ask: number or category? A category has levels = {toml(self.few)}")
        elif whole and len(sample) >= SAMPLE // 1_000 and len(np.unique(sample)) == len(sample):
            notes.append("ask: an identifier? No two rows share a value")
        elif self.whole and not whole:
            notes.append("whole numbers over a range that float32 inputs round")
        if self.texts:
            notes.append(f"{self.texts} values are no number, the first is {self.first}: mend them")
        return column, "; ".join(notes)


def _seen(table: rows.Rows, watch: Watch) -> list[_Seen]:
    size, count, source = min(SAMPLE, SAMPLES // len(table.names)), 0, stream(0, "schema")
    found = [_Seen(name, np.full(size, np.nan)) for name in table.names]
    double = torch.empty(0, dtype=torch.float64)
    for block in table.blocks:
        row = count + np.arange(len(block.lines))
        drawn = uniform((len(row),), source, like=double).numpy() * (row + 1)
        place = np.where(row < size, row, drawn.astype(np.int64))  # Vitter 1985, algorithm R
        kept = np.flatnonzero(place < size)
        for one in found:
            one.add(block, kept, place[kept])
        count += len(row)
        watch(block.done, table.size)
    return found


def _draft(seen: Sequence[_Seen], target: str | None) -> dict[str, Any]:
    drafts = {one.name: one.draft() for one in seen}
    columns = {name: column for name, (column, _) in drafts.items() if column is not None}
    notes = {name: note for name, (_, note) in drafts.items() if note}
    name = next(reversed(columns), "") if target is None else target
    if name not in columns:
        why = notes.get(name, "") if name in drafts else check.closest(name, drafts)
        raise ValueError(f"target is {name!r}, which cannot be the label; {why}")
    label, own = columns.pop(name), next(one for one in seen if one.name == name)
    if not columns:
        raise ValueError(f"no column is left beside the label {name!r}; give at least one")
    said = ["ask whether this is the label"] if target is None else []
    said += [f"{own.missing} rows have no label: leave them out"] if own.missing else []
    said += [] if label.categorical or own.few else ["a number, so that there are no classes"]
    return {
        "columns": tuple(columns.values()),
        "target": name,
        "classes": label.levels or own.few,
        "ignore": tuple(name for name, (column, _) in drafts.items() if column is None),
        "notes": {**notes, name: "; ".join(said)},
    }
