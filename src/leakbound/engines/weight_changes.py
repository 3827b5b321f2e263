"""Weight gradients of one layer, their changes along directions, and sums of squares of these.

With a layer's input `a` (n, ...), its output's delta `d` (n, ...) and their changes `da`, `dd`
along a direction, an example's gradient d a^T changes by dd a^T + d da^T. The plain chain has k
directions for every example: changes are (k, n, ...) and share the examples' `a` and `d`. In taps,
each pair of an example and a direction has separate tensors (`Tapped`). A bias is also computed for
layers without one, and then not used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap

from leakbound.client import plain_attention
from leakbound.engines.reader import plain_weights

_TOGETHER = 2**19
_GROUPED = 2**16
_CACHED = 2**18

PlainLayer = nn.Linear | nn.Conv2d


class Power(NamedTuple):
    """Over pairs with values q >= 0: `total` is the sum of q, `norm` the root of the sum of q^2."""

    total: Tensor
    norm: Tensor

    def plus(self, other: Power) -> Power:
        return Power(self.total + other.total, torch.hypot(self.norm, other.norm))


def power_of(changes: Tensor) -> Power:
    """The sums over pairs of squared changes (N, *T), each (*T)."""
    square = changes.square()
    total = square.sum(0)
    top = square.amax().clamp_min(torch.finfo(square.dtype).tiny)
    # float32 loses squares below 1e-19; relative to the largest they are harmless
    return Power(total, square.div_(top).square_().sum(0).sqrt_().mul_(top))


@dataclass(frozen=True, eq=False)
class Forward:
    """The contribution of more directions, which only pass forward, to a Linear's input (n, D).

    In (dd a + d da)^2 the part d^2 da^2 is averaged over k + m directions instead of k. `mean` is
    that of da^2 over the m. `share` is k / (k + m), the weight of the k full directions, and 0 if
    the mean is exact. `squares` is added to the sum over the k directions: share times the sum of
    da^2 over the m, k times an exact mean. `fourths` is share^2 times the sum of da^4.
    """

    mean: Tensor
    share: float
    squares: Tensor
    fourths: Tensor

    def of(self, examples: slice) -> Forward:
        parts = self.squares[examples], self.fourths[examples]
        return Forward(self.mean[examples], self.share, *parts)

    def power(self, d: Tensor) -> Power:
        """The addition to the sums over the full directions, given the deltas (n, O)."""
        top = d.abs().amax().clamp_min(torch.finfo(d.dtype).tiny)
        d2 = (d / top).square()
        norm = (d2.square().T @ self.fourths).sqrt_()
        return Power(d2.T @ self.squares * top**2, norm * top**2)


def powers(
    module: PlainLayer, a: Tensor, da: Tensor, d: Tensor, dd: Tensor, forward: Forward | None = None
) -> dict[str, Power]:
    """The sums over all pairs (j, b) of the squared changes of weight and bias.

    With `forward` (plain Linear layers only) the weight's are sums whose expectation is the same
    once `forward.power` is added; single ones may then be negative.
    """
    if is_outer(module, a):
        weight = _outer_power(a, da, d, dd, forward)
    else:
        weight = reduce(Power.plus, map(power_of, _each(module, a, da, d, dd)))
    return {"weight": weight, "bias": power_of(over_positions(module, dd.flatten(0, 1)))}


def gradient(module: PlainLayer, a: Tensor, d: Tensor) -> dict[str, Tensor]:
    return {"weight": _weight_gradient(module, a, d), "bias": over_positions(module, d).sum(0)}


def changes(module: PlainLayer, a: Tensor, da: Tensor, d: Tensor, dd: Tensor) -> dict[str, Tensor]:
    """The change (k, ...) of the summed gradient when all examples move along direction j."""
    pairs = zip(da, dd, strict=True)
    each = [_weight_gradient(module, torch.cat([a, x]), torch.cat([y, d])) for x, y in pairs]
    bias = over_positions(module, dd.flatten(0, 1)).view(*dd.shape[:2], -1).sum(1)
    return {"weight": torch.stack(each), "bias": bias}


def each_gradient(module: PlainLayer, a: Tensor, d: Tensor) -> dict[str, Tensor]:
    """Every example's own gradient, (n, ...)."""
    if is_outer(module, a):
        weight = d[:, :, None] * a[:, None]
    elif isinstance(module, nn.Linear):
        weight = torch.bmm(d.flatten(1, -2).mT, a.flatten(1, -2))
    else:
        weight = _of_each(module, a[None], d[None])
    return {"weight": weight, "bias": over_positions(module, d)}


def each_change(
    module: PlainLayer, a: Tensor, da: Tensor, d: Tensor, dd: Tensor
) -> dict[str, Tensor]:
    """The change (n, ...) of every example's own gradient along its own direction, k = 1."""
    if is_outer(module, a):
        weight = (dd[0, :, :, None] * a[:, None]).addcmul_(d[:, :, None], da[0, :, None])
    else:
        weight = torch.cat(list(_each(module, a, da, d, dd)))
    return {"weight": weight, "bias": over_positions(module, dd[0])}


def convolution_adjoints(
    module: nn.Conv2d, delta: Tensor, seen: Tensor, weight: Tensor, *, inputs: bool, groups: int = 1
) -> Tensor:
    """The derivative by the input of a convolution (`inputs`), otherwise that by its weight."""
    if len(seen) < len(delta):  # only its sides are used
        seen = seen.expand(len(delta), *seen.shape[1:])
    how = (module.stride, module.padding, module.dilation, False, [0, 0], groups)
    mask = [inputs, not inputs, False]
    found: list[Tensor] = torch.ops.aten.convolution_backward(delta, seen, weight, [0], *how, mask)
    return found[0 if inputs else 1]


def _weight_gradient(module: PlainLayer, a: Tensor, d: Tensor) -> Tensor:
    if isinstance(module, nn.Linear):
        return d.flatten(0, -2).T @ a.flatten(0, -2)
    return convolution_adjoints(module, d, a, module.weight, inputs=False)


def is_outer(module: PlainLayer, a: Tensor) -> bool:
    """Whether each example's weight gradient is one outer product."""
    return isinstance(module, nn.Linear) and a.ndim == 2


def over_positions(module: nn.Module, d: Tensor) -> Tensor:
    """A bias's part of every delta (N, ...): sums over the positions."""
    if isinstance(module, nn.Conv2d):
        return d.flatten(2).sum(2)
    return d.flatten(1, -2).sum(1) if d.ndim > 2 else d


def _outer_power(a: Tensor, da: Tensor, d: Tensor, dd: Tensor, forward: Forward | None) -> Power:
    """The sums of (dd a^T + d da^T)^2 and of its square, as two sums of matrix products.

    What does not depend on the direction is multiplied once for all of them. With `forward`, z = dd
    a and w = d da, the sums are of z^2 + 2 z w + share w^2. Instead of the sum of their squares,
    3/2 of an unbiased estimate of the variance is used: it contains no power of w that the mean of
    w^2 over the other directions can replace.
    """
    (a, da), left = _scaled(a, da)
    (d, dd), right = _scaled(d, dd)
    scale = (left * right).square()
    a2 = a * a
    d2 = d * d
    da2 = da * da
    dd2 = dd * dd
    mixed_a = a * da
    mixed_d = d * dd
    share = forward.share if forward else 1.0
    squares = _summed([dd2.sum(0), 2 * mixed_d, d2], [a2, mixed_a, share * da2.sum(0)])
    if forward:
        other = forward.mean / left**2
        middle = a2 * ((3 + 3 * share) * da2 + (3 - 3 * share) * other)
        last = 12 * share * mixed_a * other
    else:
        middle = 6 * a2 * da2
        last = 4 * mixed_a * da2
    fourths = _summed(
        [(dd2 * dd2).sum(0), 4 * dd2 * mixed_d, dd2 * d2, mixed_d * d2, d2 * d2],
        [a2 * a2, a2 * mixed_a, middle, last, share**2 * (da2 * da2).sum(0)],
    )
    squares = squares if forward else squares.clamp_min_(0)  # rounding may leave a little below 0
    return Power(squares * scale, fourths.clamp_min_(0).sqrt_() * scale)


def _scaled(x: Tensor, dx: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Both divided by the larger one's largest entry, and that entry."""
    top = torch.maximum(x.abs().amax(), dx.abs().amax())
    top = top.clamp_min(torch.finfo(x.dtype).tiny)
    return (x / top, dx / top), top


def _summed(rows: list[Tensor], columns: list[Tensor]) -> Tensor:
    """The sum of row^T column over all pairs and all leading dimensions."""
    pairs = [(r.flatten(0, -2), c.flatten(0, -2)) for r, c in zip(rows, columns, strict=True)]
    total = pairs[0][0].T @ pairs[0][1]
    for row, column in pairs[1:]:
        total.addmm_(row.T, column)
    return total


def _each(module: PlainLayer, a: Tensor, da: Tensor, d: Tensor, dd: Tensor) -> Iterator[Tensor]:
    """Every pair's change of the weight, (few, *weight.shape), a few pairs at a time."""
    step = max(1, _TOGETHER // module.weight.numel())
    for along, part in _parts(da.shape[0], da.shape[1], step):
        dx = da[along, part]
        dy = dd[along, part]
        # two "examples" a pair, whose gradients are added: (a, dd) and (da, d)
        x, y = (
            torch.stack([one, two]).flatten(1, 2)
            for one, two in ((a[part].expand_as(dx), dx), (dy, d[part].expand_as(dy)))
        )
        if isinstance(module, nn.Linear):
            x, y = (t.flatten(2, -2).transpose(0, 1).flatten(1, 2) for t in (x, y))
            yield torch.bmm(y.mT, x)
        else:
            yield _of_each(module, x, y)


def _parts(directions: int, examples: int, step: int) -> Iterator[tuple[slice, slice]]:
    """Groups of directions and examples, at most `step` pairs, in nearly equal parts."""
    count = -(-examples // min(step, examples))
    few = -(-examples // count)
    many = max(1, step // few) if count == 1 else 1
    for start in range(0, directions, many):
        for at in range(0, examples, few):
            yield slice(start, start + many), slice(at, at + few)


def _of_each(module: nn.Conv2d, x: Tensor, y: Tensor) -> Tensor:
    """Weight gradients (m, *weight.shape), each summed over s, from x and y (s, m, ...)."""
    weight = module.weight
    count = x.shape[1]
    if weight.numel() > _GROUPED or 1 < module.in_channels < 8:
        each = [
            convolution_adjoints(module, y[:, i], x[:, i], weight, inputs=False)
            for i in range(count)
        ]
        return torch.stack(each)
    wide = weight.new_empty(count * weight.shape[0], *weight.shape[1:])  # only its sides are used
    x = x.flatten(1, 2)
    y = y.flatten(1, 2)
    found = convolution_adjoints(module, y, x, wide, inputs=False, groups=count)
    return found.view(count, *weight.shape)


class Tapped(NamedTuple):
    """One layer's input (N, ...) and delta (N, ...) with their changes, one row per pair."""

    a: Tensor
    da: Tensor
    d: Tensor
    dd: Tensor


def tapped_powers(
    module: nn.Module, tapped: Tapped, tensors: Mapping[str, Tensor]
) -> dict[str, Power]:
    """The sums for every parameter of a layer; `tensors` are its parameters and buffers."""
    if plain_weights(module):
        bias = power_of(over_positions(module, tapped.dd))
        return {"weight": _tapped_weight_power(module, tapped), "bias": bias}
    return {name: power_of(moved) for name, (_, moved) in _local(module, tapped, tensors).items()}


def tapped_gradient(
    module: nn.Module, tapped: Tapped, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The gradient summed over the pairs, for every parameter of a layer."""
    if isinstance(module, PlainLayer) and plain_weights(module):
        return gradient(module, tapped.a, tapped.d)
    each = _local(module, tapped, tensors)
    return {name: plain.sum(0) for name, (plain, _) in each.items()}


def tapped_elements(module: nn.Module, a: Tensor, out: Tensor) -> int:
    """Approximate count of numbers for one pair at this layer, given its input and output."""
    size = sum(p.numel() for p in module.parameters(recurse=False))
    # a plain layer's gradients take a few pairs at a time, or none at all
    each = not plain_weights(module) or (isinstance(module, nn.Linear) and a.ndim > 2)
    return 4 * a.numel() + 6 * out.numel() + 4 * size * each


def _tapped_weight_power(module: nn.Module, tapped: Tapped) -> Power:
    a, da, d, dd = tapped
    if a.ndim == 2:
        return _tapped_outer_power(tapped)
    if isinstance(module, nn.Conv2d):
        d = d.flatten(2)
        dd = dd.flatten(2)
        view = _Windows(module, a)
    else:
        a, da, d, dd = (part.flatten(1, -2) for part in (a, da, d, dd))
        d = d.mT
        dd = dd.mT
        view = None
    sums: list[Power] = []
    shape: torch.Size = module.weight.shape  # type: ignore[assignment]
    step = view.step if view else len(a)
    for start in range(0, len(a), step):
        few = slice(start, start + step)
        change = torch.bmm(dd[few], view(a[few]) if view else a[few])
        change.baddbmm_(d[few], view(da[few]) if view else da[few])
        sums = [reduce(Power.plus, [*sums, power_of(change.view(-1, *shape))])]
    return sums[0]


class _Windows:
    """The windows of a convolution, (N, L, C k k), for a few pairs at a time in a small buffer."""

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


def _tapped_outer_power(tapped: Tapped) -> Power:
    """As `_outer_power`, if directions share nothing: two products of matrices."""
    (a, da), left = _scaled(tapped.a, tapped.da)
    (d, dd), right = _scaled(tapped.d, tapped.dd)
    scale = (left * right).square()
    left2 = dd * dd
    mixed = dd * d
    right2 = d * d
    rows2 = torch.cat([left2, 2 * mixed, right2])
    columns2 = torch.cat([a * a, a * da, da * da])
    squares = rows2.T @ columns2
    rows4 = [left2 * left2, 4 * left2 * mixed, 6 * mixed * mixed, 4 * mixed * right2]
    first, cross, last = columns2.chunk(3)
    columns4 = [first * first, first * cross, cross * cross, cross * last, last * last]
    fourths = torch.cat([*rows4, right2 * right2]).T @ torch.cat(columns4)
    # both are sums of squares; rounding may leave a little below 0
    return Power(squares.clamp_min_(0) * scale, fourths.clamp_min_(0).sqrt_() * scale)


def _local(
    module: nn.Module, tapped: Tapped, tensors: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Any other layer: every pair's gradient and its change, from the layer alone."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    own = {name: tensors[name] for name in names}

    def pulled(a: Tensor, d: Tensor) -> dict[str, Tensor]:
        def run(weights: dict[str, Tensor]) -> Tensor:
            return cast(Tensor, functional_call(module, {**tensors, **weights}, (a[None],)))

        return cast(dict[str, Tensor], vjp(run, own)[1](d[None])[0])

    def pair(a: Tensor, da: Tensor, d: Tensor, dd: Tensor) -> tuple[dict[str, Tensor], ...]:
        return cast(tuple[dict[str, Tensor], ...], jvp(pulled, (a, d), (da, dd)))

    with plain_attention():
        plain, moved = vmap(pair)(*tapped)
    return {name: (plain[name], moved[name]) for name in names}
