"""Records on disk: appended line by line, read back whatever happened, finished in plan order."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from leakbound._util import files

SCHEMAS = frozenset({1})


class Journal:
    """A JSON Lines file of records keyed by one field.

    `append` makes a record durable before it returns. `finish` writes all in a given order through
    a temporary file, so a kill at any moment leaves either the old file or the new one. Reading
    and dropping leave the file as it is; the next `append` or `finish` writes it anew. A journal
    without a record has no file.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self.records: dict[str, dict[str, Any]] = {}
        self._stale = False
        self._descriptor: int | None = None

    def read(self) -> dict[str, dict[str, Any]]:
        """All intact records by key; damaged lines are dropped with a warning.

        Raises:
            ValueError: a file without any such record, or one of a schema that this version does
                not know.
        """
        content = files.read(self.path) if self._is_there() else b""
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
        if self._stale or not os.path.lexists(self.path):
            self._rewrite({**self.records, record[self.key]: dict(record)})
            return
        if self._descriptor is None:
            self._descriptor = files.appending(self.path, self.key)
        self._stale = True  # until all of it is written
        files.put(self._descriptor, files.encode(record))
        self._stale = False
        self.records[record[self.key]] = dict(record)

    def finish(self, order: Iterable[str]) -> None:
        """Rewrite the file with its records in the given order."""
        if self.records:
            self._rewrite({key: self.records[key] for key in order})

    def close(self) -> None:
        """Close the file; `append` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _rewrite(self, records: dict[str, dict[str, Any]]) -> None:
        self.close()
        files.write(self.path, b"".join(map(files.encode, records.values())), key=self.key)
        self.records, self._stale = records, False

    def _is_there(self) -> bool:
        files.check(self.path, key=self.key)
        return self.path.exists()

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
        return files.decode(line, self.key) if isinstance(record.get(self.key), str) else None
