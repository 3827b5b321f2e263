"""Products of matrices cell by cell, whose bits do not depend on how many cells there are.

BLAS takes other paths for other places in memory, and for single columns of one matrix alone: here
each cell starts on a line of memory, and columns are multiplied one cell at a time. Results go to
memory that is kept: new memory of this size costs as much as the products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from leakbound.engines.base import LINE


def product(left: Tensor, right: Tensor, added: Tensor | None, into: Tensor) -> Tensor:
    """`added` plus products (N, m, n) of (N, m, k) and (N, k, n), all at aligned places.

    Example:
        >>> product(torch.ones(2, 1, 3), torch.ones(2, 3, 1), None, torch.empty(2, 1, 1)).flatten()
        tensor([3., 3.])
    """
    if into.shape[2] == 1:
        for own, matrix, column in zip(into, left, right, strict=True):
            torch.mv(matrix, column[:, 0], out=own[:, 0])
        return into if added is None else into.add_(added)
    if added is None:
        return torch.bmm(left, right, out=into)
    return torch.baddbmm(added, left, right, out=into)


def more(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Another product on top of a total (N, m, n), in place."""
    if total.shape[2] != 1:
        return total.baddbmm_(left, right)
    for own, matrix, column in zip(total, left, right, strict=True):
        own[:, 0].addmv_(matrix, column[:, 0])
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
