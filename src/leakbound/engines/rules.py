"""One layer's part in the four passes of an exact attack step; linear layers, pools, shapes.

A step of the R-operator passes through the network four times: values forward, derivatives of the
loss ("deltas") backward, then the values' tangents forward and the deltas' tangents backward, both
along one direction v in the weights. A rule keeps between the passes what later passes need.

Along v the weights' gradients also change, by the Hessian's product with v: <delta', a> plus
<delta, a'> if the gradient is <delta, a>. A rule that is `curved` also gives that, in the last
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from leakbound.engines.activations import Activation, Kernel
from leakbound.engines.reader import Layer, Layers
from leakbound.engines.tape import Call

_average_pool_backward: Kernel = torch.ops.aten.avg_pool2d_backward.default
_adaptive_pool_backward: Kernel = torch.ops.aten._adaptive_avg_pool2d_backward.default
_softmax_backward: Kernel = torch.ops.aten._softmax_backward_data.default
_max_pool: Callable[..., tuple[Tensor, Tensor]] = torch.ops.aten.max_pool2d_with_indices.default
_max_pool_backward: Kernel = torch.ops.aten.max_pool2d_with_indices_backward.grad_input


Some = tuple[Tensor | None, ...]
Back = Tensor | Some | None
"""One delta for each source, or the same for all; None: no source needs one."""


@dataclass(frozen=True, eq=False)
class Given:
    """The data of a rule: weights and buffers, frozen ones too, None for an absent one.

    `gradients` are views of the memory for the weights' gradients, None for a frozen layer.
    `moving`: the input changes with the weights of earlier layers. `curved`: the last pass
    overwrites the gradients with their changes, and weights may be overwritten between steps.
    """

    weights: Some
    buffers: Some
    gradients: Some
    moving: bool
    curved: bool

    @property
    def frozen(self) -> bool:
        return all(place is None for place in self.gradients)


class Rule:
    """A layer with one output: a linear map of its input that the weights do not change.

    Subclasses override what differs. Methods take one tensor for each source; None is no change.
    No tensor that is passed in is written to.
    """

    def __init__(self, data: Given) -> None:
        self.moving = data.moving
        self.curved = data.curved
        self.frozen = data.frozen
        self.gradients = data.gradients
        self.directions: Sequence[Tensor | None] = (None,) * len(data.weights)

    def write(self, *values: Tensor | None) -> None:
        for place, value in zip(self.gradients, values, strict=True):
            if place is not None:
                place.copy_(there(value))

    def write_bias(self, delta: Tensor, over: int | tuple[int, ...]) -> None:
        """Write the delta's sum over these dimensions to the second weight's place."""
        if self.gradients[1] is not None:
            torch.sum(delta, over, out=self.gradients[1])

    def forward(self, *x: Any) -> Tensor:
        raise NotImplementedError

    def backward(self, delta: Tensor) -> Back:
        """The input's delta; None if no earlier layer has weights. Gradients are written."""
        return self.pulled(delta) if self.moving else None

    def tangent(self, *x: Any) -> Tensor | None:
        """The value's change, from those of the input and of the weights along `directions`."""
        raise NotImplementedError

    def moved(self, delta: Tensor) -> Back:
        """The change of the input's delta, from those of the output's delta and of the weights."""
        return self.pulled(delta)

    def pulled(self, delta: Tensor) -> Back:
        """The transposed map, at the last values."""
        raise NotImplementedError


class IdentityRule(Rule):
    def forward(self, x: Tensor) -> Tensor:
        return x

    def tangent(self, x: Tensor | None) -> Tensor | None:
        return x

    def pulled(self, delta: Tensor) -> Tensor:
        return delta


class SumRule(Rule):
    """The sum of two values, of which one may broadcast."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        self.shapes = (x.shape, other.shape)
        value = x + other
        self.shape = value.shape
        return value

    def tangent(
        self,
        x: Tensor | None,
        other: Tensor | None = None,
    ) -> Tensor | None:
        if x is None or other is None:
            change = other if x is None else x
            return change if change is None else change.expand(self.shape)
        return x + other

    def pulled(self, delta: Tensor) -> Back:
        return tuple(delta.sum_to_size(shape) for shape in self.shapes)


class BilinearRule(Rule):
    """A product of two values; subclasses say which."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        self.x = x
        self.other = other
        return self.of(x, other)

    def backward(self, delta: Tensor) -> Back:
        self.delta = delta
        return self.pulled(delta) if self.moving else None

    def tangent(self, x: Tensor | None, other: Tensor | None) -> Tensor | None:
        self.changes = (x, other)
        change = None if x is None else self.of(x, self.other)
        return change if other is None else self.of(self.x, other, change)

    def moved(self, delta: Tensor) -> Back:
        x = self.left(delta, self.other)
        other = self.right(self.x, delta)
        first, second = self.changes
        if self.moving:  # else there was no delta
            x = x if second is None else self.left(self.delta, second, x)
            other = other if first is None else self.right(first, self.delta, other)
        return self.back(x, other)

    def pulled(self, delta: Tensor) -> Back:
        return self.back(self.left(delta, self.other), self.right(self.x, delta))

    def back(self, x: Tensor, other: Tensor) -> Back:
        return x, other

    def of(
        self,
        x: Tensor,
        other: Tensor,
        into: Tensor | None = None,
    ) -> Tensor:
        """The product, added to `into`, which may be overwritten."""
        raise NotImplementedError

    left = right = of
    """The same for the derivatives, of (delta, other) and (x, delta)."""


class ProductRule(BilinearRule):
    """The product of every element, where sides may broadcast."""

    def of(
        self,
        x: Tensor,
        other: Tensor,
        into: Tensor | None = None,
    ) -> Tensor:
        return x * other if into is None else into.addcmul_(x, other)

    left = right = of

    def back(self, x: Tensor, other: Tensor) -> Back:
        return x.sum_to_size(self.x.shape), other.sum_to_size(self.other.shape)


class MatrixProductRule(BilinearRule):
    """Products of as many matrices on either side."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        self.shapes = (x.shape, other.shape)
        # one copy here saves one in every product
        value = super().forward(_stack(x), _stack(other))
        return value.view(*x.shape[:-1], other.shape[-1])

    def backward(self, delta: Tensor) -> Back:
        return super().backward(_stack(delta))

    def tangent(self, x: Tensor | None, other: Tensor | None) -> Tensor | None:
        stacks = (None if tensor is None else _stack(tensor) for tensor in (x, other))
        change = super().tangent(*stacks)
        (first, second) = self.shapes
        return None if change is None else change.view(*first[:-1], second[-1])

    def moved(self, delta: Tensor) -> Back:
        return super().moved(_stack(delta))

    def back(self, x: Tensor, other: Tensor) -> Back:
        return x.view(self.shapes[0]), other.view(self.shapes[1])

    def of(
        self,
        x: Tensor,
        other: Tensor,
        into: Tensor | None = None,
    ) -> Tensor:
        return torch.bmm(x, other) if into is None else into.baddbmm_(x, other)

    def left(
        self,
        delta: Tensor,
        other: Tensor,
        into: Tensor | None = None,
    ) -> Tensor:
        return self.of(delta, other.mT, into)

    def right(
        self,
        x: Tensor,
        delta: Tensor,
        into: Tensor | None = None,
    ) -> Tensor:
        return self.of(x.mT, delta, into)


def _stack(matrices: Tensor) -> Tensor:
    return matrices.reshape(-1, *matrices.shape[-2:])


class StraightRule(Rule):
    """A layer without weights whose value `of` is linear in its input; options as the reader's."""

    def __init__(self, data: Given, **options: Any) -> None:
        super().__init__(data)
        self.options = options

    def of(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return self.of(x)

    def tangent(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else self.of(x)


class ReshapeRule(StraightRule):
    def of(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), *self.options["shape"])

    def pulled(self, delta: Tensor) -> Tensor:
        return delta.reshape(len(delta), *self.x.shape[1:])


class PermuteRule(StraightRule):
    def of(self, x: Tensor) -> Tensor:
        return x.permute(self.options["order"])

    def pulled(self, delta: Tensor) -> Tensor:
        order: Sequence[int] = self.options["order"]
        return delta.permute(sorted(range(len(order)), key=order.__getitem__))


class ScaleRule(StraightRule):
    def of(self, x: Tensor) -> Tensor:
        return torch.mul(x, self.options["factor"])

    def pulled(self, delta: Tensor) -> Tensor:
        return torch.mul(delta, self.options["factor"])


class MeanRule(StraightRule):
    def of(self, x: Tensor) -> Tensor:
        return x.mean(self.options["dims"], keepdim=self.options["keep"])

    def pulled(self, delta: Tensor) -> Tensor:
        count = 1
        for dim in sorted(self.options["dims"]):
            count *= self.x.shape[dim]
            delta = delta if self.options["keep"] else delta.unsqueeze(dim)
        return (delta / count).expand(self.x.shape)


class AveragePoolRule(StraightRule):
    def of(self, x: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(x, *self.options["options"])

    def pulled(self, delta: Tensor) -> Tensor:
        return _average_pool_backward(delta, sides(self.x, delta), *self.options["options"])


class AdaptivePoolRule(StraightRule):
    def of(self, x: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(x, self.options["size"])

    def pulled(self, delta: Tensor) -> Tensor:
        if self.options["size"] == (1, 1):
            return (delta / self.x[0, 0].numel()).expand(-1, -1, *self.x.shape[2:])
        return _adaptive_pool_backward(delta, sides(self.x, delta))


def sides(x: Tensor, delta: Tensor) -> Tensor:
    """An input with as many rows as the delta, for kernels that use only its sides."""
    return x if len(x) == len(delta) else x[:1].expand(len(delta), *x.shape[1:])


class MaxPoolRule(Rule):
    """Max pooling; the positions of the maxima are found once."""

    def __init__(self, data: Given, options: tuple[Any, ...]) -> None:
        super().__init__(data)
        self.options = options
        self.x: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        # PyTorch's kernel for the CPU is several times faster with the channels last.
        turned = x.device.type == "cpu" and x.is_contiguous()
        seen = x.contiguous(memory_format=torch.channels_last) if turned else x
        value, self.places = _max_pool(seen, *self.options)
        if turned:
            value = value.contiguous()
            self.places = self.places.contiguous()
        if self.x is None or self.x.shape != x.shape or self.x.stride() != x.stride():
            # Two places: earlier layers still need the delta in the first one in the last pass.
            self.back = torch.empty_like(x)
            self.back_change = torch.empty_like(x)
        self.x = x
        return value

    def tangent(self, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        places = self.places
        if len(x) > len(places):
            places = places.repeat(len(x) // len(places), 1, 1, 1)
        if places.is_contiguous():
            return x.flatten(2).gather(2, places.flatten(2)).view(places.shape)
        rows = x.permute(0, 2, 3, 1).flatten(1, 2)
        order = places.permute(0, 2, 3, 1)
        return rows.gather(1, order.flatten(1, 2)).view(order.shape).permute(0, 3, 1, 2)

    def backward(self, delta: Tensor) -> Tensor | None:
        return self._put(delta, self.back) if self.moving else None

    def moved(self, delta: Tensor) -> Tensor:
        size, *inner = self.back.shape
        if len(delta) == size == len(self.back_change):
            return self._put(delta, self.back_change)
        if len(delta) != len(self.back_change):
            self.back_change = delta.new_empty(len(delta), *inner)
        parts = zip(
            torch.split(delta, size),
            torch.split(self.back_change, size),
            strict=True,
        )
        for part, place in parts:
            self._put(part, place)
        return self.back_change

    def _put(self, delta: Tensor, place: Tensor) -> Tensor:
        # fresh memory for so many zeros would cost more than they do
        options = (*self.options, self.places)
        return _max_pool_backward(delta, self.x, *options, grad_input=place)


class ActivationRule(Rule):
    def __init__(self, data: Given, function: Activation) -> None:
        super().__init__(data)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        self.shape = x.shape
        value, self.saved = self.function.value(x)
        return value

    def backward(self, delta: Tensor) -> Tensor | None:
        if not self.moving:
            return None
        self.delta = delta
        return self.function.times_slope(self.saved, delta)

    def tangent(self, x: Tensor | None) -> Tensor | None:
        self.x = x if self.function.curved else None
        return None if x is None else self._times_slope(x)

    def moved(self, delta: Tensor) -> Tensor:
        change = self._times_slope(delta)
        if self.x is not None:
            x = self.x.view(-1, *self.shape)
            change.view(x.shape).addcmul_(x * self.function.second(self.saved), self.delta)
        return change

    def _times_slope(self, t: Tensor) -> Tensor:
        if t.shape == self.shape:
            return self.function.times_slope(self.saved, t)
        change = self.function.times_slope(self.saved, t.view(-1, *self.shape))
        return change.flatten(0, 1)


class SoftmaxRule(Rule):
    """Its derivative, y (t - sum(y t)), is symmetric."""

    def __init__(self, data: Given, dim: int) -> None:
        super().__init__(data)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        self.value = torch.softmax(x, self.dim)
        return self.value

    def backward(self, delta: Tensor) -> Back:
        self.delta = delta
        return self.pulled(delta) if self.moving else None

    def tangent(self, x: Tensor | None) -> Tensor | None:
        self.change = None if x is None else self.pulled(x)
        return self.change

    def moved(self, delta: Tensor) -> Back:
        if self.change is None or not self.moving:
            return self.pulled(delta)
        mean = (self.value * self.delta).sum(self.dim, keepdim=True)
        # y' (delta - mean) + y (delta' - sum(y delta') - sum(y' delta))
        rate = torch.addcmul(delta * self.value, self.change, self.delta - mean)
        return rate.addcmul_(
            self.value,
            rate.sum(self.dim, keepdim=True),
            value=-1,
        )

    def pulled(self, delta: Tensor) -> Tensor:
        return _softmax_backward(delta, self.value, self.dim, self.value.dtype)


class LinearRule(Rule):
    """A fully connected layer on (..., inputs)."""

    def __init__(self, data: Given) -> None:
        super().__init__(data)
        self.weight = there(data.weights[0])
        self.bias = data.weights[1]

    def forward(self, x: Tensor) -> Tensor:
        self.shape = x.shape
        self.x = _rows(x)
        return self._value(nn.functional.linear(self.x, self.weight, self.bias))

    def backward(self, delta: Tensor) -> Back:
        delta = _rows(delta)
        if not self.frozen:  # the gradients are delta^T x and the delta's sum
            self.delta = delta
            torch.mm(delta.t(), self.x, out=there(self.gradients[0]))
            self.write_bias(delta, 0)
        return delta.mm(self.weight).view(self.shape) if self.moving else None

    def tangent(self, x: Tensor | None) -> Tensor | None:
        if self.frozen:
            if x is None:
                return None
            return nn.functional.linear(_rows(x), self.weight).view(*x.shape[:-1], -1)
        x = None if x is None else _rows(x)
        direction, shift = self.directions
        self.change = x if self.curved else None
        change = nn.functional.linear(self.x, there(direction), shift)
        return self._value(change if x is None else change.addmm_(x, self.weight.t()))

    def moved(self, delta: Tensor) -> Back:
        rows = _rows(delta)
        if self.frozen:
            return rows.mm(self.weight).view(*delta.shape[:-1], -1)
        if self.curved:
            left, right = paired(rows, self.delta, self.x, self.change)
            torch.mm(left.t(), right, out=there(self.gradients[0]))
            self.write_bias(rows, 0)
        change = rows.mm(self.weight).addmm_(self.delta, there(self.directions[0]))
        return change.view(self.shape)

    def _value(self, rows: Tensor) -> Tensor:
        return rows.view(*self.shape[:-1], -1)


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


class TensorRule(Rule):
    """A weight or a buffer, or a constant tensor, as a value."""

    def __init__(self, data: Given, tensor: Tensor | None = None) -> None:
        super().__init__(data)
        self.tensor = data.weights[0] if tensor is None else tensor

    def forward(self) -> Tensor:
        return there(self.tensor)

    def backward(self, delta: Tensor) -> Back:
        self.write(delta)
        return None

    def tangent(self) -> Tensor | None:
        return self.directions[0] if self.directions else None

    def moved(self, delta: Tensor) -> Back:
        if self.curved:
            self.write(delta)
        return None


class StraightCallRule(Rule):
    """A call of a function that is linear in its tensors of floating point; options as `Tape`'s.

    `live` says which sources have derivatives. PyTorch's autograd transposes this call alone.
    """

    examples = 1
    """How many examples the call is about, set before each `forward`."""

    def __init__(
        self,
        data: Given,
        call: Call,
        live: tuple[bool, ...],
    ) -> None:
        super().__init__(data)
        self.call = call
        self.live = live

    def forward(self, *xs: Tensor) -> Tensor:
        leaves = [
            x.detach().requires_grad_() if is_live and x.is_floating_point() else x
            for x, is_live in zip(xs, self.live, strict=True)
        ]
        self.sources = tuple(leaves)
        self.leaves = [x for x in leaves if x.requires_grad]
        with torch.enable_grad():
            self.value = self.call.of(self.sources, self.examples)
        return self.value.detach()

    def pulled(self, delta: Tensor) -> Back:
        return self._back([self.value], [delta])

    def tangent(self, *xs: Tensor | None) -> Tensor | None:
        if all(x is None for x in xs):
            return None
        moved = list(self.sources)
        for at, (x, source) in enumerate(zip(xs, self.sources, strict=True)):
            if source.is_floating_point():  # others are places, or sizes
                moved[at] = torch.zeros_like(source) if x is None else x
        return self.call.of(tuple(moved), self.examples)

    def _back(self, values: list[Tensor], deltas: list[Tensor]) -> Back:
        """The derivative of sum <value, delta> in each source that has one."""
        slopes: list[Tensor | None] = [None] * len(self.leaves)
        if values[0].requires_grad and self.leaves:
            how = {"retain_graph": True, "materialize_grads": True}
            slopes = list(torch.autograd.grad(values, self.leaves, deltas, **how))
        rest = iter(slopes)
        return tuple(next(rest) if source.requires_grad else None for source in self.sources)


class CurvedCallRule(StraightCallRule):
    """A call of any function: PyTorch's autograd differentiates its backward pass, of it alone.

    The backward pass B(x, delta) is linear in delta, and its transpose there is the tangent. The
    derivative of <B(x, delta), x'> in x is the change of B along x', as a Hessian is symmetric.
    """

    def backward(self, delta: Tensor) -> Back:
        if not self.value.requires_grad:  # such as a comparison
            return None
        self.delta = delta.detach().requires_grad_()
        with torch.enable_grad():
            how = {"create_graph": True, "materialize_grads": True}
            self.slopes = torch.autograd.grad(self.value, self.leaves, self.delta, **how)
        rest = iter(self.slopes)
        return tuple(
            next(rest).detach() if source.requires_grad else None for source in self.sources
        )

    def tangent(self, *xs: Tensor | None) -> Tensor | None:
        self.pairs = []
        if all(x is None for x in xs) or not self.value.requires_grad:
            return None
        changes = [x for x, source in zip(xs, self.sources, strict=True) if source.requires_grad]
        pairs = zip(self.slopes, changes, strict=True)
        self.pairs = [(s, x) for s, x in pairs if x is not None and s.requires_grad]
        if not self.pairs:
            return torch.zeros_like(self.value)
        slopes, moved = zip(*self.pairs, strict=True)
        how = {"retain_graph": True, "materialize_grads": True}
        return torch.autograd.grad(slopes, self.delta, moved, **how)[0]

    def moved(self, delta: Tensor) -> Back:
        values, deltas = zip((self.value, delta), *self.pairs, strict=True)
        return self._back(list(values), list(deltas))


def paired(
    delta: Tensor,
    before: Tensor,
    x: Tensor,
    change: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Twice the examples, so that one product of the two is <delta, x> + <before, change>."""
    if change is None:
        return delta, x
    return torch.cat((delta, before)), torch.cat((x, change))


def there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


class Passes:
    """The four passes over a model's layers, each by its rule, which keeps what later ones need.

    Values, deltas and their changes are lists, by the number of the layer's output.
    """

    def __init__(self, layers: Layers, rules: Sequence[Rule]) -> None:
        self.layers = list(zip(layers, rules, strict=True))
        self.count = 1 + max(layer.output for layer in layers)
        self.last = layers[-1].output
        self.values: list[Any] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """The output."""
        before = self.values
        # A constant may have been expanded to the number of examples.
        same = bool(before) and len(before[0]) == len(inputs)
        self.values = [None] * self.count
        self.values[0] = inputs
        for layer, rule in self.layers:
            if same and not layer.live:  # it depends on neither inputs nor weights
                self.values[layer.output] = before[layer.output]
                continue
            if isinstance(rule, StraightCallRule):
                rule.examples = len(inputs)
            xs = [self.values[source] for source in layer.sources]
            self.values[layer.output] = rule.forward(*xs)
        return cast(Tensor, self.values[self.last])

    def backward(self, delta: Tensor) -> list[Any]:
        """The deltas from that of the output; gradients are written."""
        deltas = self._started(delta)
        for layer, rule in reversed(self.layers):
            if layer.moving or layer.owns:
                _spread(deltas, layer.sources, rule.backward(self._of(deltas, layer)))
        return deltas

    def tangent(self, inputs: Tensor | None) -> list[Any]:
        """The values' changes, when the inputs change, and the weights along `Rule.directions`."""
        tangents: list[Any] = [None] * self.count
        tangents[0] = inputs
        for layer, rule in self.layers:
            if layer.live:
                xs = [tangents[source] for source in layer.sources]
                tangents[layer.output] = rule.tangent(*xs)
        return tangents

    def moved(self, change: Tensor, *, to_inputs: bool = True) -> list[Any]:
        """The deltas' changes from that of the output's; to the first weights, or the inputs."""
        changes = self._started(change)
        for layer, rule in reversed(self.layers):
            if layer.live and (to_inputs or layer.moving):
                _spread(changes, layer.sources, rule.moved(self._of(changes, layer)))
        return changes

    def _started(self, last: Tensor) -> list[Any]:
        deltas: list[Any] = [None] * self.count
        deltas[self.last] = last
        return deltas

    def _of(self, deltas: list[Any], layer: Layer) -> Tensor:
        """A layer's delta: zero if nothing that depends on it reaches the output."""
        delta = deltas[layer.output]
        return torch.zeros_like(self.values[layer.output]) if delta is None else delta


def _spread(
    deltas: list[Any],
    sources: tuple[int, ...],
    back: Back,
) -> None:
    parts = back if isinstance(back, tuple) else (back,) * len(sources)
    for source, part in zip(sources, parts, strict=True):
        before = deltas[source]
        if part is not None:
            deltas[source] = part if before is None else before + part
