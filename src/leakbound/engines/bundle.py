"""Many searches of equal shape in one computation, each with its own weights and data.

Small networks leave a processor idle between kernels: alone, a step of a digit network takes four
times as long as its matrix products. A bundle runs the four passes of the R-operator for all
searches at once, with matrix products only. It supports nested `nn.Sequential`s of linear layers,
convolutions without groups or dilation, non-overlapping pools, elementwise functions and one
flatten, under a loss of closed form.

Guarantees: on one torch thread, a search's bits do not depend on how many others share its bundle,
    nor on its position. Products of matrices of one shape that start at aligned addresses do not
    depend on these; elementwise functions do not over whole steps of a kernel; and nothing is
    summed over searches.

Images are (N, C, B, H, W), so that a convolution of a search's whole batch is one matrix product,
and features (N, B, F).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from leakbound.engines.base import LINE, Pulled, aligned
from leakbound.engines.calls import sequence
from leakbound.engines.loss import closed, head
from leakbound.engines.reader import Kind, Layer, Layers, Shape, Unreadable, pools_first
from leakbound.engines.rules import (
    ActivationRule,
    Given,
    IdentityRule,
    Passes,
    Rule,
    StraightRule,
    there,
)
from leakbound.task import Loss, Task

Pair = Sequence[int]
WHOLE = 64
"""Numbers per step of a kernel; a shorter remainder takes another path, with other bits."""


Build = Callable[[Tensor, Tensor, bool], Rule]
"""A layer's rule from the flat parameters and gradients (N, P) of all searches; see `Given`."""
_WORK: WeakKeyDictionary[nn.Module, dict[Shape, int]] = WeakKeyDictionary()
_COUNTS = Lock()
"""PyTorch's counter sees the modules of every thread."""


@dataclass(frozen=True, eq=False)
class BundlePlan:
    """A model's layers in order; `name` is equal for models that differ only in their weights."""

    layers: Layers
    builds: tuple[Build, ...]
    name: str
    linear: bool


def chain(task: Task, shape: Shape) -> BundlePlan | None:
    try:
        return _plan(task, tuple(shape)) if closed(task.loss) else None
    except Unreadable:
        return None


def work(task: Task, shape: Shape) -> int:
    """Floating-point operations of a forward pass at inputs (B, *S), as PyTorch counts them.

    Counted for two examples, and proportional to their number.
    """
    known = _WORK.setdefault(task.model, {})
    few = min(shape[0], 2)
    counted = few, *shape[1:]
    if counted not in known:
        inputs = next(task.model.parameters()).new_zeros(counted)
        with _COUNTS, FlopCounterMode(display=False) as counter, torch.no_grad():
            task.model(inputs)
            known[counted] = counter.get_total_flops()
    return known[counted] * shape[0] // few


class Bundle:
    """N searches on one chain at weights (N, P); `kept` (N, P) is False for absent weights."""

    def __init__(
        self,
        plan: BundlePlan,
        parameters: Tensor,
        kept: Tensor | None = None,
        loss: Loss = nn.functional.cross_entropy,
    ) -> None:
        self.num_searches = len(parameters)
        self.loss = loss
        self.kept = kept
        self.row = aligned(self.num_searches, parameters)
        pairs = zip(plan.layers, plan.builds, strict=True)
        made = [build(parameters, self.row, layer.moving) for layer, build in pairs]
        self.weighted = [rule for rule in made if isinstance(rule, _Weighted)]
        self.passes = Passes(plan.layers, made)

    @torch.no_grad()
    def gradient(self, inputs: Tensor, labels: Tensor) -> Tensor:
        inputs = inputs.detach()
        labels = labels.detach()
        a = self.passes.forward(inputs.transpose(1, 2) if inputs.ndim == 5 else inputs)
        self.head = head(self.loss, a.flatten(0, 1), labels.flatten(0, 1), a.shape[1])
        self.passes.backward(self.head.deltas.view(a.shape))
        return self.row if self.kept is None else self.row.mul_(self.kept)

    @torch.no_grad()
    def pull(self, cotangent: Tensor) -> Pulled:
        v = cotangent.detach()
        if self.kept is not None:
            # Into aligned rows, because the bits of a product depend on addresses.
            v = torch.mul(v, self.kept, out=aligned(self.num_searches, v))
        for rule in self.weighted:
            rule.directions = rule.parts(v)
        moved = self.passes.tangent(None)[self.passes.last]
        change, slopes = self.head.moved(moved.flatten(0, 1))
        dd = self.passes.moved(change.view(moved.shape))[0]
        dd = dd.transpose(1, 2).clone(memory_format=torch.contiguous_format) if dd.ndim == 5 else dd
        soft = None if slopes is None else slopes.view(*moved.shape[:2], *slopes.shape[1:])
        return Pulled(dd, soft)


def _plan(task: Task, shape: Shape) -> BundlePlan:
    if task.frozen or len(shape) not in (1, 3):
        raise Unreadable("bundles take images or features, and train all weights")
    layers = sequence(task, shape)
    if len(layers[-1].after) != 1:
        raise Unreadable("the model's output is not one row of class scores per example")
    modules = [task.model.get_submodule(layer.name) for layer in layers]
    layers = pools_first(layers)
    builds = tuple(_build(task, layer) for layer in layers)
    linear = not any(layer.kind is Kind.CONVOLUTION for layer in layers)
    # The repr of a module shows its sizes and options, but not its weights.
    return BundlePlan(layers, builds, "; ".join(map(repr, modules)), linear)


def _build(task: Task, layer: Layer) -> Build:
    kind = layer.kind
    options = layer.options
    images = len(layer.before) == 3
    if kind is Kind.ACTIVATION:
        return _plain(BundledActivation, function=options["function"])
    if kind is Kind.RESHAPE and len(options["shape"]) == 1:
        return _plain(BundledFlatten if images else IdentityRule)
    if kind is Kind.LINEAR and len(layer.before) == 1:
        return partial(BundledLinear, place=_place(task, layer))
    if kind is Kind.CONVOLUTION and images and "turned" not in options:
        stride, padding, dilation, groups = options["options"]
        if dilation == [1, 1] and groups == 1:
            kernel = task.model.get_parameter(str(layer.weights[0])).shape[2:]
            place = _place(task, layer)
            sides = (kernel, stride, padding)
            return partial(BundledConvolution, place=place, sides=sides)
    if kind in (Kind.MAX_POOL, Kind.AVERAGE_POOL):
        kernel, stride, padding, *more = options["options"]
        largest = kind is Kind.MAX_POOL
        plain = [[1, 1], False] if largest else [False, more[1], None]
        if stride == kernel and padding == [0, 0] and more == plain:
            return _plain(BundledMaxPool if largest else BundledMeanPool, kernel=kernel)
    raise Unreadable(f"{layer.name} is {kind.value}, which bundles do not support in this form")


def _plain(rule: Callable[..., Rule], **options: Any) -> Build:
    """A rule of a layer without weights."""
    return lambda _, __, moving: rule(Given((), (), (), moving, curved=False), **options)


Place = tuple[int, Pair, bool]


def _place(task: Task, layer: Layer) -> Place:
    """Where a layer's weights start, their shape as a matrix (O, I), whether a bias follows."""
    name, bias = layer.weights
    shape, start = next((shape, start) for key, shape, start, _ in task.layout if key == name)
    return start, (shape[0], math.prod(shape[1:])), bias is not None


class _Weighted(Rule):
    """Weights (O, I) with a bias (O) from `start` on, in flat parameters (N, P)."""

    def __init__(
        self,
        parameters: Tensor,
        gradients: Tensor,
        moving: bool,
        place: Place,
    ) -> None:
        self.start, self.shape, bias = place
        self.middle = self.start + self.shape[0] * self.shape[1]
        self.stop = self.middle + (self.shape[0] if bias else 0)
        weights = self.parts(parameters)
        super().__init__(
            Given(
                weights,
                (),
                self.parts(gradients),
                moving,
                curved=False,
            )
        )
        self.weight, self.bias = weights
        self.kept: dict[str, Tensor] = {}

    def buffer(
        self,
        name: str,
        shape: Sequence[int],
        like: Tensor,
    ) -> Tensor:
        buffer = self.kept.get(name)
        if buffer is None or buffer.shape != tuple(shape):
            # Zeroed once: the border of a padded image is never written afterwards.
            buffer = self.kept[name] = rows(shape, like).zero_()
        return buffer

    def parts(self, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        weight = flat[:, self.start : self.middle].view(len(flat), *self.shape)
        bias = flat[:, self.middle : self.stop] if self.stop > self.middle else None
        return weight, bias


class BundledLinear(_Weighted):
    def forward(self, a: Tensor) -> Tensor:
        self.a = lined(a)
        return product(self.a, self.weight.mT, _wide(self.bias, 1), self._out("value"))

    def backward(self, d: Tensor) -> Tensor | None:
        self.d = lined(d)
        weight = there(self.gradients[0])
        if d.shape[1] == 1:
            torch.mul(d.mT, self.a, out=weight)
        else:
            # With beta=0 the old memory is not read, so a NaN in new memory cannot spread.
            weight.baddbmm_(self.d.mT, self.a, beta=0)
        self.write_bias(d, 1)
        if not self.moving:
            return None
        return product(self.d, self.weight, None, self.buffer("back", self.a.shape, d))

    def tangent(self, da: Tensor | None) -> Tensor:
        pushed, bias = self.directions  # W da + V a + b'
        moved = product(self.a, there(pushed).mT, _wide(bias, 1), self._out("moved"))
        return moved if da is None else more(moved, lined(da), self.weight.mT)

    def moved(self, dd: Tensor) -> Tensor:
        into = self.buffer("back moved", self.a.shape, dd)  # W' dd + V' d
        back = product(lined(dd), self.weight, None, into)
        return more(back, self.d, there(self.directions[0]))

    def _out(self, name: str) -> Tensor:
        return self.buffer(name, (*self.a.shape[:2], self.shape[0]), self.a)


class BundledConvolution(_Weighted):
    """With `sides`: kernel, stride and padding, two numbers each."""

    def __init__(
        self,
        parameters: Tensor,
        gradients: Tensor,
        moving: bool,
        place: Place,
        sides: tuple[Pair, Pair, Pair],
    ) -> None:
        super().__init__(parameters, gradients, moving, place)
        self.kernel, self.stride, self.padding = sides

    def forward(self, a: Tensor) -> Tensor:
        self.given = a.shape
        self.sides = tuple(
            (side + 2 * pad - kernel) // stride + 1
            for side, pad, kernel, stride in zip(
                a.shape[3:], self.padding, self.kernel, self.stride, strict=True
            )
        )
        self.seen = self._windows(a, "a")
        value = product(self.weight, self.seen, _wide(self.bias, 2), self._out("value"))
        return self._image(value)

    def backward(self, d: Tensor) -> Tensor | None:
        self.d = lined(d.reshape(len(d), self.shape[0], -1))
        there(self.gradients[0]).baddbmm_(self.d, self.seen.mT, beta=0)
        self.write_bias(self.d, 2)
        if not self.moving:
            return None
        return self._folded(product(self.weight.mT, self.d, None, self._in("columns")), "d")

    def tangent(self, da: Tensor | None) -> Tensor:
        pushed, bias = self.directions
        moved = product(there(pushed), self.seen, _wide(bias, 2), self._out("moved"))
        if da is not None:
            more(moved, self.weight, self._windows(da, "da"))
        return self._image(moved)

    def moved(self, dd: Tensor) -> Tensor:
        dd = lined(dd.reshape(len(dd), self.shape[0], -1))
        columns = product(self.weight.mT, dd, None, self._in("columns"))
        return self._folded(more(columns, there(self.directions[0]).mT, self.d), "dd")

    def _out(self, name: str) -> Tensor:
        return self.buffer(name, (len(self.seen), self.shape[0], self.seen.shape[2]), self.seen)

    def _in(self, name: str) -> Tensor:
        return self.buffer(name, self.seen.shape, self.seen)

    def _image(self, flat: Tensor) -> Tensor:
        return flat.view(len(flat), self.shape[0], self.given[2], *self.sides)

    def _border(self) -> Shape:
        number, channels, size, *sides = self.given
        high, wide = (side + 2 * pad for side, pad in zip(sides, self.padding, strict=True))
        return (number, channels, size, high, wide)

    def _inside(self, bordered: Tensor) -> Tensor:
        (high, wide) = self.given[3:]
        (top, left) = self.padding
        return bordered[..., top : top + high, left : left + wide]

    def _windows(self, a: Tensor, name: str) -> Tensor:
        """The window of each output, (N, C k k, B h w), in a buffer of that name."""
        number, channels, size = self.given[:3]
        bordered = self.buffer("border of " + name, self._border(), a)
        self._inside(bordered).copy_(a)
        n, c, b, down, right = bordered.stride()
        view = bordered.as_strided(
            (number, channels, *self.kernel, size, *self.sides),
            (n, c, down, right, b, down * self.stride[0], right * self.stride[1]),
        )
        windows = self.buffer(name, view.shape, a).copy_(view)
        return windows.view(number, self.shape[1], -1)

    def _folded(self, columns: Tensor, name: str) -> Tensor:
        """The sum of windows (N, C k k, B h w) at their positions, in a buffer of that name."""
        number, channels, size = self.given[:3]
        columns = columns.view(number, channels, *self.kernel, size, *self.sides)
        total = self.buffer(name, self._border(), columns).zero_()
        (high, wide) = self.sides
        (down, right) = self.stride
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                part = total[..., i : i + down * high : down, j : j + right * wide : right]
                part += columns[:, :, i, j]
        return self._inside(total)


class BundledActivation(ActivationRule):
    def forward(self, a: Tensor) -> Tensor:
        self.shape = a.shape
        # Piecewise linear functions have the same bits on every path of a kernel.
        whole = a.is_contiguous() and a[0].numel() % WHOLE == 0
        if whole or not self.function.curved:
            value, self.saved = self.function.value(a)
            return value
        size = a[0].numel()
        padded = a.new_zeros(len(a), -(-size // WHOLE) * WHOLE)
        padded[:, :size].view(a.shape).copy_(a)
        value, saved = self.function.value(padded)
        self.saved = tuple(part[:, :size].view(a.shape) for part in saved)
        return value[:, :size].view(a.shape)

    def moved(self, dd: Tensor) -> Tensor:
        moved = self.function.times_slope(self.saved, dd)  # f' dd + f'' da d
        if self.x is not None:
            moved.addcmul_(self.function.second(self.saved), self.x * self.delta)
        return moved


class BundledMaxPool(Rule):
    """Non-overlapping max pools; of equal entries the first is the largest."""

    def __init__(self, data: Given, kernel: Pair) -> None:
        super().__init__(data)
        self.kernel = kernel

    def forward(self, a: Tensor) -> Tensor:
        self.given = a.shape
        (down, right) = self.kernel
        high = a.shape[3] // down
        wide = a.shape[4] // right
        inner = a[..., : high * down, : wide * right]
        best, column = _largest([inner[..., j::right] for j in range(right)])
        best, row, column = _of_rows(best, column, down)
        rows = torch.arange(high, device=a.device)[:, None] * (down * a.shape[4])
        start = rows + torch.arange(wide, device=a.device) * right
        self.where = (start + column).add_(row, alpha=a.shape[4]).flatten(3)
        return best

    def pulled(self, d: Tensor) -> Tensor:
        full = d.new_zeros(*self.given[:3], self.given[3] * self.given[4])
        return full.scatter_(3, self.where, d.flatten(3)).view(self.given)

    def tangent(self, da: Tensor | None) -> Tensor | None:
        if da is None:
            return None
        high, wide = (side // k for side, k in zip(self.given[3:], self.kernel, strict=True))
        return da.flatten(3).gather(3, self.where).view(*self.given[:3], high, wide)


class BundledMeanPool(StraightRule):
    def of(self, a: Tensor) -> Tensor:
        parts = [a[place] for place in self._places()]
        total = parts[0] + parts[1] if len(parts) > 1 else parts[0].clone()
        for part in parts[2:]:
            total += part
        return total.div_(len(parts))

    def _places(self) -> list[Any]:
        down, right = self.options["kernel"]
        high = self.x.shape[3] // down * down
        wide = self.x.shape[4] // right * right
        return [
            (..., slice(i, high, down), slice(j, wide, right))
            for i in range(down)
            for j in range(right)
        ]

    def pulled(self, d: Tensor) -> Tensor:
        full = d.new_zeros(self.x.shape)
        places = self._places()
        share = d / len(places)
        for place in places:
            full[place] = share
        return full


class BundledFlatten(StraightRule):
    """From images (N, C, B, H, W) to features (N, B, C H W)."""

    def of(self, a: Tensor) -> Tensor:
        return a.transpose(1, 2).flatten(2)

    def pulled(self, d: Tensor) -> Tensor:
        number, channels, size, *sides = self.x.shape
        return d.reshape(number, size, channels, *sides).transpose(1, 2)


def _largest(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The largest of several tensors, and the index of the first that has it."""
    best = parts[0]
    which = torch.zeros_like(parts[0], dtype=torch.bool)
    for number, part in enumerate(parts[1:], start=1):
        higher = part > best
        # For two parts the comparison itself is the index.
        which = higher if number == 1 else torch.where(higher, number, which)
        best = torch.maximum(best, part)
    return best, which


def _of_rows(
    best: Tensor,
    column: Tensor,
    down: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The largest of each `down` rows, its row, and the column that the row's largest has."""
    rows = [best[..., i::down, :] for i in range(down)]
    columns = [column[..., i::down, :] for i in range(down)]
    largest, row = _largest(rows)
    chosen = columns[0]
    for number in range(1, down):
        chosen = torch.where(row == number if down > 2 else row, columns[number], chosen)
    return largest, row, chosen


def _wide(bias: Tensor | None, dim: int) -> Tensor | None:
    return None if bias is None else bias.unsqueeze(dim)


# BLAS takes other paths for other addresses in memory, and for single columns of one matrix. So
# each search starts on a line of memory, and columns are multiplied one search at a time. Results
# go to memory that is kept: new memory of this size costs as much as the products.


def product(
    left: Tensor,
    right: Tensor,
    added: Tensor | None,
    into: Tensor,
) -> Tensor:
    """`added` plus products (N, m, n) of (N, m, k) and (N, k, n), all at aligned addresses."""
    if into.shape[2] == 1:
        for target, matrix, column in zip(into, left, right, strict=True):
            torch.mv(matrix, column[:, 0], out=target[:, 0])
        return into if added is None else into.add_(added)
    if added is None:
        return torch.bmm(left, right, out=into)
    return torch.baddbmm(added, left, right, out=into)


def more(
    total: Tensor,
    left: Tensor,
    right: Tensor,
) -> Tensor:
    """Add another product to a total (N, m, n), in place."""
    if total.shape[2] != 1:
        return total.baddbmm_(left, right)
    for target, matrix, column in zip(total, left, right, strict=True):
        target[:, 0].addmv_(matrix, column[:, 0])
    return total


def rows(shape: Sequence[int], like: Tensor) -> Tensor:
    """Empty memory of a shape (N, ...) in which each search starts at an aligned address."""
    size = math.prod(shape[1:])
    return like.new_empty(shape[0], -(-size // LINE) * LINE)[:, :size].view(*shape)


def lined(a: Tensor) -> Tensor:
    """The same numbers, with each search at an aligned address."""
    apart = len(a) == 1 or a.stride(0) % LINE == 0
    if apart and a.storage_offset() % LINE == 0 and a[0].is_contiguous():
        return a
    return rows(a.shape, a).copy_(a)
