"""DICOM files, by pydicom: one gray or color image each, or a volume. No patient's name is read."""

from __future__ import annotations

import importlib
import io
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakbound.data.raw import MAX_PIXELS, RefusedImage

SUFFIXES = (".dcm", ".dicom")
HEAD = 132
"""Bytes at the start of a file that show what it is."""
_DEFLATED = "1.2.840.10008.1.2.1.99"
"""Transfer syntax of files that are unpacked as a whole, without a limit."""
_GRAY = ("MONOCHROME1", "MONOCHROME2")
_COLOR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT")


def begins(head: bytes) -> bool:
    """Whether a file with these first bytes is DICOM.

    Example:
        >>> begins(bytes(128) + b"DICM"), begins(b"DICM")
        (True, False)
    """
    return head[128:HEAD] == b"DICM"


def decode(data: bytes | bytearray, name: str) -> Tensor:
    """One image (C, H, W): float32 in [0, 1], or uint8 in color. Gray frames are a volume.

    The volume is (1, D, H, W), its D frames in the file's order.

    Gray values are as stored, in units of the range of their bits: no window, no rescaling to
    Hounsfield units, no inversion of MONOCHROME1.

    Raises:
        ValueError: pydicom is missing, or the file holds no such image; the message names it.
    """
    try:
        pydicom: Any = importlib.import_module("pydicom")
        pixels: Any = importlib.import_module("pydicom.pixels")
    except ImportError:
        raise ValueError(
            f"image {name!r} needs the package pydicom; install it with: "
            "pip install 'leakbound[medical]'"
        ) from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # The encoding first: `dcmread` would unpack a deflated file whole, whatever its size.
            syntax = _syntax(pydicom.filereader, io.BytesIO(data))
            if syntax == _DEFLATED:
                raise RefusedImage(f"image {name!r} is deflated as a whole; save it otherwise")
            if not _is_decoded(pixels, syntax):
                raise RefusedImage(
                    f"image {name!r} is compressed in a way that no installed decoder reads "
                    f"({syntax[:64]}); save it uncompressed, or install pylibjpeg"
                )
            dataset = pydicom.dcmread(io.BytesIO(data))
            _check(dataset, name)
            return _values(dataset, pixels.pixel_array(dataset))
        except RefusedImage:
            raise
        except Exception as error:  # a broken file makes pydicom raise almost any exception
            raise ValueError(
                f"image {name!r} cannot be read; it is damaged, or holds no image"
            ) from error


def _syntax(reader: Any, stream: io.BytesIO) -> str:
    """How the file is encoded, from its first group alone."""
    reader.read_preamble(stream, force=False)
    head = reader.read_dataset(
        stream, False, True, stop_when=lambda tag, kind, length: tag.group != 2
    )
    return str(head.TransferSyntaxUID)


def _is_decoded(pixels: Any, syntax: str) -> bool:
    try:
        return bool(pixels.get_decoder(syntax).is_available)
    except NotImplementedError:  # pydicom knows no decoder, as of films
        return False


def _check(dataset: Any, name: str) -> None:
    """Reject what is no single image, before memory is taken for its pixels."""
    rows = dataset.Rows
    columns = dataset.Columns
    frames = int(dataset.get("NumberOfFrames") or 1)
    if frames < 1 or rows * columns * frames > MAX_PIXELS:
        raise RefusedImage(
            f"image {name!r} declares {columns} x {rows} pixels in {frames} frames; the limit is "
            f"{MAX_PIXELS} in all: resize it"
        )
    kind = dataset.PhotometricInterpretation
    if frames > 1 and kind not in _GRAY:
        raise RefusedImage(
            f"image {name!r} holds {frames} pictures in color; save the one that you mean as a file"
        )
    if kind not in (*_GRAY, *_COLOR):
        raise RefusedImage(f"image {name!r} has colors as {kind}; save it as gray values or RGB")
    if kind in _COLOR and dataset.BitsStored != 8:
        raise RefusedImage(
            f"image {name!r} has colors of {dataset.BitsStored} bits; save it with 8"
        )


def _values(dataset: Any, pixels: np.ndarray) -> Tensor:
    if dataset.PhotometricInterpretation in _COLOR:
        return torch.from_numpy(np.array(pixels, dtype=np.uint8)).permute(2, 0, 1)
    steps = 2**dataset.BitsStored
    # Signed values begin at minus half of the range.
    lowest = steps // 2 if dataset.PixelRepresentation else 0
    values = (pixels.astype(np.float64) + lowest) / (steps - 1)
    # (1, H, W), or of several frames (1, D, H, W)
    return torch.from_numpy(values.clip(0, 1).astype(np.float32))[None]
