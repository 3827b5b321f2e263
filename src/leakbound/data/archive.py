"""Zip archives, read in place: nothing is unpacked, names in them are only text."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from leakbound.data.images import Entry, collect, file_within_limit, is_image
from leakbound.data.raw import Options, Raw, take, within_limit

_DAMAGE = (
    zipfile.BadZipFile,
    EOFError,
    NotImplementedError,
    RuntimeError,
    UnicodeDecodeError,
    struct.error,
    zlib.error,
)


def read_zip(path: Path, options: Options) -> Raw:
    """Images inside a zip archive; the class is the folder that an image lies in.

    Other files are passed over, as are hidden ones and those of macOS (`__MACOSX`).

    Raises:
        ValueError: not a zip archive, damaged, no image, too large, or what `collect` refuses.
    """
    with open_archive(path) as archive:
        entries: list[Entry] = []
        total = 0
        for member in archive.infolist():
            name = "/".join(part for part in member.filename.replace("\\", "/").split("/") if part)
            if not member.is_dir() and is_image(name):
                file_within_limit(name, member.file_size)
                total += member.file_size
                entries.append((name, partial(_read, archive, member)))
        within_limit(f"the images of archive {str(path)!r}", total)
        return collect(entries, options)


@contextmanager
def open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """A zip archive to read from; damage becomes a ValueError."""
    if not path.is_file():
        raise ValueError(f"file {str(path)!r} does not exist or is no file; check the path")
    try:
        archive = zipfile.ZipFile(path)
    except _DAMAGE as error:
        raise ValueError(f"{str(path)!r} is not a zip archive or is damaged") from error
    with archive:
        yield archive


@contextmanager
def open_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Iterator[IO[bytes]]:
    """A file of the archive as a stream that gives no more than the archive declares.

    Only stored and deflated files are read: Python unpacks the other methods without a bound.
    """
    name = member.filename
    if member.flag_bits & 1:
        raise ValueError(f"{name!r} in the archive is encrypted; save it without a password")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name!r} in the archive is not deflated; save it as an ordinary zip")
    try:
        with archive.open(member) as stream:
            yield stream
    except _DAMAGE as error:
        raise ValueError(f"{name!r} in the archive is damaged; save the archive again") from error


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytearray:
    with open_member(archive, member) as stream:
        data = take(stream, member.file_size)
    if len(data) != member.file_size:
        raise ValueError(
            f"{member.filename!r} in the archive declares {member.file_size} bytes, but holds "
            f"{len(data)}; save the archive again"
        )
    return data
