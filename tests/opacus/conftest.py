"""Small real trainings: a float64 net, Opacus' own modules and optimizers around it."""

import warnings

import pytest
import torch
from torch import nn

from leakbound.core import Batch, Task
from leakbound.randomness import normal, stream


@pytest.fixture(autouse=True)
def _known_warnings():
    """Opacus' hooks look at outputs whose inputs need no gradient, and PyTorch tells so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        warnings.filterwarnings("ignore", message="Secure RNG turned off")
        yield


def net(dtype=torch.float64):
    """12 -> 7 -> 5 -> 3 with smooth activations."""
    layers = nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)
    model = nn.Sequential(nn.Flatten(), *layers).to(dtype)
    source = stream(0, "weights")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * normal(parameter.shape, source, like=parameter))
    return model


@pytest.fixture
def model():
    return net()


@pytest.fixture
def public():
    draw = torch.rand(10, 1, 3, 4, generator=stream(0, "public"), dtype=torch.float64)
    return Batch(draw, torch.arange(10) % 3)


@pytest.fixture
def batch():
    inputs = torch.rand(6, 1, 3, 4, generator=stream(0, "inputs"), dtype=torch.float64)
    return Batch(inputs, torch.tensor([0, 1, 2, 2, 1, 0]))


@pytest.fixture
def task(model, public):
    return Task.of(model, classes=3, public=public)
