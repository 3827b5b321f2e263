"""Hermite coefficients of an activation, for Stein's lemma on a random hidden unit."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from leakbound import check
from leakbound.core import NotApplicable

__all__ = ["hermite_means", "tensor_orders", "usable_orders"]

HIGHEST = 4
NEGLIGIBLE = 1e-3
"""A coefficient below this share of the activation's norm is taken as zero."""


def hermite_polynomials(z: Tensor) -> Tensor:
    """The probabilists' He_0 to He_4 at z (...), as (5, ...)."""
    found = [torch.ones_like(z), z]
    for degree in range(1, HIGHEST):
        found.append(z * found[-1] - degree * found[-2])
    return torch.stack(found)


def hermite_means(
    activation: Callable[[Tensor], Tensor], scale: float = 1.0
) -> tuple[float, float, float, float, float]:
    """E of the p-th derivative of z -> s(scale z), over scale^p, for p = 0..4; z standard normal.

    By Stein's lemma, E s^(p)(scale z) scale^p = E s(scale z) He_p(z): the derivatives need not
    exist as functions. Quadrature on both half-lines, finer toward 0: a non-smooth point or a jump
    at 0 costs no accuracy. `activation` is elementwise, for float64 tensors.

    Raises:
        NotApplicable: the activation is not finite or not elementwise.

    Source: Stein 1981; paper B, Section B.4.

    Example:
        >>> [round(m, 4) + 0.0 for m in hermite_means(torch.relu)]
        [0.3989, 0.5, 0.3989, 0.0, -0.3989]
    """
    check.positive(scale=scale)
    points, weights = _half_line()
    z = torch.cat([-points.flip(0), points])
    mass = torch.cat([weights.flip(0), weights])
    with torch.no_grad():
        values = activation(scale * z)
    if values.shape != z.shape or not bool(values.isfinite().all()):
        raise NotApplicable("the activation is not a finite function of each unit alone")
    means = hermite_polynomials(z) @ (mass * values.to(z))
    zeroth, first, second, third, fourth = (float(m) / scale**p + 0.0 for p, m in enumerate(means))
    return zeroth, first, second, third, fourth


def strengths(means: tuple[float, ...], scale: float = 1.0) -> tuple[float, ...]:
    """|coefficients| in the orthonormal Hermite basis: |E s^(p)(scale z)| scale^p / sqrt(p!)."""
    return tuple(abs(m) * scale**p / math.sqrt(math.factorial(p)) for p, m in enumerate(means))


def usable_orders(means: tuple[float, ...], scale: float = 1.0) -> tuple[int, ...]:
    """The orders 1 to 4 whose coefficient is not negligible.

    Example:
        >>> usable_orders(hermite_means(torch.tanh))
        (1, 3)
    """
    sizes = strengths(means, scale)
    least = max(NEGLIGIBLE * math.hypot(*sizes[1:]), 1e-9 * sizes[0])
    return tuple(p for p in range(1, len(sizes)) if sizes[p] > least)


def tensor_orders(means: tuple[float, ...], scale: float = 1.0) -> tuple[int, int]:
    """(k2, k3): the lowest usable orders of at least 2, for the span, and 3, for the components.

    Raises:
        NotApplicable: there is none up to 4; a quadratic activation reveals only the span.

    Source: paper B, Assumption B.2 (after Zhong et al. 2017).

    Example:
        >>> tensor_orders(hermite_means(torch.relu))
        (2, 4)
    """
    usable = usable_orders(means, scale)
    third = [p for p in usable if p >= 3]
    if not third:
        raise NotApplicable(
            "the activation has no Hermite coefficient of order 3 or 4: features cannot be "
            "distinguished"
        )
    return min(p for p in usable if p >= 2), third[0]


def _half_line() -> tuple[Tensor, Tensor]:
    """Points and Gaussian weights on (0, 13): Gauss-Legendre on panels that shrink toward 0."""
    nodes, weights = np.polynomial.legendre.leggauss(24)
    edges = np.concatenate([[0.0], np.geomspace(1e-5, 13.0, 60)])
    half = np.diff(edges) / 2
    middle = (edges[1:] + edges[:-1]) / 2
    points = (middle[:, None] + half[:, None] * nodes).ravel()
    mass = (half[:, None] * weights).ravel() * np.exp(-(points**2) / 2) / math.sqrt(2 * math.pi)
    return torch.from_numpy(points), torch.from_numpy(mass)
