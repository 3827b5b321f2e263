import io
import json
import os
import shutil
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from leakbound.data import images as images_module
from leakbound.data import load
from leakbound.data import raw as raw_module


def paint(path, value=0, size=(4, 4), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


@pytest.fixture
def folder(tmp_path):
    for k in range(2):
        paint(tmp_path / "dog" / f"{k}.png", (10 * k, 0, 0))
        paint(tmp_path / "cat" / f"{k}.PNG", (10 * k, 0, 255))
    (tmp_path / "cat" / ".hidden.png").write_bytes(b"no image")
    return tmp_path


def test_classes_are_the_folders_by_name(folder):
    data = load(f"folder:{folder}")
    assert data.class_names == ("cat", "dog")
    assert data.labels.tolist() == [0, 1, 0, 1]
    assert data.inputs.shape == (4, 3, 4, 4)
    assert data.inputs[0, :, 0, 0].tolist() == [0, 0, 1]
    assert data.name == f"folder:{folder}"
    assert load(f"folder:{folder}", limit=2).classes == 2


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ("last", ["c1/0108_07.png", "c1/0108_09.png", "c2/0109-07.png", "c2/0109__x-09_.png"]),
        ("first", ["c1/07_0.png", "c1/09-1.png", "c2/07-0.png", "c2/_09_0.png"]),
        ("last", ["c1/07.png", "c1/09.png", "c2/07.png", "c2/09.PNG"]),
        ("first", ["c1/07.png", "c1/09.png", "c2/07.png", "c2/09-x.y.png"]),
        ("outer_folder", ["07/c1/a.png", "09/c1/a.png", "07/c2/a.png", "09/c2/a.png"]),
        ("outer_folder", ["t/07/c1/a.png", "t/09/c1/a.png", "t/07/c2/a.png", "t/09/c2/a.png"]),
        ("inner_folder", ["c1/07/a.png", "c1/09/a.png", "c2/07/a.png", "c2/09/a.png"]),
    ],
)
def test_persons_are_read_from_the_name(rule, names, tmp_path):
    for k, name in enumerate(names):
        paint(tmp_path / name, (k, 0, 0))
    data = load(f"folder:{tmp_path}", person=rule)
    assert data.class_names == ("c1", "c2")
    assert data.person_names == ("07", "09")
    # classes come in turn; the red value says which file an image is
    shown = (data.inputs[:, 0, 0, 0] * 255).round().long().tolist()
    assert sorted(shown) == [0, 1, 2, 3]
    assert data.labels.tolist() == [k // 2 for k in shown]
    assert data.persons.tolist() == [k % 2 for k in shown]
    first = load(f"folder:{tmp_path}", person=rule, limit=3)
    assert first.persons.tolist() == data.persons[:3].tolist()
    assert first.person_names == ("07", "09")


def test_one_person_or_one_class_only(tmp_path):
    for k in range(2):
        paint(tmp_path / "a" / "ann" / f"{k}.png")
    outer = load(f"folder:{tmp_path}", person="outer_folder")
    assert (outer.person_names, outer.class_names) == (("a",), ("ann",))
    inner = load(f"folder:{tmp_path}", person="inner_folder")
    assert (inner.person_names, inner.class_names) == (("ann",), ("a",))
    assert load(f"folder:{tmp_path}/a", person="inner_folder").class_names == ("all",)


def test_without_a_rule_there_are_no_persons(folder):
    data = load(f"folder:{folder}")
    assert data.persons is None
    assert data.person_names == ()


@pytest.mark.parametrize(
    ("rule", "name", "words"),
    [
        ("outer_folder", "c/a.png", r"image 'c/a.png' has 1 folders.*needs PERSON/CLASS/image"),
        ("inner_folder", "a.png", "has 0 folders.*needs CLASS/PERSON/image"),
        ("last", "c/_-_.png", r"image 'c/_-_.png' names no person.*such as 0108_07.png"),
        ("first", "c/_.png", r"names no person.*such as 07_0108.png"),
        ("folder", "c/a.png", "person is 'folder'; did you mean"),
    ],
)
def test_names_without_a_person_are_refused(rule, name, words, tmp_path):
    paint(tmp_path / name)
    with pytest.raises(ValueError, match=words):
        load(f"folder:{tmp_path}", person=rule)


def test_one_changed_pixel_changes_the_fingerprint(folder):
    before = load(f"folder:{folder}").fingerprint
    assert before == load(f"folder:{folder}").fingerprint
    with Image.open(folder / "dog" / "0.png") as image:
        image.putpixel((0, 0), (1, 0, 0))
        image.save(folder / "dog" / "0.png")
    assert before != load(f"folder:{folder}").fingerprint


SUFFIXES = [suffix[1:] for suffix in images_module.SUFFIXES if suffix in images_module._readable()]
KINDS = {"jfif": "jpeg", "jpe": "jpeg", "dib": "dib", "pbm": "ppm", "pnm": "ppm"}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_formats(suffix, tmp_path):
    kind = KINDS.get(suffix)
    Image.new("RGB", (4, 4), (255, 255, 255)).save(tmp_path / f"a.{suffix}", kind)
    data = load(f"folder:{tmp_path}")
    assert data.class_names == ("all",)
    assert data.inputs.shape == (1, 3, 4, 4)
    assert float(data.inputs.min()) > 0.98


def test_gray_pgm_and_bilevel_have_one_channel(tmp_path):
    paint(tmp_path / "a" / "a.pgm", 51, mode="L")
    paint(tmp_path / "b" / "b.png", 1, mode="1")
    data = load(f"folder:{tmp_path}")
    assert data.inputs[:, 0, 0, 0].tolist() == pytest.approx([0.2, 1.0])


@pytest.mark.parametrize(("mode", "value"), [("RGBA", (255, 0, 0, 9)), ("P", 7), ("LA", (9, 9))])
def test_alpha_and_palettes_become_rgb(mode, value, tmp_path):
    paint(tmp_path / "a.png", value, mode=mode)
    assert load(f"folder:{tmp_path}").inputs.shape == (1, 3, 4, 4)


def test_a_palette_with_transparency_becomes_rgb(tmp_path):
    Image.new("P", (4, 4), 0).save(tmp_path / "a.png", transparency=b"\x00\x80")
    assert load(f"folder:{tmp_path}").inputs.shape == (1, 3, 4, 4)


def test_sixteen_bits_keep_their_values(tmp_path):
    Image.fromarray(np.full((4, 4), 26214, dtype=np.uint16)).save(tmp_path / "a.png")
    assert load(f"folder:{tmp_path}").inputs.unique().tolist() == pytest.approx([0.4])


@pytest.mark.parametrize("array", [np.full((2, 2), -1, np.int32), np.zeros((2, 2), np.float32)])
def test_values_without_a_known_range_are_refused(array, tmp_path):
    Image.fromarray(array).save(tmp_path / "a.tif")
    with pytest.raises(ValueError, match=r"image 'a.tif'.*save it"):
        load(f"folder:{tmp_path}")


def test_a_class_name_is_kept_as_text(tmp_path):
    paint(tmp_path / "<script>alert(1)</script>" / "a.png")
    paint(tmp_path / "b" / "a.png")
    assert "<script>alert(1)</script>" in load(f"folder:{tmp_path}").class_names


def test_a_class_name_can_always_be_written_as_utf8(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    try:
        paint(tmp_path / name / "a.png")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    paint(tmp_path / "b" / "a.png")
    assert load(f"folder:{tmp_path}").class_names == ("b", "caf?")


def test_images_of_other_sizes_need_a_size(folder):
    paint(folder / "dog" / "9.png", size=(5, 4))
    with pytest.raises(ValueError, match=r"image 'dog/9.png' has 4 x 5 pixels.*size = 32"):
        load(f"folder:{folder}")
    assert load(f"folder:{folder}", size=8).inputs.shape == (5, 3, 8, 8)


def test_images_of_other_channels_need_channels(folder):
    paint(folder / "dog" / "9.png", 0, mode="L")
    with pytest.raises(ValueError, match=r"image 'dog/9.png' has 1 channels.*channels = 1"):
        load(f"folder:{folder}")
    assert load(f"folder:{folder}", channels=1).inputs.shape == (5, 1, 4, 4)
    assert load(f"folder:{folder}", channels=3).inputs.shape == (5, 3, 4, 4)


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n" + b"\0" * 40])
def test_a_file_that_is_no_image_is_named(content, folder):
    (folder / "cat" / "0.PNG").write_bytes(content)
    with pytest.raises(ValueError, match=r"image 'cat/0.PNG' cannot be read"):
        load(f"folder:{folder}")


@pytest.mark.parametrize("suffix", sorted({*SUFFIXES} - {"jpe", "jpeg", "jfif", "pbm", "pnm"}))
def test_a_truncated_image_is_named(suffix, tmp_path):
    noise = torch.randint(0, 256, (64, 64, 3), generator=torch.Generator().manual_seed(0))
    buffer = io.BytesIO()
    kind = {"jpg": "jpeg", "tif": "tiff", "pgm": "ppm"}.get(suffix, suffix)
    Image.fromarray(noise.to(torch.uint8).numpy()).save(buffer, kind)
    (tmp_path / f"a.{suffix}").write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
    with pytest.raises(ValueError, match=f"image 'a.{suffix}' cannot be read"):
        load(f"folder:{tmp_path}")


@pytest.mark.parametrize(("side", "words"), [(8000, "declares 8000 x 8000"), (30000, "pixels")])
def test_declared_dimensions_are_checked_before_decoding(side, words, tmp_path):
    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    body = header + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    with pytest.raises(ValueError, match=f"image 'bomb.png'.*{words}.*resize it"):
        load(f"folder:{tmp_path}")


@pytest.mark.parametrize(
    "suffix", [s for s in ("tif", "gif", "webp", "avif", "png") if s in SUFFIXES]
)
def test_several_pictures_in_a_file_are_refused(suffix, tmp_path):
    pages = [Image.new("RGB", (4, 4), (80 * k, 0, 0)) for k in range(3)]
    pages[0].save(tmp_path / f"a.{suffix}", save_all=True, append_images=pages[1:])
    with pytest.raises(ValueError, match=rf"image 'a.{suffix}' holds 3 pictures; save the one"):
        load(f"folder:{tmp_path}")


def test_large_files_and_sets_are_refused(folder, monkeypatch):
    monkeypatch.setattr(images_module, "MAX_FILE", 10)
    with pytest.raises(ValueError, match="the limit is 10"):
        load(f"folder:{folder}")
    monkeypatch.undo()
    monkeypatch.setattr(raw_module, "MAX_BYTES", 500)
    with pytest.raises(ValueError, match="4 images of \\(3, 4, 4\\)"):
        load(f"folder:{folder}")
    assert len(load(f"folder:{folder}", limit=2).inputs) == 2


@pytest.mark.linux
def test_links_that_leave_the_folder_are_refused(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    paint(outside / "secret.png")
    (folder / "dog" / "2.png").symlink_to(folder / "dog" / "0.png")
    assert len(load(f"folder:{folder}").inputs) == 5
    (folder / "dog" / "3.png").symlink_to(outside / "secret.png")
    with pytest.raises(ValueError, match=r"'dog/3.png' is a link to a file outside"):
        load(f"folder:{folder}")
    (folder / "dog" / "3.png").unlink()
    (folder / "bird").symlink_to(outside)
    with pytest.raises(ValueError, match="'bird' is a link to a folder"):
        load(f"folder:{folder}")


@pytest.mark.linux
def test_a_link_to_nothing_and_a_pipe_are_refused(tmp_path):
    for target in ("gone.png", "a.png"):  # a link to itself, too
        (tmp_path / "a.png").symlink_to(tmp_path / target)
        with pytest.raises(ValueError, match=r"image 'a.png' is a broken link"):
            load(f"folder:{tmp_path}")
        (tmp_path / "a.png").unlink()
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(ValueError, match="FIFO, not a regular file"):
        load(f"folder:{tmp_path}")


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no image; give files that end in .png"):
        load(f"folder:{tmp_path}")


OTHERS = {"a.txt": b"x", "b.HEIC": b"x", "c.heic": b"x", "Thumbs.db": b"x", "README": b"no image"}


@pytest.mark.parametrize("packed", [False, True])
def test_files_of_other_types_are_named_and_counted(packed, folder, tmp_path_factory):
    for name, content in OTHERS.items():
        (folder / "cat" / name).write_bytes(content)
    source = f"folder:{folder}"
    if packed:
        place = shutil.make_archive(tmp_path_factory.mktemp("z") / "a", "zip", folder)
        source = f"zip:{place}"
    note = (
        "left out 5 files of types that are not read: 2 .heic, 1 .db, 1 .txt, 1 without an ending"
    )
    with pytest.warns(UserWarning, match="left out 5 files") as caught:
        data = load(source)
    assert sorted(str(caught[0].message).rpartition("read: ")[2].split(", ")) == sorted(
        note.rpartition("read: ")[2].split(", ")
    )
    assert len(data.inputs) == 4
    assert data.notes[0].startswith(note.partition(":")[0])
    assert data.subset(torch.tensor([0])).notes == data.notes


def test_one_other_file_is_named(folder):
    (folder / "cat" / "notes.txt").write_text("no image")
    with pytest.warns(UserWarning, match=r"left out 1 file of a type that is not read: 1 \.txt"):
        load(f"folder:{folder}")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            ["fox/1.heic", "fox/2.heic"],
            "folder 'fox' holds only 2 .heic, and no image that is read",
        ),
        (["fox/"], "folder 'fox' holds no file, and no image that is read"),
        (["fox/red/1.svg"], "folder 'fox/red' holds only 1 .svg"),
        (["dog/old/1.heic"], "folder 'dog/old' holds only 1 .heic"),
    ],
)
def test_a_class_without_an_image_does_not_vanish(names, words, packed, folder, tmp_path_factory):
    for name in names:
        place = folder / name
        (place if name.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            place.write_bytes(b"x")
    source = f"folder:{folder}"
    if packed:
        source = f"zip:{shutil.make_archive(tmp_path_factory.mktemp('z') / 'a', 'zip', folder)}"
    with pytest.raises(ValueError, match=words):
        load(source)


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "tiff"])
def test_images_without_an_ending_are_read_by_their_first_bytes(kind, tmp_path):
    for k in range(2):
        (tmp_path / f"c{k}").mkdir()
        Image.new("RGB", (4, 4), (255, 255, 255)).save(tmp_path / f"c{k}" / "image", kind)
    data = load(f"folder:{tmp_path}")
    assert (data.class_names, data.inputs.shape) == (("c0", "c1"), (2, 3, 4, 4))
    place = shutil.make_archive(tmp_path.parent / "packed", "zip", tmp_path)
    assert torch.equal(load(f"zip:{place}").inputs, data.inputs)


def test_a_decoder_that_pillow_lacks_is_no_damage(folder, monkeypatch):
    paint(folder / "cat" / "z.webp")
    monkeypatch.setattr("PIL.features.check", lambda name: False)
    images_module._readable.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"not read: 1 \.webp"):
            assert len(load(f"folder:{folder}").inputs) == 4
    finally:
        images_module._readable.cache_clear()


def gray(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(values, dtype=np.uint16)).save(path)


def test_images_of_twelve_bits_get_a_hint_and_an_option(tmp_path):
    """X-rays of 12 bits in files of 16 use values up to .062 of the range."""
    values = np.random.default_rng(0).integers(0, 4096, (2, 4, 4))
    values[0, 0, 0] = 4095
    for k in range(2):
        gray(tmp_path / f"c{k}" / "a.png", values[k])
    hint = r"use only values up to 0\.062 of that range; for values of 12 bits set bits = 12"
    with pytest.warns(UserWarning, match=hint):
        dark = load(f"folder:{tmp_path}")
    assert float(dark.inputs.max()) == pytest.approx(4095 / 65535)
    scaled = load(f"folder:{tmp_path}", bits=12)
    assert scaled.inputs[:, 0].numpy() == pytest.approx(values / 4095, abs=1e-6)
    assert not scaled.notes
    with pytest.raises(ValueError, match="has the value 4095, but bits = 11 ends at 2047"):
        load(f"folder:{tmp_path}", bits=11)
    paint(tmp_path / "c1" / "b.png", 3, mode="L")
    with pytest.raises(ValueError, match=r"bits is 12, which image 'c1/b.png' does not need"):
        load(f"folder:{tmp_path}", bits=12)
    assert not load(f"folder:{tmp_path}").notes  # of images of 8 bits nothing is known


@pytest.mark.parametrize(
    ("source", "bits", "words"),
    [
        ("digits", 12, "bits is 12, but data source 'digits' has no images of 16 bits"),
        ("folder:x", 17, "bits is 17; give the bits that 16-bit images use, from 1 to 16"),
        ("folder:x", 0, "bits is 0"),
        ("folder:x", True, "bits is True"),
    ],
)
def test_bits_that_do_not_fit(source, bits, words):
    with pytest.raises(ValueError, match=words):
        load(source, bits=bits)


def test_what_was_left_out_is_on_screen_in_the_run_and_in_the_report(tmp_path):
    """Once, with two processes: the command loads the data twice, and each worker again."""
    values = np.random.default_rng(0).integers(0, 256, (24, 4, 4), dtype=np.uint8)
    for k, own in enumerate(values):
        place = tmp_path / "data" / f"c{k % 2}" / f"{k}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(own).save(place)
    (tmp_path / "data" / "c0" / "x.heic").write_bytes(b"x")
    (tmp_path / "plan.toml").write_text(PLAN)
    words = ("audit", "plan.toml", "--out", "run", "--workers", "2")
    run = subprocess.run(
        [sys.executable, "-m", "leakbound.cli", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    note = "left out 1 file of a type that is not read: 1 .heic"
    shown = run.stdout + run.stderr
    assert shown.count(note) == 1, shown
    assert json.loads((tmp_path / "run" / "run.json").read_text())["notes"] == [note]
    assert note in (tmp_path / "run" / "report.html").read_text("utf-8")


PLAN = """
seeds = [0, 1]
[data]
source = "folder:data"
[[models]]
name = "mlp"
hidden = [4]
[[attacks]]
name = "linear_inversion"
[[defenses]]
name = "none"
[error_bound]
kind = "none"
[utility]
rounds = 0
"""
