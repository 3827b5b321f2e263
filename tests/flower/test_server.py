"""The server's view: what a strategy is shown, captured without changing anything."""

import copy
import logging

import pytest
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import FedAvg, FedAvgM

from leakbound.captured import load, load_all
from leakbound.captured.observe import observe
from leakbound.client import gradient
from leakbound.defenses import GaussianNoise
from leakbound.flower import DefenseMod, InProcessGrid, Watched, run
from leakbound.flower.server import capture_of
from leakbound.task import Task

from ..captured.flat import attack_update


def fedavg(kind=FedAvg, **given):
    return kind(min_train_nodes=2, min_evaluate_nodes=2, min_available_nodes=2, **given)


def final(results):
    return results[0].arrays.to_torch_state_dict()


@pytest.mark.parametrize("kind", [FedAvg, FedAvgM])
def test_watching_changes_nothing(kind, flower, batches, tmp_path):
    plain, watched = [], []
    app = flower.client_app(batches=batches)
    run(flower.server_app(3, strategy=fedavg(kind), into=plain), app, 2)
    strategy = Watched(fedavg(kind), rounds=(1, 3), out=tmp_path)
    run(flower.server_app(3, strategy=strategy, into=watched), app, 2)
    for name, value in final(plain).items():
        # clients answer in the order of a draw, and sums depend on it in the last bits
        assert torch.allclose(final(watched)[name], value, atol=1e-6)
    assert [c.about["round"] for c in strategy.captures] == ["1", "1", "3", "3"]
    assert {c.about["client"] for c in strategy.captures} == {"2", "3"}
    assert len(list(tmp_path.rglob("client-*.safetensors"))) == 4


def test_a_file_of_the_user_stays_and_the_training_goes_on(flower, batches, tmp_path, caplog):
    own = tmp_path / "round-0001" / "client-2.safetensors"
    own.parent.mkdir()
    own.write_text("mine")
    watched, strategy = [], Watched(fedavg(), rounds=(1, 2), out=tmp_path)
    server = flower.server_app(2, strategy=strategy, into=watched)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        run(server, flower.client_app(batches=batches), 2)
    assert own.read_text() == "mine"
    assert len(list(tmp_path.rglob("client-*.safetensors"))) == 4
    assert len(strategy.captures) == 4, "all are kept in memory"
    assert len(watched) == 1
    assert "client-2.safetensors" in caplog.text


def test_what_is_captured_is_what_the_clients_sent(flower, setup, batches, tmp_path):
    seen, called = [], []
    strategy = Watched(
        fedavg(), rounds=(2,), out=tmp_path, on_round=lambda n, found: called.append((n, found))
    )
    app = flower.client_app([DefenseMod(GaussianNoise(0.01), setup)], batches=batches)

    def on_exchange(asked, reply):
        if asked.metadata.message_type == "train":
            seen.append((asked, reply))

    run(flower.server_app(2, strategy=strategy), app, 2, on_exchange=on_exchange)
    assert called == [(2, strategy.captures)]
    for capture, (asked, reply) in zip(strategy.captures, seen[2:], strict=True):
        for named, message in ((capture.before, asked), (capture.update, reply)):
            sent = message.content["arrays"].to_torch_state_dict()
            assert all(torch.equal(named[name], value) for name, value in sent.items())
        assert capture.about["client"] == str(reply.metadata.src_node_id)
        assert capture.about["examples"] == "4"
        assert capture.about["learning_rate"] == "0.5"
        assert capture.kind == "weights"
    for capture in load_all(tmp_path):
        same = next(c for c in strategy.captures if c.about["client"] == capture.about["client"])
        assert capture.digest == same.digest


@pytest.mark.parametrize(
    ("told", "known"), [("AdamW", "adamw"), ("sgd", "sgd"), ("my_own", None), (None, None)]
)
def test_an_optimizer_that_the_server_names_is_kept(told, known, flower, batches):
    app = flower.client_app(batches=batches)
    grid = InProcessGrid(app, 1)
    asked = flower.message(grid, **({} if told is None else {"optimizer": told}))
    capture = capture_of(1, asked, flower.ask(app, asked, grid=grid))
    assert capture.about.get("optimizer") == known


def test_a_captured_update_is_the_clients_gradient(flower, batches):
    strategy = Watched(fedavg())
    run(flower.server_app(1, strategy=strategy), flower.client_app(batches=batches), 2)
    for capture in strategy.captures:
        who = int(capture.about["client"]) - 2
        task = Task.of(flower.Net(), classes=10)
        seen = observe(capture, task, input_shape=(1, 8, 8))
        ours = gradient(task, *batches(who, 1)[0])
        assert torch.allclose(seen.update.rows[0], ours, atol=3e-7)
        assert seen.cohort == (4,)


def test_a_report_of_round_1_takes_four_lines(flower, batches, tmp_path):
    strategy = Watched(fedavg())
    run(flower.server_app(1, strategy=strategy), flower.client_app(batches=batches), 2)
    attack_update(
        strategy.captures[0],
        flower.Net(),
        input_shape=(1, 8, 8),
        attacks=["linear_inversion"],
        out=tmp_path / "leaks",
    )
    assert "linear_inversion" in (tmp_path / "leaks" / "report.html").read_text("utf-8")


def test_error_replies_and_lying_replies_are_left_out(flower, batches, caplog):
    def lies(message, context, call_next):
        reply = call_next(message, context)
        if context.node_config["partition-id"] == 1:
            array = reply.content["arrays"]["last.bias"]
            told = {"dtype": array.dtype, "stype": array.stype, "data": array.data[:-4]}
            reply.content["arrays"]["last.bias"] = Array(**told, shape=array.shape)
        return reply

    class Lenient(FedAvg):
        def aggregate_train(self, server_round, replies):
            return None, None

    strategy = Watched(fedavg(Lenient))
    app = flower.client_app([lies], batches=batches)
    run(flower.server_app(1, strategy=strategy), app, 2)
    assert len(strategy.captures) == 1
    assert "leakbound does not keep the reply" in caplog.text


def test_it_is_the_strategy_elsewhere(flower):
    strategy = Watched(fedavg(weighted_by_key="w"), learning_rate=0.3)
    assert strategy.weighted_by_key == "w"
    assert copy.copy(strategy).rounds == (1,)
    with pytest.raises(AttributeError):
        strategy.no_such_thing  # noqa: B018
    for rounds, words in (((), "rounds is empty"), ((0,), "rounds is 0")):
        with pytest.raises(ValueError, match=words):
            Watched(fedavg(), rounds=rounds)


def test_array_records_are_taken_as_they_are():
    before = {"1.weight": torch.linspace(-1, 1, 8).view(2, 4), "1.bias": torch.ones(2)}
    after = {name: value + 0.25 for name, value in before.items()}
    found = load(ArrayRecord(after), ArrayRecord(before))
    assert found.kind == "weights"
    assert torch.equal(found.update["1.weight"], after["1.weight"])
    lies = ArrayRecord(after)
    array = lies["1.bias"]
    told = {"dtype": array.dtype, "stype": array.stype, "shape": array.shape}
    lies["1.bias"] = Array(**told, data=array.data[:-4])
    with pytest.raises(ValueError, match=r"declares shape \(2,\) of float32, 8 bytes, but holds 4"):
        load(lies, ArrayRecord(before))
