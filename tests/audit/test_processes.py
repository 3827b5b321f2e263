"""Several processes, kills and crashes: real ones."""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from leakbound import audit
from leakbound.assess.record import Assessment, Training, read
from leakbound.audit import engine
from leakbound.audit import experiment as experiments
from leakbound.audit.experiment import DIED

LONG = 600
"""Seconds until something hangs: a loaded machine takes long, too."""
PLAN = """
name = "tiny"
seeds = [0, 1, 2]
[data]
source = "digits"
[[models]]
name = "mlp"
hidden = [16]
[[attacks]]
name = "linear_inversion"
[[attacks]]
name = "inverting_gradients"
steps = [60, 61]
[[defenses]]
name = "none"
[[defenses]]
name = "gaussian_noise"
noise_std = 0.01
[utility]
rounds = 2
repeats = 2
"""
# a shell's background jobs ignore Ctrl-C, and what they start inherits that
COMMAND = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); \
import leakbound.report as r; r.write = lambda out, images: out; \
from leakbound.cli import main; main()"


def start(plan: Path, out: Path) -> subprocess.Popen[str]:
    line = [sys.executable, "-c", COMMAND, "audit", str(plan), "--out", str(out), "--workers", "2"]
    return subprocess.Popen(line, stderr=subprocess.PIPE, text=True, start_new_session=True)


def recorded(out: Path) -> int:
    files = (out / "records.jsonl", out / "utility.jsonl")
    return sum(f.read_bytes().count(b"\n") for f in files if f.exists())


def wait_for(process: subprocess.Popen[str], out: Path, count: int) -> None:
    limit = time.monotonic() + LONG
    while recorded(out) < count and process.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert process.poll() is None, "it ended before it could be stopped"


def group(process: subprocess.Popen[str]) -> list[str]:
    """The processes of its session that are alive."""
    alive = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == process.pid and state != "Z":
            alive.append(stat.parent.name)
    return alive


def all_gone(process: subprocess.Popen[str]) -> bool:
    limit = time.monotonic() + LONG
    while group(process) and time.monotonic() < limit:
        time.sleep(0.05)
    return not group(process)


def outcome(out: Path) -> dict[str, bytes]:
    pictures = {p.name: p.read_bytes() for p in (out / "pictures").iterdir()}
    names = ("records.jsonl", "utility.jsonl")
    return pictures | {n: (out / n).read_bytes() for n in names if (out / n).exists()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """The plan's file, and what it leaves where nobody stops it."""
    place = tmp_path_factory.mktemp("undisturbed")
    plan = place / "tiny.toml"
    plan.write_text(PLAN, encoding="utf-8")
    audit.audit(audit.load(plan), place / "reference")
    return plan, outcome(place / "reference")


@pytest.mark.linux
@pytest.mark.filterwarnings("ignore:.*damaged line")
def test_killed_stopped_and_resumed(reference, tmp_path):
    """SIGKILL, Ctrl-C, then to the end: as never stopped, and nothing is run twice."""
    plan, wanted = reference
    out = tmp_path / "run"

    process = start(plan, out)
    wait_for(process, out, 3)
    assert len(group(process)) >= 3
    process.kill()
    process.communicate()
    assert all_gone(process), "workers outlive their parent"
    kept = recorded(out)

    process = start(plan, out)
    wait_for(process, out, kept + 3)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=LONG)
    assert process.returncode == 130
    last = errors.strip().splitlines()[-1]
    assert last == "leakbound: stopped; nothing is lost: run the same command again to go on"
    assert "Traceback" not in errors
    assert "resource_tracker" not in errors
    assert all_gone(process)

    result = audit.audit(audit.load(plan), out)
    assert result.failed == 0
    assert outcome(out) == wanted
    times = Counter(json.loads(t)["id"] for t in (out / "timings.jsonl").read_bytes().splitlines())
    assert max(times.values()) == 1
    assert recorded(out) == 18 + 4
    assert len(times) >= 18 + 4 - 2, "a stop may come between a record and the note of its time"


@pytest.mark.linux
def test_of_two_audits_in_one_folder_the_second_is_refused(reference, tmp_path):
    """The first, held in the middle, then ends undisturbed."""
    plan, wanted = reference
    out = tmp_path / "run"
    first = start(plan, out)
    wait_for(first, out, 3)
    os.killpg(first.pid, signal.SIGSTOP)
    try:
        before = outcome(out)
        with pytest.raises(ValueError, match="where another run is active; wait for it or") as no:
            audit.audit(audit.load(plan), out)
        assert f"out is {str(out)!r}" in str(no.value)
        assert outcome(out) == before
    finally:
        os.killpg(first.pid, signal.SIGCONT)
    _, errors = first.communicate(timeout=LONG)
    assert first.returncode == 0, errors
    assert outcome(out) == wanted
    times = Counter(json.loads(t)["id"] for t in (out / "timings.jsonl").read_bytes().splitlines())
    assert set(times.values()) == {1}
    assert len(times) == 18 + 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def test_a_stop_waits_while_a_future_is_touched(number):
    """Else it can leave the future's lock taken, and the pool's thread hangs at the exit.

    The signal is sent to the process: another thread may take it, which a mask does not stop.
    """
    from leakbound.audit.engine import _undisturbed

    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    reached = []

    def touch() -> None:
        with _undisturbed():
            os.kill(os.getpid(), number)
            for _ in range(100):
                time.sleep(0.001)
            reached.append("the end")

    given = signal.signal(number, signal.default_int_handler)  # a shell may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            touch()
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, given)
        stop.set()
        other.join()
    assert reached == ["the end"]


@pytest.mark.linux
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*damaged line")
def test_killed_again_and_again(reference, tmp_path):
    """At moments that differ: while starting, in a cell, in a write."""
    plan, wanted = reference
    out = tmp_path / "run"
    for tenths in (5, 31, 43, 47, 52, 55, 61, 66):
        for send, number in ((os.kill, signal.SIGKILL), (os.killpg, signal.SIGTERM)):
            process = start(plan, out)
            time.sleep(tenths / 10)
            send(process.pid, number)
            _, errors = process.communicate()
            assert all_gone(process)
            if number == signal.SIGTERM:
                assert process.returncode in (-number, 128 + number, 0)
                assert "resource_tracker" not in errors
                assert "Traceback" not in errors
    process = start(plan, out)
    process.communicate(timeout=LONG)
    assert process.returncode == 0
    assert outcome(out) == wanted
    times = Counter(json.loads(t)["id"] for t in (out / "timings.jsonl").read_bytes().splitlines())
    assert max(times.values()) == 1


PATIENT = """
import multiprocessing, os, pathlib, time, torch
HOLD, HELD = pathlib.Path({!r}), pathlib.Path({!r})
class Patient(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        if multiprocessing.parent_process() is not None and HOLD.exists():
            (HELD / str(os.getpid())).touch()
            while True:
                time.sleep(0.01)
        return self.inner(x)
def build(input_shape, classes):
    return Patient(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes)))
"""


def kill_workers(hold: Path, held: Path, times: int, over: threading.Event) -> None:
    """Kill so many workers, each when it is at a unit of the patient model; then let it run."""
    for seen in range(1, times + 1):
        while not (marks := list(held.iterdir())) and not over.wait(0.01):
            pass
        if seen == times:
            hold.unlink()
        for mark in marks:
            os.kill(int(mark.name), signal.SIGKILL)
            mark.unlink()


@pytest.mark.linux
@pytest.mark.parametrize("times", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_unit_whose_worker_was_killed_is_no_result(times, table, tmp_path, user_module):
    """Twice: the run itself mends it. Three times: it is recorded as failed, until the next run."""
    hold, held = tmp_path / "hold", tmp_path / "held"
    held.mkdir()
    table["models"] = [{"name": user_module("patient", PATIENT.format(str(hold), str(held)))}]
    table["seeds"] = [0]
    del table["defenses"], table["utility"]
    plan = audit.parse(table)
    audit.audit(plan, tmp_path / "undisturbed")
    hold.touch()
    over = threading.Event()
    killer = threading.Thread(target=kill_workers, args=(hold, held, times, over))
    killer.start()
    try:
        assert audit.audit(plan, tmp_path / "run", workers=2).failed == (times == 3)
    finally:
        over.set()
        killer.join()
    if times == 3:
        (record,) = read(tmp_path / "run" / "records.jsonl", Assessment)
        assert (record.status, record.reason) == ("failed", DIED)
        assert audit.audit(plan, tmp_path / "run").failed == 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "undisturbed")


WORK = """
import os, pathlib
from leakbound.audit import engine
DIED = pathlib.Path({!r})
def work(group, pictures):
    if len(group) > 1 and not DIED.exists():
        DIED.touch()
        os._exit(3)
    return engine._work(group, pictures)
"""


def test_a_bundle_gives_each_result_as_it_ends(table, tmp_path, user_module, monkeypatch):
    """A death in the middle of a bundle costs nothing that had ended."""
    user_module("dying", WORK.format(str(tmp_path / "died")))
    table["attacks"].append({"name": "inverting_gradients", "steps": 3})
    table["defenses"] = [{"name": "none"}, {"name": "gaussian_noise", "noise_std": 0.01}]
    table["seeds"] = [0]
    del table["utility"]
    plan = audit.parse(table)
    alone = list(audit.run(plan))
    monkeypatch.setattr(engine, "_work", importlib.import_module("dying").work)
    monkeypatch.setattr(engine, "ceil", lambda share: engine.TOGETHER)
    started = Counter()
    found = list(audit.run(plan, workers=2, started=lambda unit: started.update([unit.id])))
    assert (tmp_path / "died").exists()
    assert [started[one.id] for one in found] == [1, 2, 2, 2], "the first had ended"
    assert sorted(one.id for one in found) == sorted(one.id for one in alone)
    assert {one.id: one.record for one in found} == {one.id: one.record for one in alone}


@pytest.mark.linux
def test_a_worker_killed_while_it_starts_is_started_again(
    table, tmp_path, user_module, monkeypatch
):
    """Its first two starts fail, as if killed; a third failure would end the audit."""
    wait, starts = engine._wait_for_start, []

    def killed(pool, *, last):
        starts.append(last)
        if len(starts) < engine.TRIES:
            raise BrokenProcessPool
        wait(pool, last=last)

    monkeypatch.setattr(engine, "_wait_for_start", killed)
    test_a_unit_whose_worker_was_killed_is_no_result(1, table, tmp_path, user_module)
    assert starts == [False, False, True]


def test_a_lack_of_memory_is_no_result_either(tiny, tmp_path, monkeypatch):
    def full(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(experiments, "play_round", full)
        assert audit.audit(tiny, tmp_path / "run").failed == 4
    assert audit.audit(tiny, tmp_path / "run").failed == 0


def test_a_process_that_dies_costs_its_own_cells_only(table, tmp_path, user_module):
    """The rest runs; both the cell and the training of the deadly model are recorded as failed."""
    name = user_module(
        "deadly",
        """
        import multiprocessing, os, torch
        class Deadly(torch.nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner
            def forward(self, x):
                if multiprocessing.parent_process() is not None:
                    os._exit(3)
                return self.inner(x)
        def build(input_shape, classes):
            return Deadly(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes)))
        """,
    )
    table["models"].append({"name": name})
    table["seeds"] = [0]
    del table["defenses"]
    plan = audit.parse(table)
    result = audit.audit(plan, tmp_path / "run", workers=2)
    assert result.failed == 2
    rows = list(read(tmp_path / "run" / "records.jsonl", Assessment))
    assert [row.status for row in rows] == ["ok", "failed"]
    assert rows[1].reason == DIED
    assert rows[1].verdict == "undecided"
    again = read(tmp_path / "run" / "utility.jsonl", Training)
    assert [row.status for row in again] == ["ok", "failed"]
    alone = audit.run_experiment(plan.experiments()[0], audit.PlanContext(plan.data)).record
    assert rows[0] == alone


def test_a_worker_that_ends_at_once_is_no_failed_cell(monkeypatch):
    monkeypatch.setattr(engine, "_started", functools.partial(os._exit, 3))
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
        pytest.raises(ValueError, match="worker processes cannot start"),
    ):
        engine._wait_for_start(pool, last=True)


@pytest.mark.slow
def test_workers_that_cannot_start_are_no_failed_cells(tmp_path):
    """As in a script without `if __name__ == "__main__"`."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from leakbound import audit\n"
        "plan = audit.parse({'data': {'source': 'digits'}, 'models': [{'name': 'mlp'}],\n"
        "                    'attacks': [{'name': 'linear_inversion'}]})\n"
        f"audit.audit(plan, Path({str(tmp_path / 'run')!r}), workers=2)\n",
        encoding="utf-8",
    )
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=LONG, check=False
    )
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: worker processes cannot start")
    assert not (tmp_path / "run" / "records.jsonl").exists()


def test_a_data_set_that_changes_while_the_audit_runs(table, tmp_path):
    import numpy as np

    file = tmp_path / "data.npz"
    source = np.random.default_rng(0)
    labels = np.arange(40) % 4

    def write() -> None:
        np.savez(file, inputs=source.random((40, 8, 8), dtype=np.float32), labels=labels)

    write()
    table["data"]["source"] = f"npz:{file}"
    plan = audit.parse(table | {"utility": {"rounds": 0}})
    bench = audit.PlanContext(plan.data)
    assert bench.dataset.classes == 4
    write()
    with pytest.raises(ValueError, match="changed while the audit ran"):
        list(audit.run(plan, workers=2, context=bench))
