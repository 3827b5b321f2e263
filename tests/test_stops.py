"""Ctrl-C and SIGTERM end every command in time, also in native code, and are never a result."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import torch
from safetensors.torch import save_file

from leakbound._util import stops
from leakbound.assess.record import Assessment, decode
from leakbound.cli import main

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
SIGNALS = pytest.mark.parametrize("number", list(CODES), ids=["ctrl-c", "term"])
LIMIT = 5.0
"""Seconds from a stop to the end of the process."""
MODEL = """
import time
from pathlib import Path
import torch

def wait():
    Path("waits").touch()

@torch.jit.ignore
def in_python(x: torch.Tensor) -> torch.Tensor:
    wait()
    while True:
        time.sleep(0.01)

@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return in_python(x)

class Net(torch.nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.layer = torch.nn.Linear(inputs, 10)

    def forward(self, x):
        how = Path("how").read_text() if Path("how").exists() else ""
        if how == "script":
            scripted(x)
        if how == "native":
            wait()
            torch.linalg.svd(torch.rand(7000, 7000, dtype=torch.float64))
        return self.layer(x.flatten(1))

def build():
    return Net(64)
"""
PLAN = """seeds = [0, 1]
[data]
source = "digits"
[[models]]
name = "stopped_net:build"
[[attacks]]
name = "linear_inversion"
[[attacks]]
name = "inverting_gradients"
steps = 30
[[defenses]]
name = "none"
[[defenses]]
name = "gaussian_noise"
noise_std = 0.1
[error_bound]
kind = "none"
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "stopped_net.py").write_text(MODEL)
    (tmp_path / "plan.toml").write_text(PLAN)
    return tmp_path


@contextmanager
def started(place, code, *arguments):
    """A command in a process of its own that handles Ctrl-C as a shell's does."""
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    path = os.pathsep.join([str(place), *sys.path])
    with (place / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", start + code, *map(str, arguments)],
            cwd=place,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=said,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()


MAIN = "from leakbound.cli import main; main()"


def said_in(place):
    return (place / "said").read_text()


def until(found, process, place, seconds=120):
    end = time.monotonic() + seconds
    while not found():
        assert process.poll() is None, said_in(place)
        assert time.monotonic() < end, said_in(place)
        time.sleep(0.02)


def stopped(process, number):
    """The exit code, and the seconds that the process took to end."""
    began = time.monotonic()
    process.send_signal(number)
    code = process.wait(60)
    return code, time.monotonic() - began


def lines(path):
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


@pytest.mark.parametrize(
    ("workers", "how", "number"),
    [
        (1, "native", signal.SIGINT),
        (1, "script", signal.SIGTERM),
        (2, "native", signal.SIGTERM),
    ],
)
def test_a_stop_is_no_result_and_the_same_command_runs_the_experiment_again(
    place, number, how, workers, monkeypatch
):
    given = ["audit", "plan.toml", "--out", "run", "--workers", str(workers)]
    records = place / "run" / "records.jsonl"
    with started(place, MAIN, *given) as process:
        until(lambda: lines(records), process, place)
        (place / "how").write_text(how)
        until((place / "waits").exists, process, place)
        code, seconds = stopped(process, number)
    assert code == CODES[number], said_in(place)
    assert seconds < LIMIT
    assert "nothing is lost: run the same command again to go on" in said_in(place)
    kept = [decode(line, Assessment) for line in lines(records)]
    assert 0 < len(kept) < 8
    assert {record.status for record in kept} == {"ok"}
    (place / "how").unlink()
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    with pytest.raises(SystemExit) as end:
        main(given[:4])
    assert end.value.code == 0
    every = [decode(line, Assessment) for line in lines(records)]
    assert len(every) == 8
    assert {record.status for record in every} == {"ok"}


NATIVE = """
import torch
from pathlib import Path

def native(*given, **named):
    Path("waits").touch()
    torch.linalg.svd(torch.rand(7000, 7000, dtype=torch.float64))
"""
COMMANDS = {
    "attack": ("leakbound.audit.experiment", "play_round", ["attack", "--data", "digits"]),
    "bound": ("leakbound.cli.risk", "bound", ["bound", "--noise-multiplier", "1"]),
    "calibrate": (
        "leakbound.cli.risk",
        "calibration",
        ["calibrate", "--target", "psnr>=20 with probability<=0.01"],
    ),
    "train": ("leakbound.audit.experiment", "train", ["train", "training.toml", "--workers", "1"]),
    "reproduce": ("leakbound_reproductions.command", "reproduce", ["reproduce", "priprune"]),
    "audit-epsilon": (
        "leakbound.audit_epsilon",
        "audit_many_runs",
        ["audit-epsilon", "stopped_net:build", "--data", "digits"],
    ),
    "check": ("leakbound.gate.policy", "read", ["check", "policy.toml"]),
}


@pytest.mark.parametrize(
    ("name", "number"),
    [*zip(COMMANDS, itertools.cycle(CODES), strict=False)],
)
def test_every_command_ends_in_time_in_native_code(place, number, name):
    module, function, given = COMMANDS[name]
    (place / "training.toml").write_text(PLAN + "[utility]\nrounds = 3\nrepeats = 1\n")
    patch = f"import {module} as patched; patched.{function} = native\n"
    with started(place, NATIVE + patch + MAIN, *given) as process:
        until((place / "waits").exists, process, place)
        code, seconds = stopped(process, number)
    assert code == CODES[number], said_in(place)
    assert seconds < LIMIT
    assert "leakbound: stopped" in said_in(place)
    assert "Traceback" not in said_in(place)


CAPTURED = """
import leakbound.attacks.matching.attack as patched

patched.GradientMatching.__call__ = native
"""


@SIGNALS
def test_finished_attacks_on_an_update_are_kept(place, number):
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 10)
    gradient = {"layer.weight": torch.randn(10, 64), "layer.bias": torch.randn(10)}
    before = {"layer.weight": layer.weight.detach(), "layer.bias": layer.bias.detach()}
    save_file(gradient, place / "update.safetensors")
    save_file(before, place / "before.safetensors")
    words = ["attack", "--update", "update.safetensors", "--before", "before.safetensors"]
    words += ["--kind", "gradient", "--model", "stopped_net:build", "--input-shape", "1,8,8"]
    words += ["--batch-size", "1", "--attack", "linear_inversion", "gradient_matching"]
    with started(place, NATIVE + CAPTURED + MAIN, *words, "--out", "run") as process:
        until((place / "waits").exists, process, place)
        code, seconds = stopped(process, number)
    assert code == CODES[number], said_in(place)
    assert seconds < LIMIT
    (record,) = [decode(line, Assessment) for line in lines(place / "run" / "records.jsonl")]
    assert (record.attack.name, record.status) == ("linear_inversion", "ok")
    assert "the results so far are in run: leakbound report run writes" in said_in(place)
    with pytest.raises(SystemExit) as end:
        main(["report", str(place / "run")])
    assert end.value.code == 0
    assert "1 experiment of 2 is still missing" in (place / "run" / "report.html").read_text()


def interrupted():
    """The error that TorchScript makes of an interrupt: no exception in its chain tells of it."""

    @torch.jit.ignore
    def python(x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    @torch.jit.script
    def script(x: torch.Tensor) -> torch.Tensor:
        return python(x)

    with pytest.raises(RuntimeError) as caught:
        script(torch.ones(1))
    return caught.value


def chained(kind):
    try:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as stop:
            raise ValueError("cleaning up") from (stop if kind == "cause" else None)
    except ValueError as error:
        return error


@pytest.mark.parametrize("error", [interrupted(), chained("cause"), chained("context")])
def test_an_error_that_hides_a_stop_is_one(error):
    with pytest.raises(KeyboardInterrupt):
        stops.reraise(error)


def test_other_errors_are_none():
    stops.reraise(ValueError("interrupted"))
    stops.reraise(RuntimeError("shapes"))


@pytest.fixture
def ends(monkeypatch):
    """What `noted` calls at the forced end, instead of ending this process."""
    found = []
    monkeypatch.setattr(stops, "GRACE", 0.2)
    given = {number: signal.getsignal(number) for number in CODES}
    for number, handler in stops.DEFAULTS.items():
        signal.signal(number, handler)
    yield found
    for number, handler in given.items():
        signal.signal(number, handler)


@SIGNALS
def test_a_stop_that_ends_the_block_forces_no_end(ends, number):
    with pytest.raises(KeyboardInterrupt) as caught, stops.noted(ends.append):
        signal.raise_signal(number)
    assert isinstance(caught.value, stops.Terminated) == (number == signal.SIGTERM)
    time.sleep(0.5)
    assert ends == []
    assert stops.came() is None
    assert signal.getsignal(number) is stops.DEFAULTS[number]
    assert signal.set_wakeup_fd(-1) == -1


@SIGNALS
def test_a_stop_that_does_not_end_the_block_forces_the_end(ends, number):
    with stops.noted(ends.append):
        with suppress(KeyboardInterrupt):  # as a user's bare `except:` does
            signal.raise_signal(number)
        assert stops.came() == number
        with pytest.raises(KeyboardInterrupt):
            stops.check()
        time.sleep(0.5)
    assert ends == [number]


def test_a_stop_that_another_program_handles_is_left_to_it(ends):
    mine = []
    signal.signal(signal.SIGTERM, lambda *_: mine.append("mine"))
    with stops.noted(ends.append):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert stops.came() is None
    assert (mine, ends) == (["mine"], [])


def test_other_threads_note_nothing(ends):
    def body():
        with stops.noted(ends.append):
            seen.append(signal.getsignal(signal.SIGTERM))

    seen = []
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]


@pytest.mark.linux
@pytest.mark.filterwarnings("ignore:This process")  # of Python 3.12: forks with threads
def test_a_signal_of_a_forked_process_is_not_ours(ends):
    """A worker of a user's data loader is forked, and ended by SIGTERM."""
    with stops.noted(ends.append):
        child = os.fork()
        if not child:
            with suppress(BaseException):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.5)
        assert stops.came() is None
    assert ends == []
