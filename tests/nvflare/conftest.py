"""A real NVFlare job: FedAvg over clients that take one step on digits, in its simulator."""

import json
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(64, 12), nn.Linear(12, 10)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.flatten(1))))
"""
TRAIN = """
import nvflare.client as flare
import torch
from net import Net
from sklearn.datasets import load_digits
from leakbound.nvflare import tap

flare.init()
site = int(flare.get_site_name().split("-")[1])
bunch = load_digits()
inputs = torch.tensor(bunch.images[site : site + 1], dtype=torch.float32)[:, None] / 16
labels = torch.tensor(bunch.target[site : site + 1])
while flare.is_running():
    model = flare.receive()
    net = Net()
    net.load_state_dict(model.params)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    tap(inputs, labels)
    torch.nn.functional.cross_entropy(net(inputs), labels).backward()
    optimizer.step()
    flare.send(flare.FLModel(params=net.cpu().state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": 1}))
"""


def client(filters=(), tasks=("train",), transfer="FULL"):
    chain = [{"tasks": list(tasks), "filters": list(filters)}] if filters else []
    return {
        "format_version": 2,
        "executors": [
            {
                "tasks": ["train"],
                "executor": {
                    "path": "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor",
                    "args": {
                        "execution_mode": "in_process",
                        "task_script_path": "train.py",
                        "params_exchange_format": "pytorch",
                        "params_transfer_type": transfer,
                    },
                },
            }
        ],
        "task_result_filters": chain,
        "task_data_filters": [],
        "components": [],
    }


def server(rounds=2, clients=1):
    return {
        "format_version": 2,
        "workflows": [
            {
                "id": "fedavg",
                "path": "nvflare.app_common.workflows.fedavg.FedAvg",
                "args": {"num_clients": clients, "num_rounds": rounds},
            }
        ],
        "components": [
            {
                "id": "persistor",
                "path": "nvflare.app_opt.pt.file_model_persistor.PTFileModelPersistor",
                "args": {"model": {"path": "net.Net", "args": {}}},
            }
        ],
    }


@pytest.fixture
def job(tmp_path):
    """Writes a job folder: `job(filters, ...)` returns its path."""

    def made(filters=(), *, tasks=("train",), transfer="FULL", rounds=2, clients=1, before=()):
        place = tmp_path / "job"
        app = place / "app"
        (app / "config").mkdir(parents=True, exist_ok=True)
        (app / "custom").mkdir(exist_ok=True)
        meta = {"name": "digits", "deploy_map": {"app": ["@ALL"]}, "min_clients": clients}
        (place / "meta.json").write_text(json.dumps(meta))
        own = client(filters, tasks, transfer)
        if before:
            own["task_data_filters"] = [{"tasks": ["train"], "filters": list(before)}]
        (app / "config" / "config_fed_client.json").write_text(json.dumps(own))
        (app / "config" / "config_fed_server.json").write_text(json.dumps(server(rounds, clients)))
        (app / "custom" / "net.py").write_text(NET)
        (app / "custom" / "train.py").write_text(TRAIN)
        return Path(place)

    return made
