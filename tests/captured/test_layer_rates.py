"""Learning rates that differ between layers or tensors: what is certified, and what is not."""

import importlib.util
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import leakbound
from leakbound import Batch
from leakbound.data import load

from .flat import attack_update

FOLDER = Path(leakbound.__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def traces():
    """The benchmark with plain LARS and LAMB."""
    spec = importlib.util.spec_from_file_location("traces", FOLDER / "optimizer_traces.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["traces"] = module
    spec.loader.exec_module(module)
    return module


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
    return stepped(model, sent, rule, digits).records[0]


def trained(model, make, optimizer, **more):
    """As `of_steps`, the record alone."""
    return of_steps(model, make, optimizer, **more).records[0]


def of_steps(model, make, optimizer, *, at=0, count=1, **more):
    """Steps by an optimizer on some digits, and what is made of them; it is stated."""
    digits = load("digits", limit=400)
    part = slice(at, at + count)
    sent = deepcopy(model)
    batch = Batch(digits.inputs[part], digits.labels[part])
    return stepped(model, sent, make(model.parameters()), batch, optimizer=optimizer, **more)


def stepped(model, sent, rule, digits, *, steps=1, **more):
    for _ in range(steps):
        rule.zero_grad()
        nn.functional.cross_entropy(model(digits.inputs), digits.labels).backward()
        rule.step()
    return attack_update(
        model.state_dict(),
        sent,
        before=sent.state_dict(),
        kind="weights",
        input_shape=(1, 8, 8),
        examples=1,
        steps=steps,
        truth=Batch(digits.inputs[:1], digits.labels[:1]),
        attacks=["linear_inversion"],
        pictures=False,
        **more,
    )


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


@pytest.mark.parametrize("kind", [nn.Tanh, nn.ReLU, nn.GELU])
def test_a_step_of_lars_is_certified_at_the_length_that_the_update_shows(kind, traces):
    make = partial(traces.Lars, lr=1.0, decay=0.0)
    record = trained(net(kind), make, "lars")
    assert record.scores[0] > 95
    assert "differ between tensors" in record.certificate
    unstated = trained(net(kind), make, None)
    assert unstated.scores[0] < 20
    assert not unstated.certificate


def test_the_decay_of_lars_is_subtracted_if_it_shows(traces):
    for decay, certified in ((1e-2, True), (1e-4, False)):
        record = trained(net(), partial(traces.Lars, lr=1.0, decay=decay), "lars,momentum=0.9")
        assert bool(record.certificate) is certified
        assert record.scores[0] > 80


def test_lars_without_activations_is_known_up_to_one_factor(traces):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    record = trained(model, partial(traces.Lars, lr=1.0, decay=0.0), "lars")
    assert not record.certificate


def test_several_steps_of_lars_are_not_certified(traces):
    record = trained(net(), partial(traces.Lars, lr=1.0, decay=0.0), "lars", steps=3)
    assert not record.certificate


@pytest.mark.parametrize("kind", [nn.Tanh, nn.ReLU])
def test_a_step_of_lamb_shows_sizes_but_certifies_nothing(kind, traces):
    record = trained(net(kind), partial(traces.Lamb, lr=1e-2), "lamb")
    assert record.scores[0] > 17
    assert not record.certificate
    assert not record.layer_input


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_the_statement_leaves_no_rate(name, traces):
    make = traces.Lars if name == "lars" else traces.Lamb
    given = {"learning_rate": 1.0, "weight_decay": 0.01}
    found = of_steps(net(), partial(make, lr=1.0), name, **given)
    facts = {one.name: one.value for one in found.inferred[0].findings}
    assert facts["optimizer"] == name
    assert facts["learning rate"] == "another one in each tensor"
    assert not found.inferred[0].rate_known
    assert "malicious server" not in found.records[0].verdict


@pytest.mark.parametrize("kind", [nn.Tanh, nn.ReLU])
def test_mixtures_are_not_certified_as_one_step_of_lars(kind, traces):
    """Two to five digits that are stated as one, under LARS and under rates at random."""
    for seed in range(12):
        model = net(kind)
        draw = torch.Generator().manual_seed(seed)
        rates = (10 ** (2 * torch.rand(4, generator=draw) - 1)).tolist()

        def own(weights, rates=rates):
            groups = zip(weights, rates, strict=True)
            return torch.optim.SGD([{"params": [p], "lr": rate} for p, rate in groups])

        for make in (own, partial(traces.Lars, lr=1.0, decay=0.0)):
            record = trained(deepcopy(model), make, "lars", at=5 * seed, count=2 + seed % 4)
            assert not record.certificate
