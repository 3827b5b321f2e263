"""Distances between reconstruction and truth: one number for each image and metric.

A metric takes `Paired` images and their `data_range` (high - low, in input units, never estimated
from the pixels). It returns one number per image, or None if it is not defined. Everything is
computed in float64 on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import gammaln
from torch import Tensor

from leakbound import check
from leakbound._util.decibels import PSNR_CAP, capped_psnr, mse_of_psnr, psnr_of_mse
from leakbound.domains import has_neighbors
from leakbound.pairing import Paired

__all__ = [
    "INFORMATION",
    "METRICS",
    "NORMALIZERS",
    "PSNR_CAP",
    "Metric",
    "Values",
    "adjusted_mi",
    "binned_nmi",
    "evaluate",
    "gray_levels",
    "information",
    "label_accuracy",
    "ms_ssim",
    "mse",
    "mse_of_psnr",
    "ncc",
    "nmi",
    "psnr",
    "psnr_of_mse",
    "rmse",
    "ssim",
]

Values = list[float | None]

_LEVELS = 256
_BINS = 16

NORMALIZERS: dict[str, Callable[[float, float], float]] = {
    "arithmetic": lambda a, b: (a + b) / 2,
    "geometric": lambda a, b: math.sqrt(a * b),
    "max": max,
    "min": min,
}
"""The normalizer of the mutual information, from the two entropies."""

_Array = NDArray[Any]

_WINDOW = 11
_SIGMA = 1.5
_SAME = 1e-3
_SCALES = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)  # exponents of Wang et al. 2003
_MS_SSIM_SMALLEST = 176  # 11 pixels after four halvings


@dataclass(frozen=True)
class Metric:
    """A metric and what a report needs to show it.

    Attributes:
        unit: "" if the number has none.
    """

    name: str
    function: Callable[..., Values]
    higher_is_better: bool
    unit: str
    description: str


def mse(
    paired: Paired,
    *,
    data_range: float,
) -> Values:
    """Mean squared error over all pixels and channels, in squared input units."""
    return [*_errors(paired, data_range)]


def rmse(
    paired: Paired,
    *,
    data_range: float,
) -> Values:
    """Root of the mean squared error, in input units."""
    return [math.sqrt(error) for error in _errors(paired, data_range)]


def psnr(
    paired: Paired,
    *,
    data_range: float,
) -> Values:
    """Peak signal-to-noise ratio 10 log10(R^2 / MSE) in dB, at most `PSNR_CAP`."""
    return [capped_psnr(error, data_range) for error in _errors(paired, data_range)]


def ssim(
    paired: Paired,
    *,
    data_range: float,
) -> Values:
    """Structural similarity: Gaussian window, standard deviation 1.5, 11 pixels wide.

    It is the mean over all places where the window lies inside the image. In an image with a side
    under 11 pixels, the window has the largest odd width that fits, and its standard deviation
    shrinks in proportion. Such values are not comparable with those of larger images. None below 3
    pixels.

    Source: Wang et al., "Image Quality Assessment", IEEE TIP 2004.
    """
    check.positive(data_range=data_range)
    answer, truth = _images(paired)
    side = _shortest_side(answer)
    if side < 3:
        return [None] * len(answer)
    window = min(_WINDOW, side - 1 + side % 2)
    return _similarity(answer, truth, data_range, window)[0].tolist()


def ms_ssim(
    paired: Paired,
    *,
    data_range: float,
) -> Values:
    """Structural similarity at five scales; None for images under 176 pixels, never fewer scales.

    Source: Wang, Simoncelli and Bovik, "Multi-scale structural similarity", Asilomar 2003.
    """
    check.positive(data_range=data_range)
    answer, truth = _images(paired)
    if _shortest_side(answer) < _MS_SSIM_SMALLEST:
        return [None] * len(answer)
    values = torch.ones(len(answer), dtype=torch.float64)
    for scale, weight in enumerate(_SCALES):
        whole, contrast = _similarity(answer, truth, data_range, _WINDOW)
        # A power of a negative contrast would be NaN.
        values *= (whole if scale == len(_SCALES) - 1 else contrast).relu() ** weight
        answer, truth = (torch.nn.functional.avg_pool2d(x, 2) for x in (answer, truth))
    return values.tolist()


def _similarity(
    answer: Tensor,
    truth: Tensor,
    data_range: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """The means (N,) of similarity and of its part for contrast, over all whole windows."""
    places = torch.arange(window, dtype=torch.float64) - window // 2
    # The softmax of negative squares is a Gaussian window that sums to 1.
    weights = torch.softmax(-((places * _WINDOW / window / _SIGMA) ** 2) / 2, 0)
    maps = torch.stack([answer, truth, answer**2, truth**2, answer * truth]).flatten(0, 2)[:, None]
    smooth = torch.nn.functional.conv2d(maps, weights[None, None, :, None])
    smooth = torch.nn.functional.conv2d(smooth, weights[None, None, None])
    a, b, aa, bb, ab = smooth.view(5, len(answer), -1)
    # K1 and K2 of Wang et al. 2004, which keep the quotients finite in flat areas.
    small = (0.01 * data_range) ** 2
    large = (0.03 * data_range) ** 2
    contrast = (2 * (ab - a * b) + large) / (aa - a**2 + bb - b**2 + large)
    whole = contrast * (2 * a * b + small) / (a**2 + b**2 + small)
    return whole.mean(1), contrast.mean(1)


def ncc(
    paired: Paired,
    *,
    data_range: float,
) -> Values:
    """Normalized cross-correlation in [-1, 1]: it ignores brightness and contrast.

    None if the reconstruction or the true image is constant.
    """
    answer, truth = (images.flatten(1) for images in _images(paired))
    constant = (answer.amax(1) == answer.amin(1)) | (truth.amax(1) == truth.amin(1))
    a = answer - answer.mean(1, keepdim=True)
    b = truth - truth.mean(1, keepdim=True)
    # The default eps would lower the value of faint images. Constant ones are None below.
    values = torch.nn.functional.cosine_similarity(a, b, dim=1, eps=0.0).clamp(-1, 1)
    return [None if skip else v for skip, v in zip(constant.tolist(), values.tolist(), strict=True)]


def label_accuracy(
    paired: Paired,
    *,
    data_range: float,
) -> Values:
    """The share of an example's labels (usually one) that is right; None if there are none."""
    if paired.labels is None:
        return [None] * len(paired.inputs)
    inferred, true = (x.cpu().reshape(len(x), -1) for x in (paired.labels, paired.truth.labels))
    right = torch.isclose(inferred.double(), true.double(), atol=_SAME)
    return right.double().mean(1).tolist()


def gray_levels(
    images: Tensor,
    *,
    data_range: float,
    low: float = 0.0,
) -> _Array:
    """(B, entries) whole numbers 0..255: clamped to [low, low + data_range] and rounded.

    Example:
        >>> gray_levels(torch.tensor([[-1.0, 0.0, 0.5, 1.0]]), data_range=1.0).tolist()
        [[0, 0, 128, 255]]
    """
    check.positive(data_range=data_range)
    check.finite("images", images)
    shares = (images.detach().cpu().double().flatten(1) - low) / data_range
    return np.floor(shares.clamp(0, 1).numpy() * (_LEVELS - 1) + 0.5).astype(np.int64)


def nmi(
    paired: Paired,
    *,
    data_range: float,
    low: float = 0.0,
    normalizer: str = "arithmetic",
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
    paired: Paired,
    *,
    data_range: float,
    low: float = 0.0,
    normalizer: str = "arithmetic",
) -> Values:
    """`nmi` with 16 bins of 16 gray levels: its chance level is lower."""
    return _each(paired, data_range, low, _LEVELS // _BINS, normalizer)


def adjusted_mi(
    paired: Paired,
    *,
    data_range: float,
    low: float = 0.0,
    normalizer: str = "arithmetic",
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


METRICS = (
    Metric("mse", mse, False, "squared input units", "mean squared error"),
    Metric("rmse", rmse, False, "input units", "root mean squared error"),
    Metric("psnr", psnr, True, "dB", "peak signal-to-noise ratio"),
    Metric("ssim", ssim, True, "", "structural similarity"),
    Metric("ms_ssim", ms_ssim, True, "", "structural similarity at five scales"),
    Metric("ncc", ncc, True, "", "normalized cross-correlation"),
    Metric("label_accuracy", label_accuracy, True, "", "share of right labels"),
)
"""Every metric that `evaluate` computes, in the order of a report."""


INFORMATION = (
    Metric("nmi", nmi, True, "", "normalized mutual information of 256 gray levels, raw"),
    Metric("binned_nmi", binned_nmi, True, "", "normalized mutual information of 16 gray levels"),
    Metric("adjusted_mi", adjusted_mi, True, "", "mutual information less its chance level"),
)
"""For `evaluate(..., more=INFORMATION)`, with images in [0, data_range]: what gray levels reveal.

Both images are rounded to 256 gray levels; every pixel of every channel is one entry, and its level
is the entry's label. None of these is a bound, and none uses pixel positions or the distance of
levels. The raw `nmi` of unrelated images is far above 0; `adjusted_mi` is 0 for them on average.
"""


def information(low: float) -> tuple[Metric, ...]:
    """`INFORMATION` for images whose lowest value is not 0."""
    return tuple(replace(one, function=partial(one.function, low=low)) for one in INFORMATION)


def evaluate(
    paired: Paired,
    *,
    data_range: float,
    more: Sequence[Metric] = (),
) -> dict[str, Values]:
    """All of `METRICS`, and `more`, on every image, by name."""
    return {
        metric.name: metric.function(paired, data_range=data_range) for metric in (*METRICS, *more)
    }


def _errors(paired: Paired, data_range: float) -> list[float]:
    check.positive(data_range=data_range)
    answer, truth = _images(paired)
    return (answer - truth).square().flatten(1).mean(1).tolist()


def _images(paired: Paired) -> tuple[Tensor, Tensor]:
    answer = paired.inputs
    truth = paired.truth.inputs
    return answer.detach().cpu().double(), truth.detach().cpu().double()


def _shortest_side(images: Tensor) -> int:
    return min(images.shape[2:]) if has_neighbors(images.shape[1:]) else 0


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
    u: _Array,
    v: _Array,
    normalizer: Callable[[float, float], float],
    adjusted: bool,
) -> float | None:
    joint = np.bincount(u * _LEVELS + v, minlength=_LEVELS**2).reshape(_LEVELS, _LEVELS)
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
