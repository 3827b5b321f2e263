"""Models of which a part is frozen, by name."""

import math

import pytest
import torch
from torch import nn

from leakbound.core import Batch, Task
from leakbound.randomness import normal, stream

SHAPE, CLASSES = (1, 6, 6), 3


class LowRank(nn.Module):
    """y = W x + c + B A x, where W and c are frozen: a LoRA adapter written by hand."""

    def __init__(self, layer, rank):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.zeros(rank, layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T


def backbone():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4).eval(), nn.SiLU(), nn.Flatten(),
        nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, CLASSES),
    )  # fmt: skip
    net[:7].requires_grad_(False)
    return net


def lora():
    wide = LowRank(nn.Linear(36, 16), 2)
    return nn.Sequential(nn.Flatten(), wide, nn.Tanh(), LowRank(nn.Linear(16, CLASSES), 2))


def mlp(*frozen):
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(36, 16), nn.Sigmoid(), nn.Linear(16, 10), nn.GELU(),
        nn.Linear(10, CLASSES),
    )  # fmt: skip
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)
    return net


def conv_middle():
    """A trained layer before and after a frozen one, and norms of which a part is frozen."""
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4),
        nn.GELU(), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, CLASSES),
    ).eval()  # fmt: skip
    for name in ("1.weight", "3.weight", "3.bias", "4.weight", "4.bias", "7.bias"):
        net.get_parameter(name).requires_grad_(False)
    return net


MODELS = {
    "frozen backbone": backbone,
    "LoRA": lora,
    "frozen first layer": lambda: mlp("1.weight", "1.bias"),
    "frozen middle layer": lambda: mlp("3.weight", "3.bias"),
    "frozen last layer": lambda: mlp("5.weight", "5.bias"),
    "frozen bias": lambda: mlp("5.bias"),
    "trained biases": lambda: mlp("1.weight", "3.weight", "5.weight"),
    "frozen convolution inside": conv_middle,
}


def drawn(name):
    """The model of that name, at weights that are drawn for it."""
    model, source = MODELS[name](), stream(0, "frozen", name)
    with torch.no_grad():
        for parameter in model.parameters():
            wide = parameter.ndim > 1
            scale = 1 / math.sqrt(parameter[0].numel()) if wide else 0.3
            parameter.copy_(scale * normal(parameter.shape, source) + (0 if wide else 0.5))
    return model


@pytest.fixture(params=list(MODELS))
def name(request):
    return request.param


@pytest.fixture
def model(name):
    return drawn(name)


@pytest.fixture
def task(model):
    return Task.of(model, classes=CLASSES)


@pytest.fixture
def batch():
    source = stream(0, "frozen", "batch")
    return Batch(torch.rand((4, *SHAPE), generator=source), torch.tensor([2, 0, 1, 0]))


@pytest.fixture
def make():
    """A task of the model of that name."""
    return lambda name: Task.of(drawn(name), classes=CLASSES)


@pytest.fixture
def make_model():
    return drawn
