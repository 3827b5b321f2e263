"""Files of named tensors: .safetensors, also in shards, and NumPy's .npz. Pickles are refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from leakbound._util import files
from leakbound.tensors.archive import open_archive, read_array
from leakbound.tensors.shards import INDEX, read_shards, weights_in

MOST_BYTES = 2**33
"""The most memory that one file of tensors may take, unless `read` gets another limit."""

SEALED = "written_by"
"""The metadata key that marks a file as written by leakbound."""
_KINDS = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"}


def read(path: Path, *, most: int = MOST_BYTES) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a .safetensors or .npz file by name, and the file's text metadata.

    A folder that `save_pretrained` wrote, or its index of shards, gives the tensors of all shards.
    Only a single .safetensors file has metadata. The sizes in a header are checked against the file
    and `most` bytes before memory is allocated.

    Raises:
        ValueError: the file has another format (for pickles, the error says how to convert them);
            is missing, damaged, truncated, empty, or larger than `most` bytes; or has values that
            are not numbers.
    """
    path = Path(path)
    if path.is_dir():
        path = weights_in(path) or path
    files.check_regular(path)
    about: dict[str, str] = {}
    if path.name.endswith(INDEX):
        named = read_shards(path, most, lambda shard, left: _whole(shard, left)[0])
    else:
        named, about = _whole(path, most)
    if not named:
        raise ValueError(f"{str(path)!r} holds no tensor; save the weights or the update again")
    return named, about


def _whole(path: Path, most: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    files.check_regular(path)
    if path.suffix == ".safetensors":
        return _safetensors(path, most)
    if path.suffix == ".npz":
        return _npz(path, most)
    raise ValueError(f"{str(path)!r} {_unread(path)}")


def _unread(path: Path) -> str:
    """Why a file of another type is not read, and what to give instead."""
    if path.suffix == ".gguf":
        return (
            "is a GGUF file: its weights are converted for inference, and no training sends them; "
            "give the .safetensors of the model that was trained"
        )
    if path.suffix == ".json" and not path.name.endswith(".bin.index.json"):
        return (
            "is a JSON file without tensors; give a .safetensors or .npz file, the folder that "
            f"save_pretrained wrote, or its index (model{INDEX})"
        )
    return (
        "is not a .safetensors or .npz file. Pickled files (.pt, .pth, .bin, "
        ".npy of objects) can run code when opened and are refused: convert with "
        "safetensors.torch.save_file(state_dict, 'update.safetensors'), or with "
        "numpy.savez('update.npz', **arrays)"
    )


def write(path: Path, named: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> None:
    """Write named tensors as .safetensors, in one step, readable by the owner only.

    An existing file is replaced only if this function wrote it. `about` is text metadata.

    Raises:
        ValueError: the name has another ending, or the file exists and leakbound did not write it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "update.safetensors"
        ...     write(file, {"weight": torch.ones(2)}, {"leakbound.kind": "gradient"})
        ...     read(file)
        ({'weight': tensor([1., 1.])}, {'leakbound.kind': 'gradient'})
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"path is {str(path)!r}; give a name that ends in .safetensors")
    # safetensors rejects tensors that share memory.
    own = {key: value.detach().cpu().contiguous().clone() for key, value in named.items()}
    text = {str(key): str(value) for key, value in (about or {}).items()}
    files.write(path, save(own, metadata={**text, SEALED: files.SEAL}))


def _safetensors(path: Path, most: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    # The format has no compression, so the size of the file bounds the memory.
    _fits(path, path.stat().st_size, most)
    try:
        with safe_open(path, framework="pt") as file:
            names = sorted(file.keys())
            kinds = {name: file.get_slice(name).get_dtype() for name in names}
            odd = [name for name in names if kinds[name] not in _KINDS]
            if odd:
                raise ValueError(
                    f"{odd[0]!r} of {str(path)!r} holds values of type {kinds[odd[0]]}; save it "
                    "as floats of 16, 32 or 64 bits"
                )
            about = dict(file.metadata() or {})
            about.pop(SEALED, None)
            named = {name: file.get_tensor(name) for name in names}
            if os.name == "nt":  # replaces no file while it is mapped
                named = {name: value.clone() for name, value in named.items()}
            return named, about
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{str(path)!r} is not a valid safetensors file, or is truncated: {error}; save it "
            "again with safetensors.torch.save_file(...)"
        ) from error


def _npz(path: Path, most: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    named = {}
    with open_archive(path) as archive:
        members = archive.infolist()
        if not members or not all(info.filename.endswith(".npy") for info in members):
            raise ValueError(
                "it is a zip archive, but not of NumPy arrays; save it with "
                "numpy.savez('update.npz', **arrays)"
            )
        # The unpacked sizes: a small deflated archive can unpack to a thousand times its size.
        _fits(path, sum(info.file_size for info in members), most)
        for info in members:
            array = read_array(archive, info, most)
            # PyTorch takes arrays in the byte order of the machine only.
            native = np.array(array, dtype=array.dtype.newbyteorder("="))
            named[info.filename.removesuffix(".npy")] = torch.from_numpy(native)
    return named, {}


def _fits(path: Path, size: int, most: int) -> None:
    if size > most:
        raise ValueError(
            f"{str(path)!r} takes {size / 2**30:.2f} GiB; the limit is {most / 2**30:.2f} GiB: "
            "save only the trained tensors, or use 16-bit floats"
        )
