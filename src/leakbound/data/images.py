"""Image files: decoded one at a time by Pillow, grouped into classes by the folder they lie in."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from leakbound.data.raw import Options, Raw, fit, interleave, shape_after, within_limit

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
"""Where the name of an image tells who made it -> one line on that."""

_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "PPM")

_FOLDER = {
    "outer_folder": (2, "WRITER/CLASS/image"),
    "inner_folder": (1, "CLASS/WRITER/image"),
}
"""Rule -> how far above the image the writer's folder lies, and the form that errors show."""

Entry = tuple[str, Callable[[], bytes | bytearray]]
"""The name of an image, with / between its folders, and what reads its bytes."""


def is_image(name: str) -> bool:
    """The name ends like an image's and no part of it is hidden or made by macOS."""
    parts = name.split("/")
    hidden = any(p == "__MACOSX" or (p.startswith(".") and p not in (".", "..")) for p in parts)
    return name.lower().endswith(SUFFIXES) and not hidden


def file_within_limit(name: str, size: int) -> None:
    """Refuse an image file of more than `MAX_FILE` bytes before it is read."""
    if size > MAX_FILE:
        raise ValueError(
            f"image {name!r} declares {size} bytes; the limit is {MAX_FILE}: take it out"
        )


def collect(entries: list[Entry], options: Options) -> Raw:
    """Images of equal size and channels, one of each class in turn, classes sorted by name.

    The class is the folder of the image, below the folder that all images share. Images that lie
    in one folder only are one class of that folder's name, or 'all' at the top. A folder that names
    the writer (see `WRITERS`) is taken out of the path first.

    Raises:
        ValueError: an image that cannot be read, differs in size or channels from the first, or
            whose name tells no writer where one is asked for.
    """
    if not entries:
        raise ValueError(f"it holds no image; give files that end in {', '.join(SUFFIXES)}")
    entries = sorted(entries, key=lambda entry: entry[0])
    parents = [PurePosixPath(name).parent.parts for name, _ in entries]
    told: list[str] = []
    if options.writer is not None:
        split = [_writer(name, options.writer) for name, _ in entries]
        told, parents = [writer for writer, _ in split], [folders for _, folders in split]
    labels, names = _numbers(_classes(parents))
    order = interleave(labels)[: options.limit]
    dealt = [entries[k] for k in order.tolist()]
    files = tuple(_printable(name) for name, _ in dealt)
    raw = Raw(_decode_all(dealt, options), labels[order], names, files=files)
    if not told:
        return raw
    writers, writer_names = _numbers(told)
    return replace(raw, writers=writers[order], writer_names=writer_names)


def decode(data: bytes | bytearray, name: str) -> Tensor:
    """One image (C, H, W), uint8, or float32 in [0, 1] where the file has 16 bits.

    Gray stays gray; palettes and all other colors become RGB; alpha is dropped. Pixels are as
    stored: the orientation that a camera notes is not applied.

    Raises:
        ValueError: not an image, truncated, more than `MAX_PIXELS`, or more than one picture.
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
        except Exception as error:  # a broken file makes Pillow raise nearly anything
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
        raise _Refused(f"image {name!r} holds {frames} pictures; give one picture a file")


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
            within_limit(
                f"{len(entries)} images of {shape}", 4 * len(entries) * int(np.prod(shape))
            )
            images = torch.empty(len(entries), *shape)
        _same_shape((first, tuple(images.shape[1:])), (name, shape))
        images[k] = fit(image[None], options)[0]
    return images


def _same_shape(a: tuple[str, tuple[int, ...]], b: tuple[str, tuple[int, ...]]) -> None:
    if a[1][1:] != b[1][1:]:
        raise ValueError(
            f"image {b[0]!r} has {b[1][1]} x {b[1][2]} pixels, but {a[0]!r} has "
            f"{a[1][1]} x {a[1][2]}; give a size to resize all to, such as size = 32"
        )
    if a[1][0] != b[1][0]:
        raise ValueError(
            f"image {b[0]!r} has {b[1][0]} channels, but {a[0]!r} has {a[1][0]}; "
            "give channels = 1 (gray) or channels = 3 (RGB)"
        )


def _classes(parents: list[tuple[str, ...]]) -> list[str]:
    low, high = min(parents), max(parents)
    shared = 0
    while shared < min(len(low), len(high)) and low[shared] == high[shared]:
        shared += 1
    return ["/".join(p[shared:]) or (p[-1] if p else "all") for p in parents]


def _numbers(words: list[str]) -> tuple[Tensor, tuple[str, ...]]:
    """Each word's place among the sorted different words, and those."""
    names = sorted(set(words))
    place = {name: k for k, name in enumerate(names)}
    return torch.tensor([place[word] for word in words]), tuple(_printable(name) for name in names)


def _writer(name: str, rule: str) -> tuple[str, tuple[str, ...]]:
    """Who made the image of that name, and the folders that are left for its class."""
    path = PurePosixPath(name)
    folders = path.parent.parts
    if rule in _FOLDER:
        place, form = _FOLDER[rule]
        if len(folders) < place:
            raise ValueError(
                f"image {name!r} lies in {len(folders)} folders; writer = {rule!r} needs {form}"
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
