"""NIfTI files, written by hand after its standard: what is read, and what is refused."""

import gzip
import struct

import numpy as np
import pytest

from leakbound.data import load
from leakbound.data import nifti as nifti_module

CODES = {"u1": 2, "i2": 4, "i4": 8, "f4": 16, "f8": 64, "c8": 32}


def written(values, order="<", slope=0.0, shift=0.0, shape=None, start=352, code=None):
    """The bytes of a file with one volume of these values."""
    shape = values.shape if shape is None else shape
    kind = values.dtype.newbyteorder(order)
    head = struct.pack(f"{order}i", 348).ljust(40, b"\0")
    head += struct.pack(f"{order}8h", len(shape), *shape, *[1] * (7 - len(shape)))
    head = head.ljust(70, b"\0")
    code = CODES[values.dtype.str[1:]] if code is None else code
    head += struct.pack(f"{order}2h", code, 8 * values.dtype.itemsize)
    head = head.ljust(76, b"\0") + struct.pack(f"{order}8f", *[1.0] * 8)
    head += struct.pack(f"{order}3f", start, slope, shift)
    head = head.ljust(344, b"\0") + b"n+1\0"
    return head.ljust(352, b"\0") + values.astype(kind).tobytes(order="F")


def put(folder, *contents, name="{k}.nii"):
    for k, content in enumerate(contents):
        place = folder / f"c{k % 2}" / name.format(k=k)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return f"folder:{folder}"


def drawn(kind, shape=(4, 3, 5), seed=0):
    values = np.random.default_rng(seed).normal(size=shape) * 50
    return np.abs(values).astype(kind) if kind == "u1" else values.astype(kind)


@pytest.fixture(autouse=True)
def installed():
    pytest.importorskip("nibabel")


@pytest.mark.parametrize("kind", ["u1", "i2", "i4", "f4", "f8"])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("slope", "shift"), [(0.0, 0.0), (2.0, -7.0), (-1.0, 3.0)])
def test_values_become_parts_of_their_own_range(tmp_path, kind, order, slope, shift):
    first, second = drawn(kind), drawn(kind, seed=1)
    source = put(tmp_path, *(written(one, order, slope, shift) for one in (first, second)))
    data = load(source)
    assert data.domain.name == "volumes"
    assert data.class_names == ("c0", "c1")
    for found, values in zip(data.inputs[:, 0].numpy(), (first, second), strict=True):
        scaled = values.astype(float) * (slope or 1.0) + shift
        scaled = (scaled - scaled.min()) / (scaled.max() - scaled.min())
        np.testing.assert_allclose(found, scaled, atol=1e-5)


def test_packed_files_and_channels(tmp_path):
    values = drawn("f4", (4, 3, 5, 2))
    source = put(tmp_path, *[gzip.compress(written(values))] * 2, name="{k}.nii.gz")
    found = load(source).inputs
    assert found.shape == (2, 2, 4, 3, 5)
    flat = (values - values.min()) / (values.max() - values.min())
    np.testing.assert_allclose(found[0].numpy(), np.moveaxis(flat, -1, 0), atol=1e-6)


def test_a_constant_volume_is_black(tmp_path):
    assert not load(put(tmp_path, *[written(np.full((2, 2, 2), 7, "i2"))] * 2)).inputs.any()


GOOD = np.zeros((4, 3, 5), "i2")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (written(GOOD)[:-1], "declares 472 bytes, but holds 471"),
        (written(GOOD, shape=(4, 3)), r"has shape \(4, 3\)"),
        (written(GOOD, shape=(3000, 3000, 3000)), "declares 27,000,000,000 voxels"),
        (written(GOOD, start=0), "has its numbers at byte 0"),
        (written(np.zeros((4, 3, 5), "c8")), "holds complex64"),
        (written(np.full((4, 3, 5), np.nan, "f4")), "holds NaN or infinity"),
        (written(GOOD, code=9999), "it is damaged, or no NIfTI-1 file"),
        (b"\0" * 400, "it is damaged, or no NIfTI-1 file"),
        (b"", "declares 348 bytes, but holds 0"),
        (b"\x1f\x8b" + b"\1" * 400, "cannot be unpacked"),
    ],
)
def test_what_is_refused(tmp_path, content, words):
    with pytest.raises(ValueError, match=words):
        load(put(tmp_path, content, written(GOOD)))


def test_a_small_file_does_not_unpack_into_much_memory(tmp_path, monkeypatch):
    taken = []
    real = nifti_module._begin
    monkeypatch.setattr(nifti_module, "_begin", lambda *args: taken.append(args[2]) or real(*args))
    bomb = gzip.compress(written(GOOD) + bytes(10**7))
    found = load(put(tmp_path, bomb, bomb, name="{k}.nii.gz"))
    assert found.inputs.shape == (2, 1, 4, 3, 5)
    assert max(taken) == 352 + GOOD.nbytes


def test_sizes_and_mixtures(tmp_path):
    source = put(tmp_path / "a", written(GOOD), written(np.zeros((4, 3, 6), "i2")))
    with pytest.raises(ValueError, match=r"has 4 x 3 x 6 pixels, but .* has 4 x 3 x 5; resample"):
        load(source)
    with pytest.raises(ValueError, match="a volume has no size or channels"):
        load(put(tmp_path / "b", written(GOOD), written(GOOD)), size=8)


def test_without_nibabel_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "nibabel", None)
    with pytest.raises(ValueError, match=r"pip install 'leakbound\[medical\]'"):
        load(put(tmp_path, written(GOOD)))
