"""Kinks are found by what runs, not by the names of modules."""

import pytest
import torch
from torch import nn

from leakbound import models
from leakbound.bounds.kinks import kinks
from leakbound.random import stream
from leakbound.types import Task

IMAGE, LABEL = torch.zeros(1, 1, 28, 28), torch.tensor([0])


class Functional(nn.Module):
    """Calls its nonlinearity without a module."""

    def __init__(self, of):
        super().__init__()
        self.of, self.linear = of, nn.Linear(784, 10)

    def forward(self, x):
        return self.of(self.linear(x.flatten(1)))


@pytest.mark.parametrize(
    ("of", "found"),
    [
        (torch.relu, ("relu",)),
        (nn.functional.leaky_relu, ("leaky_relu",)),
        (torch.abs, ("abs",)),
        (lambda x: x.clamp(min=0), ("clamp",)),
        (lambda x: torch.where(x > 0, x, 0 * x), ("gt", "where")),
        (lambda x: torch.maximum(x, 0 * x), ("maximum",)),
        (torch.tanh, ()),
        (torch.sigmoid, ()),
        (nn.functional.gelu, ()),
        (nn.functional.softplus, ()),
        (nn.functional.elu, ()),
        (torch.sin, ()),
    ],
)
def test_functions(of, found):
    assert kinks(Task.of(Functional(of)), IMAGE, LABEL) == found


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("lenet", ()),
        ("mlp", ("relu",)),
        ("simple_convnet", ("leaky_relu", "max_pool2d_with_indices")),
    ],
)
def test_built_in_models(name, found):
    build = getattr(models, name)
    model = build(input_shape=(1, 28, 28), classes=10, generator=stream(0, "model"))
    assert kinks(Task.of(model), IMAGE, LABEL) == found


def test_the_loss_counts_too():
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 1))
    task = Task.of(model, loss=lambda out, _: (out - 1).abs().mean())
    assert kinks(task, IMAGE, LABEL) == ("abs",)
