"""Records on disk: appended line by line, readable after any failure, finished in plan order."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Generic

from leakbound._util import files
from leakbound.assess.record import KEYS, Damage, R, decode, encode


class Journal(Generic[R]):
    """A JSON Lines file of records of one kind; memory holds the position of each.

    `append` makes a record durable before it returns. `finish` replaces the whole file at once, so
    a kill leaves either the old or the new file. Reading does not change the file; a journal
    without records has no file. `ends` gives for each key how a unit ended: its verdict or status.
    """

    def __init__(self, path: Path, kind: type[R]) -> None:
        self.path = path
        self.key = KEYS[kind]
        self.kind: type[R] = kind
        self.ends: dict[str, str] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._stale = False
        self._descriptor: int | None = None

    def read(self, fits: Callable[[R], bool] = lambda record: True) -> set[str]:
        """The keys of the kept records: those that every reader can use and that fit.

        Damaged lines are dropped with a warning; `fits` may also report damage, with `Damage`.
        """
        damaged = 0
        start = 0
        for line in self._lines():
            try:
                record = decode(line, self.kind)
                if encode(record) != line:
                    raise Damage("it is not in canonical form")
                kept = fits(record)
            except Damage:
                damaged += 1
            else:
                self._places.pop(record.key, None)  # of several, the last counts
                self.ends.pop(record.key, None)
                if kept:
                    self._note(record, start, len(line))
            start += len(line)
        # Dropped lines are still in the file: the next `append` rewrites it without them.
        self._stale = start != sum(length for _, length in self._places.values())
        if damaged:
            warnings.warn(
                f"{self.path} holds {damaged} damaged line{'s' if damaged > 1 else ''}: dropped, "
                "and run again",
                stacklevel=2,
            )
        return set(self._places)

    def append(self, record: R) -> None:
        line = encode(record)
        if self._stale and self._places:
            self._rewrite(self._places)
        if self._stale or not os.path.lexists(self.path):
            files.write(self.path, line, key=self.key)
            start = 0
        else:
            if self._descriptor is None:
                self._descriptor = files.appending(self.path, self.key)
            start = os.lseek(self._descriptor, 0, os.SEEK_END)
            self._stale = True  # until all of it is written
            files.put(self._descriptor, line)
        self._stale = False
        self._note(record, start, len(line))

    def finish(self, order: Iterable[str]) -> None:
        if self._places:
            self._rewrite(order)

    def close(self) -> None:
        """Close the file; `append` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _note(
        self,
        record: R,
        start: int,
        length: int,
    ) -> None:
        self.ends[record.key] = record.end
        self._places[record.key] = (start, length)

    def _lines(self) -> Iterator[bytes]:
        files.check(self.path, key=self.key)
        if self.path.exists():
            with files.opened(self.path) as stream:
                yield from stream

    def _rewrite(self, keys: Iterable[str]) -> None:
        self.close()
        order = list(keys)
        old = self._places
        files.write(
            self.path,
            self._parts([old[key] for key in order]),
            key=self.key,
        )
        self._places = {}
        end = 0
        for key in order:
            self._places[key] = (end, old[key][1])
            end += old[key][1]
        self._stale = False

    def _parts(self, places: list[tuple[int, int]]) -> Iterator[bytes]:
        with files.opened(self.path) as stream:
            for start, length in places:
                stream.seek(start)
                yield stream.read(length)
