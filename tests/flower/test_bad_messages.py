"""Every bad message, reply or order becomes an error reply that names the problem."""

from io import BytesIO

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from leakbound.defenses import (
    DpSgd,
    GaussianNoise,
    LaplaceNoise,
    LocalOptimalNoise,
    NoisyCopy,
    OptimalNoise,
    Soteria,
)
from leakbound.flower import DefenseMod, InProcessGrid, Setup
from leakbound.flower.messages import read, write


def header(shape, kind="<f4", order=False):
    stream = BytesIO()
    np.lib.format.write_array_header_1_0(
        stream, {"shape": shape, "fortran_order": order, "descr": kind}
    )
    return stream.getvalue()


def lying(**given):
    """An array of 120 weights, with something in it that is not so."""
    told = {"dtype": "float32", "shape": (10, 12), "stype": "numpy.ndarray"}
    told["data"] = header((10, 12)) + bytes(480)
    return Array(**{**told, **given})


HOSTILE = {
    "huge_shape": (
        lying(data=header((10**6, 10**6)) + bytes(480)),
        "declares shape (1000000, 1000000) of float32, 4000000000000 bytes, but holds 480",
    ),
    "huge_declared": (lying(shape=(10**9, 10**9)), "its own header declares"),
    "both_huge": (
        lying(shape=(10**12,), data=header((10**12,)) + bytes(480)),
        "declares shape (1000000000000,) of float32, 4000000000000 bytes, but holds 480",
    ),
    "too_short": (lying(data=header((10, 12)) + bytes(479)), "but holds 479"),
    "too_long": (lying(data=header((10, 12)) + bytes(4800)), "but holds 4800"),
    "no_header": (lying(data=bytes(480)), "no readable array header"),
    "empty": (lying(data=b""), "no readable array header"),
    "nested_header": (
        lying(data=b"\x93NUMPY\x01\x00" + (9000).to_bytes(2, "little") + b"(" * 9000),
        "no readable array header",
    ),
    "long_header": (
        lying(data=b"\x93NUMPY\x02\x00" + (10**9).to_bytes(4, "little") + b" " * 100),
        "no readable array header",
    ),
    "objects": (
        lying(dtype="object", data=header((10, 12), "|O") + bytes(480)),
        "holds values of type object",
    ),
    "big_endian": (
        lying(dtype=">f4", data=header((10, 12), ">f4") + bytes(480)),
        "has the type >f4",
    ),
    "whole_numbers": (
        lying(dtype="int32", data=header((10, 12), "<i4") + bytes(480)),
        "holds int32 numbers, but the model's are floating-point",
    ),
    "not_finite": (lying(data=header((10, 12)) + b"\xff" * 480), "NaN or infinite"),
    "pickled": (lying(stype="pickle"), "stored as 'pickle'"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_hostile_array_is_named_before_memory_is_taken(name, flower, setup, batches):
    array, words = HOSTILE[name]
    arrays = ArrayRecord(flower.Net().state_dict())
    arrays["last.weight"] = array
    app = flower.client_app([DefenseMod(GaussianNoise(0.1), setup)], batches=batches)
    reply = flower.ask(app, arrays=arrays)
    assert reply.has_error()
    assert words in reply.error.reason
    assert "DefenseMod(GaussianNoise" in reply.error.reason
    assert "last.weight" in reply.error.reason


def test_flowers_own_reader_would_have_believed_the_header():
    with pytest.raises(MemoryError):
        lying(data=header((10**6, 10**6)) + bytes(480)).numpy()


def changed(net, change):
    state = net.state_dict()
    change(state)
    return ArrayRecord(state)


MESSAGES = {
    "missing": (lambda s: s.pop("last.bias"), {}, "weights 'last.bias' are missing"),
    "unknown": (lambda s: s.update(more=torch.ones(1)), {}, "holds an array 'more'"),
    "shape": (lambda s: s.update({"last.bias": torch.ones(9)}), {}, "the model's is (10,)"),
    "rate": (lambda s: None, {"lr": -1.0}, "lr is -1.0"),
    "rate_kind": (lambda s: None, {"lr": "fast"}, "lr is 'fast'"),
    "rate_nan": (lambda s: None, {"lr": float("nan")}, "lr is nan"),
}


@pytest.mark.parametrize("name", list(MESSAGES))
def test_a_bad_message_is_named(name, flower, setup, batches):
    change, config, words = MESSAGES[name]
    app = flower.client_app([DefenseMod(GaussianNoise(0.1), setup)], batches=batches)
    reply = flower.ask(app, arrays=changed(flower.Net(), change), **config)
    assert words in reply.error.reason


def test_a_message_must_have_one_record_and_a_learning_rate(flower, setup, batches):
    app = flower.client_app([DefenseMod(GaussianNoise(0.1), setup)], batches=batches)
    InProcessGrid(app, 1)
    arrays = ArrayRecord(flower.Net().state_dict())
    for content, words in (
        ({"config": ConfigRecord({"lr": 0.1})}, "0 array records (none)"),
        ({"a": arrays, "b": arrays}, "2 array records ('a', 'b')"),
        ({"a": arrays, "config": ConfigRecord({"rate": 0.1})}, "is the key 'lr', but"),
    ):
        reply = flower.ask(app, Message(RecordDict(content), 2, "train"))
        assert words in reply.error.reason


def test_a_server_cannot_slip_in_another_learning_rate(flower, setup, batches):
    app = flower.client_app([DefenseMod(GaussianNoise(0.1), setup)], batches=batches)
    grid = InProcessGrid(app, 1, run_config={"lr": 0.5})
    assert not flower.ask(app, flower.message(grid), grid=grid).has_error()
    reply = flower.ask(app, flower.message(grid, lr=1e-9), grid=grid)
    assert "which has the values (0.5, 1e-09)" in reply.error.reason


def test_a_message_over_the_limit_is_refused(flower, batches):
    mod = DefenseMod(GaussianNoise(0.1), Setup(flower.Net, most_bytes=4000))
    reply = flower.ask(flower.client_app([mod], batches=batches))
    assert "but the limit is 4000" in reply.error.reason


def answering(reply_of, mods):
    app = ClientApp()

    @app.train(mods=mods)
    def train(message, context):
        return Message(RecordDict(reply_of(message)), reply_to=message)

    return app


def halved(message):
    record = message.content["arrays"]
    return {key: array for key, array in record.items() if "bias" not in key}


REPLIES = {
    "none": (lambda m: {"metrics": MetricRecord({"a": 1})}, "0 array records"),
    "two": (lambda m: {"a": m.content["arrays"], "b": ArrayRecord()}, "2 array records"),
    "fewer": (lambda m: {"a": ArrayRecord(halved(m))}, "'first.bias' is not in both"),
    "lies": (
        lambda m: {"a": ArrayRecord({**m.content["arrays"], "last.weight": lying(data=b"")})},
        "no readable array header",
    ),
}


@pytest.mark.parametrize("name", list(REPLIES))
def test_a_bad_reply_of_the_train_function_is_named(name, flower, setup):
    reply_of, words = REPLIES[name]
    reply = flower.ask(answering(reply_of, [DefenseMod(GaussianNoise(0.1), setup)]))
    assert words in reply.error.reason


def test_defenses_that_need_the_batch_say_so(flower, setup, batches):
    for defense in (NoisyCopy(0.1), DpSgd(1.0, 1.0), LocalOptimalNoise(0.1), Soteria()):
        app = flower.client_app([DefenseMod(defense, setup)], batches=batches, shown=False)
        reason = flower.ask(app).error.reason
        assert "leakbound.client_side.tap(inputs, labels)" in reason
        assert repr(defense).split(" → ")[0] in reason


def test_dp_sgd_over_several_steps_names_the_opacus_mod(flower, setup, batches):
    app = flower.client_app([DefenseMod(DpSgd(1.0, 1.0), setup)], batches=batches, steps=2)
    assert "train one step on one batch of all examples, or use leakbound.opacus" in (
        flower.ask(app).error.reason
    )
    app = flower.client_app(
        [DefenseMod(DpSgd(1.0, 1.0), Setup(flower.Net, steps=4))], batches=batches
    )
    assert "took 4" in flower.ask(app).error.reason


def test_public_data_and_counts_that_are_missing_are_named(flower, setup, batches):
    app = flower.client_app([DefenseMod(OptimalNoise(0.1), Setup(flower.Net))], batches=batches)
    assert "no public data" in flower.ask(app).error.reason
    app = answering(
        lambda m: {"arrays": m.content["arrays"]}, [DefenseMod(OptimalNoise(0.1), setup)]
    )
    assert "the number of examples that the client trained on" in flower.ask(app).error.reason


@pytest.mark.parametrize("anew", [True, False])
def test_what_tells_of_the_data_stays_in_the_clients_log(anew, flower, digits, caplog):
    def outside(who, round):
        return [(7 * digits.inputs[:4], digits.labels[:4])]

    defense = NoisyCopy(0.1) if anew else Soteria()
    app = flower.client_app([DefenseMod(defense, Setup(flower.Net))], batches=outside)
    reason = flower.ask(app).error.reason
    assert "the client's log says why" in reason
    assert "7" not in reason.replace(repr(defense), "")
    assert "inputs runs from 0 to 7" in caplog.text


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_noise_that_rounding_would_swallow_is_refused(kind, flower, setup, batches):
    state = {name: v.numpy().astype(kind) for name, v in flower.Net().state_dict().items()}
    arrays = ArrayRecord({name: Array(value) for name, value in state.items()})
    fine = {"float32": 1e-7, "float16": 1e-3}[kind]
    for defense in (GaussianNoise(fine), LaplaceNoise(fine)):
        app = flower.client_app([DefenseMod(defense, setup)], batches=batches)
        assert "is lost in the rounding of weights" in flower.ask(app, arrays=arrays).error.reason
    app = flower.client_app([DefenseMod(GaussianNoise(100 * fine), setup)], batches=batches)
    assert not flower.ask(app, arrays=arrays).has_error()


def test_a_reply_without_a_metric_record_gets_one_with_the_mark(flower, setup):
    app = answering(
        lambda m: {"a": m.content["arrays"]}, [DefenseMod(GaussianNoise(0.1), setup, seed=1)]
    )
    assert flower.ask(app).content["leakbound"]["leakbound-experiment-only"] == 1


def test_errors_of_the_users_own_function_pass_through(flower, setup):
    def broken(message):
        raise KeyError("mine")

    app = answering(broken, [DefenseMod(GaussianNoise(0.1), setup)])
    assert "KeyError: 'mine'" in flower.ask(app).error.reason


def test_a_train_function_may_empty_the_servers_record(flower, setup):
    def emptied(message):
        state = message.content["arrays"].to_torch_state_dict(keep_input=False)
        assert not message.content["arrays"]
        return {"arrays": ArrayRecord(state)}

    app = answering(emptied, [DefenseMod(GaussianNoise(0.1), setup)])
    assert not flower.ask(app).has_error()


def test_orders_types_and_numbered_keys_are_kept():
    like = {"a": torch.zeros(2, 3), "n": torch.zeros((), dtype=torch.int64)}
    values = np.arange(6, dtype=np.float64).reshape(2, 3)
    fortran = BytesIO()
    np.save(fortran, np.asfortranarray(values))
    told = {"dtype": "float64", "shape": (2, 3), "stype": "numpy.ndarray"}
    record = ArrayRecord(
        {"0": Array(**told, data=fortran.getvalue()), "1": Array(np.array(4, np.int64))}
    )
    found = read(record, like, what="it")
    assert torch.equal(found["a"], torch.from_numpy(values).float())
    assert found["a"].dtype == torch.float32
    assert int(found["n"]) == 4
    back = write({"a": 2 * found["a"]}, record, like, "it")
    assert list(back) == ["0", "1"]
    assert back["0"].dtype == "float64"
    assert back["1"].data == record["1"].data
    with pytest.raises(ValueError, match="holds 1 numbered arrays, but the model has 2"):
        read(ArrayRecord({"0": record["0"]}), like, what="it")


def test_tied_weights_are_refused():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(3, 3)
            self.b = torch.nn.Linear(3, 3)
            self.b.weight = self.a.weight

    setup = Setup(Tied, learning_rate=0.1)
    with pytest.raises(ValueError, match="one tensor under two names"):
        setup.task(setup.state(), {})
