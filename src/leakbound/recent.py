"""Results that are kept for a while: the latest ones, as many as fit a limit of memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from threading import Lock
from typing import Generic, TypeVar

from torch import Tensor

T = TypeVar("T")
MOST_BYTES = 2**28
LEAST = 2


class Recent(Generic[T]):
    """What was computed for the latest keys; a key is held by identity where it has no equality.

    Args:
        most_bytes: how much the tensors of all results may take. The latest two stay anyway.

    Example:
        >>> kept = Recent[int]()
        >>> kept.get("a", lambda: 1), kept.get("a", lambda: 2)
        (1, 1)
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._lock = most_bytes, Lock()
        self._held: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gave when the key was last met, or gives now; a failure is not kept."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key][0]
        found = make()
        with self._lock:
            self._held[key] = found, size(found)
            while len(self._held) > LEAST and self._bytes() > self._most:
                self._held.popitem(last=False)
        return found

    def _bytes(self) -> int:
        return sum(own for _, own in self._held.values())


def size(value: object) -> int:
    """The bytes of all tensors in a tensor, dataclass, mapping or sequence of such.

    Example:
        >>> import torch
        >>> size({"a": (torch.zeros(3), torch.zeros(1, dtype=torch.float64)), "b": 1})
        20
    """
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(size(part) for part in value.values())
    if isinstance(value, list | tuple):
        return sum(size(part) for part in value)
    if is_dataclass(value):
        return sum(size(getattr(value, field.name)) for field in fields(value))
    return 0
