"""Distances between reconstruction and truth: one number for each image and metric.

A metric takes `Paired` images and their `data_range` (high - low, in input units, never estimated
from the pixels). It returns one number per image, or None if it is not defined. Everything is
computed in float64 on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakbound import check
from leakbound._util.decibels import PSNR_CAP, capped_psnr, mse_of_psnr, psnr_of_mse
from leakbound.domains import has_neighbors
from leakbound.pairing import Paired

__all__ = [
    "METRICS",
    "PSNR_CAP",
    "Metric",
    "Values",
    "evaluate",
    "label_accuracy",
    "ms_ssim",
    "mse",
    "mse_of_psnr",
    "ncc",
    "psnr",
    "psnr_of_mse",
    "rmse",
    "ssim",
]

Values = list[float | None]

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


def mse(paired: Paired, *, data_range: float) -> Values:
    """Mean squared error over all pixels and channels, in squared input units."""
    return [*_errors(paired, data_range)]


def rmse(paired: Paired, *, data_range: float) -> Values:
    """Root of the mean squared error, in input units."""
    return [math.sqrt(error) for error in _errors(paired, data_range)]


def psnr(paired: Paired, *, data_range: float) -> Values:
    """Peak signal-to-noise ratio 10 log10(R^2 / MSE) in dB, at most `PSNR_CAP`."""
    return [capped_psnr(error, data_range) for error in _errors(paired, data_range)]


def ssim(paired: Paired, *, data_range: float) -> Values:
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


def ms_ssim(paired: Paired, *, data_range: float) -> Values:
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


def ncc(paired: Paired, *, data_range: float) -> Values:
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


def label_accuracy(paired: Paired, *, data_range: float) -> Values:
    """The share of an example's labels (usually one) that is right; None if there are none."""
    if paired.labels is None:
        return [None] * len(paired.inputs)
    inferred, true = (x.cpu().reshape(len(x), -1) for x in (paired.labels, paired.truth.labels))
    right = torch.isclose(inferred.double(), true.double(), atol=_SAME)
    return right.double().mean(1).tolist()


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
