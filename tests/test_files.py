"""What leakbound did not write stays as it is; what it writes is whole and says whose it is."""

import io
import json
import os
import socket
import stat
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from leakbound import tensors
from leakbound._util import files

PAGE = b'<!doctype html>\n<html><head><meta charset="utf-8">\n<title>x</title></head></html>\n'
LINE = files.encode({"cell": "a", "schema": 1, "value": 0.5})


def png(level):
    stream = io.BytesIO()
    Image.new("L", (4, 4), level).save(stream, format="PNG")
    return stream.getvalue()


DOCUMENTS = {
    "page.html": (PAGE, PAGE.replace(b"x", b"y")),
    "value.json": (b'{"a": 1}', b'{"a": 2}'),
    "plan.toml": (b'name = "x"\n', b'name = "y"\n'),
    "page.md": (b"# One\n", b"# Two\n"),
    "picture.png": (png(1), png(200)),
}


def state(path):
    """All that must not change."""
    found = os.lstat(path)
    content = path.read_bytes() if stat.S_ISREG(found.st_mode) else None
    target = path.readlink() if path.is_symlink() else None
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, content, target


@pytest.mark.parametrize("name", DOCUMENTS)
def test_ours_is_replaced_and_nothing_is_left_beside_it(tmp_path, name):
    path, (first, second) = tmp_path / name, DOCUMENTS[name]
    files.write(path, first)
    one = path.read_bytes()
    before = state(path)
    files.write(path, first)
    assert state(path) == before, "the same bytes are not written again"
    files.write(path, second)
    assert path.read_bytes() != one
    files.write(path, first)
    assert path.read_bytes() == one, "the same content gives the same bytes"
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert os.name == "nt" or stat.S_IMODE(path.stat().st_mode) == 0o600


def test_sealed_documents_are_sound(tmp_path):
    import tomllib

    for name, (content, _) in DOCUMENTS.items():
        files.write(tmp_path / name, content)
    assert json.loads((tmp_path / "value.json").read_bytes())["a"] == 1
    assert tomllib.loads((tmp_path / "plan.toml").read_text()) == {"name": "x"}
    assert (tmp_path / "page.html").read_bytes().startswith(b"<!doctype html>")
    with Image.open(tmp_path / "picture.png") as image:
        image.load()  # checks every checksum
        assert image.text["Comment"].startswith("leakbound, sha256 ")
        assert np.array_equal(np.asarray(image), np.full((4, 4), 1))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_the_user_changed_is_the_users(tmp_path, name):
    """One byte anywhere, more at the end, or less: it is not replaced."""
    path, (first, second) = tmp_path / name, DOCUMENTS[name]
    files.write(path, first)
    ours = path.read_bytes()
    changed = [ours + b" ", ours[:-1], b" " + ours]
    checksum = files._SEAL.search(ours).end() + np.arange(4) if name == "picture.png" else ()
    at = [i for i in range(0, len(ours), 7) if i not in checksum]
    changed += [ours[:i] + bytes([ours[i] ^ 1]) + ours[i + 1 :] for i in at]
    for content in changed:
        path.write_bytes(content)
        before = state(path)
        with pytest.raises(ValueError, match="that was changed since"):
            files.write(path, second)
        assert state(path) == before
    path.write_bytes(ours)
    files.write(path, second)


def test_a_copy_of_the_seal_proves_nothing(tmp_path):
    """A plan of the user that begins with the line of another file is the user's."""
    files.write(tmp_path / "plan.toml", b"steps = 1\n")
    seal = (tmp_path / "plan.toml").read_bytes().splitlines()[0]
    own = tmp_path / "own.toml"
    own.write_bytes(seal + b"\nsteps = 2\n")
    with pytest.raises(ValueError, match=r"own\.toml"):
        files.write(own, b"steps = 3\n")
    name = b'{"name": "leakbound, sha256 ' + b"0" * 64 + b'"}'
    for _ in range(2):
        files.write(tmp_path / "value.json", name)
    assert json.loads((tmp_path / "value.json").read_bytes())["name"].endswith("0" * 64)


def test_a_table_without_a_seal_is_written_once(tmp_path):
    path = tmp_path / "table.csv"
    files.write(path, b"a,b\n")
    before = state(path)
    files.write(path, b"a,b\n")
    assert state(path) == before
    with pytest.raises(ValueError, match=r"table\.csv"):
        files.write(path, b"a,c\n")
    assert state(path) == before


def test_tensors_are_replaced_only_where_they_are_ours(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "u.safetensors"
    for value in (1.0, 2.0):
        tensors.write(path, {"x": torch.full((3,), value)}, {"leakbound.kind": "gradient"})
        named, about = tensors.read(path)
        assert (named["x"].tolist(), about) == ([value] * 3, {"leakbound.kind": "gradient"})
    save_file({"x": torch.zeros(3)}, path, {"leakbound.kind": "gradient"})
    before = state(path)
    with pytest.raises(ValueError, match=r"u\.safetensors"):
        tensors.write(path, {"x": torch.ones(3)})
    assert state(path) == before


def user_file(path):
    path.write_text("mine")


def empty_file(path):
    path.touch()


def folder(path):
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def fifo(path):
    os.mkfifo(path)


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def link(path):
    target = path.with_name("target")
    target.write_text("mine")
    path.symlink_to(target)


def link_to_ours(path):
    target = path.with_name("ours" + path.suffix)
    files.write(target, DOCUMENTS["page.html"][0])
    path.symlink_to(target)


def dangling(path):
    path.symlink_to(path.with_name("nowhere"))


def device(path):
    if os.geteuid():
        pytest.skip("makes a device, which root alone may")
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("no devices here")


def kinds(*makers):
    """What makes a thing at a path; most need Linux."""
    plain = (user_file, empty_file, folder)
    linux = pytest.mark.linux
    return [make if make in plain else pytest.param(make, marks=linux) for make in makers]


KINDS = kinds(
    *(user_file, empty_file, folder, fifo, unix_socket, link, link_to_ours, dangling, device),
)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_what_lies_there_stays(tmp_path, make, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    path = tmp_path / "page.html"
    make(path)
    before = {p: state(p) for p in tmp_path.rglob("*")}
    for what in (
        lambda: files.write(path, PAGE),
        lambda: files.write(path, LINE, key="cell"),
        lambda: files.append(path, {"cell": "b", "schema": 1}, "cell"),
        lambda: files.check(path),
    ):
        with pytest.raises(ValueError, match=r"page\.html.*move it away, or name another place"):
            what()
    assert {p: state(p) for p in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("make", kinds(user_file, fifo, link, dangling, device))
def test_what_comes_between_the_look_and_the_write_stays(tmp_path, make, monkeypatch):
    """A file that takes the name while ours is being written; new, and in the place of ours."""
    settle = files._settle
    for begin in (lambda path: None, lambda path: files.write(path, PAGE)):
        path = tmp_path / "page.html"
        begin(path)

        def late(part, path, before):
            path.unlink(missing_ok=True)
            make(path)
            settle(part, path, before)

        with monkeypatch.context() as patch:
            patch.setattr(files, "_settle", late)
            with pytest.raises(ValueError, match=r"page\.html"):
                files.write(path, PAGE + b"\n")
        kinds = {fifo: stat.S_ISFIFO, device: stat.S_ISCHR, user_file: stat.S_ISREG}
        assert kinds.get(make, stat.S_ISLNK)(os.lstat(path).st_mode)
        assert make is not user_file or path.read_text() == "mine"
        assert not list(tmp_path.glob(".*"))
        path.unlink()


@pytest.mark.linux
def test_a_file_is_on_disk_before_its_name_and_the_name_before_the_next_file(tmp_path, monkeypatch):
    calls = []

    def noted(name, call):
        def wrapped(*given, **more):
            what = os.fstat(given[0]).st_ino if name == "fsync" else name
            calls.append(what)
            return call(*given, **more)

        return wrapped

    for name in ("fsync", "link", "replace"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    path, folder = tmp_path / "run.json", tmp_path.stat().st_ino
    for content, named in ((b'{"a": 1}', "link"), (b'{"a": 2}', "replace")):
        files.write(path, content)
        assert calls == [path.stat().st_ino, named, folder]
        calls.clear()


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refused)
    files.write(tmp_path / "page.html", PAGE)
    assert b"leakbound, sha256" in (tmp_path / "page.html").read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_journals(tmp_path):
    path = tmp_path / "records.jsonl"
    files.append(path, {"cell": "a", "schema": 1}, "cell")
    files.append(path, {"cell": "b", "schema": 1}, "cell")
    whole = path.read_bytes()
    assert [json.loads(line)["cell"] for line in whole.splitlines()] == ["a", "b"]
    path.write_bytes(whole[:-3])
    files.append(path, {"cell": "c", "schema": 1}, "cell")
    lines = path.read_bytes().splitlines(keepends=True)
    assert [files.decode(line, "cell") is not None for line in lines] == [True, False, True]
    for stranger in ("unit", "id"):
        with pytest.raises(ValueError, match=r"records\.jsonl"):
            files.append(path, {stranger: "c", "schema": 1}, stranger)
    for line in (
        b'{"cell": "a", "schema": 1}\n',
        b'{"schema":1,"cell":"a"}\n',
        b"[1]\n",
        b"\xff\n",
    ):
        path.write_bytes(line * 3)
        before = state(path)
        with pytest.raises(ValueError, match=r"records\.jsonl"):
            files.append(path, {"cell": "c", "schema": 1}, "cell")
        assert state(path) == before


@pytest.mark.linux
def test_folders_are_private_with_all_their_parents(tmp_path):
    old = os.umask(0)
    try:
        files.folder(tmp_path / "a" / "b", "c", "d")
    finally:
        os.umask(old)
    made = list(tmp_path.rglob("*"))
    assert [p.name for p in sorted(made)] == ["a", "b", "c", "d"]
    assert {stat.S_IMODE(p.stat().st_mode) for p in made} == {0o700}
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert files.folder(tmp_path / "link").is_dir(), "the user names it"
    (tmp_path / "a" / "pictures").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="pictures' is a symbolic link"):
        files.folder(tmp_path / "a", "pictures")
    (tmp_path / "file").write_text("mine")
    for bad in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(NotADirectoryError):
            files.folder(bad)


def test_a_run_takes_no_folder_of_the_users(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    before = {p: state(p) for p in tmp_path.rglob("*")}
    with pytest.raises(ValueError, match=r"thesis\.txt"), files.claimed(tmp_path):
        pass
    assert {p: state(p) for p in tmp_path.rglob("*")} == before, "no lock is left either"


@pytest.mark.parametrize("make", kinds(user_file, folder, fifo, link, dangling, device))
def test_a_lock_of_the_users_is_not_emptied(tmp_path, make):
    (tmp_path / "run").mkdir()
    make(tmp_path / "run" / ".lock")
    before = {p: state(p) for p in tmp_path.rglob("*")}
    with pytest.raises(ValueError, match=r"\.lock"), files.claimed(tmp_path / "run"):
        pass
    assert {p: state(p) for p in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("make", kinds(folder, fifo, unix_socket, dangling, device))
def test_nothing_but_regular_files_is_read(tmp_path, make, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plan.toml"
    make(path)
    for opens in (files.opened, files.read):
        with pytest.raises(OSError, match=r"not a regular file|No such file"):
            opens(path)
    with pytest.raises(ValueError, match=r"plan\.toml"):
        files.check_regular(path)


WRITER = """
import sys, time
from pathlib import Path
from leakbound._util import files
real = files.os.fsync
def slow(descriptor):
    print("written", flush=True)
    time.sleep(600)
files.os.fsync = slow
files.write(Path(sys.argv[1]), b'<meta charset="utf-8">' + b"private picture" * 1000)
"""


@pytest.mark.linux
def test_what_a_kill_leaves_is_removed_and_what_is_being_written_is_not(tmp_path):
    path = tmp_path / "report.html"
    own = [".report.html.tmp", ".report-abc.tmp", ".x.leakbound-part", "notes.leakbound-part"]
    for name in own:
        (tmp_path / name).write_text("mine")
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for writer in writers:
            assert writer.stdout.readline() == "written\n"
        parts = [p for p in tmp_path.iterdir() if p.name not in own]
        assert len(parts) == 2
        assert all(b"private picture" in part.read_bytes() for part in parts)
        files.folder(tmp_path)
        assert len(list(tmp_path.iterdir())) == len(own) + 2, "both are at work"
        writers[0].kill()
        writers[0].wait()
        files.folder(tmp_path)
        assert len(list(tmp_path.iterdir())) == len(own) + 1
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    files.folder(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(own)
