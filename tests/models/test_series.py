"""Models of series and of pixels: sizes, initial weights, and derivatives of every kind."""

import pytest
import torch
from torch import nn
from torch.func import vjp

from leakbound import models
from leakbound.client import example_gradients, gradient, input_jvp, pure_gradient
from leakbound.core import Task
from leakbound.losses import LOSSES
from leakbound.randomness import stream

CASES = [
    ("conv1d", {}),
    ("conv1d", {"pooling": "mean", "activation": "gelu"}),
    ("conv1d", {"dilation": 2, "stride": 1, "channels": (4, 4, 4), "kernel": 3}),
    ("lstm", {}),
    ("lstm", {"layers": 2, "pooling": "mean", "hidden": 5}),
    ("gru", {}),
    ("mlp", {}),
    ("unet", {"width": 3, "activation": "tanh"}),
]


def build(name, classes=3, **settings):
    shape = (2, 9, 10) if name == "unet" else (2, 20)
    given = {"input_shape": shape, "classes": classes, "generator": stream(0, "model")}
    return getattr(models, name)(**given, **settings), shape


def problem(name, settings, size=2):
    model, shape = build(name, **settings)
    loss = "dense_cross_entropy" if name == "unet" else "cross_entropy"
    task = Task.of(model, loss=loss).to("cpu", torch.float64)
    inputs = torch.rand(size, *shape, generator=stream(1), dtype=torch.float64)
    labels = torch.arange(size) % 3
    if name == "unet":
        labels = torch.randint(3, (size, *shape[1:]), generator=stream(2))
    return task, inputs, labels


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_shapes_and_weights_from_the_generator_alone(name, settings):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model, shape = build(name, **settings)
    again, _ = build(name, **settings)
    assert torch.equal(before, torch.get_rng_state())
    for (key, one), other in zip(
        model.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), key
        assert bool(one.any()), key
    x = torch.rand(4, *shape, generator=stream(1))
    copy = x.clone()
    with torch.no_grad():
        out = model(x)
        torch.testing.assert_close(out[1:2], model(x[1:2]))  # examples do not mix
    assert torch.equal(x, copy)
    assert out.shape == ((4, 3, 9, 10) if name == "unet" else (4, 3))
    assert not any(module.training for module in model.modules())


def test_initial_law_is_pytorchs():
    model, _ = build("lstm", hidden=16)
    assert all(float(p.detach().abs().max()) <= 0.25 for p in model.layer.parameters())
    assert float(model.layer.weight_hh_l0.detach().std()) == pytest.approx(0.25 / 3**0.5, rel=0.05)
    model, _ = build("conv1d", channels=(64, 64))
    assert float(model[2].weight.detach().abs().max()) <= (64 * 5) ** -0.5


def test_dilations_reach_as_far_as_they_say():
    """Kernel 3 with dilations 1, 2, 4 sees 1 + 2 (1 + 2 + 4) = 15 times."""
    settings = {"dilation": 2, "stride": 1, "channels": (4, 4, 4), "kernel": 3}
    model = models.conv1d(input_shape=(1, 41), classes=2, generator=stream(0), **settings)
    x = torch.rand(1, 1, 41).requires_grad_()
    model[:-2](x)[0, :, 20].sum().backward()
    assert x.grad[0, 0].nonzero()[:, 0].tolist() == list(range(13, 28))


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_derivatives_agree(name, settings):
    task, inputs, labels = problem(name, settings)
    rows = example_gradients(task, inputs, labels)
    for row, one, label in zip(rows, inputs, labels, strict=True):
        torch.testing.assert_close(row, gradient(task, one[None], label[None]))
    along = torch.randn(inputs.shape, generator=stream(2), dtype=torch.float64)
    back = torch.randn(len(task.parameters), generator=stream(3), dtype=torch.float64)
    ahead = input_jvp(task, inputs, labels, along) @ back
    reverse = vjp(lambda x: pure_gradient(task, x, labels), inputs)[1](back)[0]
    leaf = inputs.clone().requires_grad_()
    double = torch.autograd.grad(gradient(task, leaf, labels) @ back, leaf)[0]
    torch.testing.assert_close(ahead, (reverse * along).sum())
    torch.testing.assert_close(double, reverse)
    step = 1e-6 * along
    moved = gradient(task, inputs + step, labels) - gradient(task, inputs - step, labels)
    assert float(moved @ back / 2e-6) == pytest.approx(float(ahead), rel=1e-5)


def test_a_unet_under_dice():
    model, shape = build("unet", classes=1, width=3)
    task = Task.of(model, loss="dice")
    masks = (torch.rand(2, *shape[1:], generator=stream(1)) > 0.5).float()
    found = gradient(task, torch.rand(2, *shape, generator=stream(2)), masks)
    assert bool(found.isfinite().all())
    assert bool(found.any())
    assert LOSSES["dice"] == task.loss


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        (
            "conv1d",
            {"input_shape": (1, 8, 8)},
            r"input_shape is \(1, 8, 8\); give \(channels, times",
        ),
        ("lstm", {"input_shape": (8,)}, "input_shape is"),
        ("unet", {"input_shape": (1, 3, 8)}, "at least 4 x 4"),
        ("unet", {"input_shape": (1, 8)}, r"give \(channels, height, width\)"),
        ("mlp", {"input_shape": ()}, "give the shape of one input"),
        ("conv1d", {"kernel": 4}, "kernel is 4"),
        ("conv1d", {"channels": ()}, r"channels \(\)"),
        ("conv1d", {"pooling": "max"}, "pooling is 'max'"),
        ("conv1d", {"stride": 0}, "stride is 0"),
        ("gru", {"pooling": "flat"}, "pooling is 'flat'"),
        ("gru", {"hidden": 0}, "hidden is 0"),
        ("unet", {"activation": "swish"}, "activation is 'swish'"),
    ],
)
def test_errors_name_the_argument(name, settings, words):
    shape = (1, 8, 8) if name == "unet" else (1, 8)
    given = {"input_shape": shape, "classes": 2, "generator": stream(0), **settings}
    with pytest.raises(ValueError, match=words):
        getattr(models, name)(**given)


def test_built_in_recurrent_layers_compute_step_by_step():
    assert type(build("lstm")[0].layer) is not nn.LSTM
