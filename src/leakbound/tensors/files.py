"""Files of named tensors: .safetensors, also in shards, and NumPy's .npz. Pickles are refused.

Shards and their index are as `save_pretrained` writes large models.
"""

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

MOST_BYTES = 2**33
"""The most memory that one file of tensors may take, unless `read` gets another limit."""

WEIGHTS = "model.safetensors"
INDEX = ".safetensors.index.json"
"""How the name of an index of shards ends."""
MOST_JSON = 2**26
"""The most bytes of an index."""
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
SEALED = "written_by"
"""The metadata key that marks a file as written by leakbound."""
_KINDS = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"}


def read(
    path: Path,
    *,
    most: int = MOST_BYTES,
) -> tuple[dict[str, Tensor], dict[str, str]]:
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
        named = _shards(path, most)
    else:
        named, about = _whole(path, most)
    if not named:
        raise ValueError(f"{str(path)!r} holds no tensor; save the weights or the update again")
    return named, about


def weights_in(folder: Path) -> Path | None:
    """The file or index of weights in a folder that `save_pretrained` wrote; None: it holds none.

    Raises:
        ValueError: the folder holds pickles only.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(weights_in(Path(folder)))
        None
    """
    for name in (WEIGHTS, f"model{INDEX}"):
        if (folder / name).exists():
            return folder / name
    for name in PICKLED:
        if (folder / name).exists():
            raise ValueError(
                f"{str(folder)!r} holds {name}: pickles, which can run code when opened; save the "
                "model with save_pretrained(..., safe_serialization=True)"
            )
    return None


def _shards(path: Path, most: int) -> dict[str, Tensor]:
    """The tensors of all shards that an index names, of at most `most` bytes together."""
    what = f"index {str(path)!r}"
    shard_of = files.read_json(path, what, most=MOST_JSON).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise ValueError(f"{what} has no weight_map; give the index that save_pretrained wrote")
    for shard in shard_of.values():
        # Only beside the index: a path could lead out of the folder. On Linux a backslash is no
        # separator for `Path`.
        plain = isinstance(shard, str) and Path(shard).name == shard and "\\" not in shard
        if not plain or not shard.endswith(".safetensors"):
            raise ValueError(
                f"{what} names the shard {str(shard)[:60]!r}; give an index of .safetensors files "
                "in its own folder"
            )
    named: dict[str, Tensor] = {}
    for shard in sorted(set(shard_of.values())):
        part, _ = _whole(path.parent / shard, most)
        most -= sum(value.numel() * value.element_size() for value in part.values())
        wanted = {key for key, place in shard_of.items() if place == shard}
        if odd := sorted(wanted ^ part.keys()):
            where = "lacks" if odd[0] in wanted else "holds, but the index does not name,"
            raise ValueError(
                f"{str(path)!r}: the shard {shard} {where} {odd[0]}; give shards and index of one "
                "model"
            )
        named |= part
    return named


def _whole(path: Path, most: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    files.check_regular(path)
    if path.suffix == ".safetensors":
        return _safetensors(path, most)
    if path.suffix == ".npz":
        return _npz(path, most)
    why = (
        "is not a .safetensors or .npz file. Pickled files (.pt, .pth, .bin, "
        ".npy of objects) can run code when opened and are refused: convert with "
        "safetensors.torch.save_file(state_dict, 'update.safetensors'), or with "
        "numpy.savez('update.npz', **arrays)"
    )
    if path.suffix == ".gguf":
        why = (
            "is a GGUF file: its weights are converted for inference, and no training sends them; "
            "give the .safetensors of the model that was trained"
        )
    elif path.suffix == ".json" and not path.name.endswith(".bin.index.json"):
        why = (
            "is a JSON file without tensors; give a .safetensors or .npz file, the folder that "
            f"save_pretrained wrote, or its index (model{INDEX})"
        )
    raise ValueError(f"{str(path)!r} {why}")


def write(
    path: Path,
    named: Mapping[str, Tensor],
    about: Mapping[str, str] | None = None,
) -> None:
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
    copies = {key: value.detach().cpu().contiguous().clone() for key, value in named.items()}
    text = {str(key): str(value) for key, value in (about or {}).items()}
    files.write(path, save(copies, metadata={**text, SEALED: files.SEAL}))


def _safetensors(
    path: Path,
    most: int,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    # The format has no compression, so the size of the file bounds the memory.
    _fits(path, path.stat().st_size, most)
    try:
        with safe_open(path, framework="pt") as file:
            names = sorted(file.keys())
            for name in names:
                kind = file.get_slice(name).get_dtype()
                if kind not in _KINDS:
                    raise ValueError(
                        f"{name!r} of {str(path)!r} holds values of type {kind}; save it as floats "
                        "of 16, 32 or 64 bits"
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


def _fits(
    path: Path,
    size: int,
    most: int,
) -> None:
    if size > most:
        raise ValueError(
            f"{str(path)!r} takes {size / 2**30:.2f} GiB; the limit is {most / 2**30:.2f} GiB: "
            "save only the trained tensors, or use 16-bit floats"
        )
