import errno
import importlib
import json
import os
import platform
import random
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from leakbound import audit, report
from leakbound._util import files
from leakbound.audit import context, journal, run_file
from leakbound.audit import experiment as experiments
from leakbound.report.folder import read


@pytest.fixture
def done(tiny, tmp_path):
    """A finished run."""
    audit.audit(tiny, tmp_path / "run")
    return tmp_path / "run"


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name not in (".lock", "timings.jsonl")
    }


def runs(folder: Path) -> int:
    return len((folder / "timings.jsonl").read_bytes().splitlines())


@pytest.mark.linux
def test_what_a_run_leaves(tiny, done):
    lines = (done / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["experiment"] for line in lines] == [
        cell.id for cell in tiny.experiments()
    ]
    units = [
        json.loads(line)["training"] for line in (done / "utility.jsonl").read_text().splitlines()
    ]
    assert units == [unit.id for unit in tiny.trainings()]
    assert runs(done) == 6
    for path in [done, *done.rglob("*")]:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    about = json.loads((done / "run.json").read_text())
    assert about["machine"]["threads"] == 1
    assert about["machine"]["processor"] == platform.machine()
    assert not about["own_data"]


def test_again_changes_nothing(tiny, done):
    before = content(done)
    outcome = audit.audit(tiny, done)
    assert content(done) == before
    assert runs(done) == 6
    assert (outcome.experiments, outcome.failed) == (4, 0)
    assert sum(outcome.counts.values()) == 4
    assert set(outcome.counts) <= {"exposed", "undecided"}


def test_damaged_lines_and_missing_pictures_run_again(tiny, done):
    before = content(done)
    path = done / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][9:] + lines[2] + lines[3][:-4] + b"\0\0\0")
    (done / "pictures" / json.loads(lines[0])["pictures"]["truth"]).unlink()
    part = f".records.jsonl.{'0' * 16}.leakbound-part"
    for place in (done, done / "pictures"):
        (place / part).write_text("left by a kill")
    with pytest.warns(UserWarning, match="2 damaged lines"):
        audit.audit(tiny, done)
    assert content(done) == before
    assert runs(done) == 6 + 4, "two damaged, and two cells of one batch that share a picture"


@pytest.mark.linux
def test_pictures_that_do_not_hold_what_their_name_says_are_made_again(tiny, done):
    before = content(done)
    one, two = sorted((done / "pictures").iterdir())[:2]
    for spoil in (
        lambda: one.write_bytes(one.read_bytes()[:-9]),
        lambda: one.write_bytes(two.read_bytes()),
    ):
        spoil()
        audit.audit(tiny, done)
        assert content(done) == before
    assert runs(done) > 6
    for target in (two, one):
        one.unlink()
        one.symlink_to(target)
        refused(tiny, done, one.name, "a symbolic link")
        assert one.is_symlink()


ODD = (None, True, -1, 0.5, 10**400, "", "x", [], ["x"], [[1]], {}, {"a": 1}, "failed", "exposed")


def spoiled(record, source):
    """A canonical line whose record lacks a field, at any depth, or has another value there."""
    path, at = [], record
    while isinstance(at, dict) and at and (not path or source.random() < 0.6):
        path.append(source.choice(sorted(at)))
        at = at[path[-1]]
    table = record
    for name in path[:-1]:
        table = table[name]
    if source.random() < 0.4:
        del table[path[-1]]
    else:
        table[path[-1]] = source.choice(ODD)
    return files.encode(record)


@pytest.mark.filterwarnings("ignore:.*damaged line")
def test_what_the_report_cannot_read_runs_again(tiny, done):
    """Whatever a record holds: after the same command again there is a report."""
    source, names = random.Random(0), ("records.jsonl", "utility.jsonl")
    lines = {name: (done / name).read_bytes().splitlines() for name in names}
    healed = 0
    for _ in range(3):
        for name in names:
            made = b"".join(spoiled(json.loads(line), source) for line in lines[name])
            (done / name).write_bytes(made)
        try:
            read(done)
        except ValueError:
            healed += 1
        audit.audit(tiny, done)
        report.write(done)
    assert healed > 1


def test_what_is_not_compared_in_run_json_is_written_anew(tiny, done):
    before = content(done)
    about = json.loads((done / "run.json").read_text())
    (done / "run.json").unlink()
    del about["written_by"]
    text = json.dumps(about, indent=1).replace('"experiments": 4', '"experiments": NaN')
    files.write(done / "run.json", text.encode())
    with pytest.raises(ValueError, match="malformed: invalid character"):
        report.write(done)
    audit.audit(tiny, done)
    assert content(done) == before


def change_plan(about):
    about["plan"]["seeds"] = [7, 8]


def change_data(about):
    about["data"]["fingerprint"] = "0" * 64


def change_version(about):
    about["versions"]["torch"] = "0.1"


def change_machine(about):
    about["machine"]["processor"] = "abacus"


def change_schema(about):
    about["schema"] = 2


def change_code(about):
    about["code"] = {"a:b": "0"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_plan, ["another plan", "plan.seeds", "[7, 8]", "[0, 1]"]),
        (change_data, ["other data", "data.fingerprint", "000"]),
        (change_version, ["other versions", "versions.torch", '"0.1"']),
        (change_machine, ["another kind of machine", "machine.processor", "abacus"]),
        (change_schema, ["another schema", "2 there and 1 now"]),
        (change_code, ["other code", "a:b"]),
    ],
)
def test_a_folder_of_another_run_is_refused(tiny, done, change, words):
    about = json.loads((done / "run.json").read_text())
    change(about)
    del about["written_by"]
    (done / "run.json").unlink()
    files.write(done / "run.json", json.dumps(about).encode())
    refused(tiny, done, *words)


def refused(plan, folder, *words, **options):
    before = content(folder)
    with pytest.raises(ValueError) as caught:
        audit.audit(plan, folder, **options)
    for word in (repr(str(folder))[1:-1], *words):
        assert word in str(caught.value)
    assert content(folder) == before


def test_other_folders_that_are_refused(tiny, table, done, tmp_path):
    refused(tiny, done, "--no-examples", "pictures is true there and false now", pictures=False)
    refused(audit.parse(table | {"seeds": [0]}), done, "another plan", "plan.seeds")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "[bold]\n.txt").write_text("mine")
    refused(tiny, foreign, "other files", "no run.json")
    with FileLock(done / ".lock"):
        refused(tiny, done, "another run is active")
    for text in ("{", "[" * 99999, (done / "run.json").read_text() + "\n"):
        (done / "run.json").write_text(text)
        refused(tiny, done, "run.json", "that was changed since")


def test_records_of_unknown_cells_are_dropped(tiny, done):
    """`run.json` says whose folder it is."""
    before = content(done)
    known = json.loads((done / "records.jsonl").read_bytes().splitlines()[0])
    with (done / "records.jsonl").open("ab") as stream:
        stream.write(files.encode(known | {"cell": "f" * 16}))
    with pytest.warns(UserWarning, match="1 damaged line"):
        audit.audit(tiny, done)
    assert content(done) == before


def test_a_kill_before_the_first_file_does_not_hinder(tiny, tmp_path):
    (tmp_path / f".run.json.{'7' * 16}.leakbound-part").write_text("{")
    (tmp_path / ".lock").touch()
    assert audit.audit(tiny, tmp_path).failed == 0
    assert not list(tmp_path.glob(".*-part"))


def test_places_that_cannot_be_written(tiny, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for place in (file, file / "below"):
        with pytest.raises(ValueError, match="which cannot be written"):
            audit.audit(tiny, place)
    assert file.read_text() == "mine"


def test_a_full_disk_keeps_what_was_recorded(tiny, done, tmp_path, monkeypatch):
    """For a failure in every write in turn: one clear error, and resuming gives the same bytes."""
    write = os.write
    for allowed in (0, 4, 9):
        folder, left = tmp_path / f"full{allowed}", [allowed]

        def limited(descriptor, data, left=left):
            left[0] -= 1
            if left[0] < 0:
                write(descriptor, bytes(data)[: len(data) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, data)

        with monkeypatch.context() as patch:
            patch.setattr("os.write", limited)
            with pytest.raises(ValueError, match=r"No space left on device; what was recorded"):
                audit.audit(tiny, folder)
        kept = runs(folder) if (folder / "timings.jsonl").exists() else 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal.warnings, "warn", lambda *_, **__: None)
            audit.audit(tiny, folder)
        assert content(folder) == content(done)
        assert runs(folder) <= 6
        assert kept == 0 or allowed > 2


class PowerLoss(BaseException):
    """No code of ours catches it: none runs without power."""


def lose_power(patch, at, share):
    """At that write, of which a part reaches the disk; nothing changes the disk after it."""
    write, left = os.write, [at]

    def cut(descriptor, data):
        left[0] -= 1
        if left[0] < 0:
            whole = bytes(data)
            write(descriptor, whole[: int(share * len(whole))] if left[0] == -1 else b"")
            raise PowerLoss
        return write(descriptor, data)

    def unless_dark(call):
        return lambda *given, **more: None if left[0] < 0 else call(*given, **more)

    patch.setattr(os, "write", cut)
    for name in ("link", "rename", "unlink", "fsync"):
        patch.setattr(os, name, unless_dark(getattr(os, name)))


@pytest.fixture
def replay(tiny, monkeypatch):
    """The plan's results, run once: an audit with them has all writes and takes no time."""
    results = list(audit.run(tiny))
    # What reached the disk is imitated: a real wait for each of thousands of writes tells nothing.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return lambda plan, done, **more: (one for one in results if one.id not in done)


@pytest.mark.filterwarnings("ignore:.*damaged line")
@pytest.mark.parametrize("share", [0.0, 0.5, 0.999, 1.0])
def test_power_lost_at_any_write(tiny, replay, done, tmp_path, monkeypatch, share):
    """Of records, trainings, times, pictures and `run.json`: the same command ends all the same."""
    wanted, writes = content(done), 0
    with monkeypatch.context() as patch:
        count, write = [], os.write
        patch.setattr(os, "write", lambda *given: count.append(0) or write(*given))
        audit.audit(tiny, tmp_path / "whole", run=replay)
        writes = len(count)
    assert writes > 20
    for at in range(writes):
        folder = tmp_path / f"lost{at}"
        with monkeypatch.context() as patch:
            lose_power(patch, at, share)
            with pytest.raises(PowerLoss):
                audit.audit(tiny, folder, run=replay)
        audit.audit(tiny, folder, run=replay)
        assert content(folder) == wanted, at
        assert not list(folder.rglob("*-part"))
        times = (folder / "timings.jsonl").read_bytes().splitlines(keepends=True)
        assert sum(files.decode(line, "id") is not None for line in times) >= 5, at


@pytest.mark.filterwarnings("ignore:.*damaged line")
def test_what_no_call_made_durable_may_be_lost(tiny, replay, done, tmp_path):
    """After a loss of power a name may be missing, and the end of a file be missing or zeros."""
    wanted = content(done)
    for path in sorted(p for p in done.rglob("*") if p.suffix in (".jsonl", ".png")):
        whole = path.read_bytes()
        last = whole[:-1].rfind(b"\n") + 1 if path.suffix == ".jsonl" else 0
        for end in {*range(last, len(whole), max(1, (len(whole) - last) // 9)), len(whole) - 1}:
            for tail in (b"", b"\0" * (len(whole) - end)):
                path.write_bytes(whole[:end] + tail)
                audit.audit(tiny, done, run=replay)
                assert content(done) == wanted, (path, end, tail)
                path.write_bytes(whole)
        path.unlink()
        audit.audit(tiny, done, run=replay)
        assert content(done) == wanted, path


def test_an_os_error_of_a_cell_or_of_the_screen_is_not_the_folders(tiny, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(experiments, "play_round", broken)
        outcome = audit.audit(tiny, tmp_path / "a")
    assert outcome.failed == 4
    assert outcome.counts == {"failed": 4}
    text = (tmp_path / "a" / "records.jsonl").read_text()
    assert text.count("OSError: [Errno 5] Input/output error") == 4
    with pytest.raises(BrokenPipeError):
        audit.audit(tiny, tmp_path / "b", watch=lambda _: (_ for _ in ()).throw(BrokenPipeError()))


def test_a_bad_plan_leaves_no_folder(table, tmp_path):
    with pytest.raises(ValueError, match="no module"):
        audit.audit(audit.parse(table | {"models": [{"name": "no.where:build"}]}), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_edited_code_is_another_run(table, tmp_path, user_module):
    text = "from leakbound.models import mlp as build\n"
    name = user_module("edited", text)
    plan = audit.parse(table | {"models": [{"name": name}]})
    audit.audit(plan, tmp_path / "run")
    user_module("edited", text + "# another line\n")
    refused(plan, tmp_path / "run", "other code of its models", "code.edited:build")


def test_code_counts_before_it_is_loaded(table, user_module):
    """Settings of attacks are loaded in the run, and a second start finds what the first found."""
    name = user_module("not_loaded", "def build(): ...\n")
    plan = audit.parse(table | {"models": [{"name": name}]})
    before = context.code(plan)
    assert "not_loaded" not in sys.modules
    importlib.import_module("not_loaded")
    assert context.code(plan) == before
    assert list(before) == [name]


def test_versions_name_what_is_missing(monkeypatch):
    monkeypatch.setattr(run_file, "OWN", ("no-such-package",))
    assert run_file.versions()["no-such-package"] == "not installed"


def test_an_image_is_never_private_and_public(table, tmp_path):
    """Images that a folder holds twice: the splits share none, and the run says so."""
    rng = np.random.default_rng(0)
    inputs = rng.random((30, 8, 8), dtype=np.float32)[np.arange(60) % 30]
    np.savez(tmp_path / "data.npz", inputs=inputs, labels=np.arange(60) % 30 % 3)
    table["data"] = {"source": f"npz:{tmp_path / 'data.npz'}"}
    plan = audit.parse(table | {"utility": {"rounds": 0}})
    bench = audit.PlanContext(plan.data)
    images = [one.tobytes() for one in bench.dataset.inputs.numpy()]
    kept = {part: {images[i] for i in rows} for part, rows in bench.splits.items()}
    assert not kept["private"] & kept["public"]
    assert not (kept["private"] | kept["public"]) & kept["test"]
    assert len(bench.splits["private"]) == 36
    assert set.union(*kept.values()) == set(images)
    with pytest.warns(UserWarning, match=f"{bench.copies} of 60 examples are copies"):
        audit.audit(plan, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["data"]["copies"] > 0
