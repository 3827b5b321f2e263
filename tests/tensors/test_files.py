import io
import json
import os
import stat
import struct
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from leakbound import tensors

NAMED = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.zeros(2, dtype=torch.float64)}


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "u.safetensors"
    tensors.write(path, NAMED, {"leakbound.kind": "delta", "round": "3"})
    named, about = tensors.read(path)
    assert about == {"leakbound.kind": "delta", "round": "3"}
    assert named.keys() == NAMED.keys()
    assert all(torch.equal(named[k], v) and named[k].dtype == v.dtype for k, v in NAMED.items())


def test_a_written_file_is_the_owners_alone_and_leaves_nothing_else(tmp_path):
    tensors.write(tmp_path / "u.safetensors", NAMED)
    assert os.name == "nt" or stat.S_IMODE((tmp_path / "u.safetensors").stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["u.safetensors"]


def test_shared_and_strided_tensors_are_written(tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    tensors.write(tmp_path / "u.safetensors", {"a": whole.T, "b": whole[1], "c": whole})
    named, _ = tensors.read(tmp_path / "u.safetensors")
    assert torch.equal(named["a"], whole.T)
    assert torch.equal(named["b"], whole[1])


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "u.safetensors"
    tensors.write(path, NAMED)
    before = path.read_bytes()

    def fail(*args, **more):
        raise OSError("disk full")

    monkeypatch.setattr("os.write", fail)
    with pytest.raises(OSError, match="disk full"):
        tensors.write(path, {"x": torch.ones(1)})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["u.safetensors"]


@pytest.mark.parametrize("compressed", [False, True], ids=["stored", "deflated"])
@pytest.mark.parametrize("kind", ["f2", "<f4", ">f4", "f8", "i8", "?"])
def test_npz_of_all_types(kind, compressed, tmp_path):
    array = np.arange(6).reshape(2, 3).astype(kind)
    (np.savez_compressed if compressed else np.savez)(tmp_path / "u.npz", w=array, n=np.array(7))
    named, about = tensors.read(tmp_path / "u.npz")
    assert about == {}
    assert np.array_equal(named["w"].numpy(), array)
    assert named["n"].shape == ()


@pytest.mark.parametrize("name", ["u.pt", "u.pth", "u.bin", "u.pkl", "u.npy", "u", "u.txt"])
def test_pickles_and_others_are_refused_with_the_way_to_convert(name, tmp_path):
    torch.save(NAMED, tmp_path / name)
    with pytest.raises(ValueError, match=r"convert with safetensors.torch.save_file"):
        tensors.read(tmp_path / name)


def test_a_pickle_under_another_name_is_refused(tmp_path):
    torch.save(NAMED, tmp_path / "u.npz")
    with pytest.raises(ValueError, match="not of NumPy arrays"):
        tensors.read(tmp_path / "u.npz")
    torch.save(NAMED, tmp_path / "u.safetensors")
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        tensors.read(tmp_path / "u.safetensors")


def test_arrays_of_objects_are_refused(tmp_path):
    np.savez(tmp_path / "u.npz", w=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="Python objects are pickles"):
        tensors.read(tmp_path / "u.npz")


@pytest.mark.parametrize("left", [4, 40, -1], ids=["in the length", "in the header", "last byte"])
def test_a_truncated_file_is_refused(left, tmp_path):
    path = tmp_path / "u.safetensors"
    tensors.write(path, NAMED)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match="not a valid safetensors file, or is truncated"):
        tensors.read(path)


def test_a_safetensors_header_that_declares_more_than_the_file_is_refused(tmp_path):
    path = tmp_path / "u.safetensors"
    head = {"w": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        tensors.read(path)
    path.write_bytes(struct.pack("<Q", 2**62) + text)
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        tensors.read(path)


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(-1, -1)", "(-1,)", "(True,)"])
def test_an_npz_header_that_declares_another_size_is_refused(shape, tmp_path):
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    with zipfile.ZipFile(tmp_path / "u.npz", "w") as archive:
        archive.writestr("w.npy", head + bytes(4))
    with pytest.raises(ValueError, match="declares shape"):
        tensors.read(tmp_path / "u.npz")


def test_more_than_the_limit_is_refused_before_it_is_read(tmp_path):
    tensors.write(tmp_path / "u.safetensors", {"w": torch.zeros(1000)})
    np.savez_compressed(tmp_path / "u.npz", w=np.zeros(10**6))
    assert (tmp_path / "u.npz").stat().st_size < 10**5
    for name in ("u.safetensors", "u.npz"):
        with pytest.raises(ValueError, match="the limit is"):
            tensors.read(tmp_path / name, most=2000)


def test_a_member_that_unpacks_to_less_than_it_declares_is_refused(tmp_path):
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.zeros(100))
    with zipfile.ZipFile(tmp_path / "u.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w.npy", buffer.getvalue())
    data = bytearray((tmp_path / "u.npz").read_bytes())
    at = data.index(b"PK\x01\x02") + 24
    data[at : at + 4] = (10**9).to_bytes(4, "little")
    (tmp_path / "u.npz").write_bytes(data)
    with pytest.raises(ValueError, match=r"declares shape .* but holds 9999998"):
        tensors.read(tmp_path / "u.npz")


def test_values_of_unknown_types_are_refused(tmp_path):
    save_file({"w": torch.zeros(4).to(torch.float8_e4m3fn)}, tmp_path / "u.safetensors")
    with pytest.raises(ValueError, match=r"'w' .* type F8_E4M3; save it as floats"):
        tensors.read(tmp_path / "u.safetensors")
    np.savez(tmp_path / "u.npz", w=np.zeros(2, complex))
    with pytest.raises(ValueError, match="type complex128"):
        tensors.read(tmp_path / "u.npz")


def test_nothing_in_a_file_is_refused(tmp_path):
    save_file({}, tmp_path / "u.safetensors")
    with pytest.raises(ValueError, match="holds no tensor"):
        tensors.read(tmp_path / "u.safetensors")
    with pytest.raises(ValueError, match="does not exist"):
        tensors.read(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"give a name that ends in .safetensors"):
        tensors.write(tmp_path / "u.npz", NAMED)


@pytest.mark.parametrize("name", ["cat", "seen", "weights.pt", "weights.npz"])
def test_a_missing_file_is_called_missing_whatever_its_name(name, tmp_path):
    with pytest.raises(ValueError, match="does not exist; check the path"):
        tensors.read(tmp_path / name)
