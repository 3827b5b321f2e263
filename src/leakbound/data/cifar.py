"""Binary batch files of CIFAR-10 and CIFAR-100. The batches for Python are pickles: refused."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from leakbound.data.raw import Options, Raw, read_file, within_limit

_PIXELS = 3 * 32 * 32
_TEN = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_STEMS = {"data_batch": 10, "test_batch": 10, "train": 100, "test": 100}


def read_cifar(path: Path, options: Options) -> Raw:
    """Images of a batch file, or of all of a folder by name; CIFAR-100 gives its fine labels."""
    files = _files(path)
    # Together: each file alone may keep the limit.
    within_limit(f"the batches of {str(path)!r}", sum(file.stat().st_size for file in files))
    parts = [_binary(file) for file in files]
    kinds = {classes for _, _, classes in parts}
    if len(kinds) > 1:
        raise ValueError(f"{str(path)!r} holds batches of CIFAR-10 and CIFAR-100; name one file")
    classes = kinds.pop()
    images = torch.cat([p[0] for p in parts])
    labels = torch.cat([p[1] for p in parts])
    low = int(labels.min())
    high = int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"{str(path)!r} has labels from {low} to {high}; "
            f"CIFAR-{classes} has 0..{classes - 1}: download it again"
        )
    names = _TEN if classes == 10 else tuple(str(k) for k in range(classes))
    return Raw(images.reshape(-1, 3, 32, 32), labels, names)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"{str(path)!r} does not exist; check the path")
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.is_file())
    batches = [file for file in files if file.suffix == ".bin"]
    if not batches:
        raise ValueError(
            f"{str(path)!r} holds no binary batch such as data_batch_1.bin. The version for Python "
            "is made of pickles, which can run code when opened, and is refused: download the "
            "binary version, or save images and labels with numpy.savez and give npz:PATH"
        )
    return batches


def _binary(path: Path) -> tuple[Tensor, Tensor, int]:
    data = read_file(path)
    if not data:
        raise ValueError(f"{str(path)!r} is empty; download it again")
    widths = {10: _PIXELS + 1, 100: _PIXELS + 2}
    fitting = [classes for classes, width in widths.items() if len(data) % width == 0]
    if not fitting:
        raise ValueError(
            f"{str(path)!r} has {len(data)} bytes, a multiple of neither 3073 (CIFAR-10) nor 3074 "
            "(CIFAR-100); download it again"
        )
    if len(fitting) > 1:  # 3073 * 3074 bytes fit both; only the name tells
        fitting = [_STEMS.get(path.stem.rstrip("_0123456789"), 0)]
    if not fitting[0]:
        raise ValueError(
            f"{str(path)!r} fits CIFAR-10 and CIFAR-100 by its size; rename it to test_batch.bin "
            "(CIFAR-10) or test.bin (CIFAR-100)"
        )
    table = torch.frombuffer(data, dtype=torch.uint8).reshape(-1, widths[fitting[0]])
    # CIFAR-100 has the coarse label first; the fine one is next to the pixels.
    return table[:, -_PIXELS:], table[:, -_PIXELS - 1].long(), fitting[0]
