"""A whole app in this process, and what of Flower's inside it leans on."""

import subprocess
import sys

import pytest
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from leakbound.flower import InProcessGrid, run


def test_an_app_learns(flower, batches):
    results = []
    run(flower.server_app(5, into=results), flower.client_app(batches=batches), 3)
    losses = [m["eval_loss"] for m in results[0].evaluate_metrics_clientapp.values()]
    assert len(losses) == 5
    assert losses[-1] < 0.8 * losses[0]


def test_messages_are_handed_over_as_copies(flower):
    app = ClientApp()

    @app.query()
    def query(message, context):
        del message.content["config"]
        message.content["arrays"].clear()
        return Message(message.content, reply_to=message)

    grid = InProcessGrid(app, 2, run_config={"a": 1})
    asked = flower.message(grid, kind="query")
    (reply,) = grid.send_and_receive([asked])
    assert list(asked.content) == ["arrays", "config"]
    assert len(asked.content["arrays"]) == 4
    assert list(reply.content) == ["arrays"]
    told = [context.node_config for context in grid.contexts.values()]
    assert told[1] == {"partition-id": 1, "num-partitions": 2}
    assert grid.contexts[2].run_config == {"a": 1}


def test_an_exception_becomes_an_error_reply_and_a_line_of_the_log(caplog):
    app = ClientApp()

    @app.query()
    def query(message, context):
        raise RuntimeError("out of luck")

    seen = []
    grid = InProcessGrid(app, 1, on_exchange=lambda asked, reply: seen.append(reply))
    asked = grid.create_message(RecordDict(), "query", 2, "1")
    (number,) = grid.push_messages([asked])
    (reply,) = grid.pull_messages([number, "99"])
    assert not grid.pull_messages([number])
    assert reply.error.reason == "the ClientApp raised RuntimeError: out of luck"
    assert reply.metadata.reply_to_message_id == number
    assert seen == [reply]
    assert "out of luck" in caplog.text


def test_a_grid_needs_a_client():
    with pytest.raises(ValueError, match="clients is 0"):
        InProcessGrid(ClientApp(), 0)


def test_what_flower_keeps_inside_is_as_it_is_taken():
    grid = InProcessGrid(ClientApp(), 1, run_id=7)
    assert (TaskIdentity.run_id, grid.run.run_id) == (7, 7)
    grid.set_run(grid.run)
    grid = InProcessGrid(ClientApp(), 1)
    assert Message(RecordDict(), 2, "query").metadata.run_id == 1


def test_importing_it_imports_neither_ray_nor_opacus():
    code = "import sys, leakbound.flower; print(sorted({'ray', 'opacus'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_app_that_waits_for_more_clients_is_not_run_forever(flower, batches):
    strategy = FedAvg(min_available_nodes=5)
    with pytest.raises(ValueError, match="clients is 2, and the app waits for more"):
        run(flower.server_app(1, strategy=strategy), flower.client_app(batches=batches), 2)
