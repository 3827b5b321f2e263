"""Activations with their first two derivatives, by name, in numpy.

`leakbound.engines.activations` has the same functions for tensors; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[Any]  # of float64


class Differentiated(NamedTuple):
    """A function with its derivatives.

    Attributes:
        parts: z -> (s, s', s''), elementwise; s'' is 0 at jumps of s'.
        smooth: whether s' is continuous.
    """

    parts: Callable[[Array], tuple[Array, Array, Array]]
    smooth: bool = True


def _leaky(slope: float) -> Callable[[Array], tuple[Array, Array, Array]]:
    def parts(z: Array) -> tuple[Array, Array, Array]:
        first = np.where(z > 0, 1.0, slope)
        return first * z, first, np.zeros_like(z)

    return parts


def _tanh(z: Array) -> tuple[Array, Array, Array]:
    value = np.tanh(z)
    return value, 1 - value**2, -2 * value * (1 - value**2)


def _sigmoid(z: Array) -> tuple[Array, Array, Array]:
    value = special.expit(z)
    first = value * (1 - value)
    return value, first, first * (1 - 2 * value)


def _softplus(z: Array) -> tuple[Array, Array, Array]:
    first = special.expit(z)
    return np.logaddexp(0, z), first, first * (1 - first)


def _gelu(z: Array) -> tuple[Array, Array, Array]:
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    below = special.ndtr(z)
    return z * below, below + z * density, density * (2 - z**2)


ACTIVATIONS = {
    "relu": Differentiated(_leaky(0.0), smooth=False),
    "leaky_relu": Differentiated(_leaky(0.01), smooth=False),
    "tanh": Differentiated(_tanh),
    "sigmoid": Differentiated(_sigmoid),
    "softplus": Differentiated(_softplus),
    "gelu": Differentiated(_gelu),
    "cubic": Differentiated(lambda z: (z**3 + z**2, 3 * z**2 + 2 * z, 6 * z + 2)),
}
"""Activations by name; "cubic" is z^3 + z^2, the paper's example; leaky_relu has slope 0.01."""
