"""Models that draw numbers or change their state when they are called are refused everywhere."""

import random
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

import leakbound as lb
from leakbound import client
from leakbound.core import Task

from .captured.flat import attack_update

SHAPE = (1, 6, 6)


class Odd(nn.Module):
    """A small network whose first layer's output goes through `change`."""

    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(36, 12), nn.Linear(12, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.count, self.change = 0, change

    def forward(self, x):
        return self.last(self.change(self, self.first(x.flatten(1)).relu()))


def in_place(own, x):
    own.calls += 1
    return x * own.calls


def assigned(own, x):
    own.calls = own.calls + 1
    return x / own.calls


def counted(own, x):
    own.count += 1
    return x * own.count


def harmless(own, x):
    own.calls += 1
    own.count += 1
    return x


def quiet(own, x):
    return functional.dropout(x, training=own.training)


DRAWS = {
    "dropout": lambda own, x: functional.dropout(x),
    "rare dropout": lambda own, x: functional.dropout(x, p=1e-6),
    "torch": lambda own, x: x + torch.randn(x.shape),
    "numpy": lambda own, x: x + float(np.random.rand()),  # noqa: NPY002
    "python": lambda own, x: x + random.random(),
}
STATES = {"in place": in_place, "assigned": assigned, "in Python": counted}


def odd(name):
    return Odd((DRAWS | STATES)[name]).eval()


def normalized(norm):
    torch.manual_seed(0)
    own = nn.Sequential(nn.Flatten(), norm(nn.Linear(36, 12)), nn.ReLU(), nn.Linear(12, 4))
    with torch.no_grad():  # a step of training, so that the iteration has not converged
        for weight in own.parameters():
            weight.add_(0.1 * torch.randn(weight.shape))
    return own


def batch():
    return torch.linspace(0, 1, 36).reshape(1, *SHAPE), torch.tensor([2])


@pytest.mark.parametrize("name", [*DRAWS, *STATES])
def test_a_simulation_refuses_a_model_that_does_not_repeat_itself(name):
    words = "draws random numbers" if name in DRAWS else "changes its own state"
    with pytest.raises(ValueError, match=words):
        lb.simulate(odd(name), batch(), attack="linear_inversion")


@pytest.mark.parametrize("norm", [spectral_norm, old_spectral_norm])
def test_spectral_norm_in_training_mode_is_refused_and_in_evaluation_mode_taken(norm):
    with pytest.raises(ValueError, match=r"changes its own state .*differs from the first by"):
        client.refuse_changing(Task.of(normalized(norm)), batch()[0])
    client.refuse_changing(Task.of(normalized(norm).eval()), batch()[0])


@pytest.mark.parametrize("change", [harmless, quiet])
def test_a_counter_that_changes_nothing_and_a_quiet_dropout_are_taken(change):
    model = Odd(change).eval()
    assert lb.simulate(model, batch(), attack="linear_inversion").scores[0] > 60
    assert model.count == 0
    assert float(model.calls) == 0


def test_the_check_leaves_the_generators_alone():
    before = torch.get_rng_state()
    client.refuse_changing(Task.of(Odd(quiet).eval()), batch()[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["dropout", "in place"])
def test_an_attack_on_a_captured_update_refuses_it(name):
    own = odd(name)
    update = {k: torch.ones_like(v) for k, v in own.named_parameters()}
    words = "draws random numbers" if name in DRAWS else "changes its own state"
    with pytest.raises(ValueError, match=words):
        attack_update(update, own, kind="gradient", input_shape=SHAPE, examples=1)


CODE = """
from torch import nn
from torch.nn import functional

class Net(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def forward(self, x):
        return self.layer(functional.dropout(x.flatten(1)))
"""


def test_an_audit_refuses_it_before_it_starts(tmp_path, monkeypatch):
    from leakbound.audit import context, parse

    (tmp_path / "drawing_model.py").write_text(CODE)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    plan = parse(
        {
            "data": {"source": "digits"},
            "models": [{"name": "drawing_model:Net"}],
            "attacks": [{"name": "dlg"}],
        }
    )
    with pytest.raises(ValueError, match=r"drawing_model:Net'.*draws random numbers"):
        context.check_plan(plan, context.PlanContext(plan.data))
    sys.modules.pop("drawing_model")
