"""The hospital app: in one process, with the server's view; and by Flower's own simulation."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

ROOT = Path(__file__).parent.parent.parent
APP = ROOT / "examples" / "flower-hospital"


@pytest.fixture
def hospital(imported):
    """The app's package."""
    return imported(APP, "hospital")


@pytest.fixture
def small(hospital, monkeypatch):
    """The same app, its hospitals cut down to a few images; the first alone stays the smallest.

    Flower samples clients in any order, so with two smallest the server may attack the second.
    """
    whole = hospital.task.hospitals

    def cut(count):
        first, *others = whole(count)
        kept = [(first, hospital.task.SMALL), *((other, 8) for other in others)]
        return [type(b)(b.inputs[:n], b.labels[:n]) for b, n in kept]

    for module in (hospital.task, hospital.client_app):
        monkeypatch.setattr(module, "hospitals", cut)
    return hospital


def federation(hospital, out, *, defended, steps):
    """One round; returns what the server's report holds, and the truth."""
    from leakbound.flower import run

    torch.manual_seed(0)
    found = []
    out.mkdir()
    run(
        hospital.server_app.server_app(
            out, defended=defended, attack_steps=steps, on_report=found.append
        ),
        hospital.client_app.client_app(defended=defended, path=str(out / "readings.jsonl")),
        2,
        run_config={"num-server-rounds": 1, "learning-rate": 0.1},
    )
    return found[0], hospital.client_app.hospitals(2)[0]


def test_hospitals_differ_and_share_no_image(hospital):
    held = hospital.task.hospitals(5)
    sizes = [batch.size for batch in held]
    assert sizes[0] == hospital.task.SMALL
    assert len(set(sizes)) > 3
    mixes = [b.labels.bincount(minlength=10) / b.size for b in held[1:]]
    assert float((mixes[0] - mixes[1]).abs().max()) > 0.1
    public, _, test = hospital.task.images()
    everyone = [public, test, *held]
    seen = [image.numpy().tobytes() for batch in everyone for image in batch.inputs]
    assert len(seen) == len(set(seen))


def test_the_noise_meets_the_stated_risk(hospital):
    found = hospital.task.calibration()
    assert str(found.target) == "PSNR >= 30 dB with probability <= 0.001"
    assert found.setting.steps == hospital.task.ROUNDS
    assert 0 < float(found.corridor.bound[0]) <= 0.001
    assert found.verdict == "protected under a model"


def test_the_server_sees_and_the_meter_reads(small, tmp_path, capsys):
    outcome, truth = federation(small, tmp_path / "run", defended=True, steps=2)
    assert outcome.answers[0].inputs.shape == truth.inputs.shape
    assert (tmp_path / "run" / "report" / "report.html").is_file()
    readings = (tmp_path / "run" / "readings.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["action"] for line in readings] == ["send", "send"]
    assert "accuracy after 1 rounds" in capsys.readouterr().out


@pytest.mark.slow
def test_the_defense_hides_what_the_server_rebuilt(small, tmp_path, capsys):
    import leakbound as lb

    best = {}
    for name, defended in (("plain", False), ("defended", True)):
        outcome, truth = federation(small, tmp_path / name, defended=defended, steps=150)
        psnr = lb.evaluate(lb.pair(truth, outcome.answers[0]), data_range=1.0)["psnr"]
        best[name] = max(psnr)
        assert (tmp_path / name / "report" / "report.html").is_file()
        readings = (tmp_path / name / "readings.jsonl").read_text("utf-8").splitlines()
        assert [json.loads(line)["action"] for line in readings] == ["send", "send"]
    assert best["plain"] > 20
    assert best["defended"] < 15
    assert "accuracy after 1 rounds" in capsys.readouterr().out


def test_the_readme_names_what_is_there():
    text = (APP / "README.md").read_text("utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert "://" in target or (APP / target).exists(), target
    assert "MEASURED" not in text


@pytest.mark.slow
def test_it_runs_in_one_process(tmp_path):
    command = [sys.executable, "run_in_process.py", "--rounds", "2", "--attack-steps", "20"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "seen")],
        cwd=APP,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("accuracy after 2 rounds") == 2


def _started(home):
    """The process ids of Flower's daemons whose environment names our folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if f"FLWR_HOME={home}\0".encode() in environment:
            found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


@pytest.mark.slow
@pytest.mark.linux
def test_flwr_run(tmp_path):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Flower's simulation needs ray")
    home, copy = tmp_path / "flower", tmp_path / "app"
    home.mkdir()
    shutil.copytree(APP, copy, ignore=shutil.ignore_patterns("__pycache__", "seen"))
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    settings = "num-server-rounds=1"
    try:
        done = subprocess.run(
            ["flwr", "run", ".", "--stream", "--run-config", settings],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert "accuracy after 1 rounds" in done.stdout
    finally:
        for pid in _started(home):
            os.kill(pid, signal.SIGTERM)
