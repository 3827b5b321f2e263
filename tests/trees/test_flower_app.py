"""A real Flower app with XGBoost, as Flower's example has it: captured, then attacked."""

import json
import os

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import leakbound.flower  # noqa: F401  first: flwr's dependencies warn where it is imported by itself

# isort: split

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from sklearn.datasets import load_breast_cancer

from leakbound import captured
from leakbound.cli import main

PROJECT = """
[tool.flwr.app.components]
serverapp = "boost.app:server"
clientapp = "boost.app:client"

[tool.flwr.app.config]
strategy = "bagging"
"""
APP = """
import numpy as np
import xgboost as xgb
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedXgbBagging, FedXgbCyclic
from sklearn.datasets import load_breast_cancer

PARAMS = {"objective": "binary:logistic", "eta": 0.1, "max_depth": 4, "nthread": 1}
LOCAL = 2
server, client = ServerApp(), ClientApp()


@server.main()
def main(grid, context):
    kind = FedXgbCyclic if context.run_config["strategy"] == "cyclic" else FedXgbBagging
    kind(fraction_evaluate=0.0).start(
        grid=grid, initial_arrays=ArrayRecord([np.frombuffer(b"", np.uint8)]), num_rounds=2
    )


@client.train()
def train(message, context):
    data, at = load_breast_cancer(), context.node_config["partition-id"]
    rows = xgb.DMatrix(data.data[at::2], label=data.target[at::2])
    sent = message.content["arrays"]["0"].numpy().tobytes()
    if not sent:
        booster = xgb.train(PARAMS, rows, LOCAL)
    else:
        booster = xgb.Booster(PARAMS)
        booster.load_model(bytearray(sent))
        for _ in range(LOCAL):
            booster.update(rows, booster.num_boosted_rounds())
        if context.run_config["strategy"] == "bagging":
            booster = booster[booster.num_boosted_rounds() - LOCAL : booster.num_boosted_rounds()]
    found = np.frombuffer(booster.save_raw("json"), np.uint8)
    metrics = MetricRecord({"num-examples": rows.num_row()})
    content = {"arrays": ArrayRecord([found]), "metrics": metrics}
    return Message(RecordDict(content), reply_to=message)
"""


def call(*arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code


@pytest.fixture
def app(tmp_path):
    (tmp_path / "app" / "boost").mkdir(parents=True)
    (tmp_path / "app" / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "app" / "boost" / "__init__.py").write_text("")
    (tmp_path / "app" / "boost" / "app.py").write_text(APP)
    return tmp_path


@pytest.mark.parametrize("strategy", ["bagging", "cyclic"])
def test_an_app_is_captured_and_its_clients_are_attacked(app, capsys, strategy):
    out = app / "kept"
    arguments = ("--clients", 2, "--rounds", 1, 2, "--run-config", f"strategy={strategy}")
    assert call("capture", app / "app", "--out", out, *arguments) == 0
    assert "--kind xgboost" in capsys.readouterr().out
    rows = load_breast_cancer().data
    files = sorted(out.glob("round-*/client-*.safetensors"))
    assert len(files) == (4 if strategy == "bagging" else 2)
    for path in files:
        client = int(path.stem.split("-")[1]) - 2
        np.savez(app / "truth.npz", rows=rows[client::2])
        np.savez(app / "public.npz", rows=rows[1 - client :: 2])
        given = ("--truth", app / "truth.npz", "--public", app / "public.npz", "--json")
        assert call("attack", "--update", path, "--kind", "xgboost", *given) == 0
        found = json.loads(capsys.readouterr().out)
        first = path.parent.name == "round-0001"
        # FedXgbBagging (flwr 1.41) adds one tree of each later reply, however many it holds
        sent = 0 if first else {"bagging": 3, "cyclic": 2}[strategy]
        assert (found["trees"], found["trees_before"]) == (2, sent)
        assert found["measured"]["thresholds that are values"]["share"] == 1.0
        assert bool(found["leaves"]) == first
        if first:
            assert sum(leaf["rows"] for leaf in found["leaves"]) == len(rows[client::2])
        entries = {
            name: share["share"]
            for name, share in found["measured"].items()
            if "entries known" in name
        }
        assert len(entries) == (2 if first else 3)


RUN = """
import sys
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedXgbBagging
from flwr.simulation import run_simulation

import numpy as np
from boost.app import client
from leakbound.flower import Watched

server = ServerApp()


@server.main()
def main(grid, context):
    context.run_config["strategy"] = "bagging"
    watched = Watched(FedXgbBagging(fraction_evaluate=0.0), rounds=(1, 2), out=sys.argv[1])
    first = ArrayRecord([np.frombuffer(b"", np.uint8)])
    watched.start(grid=grid, initial_arrays=first, num_rounds=2)


run_simulation(server, client, num_supernodes=2)
"""


@pytest.mark.slow
def test_a_simulation_in_processes_of_ray_is_captured(app, capsys):
    text = APP.replace('context.run_config["strategy"] == "bagging"', "True")
    (app / "app" / "boost" / "app.py").write_text(text)
    (app / "run.py").write_text(RUN)
    ray = Path(tempfile.mkdtemp(prefix="lb-"))  # short: the names of sockets have a limit
    environment = {
        **os.environ,
        "FLWR_HOME": str(app / "flwr"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(ray),
        "PYTHONPATH": os.pathsep.join([str(app / "app"), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
    }
    try:
        subprocess.run(
            [sys.executable, "run.py", app / "kept"],
            cwd=app,
            env=environment,
            check=True,
            timeout=600,
            capture_output=True,
        )
    finally:
        shutil.rmtree(ray, ignore_errors=True)
    for path in sorted((app / "kept").glob("round-*/client-*.safetensors")):
        assert call("attack", "--update", path, "--kind", "xgboost", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["trees"] == 2
        assert (found["trees_before"] == 0) == (path.parent.name == "round-0001")
    assert len(list((app / "kept").glob("round-*/client-*.safetensors"))) == 4


def test_a_capture_of_trees_is_no_capture_of_weights(app, capsys):
    call("capture", app / "app", "--out", app / "kept", "--clients", 2)
    with pytest.raises(ValueError, match="add --kind xgboost"):
        captured.load_all(app / "kept")


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_a_client_that_lies_about_the_length_is_not_kept(shape):
    from leakbound.flower.server import capture_of

    asked = Message(RecordDict({"a": ArrayRecord([np.zeros(0, np.uint8)])}), 2, "train")
    record = ArrayRecord([np.arange(4, dtype=np.uint8)])
    record["0"].shape = shape
    content = RecordDict({"a": record, "m": MetricRecord({"num-examples": 1})})
    reply = Message(content, 1, "train")
    with pytest.raises(ValueError, match="declares uint8 of shape"):
        capture_of(1, asked, reply)
