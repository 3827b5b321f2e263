"""Equations against unknowns, beside ranks of matrices that are written out."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.functional import jacobian

from leakbound.attacks import rank
from leakbound.attacks.rank import rank_analysis
from leakbound.random import normal, stream, uniform
from leakbound.types import Batch, NotApplicable, Task


def _net(*layers, seed=0):
    model = nn.Sequential(*layers).double()
    generator = stream(seed, "weights")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(normal(parameter.shape, generator, like=parameter) / 3)
    return model


def _by_numpy(model, inputs, labels):
    """Rank of d gradient / d inputs by finite differences of plain autograd."""

    def gradient(flat):
        loss = nn.functional.cross_entropy(model(flat.view(inputs.shape)), labels)
        parts = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([part.reshape(-1) for part in parts]).numpy()

    flat, step = inputs.reshape(-1), 1e-5
    columns = []
    for k in range(len(flat)):
        move = torch.zeros_like(flat)
        move[k] = step
        columns.append((gradient(flat + move) - gradient(flat - move)) / (2 * step))
    return np.linalg.matrix_rank(np.stack(columns, 1), rtol=1e-7)


NETS = {
    "linear": (lambda: _net(nn.Flatten(), nn.Linear(12, 4)), (1, 3, 4)),
    "narrow": (lambda: _net(nn.Flatten(), nn.Linear(12, 2, bias=False)), (1, 3, 4)),
    "mlp": (
        lambda: _net(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)),
        (1, 3, 4),
    ),
    "dead": (
        lambda: _net(nn.Flatten(), nn.Linear(16, 1, bias=False), nn.Tanh(), nn.Linear(1, 3)),
        (1, 4, 4),
    ),
    "convolution": (
        lambda: _net(
            nn.Conv2d(1, 2, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(2 * 16, 3)
        ),
        (1, 4, 4),
    ),
    "strided": (
        lambda: _net(nn.Conv2d(1, 1, 3, stride=3), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2)),
        (1, 6, 6),
    ),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", NETS)
def test_the_rank_is_that_of_finite_differences(name, size):
    build, shape = NETS[name]
    model, generator = build(), stream(1, name, size)
    classes = model[-1].out_features
    inputs = uniform((size, *shape), generator, like=model[-1].weight)
    labels = torch.arange(size) % classes
    expected = _by_numpy(model, inputs, labels)
    batch = Batch(inputs, labels)
    report = rank_analysis(Task.of(model), shape, size, generator, batch=batch)
    print(f"\n{name}, batch {size}: rank {report.rank} of {report.unknowns}")
    assert report.rank == report.rank_at_most == expected
    assert report.unknowns == inputs.numel()
    assert ("free" in report.verdict) == (expected < inputs.numel())
    assert report.weakest > 0


def _stacked(layer, inputs, slopes):
    """Weight and gradient constraints of a layer as one matrix."""
    flat = inputs.reshape(-1)

    def both(values):
        outputs = layer(values.view(inputs.shape))
        weight = torch.autograd.grad(outputs, layer.weight, slopes, create_graph=True)[0]
        return torch.cat([outputs.reshape(-1), weight.reshape(-1)])

    return np.linalg.matrix_rank(jacobian(both, flat).detach().numpy(), rtol=1e-9)


@pytest.mark.parametrize("size", [1, 2, 4, 6])
@pytest.mark.parametrize(("across", "wide"), [(7, 3), (3, 7), (5, 5), (9, 1), (6, 4)])
def test_independent_equations_of_a_linear_layer_are_the_rank(across, wide, size):
    model = _net(nn.Flatten(), nn.Linear(across, wide), nn.Linear(wide, 3))
    generator = stream(2, across, wide, size)
    inputs = uniform((size, across), generator, like=model[1].weight)
    slopes = normal((size, wide), generator, like=inputs)
    layer = rank_analysis(Task.of(model), (across,), size, generator).layers[0]
    assert layer.independent == _stacked(model[1], inputs, slopes)
    assert (layer.unknowns, layer.weight_constraints) == (size * across, size * wide)
    assert layer.gradient_constraints == across * wide


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("settings", [(1, 2, 3, 1, 1), (2, 2, 3, 2, 0), (2, 1, 2, 1, 0)])
def test_independent_equations_of_a_convolution_bound_the_rank(settings, size):
    inside, outside, kernel, stride, padding = settings
    layer = nn.Conv2d(inside, outside, kernel, stride, padding).double()
    shape = (inside, 5, 5)
    width = layer(torch.zeros(1, *shape, dtype=torch.float64)).numel()
    model = _net(layer, nn.Flatten(), nn.Linear(width, 2))
    generator = stream(3, *settings, size)
    inputs = uniform((size, *shape), generator, like=layer.weight)
    slopes = normal(layer(inputs).shape, generator, like=inputs)
    found = rank_analysis(Task.of(model), shape, size, generator).layers[0]
    exact = _stacked(layer, inputs, slopes)
    print(f"\n{settings}, batch {size}: rank {exact}, at most {found.independent}")
    assert exact <= found.independent <= found.unknowns
    assert found.independent - exact <= 2


def test_virtual_constraints_are_what_the_narrowest_layer_leaves():
    layers = [nn.Linear(a, b) for a, b in ((6, 20), (20, 4), (4, 9), (9, 2))]
    report = rank_analysis(Task.of(_net(nn.Flatten(), *layers)), (6,), 2, stream(0))
    assert [layer.unknowns for layer in report.layers] == [12, 40, 8, 18]
    assert [layer.virtual_constraints for layer in report.layers] == [0, 28, 0, 10]
    # a single hidden unit: 16 pixels, one weight and 16 gradient equations, one tie; batch 2
    one = _net(nn.Flatten(), nn.Linear(16, 1), nn.Linear(1, 2))
    (first, _) = rank_analysis(Task.of(one), (1, 4, 4), 2, stream(0)).layers
    assert (first.independent, first.missing) == (2 + 16 - 1, 32 - 17)


def test_what_a_rank_deficit_means(scene):
    """Along a direction in the null space the gradient does not change; along others it does."""
    model, shape = NETS["strided"][0](), (1, 6, 6)
    report = rank_analysis(Task.of(model), shape, 2, stream(0))
    assert report.rank < report.unknowns
    assert str(report.unknowns - report.rank) in report.verdict
    table = str(report)
    assert table.splitlines()[0].split() == [
        *("layer", "unknowns", "weight", "gradient", "independent", "virtual", "missing")
    ]
    assert table.splitlines()[-1] == report.verdict


def test_large_models_are_followed_along_random_directions(monkeypatch):
    build, shape = NETS["linear"]
    task = Task.of(build())
    monkeypatch.setattr(rank, "LARGEST", 7 * len(task.parameters))
    report = rank_analysis(task, shape, 1, stream(0))
    assert (report.rank, report.rank_at_most, report.unknowns) == (7, 12, 12)
    assert "at least 7 of 12" in report.verdict
    # where fewer directions than were followed matter, the rank is known all the same
    build, shape = NETS["strided"]
    task = Task.of(build())
    exact = rank_analysis(task, shape, 2, stream(0))
    monkeypatch.setattr(rank, "LARGEST", 60 * len(task.parameters))
    found = rank_analysis(task, shape, 2, stream(0))
    assert found.rank == found.rank_at_most == exact.rank < 60


def test_a_model_of_the_library_and_what_does_not_apply(scene):
    report = rank_analysis(scene.task("lenet"), (1, 28, 28), 1, stream(0))
    assert report.rank == report.unknowns == 784
    with pytest.raises(NotApplicable, match="no linear or convolution"):
        rank_analysis(Task.of(nn.PReLU(4)), (4,), 1, stream(0))
    with pytest.raises(ValueError, match="batch_size is 0"):
        rank_analysis(scene.task("lenet"), (1, 28, 28), 0, stream(0))
    twice = nn.Linear(4, 4)
    with pytest.raises(NotApplicable, match="2 times"):
        rank_analysis(Task.of(nn.Sequential(twice, twice)), (4,), 1, stream(0))
