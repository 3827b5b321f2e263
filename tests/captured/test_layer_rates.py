"""Learning rates that differ between layers or tensors: what is certified, and what is not."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from leakbound import Batch
from leakbound.data import load

from .flat import attack_update


def net(kind=nn.Tanh, *, biases=True):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), kind(), nn.Linear(16, 10))
    if not biases:
        nn.init.zeros_(model[1].bias)
        nn.init.zeros_(model[3].bias)
    return model


def attacked(model, rates):
    """A step by PyTorch's SGD with these rates of the tensors, attacked at an unknown rate."""
    digits = load("digits", limit=1)
    sent = deepcopy(model)
    groups = zip(model.parameters(), rates, strict=True)
    rule = torch.optim.SGD([{"params": [p], "lr": rate} for p, rate in groups])
    nn.functional.cross_entropy(model(digits.inputs), digits.labels).backward()
    rule.step()
    found = attack_update(
        model.state_dict(),
        sent,
        before=sent.state_dict(),
        kind="weights",
        input_shape=(1, 8, 8),
        examples=1,
        steps=1,
        truth=Batch(digits.inputs, digits.labels),
        attacks=["linear_inversion"],
        pictures=False,
    )
    return found.records[0]


def test_one_rate_a_layer_is_certified():
    record = attacked(net(), (0.1, 0.1, 0.4, 0.4))
    assert record.scores[0] > 100
    assert "exposed" in record.verdict
    assert "differ between tensors, by up to 4 times" in record.certificate
    assert "one learning rate for all weights of a tensor" in record.certificate


@pytest.mark.parametrize("bias", [0.05, 0.097, 0.103, 0.2])
def test_biases_with_a_rate_of_their_own_are_not_certified(bias):
    record = attacked(net(), (0.1, bias, 0.4, 0.4))
    assert record.scores[0] < 40
    assert not record.certificate


def test_one_rate_for_all_needs_no_factors():
    record = attacked(net(), (0.1, 0.1, 0.1, 0.1))
    assert "between tensors" not in record.certificate


def test_without_biases_the_length_is_open():
    record = attacked(net(nn.ReLU, biases=False), (0.1, 0.2, 0.4, 0.4))
    assert not record.certificate
    assert record.layer_input.startswith("the input of the first layer is known up to one factor")
