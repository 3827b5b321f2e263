"""Schemas of tables: read from TOML, written as TOML, and drafted from a CSV or Parquet file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import date
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from leakbound import check
from leakbound._util import files
from leakbound._util.text import printable, toml
from leakbound.data import rows
from leakbound.data.values import MISSING, ColumnTexts, DraftedFormat, NumberFormat
from leakbound.domains import Column, TableDomain
from leakbound.domains.table import DECIMALS, EPOCH, day, middle_and_spread
from leakbound.randomness import stream, uniform

FEW = 20
MOST_LEVELS = 1_000
LONGEST_LEVEL = 200
"""Most values of whole numbers that may be categories; most levels, and characters of a level."""
SHOWN = 3
"""Texts that a draft names of those that are no number."""
SHORTEST_CODE = 4
"""Digits of a code, such as a postal code, that begins with no 0."""
QUASI = re.compile(
    r"(?<![a-z])(?:dob|sex|age|zip|plz)(?![a-z])|birth|born|post_?(?:al|code)|gender", re.I
)
SEXES = ({"f", "m"}, {"w", "m"}, {"female", "male"}, {"woman", "man"})
"""Names and levels of columns that, with others, identify a person."""
COMPACT = "%Y%m%d"
"""Format of dates that look like whole numbers."""
EXACT = 2**22
"""Range up to which float32 inputs tell whole numbers apart with room to spare."""
SAMPLE = 100_000
SAMPLES = 10_000_000
"""Rows that give medians, at most, and what is kept of all columns together."""
HEAD = """\
# A draft. Check every column, then set confirmed = true.
# - low and high are those of the file: give public limits, such as 0 to 120 years.
# - sensitive = true shows a column first in reports.
# - known = true says that attackers have a column from elsewhere, such as a birth date.
# - person = "COLUMN" names whom a row is of, if a person may have several rows: it is no input.
# - A number may also have: unit, tolerance, center, scale. A category: encoding.
"""
_TEXTS = (
    "name",
    "kind",
    "unit",
    "encoding",
    "decimal",
    "censored",
    "format",
    "target",
    "person",
    "target_decimal",
    "target_unit",
    "delimiter",
)
_DATED = ("low", "high", "center", "typical")
"""Keys of a column that are dates in the file if its kind is date."""
_TYPES = {
    **dict.fromkeys(_TEXTS, (str, "a text")),
    **dict.fromkeys(("missing", "sensitive", "known", "confirmed"), (bool, "true or false")),
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
        delimiter: of a CSV file: a comma, a semicolon, a tab or a vertical bar.
        target_decimal, target_unit: the decimal mark and the unit in the file of a label that is a
            number, as in `Column`.
        notes: comments by column name, in a draft.
        person: name of the column that identifies the person of a row, or "" if each row is of
            another person. The model does not take it.

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
    target_decimal: str = "."
    target_unit: str = ""
    notes: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    person: str = ""

    def __post_init__(self) -> None:
        if not self.columns:
            raise ValueError("it has no columns; describe each below [[columns]]")
        names = [column.name for column in TableDomain(self.columns).columns]
        for name in (self.target, *filter(None, [self.person]), *self.ignore):
            if name in names:
                raise ValueError(
                    f"column {name!r} has two places in columns, target, person and ignore; give "
                    "it one"
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
        check.one_of(DECIMALS, target_decimal=self.target_decimal)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a schema from TOML.

        Raises:
            ValueError: the file, a key or a value is not as it should be; the message names it.
        """
        what = f"schema {str(path)!r}"
        table = files.read_toml(Path(path), what)
        try:
            columns = table.pop("columns", [])
            if not isinstance(columns, list) or not all(isinstance(row, dict) for row in columns):
                raise ValueError("columns is no list of tables; write each below [[columns]]")
            known = [f.name for f in fields(cls) if f.name not in ("columns", "notes")]
            settled = _checked("the schema", table, known)
            if "target" not in settled:
                raise ValueError('it has no target; add target = "NAME" with the label\'s column')
            return cls(tuple(map(_column, columns)), **settled)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None

    @classmethod
    def confirmed_by(cls, path: Path | str) -> Self:
        """As `load`, but a draft is refused: no verdict rests on one."""
        schema = cls.load(path)
        if not schema.confirmed:
            raise ValueError(
                f"schema {str(path)!r} is a draft, on which no verdict rests; set confirmed = true "
                "after you checked it"
            )
        return schema

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
        ]
        if self.person:
            lines.append(f"person = {toml(self.person)}")
        if self.target_decimal != ".":
            lines.append(f"target_decimal = {toml(self.target_decimal)}")
        if self.target_unit:
            lines.append(f"target_unit = {toml(self.target_unit)}")
        lines += ["ignore = [", *ignored, "]"] if ignored else ["ignore = []"]
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
        cls,
        path: Path | str,
        target: str | None = None,
        *,
        watch: Watch = lambda done, size: None,
    ) -> Self:
        """Draft the schema of a CSV or Parquet file; memory does not grow with its rows.

        A column of numbers has numbers in 99 % of its present values or more, or dates, all written
        in one way. Text is a category of up to 1,000 levels. Identifiers, free text, constant and
        empty columns are ignored. Ranges and levels are exact; medians and spreads are those of up
        to 100,000 random rows. The file is read twice: to find how numbers are written, and to read
        them. Notes ask what the file does not say.

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
                forms = _forms(table, lambda done, size: watch(done, 2 * size))
            with rows.opened(Path(path)) as table:
                columns = _seen(table, forms, lambda done, size: watch(size + done, 2 * size))
                return cls(**_draft(columns, target), delimiter=table.delimiter)
        except OSError as error:
            raise ValueError(
                f"{what} cannot be read: {error.strerror or error}; check the path"
            ) from None
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None


def _checked(
    where: str,
    row: Mapping[str, Any],
    known: Sequence[str],
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    check.known_keys(where, row, known)
    for key, value in row.items():
        kind, words = _TYPES.get(key, (float, "a finite number"))
        # Exact types: `true` is an int, and would pass for a number.
        right = type(value) is kind or (kind is float and type(value) is int)
        if kind is float and right:
            # Rejects infinity, NaN, and whole numbers that no float holds.
            right = -1e308 <= value <= 1e308
        if not right or (kind is list and not all(isinstance(item, str) for item in value)):
            raise ValueError(f"{where}: {key} is {str(value)[:60]!r}; give {words}")
        values[key] = tuple(value) if kind is list else kind(value)
    return values


def _column(row: Mapping[str, Any]) -> Column:
    name = row.get("name")
    dated = row.get("kind") == "date"
    if not isinstance(name, str) or not name:
        raise ValueError(f"a column has name {name!r}; give the name in the file's header")
    what = f"column {name!r}"
    settled = dict(row)
    for key in (key for key in _DATED if key in row):
        value = row[key]
        # Exact type: a date with a time of day is a date, too.
        if (type(value) is date) != dated:
            form = "a date such as 1990-01-31" if dated else 'a number, or set kind = "date"'
            raise ValueError(f"{what}: {key} is {str(value)[:60]!r}; give {form}")
        settled[key] = value.toordinal() - EPOCH if dated else value
    if dated and not {"low", "high"} <= set(row):
        raise ValueError(f"{what} has no low and high; give the first and the last possible date")
    return Column(**_checked(what, settled, [f.name for f in fields(Column)]))


def _lines(column: Column, note: str) -> Iterator[str]:
    """The keys of a column that a reader must see, and those that differ from their default."""
    shown = {"kind", "sensitive", *(["levels"] if column.categorical else ["low", "high"])}
    shown |= {"format"} if column.kind == "date" else set()
    for key in fields(column):
        value = getattr(column, key.name)
        if key.name not in shown and value == key.default:
            continue
        if column.kind == "date" and key.name in _DATED:
            yield f"{key.name} = {day(value)}"
            continue
        if column.kind == "integer" and isinstance(value, float) and value.is_integer():
            value = int(value)
        yield f"{key.name} = {toml(value)}{note if key.name == 'kind' else ''}"


@dataclass
class _Seen:
    """What the rows so far say about one column.

    `sample` has NaN where there is no number; `codes` says that some begin with 0, as 0815 does.
    `digits` are the lengths of values that are digits alone. `others` are the extremes by another
    reading, and `example` is a text that it reads as another number.
    """

    name: str
    choice: DraftedFormat
    sample: NDArray[Any]
    numbers: int = 0
    texts: int = 0
    missing: int = 0
    limits: tuple[float, float] = (np.inf, -np.inf)
    others: tuple[float, float] = (np.inf, -np.inf)
    example: str = ""
    whole: bool = True
    levels: set[str] | None = field(default_factory=set)
    codes: bool = False
    digits: set[int] = field(default_factory=set)
    odd: list[str] = field(default_factory=list)

    def add(
        self,
        block: rows.RowBlock,
        at: NDArray[Any],
        place: NDArray[Any],
    ) -> None:
        """Count the values of a block; its rows `at` go to these places of the sample."""
        texts = block.values[self.name]
        self._count(set(texts))
        choice = self.choice
        if choice.reading is None:
            missing = sum(map(MISSING.__contains__, texts))
            self.missing += missing
            self.texts += len(texts) - missing
            return
        values = choice.reading.read(texts)
        self.sample[place] = values[at]
        empty = np.isnan(values)
        odd = [k for k in np.flatnonzero(empty).tolist() if texts[k] not in MISSING]
        for k in odd[: SHOWN - len(self.odd)]:
            self.odd.append(f"{texts[k][:40]!r} in {block.word} {block.lines[k]}")
        self.texts += len(odd)
        self.missing += int(empty.sum()) - len(odd)
        if empty.all():
            return
        self.numbers += int((~empty).sum())
        self.limits = _wider(self.limits, values)
        self.whole = self.whole and not (values[~empty] % 1).any()
        if choice.other is not None:
            again = choice.other.read(texts)
            self.others = _wider(self.others, again)
            differ = np.flatnonzero((again != values) & ~empty).tolist()
            self.example = self.example or next((texts[k] for k in differ), "")

    def _count(self, values: set[str]) -> None:
        new = values - MISSING - (self.levels or set())  # levels seen before say nothing new
        if len(self.digits) < 2:
            self.digits |= {len(code) if code.isdecimal() else 0 for code in new}
        if not self.codes:
            # No number is written with a leading zero, but 0 is a number.
            self.codes = any(code.isdecimal() and code[0] == "0" < code for code in new)
        if self.levels is not None:
            short = all(len(level) <= LONGEST_LEVEL for level in new)
            within = short and len(self.levels) + len(new) <= MOST_LEVELS
            self.levels = self.levels | new if within else None

    @property
    def few(self) -> tuple[str, ...]:
        """The values of whole numbers that may be categories."""
        known = self.levels or ()
        reading = self.choice.reading
        if reading is None or reading.format or not self.whole or self.texts:
            return ()
        numbers = dict(zip(known, reading.read([*known]).tolist(), strict=True))
        return tuple(sorted(known, key=numbers.__getitem__)) if 1 < len(known) <= FEW else ()

    @property
    def code(self) -> bool:
        """Whether its values may be codes, as postal codes are: of equal length, and repeated."""
        known = self.sample[~np.isnan(self.sample)]
        alike = len(self.digits) == 1 and min(self.digits) >= SHORTEST_CODE
        return self.codes or (alike and len(np.unique(known)) < len(known) and not self.few)

    @property
    def quasi(self) -> str:
        """What to ask if it may be a quasi-identifier."""
        reading = self.choice.reading
        if reading is not None and reading.format:
            return "ask: a date of birth? That is a quasi-identifier"
        sexes = {level.casefold() for level in self.levels or ()}
        if self.code or QUASI.search(self.name) or any(pair <= sexes for pair in SEXES):
            return "ask: a quasi-identifier? With others it can identify a person"
        return ""

    def draft(self) -> tuple[Column | None, str]:
        """The column, or None to ignore it; what a person should know about it."""
        present = self.numbers + self.texts
        levels = self.levels
        choice = self.choice
        if not self.name:
            return None, "it has no name"
        if not present:
            return None, "every value is missing"
        if levels is not None and len(levels) == 1:
            return None, f"every value is {next(iter(levels))!r}"
        if choice.reading is not None and not self.codes:
            return self._number(choice.reading)
        if choice.mixed:
            return None, "; ".join(choice.said)
        if levels is None:
            kind = "codes" if self.codes else "texts"
            long = "" if self.codes else f", or one of over {LONGEST_LEVEL} characters"
            why = f"over {MOST_LEVELS} {kind}{long}: an identifier, or free text"
            return None, "; ".join((why, *choice.said))
        if len(levels) == present > FEW:
            return None, "; ".join(("text that no two rows share: an identifier", *choice.said))
        column = Column(
            self.name, "categorical", levels=tuple(sorted(levels)), missing=self.missing > 0
        )
        said = ("codes, as some begin with 0",) if self.codes else choice.said
        return column, "; ".join(filter(None, (*said, self.quasi)))

    def _number(self, reading: NumberFormat) -> tuple[Column | None, str]:
        low, high = self.limits
        if low == high:
            return None, f"every value is {day(low) if reading.format else f'{low:g}'}"
        whole = self.whole and high - low <= EXACT
        kind = "date"
        if not reading.format:
            kind = "integer" if whole else "continuous"
        column = Column(
            self.name,
            kind,
            low,
            high,
            unit=reading.unit,
            missing=self.missing > 0,
            decimal=reading.decimal,
            censored="limit" if reading.beyond else "",
            format=reading.format or Column.format,
        )
        sample = self.sample[~np.isnan(self.sample)]
        if len(sample):
            with np.errstate(over="ignore"):
                middle, spread = middle_and_spread(torch.from_numpy(sample))
            spread = float(f"{spread:.6g}")
            known = spread if 0 < spread < np.inf else None
            typical = round(middle) if reading.format else float(f"{middle:.6g}")
            column = replace(column, typical=typical, spread=known)
        return column, "; ".join(filter(None, self._notes(reading, whole, sample)))

    def _notes(
        self,
        reading: NumberFormat,
        whole: bool,
        sample: NDArray[Any],
    ) -> Iterator[str]:
        yield from self.choice.said
        if self.choice.other is not None and self.example:
            yield self.two_readings(reading, self.choice.other)
        if self.few:
            yield f"ask: number or category? A category has levels = {toml(self.few)}"
        elif self.code:
            yield "ask: a number, or a code such as a postal code? A code is a category"
        elif reading.format:
            pass
        elif whole and len(sample) >= SAMPLE // 1_000 and len(np.unique(sample)) == len(sample):
            yield "ask: an identifier? No two rows share a value"
        elif self.whole and not whole:
            yield "whole numbers over a range that float32 inputs round"
        compact = [f"{value:08.0f}" for value in sample.tolist()] if self.digits == {8} else []
        if compact and not np.isnan(NumberFormat(format=COMPACT).read(compact)).any():
            yield f'ask: dates? Then kind = "date", format = "{COMPACT}", low and high as dates'
        yield self.quasi
        if self.texts:
            yield f"{self.texts} values are no number, such as {', '.join(self.odd)}: mend them"

    def two_readings(
        self,
        reading: NumberFormat,
        other: NumberFormat,
        key: str = "decimal",
    ) -> str:
        """The question which of two readings is right, and what to set for the other one."""
        text = self.example
        one, two = (choice.read([text])[0] for choice in (reading, other))
        least, most = self.others
        if other.format:
            return (
                f"ask: is {text[:20]!r} {day(one)} or {day(two)}? For the second: format = "
                f"{toml(other.format)}, low = {day(least)}, high = {day(most)}"
            )
        return (
            f"ask: is {text[:20]!r} {one:.12g} or {two:.12g}? For the second: {key} = "
            f"{toml(other.decimal)}, low = {least:.12g}, high = {most:.12g}"
        )


def _wider(
    limits: tuple[float, float],
    values: NDArray[Any],
) -> tuple[float, float]:
    """The limits of values so far and of more."""
    return min(limits[0], float(np.nanmin(values))), max(limits[1], float(np.nanmax(values)))


def _forms(table: rows.Rows, watch: Watch) -> dict[str, DraftedFormat]:
    """How each column is read, after a first look at all rows."""
    columns = {name: ColumnTexts() for name in table.names}
    for block in table.blocks:
        for name, texts in columns.items():
            texts.add(block.values[name])
        watch(block.done, table.size)
    # A column that shows its decimal mark decides for those that fit both.
    needed = {texts.mark for texts in columns.values()} - {""}
    mark = needed.pop() if len(needed) == 1 else "."
    return {name: texts.choice(mark) for name, texts in columns.items()}


def _seen(
    table: rows.Rows,
    choices: Mapping[str, DraftedFormat],
    watch: Watch,
) -> list[_Seen]:
    size = min(SAMPLE, SAMPLES // len(table.names))
    count = 0
    source = stream(0, "schema")  # the same file gives the same draft
    columns = [_Seen(name, choices[name], np.full(size, np.nan)) for name in table.names]
    # float32 would round the row numbers of a long file.
    double = torch.empty(0, dtype=torch.float64)
    for block in table.blocks:
        row = count + np.arange(len(block.lines))
        drawn = uniform((len(row),), source, like=double).numpy() * (row + 1)
        place = np.where(row < size, row, drawn.astype(np.int64))  # Vitter 1985, algorithm R
        kept = np.flatnonzero(place < size)
        for column in columns:
            column.add(block, kept, place[kept])
        count += len(row)
        watch(block.done, table.size)
    return columns


def _draft(seen: Sequence[_Seen], target: str | None) -> dict[str, Any]:
    drafts = {one.name: one.draft() for one in seen}
    columns = {name: column for name, (column, _) in drafts.items() if column is not None}
    notes = {name: note for name, (_, note) in drafts.items() if note}
    fit = [name for name, column in columns.items() if column.kind != "date"]
    name = target
    said = []
    if name is None:
        name = fit[-1] if fit else ""
        said.append("ask whether this is the label")
    if name not in fit:
        why = notes.get(name, "") if name in drafts else check.closest(name, drafts)
        why = "a date is no label" if name in columns else why
        raise ValueError(f"target is {name!r}, which cannot be the label; {why}")
    label = columns.pop(name)
    facts = next(one for one in seen if one.name == name)
    if not columns:
        raise ValueError(f"no column is left beside the label {name!r}; give at least one")
    if facts.missing:
        said.append(f"{facts.missing} rows have no label: leave them out")
    number = not (label.categorical or facts.few)
    said += _of_number(facts) if number else []
    return {
        "columns": tuple(columns.values()),
        "target": name,
        "classes": label.levels or facts.few,
        "target_decimal": label.decimal if number else ".",
        "target_unit": label.unit if number else "",
        "ignore": tuple(name for name, (column, _) in drafts.items() if column is None),
        "notes": {**notes, name: "; ".join(said)},
    }


def _of_number(label: _Seen) -> Iterator[str]:
    """What to know about a label that is a number."""
    yield "a number, so that there are no classes"
    reading = label.choice.reading
    other = label.choice.other
    if reading is not None and other is not None and label.example:
        yield label.two_readings(reading, other, "target_decimal").partition(", low =")[0]
    if reading is not None and reading.beyond:
        yield "values beyond a limit, such as <0.5, are no label: leave these rows out"
    if label.texts:
        yield f"{label.texts} values are no number, such as {', '.join(label.odd)}: mend them"
