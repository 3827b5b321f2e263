"""Image files in a folder or a zip archive: decoded one at a time, grouped into classes.

Archives are never unpacked; the names in them are only text.
"""

from __future__ import annotations

import io
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
from torch import Tensor

from leakbound._util import files
from leakbound.data import dicom, nifti
from leakbound.data.raw import (
    MAX_PIXELS,
    UNSIZED,
    Options,
    Raw,
    RefusedImage,
    fit,
    interleave,
    shape_after,
    within_limit,
)
from leakbound.tensors.archive import Stream, open_archive, open_member, take

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
PERSONS: dict[str, str] = {
    "first": "the first part of the file's name, parts being joined by _ or -: PERSON_0001.png",
    "last": "the last part of the file's name: 0108_PERSON.png",
    "outer_folder": "the folder above that of the class: PERSON/CLASS/0001.png",
    "inner_folder": "the folder below that of the class: CLASS/PERSON/0001.png",
}
"""The part of an image's name that identifies its person -> one line about it. A person is who
made the image, or whom it shows.
"""

_FORMATS = ("PNG", "JPEG", "BMP", "DIB", "WEBP", "AVIF", "GIF", "TIFF", "PPM")
_MARKED = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "TIFF")
"""Formats whose first bytes no text has by chance."""

_FOLDER = {
    "outer_folder": (2, "PERSON/CLASS/image"),
    "inner_folder": (1, "CLASS/PERSON/image"),
}
"""Rule -> how many levels above the image the person's folder is, and the form for errors."""


Decoder = Callable[[bytes | bytearray, str], Tensor]


@dataclass(frozen=True)
class _File:
    """A file of a folder or an archive: its name, with / between its folders, and what opens it."""

    name: str
    size: int
    opened: Callable[[], AbstractContextManager[Stream]]

    def read(self) -> bytearray:
        """All of it."""
        if self.size > MAX_FILE:
            raise ValueError(
                f"image {self.name!r} declares {self.size} bytes; the limit is {MAX_FILE}: remove "
                "it"
            )
        with self.opened() as stream:
            data = take(stream, self.size)
        if len(data) != self.size:
            raise ValueError(
                f"{self.name!r} declares {self.size} bytes, but holds {len(data)}; save it again"
            )
        return data


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
    members: list[_File | str] = []
    # Without `onerror`, a folder that cannot be read would be skipped silently.
    for here, folders, names in os.walk(root, onerror=_raised):
        for name in folders:
            # `os.walk` does not follow it, so its class would vanish.
            if (Path(here) / name).is_symlink():
                raise ValueError(f"{name!r} is a link to a folder; put a copy in its place")
        members.append(Path(here).relative_to(root).as_posix())
        for file in map(Path(here).joinpath, names):
            size = file.stat().st_size if file.is_file() else 0
            relative = file.relative_to(root).as_posix()
            members.append(_File(relative, size, partial(_opened, file, root, relative)))
    return _collect(*_sorted(members), options)


def _raised(error: OSError) -> None:
    raise error


def _opened(
    file: Path,
    root: Path,
    name: str,
) -> BinaryIO:
    """The file, if it is no link that leaves the folder `root`."""
    target = Path(os.path.realpath(file))  # of a link to itself, too
    if not target.is_relative_to(root):
        raise ValueError(
            f"image {name!r} is a link to a file outside the folder; put a copy in its place"
        )
    if file.is_symlink() and not target.exists():
        raise ValueError(f"image {name!r} is a broken link; remove it")
    return files.opened(file)


def read_zip(path: Path, options: Options) -> Raw:
    """Images inside a zip archive, as `read_folder`; macOS's own files are skipped."""
    with open_archive(path) as archive:
        members: list[_File | str] = []
        for member in archive.infolist():
            # Some Windows programs write backslashes, against the zip format's specification.
            name = "/".join(part for part in member.filename.replace("\\", "/").split("/") if part)
            if member.is_dir():
                members.append(name)
                continue
            members.append(_File(name, member.file_size, partial(open_member, archive, member)))
        images, others = _sorted(members)
        within_limit(f"the images of archive {str(path)!r}", sum(file.size for file, _ in images))
        return _collect(images, others, options)


def _sorted(
    members: Iterable[_File | str],
) -> tuple[list[tuple[_File, Decoder]], Counter[str]]:
    """The images with what decodes them, and how many other files of each type there are.

    Members are files, and names of folders. A folder without an image in it or below is rejected,
    because its class would vanish.
    """
    images: list[tuple[_File, Decoder]] = []
    folders: dict[str, Counter[str]] = {}
    for member in members:
        name = member if isinstance(member, str) else member.name
        if _hidden(name):
            continue
        if isinstance(member, str):
            folders.setdefault(name, Counter())
            continue
        types = folders.setdefault(_parent(name), Counter())
        decoder = _decoder(member)
        if decoder is None:
            types[PurePosixPath(name).suffix.lower() or "without an ending"] += 1
        else:
            images.append((member, decoder))
    used = {str(place) for file, _ in images for place in PurePosixPath(file.name).parents}
    above = {str(place) for name in folders for place in PurePosixPath(name).parents}
    for name, types in sorted(folders.items()):
        if not images or name in used or name == "." or (name in above and not types):
            continue
        held = f"only {_listed(types)}" if types else "no file"
        raise ValueError(
            f"folder {_printable(name)!r} holds {held}, and no image that is read; save its "
            "images as PNG or JPEG, or move the folder away"
        )
    return images, sum(folders.values(), Counter())


def _hidden(name: str) -> bool:
    parts = name.split("/")
    return any(p == "__MACOSX" or (p.startswith(".") and p not in (".", "..")) for p in parts)


def _decoder(file: _File) -> Decoder | None:
    """What decodes a file, by its ending, or without one by its first bytes; None: nothing."""
    suffix = PurePosixPath(file.name).suffix.lower()
    if suffix in dicom.SUFFIXES:
        return dicom.decode
    if file.name.lower().endswith(nifti.SUFFIXES):
        return nifti.decode
    if suffix or not file.size:
        return decode if suffix in _readable() else None
    # DICOM files often have no ending.
    with file.opened() as stream:
        head = bytes(take(stream, dicom.HEAD))
    if dicom.begins(head):
        return dicom.decode
    return decode if _is_picture(head) else None


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


def _collect(
    images: list[tuple[_File, Decoder]],
    others: Counter[str],
    options: Options,
) -> Raw:
    """Images of equal size and channels, one of each class in turn, classes sorted by name.

    The class is the image's folder, below the folder that all images share; 'all' at the top. A
    folder that names the person (see `PERSONS`) is first removed from the path.
    """
    if not images:
        held = f" ({_listed(others)})" if others else ""
        raise ValueError(f"it holds no image{held}; give files that end in {', '.join(SUFFIXES)}")
    notes = []
    if others:
        count = others.total()
        what = "1 file of a type that is" if count == 1 else f"{count} files of types that are"
        notes.append(f"left out {what} not read: {_listed(others)}")
    images.sort(key=lambda image: image[0].name)
    origins = [_origin(file.name, options.person) for file, _ in images]
    labels, names = _numbers(_classes([folders for _, folders in origins]))
    order = interleave(labels)[: options.limit]
    dealt = [images[k] for k in order.tolist()]
    pixels, dark = _decode_all(dealt, options)
    named = tuple(_printable(file.name) for file, _ in dealt)
    raw = Raw(pixels, labels[order], names, files=named, notes=(*notes, *dark))
    if options.person is None:
        return raw
    persons, person_names = _numbers([person for person, _ in origins])
    return replace(raw, persons=persons[order], person_names=person_names)


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


def _decode_all(
    sources: list[tuple[_File, Decoder]], options: Options
) -> tuple[Tensor, Iterable[str]]:
    """The images (N, C, H, W), and a note if those of 16 bits use only a part of their range."""
    images = torch.empty(0)  # its size is known once the first image is decoded
    most = 0.0
    first = sources[0][0].name
    for k, (file, decoder) in enumerate(sources):
        name = file.name
        image = decoder(file.read(), name)
        # The headers of DICOM and NIfTI say what the values are.
        wide = image.is_floating_point() and decoder is decode
        if options.bits is not None:
            image = _scaled(image, name, options.bits, wide)
        if image.ndim == 4 and (options.size is not None or options.channels is not None):
            raise ValueError(UNSIZED)
        shape = tuple(image.shape) if image.ndim == 4 else shape_after(image.shape, options)
        if k == 0:
            size = 4 * len(sources) * math.prod(shape)
            within_limit(f"{len(sources)} images of {shape}", size)
            images = torch.empty(len(sources), *shape)
        channels, *sides = images.shape[1:]
        if [*shape[1:]] != sides:
            held, wanted = (" x ".join(map(str, one)) for one in (shape[1:], sides))
            volume = 3 in (len(sides), len(shape) - 1)
            mend = "resample all" if volume else "give a size to resize all to, such as size = 32"
            raise ValueError(
                f"image {name!r} has {held} pixels, but {first!r} has {wanted}; {mend}"
            )
        if shape[0] != channels:
            raise ValueError(
                f"image {name!r} has {shape[0]} channels, but {first!r} has {channels}; "
                "give channels = 1 (gray) or channels = 3 (RGB), or volumes with equal channels"
            )
        images[k] = image if image.ndim == 4 else fit(image[None], options)[0]
        most = max(most, float(image.max())) if wide else math.inf
    if not 0 < most <= DARK or options.bits is not None:
        return images, ()
    bits = round(most * WIDE).bit_length()
    return images, (
        f"the images have 16 bits, but use only values up to {most:.3f} of that range; for values "
        f"of {bits} bits set bits = {bits} in [data] of a plan",
    )


def _scaled(
    image: Tensor,
    name: str,
    bits: int,
    wide: bool,
) -> Tensor:
    """Values of 16 bits as parts of the range of `bits` bits."""
    if not wide:
        raise ValueError(
            f"bits is {bits}, which image {name!r} does not need: it has 8 bits, or its "
            "header says how many; leave bits out"
        )
    scaled: Tensor = image * (WIDE / (2**bits - 1))
    if float(scaled.max()) > 1 + 1e-6:  # float32 rounds the quotient
        raise ValueError(
            f"image {name!r} has the value {float(image.max()) * WIDE:.0f}, but bits = "
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
    """The person of the image with that name, by a rule, and the folders left for its class."""
    path = PurePosixPath(name)
    folders = path.parent.parts
    if rule is None:
        return "", folders
    if rule in _FOLDER:
        place, form = _FOLDER[rule]
        if len(folders) < place:
            raise ValueError(
                f"image {name!r} has {len(folders)} folders above it; person = {rule!r} needs "
                f"{form}"
            )
        at = len(folders) - place
        return folders[at], folders[:at] + folders[at + 1 :]
    parts = [part for part in path.stem.replace("-", "_").split("_") if part]
    if not parts:
        raise ValueError(
            f"image {name!r} names no person; for person = {rule!r} give a name such as "
            f"{'07_0108' if rule == 'first' else '0108_07'}{path.suffix}"
        )
    return parts[0 if rule == "first" else -1], folders


def _printable(name: str) -> str:
    # Names on disk need not be text in UTF-8: Python then has surrogates, which no file takes.
    return name.encode("utf-8", "replace").decode("utf-8")
