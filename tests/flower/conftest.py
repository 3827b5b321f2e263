"""A real Flower app on the digits: FedAvg, a train function of plain torch, one tap."""

import logging
import os

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from types import SimpleNamespace

import leakbound.flower  # noqa: F401  first: flwr's dependencies warn where it is imported by itself

# isort: split

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from leakbound.core import Batch
from leakbound.data import load
from leakbound.flower import InProcessGrid, Setup, tap
from leakbound.randomness import stream

RATE, SIZE = 0.5, 4


@pytest.fixture(autouse=True)
def _flower_logs(caplog, monkeypatch):
    """Flower's log is read by tests; what ran before in the process may have turned it off."""
    logger = logging.getLogger("flwr")
    monkeypatch.setattr(logger, "disabled", False)
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger="flwr")


class Net(nn.Module):
    """A perceptron whose first weights are drawn from a named stream."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 12), nn.Linear(12, 10)
        with torch.no_grad():
            for i, weights in enumerate(self.parameters()):
                weights.copy_(0.3 * torch.randn(weights.shape, generator=stream(i, "net")))

    def forward(self, inputs):
        return self.last(torch.tanh(self.first(inputs.flatten(1))))


def client_app(mods=(), *, batches, steps=1, shown=True, level="train", model=Net):
    """A ClientApp as Flower's quickstart has it; `batches(partition, round)` are its steps'."""
    on_app = list(mods) if level == "app" else None
    app = ClientApp(mods=on_app)

    @app.train(mods=list(mods) if level == "train" else None)
    def train(message, context):
        net = model()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        config, who = message.content["config"], context.node_config["partition-id"]
        optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
        total = 0
        for inputs, labels in batches(who, config["server-round"])[:steps]:
            if shown:
                tap(inputs, labels)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs), labels)
            loss.backward()
            optimizer.step()
            total += len(labels)
        metrics = MetricRecord({"train_loss": float(loss.detach()), "num-examples": total})
        content = {"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        net = model()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        inputs, labels = batches(context.node_config["partition-id"], 0)[0]
        loss = float(nn.functional.cross_entropy(net(inputs), labels).detach())
        metrics = MetricRecord({"eval_loss": loss, "num-examples": len(labels)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def server_app(rounds=1, *, strategy=None, model=Net, into=None):
    """A ServerApp of FedAvg over all clients; `into` is given the result."""
    app = ServerApp()

    @app.main()
    def main(grid, context):
        count = len(list(grid.get_node_ids()))
        least = {"min_train_nodes": count, "min_evaluate_nodes": count}
        rule = strategy or FedAvg(min_available_nodes=count, **least)
        result = rule.start(
            grid=grid,
            initial_arrays=ArrayRecord(model().state_dict()),
            num_rounds=rounds,
            train_config=ConfigRecord({"lr": RATE}),
        )
        if into is not None:
            into.append(result)

    return app


def message(grid, *, round=1, arrays=None, kind="train", node=2, model=Net, **config):
    """One of the server's messages."""
    arrays = ArrayRecord(model().state_dict()) if arrays is None else arrays
    told = ConfigRecord({"lr": RATE, "server-round": round, **config})
    return Message(RecordDict({"arrays": arrays, "config": told}), node, kind)


def ask(app, asked=None, *, clients=1, grid=None, **given):
    """The reply of the first client to one message."""
    grid = grid or InProcessGrid(app, clients)
    asked = asked or message(grid, **given)
    (reply,) = grid.send_and_receive([asked])
    return reply


def weights(record):
    """A record's arrays as one vector."""
    return torch.cat([v.reshape(-1) for v in record.to_torch_state_dict().values()])


@pytest.fixture(scope="session")
def digits():
    """The images (1, 8, 8) and labels of scikit-learn's digits."""
    return load("digits")


@pytest.fixture
def batches(digits):
    """Each client's batches: other images for each client, the same ones in every round."""

    def of(who, round):
        start = 40 * int(who)
        return [
            (digits.inputs[a : a + SIZE], digits.labels[a : a + SIZE])
            for a in range(start, start + 40, SIZE)
        ]

    return of


@pytest.fixture
def setup(digits):
    """What a mod is told of this app."""
    public = Batch(digits.inputs[1000:1200], digits.labels[1000:1200])
    return Setup(Net, classes=10, public=public)


@pytest.fixture
def flower():
    """The tools above, by name."""
    return SimpleNamespace(
        Net=Net,
        RATE=RATE,
        SIZE=SIZE,
        client_app=client_app,
        server_app=server_app,
        message=message,
        ask=ask,
        weights=weights,
    )
