"""Convolutions in the four passes: PyTorch's own, packed once for the processor, or as columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from leakbound.engines.activations import Kernel
from leakbound.engines.base import kernels
from leakbound.engines.norms import others
from leakbound.engines.rules import Back, Given, Rule, paired, sides, there

_convolve: Kernel = torch.ops.aten.convolution.default
_adjoints: Callable[..., list[Tensor]] = torch.ops.aten.convolution_backward.default
_SMALL = 32
"""Up to this many weights per output channel, products with columns are faster than kernels."""
_FEW = 16
"""They are also faster if an output channel has this many times more weights than values."""
_SLOW = 20480
"""PyTorch itself takes a single example of up to this many numbers as columns, in each call."""
_NARROW = 320
"""Up to this many weights per output channel, columns that are laid out anyway are faster forward.
"""


def convolution(
    given: Given,
    options: tuple[Any, ...],
    turned: list[int] | None = None,
) -> Rule:
    """The rule for a convolution; `options` are stride, padding, dilation and groups.

    `turned`: a transposed convolution, with this padding of its output. The rule depends only on
    the weights' shape, type, device and training, and on `base.kernels`.
    """
    weight = there(given.weights[0])
    on_cpu = weight.device.type == "cpu"
    odd = turned is not None or weight.ndim != 4 or options[3] > 1
    if given.frozen or not on_cpu or odd or kernels() != "packed":
        return ConvolutionRule(given, options, turned)
    if weight[0].numel() <= _SMALL:
        return ColumnsRule(given, options)
    if given.curved:
        # Weights that change between steps would have to be packed again in every step.
        return ChangingRule(given, options)
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    # A private operator, which another version of PyTorch may not have.
    packs = available and hasattr(torch.ops.mkldnn, "_convolution_pointwise")
    # oneDNN has no kernels for float64.
    return (PackedRule if packs and weight.dtype == torch.float32 else ConvolutionRule)(
        given, options
    )


class Patches:
    """The patches of an input that a convolution multiplies with its weights, and their inverse."""

    def __init__(self, kernel: torch.Size, options: tuple[Any, ...]) -> None:
        self.kernel = tuple(kernel)
        self.stride, self.padding, self.dilation, _ = options

    def see(self, shape: torch.Size) -> tuple[int, int, int]:
        """Set another input shape; return the number of examples and the output's sides."""
        self.shape = shape
        terms = zip(
            shape[2:],
            self.padding,
            self.dilation,
            self.kernel,
            self.stride,
            strict=True,
        )
        height, width = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in terms)
        self.sides = (height, width)
        return shape[0], height, width

    def of(self, x: Tensor) -> Tensor:
        """Patches (I k k, B L) of an input (B, I, H, W), L positions each."""
        top, left = self.padding
        x = nn.functional.pad(x, (left, left, top, top)) if top or left else x
        batch, channel, row, column = x.stride()
        (down, right) = self.stride
        (high, wide) = self.dilation
        steps = (channel, row * high, column * wide, batch, row * down, column * right)
        shape = (x.shape[1], *self.kernel, len(x), *self.sides)
        inner = x.shape[1] * self.kernel[0] * self.kernel[1]
        return x.as_strided(shape, steps).reshape(inner, -1)

    def added(self, patches: Tensor) -> Tensor:
        """The input (B, I, H, W) of the given patches (I k k, B L), overlaps added up."""
        size = self.shape[0]
        patches = patches.view(len(patches), size, -1).transpose(0, 1)
        how = (self.dilation, self.padding, self.stride)
        return nn.functional.fold(patches, self.shape[2:], self.kernel, *how)

    def rows(self, delta: Tensor) -> Tensor:
        """An output (B, O, ...) as (B L, O)."""
        return delta.permute(0, 2, 3, 1).reshape(-1, delta.shape[1])

    def values(self, rows: Tensor) -> Tensor:
        """The reverse of `rows`: an output with the channels last in memory."""
        return rows.view(self.shape[0], *self.sides, -1).permute(0, 3, 1, 2)


class ConvolutionRule(Rule):
    def __init__(
        self,
        data: Given,
        options: tuple[Any, ...],
        turned: list[int] | None = None,
    ) -> None:
        super().__init__(data)
        self.weight = there(data.weights[0])
        self.bias = data.weights[1]
        *how, groups = options
        self.how = (*how, turned is not None, turned or [0] * len(how[0]), groups)
        on_cpu = self.weight.device.type == "cpu"
        trained = not data.frozen
        flat = self.weight.ndim == 4
        self.last = data.curved and trained and on_cpu and flat and kernels() == "packed"

    def forward(self, x: Tensor) -> Tensor:
        self.x = x = x.contiguous(memory_format=torch.channels_last) if self.last else x
        return _convolve(x, self.weight, self.bias, *self.how)

    def backward(self, delta: Tensor) -> Tensor | None:
        if self.frozen:
            return self.pulled(delta) if self.moving else None
        self.delta = delta
        mask = [self.moving, True, self.gradients[1] is not None]
        back, *gradients = self._back(delta, self.weight, mask)
        self.write(*gradients)
        return back

    def pulled(self, delta: Tensor) -> Tensor:
        x = sides(self.x, delta)
        return _adjoints(delta, x, self.weight, None, *self.how, [True, False, False])[0]

    def tangent(self, x: Tensor | None) -> Tensor | None:
        through_input = None if x is None else _convolve(x, self.weight, None, *self.how)
        if self.frozen:
            return through_input
        self.change = x if self.curved else None
        change = _convolve(self.x, *self.directions, *self.how)
        return change if through_input is None else change.add_(through_input)

    def moved(self, delta: Tensor) -> Tensor:
        if self.frozen:
            return self.pulled(delta)
        if self.curved:
            rows, values = paired(delta, self.delta, self.x, self.change)
            arguments = (rows, values, self.weight, None, *self.how, [False, True, False])
            there(self.gradients[0]).copy_(_adjoints(*arguments)[1])
            self.write_bias(delta, others(delta))
        change = self.pulled(delta)
        change += self._back(self.delta, self.directions[0], [True, False, False])[0]
        return change

    def _back(
        self,
        delta: Tensor,
        weight: Tensor | None,
        mask: list[bool],
    ) -> list[Tensor]:
        sizes = [delta.shape[1]] if mask[2] else None
        return _adjoints(delta, self.x, weight, sizes, *self.how, mask)


class ColumnsRule(Rule):
    """As a product with the patches of its input, laid out once; values have the channels last."""

    def __init__(self, data: Given, options: tuple[Any, ...]) -> None:
        super().__init__(data)
        weight, self.bias = data.weights
        self.patches = Patches(there(weight).shape[2:], options)
        self.weight = there(weight).flatten(1)
        self.gradient = there(data.gradients[0]).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        self.patches.see(x.shape)
        self.columns = self.patches.of(x)
        return self.patches.values(_product(self.columns, self.weight, self.bias))

    def backward(self, delta: Tensor) -> Tensor | None:
        self.rows = self.patches.rows(delta)
        # the long sums over positions are several times faster in this order
        self._sum_up(self.columns.mm(self.rows), self.rows)
        if not self.moving:
            return None
        return self.patches.added(self.weight.t().mm(self.rows.t()))

    def tangent(self, x: Tensor | None) -> Tensor | None:
        direction, shift = self.directions
        change = _product(self.columns, there(direction).flatten(1), shift)
        columns = None if x is None else self.patches.of(x)
        self.change = columns if self.curved else None
        if columns is not None:
            change.addmm_(columns.t(), self.weight.t())
        return self.patches.values(change)

    def moved(self, delta: Tensor) -> Tensor:
        rows = self.patches.rows(delta)
        if self.curved:
            product = self.columns.mm(rows)
            if self.change is not None:
                product.addmm_(self.change, self.rows)
            self._sum_up(product, rows)
        back = self.weight.t().mm(rows.t())
        back.addmm_(there(self.directions[0]).flatten(1).t(), self.rows.t())
        return self.patches.added(back)

    def _sum_up(self, product: Tensor, rows: Tensor) -> None:
        self.gradient.copy_(product.t())
        self.write_bias(rows, 0)


class ChangingRule(Rule):
    """`ColumnsRule` or `ConvolutionRule`, by the input's shape: for weights that change."""

    def __init__(self, data: Given, options: tuple[Any, ...]) -> None:
        super().__init__(data)
        self.inner = there(data.weights[0])[0].numel()
        self.columns = ColumnsRule(data, options)
        self.kernels = ConvolutionRule(data, options)

    def forward(self, x: Tensor) -> Tensor:
        few = _few(x, self.inner, math.prod(self.columns.patches.see(x.shape)))
        self.rule: Rule = self.columns if few else self.kernels
        return self.rule.forward(x)

    def backward(self, delta: Tensor) -> Back:
        return self.rule.backward(delta)

    def tangent(self, x: Tensor | None) -> Tensor | None:
        self.rule.directions = self.directions
        return self.rule.tangent(x)

    def moved(self, delta: Tensor) -> Back:
        return self.rule.moved(delta)


class PackedRule(ConvolutionRule):
    """As `ConvolutionRule`, with fixed weights in the processor's own layout from the start.

    Values have the channels last. If there are few, products with changes are those of
    `ColumnsRule`.
    """

    def __init__(self, data: Given, options: tuple[Any, ...]) -> None:
        super().__init__(data, options)
        stride, padding, dilation, groups = options
        weight = self.weight
        self.patches = Patches(weight.shape[2:], options)
        self.options = (padding, stride, dilation, groups)
        self.packed = _pack(weight, self.options)
        self.packed_back: Tensor | None = None
        # The transpose of a convolution of stride 1 is a convolution with the kernel turned around,
        # so it can be packed too. It must not need a negative padding.
        if list(stride) == [1, 1]:
            reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
            margin = [r - p for r, p in zip(reach, padding, strict=True)]
            if min(margin) >= 0:
                turned = weight.flip(2, 3).transpose(0, 1).contiguous()
                self.options_back = (margin, stride, dilation, groups)
                self.packed_back = _pack(turned, self.options_back)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.weight[0].numel()
        places = math.prod(self.patches.see(x.shape))
        self.few = _few(x, inner, places)
        self.tall = _tall(inner, places)
        if self.few:
            # Rows of an image are copied several times faster than single values.
            self.columns = self.patches.of(x.contiguous())
        if self.few and inner <= _NARROW:
            self.x = x
            rows = _product(self.columns, self.weight.flatten(1), self.bias)
            return self.patches.values(rows)
        self.x = x = x.contiguous(memory_format=torch.channels_last)
        return _run(x, self.packed, self.bias, self.options)

    def backward(self, delta: Tensor) -> Tensor | None:
        self.delta = delta
        if self.few:
            self.rows = self.patches.rows(delta)
            weight = there(self.gradients[0]).flatten(1)
            torch.mm(self.rows.t(), self.columns.t(), out=weight)
            self.write_bias(self.rows, 0)
        else:
            mask = [False, True, self.gradients[1] is not None]
            self.write(*self._back(delta, self.weight, mask)[1:])
        return self._fixed(delta) if self.moving else None

    def tangent(self, x: Tensor | None) -> Tensor | None:
        direction, shift = self.directions
        if self.few:
            rows = _product(self.columns, there(direction).flatten(1), shift)
            change = self.patches.values(rows)
        else:
            change = _convolve(self.x, direction, shift, *self.how)
        if x is not None:
            change += _run(x, self.packed, None, self.options)
        return change

    def moved(self, delta: Tensor) -> Tensor:
        change = self._fixed(delta)
        direction = there(self.directions[0])
        if self.tall:
            change += self.patches.added(self.rows.mm(direction.flatten(1)).t())
        else:
            change += self._back(self.delta, direction, [True, False, False])[0]
        return change

    def _fixed(self, delta: Tensor) -> Tensor:
        if self.packed_back is not None:
            return _run(delta, self.packed_back, None, self.options_back)
        if self.tall:
            rows = self.patches.rows(delta)
            return self.patches.added(rows.mm(self.weight.flatten(1)).t())
        return self.pulled(delta)


def _few(
    x: Tensor,
    inner: int,
    places: int,
) -> bool:
    """Whether products with columns are faster, for these weights per output channel and values."""
    return _tall(inner, places) or (len(x) == 1 and x.numel() <= _SLOW)


def _tall(inner: int, places: int) -> bool:
    """Whether there are so many weights that to turn them around takes longer than the product."""
    return inner > _FEW * places


def _product(
    columns: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    if bias is None:
        return columns.t().mm(weight.t())
    return torch.addmm(bias, columns.t(), weight.t())


def _pack(weight: Tensor, options: Any) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._reorder_convolution_weight(weight, *options, None))


def _run(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    options: Any,
) -> Tensor:
    value: Tensor = torch.ops.mkldnn._convolution_pointwise(
        x, packed, bias, *options, "none", [], ""
    )
    return value
