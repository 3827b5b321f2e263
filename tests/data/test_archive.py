import io
import struct
import zipfile

import pytest
from PIL import Image

from leakbound.data import images as images_module
from leakbound.data import load
from leakbound.data import raw as raw_module


def png(value=0, size=(4, 4)):
    buffer = io.BytesIO()
    Image.new("L", size, value).save(buffer, "png")
    return buffer.getvalue()


def pack(path, members, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return f"zip:{path}"


def test_classes_are_the_folders_below_the_shared_one(tmp_path):
    members = {"set/b/1.png": png(255), "set/a/1.png": png(), "set/a/0.png": png(51)}
    members |= {"set/read.me": b"", "__MACOSX/set/a/._1.png": b"", "set/a/.x.png": b""}
    source = pack(tmp_path / "a.zip", members)
    with pytest.warns(UserWarning, match=r"left out 1 file .* 1 \.me"):
        data = load(source)
    assert data.class_names == ("a", "b")
    assert data.labels.tolist() == [0, 1, 0]
    assert data.inputs[:, 0, 0, 0].tolist() == pytest.approx([0.2, 1.0, 0.0])


def test_equal_folder_names_under_different_parents_stay_apart(tmp_path):
    members = {"o/greek/1/a.png": png(), "o/latin/1/a.png": png()}
    assert load(pack(tmp_path / "a.zip", members)).class_names == ("greek/1", "latin/1")


@pytest.mark.parametrize(("prefix", "name"), [("", "all"), ("cats/", "cats"), ("x/cats/", "cats")])
def test_one_folder_is_one_class(prefix, name, tmp_path):
    members = {f"{prefix}{k}.png": png(k) for k in range(3)}
    assert load(pack(tmp_path / "a.zip", members)).class_names == (name,)


def test_persons_are_read_from_names_in_the_archive(tmp_path):
    members = {f"set/{k}/0{k}_{who}.png": png(51 * who + 5 * k) for k in (1, 2) for who in (3, 1)}
    source = pack(tmp_path / "a.zip", members)
    data = load(source, person="last")
    assert (data.class_names, data.person_names) == (("1", "2"), ("1", "3"))
    values = (data.inputs[:, 0, 0, 0] * 255).round().long()
    told = [51 * (1, 3)[w] + 5 * (k + 1) for w, k in zip(data.persons, data.labels, strict=True)]
    assert values.tolist() == told
    plain = load(source)
    assert plain.inputs.equal(data.inputs)
    assert plain.fingerprint != data.fingerprint


def test_a_person_is_only_text(tmp_path):
    members = {f"a/{k}_<script>.png": png(k) for k in range(2)}
    members |= {"a/" + "_" * 60_000 + "x.png": png(2)}  # no rule takes more than one pass
    data = load(pack(tmp_path / "a.zip", members), person="last")
    assert data.person_names == ("<script>", "x")
    assert load(pack(tmp_path / "b.zip", {"../../w/a.png": png()}), person="inner_folder").classes


def test_names_that_climb_are_only_text(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    members = {
        "../../evil.png": png(),
        "/etc/evil.png": png(),
        "..\\up\\evil.png": png(),
        "<script>alert(1)</script>/a.png": png(),
    }
    data = load(pack(inside / "a.zip", members))
    assert set(data.class_names) == {"../..", "etc", "../up", "<script>alert(1)</script>"}
    assert [file.name for file in tmp_path.rglob("*")] == ["inside", "a.zip"]


def test_a_zip_and_a_folder_of_the_same_files_are_the_same_data(tmp_path):
    members = {f"{name}/{k}.png": png(k) for name in "ab" for k in range(3)}
    for name, content in members.items():
        file = tmp_path / "folder" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    zipped = load(pack(tmp_path / "a.zip", members))
    assert zipped.fingerprint == load(f"folder:{tmp_path / 'folder'}").fingerprint


def forge(path, offset, values):
    """Overwrite fields of the one member's entry in the central directory."""
    data = bytearray(path.read_bytes())
    start = data.index(b"PK\x01\x02") + offset
    data[start : start + 4 * len(values)] = struct.pack(f"<{len(values)}I", *values)
    path.write_bytes(data)


def test_a_declared_size_above_the_limit_is_refused_before_reading(tmp_path):
    source = pack(tmp_path / "a.zip", {"a.png": png()})
    forge(tmp_path / "a.zip", 24, [3 << 30])
    with pytest.raises(ValueError, match=r"image 'a.png' declares 3221225472 bytes"):
        load(source)


def test_a_total_above_the_limit_is_refused_before_reading(tmp_path, monkeypatch):
    source = pack(tmp_path / "a.zip", {f"{k}.png": png() for k in range(5)})
    monkeypatch.setattr(raw_module, "MAX_BYTES", 5 * len(png()) - 1)
    with pytest.raises(ValueError, match="the images of archive"):
        load(source)


@pytest.mark.parametrize("declared", [10, 200, 1 << 27])
def test_a_size_that_is_a_lie_is_refused(declared, tmp_path):
    source = pack(tmp_path / "a.zip", {"a.png": png() + b"\0" * 1000})
    forge(tmp_path / "a.zip", 24, [declared])
    with pytest.raises(ValueError, match=r"'a.png'"):
        load(source)


def test_a_bomb_gives_no_more_than_it_declares(tmp_path):
    source = pack(tmp_path / "a.zip", {"a.png": b"\0" * (100 << 20)})
    forge(tmp_path / "a.zip", 24, [100])
    with pytest.raises(ValueError, match=r"'a.png' in the archive is damaged"):
        load(source)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_methods_that_unpack_without_a_bound_are_refused(method, tmp_path):
    with pytest.raises(ValueError, match=r"'a.png' in the archive is not deflated"):
        load(pack(tmp_path / "a.zip", {"a.png": png()}, method))


def test_stored_members_are_read(tmp_path):
    assert len(load(pack(tmp_path / "a.zip", {"a.png": png()}, zipfile.ZIP_STORED)).inputs) == 1


def test_an_encrypted_member_is_refused(tmp_path):
    source = pack(tmp_path / "a.zip", {"a.png": png()})
    data = bytearray((tmp_path / "a.zip").read_bytes())
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(ValueError, match=r"'a.png' in the archive is encrypted"):
        load(source)


def test_a_huge_image_is_refused_before_decoding(tmp_path, monkeypatch):
    monkeypatch.setattr(images_module, "MAX_PIXELS", 99)
    with pytest.raises(ValueError, match="declares 10 x 10 pixels; the limit is 99"):
        load(pack(tmp_path / "a.zip", {"a.png": png(size=(10, 10))}))


@pytest.mark.filterwarnings("ignore:data source")
def test_damage_is_one_clear_line(tmp_path):
    source = pack(tmp_path / "a.zip", {f"{k}.png": png(k) for k in range(3)})
    whole = (tmp_path / "a.zip").read_bytes()
    messages = []
    for k in range(0, len(whole), 3):
        (tmp_path / "a.zip").write_bytes(whole[:k] + bytes([whole[k] ^ 0xFF]) + whole[k + 1 :])
        try:
            load(source)
        except ValueError as error:
            messages.append(str(error))
    assert messages
    assert all(line.startswith("data source 'zip:") and "\n" not in line for line in messages)
    (tmp_path / "a.zip").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is not a zip archive or is damaged"):
        load(source)


def test_a_member_without_a_name_is_refused(tmp_path):
    source = pack(tmp_path / "a.zip", {f"{k}.png": png(k) for k in range(3)})
    whole = (tmp_path / "a.zip").read_bytes()
    (tmp_path / "a.zip").write_bytes(whole.replace(b"1.png", b"\0.png"))  # a name ends at a zero
    with pytest.raises(ValueError, match="it holds a file without a name; save it again"):
        load(source)


@pytest.mark.parametrize("members", [{}, {"readme.txt": b"hello"}])
def test_an_archive_without_images_is_refused(members, tmp_path):
    with pytest.raises(ValueError, match="holds no image"):
        load(pack(tmp_path / "a.zip", members))
