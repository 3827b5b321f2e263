"""Conv-1 to Conv-6: the paper's counts, small versions, derivatives, weights from the generator."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacfwd, vmap

from leakbound import models

COUNTS = {1: 3_815_566, 2: 6_603_710, 4: 13_657_406, 6: 25_324_350}


def _stream(seed=0):
    return torch.Generator().manual_seed(seed)


def _build(shape=(2, 9, 9), classes=4, seed=0, **kwargs):
    return models.conv(input_shape=shape, classes=classes, generator=_stream(seed), **kwargs)


def _small(depth=2, **kwargs):
    return _build(depth=depth, width=0.1, hidden=7, **kwargs)


def _count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("depth", "count"), COUNTS.items())
def test_the_papers_counts(depth, count):
    model = _build((1, 28, 28), 62, depth=depth)
    assert _count(model) == count
    assert sum(isinstance(m, nn.Conv2d) for m in model) == depth
    assert sum(isinstance(m, nn.Linear) for m in model) == 2
    with torch.no_grad():
        assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 62)


def test_depth_two_is_the_papers_network():
    model = _build((1, 28, 28), 62)
    torch_own = nn.Sequential(
        nn.Conv2d(1, 32, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 2048),
        nn.ReLU(),
        nn.Linear(2048, 62),
    )
    torch_own.load_state_dict(model.state_dict())
    images = torch.rand(2, 1, 28, 28, generator=_stream(1))
    torch.testing.assert_close(model(images), torch_own(images))


@pytest.mark.parametrize(
    ("shape", "kwargs", "count"),
    [
        (
            (1, 14, 14),
            {"depth": 1, "hidden": 16},
            80 + (8 * 8 * 8 + 1) * 16 + 17 * 10,
        ),
        (
            (1, 14, 14),
            {"width": 0.25, "hidden": 32},
            26 * 8 + (25 * 8 + 1) * 16 + (16 * 3 * 3 + 1) * 32 + 33 * 10,
        ),
        (
            (1, 28, 28),
            {"width": 0.25, "hidden": 32},
            26 * 8 + (25 * 8 + 1) * 16 + (16 * 7 * 7 + 1) * 32 + 33 * 10,
        ),
        (
            (1, 28, 28),
            {"width": 0.02},
            26 * 1 + 26 * 1 + (1 * 7 * 7 + 1) * 41 + 42 * 10,
        ),
        (
            (1, 14, 14),
            {"depth": 4, "width": 0.125, "hidden": 32},
            26 * 4 + 101 * 8 + 73 * 16 + 145 * 32 + (32 * 3 * 3 + 1) * 32 + 33 * 10,
        ),
    ],
)
def test_small_versions(shape, kwargs, count):
    model = _build(shape, 10, **kwargs)
    assert _count(model) == count
    with torch.no_grad():
        assert model(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("depth", COUNTS)
def test_any_size_that_the_pools_allow(depth):
    least = 1 if depth == 1 else 4
    for side in (least, 7, 10):
        model = _small(depth, shape=(1, side, side + 3))
        with torch.no_grad():
            assert model(torch.zeros(1, 1, side, side + 3)).shape == (1, 4)


@pytest.mark.parametrize("depth", COUNTS)
def test_weights_come_from_the_generator_alone(depth):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = _small(depth).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    second, other = _small(depth).state_dict(), _small(depth, seed=1).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)


def test_eval_mode_and_nothing_in_place():
    model = _small(4)
    inputs = torch.rand(2, 2, 9, 9, generator=_stream())
    copy = inputs.clone()
    assert torch.equal(model(inputs), model(inputs))
    assert torch.equal(inputs, copy)
    assert not any(module.training for module in model.modules())
    assert not any(getattr(module, "inplace", False) for module in model.modules())


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("depth", COUNTS)
def test_derivatives(derivatives_agree, depth, activation):
    derivatives_agree(_small(depth, activation=activation), (2, 9, 9))


def test_gradients_reach_every_tensor_under_torch_func():
    model = _small(2, activation="tanh").double()
    weights = dict(model.named_parameters())
    inputs = torch.rand(3, 2, 9, 9, generator=_stream(1), dtype=torch.float64)

    def value(w, image):
        return functional_call(model, w, (image[None],)).square().sum()

    each = vmap(grad(value), in_dims=(None, 0))(weights, inputs)
    assert all((rows.flatten(1).norm(dim=1) > 0).all() for rows in each.values())
    by_forward = jacfwd(value)(weights, inputs[0])
    for name, rows in each.items():
        torch.testing.assert_close(by_forward[name], rows[0])


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"depth": 3}, "depth is 3; give one of 1, 2, 4, 6"),
        ({"depth": True}, "depth is True"),
        ({"shape": (1, 3, 28)}, "at least 4 x 4"),
        ({"depth": 6, "shape": (1, 28, 3)}, "at least 4 x 4"),
        ({"shape": (28, 28)}, "input_shape is"),
        ({"classes": 0}, "classes is 0"),
        ({"width": 0.0}, "width is 0.0"),
        ({"width": float("inf")}, "width is inf"),
        ({"hidden": 0}, "hidden is 0"),
        ({"activation": "rleu"}, "did you mean 'relu'"),
    ],
)
def test_errors_name_the_argument(kwargs, words):
    with pytest.raises(ValueError, match=words):
        _build(**kwargs)
