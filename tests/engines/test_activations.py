import numpy as np
import pytest
import torch
from torch import nn

from leakbound.core import Task
from leakbound.engines import activations, calls
from leakbound_reproductions.systematic_evaluation.activations import ACTIVATIONS

MODULES = {
    "relu": nn.ReLU(),
    "relu6": nn.ReLU6(),
    "leaky_relu": nn.LeakyReLU(0.2),
    "negative_slope": nn.LeakyReLU(-0.2),
    "hardtanh": nn.Hardtanh(-0.5, 2.0),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "gelu": nn.GELU(),
    "gelu-tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "softplus": nn.Softplus(),
    "softplus-steep": nn.Softplus(beta=3.0, threshold=4.0),
    "elu": nn.ELU(0.7),
}


def of_module(module):
    """The function of a module, as it is read from its call."""
    layers = calls.read(Task.of(nn.Sequential(nn.Linear(2, 2), module)), (2,))
    return layers[-1].options.get("function")


@pytest.mark.parametrize("name", MODULES)
def test_value_and_slopes_are_autograds(name):
    module, source = MODULES[name], torch.Generator().manual_seed(0)
    function = of_module(module)
    u, t, d = (3 * torch.randn(4, 50, generator=source, dtype=torch.float64) for _ in range(3))
    traced = u.clone().requires_grad_()
    value = module(traced)
    (first,) = torch.autograd.grad(value, traced, t, create_graph=True)
    second = torch.zeros_like(u)
    if first.requires_grad:
        (second,) = torch.autograd.grad(first, traced, d, materialize_grads=True)
    mine, saved = function.value(u)
    torch.testing.assert_close(mine, value.detach(), rtol=1e-14, atol=0)
    torch.testing.assert_close(
        function.times_slope(saved, t), first.detach(), rtol=1e-13, atol=1e-14
    )
    bend = function.second(saved) * t * d
    torch.testing.assert_close(bend, second, rtol=1e-12, atol=1e-12)
    assert function.curved == bool(second.any())


@pytest.mark.parametrize("name", MODULES)
def test_monotone_ones_never_fall(name):
    function = of_module(MODULES[name])
    if function.order == "exactly":
        line = torch.linspace(-3, 3, 10001)
        assert (function.value(line)[0].diff() >= 0).all()


@pytest.mark.parametrize("name", sorted({*ACTIVATIONS} - {"cubic"}))
def test_arrays_have_the_same_functions(name):
    """Values, both derivatives, and what is smooth."""
    module = nn.LeakyReLU() if name == "leaky_relu" else MODULES[name]
    function, array = of_module(module), ACTIVATIONS[name]
    u = torch.linspace(-5, 5, 998, dtype=torch.float64)
    value, saved = function.value(u)
    mine = value, function.times_slope(saved, torch.ones_like(u)), function.second(saved)
    for one, other in zip(mine, array.parts(u.numpy()), strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-12, atol=1e-14)
    assert array.smooth == (function.operator is not None)


@pytest.mark.parametrize("name", MODULES)
def test_monotone_ones_increase(name):
    function = of_module(MODULES[name])
    u = torch.linspace(-3, 3, 1001, dtype=torch.float64)
    saved = function.value(u)[1]
    rises = bool((function.times_slope(saved, torch.ones_like(u)) >= 0).all())
    assert (function.order is not None) == (rises and not isinstance(function, activations.Elu))


@pytest.mark.parametrize("layer", [nn.PReLU(), nn.Mish(), nn.Linear(2, 2)], ids=str)
def test_others_are_not_known(layer):
    assert of_module(layer) is None
