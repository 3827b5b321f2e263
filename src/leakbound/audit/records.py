"""Records on disk: appended line by line, read back whatever happened, finished in plan order."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from leakbound.assess.record import Damage, Reader, Record

_TEMPORARY = re.compile(r"\.(run\.json|(records|utility)\.jsonl|[0-9a-f]{16}\.png)\.\d+\.tmp")


def encode(record: Mapping[str, Any]) -> bytes:
    """One record as one JSON line, in one canonical form."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


class Journal:
    """A JSON Lines file of records keyed by one field; memory holds where each stands.

    `append` makes a record durable before it returns. `finish` writes all in a given order through
    a temporary file, so a kill at any moment leaves either the old file or the new one. Reading
    leaves the file as it is; the next `append` or `finish` writes it anew.

    Attributes:
        ends: by key how the unit ended: its verdict, "ok", "not_applicable" or "failed".
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self.ends: dict[str, str] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._stale = False
        self._descriptor: int | None = None

    def read(self, fits: Callable[[Record], bool] = lambda record: True) -> set[str]:
        """The keys of the records that are kept: those that every reader can use and that fit.

        Damaged lines are dropped with a warning. `fits` may find damage of its own, by `Damage`.
        """
        damaged, start, reader = 0, 0, Reader(self.key)
        for line in self._lines():
            try:
                record = reader(line)
                if encode(record) != line:
                    raise Damage("it is not in canonical form")
                kept = fits(record)
            except ValueError:  # damage, or a number that JSON does not have
                damaged += 1
            else:
                self._forget(record[self.key])  # of several the last stands
                if kept:
                    self._note(record, start, len(line))
            start += len(line)
        self._stale = start != sum(length for _, length in self._places.values())
        if damaged:
            warnings.warn(
                f"{self.path} holds {damaged} damaged line{'s' if damaged > 1 else ''}: dropped, "
                "and run again",
                stacklevel=2,
            )
        return set(self._places)

    def append(self, record: Record) -> None:
        """Write one record and wait until it is on disk."""
        if self._stale:
            self._rewrite(self._places)
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._descriptor = os.open(self.path, flags, 0o600)
        line, start = encode(record), os.lseek(self._descriptor, 0, os.SEEK_END)
        self._stale = True  # until all of it is written
        _write(self._descriptor, line)
        self._stale = False
        self._note(record, start, len(line))

    def finish(self, order: Iterable[str]) -> None:
        """Rewrite the file with its records in the given order."""
        self._rewrite(order)

    def close(self) -> None:
        """Close the file; `append` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _note(self, record: Record, start: int, length: int) -> None:
        status = record["status"]
        verdict = record.get("verdict") or status
        self.ends[record[self.key]] = verdict if status == "ok" else status
        self._places[record[self.key]] = (start, length)

    def _forget(self, key: str) -> None:
        self._places.pop(key, None)
        self.ends.pop(key, None)

    def _lines(self) -> Iterator[bytes]:
        if self.path.exists():
            with self.path.open("rb") as stream:
                yield from stream

    def _rewrite(self, keys: Iterable[str]) -> None:
        self.close()
        order, old = list(keys), self._places
        write_atomically(self.path, self._parts([old[key] for key in order]))
        self._places, end = {}, 0
        for key in order:
            self._places[key] = (end, old[key][1])
            end += old[key][1]
        self._stale = False

    def _parts(self, places: list[tuple[int, int]]) -> Iterator[bytes]:
        if places:
            with self.path.open("rb") as stream:
                for start, length in places:
                    stream.seek(start)
                    yield stream.read(length)


def write_atomically(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Replace a file's content, given whole or in parts, in one step; its owner alone reads it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        try:
            for part in (content,) if isinstance(content, bytes) else content:
                _write(descriptor, part, sync=False)
            os.fsync(descriptor)
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


def _write(descriptor: int, content: bytes, *, sync: bool = True) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]
    if sync:
        os.fsync(descriptor)
