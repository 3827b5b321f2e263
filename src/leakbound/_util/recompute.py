"""Functions whose graph is not kept: the backward pass computes it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Tensor],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return _value(function, tensors, ctx.needs_input_grad[1:])[1].detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        leaves, value = _value(ctx.function, ctx.saved_tensors, needed)
        wanted = [leaf for leaf, need in zip(leaves, needed, strict=True) if need]
        slopes = iter(torch.autograd.grad(value, wanted, cotangent, materialize_grads=True))
        return None, *(next(slopes) if need else None for need in needed)


def _value(
    function: Callable[..., Tensor],
    tensors: tuple[Tensor, ...],
    needed: tuple[bool, ...],
) -> tuple[list[Tensor], Tensor]:
    """Fresh leaves, and the function of them. Both passes call it, so they see equal bits."""
    pairs = zip(tensors, needed, strict=True)
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_(need) for tensor, need in pairs]
        return leaves, function(*leaves)


def recomputed(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """The function of tensors, with derivatives of the first order in those that require them.

    Nothing of the graph stays in memory until the backward pass, which calls the function again. It
    must give the same value in each call, and depend on no other tensor that requires a gradient.

    Example:
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> torch.autograd.grad(recomputed(torch.square, x), x)
        (tensor(6.),)
    """
    return _Recomputed.apply(function, *tensors)  # type: ignore[no-untyped-call, no-any-return]
