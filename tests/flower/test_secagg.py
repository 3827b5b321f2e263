"""Flower's own SecAgg+: the server sees masked vectors and their sum, nothing of one client."""

import numpy as np
import pytest
import torch
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import bytes_to_ndarray, ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp
from torch import nn

from leakbound.captured.capture import load_all
from leakbound.captured.observe import observe
from leakbound.client import gradient
from leakbound.core import Task
from leakbound.defenses import GaussianNoise, NoisyCopy
from leakbound.flower import DefenseMod, Setup, WatchedSum, protected, run, tap

CLIENTS, RATE = 3, 0.5
STEP = 2 * 16 / 2**22
"""Of SecAgg+'s rounding: weights in [-8, 8], 2^22 levels, after a factor 4 / max_weight."""


def numbers(net):
    return [value.numpy() for value in net.state_dict().values()]


def client_app(flower, batches, mods):
    class Client(NumPyClient):
        def __init__(self, who):
            self.who = who

        def fit(self, parameters, config):
            net = flower.Net()
            pairs = zip(net.state_dict(), parameters, strict=True)
            net.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in pairs})
            inputs, labels = batches(self.who, 1)[0]
            tap(inputs, labels)
            optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
            nn.functional.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
            return numbers(net), len(labels), {}

    return ClientApp(lambda context: Client(context.node_config["partition-id"]).to_client(), mods)


def server_app(flower, strategy):
    app = ServerApp()

    @app.main()
    def main(grid, context):
        legacy = LegacyContext(
            context=context, config=ServerConfig(num_rounds=1), strategy=strategy
        )
        secure = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, max_weight=8.0)
        DefaultWorkflow(fit_workflow=secure)(grid, legacy)

    return app


def fedavg(flower):
    return FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=CLIENTS,
        min_available_clients=CLIENTS,
        initial_parameters=ndarrays_to_parameters(numbers(flower.Net())),
    )


def secure_run(flower, batches, mods, **given):
    """The sum that was captured, and each client's masked vector."""
    masked = {}

    def on_exchange(asked, reply):
        assert not reply.has_error(), reply.error.reason
        assert all(not arrays for arrays in reply.content.array_records.values())
        for config in reply.content.config_records.values():
            if "masked_params" in config:
                parts = [bytes_to_ndarray(part).ravel() for part in config["masked_params"]]
                masked[reply.metadata.src_node_id - 2] = np.concatenate(parts[1:])

    strategy = WatchedSum(fedavg(flower), learning_rate=RATE, **given)
    app = client_app(flower, batches, protected([secaggplus_mod, *mods]))
    run(server_app(flower, strategy), app, CLIENTS, on_exchange=on_exchange)
    (capture,) = strategy.captures
    return capture, masked


def alone(flower, batches, mods, who):
    """One client's weights as the same app would send them without SecAgg+."""
    seen = {}

    def on_exchange(asked, reply):
        if asked.metadata.message_type == "train":
            record = reply.content["fitres.parameters"]
            seen[reply.metadata.src_node_id - 2] = [array.numpy() for array in record.values()]

    app = ServerApp()

    @app.main()
    def main(grid, context):
        legacy = LegacyContext(
            context=context, config=ServerConfig(num_rounds=1), strategy=fedavg(flower)
        )
        DefaultWorkflow()(grid, legacy)

    run(app, client_app(flower, batches, mods), CLIENTS, on_exchange=on_exchange)
    return np.concatenate([part.ravel() for part in seen[who]])


def whole(named):
    return torch.cat([value.reshape(-1) for value in named.values()])


def test_the_server_sees_masked_vectors_and_one_sum(flower, batches, tmp_path):
    capture, masked = secure_run(flower, batches, [], out=tmp_path)
    own = [alone(flower, batches, [], who) for who in range(CLIENTS)]
    average = torch.from_numpy(np.mean(own, axis=0))
    assert float((whole(capture.update) - average).abs().max()) < STEP
    for who in range(CLIENTS):
        spread = masked[who] / 2**32
        assert abs(spread.mean() - 0.5) < 5 * (1 / 12 / len(spread)) ** 0.5
        assert abs(np.corrcoef(spread, own[who])[0, 1]) < 5 / len(spread) ** 0.5
    assert (capture.about["examples"], capture.about["clients"]) == ("12", "3")
    assert load_all(tmp_path)[0].digest == capture.digest


def test_the_sum_is_one_larger_batch_to_an_attack(flower, batches):
    capture, _ = secure_run(flower, batches, [])
    task = Task.of(flower.Net(), classes=10)
    seen = observe(capture, task, input_shape=(1, 8, 8))
    parts = [batches(who, 1)[0] for who in range(CLIENTS)]
    inputs, labels = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    ours = gradient(task, inputs, labels)
    assert seen.cohort == (12,)
    assert float((seen.update.rows[0] - ours).abs().max()) < STEP / RATE
    assert float(ours.abs().max()) > 0.05


@pytest.mark.parametrize("name", ["edited", "anew"])
def test_a_defense_inside_acts_before_the_masks(name, flower, batches):
    defense = {"edited": GaussianNoise(0.05), "anew": NoisyCopy(0.3)}[name]
    mods = [DefenseMod(defense, Setup(flower.Net, learning_rate=RATE), seed=4)]
    capture, _ = secure_run(flower, batches, mods)
    own = [alone(flower, batches, mods, who) for who in range(CLIENTS)]
    bare = [alone(flower, batches, [], who) for who in range(CLIENTS)]
    assert all(np.abs(a - b).max() > 0.01 for a, b in zip(own, bare, strict=True))
    average = torch.from_numpy(np.mean(own, axis=0))
    assert float((whole(capture.update) - average).abs().max()) < STEP


def test_without_secure_aggregation_no_sum_is_kept(flower, batches, caplog):
    strategy = WatchedSum(fedavg(flower))
    app = ServerApp()

    @app.main()
    def main(grid, context):
        legacy = LegacyContext(
            context=context, config=ServerConfig(num_rounds=1), strategy=strategy
        )
        DefaultWorkflow()(grid, legacy)

    run(app, client_app(flower, batches, []), CLIENTS)
    assert strategy.captures == []
    assert "the clients' updates are there" in caplog.text
