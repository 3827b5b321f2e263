"""The network with a wide head: sizes, features of either sign, derivatives of every kind."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp, vmap

from leakbound import data
from leakbound.client import example_gradients, gradient
from leakbound.core import Task
from leakbound.models import headed
from leakbound.models.networks import BACKBONES


def _model(shape=(1, 12, 12), classes=4, seed=0, width=64, features=6, **kwargs):
    source = torch.Generator().manual_seed(seed)
    return headed(
        input_shape=shape,
        classes=classes,
        generator=source,
        width=width,
        features=features,
        **kwargs,
    )


def _count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("backbone", "shape", "features", "width", "below", "whole"),
    [
        ("convnet", (1, 28, 28), 32, 4096, 55_104, 231_242),
        ("resnet18", (3, 32, 32), 512, 16_384, 11_431_488, 20_000_330),
    ],
)
def test_parameter_counts_of_the_docstring(backbone, shape, features, width, below, whole):
    model = _model(shape, 10, backbone=backbone, features=features, width=width)
    assert (_count(model.backbone), _count(model)) == (below, whole)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_head_sees_the_features(backbone):
    model = _model(backbone=backbone)
    images = torch.rand(2, 1, 12, 12)
    features = model.backbone(images)
    assert features.shape == (2, 6)
    by_hand = model.outer(torch.relu(model.inner(features)))
    torch.testing.assert_close(model(images), by_hand)
    assert not any(module.training for module in model.modules())
    names = [name for name, _ in model.named_parameters()]
    assert names[-4:] == ["inner.weight", "inner.bias", "outer.weight", "outer.bias"]


def test_features_of_digits_have_both_signs_and_are_not_collinear():
    images = data.load("mnist5k", limit=200).inputs
    for seed in range(2):
        found = _model((1, 28, 28), seed=seed, features=32).backbone(images).detach()
        assert (found < 0).any(1).all()
        assert (found > 0).any(1).all()
        assert _mean_cosine(found) < 0.75 < _mean_cosine(torch.ones_like(found))
        assert _mean_cosine(found) < _mean_cosine(found.relu())


def _mean_cosine(vectors):
    unit = nn.functional.normalize(vectors, dim=1)
    return float(((unit @ unit.T).sum() - len(unit)) / (len(unit) * (len(unit) - 1)))


@pytest.mark.parametrize(
    ("backbone", "norm"),
    [
        *((name, "none") for name in BACKBONES if name != "resnet18"),
        *(("convnet64", norm) for norm in ("group", "batch")),
        *(pytest.param("resnet18", n, marks=pytest.mark.slow) for n in ("group", "batch", "none")),
    ],
)
def test_functional_calls_and_example_gradients(backbone, norm):
    task = Task.of(_model(backbone=backbone, norm=norm)).to("cpu", torch.float64)
    inputs, labels = torch.rand(2, 1, 12, 12, dtype=torch.float64), torch.tensor([0, 3])
    rows = example_gradients(task, inputs, labels)
    alone = gradient(task, inputs[1:], labels[1:])
    torch.testing.assert_close(rows[1], alone)
    weights = task.unflatten(task.parameters)

    def run(x):
        return functional_call(task.model, {**weights, **task.buffers}, (x[None],))[0]

    together = vmap(run)(inputs)
    torch.testing.assert_close(together[0], run(inputs[0]))
    value, slope = jvp(run, (inputs[0],), (torch.ones_like(inputs[0]),))
    assert value.shape == slope.shape == (4,)


def test_weights_come_from_the_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, again, other = (_model(seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize(
    "wrong",
    [
        {"backbone": "vgg"},
        {"features": 0},
        {"width": 0},
        {"activation": "cubic"},
        {"norm": "layer"},
    ],
)
def test_refuses(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        _model(**wrong)
