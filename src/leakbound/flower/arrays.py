"""Flower's array records as tensors and back, with checks before memory is taken.

A record says of each array its type, its shape and how its bytes are to be read, and the bytes say
it again. Whoever wrote it may lie in both: Flower's own reader allocates what the bytes announce.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from io import BytesIO
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.lib import format as npy
from torch import Tensor

MOST_BYTES = 2**32
"""The most bytes of arrays that one message may hold, where nothing else is said."""
HEADER = 10_000
"""The most bytes of an array's own header; longer ones are refused unread."""
STYPE = "numpy.ndarray"
KINDS = {"f": "floating-point", "i": "whole", "u": "whole", "b": "boolean"}
TYPES = frozenset(
    {
        *("float16", "float32", "float64", "bool"),
        *("int8", "int16", "int32", "int64", "uint8"),
    }
)


class NotFinite(ValueError):
    """A number that is none; which one it is may tell of what made it."""


def only_arrays(content: RecordDict, what: str) -> tuple[str, ArrayRecord]:
    """The key and value of the one array record of a message.

    Raises:
        ValueError: none, or several.
    """
    found = list(content.array_records.items())
    if len(found) != 1:
        names = ", ".join(repr(key) for key, _ in found) or "none"
        raise ValueError(
            f"{what} holds {len(found)} array records ({names}); put the weights, and nothing "
            "else, into one ArrayRecord"
        )
    return found[0]


def names(record: ArrayRecord, like: Mapping[str, Tensor], what: str) -> dict[str, str]:
    """The model's name for each key of a record: its own, or that of its place where numbered.

    A record of plain NumPy arrays (`get_weights`, Flower's `NumPyClient`) has the keys 0, 1, ...
    in the order of the model's state dict.

    Raises:
        ValueError: keys that the model does not have, or more or fewer numbers than it has tensors.
    """
    keys = list(record)
    if keys and keys == [str(i) for i in range(len(keys))] and keys[0] not in like:
        if len(keys) != len(like):
            raise ValueError(
                f"{what} holds {len(keys)} numbered arrays, and the model has {len(like)} tensors; "
                "send the values of model.state_dict() in their order"
            )
        return dict(zip(keys, like, strict=True))
    unknown = [key for key in keys if key not in like]
    if unknown:
        raise ValueError(
            f"{what} holds an array {unknown[0]!r}, which the model of the Setup does not have "
            f"(it has {', '.join(list(like)[:6])}{', ...' if len(like) > 6 else ''}); give the "
            "Setup the model that is trained"
        )
    return {key: key for key in keys}


def read(
    record: ArrayRecord, like: Mapping[str, Tensor], *, what: str, most_bytes: int = MOST_BYTES
) -> dict[str, Tensor]:
    """The tensors of a record by the model's names, in the types of `like`.

    Nothing is allocated before the record's declared type and shape, the header of its bytes and
    their length agree with each other and with `like` (a state dict).

    Raises:
        ValueError: naming the array and what is wrong with it.

    Example:
        >>> like = {"weight": torch.zeros(2, 3)}
        >>> record = ArrayRecord({"weight": Array(np.ones((2, 3), np.float32))})
        >>> read(record, like, what="the message")["weight"].sum()
        tensor(6.)
        >>> read(ArrayRecord({"bias": Array(np.ones(2))}), like, what="it")
        Traceback (most recent call last):
        ...
        ValueError: it holds an array 'bias', which the model of the Setup does not have (it has \
weight); give the Setup the model that is trained
    """
    total = sum(len(array.data) for array in record.values())
    if total > most_bytes:
        raise ValueError(
            f"{what} holds {total} bytes of arrays, more than the {most_bytes} that are allowed; "
            "give Setup a larger most_bytes if the model is that large"
        )
    found = {}
    for key, name in names(record, like, what).items():
        value = _values(record[key], like[name], f"{what}: array {key!r}")
        if not bool(torch.isfinite(value).all()):
            raise NotFinite(f"{what}: array {key!r} holds values that are NaN or infinite")
        found[name] = value.to(like[name].dtype)
    return found


def write(
    changed: Mapping[str, Tensor], record: ArrayRecord, like: Mapping[str, Tensor], what: str
) -> ArrayRecord:
    """A record with the keys, order and types of `record`: new values where `changed` has some."""
    fresh = {}
    for key, name in names(record, like, what).items():
        if name in changed:
            value = changed[name].detach().cpu().numpy()
            kind = record[key].dtype or value.dtype  # the older interface declares none
            fresh[key] = Array(value.astype(np.dtype(kind), copy=False))
        else:
            fresh[key] = record[key]
    return ArrayRecord(fresh)


def digest(record: ArrayRecord) -> str:
    """A name for all bytes of a record: another one if anything in it is changed."""
    total = hashlib.sha256()
    for key, array in record.items():
        total.update(repr((key, array.dtype, tuple(array.shape), len(array.data))).encode())
        total.update(array.data)
    return total.hexdigest()


def _values(array: Array, like: Tensor, where: str) -> Tensor:
    """The values of an array that is what it says, and what the model wants."""
    wanted, head = tuple(like.shape), array.data[:HEADER]
    if array.stype != STYPE:
        raise ValueError(f"{where} is stored as {array.stype!r}; only {STYPE!r} is read")
    shape, kind, order, start = _header(head, where)
    declared = bool(array.dtype or array.shape)  # Flower's older interface declares nothing
    if declared and (tuple(array.shape), array.dtype) != (shape, str(kind)):
        raise ValueError(
            f"{where} says {array.dtype[:40]} of shape {tuple(array.shape)}, but its own header "
            f"says {kind} of {shape}"
        )
    if str(kind) not in TYPES:
        raise ValueError(f"{where} has the type {kind}; known are {sorted(TYPES)}")
    if shape != wanted:
        raise ValueError(
            f"{where} has shape {shape}, but the model's is {wanted}; give the Setup the model "
            "that is trained"
        )
    _check_kind(kind, like, where)
    size = like.numel() * kind.itemsize
    if start + size != len(array.data):
        raise ValueError(
            f"{where} says {kind} of shape {shape}, which is {size} bytes, but "
            f"{len(array.data) - start} bytes follow its header"
        )
    flat = np.frombuffer(array.data, kind, like.numel(), start)
    return torch.from_numpy(flat.reshape(shape, order=order).copy(order="C"))


def _check_kind(dtype: np.dtype[Any], like: Tensor, where: str) -> None:
    own = KINDS[torch.empty(0, dtype=like.dtype).numpy().dtype.kind]
    if KINDS[dtype.kind] != own:
        raise ValueError(f"{where} holds {dtype} numbers, but the model's are {own}")


def _header(
    head: bytes, where: str
) -> tuple[tuple[int, ...], np.dtype[Any], Literal["C", "F"], int]:
    """Shape, type and order by the array's own header, and where the numbers start."""
    stream = BytesIO(head)
    try:
        version = npy.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"its format is {version}")
        reader = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, kind = reader(stream, max_header_size=HEADER)
    except Exception as error:  # a parser may fail in many ways on bytes that are made to
        raise ValueError(f"{where} has a header that cannot be read: {error}") from error
    return shape, kind, "F" if fortran else "C", stream.tell()
