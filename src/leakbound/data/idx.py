"""IDX files, the format of MNIST: unsigned bytes after a header of sizes, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leakbound._util import files
from leakbound.data.raw import Options, Raw, numbered, within_limit
from leakbound.tensors.archive import Stream, take

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, options: Options) -> Raw:
    """Images of an IDX file and the labels next to it; `path`: file, folder, or start of a name."""
    file = _images_file(path)
    labels_file = _labels_file(file)
    images = _read(file, 3)
    labels = _read(labels_file, 1).long()
    if len(images) != len(labels):
        raise ValueError(
            f"{str(file)!r} holds {len(images)} images and {str(labels_file)!r} {len(labels)} "
            "labels; give one for each"
        )
    return Raw(images[:, None], labels, numbered(repr(str(labels_file)), labels))


def _images_file(path: Path) -> Path:
    if path.is_file():
        return path
    folder, start = (path, "") if path.is_dir() else (path.parent, path.name)
    if not folder.is_dir():
        raise ValueError(f"{str(path)!r} does not exist; check the path")
    names = sorted(f.name for f in folder.iterdir() if f.is_file() and f.name.startswith(start))
    images = [n for n in names if "images" in n and "idx3" in n]
    # A file and its packed copy are not two choices: the plain one is read.
    images = [
        n for n in images if n.removesuffix(".gz") == n or n.removesuffix(".gz") not in images
    ]
    if not images:
        raise ValueError(f"{str(path)!r} holds no file with a name like train-images-idx3-ubyte")
    if len(images) > 1:
        raise ValueError(f"{str(path)!r} holds several images files; name one of {images}")
    return folder / images[0]


def _labels_file(images: Path) -> Path:
    name = images.name.replace("images", "labels").replace("idx3", "idx1")
    plain = name.removesuffix(".gz")
    for candidate in (name, plain, f"{plain}.gz"):
        file = images.with_name(candidate)
        if candidate != images.name and file.is_file():
            return file
    raise ValueError(f"{str(images)!r} has no labels next to it; put {name!r} into the same folder")


def _read(path: Path, dimensions: int) -> Tensor:
    packed = path.name.endswith(".gz")
    try:
        with files.opened(path) as raw, gzip.open(raw) if packed else raw as stream:
            shape = _header(stream, path, dimensions)
            # Before any memory is taken: the header is untrusted.
            within_limit(f"{str(path)!r}, as its header declares,", math.prod(shape))
            # Only unpacking shows what a packed file holds: it is checked after that, below.
            if not packed:
                _check_size(path, shape, path.stat().st_size - 4 - 4 * dimensions)
            data = take(stream, math.prod(shape) + 1)  # one more byte shows a file that is longer
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{str(path)!r} is not gzip, or is damaged or truncated; download it again"
        ) from error
    _check_size(path, shape, len(data))
    return torch.frombuffer(data, dtype=torch.uint8).reshape(shape)


def _check_size(
    path: Path,
    shape: tuple[int, ...],
    held: int,
) -> None:
    size = math.prod(shape)
    if held != size:
        raise ValueError(
            f"{str(path)!r} declares shape {shape}, {size} bytes, but holds "
            f"{'more' if held > size else held}; download it again"
        )


def _header(
    stream: Stream,
    path: Path,
    dimensions: int,
) -> tuple[int, ...]:
    head = take(stream, 4 + 4 * dimensions)
    if head[:4] != bytes((0, 0, _UNSIGNED_BYTE, dimensions)):
        raise ValueError(
            f"{str(path)!r} starts with {head[:4].hex()!r}; an IDX file of unsigned bytes with "
            f"{dimensions} dimensions starts with '000008{dimensions:02x}'"
        )
    if len(head) < 4 + 4 * dimensions:
        raise ValueError(f"{str(path)!r} ends within its header; download it again")
    shape = tuple(np.frombuffer(head, ">u4", offset=4).tolist())
    if min(shape) < 1:
        raise ValueError(f"{str(path)!r} declares shape {shape}; it holds no image")
    return shape
