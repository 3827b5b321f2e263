"""The result of every reader, the limits that all readers keep, and the steps they share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leakbound._util import files
from leakbound.domains import Column
from leakbound.tensors.archive import take

MAX_BYTES = 4 << 30

MAX_PIXELS = 50_000_000
"""Pixels of one image, which are checked before it is decoded."""

MAX_CLASSES = 100_000

UNSIZED = "a volume has no size or channels to change; leave both out"

LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Options:
    """How `load` shapes images; None leaves them unchanged, or reads no persons.

    `person` names the part of an image's name that identifies a person, `schema` the file that
    describes a table, `bits` how many bits 16-bit images use.
    """

    size: int | None = None
    channels: int | None = None
    limit: int | None = None
    person: str | None = None
    schema: str | Path | None = None
    bits: int | None = None


@dataclass(frozen=True, eq=False)
class Raw:
    """Images (N, C, H, W), uint8 or float in [0, 1], with labels (N,) and the class names.

    Of a table `inputs` are rows (N, n) of its `columns`, of a text tokens (N, n) of its `words`. If
    requested, `persons` (N,) are indices into `person_names`. Image files have their names in
    `files`, in that order. `notes` say what was left out, and what to check.
    """

    inputs: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    columns: tuple[Column, ...] = ()
    persons: Tensor | None = None
    person_names: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class RefusedImage(ValueError):
    """An image that is no damage, but is not read; the message names it and the mend."""


def expect(
    fits: bool,
    name: str,
    value: Tensor,
    wanted: str,
) -> None:
    """Raise a ValueError for a tensor that is not as wanted."""
    if not fits:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} and type {value.dtype}; give {wanted}"
        )


def within_limit(what: str, size: int) -> None:
    if size > MAX_BYTES:
        raise ValueError(
            f"{what} takes {size / 2**30:.1f} GiB; the limit is {MAX_BYTES / 2**30:.1f} GiB: "
            "give a smaller limit or size, or fewer images"
        )


def unsized(options: Options) -> None:
    """Reject a size or channels for a table."""
    if options.size is not None or options.channels is not None:
        raise ValueError("a table has no size or channels to change; leave both out")


def read_file(path: Path) -> bytearray:
    files.check_regular(path)
    with files.opened(path) as stream:
        # of the open file: a path may name another file by now
        size = os.fstat(stream.fileno()).st_size
        within_limit(f"file {str(path)!r}", size)
        return take(stream, size)


def numbered(what: str, labels: Tensor) -> tuple[str, ...]:
    """The names '0', '1', ... of the classes that the labels use, up to the highest."""
    low = int(labels.min())
    high = int(labels.max())
    if low < 0 or high >= MAX_CLASSES:
        raise ValueError(
            f"{what} has labels from {low} to {high}; "
            f"give whole numbers from 0 to at most {MAX_CLASSES - 1}"
        )
    return tuple(str(k) for k in range(high + 1))


def flags(what: str, labels: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """Labels (N, L) of several classes at once as float32, and the names of the L classes.

    Raises:
        ValueError: they are not all 0 or 1.
    """
    odd = labels[(labels != 0) & (labels != 1)]
    if len(odd):
        raise ValueError(
            f"{what} of shape {tuple(labels.shape)} hold {float(odd[0]):g}; for several classes at "
            "once give a 0 or 1 for each, else one class number for each example, (N,)"
        )
    return labels.float(), tuple(map(str, range(labels.shape[1])))


def interleave(labels: Tensor) -> Tensor:
    """An order that takes one image of each class in turn, so that any first N vary."""
    values = labels.numpy()
    by_class = np.argsort(values, kind="stable")  # stable: files keep their order in a class
    grouped = values[by_class]
    rank = np.empty(len(values), dtype=np.int64)
    rank[by_class] = np.arange(len(values)) - np.searchsorted(grouped, grouped)
    return torch.from_numpy(np.lexsort((values, rank)))


def shape_after(shape: torch.Size, options: Options) -> tuple[int, ...]:
    """(C, H, W) of images of the given shape after `fit`; volumes keep theirs."""
    if len(shape) > 4:
        return tuple(shape[1:])
    height, width = (options.size, options.size) if options.size else (shape[-2], shape[-1])
    return options.channels or shape[-3], height, width


def fit(images: Tensor, options: Options) -> Tensor:
    """Images (N, C, H, W) as float32 with the requested channels and size.

    Gray is the Rec. 601 luma; gray becomes RGB by repeating; resizing is bilinear, antialiased.
    """
    whole = images.dtype == torch.uint8
    images = images.to(torch.float32)
    if whole:
        images = images / 255
    if images.ndim > 4:
        return images
    channels, height, width = shape_after(images.shape, options)
    if channels == 1 and images.shape[1] == 3:
        weights = torch.tensor(LUMA).view(1, 3, 1, 1)
        # The weights sum to 1 only up to rounding.
        images = (images * weights).sum(1, keepdim=True).clamp(0, 1)
    elif channels == 3 and images.shape[1] == 1:
        images = images.expand(-1, 3, -1, -1)
    if images.shape[-2:] != (height, width):
        images = torch.nn.functional.interpolate(
            images, (height, width), mode="bilinear", antialias=True
        ).clamp(0, 1)
    return images
