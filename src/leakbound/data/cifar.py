"""The batch files of CIFAR-10 and CIFAR-100, binary and Python.

Python batches are pickles. Their unpickler can build only arrays of bytes and plain containers: a
file cannot choose code to run, and no NumPy code sees the file. Arrays become placeholders, whose
size, type and bytes are compared here. A first pass over the opcodes rejects those that declare
more than the file holds: Python's unpickler would allocate that memory at once.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leakbound.data.raw import Options, Raw, read_file, within_limit

_PIXELS = 3 * 32 * 32
_TEN = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_PYTHON = ("data_batch", "test_batch", "train", "test")


def read_cifar(path: Path, options: Options) -> Raw:
    """Images of a batch file, or of all of a folder by name; CIFAR-100 gives its fine labels."""
    files = _files(path)
    within_limit(f"the batches of {str(path)!r}", sum(file.stat().st_size for file in files))
    parts = [_binary(f) if f.suffix == ".bin" else _python(f) for f in files]
    kinds = {classes for _, _, classes in parts}
    if len(kinds) > 1:
        raise ValueError(f"{str(path)!r} holds batches of CIFAR-10 and CIFAR-100; name one file")
    classes = kinds.pop()
    images, labels = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"{str(path)!r} has labels from {low} to {high}; "
            f"CIFAR-{classes} has 0..{classes - 1}: download it again"
        )
    names = _TEN if classes == 10 else tuple(str(k) for k in range(classes))
    return Raw(images.reshape(-1, 3, 32, 32), labels, names)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{str(path)!r} does not exist; check the path")
    files = sorted(file for file in path.iterdir() if file.is_file())
    binary = [file for file in files if file.suffix == ".bin"]
    python = [f for f in files if not f.suffix and f.name.rstrip("_0123456789") in _PYTHON]
    if binary and python:
        raise ValueError(f"{str(path)!r} holds binary and Python batches; name one file")
    if not binary and not python:
        raise ValueError(f"{str(path)!r} holds no batch such as data_batch_1 or data_batch_1.bin")
    return binary or python


def _binary(path: Path) -> tuple[Tensor, Tensor, int]:
    data = read_file(path)
    if not data:
        raise ValueError(f"{str(path)!r} is empty; download it again")
    widths = {10: _PIXELS + 1, 100: _PIXELS + 2}
    fitting = [classes for classes, width in widths.items() if len(data) % width == 0]
    if not fitting:
        raise ValueError(
            f"{str(path)!r} has {len(data)} bytes, a multiple of neither 3073 (CIFAR-10) nor 3074 "
            "(CIFAR-100); download it again"
        )
    if len(fitting) > 1:
        stem = path.stem.rstrip("_0123456789")
        fitting = [10] * (stem in _PYTHON[:2]) + [100] * (stem in _PYTHON[2:])
    if len(fitting) != 1:
        raise ValueError(
            f"{str(path)!r} fits CIFAR-10 and CIFAR-100 by its size; rename it to test_batch.bin "
            "(CIFAR-10) or test.bin (CIFAR-100)"
        )
    table = torch.frombuffer(data, dtype=torch.uint8).reshape(-1, widths[fitting[0]])
    return table[:, -_PIXELS:], table[:, -_PIXELS - 1].long(), fitting[0]


def _python(path: Path) -> tuple[Tensor, Tensor, int]:
    data, name = read_file(path), repr(str(path))
    try:
        _scan(data)
        batch = _Unpickler(io.BytesIO(data)).load()
    except _RefusedPickle as error:
        raise ValueError(
            f"{name} asks for the Python object {error}, which a batch of images never needs; "
            "do not use this file"
        ) from error
    except Exception as error:  # a damaged pickle raises almost any exception
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
        raise ValueError(
            f"{name} has labels that are not whole numbers in 0..99; download it again"
        )
    raw = pixels.content(name)
    if len(raw) != len(labels) * _PIXELS or not labels:
        raise ValueError(
            f"{name} holds {len(raw)} bytes of pixels and {len(labels)} labels; "
            f"give {_PIXELS} bytes per label"
        )
    table = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(-1, _PIXELS)
    return table, torch.tensor(labels), 10 if kind == "labels" else 100


class _RefusedPickle(Exception):
    pass


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, encoding="bytes")
        self._names = _admitted()

    def find_class(self, module: str, name: str) -> Any:
        """The placeholder for an admitted name; any other is rejected before it is looked up."""
        if (module, name) not in self._names:
            raise _RefusedPickle(f"{module}.{name}"[:200].encode("unicode_escape").decode())
        return self._names[module, name]


class _Type:
    def __init__(self, code: object, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        pass


class _Array:
    """The placeholder of a pickled array: (version, shape, type, Fortran order, bytes)."""

    state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def content(self, name: str) -> bytes:
        match self.state:
            case (_, tuple(shape), _Type(code="u1" | b"u1"), False | 0, bytes(raw)):
                whole = all(type(n) is int and n > 0 for n in shape)
                if whole and len(shape) == 2 and math.prod(shape) == len(raw):
                    return raw
        raise ValueError(f"{name} holds data that is not an (N, 3072) array of unsigned bytes")


def _admitted() -> dict[tuple[str, str], Callable[..., object]]:
    """Placeholders by name; new for each file, since a pickle can set attributes on them."""

    def encode(text: str, codec: str) -> bytes:
        if codec != "latin1":
            raise _RefusedPickle(f"codec {codec!r}")
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
