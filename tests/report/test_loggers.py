"""Results in MLflow and Weights & Biases: what is logged is read back in the libraries' forms.

Tests that need mlflow or wandb are left out where these are not installed.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from leakbound import loggers
from leakbound.assess.record import VERDICTS
from leakbound.cli import main
from leakbound.gate.policy import Requirement
from leakbound.report import tables
from leakbound.report.folder import read

GATE = [
    Requirement(key, stated, found, answer, subject, "policy.toml", 3, numbers)
    for key, stated, found, answer, subject, numbers in (
        ("exposed", "at most 0", "0 of 4", "holds", "audit 1", (0, 0)),
        ("epsilon", "at most 6 (server)", "7.5", "broken", "deployment 1", (7.5, 6)),
        ("epsilon", "at most 6 (others)", "2", "holds", "deployment 1", (2.0, 6)),
        ("client", "it can be checked", "\x1b[2J no module", "cannot tell", "../x/.", None),
    )
]
NUMBERS = {
    "leakbound/check/audit_1/exposed/holds": 1,
    "leakbound/check/audit_1/exposed/value": 0,
    "leakbound/check/audit_1/exposed/limit": 0,
    "leakbound/check/deployment_1/epsilon/holds": 0,
    "leakbound/check/deployment_1/epsilon/value": 7.5,
    "leakbound/check/deployment_1/epsilon/limit": 6,
    "leakbound/check/deployment_1/epsilon_2/holds": 1,
    "leakbound/check/deployment_1/epsilon_2/value": 2,
    "leakbound/check/deployment_1/epsilon_2/limit": 6,
}
WORDS = {
    "leakbound/check/answer": "1 broken, 1 cannot be decided, 2 hold",
    "leakbound/check/audit_1/exposed/answer": "holds: at most 0. Found: 0 of 4",
    "leakbound/check/deployment_1/epsilon/answer": "broken: at most 6 (server). Found: 7.5",
    "leakbound/check/deployment_1/epsilon_2/answer": "holds: at most 6 (others). Found: 2",
    "leakbound/check/x/client/answer": "cannot tell: it can be checked. Found: \\x1b[2J no module",
}
pytestmark = pytest.mark.filterwarnings("default")  # the libraries', which are theirs to mend
PAGES = {"check.md", "check.sarif", "check.xml"}


def call(*words):
    with pytest.raises(SystemExit) as end:
        main([*map(str, words)])
    return end.value.code


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A working directory without the user's own settings."""
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "WANDB_")):
            monkeypatch.delenv(name)
    for name in loggers.QUIET.values():
        monkeypatch.setenv(*name.split("="))
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """One for all tests: MLflow takes seconds to make it."""
    return tmp_path_factory.mktemp("mlflow") / "kept.db"


@pytest.fixture
def mlflow(alone, database):
    library = pytest.importorskip("mlflow")
    library.set_tracking_uri(f"sqlite:///{database}")
    library.set_experiment(alone.name)
    yield library
    library.set_tracking_uri(None)


@pytest.fixture
def wandb(alone):
    library = pytest.importorskip("wandb")
    yield library
    library.teardown()  # else the next test writes into this one's folder


def read_mlflow(mlflow, run):
    """Metrics, tags and params under our names; the pages by name."""
    data = mlflow.MlflowClient().get_run(run).data
    folder = Path(mlflow.artifacts.download_artifacts(run_id=run))
    pages = {path.name: path for path in folder.rglob("*") if path.is_file()}
    ours = {key: text for key, text in data.tags.items() if key.startswith("leakbound")}
    return data.metrics, ours, data.params, pages


def read_wandb(folder):
    """The summary and the config of an offline run from its file (a LevelDB log), and its pages."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its other process writes the file to the end
    (path,) = folder.glob("*.wandb")
    content, at, record, found = path.read_bytes(), 7, b"", {"summary": {}, "config": {}}
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            parsed, record = Record.FromString(record), b""
            for name, items in (
                ("config", parsed.config.update),
                ("summary", parsed.summary.update),
                ("summary", parsed.history.item),
            ):
                for one in items:
                    key = one.key or "/".join(one.nested_key)
                    found[name][key] = json.loads(one.value_json)
    pages = {path.name: path for path in (folder / "files" / "leakbound").rglob("*.*")}
    return found["summary"], found["config"], pages


def offline(place):
    (folder,) = (place / "work" / "wandb").glob("offline-run-*")
    return folder


def test_mlflow_takes_the_answers_of_a_gate(mlflow):
    metrics, tags, params, pages = read_mlflow(mlflow, loggers.to_mlflow(GATE))
    assert metrics == NUMBERS
    assert tags == WORDS
    assert params == {}
    assert set(pages) == PAGES
    assert "| **broken** | deployment 1 |" in pages["check.md"].read_text()
    assert mlflow.active_run() is None


def test_the_active_run_of_mlflow_takes_them(mlflow):
    with mlflow.start_run() as run:
        mlflow.log_metric("loss", 0.5)
        for _ in range(2):  # again: the same names, the newest numbers
            assert loggers.to_mlflow(GATE) == run.info.run_id
        assert mlflow.active_run().info.run_id == run.info.run_id
    assert read_mlflow(mlflow, run.info.run_id)[0] == NUMBERS | {"loss": 0.5}


def test_mlflow_takes_more_than_it_takes_at_once(mlflow):
    metrics, tags, *_ = read_mlflow(mlflow, loggers.to_mlflow(400 * GATE[:1]))
    assert (len(metrics), len(tags)) == (1200, 401)


def test_mlflow_takes_a_run(mlflow, alone, make_grid):
    folder = make_grid(alone / "run", seeds=2)
    assert call("report", folder, "--log", "mlflow") == 0
    (run,) = mlflow.search_runs(output_format="list")
    metrics, tags, params, pages = read_mlflow(mlflow, run.info.run_id)
    check_numbers(folder, metrics, tags)
    check_pages(pages)
    assert params["leakbound/demo/plan"] == "0123456789abcdef"
    assert params["leakbound/demo/tested"].startswith("model mlp (hidden=[128])")


def check_numbers(folder, numbers, words):
    run = read(folder)
    rows = tables.configurations(run.assessments, tables.Names(run.assessments, run.trainings))
    verdicts = {key.rpartition("/")[0]: key for key in words if key.endswith("/verdict")}
    assert len(verdicts) == len(rows)  # two hostile names did not become one
    for row, name in zip(rows, verdicts, strict=True):
        assert words[f"{name}/verdict"].startswith(f"{row.verdict}; strongest attack: ")
        assert numbers[f"{name}/verdict_rank"] == VERDICTS.index(row.verdict)
        share = row.reconstructed
        for part in ("value", "low", "high", "n"):
            assert numbers[f"{name}/reconstructed/{part}"] == pytest.approx(getattr(share, part))
        assert {"median", "low", "high", "n"} <= {
            key.rpartition("/")[2] for key in numbers if key.startswith(f"{name}/score/")
        }
    for word in VERDICTS:
        name = word.replace(" (", "_").replace(")", "").replace(" ", "_")
        assert numbers[f"leakbound/demo/verdicts/{name}"] == sum(
            row.verdict == word for row in rows
        )


def check_pages(pages):
    assert set(pages) == {"report.html", "model-card.md"}
    assert b"data:image/png" not in pages["report.html"].read_bytes()
    assert "## Reconstruction risk in training: demo" in pages["model-card.md"].read_text("utf-8")


def test_wandb_takes_a_run_offline(wandb, alone, make_grid):
    folder = make_grid(alone / "run", seeds=2)
    assert call("report", folder, "--log", "wandb") == 0
    summary, config, pages = read_wandb(offline(alone))
    check_numbers(folder, summary, {k: v for k, v in summary.items() if isinstance(v, str)})
    check_pages(pages)
    assert config["leakbound/demo/plan"] == "0123456789abcdef"
    assert wandb.run is None


def test_the_active_run_of_wandb_takes_the_answers(wandb, alone):
    with wandb.init(mode="offline", project="mine") as run:
        run.log({"loss": 0.5})
        assert loggers.to_wandb(GATE) == run.id
        assert wandb.run is run
    summary, _, pages = read_wandb(offline(alone))
    own = {key: value for key, value in summary.items() if not key.startswith("_")}
    assert own == NUMBERS | WORDS | {"loss": 0.5}
    assert set(pages) == PAGES


def test_the_user_says_where_wandb_sends(wandb, alone, monkeypatch):
    seen = []

    def init(**given):
        seen.append(given)
        raise wandb.Error("stop")

    monkeypatch.setattr(wandb, "init", init)
    for mode, variable in ((None, ""), (None, "online"), ("disabled", "online")):
        monkeypatch.setenv("WANDB_MODE", variable)
        with pytest.raises(ValueError, match="wandb did not take the results: stop"):
            loggers.to_wandb(GATE, mode=mode)
    assert [one["mode"] for one in seen] == ["offline", "online", "disabled"]
    assert seen[0]["project"] == "leakbound"


QUIETLY = """
import os, sys
def hook(event, given):  # also at the end, when libraries send what they kept
    if event in ("socket.getaddrinfo", "socket.connect", "socket.sendto"):
        one = given[0 if event == "socket.getaddrinfo" else 1]
        host = str(one[0] if isinstance(one, tuple) else one)
        if "/" not in host and host not in ("127.0.0.1", "localhost"):  # a path is a local socket
            os.write(1, f"{event} {host}\\n".encode())
sys.addaudithook(hook)
from leakbound import loggers
from leakbound.gate.policy import Requirement
assert not {"mlflow", "wandb"} & set(sys.modules)
loggers.LOGGERS[sys.argv[1]]([Requirement("a", "b", "c", "holds", "d", "policy.toml")])
"""


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_nothing_is_sent(name, alone):
    """Neither results nor usage statistics, which both libraries send by themselves."""
    pytest.importorskip(name)
    kept = ("PATH", "PYTHONPATH", "OMP_NUM_THREADS", "VIRTUAL_ENV")  # in CI they send nothing
    plain = {key: os.environ[key] for key in kept if key in os.environ} | {"HOME": str(alone)}
    done = subprocess.run(
        [sys.executable, "-c", QUIETLY, name], env=plain, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_library_is_told_before_anything_runs(name, alone, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    (alone / "policy.toml").write_text("[[audit]]\nfolder = 'no'\nexposed = 0\n")
    for words in (("check", alone / "policy.toml"), ("report", alone / "run")):
        assert call(*words, "--log", name) == 2
        shown = capsys.readouterr()
        assert f"log needs {name}" in shown.err
        assert f"pip install 'leakbound[{name}]'" in shown.err
        assert shown.out == ""
        assert "checking" not in shown.err


def test_what_mlflow_refuses_is_told(mlflow, alone, make_grid):
    folder = make_grid(alone / "run", seeds=2)
    with mlflow.start_run():
        mlflow.log_param("leakbound/demo/plan", "another")
        with pytest.raises(ValueError, match=r"mlflow did not take the results: .*another"):
            loggers.to_mlflow(folder)


@pytest.mark.parametrize(("most", "code"), [(99, 2), (0, 1)])
def test_a_tracker_that_fails_hides_no_fault(alone, monkeypatch, capsys, make_bounded, most, code):
    def refused(found):
        raise ValueError("wandb did not take the results")

    monkeypatch.setattr(loggers, "check_installed", lambda name: None)
    monkeypatch.setitem(loggers.LOGGERS, "wandb", refused)
    folder = make_bounded(alone / "run", seeds=1)
    (alone / "policy.toml").write_text(f"[[audit]]\nfolder = '{folder}'\nexposed = {most}\n")
    assert call("check", alone / "policy.toml", "--log", "wandb") == code
    assert "did not take the results" in capsys.readouterr().err


def test_names_are_those_that_trackers_take():
    taken = set()
    names = [
        loggers._name(taken, "leakbound", part)
        for part in ("a=1", "a:1", "../..", "", "/etc/passwd", "<b>|\n", "x" * 999, "x" * 998)
    ]
    assert names[:2] == ["leakbound/a:1", "leakbound/a:1_2"]
    assert names[2:6] == ["leakbound/_", "leakbound/__2", "leakbound/etc_passwd", "leakbound/b"]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 190


def test_check_logs_what_it_decides(mlflow, alone, capsys):
    (alone / "policy.toml").write_text("[[audit]]\nfolder = 'no'\nexposed = 0\n")
    assert call("check", alone / "policy.toml", "--log", "mlflow") == 2
    (run,) = mlflow.search_runs(output_format="list")
    assert capsys.readouterr().out.endswith(f"logged: mlflow run {run.info.run_id}\n")
    tags = read_mlflow(mlflow, run.info.run_id)[1]
    assert tags["leakbound/check/audit_1/audit/answer"].startswith("cannot tell: it can be")
