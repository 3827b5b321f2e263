"""The most likely unmixing of sources whose law is known in kind, free to be correlated."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from leakbound.attacks.features.contrast import minimized, whitener
from leakbound.attacks.features.lowrank import RowSpace

WIDTHS, BENDS, COST = (0.1, 0.03, 0.01), (0.03, 0.01, 0.001), 8.0
SLOPES = ((1.0, 0.02), (4.0, 0.02), (16.0, 0.02), (64.0, 0.005), (256.0, 0.005))
EXACT = 1e-5
ROUNDS, SHRINK, LEAST = 30, 0.7, 1e-6


def heavy_tailed(unmixing: Tensor, rows: Tensor, fit: RowSpace | None = None) -> Tensor:
    """The unmixing W (B, B) of symmetric, heavy-tailed sources W @ rows, near the one given.

    Minimizes sum_i mean_t |s_it| - log |det W|, the likelihood of Laplace-distributed values; on
    differences of images that is their total variation. The absolute value is smoothed less and
    less. With a `fit`, the sources W @ fit.inner are not negative: below 0 they cost.
    """
    base = whitener(rows)
    white, turn = base @ rows, unmixing @ torch.linalg.inv(base)
    if fit is not None:
        inner, quiet = base @ fit.inner, base @ fit.noise @ base.T
        turn = turn * (turn @ inner).mean(1, keepdim=True).sign()
        scale = float((turn @ inner).square().mean(1).sqrt().mean())
    for width, bend in zip(WIDTHS, BENDS, strict=True):

        def loss(w: Tensor, width: float = width, bend: float = bend) -> Tensor:
            size = ((w @ white).square() + width**2).sqrt().mean(1).sum()
            value: Tensor = size - torch.linalg.slogdet(w)[1]
            if fit is not None:
                value = value + COST * _below(w @ inner, w, quiet, bend * scale).mean(1).sum()
            return value

        turn = minimized(loss, turn)
    found: Tensor = turn @ base
    return found


def nonnegative(unmixing: Tensor, fit: RowSpace) -> Tensor:
    """The unmixing of sources that are at least 0, and often 0, near the one given.

    Minimizes sum_i mean_t r(s_it) - log |det W| with r(s) = s above 0 and -c s below, for a c that
    grows: among the unmixings whose sources have mean 1 and are hardly negative, the one of the
    largest volume. Within the noise's standard deviation of 0 the bend of r is smooth. Without
    noise each row is last moved to where most of its source's values are exactly 0.
    """
    size = fit.inner.norm(dim=1, keepdim=True) / fit.inner.shape[1] ** 0.5
    white, turn, quiet = fit.inner / size, unmixing * size.T, fit.noise / size / size.T
    turn = turn * (turn @ white).mean(1, keepdim=True).sign()
    turn = turn / (turn @ white).abs().mean(1, keepdim=True)
    for slope, width in SLOPES:

        def loss(w: Tensor, slope: float = slope, width: float = width) -> Tensor:
            rows = w @ white
            below = (slope + 1) * _below(rows, w, quiet, width)
            value: Tensor = (rows + below).mean(1).sum() - torch.linalg.slogdet(w)[1]
            return value

        turn = minimized(loss, turn)
    noise = ((turn @ quiet) * turn).sum(1).clamp_min(0).sqrt()
    if float(noise.max()) < EXACT:
        turn = _onto_zeros(turn, white)
    found: Tensor = turn / size.T
    return found


def _below(rows: Tensor, w: Tensor, quiet: Tensor, width: float) -> Tensor:
    """How far values are below 0, smooth within `width` and the noise's standard deviation."""
    bend = ((w @ quiet) * w).sum(1, keepdim=True).clamp_min(1e-30).sqrt() + width
    soft: Tensor = bend * functional.softplus(-rows / bend)
    return soft


def _onto_zeros(turn: Tensor, white: Tensor) -> Tensor:
    """Least squares, reweighted by 1 / (s^2 + w^2) with a shrinking w."""
    width = 0.1
    for _ in range(ROUNDS):
        rows = turn @ white
        turn = turn / rows.square().mean(1, keepdim=True).sqrt()
        near = 1 / ((turn @ white).square() + width**2)
        moments = torch.stack([(white * row) @ white.T for row in near])
        least = torch.linalg.eigh(moments)[1][:, :, 0]
        turn = least * (least * turn).sum(1, keepdim=True).sign()
        width = max(SHRINK * width, LEAST)
    return turn
