"""Layers of many cells at once: every cell has weights of its own, and all share one call.

Images are (N, C, B, H, W), so that a convolution of a cell's whole batch is one product of
matrices, and features (N, B, F). On one torch thread a cell's bits do not depend on N: products of
matrices of one shape that start at aligned places do not, elementwise functions not over whole
steps of a kernel, and nothing is summed over cells (tested for each kind of layer).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from leakbound.engines.bundle_products import lined, more, product, rows
from leakbound.engines.pointwise import Pointwise

Pair = tuple[int, int]

WHOLE = 64
"""Numbers in which a kernel's steps end: shorter rests take another path, with other bits."""


class Layer(Protocol):
    """One step of the four passes; each call remembers what the next one needs."""

    def forward(self, a: Tensor) -> Tensor:
        """The output."""
        ...

    def gradients(self, d: Tensor, into: Tensor) -> None:
        """From the output's deltas, the gradients of the layer's own weights, into (N, P)."""
        ...

    def back(self, d: Tensor) -> Tensor:
        """The input's deltas."""
        ...

    def tangent(self, da: Tensor | None, v: Tensor) -> Tensor | None:
        """How the output moves with the input along `da` and with the weights along v (N, P)."""
        ...

    def curl(self, dd: Tensor) -> Tensor:
        """How the input's deltas move with the output's along `dd` and with the last tangents."""
        ...


class _Weighted:
    """Weights (O, I) with a bias (O) from `start` on, in flat parameters (N, P)."""

    def __init__(self, parameters: Tensor, start: int, shape: Pair, bias: bool) -> None:
        self.shape, self.start = shape, start
        self.middle = start + shape[0] * shape[1]
        self.stop = self.middle + (shape[0] if bias else 0)
        self.weight, self.bias = self.parts(parameters)
        self.pushed: Tensor | None = None
        self.kept: dict[str, Tensor] = {}

    def buffer(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Memory for a result of that name, the same in every step."""
        found = self.kept.get(name)
        if found is None or found.shape != tuple(shape):
            found = self.kept[name] = rows(shape, like).zero_()
        return found

    def parts(self, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """Views of the weight (N, O, I) and the bias (N, O) in (N, P)."""
        weight = flat[:, self.start : self.middle].view(len(flat), *self.shape)
        bias = flat[:, self.middle : self.stop] if self.stop > self.middle else None
        return weight, bias


class Linear(_Weighted):
    """A linear layer on features (N, B, I)."""

    def forward(self, a: Tensor) -> Tensor:
        """Features (N, B, O)."""
        self.a = lined(a)
        return product(self.a, self.weight.mT, _row(self.bias), self._out("value"))

    def gradients(self, d: Tensor, into: Tensor) -> None:
        """Sums over the batch."""
        self.d = lined(d)
        weight, bias = self.parts(into)
        if d.shape[1] == 1:
            torch.mul(d.mT, self.a, out=weight)
        else:
            weight.baddbmm_(self.d.mT, self.a, beta=0)
        if bias is not None:
            torch.sum(d, 1, out=bias)

    def back(self, d: Tensor) -> Tensor:
        """Deltas (N, B, I)."""
        return product(self.d, self.weight, None, self.buffer("back", self.a.shape, d))

    def tangent(self, da: Tensor | None, v: Tensor) -> Tensor:
        """W da + V a + b'."""
        self.pushed, bias = self.parts(v)
        moved = product(self.a, self.pushed.mT, _row(bias), self._out("moved"))
        return moved if da is None else more(moved, lined(da), self.weight.mT)

    def curl(self, dd: Tensor) -> Tensor:
        """W' dd + V' d."""
        assert self.pushed is not None  # a tangent came before
        into = self.buffer("curl", self.a.shape, dd)
        return more(product(lined(dd), self.weight, None, into), self.d, self.pushed)

    def _out(self, name: str) -> Tensor:
        return self.buffer(name, (*self.a.shape[:2], self.shape[0]), self.a)


class Convolution(_Weighted):
    """A convolution as products of matrices over the windows that it sees."""

    def __init__(
        self,
        parameters: Tensor,
        start: int,
        channels: Pair,
        kernel: Pair,
        bias: bool,
        stride: Pair,
        padding: Pair,
    ) -> None:
        shape = (channels[1], channels[0] * kernel[0] * kernel[1])
        super().__init__(parameters, start, shape, bias)
        self.kernel, self.stride, self.padding = kernel, stride, padding

    def forward(self, a: Tensor) -> Tensor:
        """Images (N, O, B, h, w)."""
        self.given = a.shape
        self.sides = tuple(
            (side + 2 * pad - kernel) // stride + 1
            for side, pad, kernel, stride in zip(
                a.shape[3:], self.padding, self.kernel, self.stride, strict=True
            )
        )
        self.seen = self._windows(a, "a")
        value = product(self.weight, self.seen, _column(self.bias), self._out("value"))
        return self._image(value)

    def gradients(self, d: Tensor, into: Tensor) -> None:
        """Sums over the batch and over positions."""
        self.d = lined(d.reshape(len(d), self.shape[0], -1))
        weight, bias = self.parts(into)
        weight.baddbmm_(self.d, self.seen.mT, beta=0)
        if bias is not None:
            torch.sum(self.d, 2, out=bias)

    def back(self, d: Tensor) -> Tensor:
        """Deltas of images; of those that `gradients` was given."""
        return self._folded(product(self.weight.mT, self.d, None, self._in("columns")), "d")

    def tangent(self, da: Tensor | None, v: Tensor) -> Tensor:
        """W da + V a + b'."""
        self.pushed, bias = self.parts(v)
        moved = product(self.pushed, self.seen, _column(bias), self._out("moved"))
        if da is not None:
            more(moved, self.weight, self._windows(da, "da"))
        return self._image(moved)

    def curl(self, dd: Tensor) -> Tensor:
        """W' dd + V' d."""
        assert self.pushed is not None  # a tangent came before
        dd = lined(dd.reshape(len(dd), self.shape[0], -1))
        columns = product(self.weight.mT, dd, None, self._in("columns"))
        return self._folded(more(columns, self.pushed.mT, self.d), "dd")

    def _out(self, name: str) -> Tensor:
        return self.buffer(name, (len(self.seen), self.shape[0], self.seen.shape[2]), self.seen)

    def _in(self, name: str) -> Tensor:
        return self.buffer(name, self.seen.shape, self.seen)

    def _image(self, flat: Tensor) -> Tensor:
        return flat.view(len(flat), self.shape[0], self.given[2], *self.sides)

    def _border(self) -> tuple[int, ...]:
        number, channels, size, *sides = self.given
        high, wide = (side + 2 * pad for side, pad in zip(sides, self.padding, strict=True))
        return (number, channels, size, high, wide)

    def _inside(self, bordered: Tensor) -> Tensor:
        (high, wide), (top, left) = self.given[3:], self.padding
        return bordered[..., top : top + high, left : left + wide]

    def _windows(self, a: Tensor, name: str) -> Tensor:
        """What each output sees, (N, C k k, B h w), in a buffer of that name."""
        number, channels, size = self.given[:3]
        bordered = self.buffer("border of " + name, self._border(), a)
        self._inside(bordered).copy_(a)
        n, c, b, down, right = bordered.stride()
        view = bordered.as_strided(
            (number, channels, *self.kernel, size, *self.sides),
            (n, c, down, right, b, down * self.stride[0], right * self.stride[1]),
        )
        found = self.buffer(name, view.shape, a).copy_(view)
        return found.view(number, self.shape[1], -1)

    def _folded(self, columns: Tensor, name: str) -> Tensor:
        """The sum of windows (N, C k k, B h w) at their places, in a buffer of that name."""
        number, channels, size = self.given[:3]
        columns = columns.view(number, channels, *self.kernel, size, *self.sides)
        total = self.buffer(name, self._border(), columns).zero_()
        (high, wide), (down, right) = self.sides, self.stride
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                part = total[..., i : i + down * high : down, j : j + right * wide : right]
                part += columns[:, :, i, j]
        return self._inside(total)


class Elementwise:
    """An activation, in any layout."""

    def __init__(self, function: Pointwise) -> None:
        self.function = function

    def forward(self, a: Tensor) -> Tensor:
        """f(a)."""
        whole = a.is_contiguous() and a[0].numel() % WHOLE == 0
        if whole or not self.function.curved:
            value, self.saved = self.function.start(a)
            return value
        size = a[0].numel()
        padded = a.new_zeros(len(a), -(-size // WHOLE) * WHOLE)
        padded[:, :size].view(a.shape).copy_(a)
        value, saved = self.function.start(padded)
        self.saved = tuple(part[:, :size].view(a.shape) for part in saved)
        return value[:, :size].view(a.shape)

    def gradients(self, d: Tensor, into: Tensor) -> None:
        """None: no weights."""

    def back(self, d: Tensor) -> Tensor:
        """F' d."""
        self.d = d
        return self.function.times(self.saved, d)

    def tangent(self, da: Tensor | None, v: Tensor) -> Tensor | None:
        """F' da."""
        self.da = da
        return None if da is None else self.function.times(self.saved, da)

    def curl(self, dd: Tensor) -> Tensor:
        """F' dd + f'' da d."""
        moved = self.function.times(self.saved, dd)
        if self.function.curved and self.da is not None:
            moved.addcmul_(self.function.bend(self.saved), self.da * self.d)
        return moved


class MaxPool:
    """Non-overlapping max pools; of equal entries the first is the largest."""

    def __init__(self, kernel: Pair) -> None:
        self.kernel = kernel

    def forward(self, a: Tensor) -> Tensor:
        """The largest of every window: along its rows first, as one reads."""
        self.given, (down, right) = a.shape, self.kernel
        high, wide = a.shape[3] // down, a.shape[4] // right
        inner = a[..., : high * down, : wide * right]
        best, column = _largest([inner[..., j::right] for j in range(right)])
        best, row, column = _of_rows(best, column, down)
        rows = torch.arange(high, device=a.device)[:, None] * (down * a.shape[4])
        start = rows + torch.arange(wide, device=a.device) * right
        self.where = (start + column).add_(row, alpha=a.shape[4]).flatten(3)
        return best

    def gradients(self, d: Tensor, into: Tensor) -> None:
        """None: no weights."""

    def back(self, d: Tensor) -> Tensor:
        """Deltas at the largest entries."""
        full = d.new_zeros(*self.given[:3], self.given[3] * self.given[4])
        return full.scatter_(3, self.where, d.flatten(3)).view(self.given)

    def tangent(self, da: Tensor | None, v: Tensor) -> Tensor | None:
        """The changes of the largest entries."""
        if da is None:
            return None
        high, wide = (side // k for side, k in zip(self.given[3:], self.kernel, strict=True))
        return da.flatten(3).gather(3, self.where).view(*self.given[:3], high, wide)

    def curl(self, dd: Tensor) -> Tensor:
        """As `back`: the pool is linear around the point."""
        return self.back(dd)


class MeanPool:
    """Non-overlapping average pools."""

    def __init__(self, kernel: Pair) -> None:
        self.kernel = kernel

    def forward(self, a: Tensor) -> Tensor:
        """The mean of every window."""
        self.given = a.shape
        parts = [a[place] for place in self._places()]
        total = parts[0] + parts[1] if len(parts) > 1 else parts[0].clone()
        for part in parts[2:]:
            total += part
        return total.div_(len(parts))

    def _places(self) -> list[Any]:
        down, right = self.kernel
        high, wide = self.given[3] // down * down, self.given[4] // right * right
        return [
            (..., slice(i, high, down), slice(j, wide, right))
            for i in range(down)
            for j in range(right)
        ]

    def gradients(self, d: Tensor, into: Tensor) -> None:
        """None: no weights."""

    def back(self, d: Tensor) -> Tensor:
        """Deltas, shared by every window's entries."""
        full, share = d.new_zeros(self.given), d / (self.kernel[0] * self.kernel[1])
        for place in self._places():
            full[place] = share
        return full

    def tangent(self, da: Tensor | None, v: Tensor) -> Tensor | None:
        """The mean of the changes."""
        return None if da is None else self.forward(da)

    def curl(self, dd: Tensor) -> Tensor:
        """As `back`."""
        return self.back(dd)


class Flatten:
    """From images (N, C, B, H, W) to features (N, B, C H W)."""

    def forward(self, a: Tensor) -> Tensor:
        """The features."""
        self.given = a.shape
        return a.transpose(1, 2).flatten(2)

    def gradients(self, d: Tensor, into: Tensor) -> None:
        """None: no weights."""

    def back(self, d: Tensor) -> Tensor:
        """Deltas as images."""
        number, channels, size, *sides = self.given
        return d.reshape(number, size, channels, *sides).transpose(1, 2)

    def tangent(self, da: Tensor | None, v: Tensor) -> Tensor | None:
        """The changes as features."""
        return None if da is None else da.transpose(1, 2).flatten(2)

    def curl(self, dd: Tensor) -> Tensor:
        """As `back`."""
        return self.back(dd)


def _largest(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The largest of several tensors, and which is the first to have it."""
    best, which = parts[0], torch.zeros_like(parts[0], dtype=torch.bool)
    for number, part in enumerate(parts[1:], start=1):
        higher = part > best
        which = higher if number == 1 else torch.where(higher, number, which)
        best = torch.maximum(best, part)
    return best, which


def _of_rows(best: Tensor, column: Tensor, down: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest of each `down` rows, its row, and the column that the row's largest has."""
    rows = [best[..., i::down, :] for i in range(down)]
    columns = [column[..., i::down, :] for i in range(down)]
    found, row = _largest(rows)
    chosen = columns[0]
    for number in range(1, down):
        chosen = torch.where(row == number if down > 2 else row, columns[number], chosen)
    return found, row, chosen


def _column(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias[:, :, None]


def _row(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias[:, None]
