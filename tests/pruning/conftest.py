"""A small net with every kind of tensor, and data for it."""

import pytest
import torch
from torch import nn

from leakbound.core import Batch, Task
from leakbound.randomness import normal, stream, uniform


class _Small(nn.Module):
    """Conv 2->4 (3x3), batch norm, pool, conv 4->5, layer norm of 3 dimensions, linear 45->6->3."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.b, self.scale = nn.Conv2d(4, 5, 3, padding=1), nn.LayerNorm([5, 3, 3])
        self.c, self.d = nn.Linear(5 * 9, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.a(x))), 2)
        x = self.scale(torch.relu(self.b(x))).flatten(1)
        return self.d(torch.relu(self.c(x)))


def fill(task, seed=0):
    """The task at weights that depend on nothing but the seed."""
    drawn = normal(task.parameters.shape, stream(seed, "weights"), like=task.parameters)
    return task.with_parameters(0.3 * drawn)


@pytest.fixture
def small():
    return fill(Task.of(_Small().eval(), classes=3))


@pytest.fixture
def batch():
    inputs = uniform((4, 2, 6, 6), stream(1, "images"))
    return Batch(inputs, torch.tensor([0, 1, 2, 1]))
