"""The rows of a table with a schema: CSV, Parquet or a NumPy archive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from leakbound import check
from leakbound.data import raw, rows
from leakbound.data.raw import Options, Raw
from leakbound.data.schema import Schema
from leakbound.data.values import MISSING, NumberFormat, is_beyond
from leakbound.domains import Column, TableDomain
from leakbound.tensors.archive import open_archive, read_array

SUFFIXES = (".csv", ".tsv", *rows.PARQUET)
"""Endings of a file's name that mark a table."""
Array = NDArray[Any]


def read_table(
    path: Path,
    schema: Schema,
    options: Options,
) -> Raw:
    """The rows (N, n) of a table in the units of the model's input, and their labels (N,).

    A NumPy archive holds one array (N,) for each column and the label, or `inputs` (N, m) and
    `labels` (N,). It gives categories as numbers of their levels, from 0, and NaN if missing.

    Raises:
        ValueError: the file does not fit the schema; the message names line, column and mend.
    """
    npz = path.suffix.lower() == ".npz"
    with _archive(path, schema) if npz else rows.opened(path, schema.delimiter) as table:
        _check_names(table.names, schema)
        return _filled(table, schema, options.limit)


def read_columns(path: Path, columns: Sequence[Column], delimiter: str = ",") -> torch.Tensor:
    """The rows (N, n) of some columns in the units of the model's input; others are not read.

    Raises:
        ValueError: the file lacks one of them, or a value does not fit; the message names the line.
    """
    domain = TableDomain(tuple(columns))
    parts = []
    empty = torch.zeros(domain.shape).clamp(*domain.box).numpy()
    with rows.opened(path, delimiter) as table:
        for column in domain.columns:
            if column.name not in table.names:
                near = check.closest(column.name, table.names)
                raise ValueError(f"{str(path)!r} has no column {column.name!r}; {near}")
        most = raw.MAX_BYTES // (4 * domain.shape[0])
        for block in table.blocks:
            most -= len(block.lines)
            if most < 0:
                raise ValueError(f"{str(path)!r} has too many rows for memory; give fewer")
            part = np.zeros((len(block.lines), *domain.shape), dtype=np.float32)
            for column, start, stop in domain.placed:
                values = _read(block, column, len(part))
                _put(part[:, start:stop], column, values, empty[start])
            parts.append(torch.from_numpy(part))
    return torch.cat(parts) if parts else torch.zeros(0, *domain.shape)


def _check_names(names: Sequence[str], schema: Schema) -> None:
    wanted = [*_taken(schema), *filter(None, [schema.person])]
    known = {*wanted, *schema.ignore}
    for name in wanted:
        if name not in names:
            others = [other for other in names if other not in known]
            near = check.closest(name, others) if others else "give the schema of this file"
            raise ValueError(f"it has no column {name!r}, which the schema names; {near}")
    for name in names:
        if name not in known:
            raise ValueError(
                f"column {name!r} is not in the schema; describe it there, or name it in ignore"
            )


def _taken(schema: Schema) -> list[str]:
    """The names of the columns that inputs and labels hold."""
    return [column.name for column in schema.columns] + [schema.target]


def _filled(
    table: rows.Rows,
    schema: Schema,
    limit: int | None,
) -> Raw:
    """The tensors: their memory is checked against the number of rows before it is taken."""
    domain = TableDomain(schema.columns)
    width = domain.shape[0]
    most = table.most() if limit is None else min(limit, table.most())
    if most * (4 * width + 8) > raw.MAX_BYTES:
        fit = raw.MAX_BYTES // (4 * width + 8)
        raise ValueError(
            f"{most} rows of {width} numbers take {most * (4 * width + 8) / 2**30:.1f} GiB; the "
            f"limit is {raw.MAX_BYTES / 2**30:.1f} GiB: give limit = {fit}, or fewer rows"
        )
    inputs = torch.zeros(most, width)
    labels = torch.zeros(most, dtype=torch.int64 if schema.classes else torch.float32)
    label = _label(schema)
    owners = np.zeros(most if schema.person else 0, dtype=np.int64)
    owner_of: dict[str, int] = {}
    count = 0
    seen = dict.fromkeys([column.name for column in schema.columns], False)
    empty = torch.zeros(width).clamp(*domain.box).numpy()
    for block in table.blocks:
        taken = slice(count, count := min(count + len(block.lines), most))
        part = inputs[taken].numpy()
        for column, start, stop in domain.placed:
            values = _read(block, column, len(part))
            seen[column.name] = bool(seen[column.name] or not np.isnan(values).all())
            _put(part[:, start:stop], column, values, empty[start])
        labels[taken] = torch.from_numpy(_read(block, label, len(part))).to(labels)
        if schema.person:
            owners[taken] = _owners(block, schema.person, owner_of, len(part))
        if count == limit:
            break
    else:
        # Only a file that was read to its end shows this.
        if gone := [name for name, any_value in seen.items() if not any_value]:
            raise ValueError(f"column {gone[0]!r} is missing in every row; name it in ignore")
    made = Raw(inputs[:count], labels[:count], schema.classes, schema.columns)
    if not schema.person:
        return made
    return replace(made, persons=torch.from_numpy(owners[:count]), person_names=tuple(owner_of))


def _owners(block: rows.RowBlock, name: str, known: dict[str, int], count: int) -> list[int]:
    """The number of each row's person; new persons are added to the known ones."""
    texts = [str(text).strip() for text in block.values[name][:count]]
    for k, text in enumerate(texts):
        if text in MISSING:
            raise ValueError(
                f"{block.word} {block.lines[k]}, column {name!r}: no value, so nobody knows whose "
                "row it is; leave the row out, or name a person of its own"
            )
        known.setdefault(text, len(known))
    return [known[text] for text in texts]


@contextmanager
def _archive(path: Path, schema: Schema) -> Iterator[rows.Rows]:
    wanted = _taken(schema)
    with open_archive(path) as archive:
        held = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        # A table may also have two columns of these names.
        whole = set(held) == {"inputs", "labels"} != set(wanted)
        whole = whole and not schema.person  # no array of these says who is who
        named = [*wanted, *filter(None, [schema.person])]
        members = {name: held[name] for name in (held if whole else named) if name in held}
        raw.within_limit(f"archive {str(path)!r}", sum(info.file_size for info in members.values()))
        arrays = {name: read_array(archive, info, raw.MAX_BYTES) for name, info in members.items()}
    if whole:
        inputs = arrays["inputs"]
        if inputs.ndim != 2 or inputs.shape[1] != len(schema.columns):
            raise ValueError(
                f"inputs have shape {inputs.shape}; give (N, {len(schema.columns)}), the columns "
                "of the schema in its order"
            )
        arrays = dict(zip(wanted, [*inputs.T, arrays["labels"]], strict=True))
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) > 1 or any(len(shape) != 1 or not shape[0] for shape in shapes):
        shown = ", ".join(map(str, sorted(shapes)[:5]))
        raise ValueError(
            f"its columns have shapes {shown}; give (N,) for each, with one row or more"
        )
    count = next(iter(shapes), (0,))[0]
    names = tuple(wanted if whole else held)
    block = rows.RowBlock(range(1, count + 1), arrays, count, "row")
    yield rows.Rows(names, ",", iter([block]), count, lambda: count)


def _label(schema: Schema) -> Column:
    """The label as a column, so that it is read by the same rules."""
    if schema.classes:
        return Column(schema.target, "categorical", levels=schema.classes)
    return Column(
        schema.target,
        low=-1e30,  # the schema has no range of a label
        high=1e30,
        unit=schema.target_unit,
        decimal=schema.target_decimal,
    )


def _put(
    part: Array,
    column: Column,
    values: Array,
    empty: float,
) -> None:
    """Write values as inputs (N, width); `empty` stands for a missing number, beside its flag."""
    gone = np.isnan(values)
    if column.categorical:
        level = np.where(gone, len(column.levels), values).astype(np.int64)
        part[np.arange(len(part)), level] = 1.0
        return
    part[:, 0] = np.where(gone, empty, (values - column.origin) / column.unit_length)
    if column.missing:
        part[:, 1] = gone


def _read(
    block: rows.RowBlock,
    column: Column,
    count: int,
) -> Array:
    """The first values of a column as float64: numbers, or numbers of levels; NaN if missing."""
    texts = block.values[column.name][:count]
    low, high = (0, len(column.levels) - 1) if column.categorical else (column.low, column.high)
    if isinstance(texts, np.ndarray):
        values = texts.astype(np.float64)
    elif column.categorical:
        place = {level: k for k, level in enumerate(column.levels)}
        values = np.array(list(map(place.get, texts)), dtype=np.float64)  # None becomes NaN
    else:
        values = NumberFormat.of(column).read(texts)
    # Negated, so that NaN is wrong, too.
    wrong = ~((values >= low) & (values <= high))
    if column.kind != "continuous":
        wrong |= np.floor(values) != values
    for k in np.flatnonzero(wrong).tolist():
        text = str(texts[k])
        if not np.isnan(values[k]) or not _is_missing(column, text):
            why = _why(column, text, float(values[k]), low, high)
            raise ValueError(f"{block.word} {block.lines[k]}, column {column.name!r}: {why}")
    return values


def _is_missing(column: Column, text: str) -> bool:
    """Whether a text may stand for a missing value of the column."""
    if column.censored == "missing" and is_beyond(text):
        return not np.isnan(replace(NumberFormat.of(column), beyond=True).read([text])[0])
    return column.missing and text in MISSING


def _why(
    column: Column,
    text: str,
    value: float,
    low: float,
    high: float,
) -> str:
    """What is wrong with a value, and the mend."""
    shown = repr(text[:60])
    if np.isnan(value):
        if text in MISSING:
            return "no value; leave the row out, or (not for a label) set missing = true"
        if column.categorical:
            near = check.closest(text[:60], column.levels)
            return f"{shown} is no level of the schema; {near or 'add it there'}"
        if column.kind == "date":
            return f"{shown} is no date in the format {column.format!r}; mend it, or the format"
        if is_beyond(text) and not column.censored:
            return f'{shown} is beyond a limit; set censored = "limit" or "missing" in the schema'
        return (
            f"{shown} is no number with the decimal mark {column.decimal!r}; mend it, set decimal "
            "or unit in the schema, or make the column categorical"
        )
    if column.categorical:
        return f"{shown} is no number of a level; give whole numbers from 0 to {high:g}"
    if low <= value <= high:
        return f'{shown} is no whole number; give one, or set kind = "continuous"'
    between = f"{low:g} to {high:g}"
    if column.kind == "date":
        between = f"{column.text(low)} to {column.text(high)}"
    return f"{shown} is not from {between}; mend it, or widen low and high in the schema"
