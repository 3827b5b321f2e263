import os
import pickle
import struct

import numpy as np
import pytest

from leakbound.data import load
from leakbound.data import raw as raw_module

PIXELS = (np.arange(2 * 3072) % 256).astype(np.uint8).reshape(2, 3072)


def binary(labels, extra=()):
    rows = zip(labels, PIXELS, strict=True)
    return b"".join(bytes([*extra, label]) + row.tobytes() for label, row in rows)


def python(labels=(3, 9), data=PIXELS, key=b"labels", protocol=2, **more):
    return pickle.dumps({b"data": data, key: list(labels), **more}, protocol=protocol)


def legacy():
    """A batch as Python 2 wrote it: byte strings, old module names, protocol 2."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b")
    array += b"\x87R(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
    array += b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array += b"\x89T" + struct.pack("<I", PIXELS.size) + PIXELS.tobytes() + b"tb"
    labels = text(b"labels") + b"](K\x03K\x09e"
    return b"\x80\x02}(" + text(b"data") + array + labels + b"u."


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


@pytest.mark.parametrize("protocol", range(6))
def test_python_batches_of_every_protocol(protocol, tmp_path):
    (tmp_path / "data_batch_1").write_bytes(python(protocol=protocol))
    data = load(f"cifar:{tmp_path / 'data_batch_1'}")
    check(data)
    assert data.class_names[3] == "cat"


def test_python_batches_of_python_2(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(legacy())
    check(load(f"cifar:{tmp_path}"))


def test_fine_labels_are_cifar_100(tmp_path):
    (tmp_path / "train").write_bytes(python(key=b"fine_labels", coarse_labels=[1, 2]))
    check(load(f"cifar:{tmp_path}"), 100)


def test_a_folder_joins_its_batches_by_name(tmp_path):
    for name, labels in {
        "data_batch_2": (2, 2),
        "test_batch": (9, 9),
        "data_batch_1": (1, 1),
    }.items():
        (tmp_path / name).write_bytes(python(labels))
    (tmp_path / "batches.meta").write_bytes(b"not read")
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
        ({"a.bin": binary((1, 2)), "test_batch": python()}, "binary and Python batches"),
        ({"a.txt": b""}, "holds no batch"),
        ({"train": b""}, "is not a Python batch"),
        ({"train": python()[:-100]}, "is not a Python batch"),
        ({"train": pickle.dumps([1, 2])}, "holds no dictionary"),
        ({"train": pickle.dumps({"data": 1})}, "lacks an array data"),
        ({"train": python((3,))}, "6144 bytes of pixels and 1 labels"),
        ({"train": python((3, -1))}, "labels that are not whole numbers"),
        ({"train": python((3, 10**30))}, "labels that are not whole numbers"),
        ({"train": python((3, 11))}, "labels from 3 to 11"),
        ({"train": python((3, 9.0))}, "labels that are not whole numbers"),
        ({"train": python(data=PIXELS.astype(float))}, "not an \\(N, 3072\\) array"),
        ({"train": python(data=np.asfortranarray(PIXELS))}, "not an \\(N, 3072\\) array"),
        ({"train": python(data=PIXELS.reshape(2, 3, 32, 32))}, "not an \\(N, 3072\\) array"),
        ({"train": python(data=PIXELS.astype(object))}, "not an \\(N, 3072\\) array"),
    ],
)
def test_wrong_batches_are_refused(files, words, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        load(f"cifar:{tmp_path}")


class Evil:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_a_command_is_refused_unrun(protocol, tmp_path):
    trace = tmp_path / "trace"
    evil = Evil(os.system, f"touch {trace}")
    (tmp_path / "test_batch").write_bytes(python(protocol=protocol, evil=evil))
    with pytest.raises(ValueError, match=r"asks for the Python object (posix|nt)\.system"):
        load(f"cifar:{tmp_path}")
    assert not trace.exists()


@pytest.mark.parametrize("name", ["builtins eval", "numpy load", "numpy ndarray.tofile", "a\x1b b"])
def test_only_the_names_of_an_array_are_admitted(name, tmp_path):
    module, attribute = name.split(" ")
    (tmp_path / "train").write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(ValueError, match="asks for the Python object") as caught:
        load(f"cifar:{tmp_path}")
    assert str(caught.value).isprintable()


def test_other_codecs_are_refused(tmp_path):
    (tmp_path / "train").write_bytes(b"c_codecs\nencode\n(Vaa\nVhex\ntR.")
    with pytest.raises(ValueError, match="codec 'hex'"):
        load(f"cifar:{tmp_path}")


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02Nr\xff\xff\xff\xff.",
        b"Np4000000000\n.",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
        b"cnumpy\nndarray\n(I100000000000\ntR.",
        b"cnumpy\ndtype\n}Vcode\nI1\nsb.",
    ],
)
def test_opcodes_that_declare_much_or_misuse_names_are_refused(content, tmp_path):
    (tmp_path / "train").write_bytes(content)
    with pytest.raises(ValueError, match=r"is not a Python batch|holds no dictionary"):
        load(f"cifar:{tmp_path}")


def test_an_array_that_declares_more_than_it_holds_is_refused(tmp_path):
    content = python().replace(b"K\x02M\x00\x0c", b"K\x09M\x00\x0c")
    assert content != python()
    (tmp_path / "train").write_bytes(content)
    with pytest.raises(ValueError, match="not an \\(N, 3072\\) array"):
        load(f"cifar:{tmp_path}")


def test_batches_above_the_limit_are_refused(tmp_path, monkeypatch):
    (tmp_path / "a.bin").write_bytes(binary((3, 9)))
    monkeypatch.setattr(raw_module, "MAX_BYTES", 6000)
    with pytest.raises(ValueError, match="the limit is"):
        load(f"cifar:{tmp_path}")
