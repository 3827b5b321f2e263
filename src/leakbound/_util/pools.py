"""Fast max pools on a CPU, with the same bits as PyTorch's own.

PyTorch pools images several times faster if their channels come last in memory. The largest entry
of a window is the same number in either order, and so is its place.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Sides = int | tuple[int, int]


def quick(model: nn.Module) -> AbstractContextManager[object]:
    """While active, the max pools of `model` are faster (their derivatives are slower)."""
    return _Quick() if any(type(m) is nn.MaxPool2d for m in model.modules()) else nullcontext()


class _Quick(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.max_pool2d and _plain(args[0]):
            return _pooled(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _plain(x: Any) -> bool:
    if type(x) is not Tensor or torch._C._functorch.peek_interpreter_stack() is not None:
        return False  # inside vmap a tensor does not reveal its memory layout
    return x.device.type == "cpu" and x.ndim == 4 and x.is_contiguous()


def _pooled(
    x: Tensor,
    kernel_size: Sides,
    stride: Sides | None = None,
    padding: Sides = 0,
    dilation: Sides = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """As `nn.functional.max_pool2d`, which comes here only without `return_indices`."""
    last = x.contiguous(memory_format=torch.channels_last)
    how = (kernel_size, stride, padding, dilation, ceil_mode)
    return nn.functional.max_pool2d(last, *how).clone(memory_format=torch.contiguous_format)
