"""A cache of the latest results, as many as fit a memory limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from threading import Lock
from typing import Generic, TypeVar

from torch import Tensor, nn

T = TypeVar("T")
MOST_BYTES = 2**28
LEAST = 2


class RecentCache(Generic[T]):
    """Results for the latest keys; a key without equality is compared by identity.

    A key whose tensors were overwritten since counts as another key. The tensors of all results and
    keys take at most `most_bytes`; the latest two results always stay.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._lock = Lock()
        self._held: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The stored result of `make` for this key, or a new one; a failure is not stored."""
        # A tensor that was overwritten in place keeps its identity; only its version differs.
        key = key, tuple(_version(tensor) for tensor in tensors(key))
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key][0]
        # Outside of the lock, which is not reentrant: `make` may ask this cache itself.
        result = make()
        with self._lock:
            self._held[key] = result, size(result) + size(key)
            while len(self._held) > LEAST and sum(b for _, b in self._held.values()) > self._most:
                self._held.popitem(last=False)
        return result


def size(value: object) -> int:
    """The bytes of all tensors in the value."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(value))


def tensors(value: object) -> Iterator[Tensor]:
    """All tensors in a tensor, module, dataclass, mapping or sequence of these."""
    if isinstance(value, Tensor):
        yield value
        return
    parts: Iterable[object] = ()
    if isinstance(value, nn.Module):
        parts = (*value.parameters(), *value.buffers())
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    for part in parts:
        yield from tensors(part)


def _version(tensor: Tensor) -> int:
    """How often it was overwritten; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version
