"""The only place where truth meets reconstruction: it matches each with a true example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakbound import check
from leakbound._util import pictures
from leakbound._util.decibels import capped_psnr
from leakbound._util.formats import format_number
from leakbound.core import Batch, Reconstruction
from leakbound.domains.base import squared_distances

__all__ = ["Paired", "assigned", "pair", "squared_distances"]

SMALL = 0.1
"""Costs below this share of the median one differ little to the assignment."""


@dataclass(frozen=True, eq=False)
class Paired:
    """A reconstruction in the order of the truth.

    Attributes:
        truth: the clients' examples.
        inputs: (B, *S) the reconstruction of each true image.
        labels: (B,) the reconstructed labels in the same order; None if the attack has none.
        order: for each true image, the position of its reconstruction among the attack's.
    """

    truth: Batch
    inputs: Tensor
    labels: Tensor | None
    order: tuple[int, ...]

    def _repr_html_(self) -> str:
        """The notebook display: every true image above its reconstruction, and their distance."""
        scale = float(self.truth.inputs.min()), float(self.truth.inputs.max())
        unit = scale[0] >= 0 and scale[1] <= 1
        truth, guess = (x[: pictures.MOST].double() for x in (self.truth.inputs, self.inputs))
        labels = [f"label {label}" for label in self.truth.labels[: pictures.MOST].tolist()]
        captions = []
        for true, reconstruction in zip(truth, guess, strict=True):
            error = float((reconstruction - true).square().mean())
            level = f"; {format_number(capped_psnr(error))} dB" if unit else ""
            captions.append(f"MSE {format_number(error)}{level}")
        span = (0.0, 1.0) if unit else scale
        return pictures.block(
            "True images, and below them their reconstructions",
            pictures.images(
                self.truth.inputs,
                labels,
                input_range=span,
                name="true image",
            ),
            pictures.images(
                self.inputs,
                captions,
                input_range=span,
                name="reconstructed image",
            ),
        )


def pair(
    truth: Batch,
    reconstruction: Reconstruction,
    costs: Callable[[Tensor, Tensor], Tensor] = squared_distances,
) -> Paired:
    """Assign one reconstruction to every true example, as `assigned` says for their `costs`.

    `costs` (B, N) are mean squared errors, or a domain's own.

    An update does not reveal the order of the examples, so an attack does not know it. Labels move
    with their images. With more candidates (N, *S) than images (B, *S), the best subset is used.

    Raises:
        ValueError: fewer candidates than images, other shapes, or entries that are not finite.

    Example:
        >>> black, white = torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
        >>> truth = Batch(torch.cat([black, white]), torch.tensor([0, 1]))
        >>> pair(truth, Reconstruction(torch.cat([white, black]))).order
        (1, 0)
    """
    guesses = reconstruction.inputs
    labels = reconstruction.labels
    if guesses.shape[1:] != truth.inputs.shape[1:]:
        raise ValueError(
            f"reconstruction holds images {tuple(guesses.shape[1:])} and the truth "
            f"{tuple(truth.inputs.shape[1:])}; give both in one shape"
        )
    if len(guesses) < truth.size:
        raise ValueError(
            f"reconstruction holds {len(guesses)} images and the truth {truth.size}; "
            "an attack gives one for every image"
        )
    if labels is not None and len(labels) != len(guesses):
        raise ValueError(
            f"reconstruction holds {len(guesses)} images and {len(labels)} labels; "
            "give one label for each, or none"
        )
    check.finite("truth", truth.inputs)
    check.finite("reconstruction", guesses)
    order = tuple(assigned(costs(truth.inputs, guesses).numpy()).tolist())
    index = torch.tensor(order)
    moved = None if labels is None else labels[index.to(labels.device)]
    return Paired(truth, guesses[index.to(guesses.device)], moved, order)


def assigned(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """(B,) the column of `costs` (B, N) for each row, N >= B, with the least total of log(1 + c/s).

    s is `SMALL` of the median cost. With the least total of the costs themselves, an exact answer
    could go to another example that is far from all other answers, and would not be seen.

    Example:
        >>> assigned(np.array([[0.0, 0.06], [0.05, 0.12]])).tolist()
        [0, 1]
    """
    # The median is 0 if most costs are, as of exact answers for equal images.
    scale = SMALL * (np.median(costs) or costs.mean() or 1.0) if costs.size else 1.0
    order: NDArray[np.int64] = linear_sum_assignment(np.log1p(costs / scale))[1]
    return order
