"""The row space of a noisy matrix of known rank, some of whose entries may be withheld."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDS, PENALTIES = 100, (0.1, 1e-8)
TINY = 1e-300


class NotSeparable(ValueError):
    """Why mixtures cannot be taken apart: too few of them, or too low a rank."""


@dataclass(frozen=True, eq=False)
class RowSpace:
    """The fit `left @ inner` of a matrix (h, n) by one of rank B; float64.

    Attributes:
        left: (h, B).
        inner: (B, n), with orthogonal rows.
        noise: (B, B) covariance of the error of a typical column of `inner`.
        level: variance of the noise on an entry of weight 1.
        clear: how many of the B directions stand out from the noise.
    """

    left: Tensor
    inner: Tensor
    noise: Tensor
    level: float
    clear: int


def row_space(matrix: Tensor, rank: int, weights: Tensor | None = None) -> RowSpace:
    """The best fit of rank `rank` in weighted squares, and how noisy it is.

    The level of the noise is read from what the fit leaves.

    Shapes:
        matrix (h, n); weights (h, n), 1 / standard deviation of the noise up to a factor, 0 where
        an entry is not known. None: all are alike.

    Assumptions: noise that is independent between entries.

    Raises:
        NotSeparable: the matrix has fewer rows or columns than `rank`, or a lower rank.

    Example:
        >>> matrix = torch.outer(torch.arange(1.0, 4.0), torch.ones(5))
        >>> fit = row_space(matrix, 1)
        >>> bool((fit.left @ fit.inner - matrix).abs().max() < 1e-6), fit.clear
        (True, 1)
    """
    exact, matrix = torch.finfo(matrix.dtype).eps, matrix.double()
    weights = torch.ones_like(matrix) if weights is None else weights.double()
    matrix = torch.where(weights > 0, matrix, 0)
    seen = (weights > 0).any(1)
    full = matrix.new_zeros(len(matrix), rank)
    matrix, weights = matrix[seen], weights[seen]
    if min(matrix.shape) < rank:
        raise NotSeparable(
            f"{rank} sources need as many mixtures and values; "
            f"{matrix.shape[0]} mixtures of {matrix.shape[1]} values are seen"
        )
    by_row = weights.amax(1, keepdim=True)
    if bool((weights == by_row).all()):
        left, inner = _truncated(matrix * by_row, rank)
        left, columns = left / by_row, by_row
    else:
        left, inner = _weighted(matrix, rank, weights)
        columns = weights
    size = inner.norm(dim=1)
    if not bool(size.min() > 30 * exact * size.max()):
        raise NotSeparable(f"the mixtures have a rank below {rank}")
    level = _level(weights * (matrix - left @ inner), weights, rank)
    noise = level * torch.linalg.inv(_grams(left, columns.square()).mean(0))
    share = float((weights > 0).double().mean())
    edge = math.sqrt(level) * sum(math.sqrt(side * share) for side in matrix.shape)
    loud = left * weights.square().mean(1, keepdim=True).sqrt()
    sides = [torch.linalg.qr(side, mode="r")[1] for side in (loud, inner.T)]
    strength = torch.linalg.svdvals(sides[0] @ sides[1].T)
    full[seen] = left
    return RowSpace(full, inner, noise, level, int((strength > 1.02 * edge).sum()))


def fit_column(left: Tensor, column: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients (B,) of a column (h,) in `left` (h, B), and their covariance at noise 1."""
    scaled = weights.double()[:, None] * left
    inverse = torch.linalg.pinv(scaled.T @ scaled, rtol=1e-14, hermitian=True)
    return inverse @ (scaled.T @ (weights * column).double()), inverse


def _truncated(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The `rank` largest singular directions, from the smaller of the two Gram matrices."""
    tall = matrix.shape[0] > matrix.shape[1]
    small = matrix.T if tall else matrix
    left = torch.linalg.eigh(small @ small.T)[1][:, -rank:].flip(1)
    inner = left.T @ small
    if not tall:
        return left, inner
    size = inner.norm(dim=1).clamp_min(TINY)
    return (inner / size[:, None]).T, left.T * size[:, None]


def _weighted(matrix: Tensor, rank: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Alternating weighted least squares from the fit of the matrix filled with zeros.

    Both factors have a penalty that falls to next to nothing: straight to the least squares, the
    rounds end in fits that go through what is seen and nowhere else.
    """
    weight = (weights / weights.max()).square()
    left, inner = _truncated(weight * matrix, rank)
    largest = float(inner.norm(dim=1).max())
    root = (inner.norm(dim=1) * left.norm(dim=0)).sqrt()
    left = left / left.norm(dim=0) * root
    for done in range(ROUNDS):
        share = min(1.0, done / (0.7 * ROUNDS))
        ridge = largest * PENALTIES[0] ** (1 - share) * PENALTIES[1] ** share
        inner = _solve(left, matrix, weight, ridge)
        left = _solve(inner.T, matrix.T, weight.T, ridge).T
    left, turn = torch.linalg.qr(left)
    across, inner = _truncated(turn @ inner, rank)
    return left @ across, inner


def _solve(left: Tensor, matrix: Tensor, weight: Tensor, ridge: float) -> Tensor:
    """For every column its weighted, penalized least squares in `left`, (B, n)."""
    right = (weight * matrix).T @ left
    solved: Tensor = torch.linalg.solve(_grams(left, weight, ridge), right[:, :, None])[:, :, 0]
    return solved.T


def _grams(left: Tensor, weight: Tensor, ridge: float = 0.0) -> Tensor:
    """(n, B, B) the normal matrix of every column."""
    rank = left.shape[1]
    flat = weight.T @ (left[:, :, None] * left[:, None, :]).flatten(1)
    regular = (ridge + TINY) * torch.eye(rank).to(flat)
    gram: Tensor = flat.reshape(-1, rank, rank) + regular
    return gram


def _level(left_over: Tensor, weights: Tensor, rank: int) -> float:
    """Variance of the noise at weight 1, from what a fit of that rank leaves."""
    rows, columns = left_over.shape
    free = int((weights > 0).sum()) - rank * (rows + columns - rank)
    return float(left_over.square().sum()) / free if free > 0 else 0.0
