"""Small networks of every kind that matters to the engines, and the full Jacobian as a judge."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev

from leakbound.core import Task
from leakbound.engines.sensitivity import sensitivity
from leakbound.randomness import stream, uniform

SHAPE, CLASSES = (1, 6, 6), 3


class Reused(nn.Module):
    """One layer called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(36, 5), nn.Linear(5, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.first(x.flatten(1)))
        return self.last(torch.tanh(self.again(torch.tanh(self.again(x)))))


class Tied(Reused):
    """Two modules with one weight."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(5, 5)
        self.other.weight = self.again.weight

    def forward(self, x):
        x = torch.tanh(self.first(x.flatten(1)))
        return self.last(torch.tanh(self.other(torch.tanh(self.again(x)))))


class Functional(Reused):
    """A layer's weight is also used outside of its call."""

    def forward(self, x):
        x = torch.tanh(self.again(torch.tanh(self.first(x.flatten(1)))))
        return self.last(x @ self.again.weight)


class Owner(Reused):
    """A module with children that holds a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.last(self.scale * self.again(torch.tanh(self.first(x.flatten(1)))))


class Tokens(nn.Module):
    """Linear layers on rows of pixels; `front` moves the rows before the examples."""

    def __init__(self, front):
        super().__init__()
        self.front = front
        self.mix, self.last = nn.Linear(6, 4), nn.Linear(24, CLASSES)

    def forward(self, x):
        x = x.flatten(0, 1) if x.ndim == 4 else x
        x = self.mix(x.transpose(0, 1)).transpose(0, 1) if self.front else self.mix(x)
        return self.last(torch.tanh(x).flatten(1))


class Merged(Tokens):
    """Rows of all examples in one dimension."""

    def forward(self, x):
        return self.last(torch.tanh(self.mix(x.reshape(-1, 6))).reshape(len(x), 24))


class Halved(nn.Linear):
    """A Linear that is none."""

    def forward(self, x):
        return super().forward(x) / 2


def _conv(*parts, last):
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(last, CLASSES))


FAST = {
    "mlp": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, CLASSES, bias=False)
    ),
    "pooled": lambda: _conv(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.LeakyReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 2, 2),
        nn.Sigmoid(),
        last=8,
    ),
    "strided": lambda: _conv(
        nn.Conv2d(1, 3, 3, 2, 1, bias=False),
        nn.Softplus(),
        nn.Conv2d(3, 2, (2, 1), (1, 2), (1, 0), (2, 1)),
        nn.GELU(),
        last=2 * 3 * 2,
    ),
    "group_norm": lambda: _conv(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), last=64),
    "batch_norm": lambda: _conv(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), last=32),
    "groups": lambda: _conv(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3, padding="same", groups=2), last=64
    ),
    "circular": lambda: _conv(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), last=72),
    "tokens": lambda: Tokens(front=False),
    "in_place": lambda: _conv(nn.Conv2d(1, 2, 3), nn.LeakyReLU(inplace=True), last=32),
    "halved": lambda: nn.Sequential(nn.Flatten(), Halved(36, 5), nn.Tanh(), nn.Linear(5, CLASSES)),
}
GENERIC = {
    "reused": Reused,
    "tied": Tied,
    "functional": Functional,
    "owner": Owner,
    "rows_in_front": lambda: Tokens(front=True),
    "merged": lambda: Merged(front=False),
}
MODELS = FAST | GENERIC


def build(name, dtype=torch.float64):
    """A task on the named model, its weights and norm statistics drawn."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = MODELS[name]().to(dtype).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.GroupNorm | nn.BatchNorm2d):
                module.weight.copy_(uniform(module.weight.shape, stream(1), like=module.weight))
                module.bias.copy_(uniform(module.bias.shape, stream(2), like=module.bias))
    return Task.of(model, classes=CLASSES)


def batch(size, dtype=torch.float64):
    """Inputs and labels."""
    source = stream(size, "sensitivity")
    inputs = torch.randn(size, *SHAPE, generator=source, dtype=dtype)
    return inputs, torch.randint(CLASSES, (size,), generator=source)


def jacobian(task, inputs, labels):
    """The full (P, B, n) Jacobian of the batch-mean gradient, by reverse mode."""

    def gradient(x):
        def loss(flat):
            tensors = {**task.buffers, **task.unflatten(flat)}
            return task.loss(functional_call(task.model, tensors, (x,)), labels)

        return grad(loss)(task.parameters)

    return jacrev(gradient)(inputs).flatten(2)


def draws(count, name="pooled", **settings):
    """(count, P) values of an estimator's draws on three examples, and the truth."""
    task, (x, y) = build(name), batch(3)
    found = [sensitivity(task, x, y, stream(i, "draw"), **settings) for i in range(count)]
    exact = sensitivity(task, x, y, stream(0), estimator="exact").values
    return torch.stack([f.values for f in found]), exact


def worst_z(values, truth):
    """The largest |z| over coordinates of the mean of the draws."""
    mean, spread = values.mean(0), values.std(0) / math.sqrt(len(values))
    live = truth > 0
    return float(((mean - truth).abs()[live] / spread[live]).max())


@pytest.fixture(scope="session")
def small():
    """The tools above, by name."""
    return SimpleNamespace(
        build=build,
        batch=batch,
        jacobian=jacobian,
        draws=draws,
        worst_z=worst_z,
        fast=tuple(FAST),
        generic=tuple(GENERIC),
    )


def pytest_generate_tests(metafunc):
    """Run a test that asks for `every` on every model."""
    if "every" in metafunc.fixturenames:
        metafunc.parametrize("every", MODELS)
