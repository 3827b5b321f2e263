"""NIfTI files: one volume each, its header by nibabel, its numbers by NumPy."""

from __future__ import annotations

import importlib
import io
import math
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakbound.data.raw import MAX_PIXELS, RefusedImage

SUFFIXES = (".nii", ".nii.gz")
HEAD = 348
"""Bytes of the header."""
_GZIP = 31
"""What tells zlib that data have the header of gzip."""


def decode(data: bytes | bytearray, name: str) -> Tensor:
    """One volume (C, X, Y, Z) of float32 in [0, 1]: its lowest value becomes 0, its highest 1.

    Axes are as stored; a fourth axis becomes channels.

    Raises:
        ValueError: nibabel is missing, or the file holds no such volume; the message names it.
    """
    try:
        nibabel: Any = importlib.import_module("nibabel")
    except ImportError:
        raise ValueError(
            f"volume {name!r} needs the package nibabel; install it with: "
            "pip install 'leakbound[medical]'"
        ) from None
    try:
        head = io.BytesIO(_begin(data, name, HEAD))
        # Its own check repairs what is wrong, and says so on the screen.
        header = nibabel.Nifti1Header.from_fileobj(head, check=False)
        if header["magic"].item() != b"n+1":
            raise ValueError("another magic string")
        shape = tuple(int(size) for size in header.get_data_shape())
        kind = np.dtype(header.get_data_dtype())
        start = int(header.get_data_offset())
        slope, shift = header.get_slope_inter()
    except RefusedImage:
        raise
    except Exception as error:  # a broken file makes nibabel raise almost any exception
        raise ValueError(
            f"volume {name!r} cannot be read; it is damaged, or no NIfTI-1 file"
        ) from error
    _check(shape, kind, start, name)
    stop = start + math.prod(shape) * kind.itemsize
    content = _begin(data, name, stop)
    values = np.frombuffer(content, kind, math.prod(shape), start).astype(np.float64)
    # No scale in the header means that values are as stored.
    values = values * (1.0 if slope is None else slope) + (0.0 if shift is None else shift)
    if not np.isfinite(values).all():
        raise RefusedImage(f"volume {name!r} holds NaN or infinity; give finite values")
    low = float(values.min())
    high = float(values.max())
    scaled = (values - low) / (high - low) if high > low else np.zeros_like(values)
    volume = torch.from_numpy(scaled.astype(np.float32).reshape(shape, order="F").copy())
    return volume[None] if volume.ndim == 3 else volume.permute(3, 0, 1, 2).contiguous()


def _begin(
    data: bytes | bytearray,
    name: str,
    count: int,
) -> bytes:
    """The first bytes of a file, unpacked if it is compressed; no more are taken."""
    packed = bytes(data[:2]) == b"\x1f\x8b"
    try:
        begin = zlib.decompressobj(_GZIP).decompress(data, count) if packed else data[:count]
    except zlib.error as error:
        raise RefusedImage(f"volume {name!r} cannot be unpacked; save it again") from error
    if len(begin) < count:
        raise RefusedImage(
            f"volume {name!r} declares {count} bytes, but holds {len(begin)}; save it again"
        )
    return bytes(begin)


def _check(
    shape: tuple[int, ...],
    kind: np.dtype[Any],
    start: int,
    name: str,
) -> None:
    """Reject what is no volume of numbers, before memory is taken for it."""
    if len(shape) not in (3, 4) or min(shape) < 1:
        raise RefusedImage(
            f"volume {name!r} has shape {shape}; give (X, Y, Z), or (X, Y, Z, C) with channels"
        )
    if math.prod(shape) > MAX_PIXELS:
        raise RefusedImage(
            f"volume {name!r} declares {math.prod(shape):,} voxels; the limit is {MAX_PIXELS:,}: "
            "resample it"
        )
    if kind.kind not in "uif" or kind.itemsize > 8:
        raise RefusedImage(f"volume {name!r} holds {kind}; save it as whole numbers or floats")
    if not HEAD <= start <= MAX_PIXELS:
        raise RefusedImage(f"volume {name!r} has its numbers at byte {start}; save it again")
