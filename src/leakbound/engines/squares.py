"""Sums of squared per-example tangents, layer by layer, from what the taps recorded.

With a layer's input `a`, its output's delta `d` and their changes `da`, `dd` along one direction an
example, the example's weight gradient `d a^T` changes by `dd a^T + d da^T`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.nn.grad import conv2d_weight

from leakbound.client import plain_attention

_CACHED = 2**18


class Power(NamedTuple):
    """Over lanes with values q >= 0: `total` is the sum of q, `norm` the root of the sum of q^2."""

    total: Tensor
    norm: Tensor

    def plus(self, other: Power) -> Power:
        """The sums over both sets of lanes."""
        return Power(self.total + other.total, torch.hypot(self.norm, other.norm))


@dataclass(frozen=True, eq=False)
class Tapped:
    """One layer's input (N, ...) and delta (N, ...) with their changes along each lane."""

    a: Tensor
    da: Tensor
    d: Tensor
    dd: Tensor


def of_lanes(changes: Tensor) -> Power:
    """The sums over the lanes of squared changes (N, *T), each (*T)."""
    square = changes.square()
    total, top = square.sum(0), square.amax().clamp_min(torch.finfo(square.dtype).tiny)
    # float32 loses squares below 1e-19; relative to the largest they are harmless
    return Power(total, square.div_(top).square_().sum(0).sqrt_().mul_(top))


def layer_powers(
    module: nn.Module, tapped: Tapped, tensors: Mapping[str, Tensor]
) -> dict[str, Power]:
    """The sums for every parameter of a layer; `tensors` are its parameters and buffers."""
    if matrix_like(module):
        parts = {"weight": _weight_power(module, tapped)}
        if module.bias is not None:
            parts["bias"] = of_lanes(over_positions(module, tapped.dd))
        return parts
    return {name: of_lanes(moved) for name, (_, moved) in _local(module, tapped, tensors).items()}


def layer_gradient(
    module: nn.Module, tapped: Tapped, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The gradient summed over the lanes, for every parameter of a layer."""
    a, d = tapped.a, tapped.d
    if not matrix_like(module):
        each = _local(module, tapped, tensors)
        return {name: plain.sum(0) for name, (plain, _) in each.items()}
    if isinstance(module, nn.Conv2d):
        weight = conv2d_weight(  # type: ignore[no-untyped-call]
            a, module.weight.shape, d, module.stride, module.padding, module.dilation
        )
    else:
        weight = d.flatten(0, -2).T @ a.flatten(0, -2)
    parts = {"weight": weight}
    if module.bias is not None:
        parts["bias"] = over_positions(module, d).sum(0)
    return parts


def matrix_like(module: nn.Module) -> bool:
    """Whether the layer is a plain Linear, or a plain Conv2d without groups, padded with zeros."""
    if type(module) is nn.Linear:
        return True
    return (
        type(module) is nn.Conv2d
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def lane_elements(module: nn.Module, a: Tensor, out: Tensor) -> int:
    """About how many numbers one lane needs at this layer, given one lane's input and output."""
    size = sum(p.numel() for p in module.parameters(recurse=False))
    # a plain layer's gradients take a few lanes at a time, or none at all
    each = not matrix_like(module) or (isinstance(module, nn.Linear) and a.ndim > 2)
    return 4 * a.numel() + 6 * out.numel() + 4 * size * each


def _weight_power(module: nn.Module, tapped: Tapped) -> Power:
    if tapped.a.ndim == 2:
        return _outer_power(tapped)
    a, da, d, dd = tapped.a, tapped.da, tapped.d, tapped.dd
    if isinstance(module, nn.Conv2d):
        d, dd, view = d.flatten(2), dd.flatten(2), _Windows(module, a)
    else:
        a, da, d, dd = (part.flatten(1, -2) for part in (a, da, d, dd))
        d, dd, view = d.mT, dd.mT, None
    sums: Power | None = None
    shape: torch.Size = module.weight.shape  # type: ignore[assignment]
    for start in range(0, len(a), view.step if view else len(a)):
        few = slice(start, start + view.step if view else len(a))
        change = torch.bmm(dd[few], view(a[few]) if view else a[few])
        change.baddbmm_(d[few], view(da[few]) if view else da[few])
        part = of_lanes(change.view(-1, *shape))
        sums = part if sums is None else sums.plus(part)
    assert sums is not None  # there is at least one lane
    return sums


class _Windows:
    """What a convolution sees, (N, L, C k k), for a few lanes at a time in one small buffer."""

    def __init__(self, module: nn.Conv2d, a: Tensor) -> None:
        self.padding = tuple(int(pad) for pad in module.padding)
        self.axes = tuple(zip(module.kernel_size, module.dilation, module.stride, strict=True))
        out = [
            (side + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for side, pad, (kernel, dilation, stride) in zip(
                a.shape[2:], self.padding, self.axes, strict=True
            )
        ]
        shape = (a.shape[1], *module.kernel_size, *out)
        self.step = max(1, _CACHED // max(math.prod(shape), module.weight.numel()))
        self.buffer = a.new_empty(min(self.step, len(a)), *shape)

    def __call__(self, a: Tensor) -> Tensor:
        high, wide = self.padding
        a = nn.functional.pad(a, (wide, wide, high, high))
        for axis, (kernel, dilation, stride) in enumerate(self.axes, start=2):
            a = a.unfold(axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
        few = self.buffer[: len(a)].copy_(a.permute(0, 1, 4, 5, 2, 3))
        return few.flatten(4).flatten(1, 3).mT


def _outer_power(tapped: Tapped) -> Power:
    """The sums of (dd a^T + d da^T)^2 and of its square, as two products of matrices."""
    (a, da), left = scaled(tapped.a, tapped.da)
    (d, dd), right = scaled(tapped.d, tapped.dd)
    scale = (left * right).square()
    left2, mixed, right2 = dd * dd, dd * d, d * d
    rows2, columns2 = torch.cat([left2, 2 * mixed, right2]), torch.cat([a * a, a * da, da * da])
    squares = rows2.T @ columns2
    rows4 = [left2 * left2, 4 * left2 * mixed, 6 * mixed * mixed, 4 * mixed * right2]
    first, cross, last = columns2.chunk(3)
    columns4 = [first * first, first * cross, cross * cross, cross * last, last * last]
    fourths = torch.cat([*rows4, right2 * right2]).T @ torch.cat(columns4)
    # both are sums of squares; rounding may leave a little below 0
    return Power(squares.clamp_min_(0) * scale, fourths.clamp_min_(0).sqrt_() * scale)


def scaled(x: Tensor, dx: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Both over the larger one's largest entry, and that entry."""
    top = torch.maximum(x.abs().amax(), dx.abs().amax())
    top = top.clamp_min(torch.finfo(x.dtype).tiny)
    return (x / top, dx / top), top


def over_positions(module: nn.Module, d: Tensor) -> Tensor:
    """What a bias gets of every lane's delta (N, ...): sums over the positions."""
    if isinstance(module, nn.Conv2d):
        return d.flatten(2).sum(2)
    return d.flatten(1, -2).sum(1) if d.ndim > 2 else d


def _local(
    module: nn.Module, tapped: Tapped, tensors: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Any other layer: every lane's own gradient and its change, from the layer alone."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    own = {name: tensors[name] for name in names}

    def pulled(a: Tensor, d: Tensor) -> dict[str, Tensor]:
        def run(weights: dict[str, Tensor]) -> Tensor:
            out: Tensor = functional_call(module, {**tensors, **weights}, (a[None],))
            return out

        grads: dict[str, Tensor] = vjp(run, own)[1](d[None])[0]
        return grads

    def lane(a: Tensor, da: Tensor, d: Tensor, dd: Tensor) -> tuple[dict[str, Tensor], ...]:
        both: tuple[dict[str, Tensor], ...] = jvp(pulled, (a, d), (da, dd))
        return both

    with plain_attention():
        plain, moved = vmap(lane)(tapped.a, tapped.da, tapped.d, tapped.dd)
    return {name: (plain[name], moved[name]) for name in names}
