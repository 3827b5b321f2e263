"""A small float64 net, clients of different sizes, and a federation written out in plain torch."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from leakbound.core import Batch, Task
from leakbound.randomness import normal, stream

SIZES = (6, 3, 9)


def clients(sizes, kind=torch.float64):
    """One batch a client, each with images of its own."""
    out = []
    for i, size in enumerate(sizes):
        source = stream(i, "client")
        inputs = torch.rand(size, 1, 4, 4, generator=source, dtype=kind)
        out.append(Batch(inputs, torch.randint(3, (size,), generator=source)))
    return out


def trained(task, batch, plan, start=None):
    """The weights after a client's local steps by torch's SGD; pruned ones stay 0."""
    model = copy.deepcopy(task.model).requires_grad_(True)
    flat = task.parameters if start is None else start
    kept = torch.ones_like(flat, dtype=torch.bool) if task.kept is None else task.kept
    nn.utils.vector_to_parameters(flat * kept, model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=plan.learning_rate)
    size = plan.batch_size or batch.size
    slices = [slice(a, a + size) for a in range(0, batch.size, size)]
    for step in range(plan.steps):
        part = slices[step % len(slices)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs[part]), batch.labels[part]).backward()
        optimizer.step()
        with torch.no_grad():
            now = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(now * kept, model.parameters())
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def mean(turns, sizes, server, rule):
    """What the server makes of the weights sent, entry by entry; a zero is a weight not sent."""
    out = server.clone()
    for j in range(len(out)):
        sent = [(size, float(turn.sent[0, j])) for size, turn in zip(sizes, turns, strict=True)]
        if rule == "unchanged":
            sent = [(size, value or float(server[j])) for size, value in sent]
        if rule == "masked":
            sent = [(size, value) for size, value in sent if value]
        if sent:
            total = sum(size for size, _ in sent)
            out[j] = sum(size * value for size, value in sent) / total
    return out


@pytest.fixture
def task():
    layers = nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)
    whole = Task.of(nn.Sequential(nn.Flatten(), *layers).double(), classes=3)
    return whole.with_parameters(
        0.5 * normal(whole.parameters.shape, stream(0, "weights"), like=whole.parameters)
    )


@pytest.fixture
def convnet():
    """Two convolutions with a pool and a linear layer, ReLU."""
    layers = (
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    whole = Task.of(nn.Sequential(*layers).double(), classes=3)
    drawn = normal(whole.parameters.shape, stream(1, "weights"), like=whole.parameters)
    return whole.with_parameters(0.3 * drawn)


@pytest.fixture
def data():
    return clients(SIZES)


@pytest.fixture
def plain():
    """The tools above, by name."""
    return SimpleNamespace(clients=clients, trained=trained, mean=mean, sizes=SIZES)
