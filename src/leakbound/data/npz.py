"""NumPy archives of images or volumes and labels, read without pickle."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leakbound.data import raw
from leakbound.data.raw import Options, Raw, flags, numbered
from leakbound.tensors.archive import open_archive, read_array

Array = np.ndarray


def read_npz(path: Path, options: Options) -> Raw:
    """Images (N, H, W), (N, H, W, C) or (N, C, H, W), or volumes (N, C, D, H, W), and labels.

    Values are in 0..255 or [0, 1]; with `bits`, whole numbers are in 0..2^bits - 1. Labels are
    class numbers (N,), a 0 or 1 for each of L classes (N, L), or class maps (N, *S) or (N, 1, *S)
    of the places *S of an example.
    """
    with open_archive(path) as archive:
        images = _images(_array(archive, ("inputs", "x", "images")), options.bits)
        labels = _array(archive, ("labels", "y"), or_bool=True)
    if len(images) != len(labels):
        raise ValueError(
            f"{str(path)!r} holds {len(images)} images and {len(labels)} labels; give one for each"
        )
    places = tuple(images.shape[2:])
    if labels.shape[1:] == (1, *places):
        labels = labels[:, 0]
    if labels.ndim == 2:
        if labels.dtype.kind not in "uifb":
            raise ValueError(f"labels have type {labels.dtype}; give a 0 or 1 for each class")
        return Raw(images, *flags("labels", torch.from_numpy(labels.astype(np.float32))))
    if labels.shape[1:] not in ((), places) or labels.dtype.kind not in "ui":
        raise ValueError(
            f"labels have shape {labels.shape} and type {labels.dtype}; give whole numbers (N,), "
            f"zeros and ones (N, L), or class maps (N, {', '.join(map(str, places))})"
        )
    raw.within_limit(f"labels of shape {labels.shape}", 8 * labels.size)
    numbers = torch.from_numpy(labels.astype(np.int64))
    return Raw(images, numbers, numbered(f"{str(path)!r}", numbers))


def _array(
    archive: zipfile.ZipFile,
    names: tuple[str, ...],
    *,
    or_bool: bool = False,
) -> Array:
    members = [info for info in archive.infolist() if info.filename in [f"{n}.npy" for n in names]]
    if len(members) != 1:
        held = ", ".join(repr(info.filename) for info in archive.infolist()[:20])
        raise ValueError(
            f"the archive holds {len(members)} arrays named {' or '.join(names)} (it holds: "
            f"{held}); give exactly one"
        )
    member = members[0]
    array = read_array(archive, member, raw.MAX_BYTES)
    if array.dtype.kind == "b" and not or_bool:
        raise ValueError(f"{member.filename!r} holds values of type bool; give whole numbers")
    if not array.shape or min(array.shape) < 1:
        raise ValueError(
            f"{member.filename!r} has shape {array.shape}; it holds no image: give at least one"
        )
    return array


def _images(array: Array, bits: int | None) -> Tensor:
    low = array.min()
    high = array.max()
    most = 255 if bits is None else 2**bits - 1
    if bits is not None and array.dtype.kind == "f":
        raise ValueError(f"bits is {bits}, but the images are floats; leave bits out")
    if array.dtype.kind == "f":
        if not np.isfinite(low) or not np.isfinite(high):
            raise ValueError("images hold NaN or infinity; give finite values in [0, 1]")
        if low < 0 or high > 1:
            raise ValueError(f"images run from {low:g} to {high:g}; scale floats to [0, 1]")
    elif low < 0 or high > most:
        mend = "" if bits is not None or low < 0 else ", or bits = 12 for images of 12 bits"
        raise ValueError(f"images run from {low} to {high}; give whole numbers in 0..{most}{mend}")
    if bits is not None:
        # As floats they take more memory than in the archive.
        raw.within_limit(f"{len(array)} images of {array.shape[1:]}", 4 * array.size)
        array = array.astype(np.float32) / most
    values = torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.uint8))
    if values.ndim == 3:
        return values[:, None]
    if values.ndim == 5:
        return values
    first = values.ndim == 4 and values.shape[1] in (1, 3)
    last = values.ndim == 4 and values.shape[-1] in (1, 3)
    if first == last:
        raise ValueError(
            f"images have shape {array.shape}, where the channels are "
            f"{'ambiguous' if first else 'not found'}; give (N, H, W), 1 or 3 channels in "
            "(N, C, H, W) or (N, H, W, C), or volumes (N, C, D, H, W)"
        )
    return values if first else values.permute(0, 3, 1, 2)
