import gzip
import struct

import pytest

from leakbound.data import load


def images_bytes(count=3, height=2, width=4, body=None):
    body = bytes(range(count * height * width)) if body is None else body
    return struct.pack(">IIII", 0x803, count, height, width) + body


def labels_bytes(labels=(2, 0, 1)):
    return struct.pack(">II", 0x801, len(labels)) + bytes(labels)


def write(folder, images=None, labels=None, start="train", packed=False):
    opener, suffix = (gzip.compress, ".gz") if packed else (bytes, "")
    file = folder / f"{start}-images-idx3-ubyte{suffix}"
    file.write_bytes(opener(images_bytes() if images is None else images))
    (folder / f"{start}-labels-idx1-ubyte{suffix}").write_bytes(
        opener(labels_bytes() if labels is None else labels)
    )
    return file


@pytest.mark.parametrize("packed", [False, True])
def test_a_pair_loads_by_file_by_folder_and_by_start(packed, tmp_path):
    file = write(tmp_path, packed=packed)
    data = load(f"idx:{file}")
    assert data.inputs.shape == (3, 1, 2, 4)
    assert (data.inputs * 255).round().flatten().tolist() == list(range(24))
    assert data.labels.tolist() == [2, 0, 1]
    assert data.class_names == ("0", "1", "2")
    for path in (tmp_path, tmp_path / "train"):
        assert load(f"idx:{path}").fingerprint == data.fingerprint
    assert load(f"idx:{file}", limit=1).classes == 3


def test_dotted_names_and_mixed_packing_are_found(tmp_path):
    (tmp_path / "t10k-images.idx3-ubyte").write_bytes(images_bytes())
    (tmp_path / "t10k-labels.idx1-ubyte.gz").write_bytes(gzip.compress(labels_bytes()))
    assert len(load(f"idx:{tmp_path}").inputs) == 3


def test_plain_and_packed_copies_are_one_pair(tmp_path):
    write(tmp_path)
    write(tmp_path, packed=True)
    assert len(load(f"idx:{tmp_path}").inputs) == 3


def test_several_pairs_are_listed(tmp_path):
    write(tmp_path)
    write(tmp_path, start="t10k")
    with pytest.raises(ValueError, match=r"name one of .*t10k-images.*train-images"):
        load(f"idx:{tmp_path}")
    assert len(load(f"idx:{tmp_path / 't10k'}").inputs) == 3


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("count", [4, 10**6, 10**9])
def test_a_header_that_declares_more_than_the_file_holds_is_refused(count, packed, tmp_path):
    lying = images_bytes(count, 28, 28, body=bytes(1000))
    file = write(tmp_path, lying, packed=packed)
    with pytest.raises(ValueError, match=f"declares shape \\({count}, 28, 28\\)|GiB"):
        load(f"idx:{file}")


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_holds_more_than_declared_is_refused(packed, tmp_path):
    with pytest.raises(ValueError, match="24 bytes, but holds more"):
        load(f"idx:{write(tmp_path, images_bytes() + b'x', packed=packed)}")


def test_a_gzip_bomb_is_read_no_further_than_declared(tmp_path):
    file = write(tmp_path, images_bytes(body=bytes(200 << 20)), packed=True)
    with pytest.raises(ValueError, match="24 bytes, but holds more"):
        load(f"idx:{file}")


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (b"", "starts with ''"),
        (b"\0\0\x08\x03\0\0", "ends within its header"),
        (b"\0\0\x0d\x03" + bytes(12), "starts with '00000d03'"),
        (labels_bytes(), "starts with '00000801'"),
        (images_bytes(0), "holds no image"),
    ],
)
def test_a_wrong_header_is_refused(images, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        load(f"idx:{write(tmp_path, images)}")


@pytest.mark.parametrize("cut", [5, 20, -5])
def test_damaged_gzip_is_refused(cut, tmp_path):
    file = write(tmp_path, packed=True)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match="is not gzip, or is damaged or truncated"):
        load(f"idx:{file}")
    file.write_bytes(images_bytes())
    with pytest.raises(ValueError, match="is not gzip, or is damaged or truncated"):
        load(f"idx:{file}")


def test_labels_must_be_there_and_match(tmp_path):
    file = write(tmp_path, labels=labels_bytes((1, 2)))
    with pytest.raises(ValueError, match=r"holds 3 images and .* 2 labels"):
        load(f"idx:{file}")
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match="put 'train-labels-idx1-ubyte' into the same folder"):
        load(f"idx:{file}")


def test_a_file_under_another_name_has_no_labels(tmp_path):
    (tmp_path / "pictures").write_bytes(images_bytes())
    with pytest.raises(ValueError, match="has no labels next to it"):
        load(f"idx:{tmp_path / 'pictures'}")
