"""An app's folder, run here and captured: its pyproject.toml names what is imported."""

import shutil
import sys

import pytest
import torch

from leakbound.captured.capture import load_all
from leakbound.flower import capture_app

PROJECT = """
[project]
name = "quick"
version = "1.0.0"

[tool.flwr.app]
publisher = "someone"

[tool.flwr.app.components]
serverapp = "quick.server_app:app"
clientapp = "quick.client_app:app"

[tool.flwr.app.config]
num-server-rounds = 4
broken = false
learning = { rate = 0.25 }
"""
SERVER = """
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from quick.task import Net

app = ServerApp()

@app.main()
def main(grid, context):
    try:
        FedAvg().start(
            grid=grid,
            initial_arrays=ArrayRecord(Net().state_dict()),
            num_rounds=int(context.run_config["num-server-rounds"]),
            train_config=ConfigRecord({"lr": context.run_config["learning.rate"]}),
        )
    except Exception as error:
        print("swallowed", error)
"""
TASK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        return self.last(x.flatten(1))
"""
CLIENT = """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from leakbound.data import load
from quick.task import Net

app = ClientApp()
DIGITS = load("digits")

@app.train()
def train(msg, context):
    if context.run_config.get("broken"):
        raise RuntimeError("no data here")
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    at = 4 * context.node_config["partition-id"]
    x, y = DIGITS.inputs[at : at + 4], DIGITS.labels[at : at + 4]
    torch.nn.functional.cross_entropy(net(x), y).backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= msg.content["config"]["lr"] * p.grad
    metrics = MetricRecord({"num-examples": len(y)})
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}
    return Message(RecordDict(content), reply_to=msg)

@app.evaluate()
def evaluate(msg, context):
    metrics = MetricRecord({"num-examples": 4})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
"""


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "app"
    (place / "quick").mkdir(parents=True)
    (place / "pyproject.toml").write_text(PROJECT)
    for name, text in (("task", TASK), ("server_app", SERVER), ("client_app", CLIENT)):
        (place / "quick" / f"{name}.py").write_text(text)
    (place / "quick" / "__init__.py").write_text("")
    return place


def test_wanted_rounds_are_written_and_the_app_stops_after_them(folder, tmp_path):
    said, out = [], tmp_path / "out"
    files = capture_app(folder, out, rounds=(1, 2), clients=3, on_progress=said.append)
    assert len(files) == 6
    assert said[0] == "importing quick.server_app:app (this runs the app's code)"
    assert said[-1].startswith("stopped in round 2")
    captures = load_all(out)
    assert sorted({c.about["round"] for c in captures}) == ["1", "2"]
    assert all(c.about["learning_rate"] == "0.25" for c in captures)
    assert all(c.about["examples"] == "4" for c in captures)
    seen = {"model": "quick.task:Net", "input_shape": "1,8,8"}
    assert all({k: c.about[k] for k in seen} == seen for c in captures), "of the app, not a guess"
    assert torch.equal(captures[0].before["last.weight"], captures[1].before["last.weight"])
    assert not torch.equal(captures[0].before["last.weight"], captures[3].before["last.weight"])
    assert "quick" not in sys.modules
    assert str(folder) not in sys.path


def test_the_run_configuration_can_be_overridden(folder, tmp_path):
    capture_app(folder, tmp_path / "out", run_config={"learning.rate": 0.5})
    assert {c.about["learning_rate"] for c in load_all(tmp_path / "out")} == {"0.5"}


def test_a_key_of_the_run_configuration_that_is_not_there_is_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"'learning\.rat', which .* mean 'learning\.rate'"):
        capture_app(folder, tmp_path / "out", run_config={"learning.rat": 0.5})


def test_rounds_that_never_come_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match="rounds includes 5, but the app ended after round 4"):
        capture_app(folder, tmp_path / "out", rounds=(1, 5))


def test_clients_that_do_not_answer_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"no client answered in round 1: .* no data here"):
        capture_app(folder, tmp_path / "out", run_config={"broken": True})


def test_a_client_that_fails_once_does_not_stop_later_rounds(folder, tmp_path):
    app = folder / "quick" / "client_app.py"
    fails = (
        'context.node_config["partition-id"] == 1 and msg.content["config"]["server-round"] == 1'
    )
    app.write_text(CLIENT.replace('context.run_config.get("broken")', fails))
    files = capture_app(folder, tmp_path / "out", rounds=(1, 3))
    assert [path.parent.name for path in files] == ["round-0001", "round-0003", "round-0003"]


def test_a_namesake_that_is_imported_already_is_not_run_in_its_place(folder, tmp_path, monkeypatch):
    other = tmp_path / "other" / "quick"
    shutil.copytree(folder / "quick", other)
    monkeypatch.syspath_prepend(str(other.parent))
    import quick

    assert quick.__file__ is not None
    try:
        with pytest.raises(ValueError, match="another package with the name 'quick' is"):
            capture_app(folder, tmp_path / "out")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "quick"]:
            del sys.modules[name]
    assert capture_app(folder, tmp_path / "out", clients=2)


def test_what_is_no_app_is_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"pyproject\.toml cannot be read"):
        capture_app(tmp_path, tmp_path / "out")
    project = folder / "pyproject.toml"
    for text, words in (
        ("[tool.flwr.app]\n", "has no \\[tool.flwr.app.components\\]"),
        ("[tool.flwr.app.components]\nclientapp = 'a:b'\n", "has no serverapp"),
        (PROJECT.replace("server_app:app", "server_app:FedAvg"), "a ABCMeta; give a ServerApp"),
        (PROJECT.replace("quick.server", "slow.server"), "no module 'slow'"),
        ("not toml", "is not valid TOML"),
    ):
        project.write_text(text)
        with pytest.raises(ValueError, match=words):
            capture_app(folder, tmp_path / "out")
