"""Zip archives and the arrays in them, read in place; memory follows the actual size."""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import numpy as np

from leakbound._util import files

# What zipfile raises for a file that was cut off or altered.
DAMAGE = (
    zipfile.BadZipFile,
    EOFError,
    NotImplementedError,
    OSError,
    RuntimeError,
    UnicodeDecodeError,
    struct.error,
    zlib.error,
)
_HEADER = 12_000  # NumPy reads headers of up to 10,000 characters
_CHUNK = 1 << 20
Array = np.ndarray


class Stream(Protocol):
    """A source of bytes."""

    def read(self, size: int, /) -> bytes: ...


def take(
    stream: Stream,
    most: int,
    begun: bytearray | None = None,
) -> bytearray:
    """Read up to `most` bytes, in chunks: memory follows the actual size, not the declared one.

    `begun` holds the first bytes already; reading continues after them.
    """
    data = bytearray() if begun is None else begun
    while len(data) < most and (chunk := stream.read(min(_CHUNK, most - len(data)))):
        data += chunk
    return data


@contextmanager
def open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive without duplicate names for reading; errors name the archive."""
    files.check_regular(path)
    try:
        archive = zipfile.ZipFile(path)
    except DAMAGE as error:
        raise ValueError(f"{str(path)!r} is not a zip archive or is damaged") from error
    with archive:
        try:
            if not all(info.filename for info in archive.infolist()):
                raise ValueError("it holds a file without a name; save it again")
            # Programs differ in which of two equal names they read, so a check could miss one.
            names = Counter(info.filename for info in archive.infolist() if not info.is_dir())
            twice = [name for name, count in names.items() if count > 1]
            if twice:
                raise ValueError(f"it holds {twice[0]!r} twice; save it with one file of each name")
            yield archive
        except ValueError as error:
            raise ValueError(f"archive {str(path)!r}: {error}") from error


@contextmanager
def open_member(
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
) -> Iterator[IO[bytes]]:
    """A file of the archive as a stream that gives at most the size that the archive declares.

    Only stored and deflated files are read: Python unpacks the other methods without a limit.
    """
    name = member.filename
    if member.flag_bits & 1:
        raise ValueError(f"{name!r} in the archive is encrypted; save it without a password")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name!r} in the archive is not deflated; save it as an ordinary zip")
    try:
        with archive.open(member) as stream:
            yield stream
    except DAMAGE as error:
        raise ValueError(f"{name!r} in the archive is damaged; save the archive again") from error


def read_array(
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    most: int,
) -> Array:
    """A numeric array of a NumPy archive, read without pickle.

    The size in its header must equal the file's, and be at most `most` bytes.
    """
    name = repr(member.filename)
    with open_member(archive, member) as stream:
        head = take(stream, _HEADER)
        header = _header(name, head, member.file_size)
        if member.file_size - header.start > most:
            raise ValueError(
                f"array {name} takes {member.file_size / 2**30:.1f} GiB; the limit is "
                f"{most / 2**30:.1f} GiB: give a smaller limit or size, or fewer images"
            )
        data = take(stream, member.file_size, head)
    if len(data) != member.file_size:
        raise ValueError(f"{name} is truncated; save it again")
    return header.array(data)


def of_bytes(name: str, data: bytes) -> Array:
    """An array from bytes in NumPy's format, as in a Flower message; no pickle, and no copy.

    Raises:
        ValueError: the header declares another size than the data has, or values are not numbers;
            `name` begins the text.

    Example:
        >>> stream = io.BytesIO()
        >>> np.save(stream, np.ones(3), allow_pickle=False)
        >>> of_bytes("ones", stream.getvalue()).sum()
        np.float64(3.0)
    """
    return _header(name, data[:_HEADER], len(data)).array(data)


class _Header(NamedTuple):
    """What an array's own header declares, and where its numbers start."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype
    start: int

    def array(self, data: bytes | bytearray) -> Array:
        flat = np.frombuffer(data, self.dtype, offset=self.start)
        return flat.reshape(self.shape, order="F" if self.fortran else "C")


def _header(
    name: str,
    head: bytes | bytearray,
    size: int,
) -> _Header:
    """The header of an array of numbers, which takes `size` bytes together with them."""
    stream = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
        else:
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
    except Exception as error:  # a header is Python text: parsing it can raise almost any exception
        raise ValueError(f"{name} has no readable array header; save it with np.savez") from error
    # Long doubles differ between machines, and PyTorch has none.
    if dtype.kind not in "uifb" or dtype.itemsize > 8:
        pickled = " (Python objects are pickles, which can run code)" if dtype.hasobject else ""
        raise ValueError(
            f"{name} holds values of type {dtype}{pickled}; give whole numbers or floats"
        )
    if not all(type(n) is int and n >= 0 for n in shape):  # True equals 1
        raise ValueError(f"{name} declares shape {shape}; save it again with np.savez")
    start = stream.tell()
    # Python's whole numbers do not overflow, so huge sides cannot pass as a small array.
    declared = math.prod(shape) * dtype.itemsize
    if declared != size - start:
        raise ValueError(
            f"{name} declares shape {shape} of {dtype}, {declared} bytes, but holds "
            f"{size - start}; save or send it again"
        )
    return _Header(shape, fortran, dtype, start)
