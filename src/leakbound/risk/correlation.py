"""Examples that count by normalized cross-correlation, whatever their brightness and contrast."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leakbound.risk.examples import Examples, listed

CONSTANT = 1e-9
"""An example whose values differ less than this, relative to their size, is constant."""


def standardized(examples: Examples) -> Examples:
    """Each example with mean 0 and variance 1, in coordinates that leave out its mean.

    An attacker reaches a normalized cross-correlation of c exactly if some multiple of the
    candidate has a mean squared error of at most 1 - c^2 to this. Bounds for these examples
    hold for any gradients, and a layer norm before a linear trap attains what is attained.

    Raises:
        ValueError: they have fewer than three values, are constant, or are no images.
    """
    if examples.domain is not None:
        raise ValueError(f"ncc is for images, but the data are {examples.domain.name}")
    if examples.dim < 3:
        raise ValueError(f"dim is {examples.dim}; a correlation needs 3 values or more")
    dim = examples.dim - 1
    norm = math.sqrt(dim)
    images = None
    if examples.images is not None:
        images = _without_mean(examples.images)
        sizes = np.linalg.norm(images, axis=1)
        constant = sizes <= CONSTANT * np.linalg.norm(examples.images, axis=1)
        if constant.any():
            raise ValueError(
                f"data holds {int(constant.sum())} constant examples of {len(sizes)}, which "
                f"have no NCC: {listed(np.array(examples.names)[constant])}; leave them out: "
                "--exclude"
            )
        images *= (norm / sizes)[:, None]
    return replace(
        examples,
        dim=dim,
        norms=(norm, norm),
        images=images,
        correlated=True,
    )


def _without_mean(rows: NDArray[Any]) -> NDArray[Any]:
    """(n, N - 1) rows (n, N) in orthonormal coordinates orthogonal to equal values.

    A Householder reflection takes equal values to the first axis, which is left out.
    """
    across = np.full(rows.shape[1], rows.shape[1] ** -0.5)
    across[0] -= 1
    parts = 2 * (rows @ across) / (across @ across)
    reflected: NDArray[Any] = rows - parts[:, None] * across
    return reflected[:, 1:]
