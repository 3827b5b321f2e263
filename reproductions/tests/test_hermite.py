"""Hermite means against closed forms, and against adaptive quadrature of the derivatives."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import nn
from torch.nn import functional

from leakbound.core import NotApplicable
from leakbound_reproductions.attacks.hermite import (
    hermite_means,
    hermite_polynomials,
    tensor_orders,
    usable_orders,
)

PHI = 1 / math.sqrt(2 * math.pi)


def cubic(z):
    return z**3 + z**2


def integral(function):
    """E f(z), z standard normal, by adaptive quadrature on both half-lines."""
    density = lambda z: function(z) * math.exp(-z * z / 2) * PHI  # noqa: E731
    halves = [integrate.quad(density, a, b, epsabs=1e-13)[0] for a, b in ((-12, 0), (0, 12))]
    return sum(halves)


@pytest.mark.parametrize(
    ("activation", "means", "orders"),
    [
        (torch.relu, (PHI, 0.5, PHI, 0.0, -PHI), (2, 4)),
        (nn.LeakyReLU(0.2), (0.8 * PHI, 0.6, 0.8 * PHI, 0.0, -0.8 * PHI), (2, 4)),
        (cubic, (1.0, 3.0, 2.0, 6.0, 0.0), (2, 3)),
        (torch.abs, (2 * PHI, 0.0, 2 * PHI, 0.0, -2 * PHI), (2, 4)),
        (torch.sign, (0.0, 2 * PHI, 0.0, -2 * PHI, 0.0), (3, 3)),
    ],
)
def test_closed_forms(activation, means, orders):
    found = hermite_means(activation)
    np.testing.assert_allclose(found, means, atol=1e-12)
    assert tensor_orders(found) == orders


def _tanh_3(z):
    t = math.tanh(z)
    return (1 - t * t) * (6 * t * t - 2)


def _gelu_2(z):
    return (2 - z * z) * PHI * math.exp(-z * z / 2)


def _sigmoid_3(z):
    s = 1 / (1 + math.exp(-z))
    return s * (1 - s) * (1 - 6 * s + 6 * s * s)


@pytest.mark.parametrize(
    ("activation", "order", "derivative", "orders"),
    [
        (torch.tanh, 3, _tanh_3, (3, 3)),
        (functional.gelu, 2, _gelu_2, (2, 4)),
        (torch.sigmoid, 3, _sigmoid_3, (3, 3)),
        (functional.softplus, 4, _sigmoid_3, (2, 4)),  # softplus' = sigmoid
    ],
)
@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_against_quadrature_of_the_derivative(activation, order, derivative, orders, scale):
    found = hermite_means(activation, scale)
    assert found[order] == pytest.approx(integral(lambda z: derivative(scale * z)), abs=2e-8)
    if scale == 1:
        assert tensor_orders(found) == orders


def test_signs_of_the_table():
    assert hermite_means(torch.tanh)[3] < 0 < hermite_means(torch.tanh)[1]
    assert hermite_means(functional.gelu)[4] < 0 < hermite_means(functional.gelu)[2]


def test_a_homogeneous_activation_only_scales():
    one, three = hermite_means(torch.relu), hermite_means(torch.relu, 3.0)
    for p in range(5):
        assert three[p] * 3 ** (p - 1) == pytest.approx(one[p], abs=1e-12)


def test_polynomials_are_orthogonal():
    z, weights = np.polynomial.hermite_e.hermegauss(20)
    values = hermite_polynomials(torch.from_numpy(z)).numpy()
    gram = (values * weights / weights.sum()) @ values.T
    np.testing.assert_allclose(gram, np.diag([1, 1, 2, 6, 24]), atol=1e-10)


def test_what_has_no_use_is_refused():
    with pytest.raises(NotApplicable, match="order 3 or 4"):
        tensor_orders(hermite_means(lambda z: z**2 + z))
    with pytest.raises(NotApplicable, match="each unit alone"):
        hermite_means(lambda z: z.sum())
    with pytest.raises(NotApplicable, match="finite"):
        hermite_means(torch.log)
    with pytest.raises(ValueError, match="scale is -1"):
        hermite_means(torch.relu, -1.0)
    assert usable_orders(hermite_means(lambda z: 0 * z + 2)) == ()
