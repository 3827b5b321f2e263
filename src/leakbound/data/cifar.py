"""The batch files of CIFAR-10 and CIFAR-100, binary and Python."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from leakbound.data.pickles import read_batch
from leakbound.data.raw import Options, Raw, read_file, within_limit

_PIXELS = 3 * 32 * 32
_TEN = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_PYTHON = ("data_batch", "test_batch", "train", "test")


def read_cifar(path: Path, options: Options) -> Raw:
    """Images of a batch file, or of all batch files of a folder by name, in their order.

    Binary batches end in `.bin`; Python batches (`data_batch_1`, `test_batch`, `train`, `test`) are
    read by an unpickler that admits arrays and plain containers only. CIFAR-100 gives its 100 fine
    labels.

    Raises:
        ValueError: no batch, a size that fits neither format, or a pickle of anything else.
    """
    files = _files(path)
    within_limit(f"the batches of {str(path)!r}", sum(file.stat().st_size for file in files))
    parts = [_binary(f) if f.suffix == ".bin" else _python(f) for f in files]
    kinds = {classes for _, _, classes in parts}
    if len(kinds) > 1:
        raise ValueError(f"{str(path)!r} holds batches of CIFAR-10 and CIFAR-100; name one file")
    classes = kinds.pop()
    images, labels = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ValueError(
            f"{str(path)!r} has labels from {int(labels.min())} to {int(labels.max())}; "
            f"CIFAR-{classes} has 0..{classes - 1}: get it again"
        )
    names = _TEN if classes == 10 else tuple(str(k) for k in range(classes))
    return Raw(images.reshape(-1, 3, 32, 32), labels, names)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{str(path)!r} does not exist; check the path")
    files = sorted(file for file in path.iterdir() if file.is_file())
    binary = [file for file in files if file.suffix == ".bin"]
    python = [f for f in files if not f.suffix and f.name.rstrip("_0123456789") in _PYTHON]
    if binary and python:
        raise ValueError(f"{str(path)!r} holds binary and Python batches; name one file")
    if not binary and not python:
        raise ValueError(f"{str(path)!r} holds no batch such as data_batch_1 or data_batch_1.bin")
    return binary or python


def _binary(path: Path) -> tuple[Tensor, Tensor, int]:
    data = read_file(path)
    if not data:
        raise ValueError(f"{str(path)!r} is empty; get it again")
    records = {10: _PIXELS + 1, 100: _PIXELS + 2}
    fitting = [classes for classes, record in records.items() if len(data) % record == 0]
    if not fitting:
        raise ValueError(
            f"{str(path)!r} has {len(data)} bytes, a multiple of neither 3073 (CIFAR-10) nor 3074 "
            "(CIFAR-100); get it again"
        )
    if len(fitting) > 1:
        fitting = [c for c, names in ((10, _PYTHON[:2]), (100, _PYTHON[2:]))
                   if path.stem.rstrip("_0123456789") in names]  # fmt: skip
    if len(fitting) != 1:
        raise ValueError(
            f"{str(path)!r} fits CIFAR-10 and CIFAR-100 by its size; rename it to test_batch.bin "
            "(CIFAR-10) or test.bin (CIFAR-100)"
        )
    table = torch.frombuffer(data, dtype=torch.uint8).reshape(-1, records[fitting[0]])
    return table[:, -_PIXELS:], table[:, -_PIXELS - 1].long(), fitting[0]


def _python(path: Path) -> tuple[Tensor, Tensor, int]:
    data, labels, classes = read_batch(read_file(path), repr(str(path)))
    if len(data) != len(labels) * _PIXELS or not labels:
        raise ValueError(
            f"{str(path)!r} holds {len(data)} bytes of pixels and {len(labels)} labels; "
            f"give {_PIXELS} bytes a label"
        )
    pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(-1, _PIXELS)
    return pixels, torch.tensor(labels), classes
