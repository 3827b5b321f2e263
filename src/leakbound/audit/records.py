"""Records on disk: appended line by line, read back whatever happened, finished in plan order."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SCHEMAS = frozenset({1})


def encode(record: Mapping[str, Any]) -> bytes:
    """One record as one JSON line, in one canonical form."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


class Journal:
    """A JSON Lines file of records keyed by one field.

    `append` makes a record durable before it returns. `finish` writes all in a given order through
    a temporary file, so a kill at any moment leaves either the old file or the new one.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self.lines: dict[str, bytes] = {}
        self._stream: Any = None

    def read(self) -> dict[str, dict[str, Any]]:
        """All intact records by key; damaged lines are dropped with a warning.

        Raises:
            ValueError: a record of a schema that this version does not know.
        """
        records: dict[str, dict[str, Any]] = {}
        content = self.path.read_bytes() if self.path.exists() else b""
        damaged = 0
        for line in content.splitlines(keepends=True):
            record = _decode(line, self.key)
            if record is None:
                damaged += 1
                continue
            if record["schema"] not in SCHEMAS:
                raise ValueError(
                    f"{self.path} holds a record of schema {record['schema']!r}; this version "
                    f"reads {sorted(SCHEMAS)}: use a newer leakbound"
                )
            records[record[self.key]] = record
            self.lines[record[self.key]] = line
        if damaged:
            warnings.warn(
                f"{self.path} holds {damaged} damaged line{'s' if damaged > 1 else ''}: dropped, "
                "and run again",
                stacklevel=2,
            )
            write_atomically(self.path, b"".join(self.lines.values()))
        return records

    def drop(self, keys: Iterable[str]) -> None:
        """Forget records, so that they run again."""
        for key in keys:
            self.lines.pop(key, None)
        write_atomically(self.path, b"".join(self.lines.values()))

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record and wait until it is on disk."""
        if self._stream is None:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._stream = os.fdopen(descriptor, "ab")
        line = encode(record)
        self._stream.write(line)
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self.lines[record[self.key]] = line

    def finish(self, order: Iterable[str]) -> None:
        """Rewrite the file with its records in the given order."""
        self.close()
        write_atomically(self.path, b"".join(self.lines[key] for key in order))

    def close(self) -> None:
        """Close the file; `append` opens it again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _decode(line: bytes, key: str) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and isinstance(record.get(key), str) and "schema" in record
    return record if whole and encode(record) == line else None


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file's content in one step; it is readable by its owner only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
