"""VGG-4 to VGG-11: the paper's counts, small versions, derivatives, weights from the generator."""

import pytest
import torch
from torch import nn

from leakbound import models

COUNTS = {4: 1_125_642, 6: 1_814_538, 9: 6_436_106, 11: 9_385_994}
LEAST = {4: 4, 6: 16, 9: 32, 11: 32}


def _stream(seed=0):
    return torch.Generator().manual_seed(seed)


def _build(shape=(3, 32, 32), classes=10, seed=0, **kwargs):
    return models.vgg(input_shape=shape, classes=classes, generator=_stream(seed), **kwargs)


def _count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("depth", "count"), COUNTS.items())
def test_the_papers_counts(depth, count):
    model = _build(depth=depth)
    assert _count(model) == count
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model) == depth
    assert sum(isinstance(m, nn.Linear) for m in model) == (2 if depth < 9 else 3)
    with torch.no_grad():
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_the_default_has_depth_11():
    assert _count(_build()) == COUNTS[11]


def test_the_convolutions_are_those_of_vgg_a():
    convs = [module for module in _build() if isinstance(module, nn.Conv2d)]
    assert [m.out_channels for m in convs] == [64, 128, 256, 256, 512, 512, 512, 512]
    assert {(m.kernel_size, m.padding, m.stride) for m in convs} == {((3, 3), (1, 1), (1, 1))}


@pytest.mark.parametrize(
    ("depth", "shape", "width", "count"),
    [
        (4, (1, 8, 8), 0.125, 10 * 8 + 73 * 16 + (16 * 4 + 1) * 16 + 17 * 10),
        (
            6,
            (3, 16, 16),
            1 / 16,
            28 * 4 + 37 * 8 + 73 * 16 + 145 * 32 + (32 + 1) * 8 + 9 * 10,
        ),
        (
            11,
            (3, 32, 32),
            1 / 16,
            28 * 4 + 37 * 8 + 73 * 16 + 145 * 16 + 145 * 32 + 3 * 289 * 32
            + 33 * 16 + 17 * 8 + 9 * 10,
        ),
    ],
)  # fmt: skip
def test_small_versions(depth, shape, width, count):
    model = _build(shape, depth=depth, width=width)
    assert _count(model) == count
    with torch.no_grad():
        assert model(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("depth", COUNTS)
def test_any_size_that_the_pools_allow(depth):
    least = LEAST[depth]
    for side in (least, least + 5):
        shape = (1, side, side + 3)
        with torch.no_grad():
            assert _build(shape, depth=depth, width=0.02)(torch.zeros(1, *shape)).shape == (1, 10)
    for shape in ((1, least - 1, 64), (1, 64, least - 1)):
        with pytest.raises(ValueError, match=f"at least {least} x {least}"):
            _build(shape, depth=depth)


@pytest.mark.parametrize("depth", COUNTS)
def test_weights_come_from_the_generator_alone(depth):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = _build(depth=depth, width=0.05).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    second = _build(depth=depth, width=0.05).state_dict()
    other = _build(depth=depth, width=0.05, seed=1).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)


def test_eval_mode_and_nothing_in_place():
    model = _build(width=0.05)
    inputs = torch.rand(2, 3, 32, 32, generator=_stream())
    copy = inputs.clone()
    assert torch.equal(model(inputs), model(inputs))
    assert torch.equal(inputs, copy)
    assert not any(module.training for module in model.modules())
    assert not any(getattr(module, "inplace", False) for module in model.modules())


@pytest.mark.parametrize(("depth", "activation"), [(4, "relu"), (6, "gelu"), (11, "leaky_relu")])
def test_derivatives(derivatives_agree, depth, activation):
    derivatives_agree(_build(depth=depth, width=0.05, activation=activation), (3, 32, 32))


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"depth": 16}, "depth is 16; give one of 4, 6, 9, 11"),
        ({"depth": 11.0}, "depth is 11.0"),
        ({"width": -1.0}, "width is -1.0"),
        ({"classes": 0}, "classes is 0"),
        ({"activation": "rleu"}, "did you mean 'relu'"),
    ],
)
def test_errors_name_the_argument(kwargs, words):
    with pytest.raises(ValueError, match=words):
        _build(**kwargs)
