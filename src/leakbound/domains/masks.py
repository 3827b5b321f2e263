"""Files that say which pixels of an image are known."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load
from torch import Tensor

from leakbound._util import files

FORMATS = ".npz, .safetensors or .png"


def read_mask(
    name: str,
    height: int,
    width: int,
) -> Tensor:
    """(H, W) bool, True at the known pixels: those that are not 0 in the file.

    Args:
        name: a .npz or .safetensors file with one array (H, W), or a PNG picture. A pixel of a
            picture is known if one of its colors is not 0; alpha does not count.
        height: of the images.
        width: of the images.

    Raises:
        ValueError: the file is missing, of another format or size, or no pixel is known.

    Example:
        >>> import numpy, tempfile
        >>> half = numpy.arange(16).reshape(4, 4) >= 8
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     numpy.savez(f"{folder}/half.npz", half)
        ...     read_mask(f"{folder}/half.npz", 4, 4).sum(1).tolist()
        [0, 0, 4, 4]
    """
    path = Path(name)
    files.check_regular(path, "mask")
    known = _picture(path) if path.suffix.lower() == ".png" else _array(path)
    if known.shape != (height, width):
        raise ValueError(
            f"mask {name!r} has the shape {tuple(known.shape)}; give one number for each of the "
            f"({height}, {width}) pixels of an image"
        )
    if not bool(known.any()):
        raise ValueError(f"mask {name!r} is 0 everywhere; mark the known pixels by another number")
    return known


def _array(path: Path) -> Tensor:
    suffix = path.suffix.lower()
    try:
        if suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                arrays = dict(archive)
        elif suffix == ".safetensors":
            arrays = load(files.read(path))
        else:
            raise ValueError(f"its name ends in {suffix!r}")
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, SafetensorError) as error:
        raise ValueError(f"mask {str(path)!r} is no {FORMATS} file: {error}") from None
    if len(arrays) != 1:
        raise ValueError(f"mask {str(path)!r} holds {len(arrays)} arrays; give one")
    [values] = arrays.values()
    return torch.from_numpy(np.asarray(values != 0))


def _picture(path: Path) -> Tensor:
    from PIL import Image

    try:
        with Image.open(path, formats=("PNG",)) as image:
            return torch.from_numpy(np.array(image.convert("RGB")).any(2))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"mask {str(path)!r} is no {FORMATS} file: {error}") from None
