"""Linear and Conv2d for tensors that carry tangents, without work on tangents that are zero.

PyTorch's own forward-mode rules also push a zero change of the weights through the layer, which
makes three products where two are due. Weights here are constants.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_input
from torch.overrides import TorchFunctionMode

from leakbound.engines.dual import joined, parted


class ConstantWeights(TorchFunctionMode):
    """While active, linear maps and 2-d convolutions treat their weights as constants.

    Only calls on weights that neither require a gradient nor carry a tangent are replaced, and
    plain cross-entropy; values and derivatives are those of PyTorch up to rounding.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.linear and len(args) in (2, 3) and not kwargs:
            x, weight, bias = (*args, None)[:3]
            if _constant(weight) and _constant(bias):
                return _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        if func is nn.functional.conv2d and len(args) == 7 and not kwargs:
            x, weight, bias, stride, padding, dilation, groups = args
            known = not isinstance(padding, str) and x.ndim == 4
            if known and _constant(weight) and _constant(bias):
                how = (stride, padding, dilation, groups)
                return _Conv.apply(x, weight, bias, how)  # type: ignore[no-untyped-call]
        if func is nn.functional.cross_entropy and len(args) == 2 and not kwargs:
            x, labels = args
            whole = labels.ndim == 1 and not labels.is_floating_point()
            if x.ndim == 2 and whole and bool((labels >= 0).all()):
                # PyTorch's own tangent of this takes as long as a layer
                return -torch.log_softmax(x, 1).gather(1, labels[:, None]).mean()
        return func(*args, **(kwargs or {}))


def _constant(weight: Tensor | None) -> bool:
    if weight is None:
        return True
    return not weight.requires_grad and parted(weight)[1] is None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def jvp(ctx: Any, x: Tensor, *_: Any) -> Tensor:
        return nn.functional.linear(x, ctx.weight)

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor) -> Any:
        plain, moved = parted(deltas[0])
        return (
            joined(plain @ ctx.weight, None if moved is None else moved @ ctx.weight),
            None,
            None,
        )


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Any) -> Tensor:
        ctx.weight, ctx.how, ctx.shape = weight, how, x.shape
        return nn.functional.conv2d(x, weight, bias, *how)

    @staticmethod
    def jvp(ctx: Any, x: Tensor, *_: Any) -> Tensor:
        return nn.functional.conv2d(x, ctx.weight, None, *ctx.how)

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor) -> Any:
        def pulled(delta: Tensor) -> Tensor:
            back: Tensor = conv2d_input(  # type: ignore[no-untyped-call]
                ctx.shape, ctx.weight, delta, *ctx.how
            )
            return back

        plain, moved = parted(deltas[0])
        back = joined(pulled(plain), None if moved is None else pulled(moved))
        return back, None, None, None
