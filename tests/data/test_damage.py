"""Files with flipped bits, cut short or patched: only ValueError leaves, and it names the file."""

from __future__ import annotations

import gzip
import io
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from leakbound import tensors
from leakbound.data import load
from leakbound.models.custom import load_weights

MUTATIONS = 200
PATCHES = (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\0", b"PK\1\2", b"PK\5\6")
LABELS = b"\0\0\x08\x01" + struct.pack(">I", 4) + bytes(range(4))


def _picture(kind: str) -> bytes:
    values = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, kind)
    return buffer.getvalue()


def _arrays(save: Callable[..., None]) -> bytes:
    buffer = io.BytesIO()
    save(buffer, inputs=np.arange(150).reshape(6, 5, 5) / 150, labels=np.arange(6) % 2)
    return buffer.getvalue()


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for k in range(4):
            archive.writestr(f"c{k % 2}/{k}.png", _picture("png"))
    return buffer.getvalue()


def _idx() -> bytes:
    return b"\0\0\x08\x03" + struct.pack(">III", 4, 5, 5) + bytes(range(100))


def _cifar() -> bytes:
    return bytes([1, *[0] * 3072, 2, *[0] * 3072])


def _safetensors() -> bytes:
    return save({"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)}, {"a": "b"})


def _weights(path: Path) -> None:
    load_weights(torch.nn.Linear(3, 2), path)


def _folder(path: Path) -> None:
    load(f"folder:{path.parent}")


CASES = {
    "npz": ("a.npz", lambda: _arrays(np.savez), lambda path: load(f"npz:{path}")),
    "npz, deflated": (
        "a.npz",
        lambda: _arrays(np.savez_compressed),
        lambda path: load(f"npz:{path}"),
    ),
    "npz of tensors": ("a.npz", lambda: _arrays(np.savez), tensors.read),
    "safetensors": ("a.safetensors", _safetensors, tensors.read),
    "weights": ("a.safetensors", _safetensors, _weights),
    "zip": ("a.zip", _zip, lambda path: load(f"zip:{path}")),
    "idx": ("t-images-idx3-ubyte", _idx, lambda path: load(f"idx:{path}")),
    "idx.gz": (
        "t-images-idx3-ubyte.gz",
        lambda: gzip.compress(_idx(), mtime=0),
        lambda path: load(f"idx:{path}"),
    ),
    "cifar": ("data_batch_1.bin", _cifar, lambda path: load(f"cifar:{path}")),
    "png": ("a.png", lambda: _picture("png"), _folder),
    "jpeg": ("a.jpg", lambda: _picture("jpeg"), _folder),
    "webp": ("a.webp", lambda: _picture("webp"), _folder),
    "bmp": ("a.bmp", lambda: _picture("bmp"), _folder),
}


def mutated(content: bytes, source: random.Random) -> bytes:
    """Cut short, some bits flipped, a few bytes patched, or some left out or doubled."""
    data = bytearray(content)
    at, way = source.randrange(len(data)), source.randrange(5)
    if way == 0:
        del data[at:]
    elif way == 1:
        for _ in range(source.choice((1, 3, 10))):
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    elif way == 2:
        patch = source.choice(PATCHES)
        data[at : at + len(patch)] = patch
    elif way == 3:
        del data[at : at + source.randrange(1, 20)]
    else:
        data[at:at] = data[at : at + 20]
    return bytes(data)


@pytest.mark.filterwarnings("ignore:data source")
@pytest.mark.parametrize("kind", CASES)
def test_a_damaged_file_is_refused_by_its_name(kind, tmp_path):
    name, make, read = CASES[kind]
    (tmp_path / "t-labels-idx1-ubyte").write_bytes(LABELS)
    path, content, source = tmp_path / name, make(), random.Random(0)
    path.write_bytes(content)
    read(path)
    refused = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "data source")
        for _ in range(MUTATIONS):
            path.write_bytes(mutated(content, source))
            try:
                read(path)
            except ValueError as error:
                refused.append(str(error))
    assert len(refused) > MUTATIONS / 10
    assert [message for message in refused if name not in message] == []


@pytest.mark.parametrize("read", [lambda path: load(f"npz:{path}"), tensors.read])
def test_an_archive_whose_directory_lies_about_its_place(read, tmp_path):
    path = tmp_path / "a.npz"
    data = bytearray(_arrays(np.savez))
    end = data.rindex(b"PK\5\6")
    data[end + 16 : end + 20] = struct.pack("<I", 0x7FFFFFFF)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.npz"):
        read(path)


@pytest.mark.parametrize("read", [lambda path: load(f"npz:{path}"), tensors.read])
def test_an_archive_with_two_arrays_of_one_name_is_refused(read, tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(_arrays(np.savez))
    with zipfile.ZipFile(path) as archive:
        content = archive.read("inputs.npy")
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("inputs.npy", content)
    with pytest.raises(ValueError, match=r"a\.npz.*'inputs\.npy' twice"):
        read(path)


def test_an_archive_with_two_images_of_one_name_is_refused(tmp_path):
    path = tmp_path / "a.zip"
    path.write_bytes(_zip())
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("c0/0.png", _picture("png"))
    with pytest.raises(ValueError, match=r"a\.zip.*'c0/0\.png' twice"):
        load(f"zip:{path}")
