"""Activations with their first two derivatives, by name, in numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[Any]  # of float64


@dataclass(frozen=True)
class Activation:
    """A function with its first two derivatives; `smooth` where it has no kink.

    Attributes:
        parts: z -> (s, s', s''), elementwise; s'' is 0 at a kink.
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
    density, below = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi), special.ndtr(z)
    return z * below, below + z * density, density * (2 - z**2)


def _cubic(z: Array) -> tuple[Array, Array, Array]:
    return z**3 + z**2, 3 * z**2 + 2 * z, 6 * z + 2


ACTIVATIONS = {
    "relu": Activation(_leaky(0.0), smooth=False),
    "leaky_relu": Activation(_leaky(0.01), smooth=False),
    "tanh": Activation(_tanh),
    "sigmoid": Activation(_sigmoid),
    "softplus": Activation(_softplus),
    "gelu": Activation(_gelu),
    "cubic": Activation(_cubic),
}
"""Activations by name; "cubic" is z^3 + z^2, the paper's example; leaky_relu has slope 0.01."""
