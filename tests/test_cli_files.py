"""Whatever lies where a command would write stays as it is; strangers' files hang no command."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from leakbound import audit, captured
from leakbound.cli import main

PLAN = """
name = "tiny"
seeds = [0]
[data]
source = "digits"
limit = 60
[[models]]
name = "mlp"
hidden = [4]
[[attacks]]
name = "linear_inversion"
[utility]
rounds = 1
repeats = 2
batch_size = 8
"""
MODEL = "mlp,hidden=[4]"
RUN = ("run.json", "records.jsonl", "timings.jsonl", "report.html", "pictures", ".lock")
KNOWN = ("--dim", "64", "--norm", "3", "--prior", "sphere")
NOISE = ("noise_multiplier=1", "steps=2", "dim=64", "norm=3")

pytestmark = pytest.mark.linux  # FIFOs, links, devices, private modes, kills


def call(*arguments):
    """The exit code of `leakbound ARGUMENTS`, run here."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A plan, a run of it with all pages, and a captured update."""
    place = tmp_path_factory.mktemp("files")
    (place / "plan.toml").write_text(PLAN, encoding="utf-8")
    audit.audit(audit.load(place / "plan.toml"), place / "run")
    torch.manual_seed(0)
    before = audit.PlanContext(audit.load(place / "plan.toml").data)
    task = before.task(audit.load(place / "plan.toml").models[0], 0)
    state = {name: value.clone() for name, value in task.model.state_dict().items()}
    save_file(state, place / "before.safetensors")
    moved = {name: torch.randn_like(value) for name, value in state.items()}
    save_file(moved, place / "gradient.safetensors")
    return place


@pytest.fixture
def place(base, tmp_path, monkeypatch):
    """A copy of `base` to work in; what hangs is ended."""
    for path in base.iterdir():
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, tmp_path / path.name)
    shutil.copytree(base / "run", tmp_path / "other")
    monkeypatch.chdir(tmp_path)

    def hangs(number, frame):
        raise AssertionError("it hangs")

    old = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(600)
    yield tmp_path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


UPDATE = (
    *("attack", "--update", "gradient.safetensors", "--before", "before.safetensors"),
    *("--kind", "gradient", "--model", MODEL, "--input-shape", "1,8,8", "--labels", "3"),
    *("--attack", "linear_inversion"),
)
VERBS = {
    "audit": (("audit", "plan.toml", "--workers", "1", "--out"), (*RUN, "utility.jsonl")),
    "train": (
        ("train", "plan.toml", "--workers", "1", "--out"),
        (*RUN[:1], *RUN[2:3], *RUN[4:], "utility.jsonl"),
    ),
    "attack": (
        ("attack", "--data", "digits", "--model", MODEL, "--attack", "linear_inversion", "--out"),
        ("truth.png", "reconstruction.png"),
    ),
    "update": ((*UPDATE, "--out"), RUN[:2] + RUN[3:]),
    "bound": (
        ("bound", "--noise-multiplier", "1", *KNOWN, "--out"),
        ("bound.json", "corridor.png"),
    ),
    "evidence": (
        ("evidence", "run", "--out"),
        ("evidence.html", "evidence-annex.html", "report.json", "evidence.toml"),
    ),
}
"""What each command that takes a folder writes into it."""


def user_file(path):
    path.write_text("mine")


def user_json(path):
    path.write_text('{"schema": 1, "leakbound": "0.1", "written_by": "me"}\n')


def empty_file(path):
    path.touch()


def folder(path):
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def fifo(path):
    os.mkfifo(path)


def link(path):
    Path("target").write_text("mine")
    path.symlink_to(Path("target").resolve())


def dangling(path):
    path.symlink_to(Path("nowhere").resolve())


def device(path):
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("makes a device, which root alone may")


KINDS = [user_file, user_json, empty_file, folder, fifo, link, dangling, device]


ALL = len(KINDS)


def kinds(place, at, count, among=KINDS):
    """So many kinds, others for another `at`: together the names of a command meet all of them."""
    chosen = [among[(at + 3 * i) % len(among)] for i in range(count)] if count < ALL else [*among]
    try:
        device(place / "device")
        (place / "device").unlink()
    except pytest.skip.Exception:
        chosen = [make for make in chosen if make is not device]
    return chosen


def snapshot(place):
    """All files and links of a folder, and what must not change of them."""
    found = {}
    for path in sorted(place.rglob("*")):
        about = path.lstat()
        if stat.S_ISDIR(about.st_mode):
            found[path] = about.st_mode
            continue
        content = path.read_bytes() if stat.S_ISREG(about.st_mode) else None
        found[path] = (about.st_ino, about.st_mode, about.st_mtime_ns, content)
    return found


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def refused(place, path, capsys, *arguments):
    """The command ends with 2, names the path and a way out, and changes nothing at all."""
    before = snapshot(place)
    assert call(*arguments) == 2, path
    error = capsys.readouterr().err
    assert path.name in error, error
    assert any(
        word in error for word in ("move it away", "another", "empty or new", "name a file")
    ), error
    assert "Traceback" not in error
    assert snapshot(place) == before


def may_lie_there(name, make):
    """A folder of pictures is one that a run may use, and so is an empty lock."""
    return (name == "pictures" and make is folder) or (name == ".lock" and make is empty_file)


@pytest.mark.parametrize("count", [3, ALL], ids=["some", "all"])
@pytest.mark.parametrize("verb", VERBS)
def test_in_a_new_folder(verb, count, place, capsys):
    """The user's own file lies under a name that the command would write."""
    arguments, names = VERBS[verb]
    for at, name in enumerate(names):
        for make in kinds(place, at, count):
            if may_lie_there(name, make):
                continue
            (place / "out").mkdir()
            make(place / "out" / name)
            refused(place, place / "out" / name, capsys, *arguments, "out")
            shutil.rmtree("out")


@pytest.fixture(scope="module")
def ours(base):
    """A folder of each command's own."""
    made = base / "made"
    made.mkdir()
    old = Path.cwd()
    os.chdir(base)
    try:
        for verb, (arguments, _) in VERBS.items():
            assert call(*arguments, made / verb) == 0, verb
    finally:
        os.chdir(old)
    return made


@pytest.mark.parametrize("count", [1, ALL], ids=["some", "all"])
@pytest.mark.parametrize("verb", VERBS)
def test_in_a_folder_of_its_own(verb, count, place, ours, capsys):
    """The user put a file into the place of one of ours."""
    arguments, names = VERBS[verb]
    for at, name in enumerate(names):
        for make in kinds(place, at, count, [user_json, folder, fifo, link]):
            if may_lie_there(name, make):
                continue
            shutil.copytree(ours / verb, "out")
            remove(place / "out" / name)
            make(place / "out" / name)
            refused(place, place / "out" / name, capsys, *arguments, "out")
            shutil.rmtree("out")


@pytest.mark.parametrize("verb", VERBS)
def test_again_over_its_own_output(verb, place, ours, capsys):
    """The same command again, and with another setting where a folder does not keep to one."""
    arguments, names = VERBS[verb]
    shutil.copytree(ours / verb, "out")
    for _ in range(2):
        assert call(*arguments, "out") == 0, capsys.readouterr().err
    if verb not in ("audit", "train"):
        other = {
            "attack": ("--seed", 1),
            "update": ("--seed", 1),
            "bound": ("--steps", 3),
            "evidence": ("--declare", "accepted_by=me"),
        }[verb]
        before = snapshot(place / "out")
        assert call(*arguments, "out", *other) == 0, capsys.readouterr().err
        assert snapshot(place / "out") != before
    for name in names:
        about = (place / "out" / name).stat()
        assert stat.S_IMODE(about.st_mode) & 0o077 == 0
    assert not list((place / "out").rglob("*-part"))


@pytest.mark.parametrize(
    "make", [user_file, empty_file, fifo, link, dangling, device], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("verb", [*VERBS, "capture"])
def test_in_the_place_of_the_folder(verb, make, place, capsys):
    arguments = VERBS[verb][0] if verb in VERBS else ("capture", app(place), "--out")
    make(place / "out")
    refused(place, place / "out", capsys, *arguments, "out")
    refused(place, place / "out", capsys, *arguments, "out/below")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("report", "run"), "run/report.html"),
        (("compare", "other", "run"), "run/compare.html"),
        (("compare", "other", "run", "--out", "own.html"), "own.html"),
        (("compare", "other", "run", "--out", "plan.toml"), "plan.toml"),
        (("compare", "other", "run", "--out", "run/records.jsonl"), "run/records.jsonl"),
        (("evidence", "run", "--out", "own.html"), "own.html"),
        (("evidence", "run", "--out", "own.html"), "report.json"),
    ],
    ids=lambda value: "-".join(map(str, value[:1])) if isinstance(value, tuple) else None,
)
def test_pages(arguments, name, place, capsys):
    path = place / name
    if name.endswith((".toml", ".jsonl")):
        refused(place, path, capsys, *arguments)
        return
    for make in kinds(place, len(name), 4):
        remove(path)
        make(path)
        refused(place, path, capsys, *arguments)


def test_pages_again(place, capsys):
    for arguments in (("report", "run"), ("compare", "other", "run"), ("compare", "run", "other")):
        for more in ((), ("--out", "page.html")) if arguments[0] == "compare" else ((),):
            for _ in range(2):
                assert call(*arguments, *more) == 0, capsys.readouterr().err


def test_a_page_that_the_user_edited_is_the_users(place, capsys):
    assert call("report", "run") == 0
    page = place / "run" / "report.html"
    page.write_text(page.read_text().replace("</body>", "<p>My note.</p></body>"))
    refused(place, page, capsys, "report", "run")
    assert call("evidence", "run", "--out", "signed") == 0
    plan = place / "signed" / "evidence.toml"
    plan.write_text(plan.read_text() + "# my own change\n")
    refused(place, plan, capsys, "evidence", "run", "--out", "signed")


def test_captured_updates_of_an_audit_are_not_mixed(place, capsys):
    """An audit's records are ours, but hours of work: a run on captured updates leaves them."""
    refused(place, place / "run", capsys, *UPDATE, "--out", "run")


def test_a_folder_that_cannot_be_written(place, capsys):
    locked = place / "locked"
    locked.mkdir()
    if os.geteuid():
        locked.chmod(0o500)
    elif subprocess.run(["chattr", "+i", str(locked)], capture_output=True).returncode:
        pytest.skip("root may write everywhere here")
    try:
        for arguments, _ in VERBS.values():
            refused(place, locked, capsys, *arguments, "locked")
            refused(place, locked, capsys, *arguments, "locked/below")
        refused(place, locked, capsys, "compare", "run", "other", "--out", "locked/page.html")
    finally:
        if os.geteuid():
            locked.chmod(0o700)
        else:
            subprocess.run(["chattr", "-i", str(locked)], check=True)


@pytest.mark.parametrize("make", [folder, fifo, dangling, device], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["run.json", "records.jsonl", "utility.jsonl"])
def test_a_record_file_that_is_no_file_hangs_nothing(name, make, place, capsys):
    remove(place / "run" / name)
    make(place / "run" / name)
    commands = [("report", "run"), ("compare", "run", "other"), ("compare", "other", "run")]
    for arguments in [*commands, ("evidence", "run")]:
        if make is dangling and name == "utility.jsonl":
            continue  # as if there were none
        before = snapshot(place)
        assert call(*arguments) == 2, arguments
        error = capsys.readouterr().err
        assert name in error
        assert snapshot(place) == before


@pytest.mark.parametrize("make", [folder, fifo, device], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "arguments",
    [
        ("audit", "it.toml", "--out", "new"),
        ("train", "it.toml", "--out", "new"),
        ("attack", "--update", "it.safetensors", "--model", MODEL, "--input-shape", "1,8,8"),
        ("attack", "--update", "it.npz", "--model", MODEL, "--input-shape", "1,8,8"),
        (*UPDATE[:3], "--before", "it.safetensors", *UPDATE[5:]),
        (*UPDATE, "--truth", "it.npz"),
        ("attack", "--data", "npz:it.npz"),
        ("attack", "--data", "idx:it-images-idx3-ubyte"),
        ("attack", "--data", "zip:it.zip"),
        ("attack", "--data", "folder:it.d"),
    ],
    ids=lambda arguments: next(text for text in arguments if "it." in text or "it-" in text),
)
def test_a_given_file_that_is_no_file_hangs_nothing(arguments, make, place, capsys):
    named = next(text for text in arguments if "it." in text or "it-" in text)
    name = named.split(":")[-1]
    if name == "it.d" and make is folder:
        pytest.skip("it may be a folder")
    make(place / name)
    assert call(*arguments) == 2
    error = capsys.readouterr().err
    assert name in error
    assert "Traceback" not in error
    assert not (place / "new").exists()


def test_a_picture_that_is_no_file_is_left_out(place, capsys):
    for path in (place / "run" / "pictures").iterdir():
        path.unlink()
        os.mkfifo(path)
    assert call("report", "run") == 0
    assert call("evidence", "run") == 0


STATE = {"w": torch.zeros(2)}
ABOUT = {"round": 1, "client": 3, "kind": "weights"}


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "name",
    ["round-0001", "round-0001/before.safetensors", "round-0001/client-3.safetensors"],
)
def test_captured_updates(name, make, place):
    if name == "round-0001" and make is folder:
        pytest.skip("a folder may hold other files")
    path = place / "seen" / name
    path.parent.mkdir(parents=True)
    make(path)
    before = snapshot(place)
    with pytest.raises(ValueError, match=path.name):
        captured.write(place / "seen", STATE, {"w": torch.ones(2)}, ABOUT)
    after = snapshot(place)
    assert {p: after.get(p) for p in before} == before


def test_captured_updates_again(place):
    for value in (1.0, 2.0):
        update = {"w": torch.full((2,), value)}
        path = captured.write(place / "seen", STATE, update, ABOUT)
    assert captured.load(path).update["w"].tolist() == [2.0, 2.0]
    other = {"w": torch.full((2,), 5.0)}
    with pytest.raises(ValueError, match="holds other weights than the client received"):
        captured.write(place / "seen", other, update, ABOUT)


def app(place):
    """A Flower app whose two clients send weights back."""
    pytest.importorskip("flwr")
    (place / "app" / "tiny_app").mkdir(parents=True)
    (place / "app" / "pyproject.toml").write_text(
        '[project]\nname = "tiny"\nversion = "1"\n[tool.flwr.app]\npublisher = "me"\n'
        '[tool.flwr.app.components]\nserverapp = "tiny_app:server"\nclientapp = "tiny_app:client"\n'
        "[tool.flwr.app.config]\n"
    )
    (place / "app" / "tiny_app" / "__init__.py").write_text(APP)
    return place / "app"


APP = """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

server, client = ServerApp(), ClientApp()

@server.main()
def main(grid, context):
    start = ArrayRecord({"w": torch.zeros(3)})
    FedAvg().start(grid=grid, initial_arrays=start, num_rounds=1)

@client.train()
def train(message, context):
    arrays = ArrayRecord({"w": torch.full((3,), 1.0 + context.node_config["partition-id"])})
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
"""


def test_capture(place, capsys):
    """One client's file is the user's: an error, not fewer files."""
    command = ("capture", app(place), "--out", "a/b/seen", "--clients", "2")
    for _ in range(2):
        assert call(*command) == 0, capsys.readouterr().err
    files = sorted((place / "a" / "b" / "seen" / "round-0001").glob("client-*"))
    assert len(files) == 2
    for path in (place / "a", place / "a" / "b", place / "a" / "b" / "seen", files[0].parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    files[1].write_text("mine")
    capsys.readouterr()
    assert call(*command) == 2
    assert files[1].name in capsys.readouterr().err
    assert files[1].read_text() == "mine"


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_readings_of_the_leak_meter(make, place):
    pytest.importorskip("flwr")
    from leakbound.flower import LeakMeter, Setup

    path = place / "readings.jsonl"
    make(path)
    before = snapshot(place)
    with pytest.raises(ValueError, match=r"readings\.jsonl"):
        LeakMeter(Setup(lambda: torch.nn.Linear(4, 2)), path=path)
    assert snapshot(place) == before


def test_parents_are_as_private_as_the_folder(place, capsys):
    old = os.umask(0)
    try:
        for verb in ("attack", "bound", "evidence", "train"):
            assert call(*VERBS[verb][0], place / "new" / verb / "a" / "b") == 0
        assert call("compare", "run", "other", "--out", "new/compare/x/page.html") == 0
    finally:
        os.umask(old)
    made = [path for path in (place / "new").rglob("*") if path.is_dir()]
    assert len(made) > 10
    assert {stat.S_IMODE(path.stat().st_mode) for path in [place / "new", *made]} == {0o700}


KILLED = """
import os, sys, time
from leakbound._util import files
def slow(descriptor):
    print("written", flush=True)
    time.sleep(600)
files.os.fsync = slow
from leakbound.cli import main
main(sys.argv[1:])
"""


def test_a_kill_in_the_report_leaves_nothing_for_long(place, capsys):
    """The page holds private pictures; what SIGKILL leaves of it goes with the next command."""
    for after in (("report", "run"), ("audit", "plan.toml", "--workers", "1", "--out", "run")):
        writer = subprocess.Popen(
            [sys.executable, "-c", KILLED, "report", "run"], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout.readline() == "written\n"
        writer.kill()
        writer.communicate()
        (left,) = (place / "run").glob(".report*")
        assert b"data:image/png" in left.read_bytes()
        assert not (place / "run" / "report.html").exists()
        assert call(*after) == 0, capsys.readouterr().err
        assert not list((place / "run").glob(".report*"))
        (place / "run" / "report.html").unlink()
