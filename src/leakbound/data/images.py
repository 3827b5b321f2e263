"""Image files in a folder or a zip archive: decoded one at a time, grouped into classes.

Archives are never unpacked; the names in them are only text.
"""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from leakbound._util import files
from leakbound.data import dicom
from leakbound.data.raw import (
    MAX_PIXELS,
    Options,
    Raw,
    RefusedImage,
    fit,
    interleave,
    read_file,
    shape_after,
    within_limit,
)
from leakbound.tensors.archive import open_archive, open_member, take

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (
    ".png",
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".bmp",
    ".dib",
    ".webp",
    ".avif",
    ".gif",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
    ".pbm",
    ".pnm",
)
OPTIONAL = {".webp": "webp", ".avif": "avif"}
"""Ending -> Pillow's name of the decoder, which it can lack."""
DARK = 0.25
"""Part of the range of 16 bits up to which images are taken for ones of fewer bits."""
TYPES = 8
"""Types of files that a note names."""
WIDE = 65535
"""Highest value of 16 bits."""
MAX_FILE = 256 << 20
WRITERS: dict[str, str] = {
    "first": "the first part of the file's name, parts being joined by _ or -: WRITER_0001.png",
    "last": "the last part of the file's name: 0108_WRITER.png",
    "outer_folder": "the folder above that of the class: WRITER/CLASS/0001.png",
    "inner_folder": "the folder below that of the class: CLASS/WRITER/0001.png",
}
"""The part of an image's name that identifies its writer -> one line about it."""

_FORMATS = ("PNG", "JPEG", "BMP", "DIB", "WEBP", "AVIF", "GIF", "TIFF", "PPM")
_MARKED = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "TIFF")
"""Formats whose first bytes no text has by chance."""

_FOLDER = {
    "outer_folder": (2, "WRITER/CLASS/image"),
    "inner_folder": (1, "CLASS/WRITER/image"),
}
"""Rule -> how many levels above the image the writer's folder is, and the form for errors."""


@dataclass(frozen=True)
class _Entry:
    """An image: its name, with / between its folders, and functions that read and decode it."""

    name: str
    read: Callable[[], bytes | bytearray]
    decode: Callable[[bytes | bytearray, str], Tensor]


@dataclass
class _Found:
    """The files of a folder or an archive: images, and how many others of each type."""

    images: list[_Entry] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)
    folders: dict[str, Counter[str]] = field(default_factory=dict)

    def add(
        self, name: str, read: Callable[[], bytes | bytearray], head: Callable[[], bytes]
    ) -> None:
        """Take a file for an image by its ending, or without one by its first bytes."""
        decoder = _decoder(name, head)
        if decoder is not None:
            self.images.append(_Entry(name, read, decoder))
            return
        kind = PurePosixPath(name).suffix.lower() or "without an ending"
        self.others[kind] += 1
        self.folder(_parent(name))[kind] += 1

    def folder(self, name: str) -> Counter[str]:
        """The types of other files in a folder, which has no image if nothing else is found."""
        return self.folders.setdefault(name, Counter())

    def check(self) -> None:
        """Reject a folder without an image in it or below: its class would vanish."""
        used = {str(place) for own in self.images for place in PurePosixPath(own.name).parents}
        above = {str(place) for name in self.folders for place in PurePosixPath(name).parents}
        for name, types in sorted(self.folders.items()):
            if name in used or name == "." or (name in above and not types):
                continue
            held = f"only {_listed(types)}" if types else "no file"
            raise ValueError(
                f"folder {_printable(name)!r} holds {held}, and no image that is read; save its "
                "images as PNG or JPEG, or move the folder away"
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out."""
        if not self.others:
            return ()
        total = self.others.total()
        what = "1 file of a type that is" if total == 1 else f"{total} files of types that are"
        return (f"left out {what} not read: {_listed(self.others)}",)


def _listed(types: Counter[str]) -> str:
    shown = [f"{count} {_printable(kind)}" for kind, count in types.most_common(TYPES)]
    return ", ".join(shown) + (", ..." if len(types) > TYPES else "")


def _parent(name: str) -> str:
    return str(PurePosixPath(name).parent)


def read_folder(path: Path, options: Options) -> Raw:
    """Images in a folder; a symbolic link is followed only to a file inside the folder."""
    if not path.is_dir():
        raise ValueError(f"folder {str(path)!r} does not exist; check the path")
    root = path.resolve()
    found = _Found()
    # Without `onerror`, a folder that cannot be read would be skipped silently.
    for here, folders, names in os.walk(root, onerror=_raised):
        for name in folders:
            # `os.walk` does not follow it, so its class would vanish.
            if (Path(here) / name).is_symlink():
                raise ValueError(f"{name!r} is a link to a folder; put a copy in its place")
        if _hidden(place := Path(here).relative_to(root).as_posix()):
            continue
        found.folder(place)
        for name in names:
            file = Path(here) / name
            relative = file.relative_to(root).as_posix()
            if _hidden(relative):
                continue
            if file.is_symlink() and file.suffix.lower() in ("", *SUFFIXES, *dicom.SUFFIXES):
                _check_link(file, root, relative)
            found.add(relative, partial(_read_file, file, relative), partial(_head, file))
    return _collect(found, options)


def _head(file: Path) -> bytes:
    if not file.is_file():
        return b""
    with files.opened(file) as stream:
        return stream.read(dicom.HEAD)


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
        found = _Found()
        total = 0
        for member in archive.infolist():
            # Some Windows programs write backslashes, against the zip format's specification.
            name = "/".join(part for part in member.filename.replace("\\", "/").split("/") if part)
            if _hidden(name):
                continue
            found.folder(name if member.is_dir() else _parent(name))
            if not member.is_dir():
                head = partial(_head_of_member, archive, member)
                found.add(name, partial(_read_member, archive, member), head)
                if found.images and found.images[-1].name == name:
                    _check_size(name, member.file_size)
                    total += member.file_size
        within_limit(f"the images of archive {str(path)!r}", total)
        return _collect(found, options)


def _head_of_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    with open_member(archive, member) as stream:
        return bytes(take(stream, dicom.HEAD))


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytearray:
    with open_member(archive, member) as stream:
        data = take(stream, member.file_size)
    if len(data) != member.file_size:
        raise ValueError(
            f"{member.filename!r} in the archive declares {member.file_size} bytes, but holds "
            f"{len(data)}; save the archive again"
        )
    return data


def _hidden(name: str) -> bool:
    parts = name.split("/")
    return any(p == "__MACOSX" or (p.startswith(".") and p not in (".", "..")) for p in parts)


def _decoder(
    name: str, head: Callable[[], bytes]
) -> Callable[[bytes | bytearray, str], Tensor] | None:
    """What decodes a file of that name; None if it is of no type that is read."""
    suffix = PurePosixPath(name).suffix.lower()
    if suffix in dicom.SUFFIXES:
        return dicom.decode
    if suffix:
        return decode if suffix in _readable() else None
    # DICOM files often have no ending.
    begin = head()
    if dicom.begins(begin):
        return dicom.decode
    return decode if _is_picture(begin) else None


@cache
def _readable() -> frozenset[str]:
    """The endings of files that the installed Pillow reads."""
    from PIL import features

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of decoders that an older Pillow does not know
        lacking = {end for end, name in OPTIONAL.items() if not features.check(name)}
    return frozenset(SUFFIXES) - lacking


@cache
def _formats() -> tuple[str, ...]:
    """The formats that the installed Pillow knows."""
    from PIL import Image

    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _is_picture(head: bytes) -> bool:
    """Whether a file begins as an image."""
    from PIL import Image

    tests = (Image.OPEN[name][1] for name in _formats() if name in _MARKED)
    # Pillow gives its tests 16 bytes; they return a text where a decoder is missing.
    return any(test is not None and test(head[:16]) is True for test in tests)


def _check_size(name: str, size: int) -> None:
    if size > MAX_FILE:
        raise ValueError(
            f"image {name!r} declares {size} bytes; the limit is {MAX_FILE}: remove it"
        )


def _collect(found: _Found, options: Options) -> Raw:
    """Images of equal size and channels, one of each class in turn, classes sorted by name.

    The class is the image's folder, below the folder that all images share; 'all' at the top. A
    folder that names the writer (see `WRITERS`) is first removed from the path.
    """
    if not found.images:
        held = f" ({_listed(found.others)})" if found.others else ""
        raise ValueError(f"it holds no image{held}; give files that end in {', '.join(SUFFIXES)}")
    found.check()
    entries = sorted(found.images, key=lambda entry: entry.name)
    origins = [_origin(entry.name, options.writer) for entry in entries]
    labels, names = _numbers(_classes([folders for _, folders in origins]))
    order = interleave(labels)[: options.limit]
    dealt = [entries[k] for k in order.tolist()]
    images, dark = _decode_all(dealt, options)
    named = tuple(_printable(entry.name) for entry in dealt)
    raw = Raw(images, labels[order], names, files=named, notes=(*found.notes, *dark))
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
        # Pillow only warns of a bomb between one and two limits, and would decode it
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            # Of Pillow's formats only these: that of EPS, for one, would start Ghostscript.
            with Image.open(io.BytesIO(data), formats=_formats()) as image:
                _check_header(image, name)
                pixels = _pixels(image, name)
        except RefusedImage:
            raise
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise ValueError(f"image {name!r} has too many pixels; resize it") from error
        except Exception as error:  # a broken file makes Pillow raise almost any exception
            raise ValueError(
                f"image {name!r} cannot be read; it is damaged, truncated or not an image"
            ) from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _check_header(image: Image, name: str) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise RefusedImage(
            f"image {name!r} declares {width} x {height} pixels; the limit is {MAX_PIXELS}: "
            "resize it"
        )
    # Phones save a photo and its preview as MPO; the first one is the photo.
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":
        raise RefusedImage(
            f"image {name!r} holds {frames} pictures; save the one that you mean as a file"
        )


def _pixels(image: Image, name: str) -> np.ndarray:
    if image.mode in ("1", "L"):
        return np.array(image.convert("L"))[..., None]
    if image.mode.startswith("I"):
        wide = np.array(image)[..., None]
        if wide.min() < 0 or wide.max() > WIDE:
            raise RefusedImage(f"image {name!r} has values outside 0..{WIDE}; save it with 16 bits")
        return (wide / WIDE).astype(np.float32)
    if image.mode == "F":
        raise RefusedImage(f"image {name!r} holds floats, whose range is not known; save it as PNG")
    if "transparency" in image.info:
        image = image.convert("RGBA")
    return np.array(image.convert("RGB"))


def _decode_all(entries: list[_Entry], options: Options) -> tuple[Tensor, Iterable[str]]:
    """The images (N, C, H, W), and a note if those of 16 bits use only a part of their range."""
    images = torch.empty(0)  # its size is known once the first image is decoded
    first = ""
    most = 0.0
    wide = True
    for k, entry in enumerate(entries):
        name = entry.name
        image = _scaled(entry, options.bits)
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
        # The header of a DICOM file says how many bits it uses.
        wide = wide and image.is_floating_point() and entry.decode is decode
        most = max(most, float(image.max())) if wide else most
    if not wide or not 0 < most <= DARK or options.bits is not None:
        return images, ()
    bits = round(most * WIDE).bit_length()
    return images, (
        f"the images have 16 bits, but use only values up to {most:.3f} of that range; for values "
        f"of {bits} bits set bits = {bits} in [data] of a plan",
    )


def _scaled(entry: _Entry, bits: int | None) -> Tensor:
    """The image; values of 16 bits as parts of the range of `bits` bits."""
    image: Tensor = entry.decode(entry.read(), entry.name)
    if bits is None:
        return image
    if not image.is_floating_point() or entry.decode is not decode:
        raise ValueError(
            f"bits is {bits}, which image {entry.name!r} does not need: it has 8 bits, or its "
            "header says how many; leave bits out"
        )
    scaled: Tensor = image * (WIDE / (2**bits - 1))
    if float(scaled.max()) > 1 + 1e-6:  # float32 rounds the quotient
        raise ValueError(
            f"image {entry.name!r} has the value {float(image.max()) * WIDE:.0f}, but bits = "
            f"{bits} ends at {2**bits - 1}; give more bits"
        )
    return scaled.clamp(0, 1)


def _classes(parents: list[tuple[str, ...]]) -> list[str]:
    # What the first and the last name share, all between them share.
    low = min(parents)
    high = max(parents)
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
    # Names on disk need not be text in UTF-8: Python then has surrogates, which no file takes.
    return name.encode("utf-8", "replace").decode("utf-8")
