"""A folder of image files, one folder a class."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from leakbound.data.images import Entry, collect, file_within_limit, is_image
from leakbound.data.raw import Options, Raw, read_file


def read_folder(path: Path, options: Options) -> Raw:
    """Images below a folder; the class is the folder that an image lies in.

    Other files and hidden ones are passed over. A symbolic link is followed only where it leads to
    a file inside the folder; a link to a folder, to nothing or to anything outside is refused.

    Raises:
        ValueError: no folder, no image, a link that is refused, or what `collect` refuses.
    """
    if not path.is_dir():
        raise ValueError(f"folder {str(path)!r} does not exist; check the path")
    root = path.resolve()
    entries: list[Entry] = []
    for here, folders, files in os.walk(root, onerror=_raise):
        for name in folders:
            if (Path(here) / name).is_symlink():
                raise ValueError(f"{name!r} is a link to a folder; put a copy in its place")
        for name in files:
            file = Path(here) / name
            relative = file.relative_to(root).as_posix()
            if is_image(relative):
                if file.is_symlink():
                    _check_link(file, root, relative)
                entries.append((relative, partial(_read, file, relative)))
    return collect(entries, options)


def _check_link(file: Path, root: Path, name: str) -> None:
    target = Path(os.path.realpath(file))  # of a link to itself, too
    if not target.is_relative_to(root):
        raise ValueError(
            f"image {name!r} is a link that leaves the folder; put a copy in its place"
        )
    if not target.exists():
        raise ValueError(f"image {name!r} is a link that leads nowhere; remove it")


def _read(file: Path, name: str) -> bytearray:
    if file.is_file():
        file_within_limit(name, file.stat().st_size)
    return read_file(file)


def _raise(error: OSError) -> None:
    raise error
