"""Python batches of CIFAR: an unpickler that can build arrays of bytes and plain containers only.

No code of the file's choice runs and no code of NumPy sees the file: arrays become placeholders,
whose size, type and bytes are compared here. A first pass over the opcodes refuses those that
declare more than the file holds, on which Python's unpickler would take memory at once.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from typing import Any


def read_batch(data: bytes | bytearray, name: str) -> tuple[bytes, list[int], int]:
    """The pixel bytes, the labels and the number of classes (10 or 100) of a Python batch.

    Raises:
        ValueError: a pickle that asks for anything but arrays and containers, or is no batch.
    """
    try:
        _scan(data)
        batch = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except _Refused as error:
        raise ValueError(
            f"{name} asks for the Python object {error}, which a batch of images never needs; "
            "do not use this file"
        ) from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(f"{name} is not a Python batch of CIFAR or is damaged") from error
    if not isinstance(batch, dict):
        raise ValueError(f"{name} holds no dictionary; a batch holds data and labels")
    fields = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in batch.items()}
    pixels = fields.get("data")
    kind = "labels" if "labels" in fields else "fine_labels"
    labels = fields.get(kind)
    if not isinstance(pixels, _Array) or not isinstance(labels, list):
        raise ValueError(f"{name} lacks an array data and a list labels or fine_labels")
    if not all(type(label) is int and 0 <= label < 100 for label in labels):
        raise ValueError(f"{name} has labels that are not whole numbers in 0..99; get it again")
    return pixels.content(name), labels, 10 if kind == "labels" else 100


class _Refused(Exception):
    pass


class _Unpickler(pickle.Unpickler):
    """Resolves the few names that a pickled array uses, each to a placeholder."""

    def __init__(self, stream: io.BytesIO, *, encoding: str) -> None:
        super().__init__(stream, encoding=encoding)
        self._names = _admitted()

    def find_class(self, module: str, name: str) -> Any:
        """The placeholder for an admitted name; any other is refused before it is looked up."""
        if (module, name) not in self._names:
            raise _Refused(f"{module}.{name}"[:200].encode("unicode_escape").decode())
        return self._names[module, name]


class _Type:
    def __init__(self, code: object, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        pass


class _Array:
    """Where a pickled array would be: (version, shape, type, Fortran order, bytes)."""

    state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def content(self, name: str) -> bytes:
        """The bytes of a row-major array of unsigned bytes."""
        match self.state:
            case (_, tuple(shape), _Type(code="u1" | b"u1"), False | 0, bytes(raw)):
                whole = all(type(n) is int and n > 0 for n in shape)
                if whole and len(shape) == 2 and math.prod(shape) == len(raw):
                    return raw
        raise ValueError(f"{name} holds data that is no (N, 3072) array of unsigned bytes")


def _admitted() -> dict[tuple[str, str], Callable[..., object]]:
    """Placeholders by name; made anew for each file, since a pickle can set attributes on them."""

    def encode(text: str, codec: str) -> bytes:
        if codec != "latin1":
            raise _Refused(f"codec {codec!r}")
        return text.encode("latin1")

    def from_buffer(raw: bytes, kind: object, shape: object, order: str) -> _Array:
        array = _Array()
        array.__setstate__((1, shape, kind, order != "C", bytes(raw)))
        return array

    names: dict[tuple[str, str], Callable[..., object]] = {
        ("_codecs", "encode"): encode,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Type,
    }
    for core in ("numpy.core", "numpy._core"):
        names[f"{core}.multiarray", "_reconstruct"] = lambda *_: _Array()
        names[f"{core}.numeric", "_frombuffer"] = from_buffer
    return names


def _scan(data: bytes | bytearray) -> None:
    for count, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(data))):
        if "PUT" in opcode.name and isinstance(argument, int) and argument > count:
            raise ValueError("an opcode names a memory slot beyond those in use")
