"""Zip archives, read in place: nothing is unpacked, names in them are only text."""

from __future__ import annotations

import zipfile
from functools import partial
from pathlib import Path

from leakbound.data.images import Entry, collect, file_within_limit, is_image
from leakbound.data.raw import Options, Raw, within_limit
from leakbound.tensors.archive import open_archive, open_member, take


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


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytearray:
    with open_member(archive, member) as stream:
        data = take(stream, member.file_size)
    if len(data) != member.file_size:
        raise ValueError(
            f"{member.filename!r} in the archive declares {member.file_size} bytes, but holds "
            f"{len(data)}; save the archive again"
        )
    return data
