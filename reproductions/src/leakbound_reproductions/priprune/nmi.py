"""How much a reconstruction reveals about the true gray levels: measures and chance levels.

Both images are rounded to 256 gray levels; every pixel of every channel is one entry, and its level
is the entry's label. None of these is a bound, and none uses pixel positions or the distance of
levels. The raw `nmi` of unrelated images is far above 0 (see `chance`); `adjusted_mi` is 0 for them
on average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import gammaln
from torch import Tensor

from leakbound import check
from leakbound.metrics import Metric, Values
from leakbound.pairing import Paired
from leakbound.randomness import permutation

__all__ = [
    "INFORMATION",
    "NORMALIZERS",
    "Chance",
    "adjusted_mi",
    "binned_nmi",
    "chance",
    "gray_levels",
    "nmi",
]

LEVELS = 256
BINS = 16

NORMALIZERS: dict[str, Callable[[float, float], float]] = {
    "arithmetic": lambda a, b: (a + b) / 2,
    "geometric": lambda a, b: math.sqrt(a * b),
    "max": max,
    "min": min,
}
"""The normalizer of the mutual information, from the two entropies."""

_Array = NDArray[Any]


def gray_levels(images: Tensor, *, data_range: float, low: float = 0.0) -> _Array:
    """(B, entries) whole numbers 0..255: clamped to [low, low + data_range] and rounded.

    Example:
        >>> gray_levels(torch.tensor([[-1.0, 0.0, 0.5, 1.0]]), data_range=1.0).tolist()
        [[0, 0, 128, 255]]
    """
    check.positive(data_range=data_range)
    check.finite("images", images)
    shares = (images.detach().cpu().double().flatten(1) - low) / data_range
    return np.floor(shares.clamp(0, 1).numpy() * (LEVELS - 1) + 0.5).astype(np.int64)


def nmi(
    paired: Paired, *, data_range: float, low: float = 0.0, normalizer: str = "arithmetic"
) -> Values:
    """Mutual information of the gray levels divided by the mean of their entropies, in [0, 1].

    None if the normalizer is 0: both images are constant (`min`, `geometric`: one of them).

    Args:
        paired: truth and reconstruction; the truth lies in [low, low + data_range].
        data_range: high - low, in input units.
        low: the value of black, in input units.
        normalizer: "arithmetic", "geometric", "max" or "min".

    Raises:
        ValueError: an unknown normalizer, or a truth outside the range.

    Source: Chu et al. 2024 (PriPrune), section 6; the normalizer is not legible there.

    Example:
        >>> from leakbound.core import Batch
        >>> truth = Batch(torch.tensor([[[[0.0, 0.0], [1.0, 1.0]]]]), torch.tensor([0]))
        >>> negative = Paired(truth, 1 - truth.inputs, None, (0,))
        >>> nmi(negative, data_range=1.0)
        [1.0]
    """
    return _each(paired, data_range, low, 1, normalizer)


def binned_nmi(
    paired: Paired, *, data_range: float, low: float = 0.0, normalizer: str = "arithmetic"
) -> Values:
    """`nmi` with 16 bins of 16 gray levels: its chance level is lower."""
    return _each(paired, data_range, low, LEVELS // BINS, normalizer)


def adjusted_mi(
    paired: Paired, *, data_range: float, low: float = 0.0, normalizer: str = "arithmetic"
) -> Values:
    """(MI - E) / (normalizer - E), E the mean of MI over all orders of the pixels: 0 by chance.

    1 for the same image, below 0 if less is revealed than by chance. None if normalizer = E: both
    images are constant, or no two pixels of either are equal.

    Args:
        paired: truth and reconstruction.
        data_range: as in `nmi`.
        low: as in `nmi`.
        normalizer: as in `nmi`.

    Source: Vinh, Epps and Bailey, "Information theoretic measures for clusterings comparison",
    JMLR 2010.
    """
    return _each(paired, data_range, low, 1, normalizer, adjusted=True)


INFORMATION = (
    Metric("nmi", nmi, True, "", "normalized mutual information of 256 gray levels, raw"),
    Metric("binned_nmi", binned_nmi, True, "", "normalized mutual information of 16 gray levels"),
    Metric("adjusted_mi", adjusted_mi, True, "", "mutual information less its chance level"),
)
"""For `metrics.evaluate(..., more=INFORMATION)`, with images in [0, data_range]."""


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


def _each(
    paired: Paired,
    data_range: float,
    low: float,
    width: int,
    normalizer: str,
    *,
    adjusted: bool = False,
) -> Values:
    check.one_of(NORMALIZERS, normalizer=normalizer)
    truth = paired.truth.inputs
    guesses = gray_levels(paired.inputs, data_range=data_range, low=low) // width
    truths = gray_levels(truth, data_range=data_range, low=low) // width
    least = float(truth.min())
    most = float(truth.max())
    slack = 1e-6 * data_range
    if least < low - slack or most > low + data_range + slack:
        raise ValueError(
            f"low is {low:g} and data_range {data_range:g}, but the true images run from "
            f"{least:.6g} to {most:.6g}; give the low and the range of the inputs"
        )
    mean = NORMALIZERS[normalizer]
    return [_score(u, v, mean, adjusted) for u, v in zip(truths, guesses, strict=True)]


def _score(
    u: _Array, v: _Array, normalizer: Callable[[float, float], float], adjusted: bool
) -> float | None:
    joint = np.bincount(u * LEVELS + v, minlength=LEVELS**2).reshape(LEVELS, LEVELS)
    a = joint.sum(1)
    b = joint.sum(0)
    own = _entropy(a)
    other = _entropy(b)
    mutual = max(0.0, own + other - _entropy(joint))
    whole = normalizer(own, other)
    by_chance = _expected(a[a > 0], b[b > 0]) if adjusted else 0.0
    if whole - by_chance <= 1e-9:
        return None
    value = (mutual - by_chance) / (whole - by_chance)
    return min(1.0, value)


def _entropy(counts: _Array) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum()) + 0.0


def _expected(a: _Array, b: _Array) -> float:
    """The mean mutual information (nats) over all orders of labels with these counts.

    The count of a table cell is hypergeometric; equal counts are computed once. Terms more than 10
    standard deviations + 40 from a table cell's mean are left out: less than 1e-20 of it
    (Bernstein).
    """
    total = int(a.sum())
    logs = gammaln(np.arange(total + 1) + 1.0)
    (ones, often), (others, times) = (np.unique(x, return_counts=True) for x in (a, b))
    found = 0.0
    for one, weight in zip(ones.tolist(), often.tolist(), strict=True):
        center = one * others / total
        spread = 10 * np.sqrt(center * (1 - others / total) * (1 - one / total)) + 41
        first = np.maximum(np.maximum(1, one + others - total), np.floor(center - spread))
        last = np.minimum(np.minimum(one, others), np.ceil(center + spread))
        width = int((last - first).max()) + 1
        n = first.astype(np.int64)[:, None] + np.arange(width)
        inside = n <= last[:, None]
        n = np.where(inside, n, last.astype(np.int64)[:, None])
        b_ = others[:, None]
        log_share = logs[one] + logs[total - one] - logs[total] + logs[b_] + logs[total - b_]
        log_share = log_share - logs[n] - logs[one - n] - logs[b_ - n] - logs[total - one - b_ + n]
        told = n / total * np.log(total * n / (float(one) * b_))
        found += weight * float((times[:, None] * inside * told * np.exp(log_share)).sum())
    return found
