"""Image files in a folder or a zip archive: decoded one at a time, grouped into classes.

Archives are never unpacked; the names in them are only text.
"""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from leakbound.data.raw import (
    Options,
    Raw,
    fit,
    interleave,
    read_file,
    shape_after,
    within_limit,
)
from leakbound.tensors.archive import open_archive, open_member, take

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MAX_FILE = 256 << 20
MAX_PIXELS = 50_000_000
WRITERS: dict[str, str] = {
    "first": "the first part of the file's name, parts being joined by _ or -: WRITER_0001.png",
    "last": "the last part of the file's name: 0108_WRITER.png",
    "outer_folder": "the folder above that of the class: WRITER/CLASS/0001.png",
    "inner_folder": "the folder below that of the class: CLASS/WRITER/0001.png",
}
"""The part of an image's name that identifies its writer -> one line about it."""

_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "PPM")

_FOLDER = {
    "outer_folder": (2, "WRITER/CLASS/image"),
    "inner_folder": (1, "CLASS/WRITER/image"),
}
"""Rule -> how many levels above the image the writer's folder is, and the form for errors."""

Entry = tuple[str, Callable[[], bytes | bytearray]]
"""The name of an image, with / between its folders, and a function that reads its bytes."""


def read_folder(path: Path, options: Options) -> Raw:
    """Images in a folder; a symbolic link is followed only to a file inside the folder."""
    if not path.is_dir():
        raise ValueError(f"folder {str(path)!r} does not exist; check the path")
    root = path.resolve()
    entries: list[Entry] = []
    for here, folders, files in os.walk(root, onerror=_raised):
        for name in folders:
            if (Path(here) / name).is_symlink():
                raise ValueError(f"{name!r} is a link to a folder; put a copy in its place")
        for name in files:
            file = Path(here) / name
            relative = file.relative_to(root).as_posix()
            if _is_image(relative):
                if file.is_symlink():
                    _check_link(file, root, relative)
                entries.append((relative, partial(_read_file, file, relative)))
    return _collect(entries, options)


def _check_link(file: Path, root: Path, name: str) -> None:
    target = Path(os.path.realpath(file))  # of a link to itself, too
    if not target.is_relative_to(root):
        raise ValueError(
            f"image {name!r} is a link to a file outside the folder; put a copy in its place"
        )
    if not target.exists():
        raise ValueError(f"image {name!r} is a broken link; remove it")


def _read_file(file: Path, name: str) -> bytearray:
    if file.is_file():
        _check_size(name, file.stat().st_size)
    return read_file(file)


def _raised(error: OSError) -> None:
    raise error


def read_zip(path: Path, options: Options) -> Raw:
    """Images inside a zip archive, as `read_folder`; macOS's own files are skipped."""
    with open_archive(path) as archive:
        entries: list[Entry] = []
        total = 0
        for member in archive.infolist():
            name = "/".join(part for part in member.filename.replace("\\", "/").split("/") if part)
            if not member.is_dir() and _is_image(name):
                _check_size(name, member.file_size)
                total += member.file_size
                entries.append((name, partial(_read_member, archive, member)))
        within_limit(f"the images of archive {str(path)!r}", total)
        return _collect(entries, options)


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytearray:
    with open_member(archive, member) as stream:
        data = take(stream, member.file_size)
    if len(data) != member.file_size:
        raise ValueError(
            f"{member.filename!r} in the archive declares {member.file_size} bytes, but holds "
            f"{len(data)}; save the archive again"
        )
    return data


def _is_image(name: str) -> bool:
    parts = name.split("/")
    hidden = any(p == "__MACOSX" or (p.startswith(".") and p not in (".", "..")) for p in parts)
    return name.lower().endswith(SUFFIXES) and not hidden


def _check_size(name: str, size: int) -> None:
    if size > MAX_FILE:
        raise ValueError(
            f"image {name!r} declares {size} bytes; the limit is {MAX_FILE}: remove it"
        )


def _collect(entries: list[Entry], options: Options) -> Raw:
    """Images of equal size and channels, one of each class in turn, classes sorted by name.

    The class is the image's folder, below the folder that all images share; 'all' at the top. A
    folder that names the writer (see `WRITERS`) is first removed from the path.
    """
    if not entries:
        raise ValueError(f"it holds no image; give files that end in {', '.join(SUFFIXES)}")
    entries = sorted(entries, key=lambda entry: entry[0])
    origins = [_origin(name, options.writer) for name, _ in entries]
    labels, names = _numbers(_classes([folders for _, folders in origins]))
    order = interleave(labels)[: options.limit]
    dealt = [entries[k] for k in order.tolist()]
    files = tuple(_printable(name) for name, _ in dealt)
    raw = Raw(_decode_all(dealt, options), labels[order], names, files=files)
    if options.writer is None:
        return raw
    writers, writer_names = _numbers([writer for writer, _ in origins])
    return replace(raw, writers=writers[order], writer_names=writer_names)


def decode(data: bytes | bytearray, name: str) -> Tensor:
    """One image (C, H, W), uint8, or float32 in [0, 1] if the file has 16 bits.

    Gray stays gray; palettes and all other colors become RGB; alpha is dropped. Pixels are as
    stored: the camera's orientation tag is not applied.
    """
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                _check_header(image, name)
                pixels = _pixels(image, name)
        except _Refused:
            raise
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise ValueError(f"image {name!r} has too many pixels; resize it") from error
        except Exception as error:  # a broken file makes Pillow raise almost any exception
            raise ValueError(
                f"image {name!r} cannot be read; it is damaged, truncated or not an image"
            ) from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


class _Refused(ValueError):
    pass


def _check_header(image: Image, name: str) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise _Refused(
            f"image {name!r} declares {width} x {height} pixels; the limit is {MAX_PIXELS}: "
            "resize it"
        )
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":
        raise _Refused(f"image {name!r} holds {frames} pictures; give one picture per file")


def _pixels(image: Image, name: str) -> np.ndarray:
    if image.mode in ("1", "L"):
        return np.array(image.convert("L"))[..., None]
    if image.mode.startswith("I"):
        wide = np.array(image)[..., None]
        if wide.min() < 0 or wide.max() > 65535:
            raise _Refused(f"image {name!r} has values outside 0..65535; save it with 16 bits")
        return (wide / 65535).astype(np.float32)
    if image.mode == "F":
        raise _Refused(f"image {name!r} holds floats, whose range is not known; save it as PNG")
    if "transparency" in image.info:
        image = image.convert("RGBA")
    return np.array(image.convert("RGB"))


def _decode_all(entries: list[Entry], options: Options) -> Tensor:
    images, first = torch.empty(0), ""
    for k, (name, read) in enumerate(entries):
        image = decode(read(), name)
        shape = shape_after(image.shape, options)
        if k == 0:
            first = name
            size = 4 * len(entries) * math.prod(shape)
            within_limit(f"{len(entries)} images of {shape}", size)
            images = torch.empty(len(entries), *shape)
        channels, *sides = images.shape[1:]
        if [*shape[1:]] != sides:
            raise ValueError(
                f"image {name!r} has {shape[1]} x {shape[2]} pixels, but {first!r} has "
                f"{sides[0]} x {sides[1]}; give a size to resize all to, such as size = 32"
            )
        if shape[0] != channels:
            raise ValueError(
                f"image {name!r} has {shape[0]} channels, but {first!r} has {channels}; "
                "give channels = 1 (gray) or channels = 3 (RGB)"
            )
        images[k] = fit(image[None], options)[0]
    return images


def _classes(parents: list[tuple[str, ...]]) -> list[str]:
    low, high = min(parents), max(parents)
    shared = 0
    while shared < min(len(low), len(high)) and low[shared] == high[shared]:
        shared += 1
    return ["/".join(p[shared:]) or (p[-1] if p else "all") for p in parents]


def _numbers(words: list[str]) -> tuple[Tensor, tuple[str, ...]]:
    """Each word's index in the sorted list of different words, and that list."""
    names = sorted(set(words))
    place = {name: k for k, name in enumerate(names)}
    return torch.tensor([place[word] for word in words]), tuple(_printable(name) for name in names)


def _origin(name: str, rule: str | None) -> tuple[str, tuple[str, ...]]:
    """The writer of the image with that name, by a rule, and the folders left for its class."""
    path = PurePosixPath(name)
    folders = path.parent.parts
    if rule is None:
        return "", folders
    if rule in _FOLDER:
        place, form = _FOLDER[rule]
        if len(folders) < place:
            raise ValueError(
                f"image {name!r} has {len(folders)} folders above it; writer = {rule!r} needs "
                f"{form}"
            )
        at = len(folders) - place
        return folders[at], folders[:at] + folders[at + 1 :]
    parts = [part for part in path.stem.replace("-", "_").split("_") if part]
    if not parts:
        raise ValueError(
            f"image {name!r} names no writer; for writer = {rule!r} give a name such as "
            f"{'07_0108' if rule == 'first' else '0108_07'}{path.suffix}"
        )
    return parts[0 if rule == "first" else -1], folders


def _printable(name: str) -> str:
    return name.encode("utf-8", "replace").decode("utf-8")
