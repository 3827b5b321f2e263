"""Products of matrices cell by cell, whose bits do not depend on how many cells there are.

BLAS takes other paths for other places in memory, and for single rows or columns of one matrix
alone: here each cell starts on a line of memory, and vectors are multiplied one cell at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from leakbound.r_operator.base import LINE


def product(left: Tensor, right: Tensor, added: Tensor | None = None) -> Tensor:
    """`added` plus products (N, m, n) of (N, m, k) and (N, k, n) that start at aligned places.

    Example:
        >>> product(torch.ones(2, 1, 3), torch.ones(2, 3, 1)).flatten()
        tensor([3., 3.])
    """
    shape = (*left.shape[:2], right.shape[2])
    if shape[1] == 1 or shape[2] == 1:
        return _vectors(left, right, added, rows(shape, left))
    if len(left) == 1 or shape[1] * shape[2] % LINE == 0:
        return torch.bmm(left, right) if added is None else torch.baddbmm(added, left, right)
    into = rows(shape, left)
    if added is None:
        return torch.bmm(left, right, out=into)
    return torch.baddbmm(added, left, right, out=into)


def _vectors(left: Tensor, right: Tensor, added: Tensor | None, into: Tensor) -> Tensor:
    for cell, own in enumerate(into):
        if into.shape[1] == 1:
            matrix, vector, place = right[cell].mT, left[cell, 0], own[0]
        else:
            matrix, vector, place = left[cell], right[cell, :, 0], own[:, 0]
        torch.mv(matrix, vector, out=place)
    return into if added is None else into.add_(added)


def more(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Another product on top of a total (N, m, n), in place."""
    if total.shape[1] == 1:
        for own, row, matrix in zip(total, left, right, strict=True):
            own[0].addmv_(matrix.mT, row[0])
    elif total.shape[2] == 1:
        for own, matrix, column in zip(total, left, right, strict=True):
            own[:, 0].addmv_(matrix, column[:, 0])
    else:
        total.baddbmm_(left, right)
    return total


def rows(shape: Sequence[int], like: Tensor) -> Tensor:
    """Empty memory of a shape (N, ...) in which each cell starts at an aligned place."""
    size = math.prod(shape[1:])
    return like.new_empty(shape[0], -(-size // LINE) * LINE)[:, :size].view(*shape)


def lined(a: Tensor) -> Tensor:
    """The same numbers, where each cell starts at an aligned place."""
    apart = len(a) == 1 or a.stride(0) % LINE == 0
    if apart and a.storage_offset() % LINE == 0 and a[0].is_contiguous():
        return a
    return rows(a.shape, a).copy_(a)
