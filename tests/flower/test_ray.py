"""The same app on Flower's own simulation engine, in processes of Ray."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from leakbound.captured.capture import load_all
from leakbound.flower import run

TASK = """
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from leakbound.data import load
from leakbound.defenses import NoisyCopy, Withhold, chain
from leakbound.flower import DefenseMod, Setup, Watched, tap


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        return self.last(x.flatten(1))


defense = chain(NoisyCopy(0.1), Withhold(rate=0.5))
client_app = ClientApp(mods=[DefenseMod(defense, Setup(Net), seed=3)])
DIGITS = load("digits")


@client_app.train()
def train(msg, context):
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    at = 4 * context.node_config["partition-id"]
    x, y = DIGITS.inputs[at : at + 4], DIGITS.labels[at : at + 4]
    tap(x, y)
    nn.functional.cross_entropy(net(x), y).backward()
    torch.optim.SGD(net.parameters(), lr=msg.content["config"]["lr"]).step()
    metrics = MetricRecord({"num-examples": len(y)})
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}
    return Message(RecordDict(content), reply_to=msg)


def server_app(out):
    app = ServerApp()

    @app.main()
    def main(grid, context):
        watched = Watched(FedAvg(fraction_evaluate=0.0), rounds=(1, 2), out=out)
        watched.start(
            grid=grid,
            initial_arrays=ArrayRecord(Net().state_dict()),
            num_rounds=2,
            train_config=ConfigRecord({"lr": 0.5}),
        )

    return app
"""
RUN = """
import sys
import the_app
from flwr.simulation import run_simulation

run_simulation(the_app.server_app(sys.argv[1]), the_app.client_app, num_supernodes=2)
"""


def processes_of(place):
    """The ids of all processes whose command line names a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(place) in line:
                found.append(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.linux
def test_the_simulation_engine_gives_the_same_updates_and_leaves_no_process(tmp_path, monkeypatch):
    (tmp_path / "the_app.py").write_text(TASK)
    (tmp_path / "run.py").write_text(RUN)
    ray = Path(tempfile.mkdtemp(prefix="lb-"))  # short: the names of sockets have a limit
    environment = {
        **os.environ,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_HOME": str(tmp_path / "flwr"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(ray),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
    }
    try:
        subprocess.run(
            [sys.executable, "run.py", str(tmp_path / "ray")],
            cwd=tmp_path,
            env=environment,
            check=True,
            timeout=600,
            capture_output=True,
        )
        assert processes_of(ray) == []
    finally:
        for number in processes_of(ray):
            os.kill(number, signal.SIGKILL)
        shutil.rmtree(ray, ignore_errors=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    the_app = importlib.import_module("the_app")
    monkeypatch.delitem(sys.modules, "the_app")
    run(the_app.server_app(tmp_path / "here"), the_app.client_app, 2)
    theirs, ours = (load_all(tmp_path / engine) for engine in ("ray", "here"))
    assert len(theirs) == len(ours) == 4
    for number in (1, 2):
        each = [
            sorted(
                (c.update["last.weight"] for c in captures if c.about["round"] == str(number)),
                key=lambda t: float(t.sum()),
            )
            for captures in (theirs, ours)
        ]
        for a, b in zip(*each, strict=True):
            assert torch.allclose(a, b, atol=1e-6)
