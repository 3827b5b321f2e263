"""Weight gradients of Linear and Conv2d and their changes, where directions share their examples.

With a layer's input `a` (n, ...), its output's delta `d` (n, ...) and their changes `da`, `dd`
(k, n, ...) along k directions of every example, example b's own gradient d_b a_b^T changes along
direction j by dd_jb a_b^T + d_b da_jb^T.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakbound.engines.squares import Power, of_lanes, over_positions, scaled
from leakbound.engines.steps import convolution_adjoints

_TOGETHER = 2**19
_GROUPED = 2**16

Layer = nn.Linear | nn.Conv2d


@dataclass(frozen=True, eq=False)
class Forward:
    """What more directions, which pass forward only, say of a Linear's input (n, D).

    Of (dd a + d da)^2 the part d^2 da^2 is then averaged over k + m directions instead of k.

    Attributes:
        mean: the mean of da^2 over the m directions.
        share: k / (k + m), the weight of the k full directions' own d^2 da^2; 0 where the mean is
            known exactly.
        squares: what joins the sum over the k directions: share times the sum of da^2 over the m;
            k times the mean where it is exact.
        fourths: share^2 times the sum of da^4 over the m; 0 where the mean is exact.
    """

    mean: Tensor
    share: float
    squares: Tensor
    fourths: Tensor

    def of(self, examples: slice) -> Forward:
        """The same for some of the examples."""
        parts = (t[examples] for t in (self.mean, self.squares, self.fourths))
        mean, squares, fourths = parts
        return Forward(mean, self.share, squares, fourths)

    def power(self, d: Tensor) -> Power:
        """What joins the sums over the full directions, given the deltas (n, O)."""
        top = d.abs().amax().clamp_min(torch.finfo(d.dtype).tiny)
        d2 = (d / top).square()
        norm = (d2.square().T @ self.fourths).sqrt_()
        return Power(d2.T @ self.squares * top**2, norm * top**2)


def powers(
    module: Layer, a: Tensor, da: Tensor, d: Tensor, dd: Tensor, forward: Forward | None = None
) -> dict[str, Power]:
    """The sums over all lanes (j, b) of the squared changes of weight and bias.

    With `forward` (plain Linear layers only) the weight's are sums whose expectation is the same
    once `forward.power` is added; single ones may then be negative.
    """
    if is_outer(module, a):
        parts = {"weight": _outer_power(a, da, d, dd, forward)}
    else:
        parts = {"weight": _added(of_lanes(part) for part in _lanes(module, a, da, d, dd))}
    if module.bias is not None:
        parts["bias"] = of_lanes(over_positions(module, dd.flatten(0, 1)))
    return parts


def gradient(module: Layer, a: Tensor, d: Tensor) -> dict[str, Tensor]:
    """The gradient summed over the examples."""
    parts = {"weight": _weight_gradient(module, a, d)}
    if module.bias is not None:
        parts["bias"] = over_positions(module, d).sum(0)
    return parts


def changes(module: Layer, a: Tensor, da: Tensor, d: Tensor, dd: Tensor) -> dict[str, Tensor]:
    """The change (k, ...) of the summed gradient when all examples move along direction j."""
    pairs = zip(da, dd, strict=True)
    each = [_weight_gradient(module, torch.cat([a, x]), torch.cat([y, d])) for x, y in pairs]
    parts = {"weight": torch.stack(each)}
    if module.bias is not None:
        flat = over_positions(module, dd.flatten(0, 1))
        parts["bias"] = flat.view(*dd.shape[:2], -1).sum(1)
    return parts


def each_gradient(module: Layer, a: Tensor, d: Tensor) -> dict[str, Tensor]:
    """Every example's own gradient, (n, ...)."""
    if is_outer(module, a):
        parts = {"weight": d[:, :, None] * a[:, None]}
    elif isinstance(module, nn.Linear):
        parts = {"weight": torch.bmm(d.flatten(1, -2).mT, a.flatten(1, -2))}
    else:
        parts = {"weight": _of_each(module, a[None], d[None])}
    if module.bias is not None:
        parts["bias"] = over_positions(module, d)
    return parts


def each_change(module: Layer, a: Tensor, da: Tensor, d: Tensor, dd: Tensor) -> dict[str, Tensor]:
    """The change (n, ...) of every example's own gradient along its own direction, k = 1."""
    if is_outer(module, a):
        weight = (dd[0, :, :, None] * a[:, None]).addcmul_(d[:, :, None], da[0, :, None])
        parts = {"weight": weight}
    else:
        parts = {"weight": torch.cat(list(_lanes(module, a, da, d, dd)))}
    if module.bias is not None:
        parts["bias"] = over_positions(module, dd[0])
    return parts


def _added(parts: Iterator[Power]) -> Power:
    sums = next(parts)
    for part in parts:
        sums = sums.plus(part)
    return sums


def _weight_gradient(module: Layer, a: Tensor, d: Tensor) -> Tensor:
    if isinstance(module, nn.Linear):
        return d.flatten(0, -2).T @ a.flatten(0, -2)
    return convolution_adjoints(module, d, a, module.weight, inputs=False)


def is_outer(module: Layer, a: Tensor) -> bool:
    """Whether each example's weight gradient is one outer product."""
    return isinstance(module, nn.Linear) and a.ndim == 2


def _outer_power(a: Tensor, da: Tensor, d: Tensor, dd: Tensor, forward: Forward | None) -> Power:
    """The sums of (dd a^T + d da^T)^2 and of its square, as two sums of matrix products.

    What does not depend on the direction is multiplied once for all of them. With `forward`, z = dd
    a and w = d da, the sums are of z^2 + 2 z w + share w^2, and what stands for their squares is
    3/2 of an unbiased estimate of the variance: no power of w enters it that the mean of w^2 over
    the other directions can replace.
    """
    (a, da), left = scaled(a, da)
    (d, dd), right = scaled(d, dd)
    scale = (left * right).square()
    a2, d2, da2, dd2 = a * a, d * d, da * da, dd * dd
    mixed_a, mixed_d = a * da, d * dd
    share = forward.share if forward else 1.0
    squares = _summed([dd2.sum(0), 2 * mixed_d, d2], [a2, mixed_a, share * da2.sum(0)])
    if forward:
        other = forward.mean / left**2
        middle = a2 * ((3 + 3 * share) * da2 + (3 - 3 * share) * other)
        last = 12 * share * mixed_a * other
    else:
        middle, last = 6 * a2 * da2, 4 * mixed_a * da2
    fourths = _summed(
        [(dd2 * dd2).sum(0), 4 * dd2 * mixed_d, dd2 * d2, mixed_d * d2, d2 * d2],
        [a2 * a2, a2 * mixed_a, middle, last, share**2 * (da2 * da2).sum(0)],
    )
    squares = squares if forward else squares.clamp_min_(0)  # rounding may leave a little below 0
    return Power(squares * scale, fourths.clamp_min_(0).sqrt_() * scale)


def _summed(rows: list[Tensor], columns: list[Tensor]) -> Tensor:
    """The sum of row^T column over all pairs and all that is in front."""
    pairs = [(r.flatten(0, -2), c.flatten(0, -2)) for r, c in zip(rows, columns, strict=True)]
    total = pairs[0][0].T @ pairs[0][1]
    for row, column in pairs[1:]:
        total.addmm_(row.T, column)
    return total


def _lanes(module: Layer, a: Tensor, da: Tensor, d: Tensor, dd: Tensor) -> Iterator[Tensor]:
    """Every lane's own change of the weight, (few, *weight.shape), a few lanes at a time."""
    for ways, part in _parts(da.shape[0], da.shape[1], max(1, _TOGETHER // module.weight.numel())):
        dx, dy = da[ways, part], dd[ways, part]
        # two "examples" a lane, whose gradients are added: (a, dd) and (da, d)
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
    """Directions and examples that go together, at most `step` lanes, in nearly equal parts."""
    count = -(-examples // min(step, examples))
    few = -(-examples // count)
    many = max(1, step // few) if count == 1 else 1
    for start in range(0, directions, many):
        for at in range(0, examples, few):
            yield slice(start, start + many), slice(at, at + few)


def _of_each(module: nn.Conv2d, x: Tensor, y: Tensor) -> Tensor:
    """Weight gradients (m, *weight.shape), each summed over s, from x and y (s, m, ...)."""
    weight, lanes = module.weight, x.shape[1]
    if weight.numel() > _GROUPED or 1 < module.in_channels < 8:
        each = [
            convolution_adjoints(module, y[:, i], x[:, i], weight, inputs=False)
            for i in range(lanes)
        ]
        return torch.stack(each)
    wide = weight.new_empty(lanes * weight.shape[0], *weight.shape[1:])  # only its sides are read
    x, y = x.flatten(1, 2), y.flatten(1, 2)
    found = convolution_adjoints(module, y, x, wide, inputs=False, groups=lanes)
    return found.view(lanes, *weight.shape)
