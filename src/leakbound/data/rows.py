"""Rows of a CSV or Parquet file as text, in blocks: memory does not grow with the file.

Files count as untrusted. Errors name the line and the column; the caller names the file.
"""

from __future__ import annotations

import codecs
import csv
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from leakbound import check
from leakbound._util import files
from leakbound._util.text import printable
from leakbound.data.values import NumberFormat
from leakbound.domains.table import DECIMALS

DELIMITERS = ",;\t|"
MOST_COLUMNS = 10_000
PARQUET = (".parquet", ".pq")
_VALUES = 8_192
_FEWEST = 128
_LONGEST = 1 << 24
_SNIFFED = 50
"""Values of a block, which fit a cache, and its fewest rows; characters of a row, and of a block;
lines that show the delimiter.
"""
_SEPARATOR = re.compile(r"sep=(.)\r?\n?", re.IGNORECASE)
"""Excel's first line, which names the delimiter."""


@dataclass(frozen=True)
class RowBlock:
    """Some rows: by column their values as text, or as an array of numbers.

    `lines` are the lines in which rows end, or numbers of rows: `word` says which. `done` is the
    part of the file's `size` that has been read.
    """

    lines: Sequence[int]
    values: Mapping[str, Any]
    done: int
    word: str = "line"


@dataclass(frozen=True)
class Rows:
    """An open table. `most` computes an upper bound on its number of rows."""

    names: tuple[str, ...]
    delimiter: str
    blocks: Iterator[RowBlock]
    size: int
    most: Callable[[], int]


@contextmanager
def opened(path: Path, delimiter: str | None = None) -> Iterator[Rows]:
    """A table's column names and its rows. Without a delimiter, the first lines show it.

    Raises:
        ValueError: the file is no such table; also while the blocks are read.
    """
    if path.suffix.lower() in PARQUET:
        yield _parquet(path)
        return
    # Excel writes a byte order mark; line ends must stay, as `csv` reads those in quotes itself.
    with (
        files.opened(path) as raw,
        TextIOWrapper(raw, "utf-8-sig", newline="") as text,
    ):
        lines = _Lines(text)
        # An error that comes before the true reader exists asks for its line.
        reader = csv.reader([])
        try:
            delimiter = lines.start(delimiter)
            # Without `strict`, an unclosed quotation mark would swallow all rows after it.
            reader = csv.reader(
                lines,
                delimiter=delimiter,
                skipinitialspace=True,
                strict=True,
            )
            names = _header(next(reader, []), lines.skipped + 1)
            blocks = _blocks(reader, names, lines, raw.tell)
            yield Rows(names, delimiter, blocks, path.stat().st_size, lambda: _line_ends(path))
        except UnicodeDecodeError:
            line = _first_not_utf8(path)
            raise ValueError(f"line {line} is not UTF-8 text; save the file as UTF-8") from None
        except csv.Error as error:
            line = lines.skipped + reader.line_num
            raise ValueError(
                f"line {line}: {error}; close every quotation mark, and keep values "
                f"below {csv.field_size_limit()} characters"
            ) from None


class _Lines:
    """Lines of a text. A row without an end cannot take all memory: `begun` is where it began.

    `skipped`: how many lines come before the names of the columns.
    """

    def __init__(self, text: TextIOWrapper) -> None:
        self.text = text
        self.taken = 0
        self.begun = 0
        self.skipped = 0
        self._lines = self._read()

    def _read(self) -> Iterator[str]:
        number = 0
        while line := self.text.readline(_LONGEST):
            number += 1
            self.taken += len(line)
            if self.taken - self.begun > _LONGEST:
                raise ValueError(
                    f"line {number}: a row has over {_LONGEST} characters; close every quotation "
                    "mark, and write one row a line"
                )
            if "\0" in line:
                raise ValueError(f"line {number} holds a NUL byte; save the table as text")
            yield line

    def __iter__(self) -> Iterator[str]:
        return self._lines

    def start(self, delimiter: str | None) -> str:
        """Skip what comes before the names: a line `sep=;`, comments and empty lines.

        Returns the delimiter, which the next lines show if it is not known.
        """
        comment = ""
        first = list[str]()
        for line in self:
            said = _SEPARATOR.fullmatch(line) if not self.skipped else None
            if said and said[1] != (delimiter or said[1]):
                raise ValueError(
                    f"line 1 is {line.strip()!r}, but the schema has delimiter = {delimiter!r}; "
                    "write the file's delimiter in the schema"
                )
            if said:
                check.one_of(DELIMITERS, delimiter=said[1])
                delimiter = said[1]
            elif line.startswith("#"):
                comment = line
            elif line.strip():
                first.append(line)
                break
            self.skipped += 1
        first += islice(self, _SNIFFED - 1)
        self._lines = chain(first, self._lines)
        delimiter = delimiter or _sniffed(first)
        names = first[0] if first else ""
        if comment and 1 < _width(comment, delimiter) == _width(names, delimiter):
            raise ValueError(
                f"line {self.skipped} begins with #: it may be a comment, or the names of the "
                "columns; remove the #, or the line"
            )
        return delimiter


def _width(line: str, delimiter: str) -> int:
    return len(next(csv.reader([line], delimiter=delimiter), []))


def _blocks(
    reader: Any,
    names: tuple[str, ...],
    lines: _Lines,
    done: Callable[[], int],
) -> Iterator[RowBlock]:
    size = max(_FEWEST, _VALUES // len(names))
    seen = False
    rows: list[list[str]] = []
    numbers: list[int] = []
    begun = lines.begun = lines.taken
    for row in reader:
        lines.begun = lines.taken
        if len(row) != len(names):
            if not row:  # an empty line
                continue
            line = lines.skipped + reader.line_num
            if row[0].startswith("#"):
                raise ValueError(f"line {line} is a comment, {row[0][:40]!r}; remove it")
            raise ValueError(
                f"line {line} has {len(row)} values, but the header has {len(names)}; "
                "give one for each column, and quote values that hold the delimiter"
            )
        rows.append(row)
        numbers.append(lines.skipped + reader.line_num)
        if len(rows) == size or lines.taken - begun > _LONGEST:
            yield RowBlock(
                numbers,
                dict(zip(names, zip(*rows, strict=True), strict=True)),
                done(),
            )
            rows = []
            numbers = []
            seen = True
            begun = lines.taken
    if rows:
        yield RowBlock(
            numbers,
            dict(zip(names, zip(*rows, strict=True), strict=True)),
            done(),
        )
    elif not seen:
        raise ValueError("it holds a header, but no row; give at least one")


def _header(row: Sequence[str], line: int) -> tuple[str, ...]:
    names = tuple(name.strip() for name in row)
    if not any(names):
        raise ValueError("it is empty; give a line of column names, then the rows")
    if len(names) > MOST_COLUMNS:
        raise ValueError(f"it has {len(names)} columns; give at most {MOST_COLUMNS}")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"the header names {twice[0]!r} twice; give each column its own name")
    if any(np.isfinite(NumberFormat(mark).read(names)).all() for mark in DECIMALS):
        raise ValueError(f"line {line} holds only numbers, such as {names[0]}; add a line of names")
    return names


def _sniffed(lines: Sequence[str]) -> str:
    """The delimiter that gives all of the first rows the same number of values, above one."""

    def fit(delimiter: str) -> tuple[bool, int]:
        try:
            widths = [len(row) for row in csv.reader(lines, delimiter=delimiter) if row]
        except csv.Error:
            widths = []
        widths = widths[: -1 if len(lines) == _SNIFFED else None] or [0]  # the last may be cut
        return len(set(widths)) == 1 < widths[0], widths[0]

    return max(DELIMITERS, key=fit)


def _line_ends(path: Path) -> int:
    count = 1
    with files.opened(path) as stream:
        while part := stream.read(1 << 20):
            # A line end that two parts share counts twice, which keeps this an upper bound.
            count += part.count(b"\n") + part.count(b"\r") - part.count(b"\r\n")
    return count


def _first_not_utf8(path: Path) -> int:
    # Incremental: a limit on the line may cut a character in two.
    decoder = codecs.getincrementaldecoder("utf-8")()
    number = 1
    with files.opened(path) as stream:
        while part := stream.readline(_LONGEST):
            try:
                decoder.decode(part)
            except UnicodeDecodeError:
                break
            number += part.endswith(b"\n")
    return number


def _parquet(path: Path) -> Rows:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ValueError(
            "Parquet needs the package pyarrow; pip install pyarrow, or save the table as CSV"
        ) from None
    files.check_regular(path)
    with _parquet_errors():
        table = parquet.ParquetFile(path)
    names = _header(table.schema_arrow.names, 1)

    def blocks() -> Iterator[RowBlock]:
        at = 0
        with _parquet_errors():
            for batch in table.iter_batches(batch_size=max(_FEWEST, _VALUES // len(names))):
                # As text: one set of rules then reads CSV and Parquet.
                texts = [list(map(_text, column.to_pylist())) for column in batch.columns]
                lines = range(at + 1, at + 1 + batch.num_rows)
                at = at + batch.num_rows
                yield RowBlock(
                    lines,
                    dict(zip(names, texts, strict=True)),
                    at,
                    "row",
                )
        if not at:
            raise ValueError("it holds no row; give at least one")

    count = int(table.metadata.num_rows)
    return Rows(names, ",", blocks(), count, lambda: count)


@contextmanager
def _parquet_errors() -> Iterator[None]:
    """Errors of pyarrow, of many kinds, as a ValueError in one line."""
    try:
        yield
    except Exception as error:
        said = printable(str(error))[:200]
        raise ValueError(f"it is no Parquet table that can be read ({said})") from None


def _text(value: object) -> str:
    return "" if value is None else str(value)
