"""Records on disk: appended line by line, read back whatever happened, finished in plan order."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SCHEMAS = frozenset({1})
_TEMPORARY = re.compile(r"\.(run\.json|(records|utility)\.jsonl|[0-9a-f]{16}\.png)\.\d+\.tmp")


def encode(record: Mapping[str, Any]) -> bytes:
    """One record as one JSON line, in one canonical form."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


class Journal:
    """A JSON Lines file of records keyed by one field.

    `append` makes a record durable before it returns. `finish` writes all in a given order through
    a temporary file, so a kill at any moment leaves either the old file or the new one. Reading
    and dropping leave the file as it is; the next `append` or `finish` writes it anew.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self.records: dict[str, dict[str, Any]] = {}
        self._stale = False
        self._descriptor: int | None = None

    def read(self) -> dict[str, dict[str, Any]]:
        """All intact records by key; damaged lines are dropped with a warning.

        Raises:
            ValueError: a record of a schema that this version does not know.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        damaged = 0
        for line in content.splitlines(keepends=True):
            record = self._decode(line)
            if record is None:
                damaged += 1
            else:
                self.records[record[self.key]] = record
        if damaged:
            self._stale = True
            warnings.warn(
                f"{self.path} holds {damaged} damaged line{'s' if damaged > 1 else ''}: dropped, "
                "and run again",
                stacklevel=2,
            )
        return dict(self.records)

    def drop(self, keys: Iterable[str]) -> None:
        """Forget records, so that they run again."""
        for key in keys:
            self._stale = self.records.pop(key, None) is not None or self._stale

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record and wait until it is on disk."""
        if self._stale:
            self._rewrite(self.records)
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._descriptor = os.open(self.path, flags, 0o600)
        self._stale = True  # until all of it is written
        _write(self._descriptor, encode(record))
        self._stale = False
        self.records[record[self.key]] = dict(record)

    def finish(self, order: Iterable[str]) -> None:
        """Rewrite the file with its records in the given order."""
        self._rewrite(order)

    def close(self) -> None:
        """Close the file; `append` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _rewrite(self, keys: Iterable[str]) -> None:
        self.close()
        write_atomically(self.path, b"".join(encode(self.records[key]) for key in keys))
        self._stale = False

    def _decode(self, line: bytes) -> dict[str, Any] | None:
        """The record in a line; None if it is cut, not JSON, or not as `encode` writes it."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(record, dict) or "schema" not in record:
            return None
        schema = record["schema"]
        if type(schema) is not int or schema not in SCHEMAS:
            raise ValueError(
                f"{self.path} holds a record of schema {schema!r}; this version reads "
                f"{sorted(SCHEMAS)}: use a newer leakbound"
            )
        try:
            whole = isinstance(record.get(self.key), str) and encode(record) == line
        except ValueError:  # NaN
            return None
        return record if whole else None


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file's content in one step; it is readable by its owner only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        try:
            _write(descriptor, content)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_temporary(folder: Path) -> None:
    """Remove what a killed `write_atomically` left of an audit's files."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _write(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)
