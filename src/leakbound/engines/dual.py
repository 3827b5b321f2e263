"""Tensors that carry a tangent, typed: PyTorch's own two functions are not."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import forward_ad


def joined(plain: Tensor, moved: Tensor | None) -> Tensor:
    """A tensor with its tangent, which may be None."""
    if moved is None:
        return plain
    dual: Tensor = forward_ad.make_dual(plain, moved)  # type: ignore[no-untyped-call]
    return dual


def parted(dual: Tensor) -> tuple[Tensor, Tensor | None]:
    """The tensor itself and its tangent, None where it carries none."""
    plain, moved = forward_ad.unpack_dual(dual)  # type: ignore[no-untyped-call]
    return plain, moved
