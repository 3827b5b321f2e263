import numpy as np
import pytest

from leakbound.data import load
from leakbound.data import raw as raw_module

PIXELS = (np.arange(2 * 3072) % 256).astype(np.uint8).reshape(2, 3072)


def binary(labels, extra=()):
    rows = zip(labels, PIXELS, strict=True)
    return b"".join(bytes([*extra, label]) + row.tobytes() for label, row in rows)


def check(data, classes=10):
    assert data.inputs.shape == (2, 3, 32, 32)
    assert (data.inputs * 255).round().flatten().tolist() == PIXELS.flatten().tolist()
    assert data.labels.tolist() == [3, 9]
    assert data.classes == len(data.class_names) == classes


@pytest.mark.parametrize(("extra", "classes"), [((), 10), ((7,), 100)])
def test_binary_batches(extra, classes, tmp_path):
    (tmp_path / "batch.bin").write_bytes(binary((3, 9), extra))
    check(load(f"cifar:{tmp_path / 'batch.bin'}"), classes)
    check(load(f"cifar:{tmp_path}"), classes)


def test_a_folder_joins_its_batches_by_name(tmp_path):
    for name, labels in {
        "data_batch_2": (2, 2),
        "test_batch": (9, 9),
        "data_batch_1": (1, 1),
    }.items():
        (tmp_path / f"{name}.bin").write_bytes(binary(labels))
    (tmp_path / "batches.meta.txt").write_bytes(b"not read")
    (tmp_path / "data_batch_3").write_bytes(b"not read")
    assert load(f"cifar:{tmp_path}").labels.tolist() == [1, 1, 2, 2, 9, 9]


def test_a_size_that_fits_both_is_settled_by_name(tmp_path):
    content = bytes(3073 * 3074)
    (tmp_path / "data_batch_1.bin").write_bytes(content)
    assert load(f"cifar:{tmp_path}", limit=1).classes == 10
    (tmp_path / "data_batch_1.bin").rename(tmp_path / "train.bin")
    assert load(f"cifar:{tmp_path}", limit=1).classes == 100
    (tmp_path / "train.bin").rename(tmp_path / "pictures.bin")
    with pytest.raises(ValueError, match="fits CIFAR-10 and CIFAR-100"):
        load(f"cifar:{tmp_path}")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.bin": b""}, "is empty"),
        ({"a.bin": bytes(3072)}, "3072 bytes, a multiple of neither"),
        ({"a.bin": binary((3, 10))}, "labels from 3 to 10; CIFAR-10 has 0..9"),
        ({"a.bin": binary((1, 2)), "b.bin": binary((1, 2), (0,))}, "CIFAR-10 and CIFAR-100"),
        ({"a.txt": b""}, "holds no binary batch"),
        ({"data_batch_1": b"pickled"}, "pickles, which can run code.*download the binary version"),
    ],
)
def test_wrong_batches_are_refused(files, words, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        load(f"cifar:{tmp_path}")


def test_batches_above_the_limit_are_refused(tmp_path, monkeypatch):
    (tmp_path / "a.bin").write_bytes(binary((3, 9)))
    monkeypatch.setattr(raw_module, "MAX_BYTES", 6000)
    with pytest.raises(ValueError, match="the limit is"):
        load(f"cifar:{tmp_path}")
