"""Modules whose weights have memory, but no values yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def unfilled(build: Callable[[], Module]) -> Module:
    """The module from `build`, on the CPU, with undefined weights; draws no random number.

    As `Module.to_empty`, which imports sympy and PyTorch's shape compiler.
    """
    with torch.device("meta"):
        module = build()

    def memory(value: Tensor) -> Tensor:
        return torch.empty(value.shape, dtype=value.dtype)

    module._apply(memory)  # type: ignore[no-untyped-call]
    return module
