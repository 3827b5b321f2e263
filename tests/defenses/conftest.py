"""A small float64 net with smooth activations: no gradient is zero by accident."""

import pytest
import torch
from torch import nn

from leakbound.core import Batch, Task
from leakbound.randomness import normal, stream


def _fill(model):
    source = stream(0, "weights")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * normal(parameter.shape, source, like=parameter))
    return model


@pytest.fixture
def mlp():
    """12 -> 7 -> 5 -> 3."""
    layers = nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)
    return _fill(nn.Sequential(nn.Flatten(), *layers).double())


@pytest.fixture
def convnet():
    """Two convolutions (6 and 4 channels) and a linear layer on (1, 3, 4)."""
    first, second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
    layers = first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)
    return _fill(nn.Sequential(*layers).double())


@pytest.fixture
def task(mlp):
    return Task.of(mlp, classes=3)


@pytest.fixture
def batch():
    inputs = torch.rand(6, 1, 3, 4, generator=stream(0, "inputs"), dtype=torch.float64)
    return Batch(inputs, torch.tensor([0, 1, 2, 2, 1, 0]))
