"""Chance levels of measures of images, such as the raw NMI."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from leakbound import check
from leakbound.metrics import Metric, Values
from leakbound.pairing import Paired
from leakbound.randomness import permutation

__all__ = ["Chance", "chance"]


@dataclass(frozen=True)
class Chance:
    """One image's value of a measure, and the scores of candidates that do not depend on it.

    Attributes:
        permuted: mean over random orders of the reconstruction's own pixels.
        unrelated: mean over other real images instead of the reconstruction.
        permuted_error, unrelated_error: their standard errors; None for fewer than two values.
    """

    value: float | None
    permuted: float | None
    permuted_error: float | None
    unrelated: float | None
    unrelated_error: float | None

    @property
    def corrected(self) -> float | None:
        """(value - permuted) / (1 - permuted): 1 for the best value 1, 0 by chance, on average."""
        if self.value is None or self.permuted is None or self.permuted >= 1:
            return None
        return (self.value - self.permuted) / (1 - self.permuted)


def chance(
    metric: Metric,
    paired: Paired,
    source: torch.Generator,
    *,
    data_range: float,
    others: Tensor,
    permutations: int = 20,
) -> list[Chance]:
    """The chance level of a measure for every image.

    Shapes: others (D, *S).

    Args:
        metric: any that takes no distractors.
        paired: truth and reconstruction.
        source: of the random orders.
        data_range: as in `nmi`.
        others: real images of the same kind that are not in the batch; may be empty.
        permutations: random orders of each reconstruction's pixels (of all channels together).

    Raises:
        ValueError: others of another shape, fewer than one permutation.

    Example:
        >>> from leakbound.metrics import INFORMATION
        >>> from leakbound.randomness import stream, uniform
        >>> from leakbound.core import Batch
        >>> a, b = (uniform((1, 1, 28, 28), stream(0, k)) for k in ("a", "b"))
        >>> guess = Paired(Batch(a, torch.tensor([0])), b, None, (0,))
        >>> (level,) = chance(INFORMATION[0], guess, stream(1), data_range=1.0, others=b)
        >>> round(level.value, 2), round(level.permuted, 2)
        (0.76, 0.76)
    """
    check.count(permutations=permutations)
    if others.shape[1:] != paired.inputs.shape[1:]:
        raise ValueError(
            f"others holds images {tuple(others.shape[1:])} and the reconstruction "
            f"{tuple(paired.inputs.shape[1:])}; give images of one shape"
        )

    def scores(guesses: Sequence[Tensor]) -> list[Values]:
        found = [
            metric.function(replace(paired, inputs=guess), data_range=data_range)
            for guess in guesses
        ]
        return [[values[i] for values in found] for i in range(len(paired.inputs))]

    values = metric.function(paired, data_range=data_range)
    shuffled = scores([_shuffled(paired.inputs, source) for _ in range(permutations)])
    unrelated = scores([other.expand_as(paired.inputs) for other in others])
    return [
        Chance(value, *_mean(own), *_mean(foreign))
        for value, own, foreign in zip(values, shuffled, unrelated, strict=True)
    ]


def _shuffled(images: Tensor, source: torch.Generator) -> Tensor:
    flat = images.flatten(1)
    rows = [row[permutation(len(row), source).to(row.device)] for row in flat]
    return torch.stack(rows).reshape(images.shape)


def _mean(values: Values) -> tuple[float | None, float | None]:
    known = [v for v in values if v is not None]
    if not known:
        return None, None
    error = float(np.std(known, ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else None
    return math.fsum(known) / len(known), error
