"""A server that chooses weights must not read a client's pixel off errors, or off half a norm."""

import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from leakbound.core import Batch, Unit, Update
from leakbound.defenses import ClipExamples, DpSgd, WhitenedDpSgd
from leakbound.flower import DefenseMod, InProcessGrid, Setup, tap
from leakbound.randomness import stream

SIZE, HUGE = 4, 1e14


def net():
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(16, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE), nn.ReLU()),
        nn.Linear(SIZE, 2),
    )


def hostile(threshold):
    """Weights for which the first pixel overflows the loss where it is above the threshold."""
    weights = {name: torch.zeros_like(value).double() for name, value in net().state_dict().items()}
    weights["1.weight"][0, 0], weights["1.bias"][0] = HUGE, -HUGE * threshold
    weights["3.weight"][0, 0] = HUGE
    weights["5.weight"][0, 0], weights["5.weight"][1, 0] = HUGE, -HUGE
    return ArrayRecord({name: Array(value.numpy()) for name, value in weights.items()})


def answer(defense, public, pixel, sent):
    inputs = torch.rand(SIZE, 1, 4, 4, generator=stream(0, "private")) / 2
    inputs[1, 0, 0, 0] = pixel
    labels = torch.arange(SIZE) % 2
    app = ClientApp()

    @app.train(mods=[DefenseMod(defense, Setup(net, learning_rate=0.1, public=public))])
    def train(message, context):
        tap(inputs, labels)
        metrics = MetricRecord({"num-examples": SIZE})
        content = {"arrays": message.content["arrays"], "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    (reply,) = InProcessGrid(app, 1).send_and_receive(
        [Message(RecordDict({"arrays": sent}), 2, "train")]
    )
    return reply


@pytest.fixture
def public():
    return Batch(torch.rand(32, 1, 4, 4, generator=stream(0, "public")), torch.arange(32) % 2)


@pytest.mark.parametrize("name", ["dp_sgd", "whitened_dp_sgd"])
def test_no_error_says_whether_a_pixel_overflows(name, public):
    defense = (DpSgd if name == "dp_sgd" else WhitenedDpSgd)(1.0, 100.0)
    for pixel in (0.1, 0.9):
        assert not answer(defense, public, pixel, hostile(0.5)).has_error()


def test_an_example_that_is_not_finite_adds_nothing():
    rows = torch.tensor([[float("nan"), 1.0], [float("inf"), 0.0], [3.0, 4.0]])
    sent, _ = ClipExamples(1.0).transform(
        Update(rows, Unit.EXAMPLE, (1, 1, 1)), None, None, stream(0)
    )
    assert torch.allclose(sent.rows, torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.6, 0.8]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat"])
def test_norms_of_sixteen_bits_are_refused(dtype):
    rows = torch.full((1, 10**5), 1e-4, dtype=dtype)  # their squares are zero in half
    with pytest.raises(ValueError, match="train in float32"):
        ClipExamples(0.01).transform(Update(rows, Unit.EXAMPLE, (1,)), None, None, stream(0))
