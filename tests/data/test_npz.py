import io
import zipfile

import numpy as np
import pytest
import torch

from leakbound.data import load
from leakbound.data import raw as raw_module

LABELS = np.array([0, 2])


def save(path, **arrays):
    np.savez(path, **arrays)
    return f"npz:{path}"


def member(array):
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array)
    return buffer.getvalue()


def forge(path, images, labels=None, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("x.npy", images)
        archive.writestr("y.npy", member(LABELS) if labels is None else labels)
    return f"npz:{path}"


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 4, 5), (2, 1, 4, 5)),
        ((2, 4, 5, 3), (2, 3, 4, 5)),
        ((2, 4, 5, 1), (2, 1, 4, 5)),
        ((2, 3, 4, 5), (2, 3, 4, 5)),
        ((2, 1, 4, 5), (2, 1, 4, 5)),
        ((2, 1, 3, 4, 5), (2, 1, 3, 4, 5)),
        ((2, 4, 3, 4, 5), (2, 4, 3, 4, 5)),
    ],
)
def test_shapes(shape, expected, tmp_path):
    data = load(save(tmp_path / "a.npz", inputs=np.zeros(shape), labels=LABELS))
    assert data.inputs.shape == expected
    assert data.classes == 3


@pytest.mark.parametrize(("shape", "places"), [((1, 4, 5), (4, 5)), ((2, 3, 4, 5), (3, 4, 5))])
@pytest.mark.parametrize("channel", [False, True])
def test_class_maps(shape, places, channel, tmp_path):
    draws = np.random.default_rng(0)
    images = draws.integers(0, 256, (2, *shape), dtype=np.uint8)
    maps = draws.integers(0, 3, (2, *places), dtype=np.uint8)
    maps[0].flat[0] = 2
    data = load(save(tmp_path / "a.npz", x=images, y=maps[:, None] if channel else maps))
    assert data.classes == 3
    assert np.array_equal(data.labels.numpy(), maps)
    assert np.allclose(data.inputs.numpy() * 255, images, atol=1e-4)
    source = save(tmp_path / "b.npz", x=images, y=maps[..., 1:])
    with pytest.raises(ValueError, match=r"labels have shape .*, or class maps \(N, "):
        load(source)


@pytest.mark.parametrize("kind", ["u1", "?", "f4"])
def test_several_labels(kind, tmp_path):
    labels = np.array([[0, 1, 1], [1, 0, 1]], kind)
    data = load(save(tmp_path / "a.npz", x=np.zeros((2, 4, 5)), y=labels))
    assert data.labels.dtype == torch.float32
    assert np.array_equal(data.labels.numpy(), labels)
    assert data.class_names == ("0", "1", "2")
    other = load(save(tmp_path / "b.npz", x=np.zeros((2, 4, 5)), y=labels[::-1]))
    assert other.fingerprint != data.fingerprint


def test_a_volume_is_not_resized(tmp_path):
    source = save(tmp_path / "a.npz", x=np.zeros((2, 1, 4, 4, 4)), y=LABELS)
    assert load(source).domain.name == "volumes"
    for more in ({"size": 8}, {"channels": 3}):
        with pytest.raises(ValueError, match="a volume has no size or channels to change"):
            load(source, **more)


@pytest.mark.parametrize("names", [("inputs", "labels"), ("x", "y"), ("images", "labels")])
@pytest.mark.parametrize("kind", ["u1", "<i8", ">i2", "f2", ">f4", "f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_names_types_and_orders(names, kind, order, tmp_path):
    values = np.arange(2 * 4 * 5).reshape(2, 4, 5, order=order)
    images = (values / 255 if "f" in kind else values).astype(kind, order=order)
    data = load(save(tmp_path / "a.npz", **{names[0]: images, names[1]: LABELS}))
    assert np.allclose(data.inputs[:, 0].numpy() * 255, values, atol=0.1)


def test_images_of_twelve_bits_need_bits(tmp_path):
    values = np.random.default_rng(0).integers(0, 4096, (2, 4, 5), dtype=np.uint16)
    source = save(tmp_path / "a.npz", x=values, y=LABELS)
    with pytest.raises(ValueError, match=r"whole numbers in 0..255, or bits = 12 for images of 12"):
        load(source)
    assert np.allclose(load(source, bits=12).inputs[:, 0].numpy(), values / 4095, atol=1e-6)
    with pytest.raises(ValueError, match=r"give whole numbers in 0..1023$"):
        load(source, bits=10)
    with pytest.raises(ValueError, match="bits is 12, but the images are floats"):
        load(save(tmp_path / "b.npz", x=values / 4095, y=LABELS), bits=12)


def test_compressed_arrays_are_read(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", x=np.ones((2, 4, 4)), y=LABELS)
    assert load(f"npz:{tmp_path / 'a.npz'}").inputs.min() == 1


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.full((2, 4, 4), np.nan), "y": LABELS}, "NaN"),
        ({"x": np.full((2, 4, 4), np.inf), "y": LABELS}, "infinity"),
        ({"x": np.full((2, 4, 4), 255.0), "y": LABELS}, "scale floats"),
        ({"x": np.full((2, 4, 4), 256), "y": LABELS}, "0..255"),
        ({"x": np.full((2, 4, 4), -1), "y": LABELS}, "0..255"),
        ({"x": np.zeros((2, 3, 4, 3)), "y": LABELS}, "ambiguous"),
        ({"x": np.zeros((2, 4, 4, 4)), "y": LABELS}, "not found"),
        ({"x": np.zeros((2, 4)), "y": LABELS}, "not found"),
        ({"x": np.zeros((0, 4, 4)), "y": LABELS[:0]}, "holds no image"),
        ({"x": np.float64(1), "y": LABELS}, "holds no image"),
        ({"x": np.zeros((3, 4, 4)), "y": LABELS}, "3 images and 2 labels"),
        ({"x": np.zeros((2, 4, 4)), "y": np.array([0, -1])}, "labels from -1"),
        ({"x": np.zeros((2, 4, 4)), "y": np.array([0, 10**12])}, "labels from 0 to 10000"),
        ({"x": np.zeros((2, 4, 4)), "y": np.array([0, 2**64 - 1], "u8")}, "labels from -1"),
        ({"x": np.zeros((2, 4, 4)), "y": np.array([0.0, 1.0])}, "whole numbers"),
        (
            {"x": np.zeros((2, 4, 4)), "y": LABELS[:, None]},
            "hold 2; .* one class number",
        ),
        ({"x": np.zeros((2, 4, 4)), "y": np.array([[0, 1], [1, 3]])}, "hold 3; .* a 0 or 1"),
        ({"x": np.zeros((2, 4, 4)), "y": np.array([["a"], ["b"]])}, "labels|type"),
        ({"x": np.zeros((2, 4, 4)), "inputs": np.zeros((2, 4, 4)), "y": LABELS}, "holds 2 arrays"),
        ({"x": np.zeros((2, 4, 4))}, "0 arrays named labels or y .it holds: 'x.npy'"),
        ({"x": np.zeros((2, 4, 4), bool), "y": LABELS}, "type bool"),
        ({"x": np.zeros((2, 4, 4), object), "y": LABELS}, "type object"),
        ({"x": np.zeros((2, 4, 4), complex), "y": LABELS}, "type complex"),
    ],
)
def test_wrong_arrays_are_refused(arrays, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        load(save(tmp_path / "a.npz", **arrays))


def header(shape, descr="'|u1'"):
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize("count", [3, 10**9, 10**30])
def test_a_header_that_declares_more_than_the_member_is_refused(count, tmp_path):
    source = forge(tmp_path / "a.npz", header((count, 4, 4)) + bytes(32))
    with pytest.raises(ValueError, match=rf"'x.npy' declares shape \({count}, 4, 4\).*holds 32"):
        load(source)


def test_an_array_above_the_limit_is_refused(tmp_path, monkeypatch):
    source = forge(tmp_path / "a.npz", member(np.zeros((2, 64, 64), np.uint8)))
    monkeypatch.setattr(raw_module, "MAX_BYTES", 8000)
    with pytest.raises(ValueError, match=r"array 'x.npy' takes"):
        load(source)


def test_a_member_that_declares_more_than_the_archive_is_refused(tmp_path):
    source = forge(
        tmp_path / "a.npz", header((10**9, 1, 1)) + bytes(9), method=zipfile.ZIP_DEFLATED
    )
    data = bytearray((tmp_path / "a.npz").read_bytes())
    start = data.index(b"PK\x01\x02") + 24
    size = 10**9 + len(header((10**9, 1, 1)))
    data[start : start + 4] = size.to_bytes(4, "little")
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(ValueError, match=r"'x.npy' is truncated|damaged"):
        load(source)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"no array",
        b"\x93NUMPY\x09\x00",
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}",
        header((2, -4, 4)),
        header("(" * 5000),
        header("None"),
        header((2, 4, 4), "__import__('os').system('false')"),
        header((2, 4, 4), "[('a', 'O')]"),
    ],
)
def test_a_wrong_array_header_is_refused(head, tmp_path):
    with pytest.raises(ValueError, match=r"'x.npy'"):
        load(forge(tmp_path / "a.npz", head + bytes(32)))


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", LABELS)
    with pytest.raises(ValueError, match="is not a zip archive"):
        load(f"npz:{tmp_path / 'a.npy'}")
