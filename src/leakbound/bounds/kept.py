"""What is costly and depends on numbers alone is kept by those numbers, in bounded memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np

from leakbound.bounds.law import Array

T = TypeVar("T")
ENTRY = 512
"""Bytes that an entry counts for beside its arrays."""


class Kept:
    """Results by content: the least recently asked for goes first when memory runs out.

    Guarantees: a result depends on its key alone, so that it is the same bits whether it was kept
        or is made anew. Threads may ask at once; two that miss together both compute, and share
        the first result. Each process has its own.

    Args:
        most_bytes: of all results together; a result that is larger alone is not kept.

    Example:
        >>> kept = Kept(10_000)
        >>> kept.of(("square", 3), lambda: 9), kept.of(("square", 3), lambda: 0)
        (9, 9)
        >>> kept.hits, kept.misses
        (1, 1)
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self.hits, self.misses = 0, 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, key: Hashable, make: Callable[[], T], *, size: int | None = None) -> T:
        """What `make` gives for the key; made once while it is kept.

        Args:
            key: every number that the result depends on.
            make: computes it; it must not change what it gave away later.
            size: bytes of the result; by default those of the arrays among its attributes.
        """
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                self.hits += 1
                found: T = self._entries[key][0]
                return found
            self.misses += 1
        made = make()
        weight = ENTRY + (_bytes(made) if size is None else size)
        with self._lock:
            if key in self._entries:
                first: T = self._entries[key][0]
                return first
            if weight <= self.most_bytes:
                self._entries[key] = (made, weight)
                self.bytes += weight
                while self.bytes > self.most_bytes:
                    _, (_, gone) = self._entries.popitem(last=False)
                    self.bytes -= gone
        return made

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._entries.clear()
            self.bytes = 0


def sealed(array: Array) -> Array:
    """The array as one that nobody can write to, not even by its flags; give the only reference.

    Example:
        >>> sealed(np.zeros(2)).flags.writeable
        False
    """
    whole = np.ascontiguousarray(array)
    return np.frombuffer(whole.reshape(-1).data.toreadonly(), whole.dtype)


def _bytes(thing: Any) -> int:
    parts = thing if isinstance(thing, tuple) else tuple(getattr(thing, "__dict__", {}).values())
    return sum(part.nbytes for part in (thing, *parts) if isinstance(part, np.ndarray))
