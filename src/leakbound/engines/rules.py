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
from typing import Any

import torch
from torch import Tensor, nn

from leakbound.engines.activations import Activation, Kernel

_average_pool_backward: Kernel = torch.ops.aten.avg_pool2d_backward.default
_adaptive_pool_backward: Kernel = torch.ops.aten._adaptive_avg_pool2d_backward.default
_max_pool: Callable[..., tuple[Tensor, Tensor]] = torch.ops.aten.max_pool2d_with_indices.default
_max_pool_backward: Kernel = torch.ops.aten.max_pool2d_with_indices_backward.grad_input


Some = tuple[Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class Given:
    """The data of a rule: weights and buffers, frozen ones too, None for an absent one.

    `gradients` are views of the memory for the weights' gradients, None for a frozen layer.
    `moving`: the input changes with the weights of earlier layers. `curved`: the last pass
    overwrites the gradients with their changes; weights may be overwritten between steps, see
    `Rule.renew`.
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

    Subclasses override what differs. No tensor that is passed in is written to.
    """

    def __init__(self, given: Given) -> None:
        self.moving, self.curved, self.frozen = given.moving, given.curved, given.frozen
        self.gradients = given.gradients
        self.directions: Sequence[Tensor | None] = ()

    def write(self, *values: Tensor | None) -> None:
        for place, value in zip(self.gradients, values, strict=True):
            if place is not None:
                place.copy_(there(value))

    def write_bias(self, delta: Tensor, over: int | tuple[int, ...]) -> None:
        """Write the delta's sum over these dimensions to the second weight's place."""
        if self.gradients[1] is not None:
            torch.sum(delta, over, out=self.gradients[1])

    def renew(self) -> None:
        """Derive again what was derived from the weights, which were overwritten."""

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def backward(self, delta: Tensor) -> Tensor | None:
        """The input's delta; None if no earlier layer has weights. Gradients are written."""
        return self.pulled(delta) if self.moving else None

    def tangent(self, x: Tensor | None) -> Tensor | None:
        """The value's change, from those of the input and of the weights along `directions`."""
        raise NotImplementedError

    def moved(self, delta: Tensor) -> Tensor:
        """The change of the input's delta, from those of the output's delta and of the weights."""
        return self.pulled(delta)

    def pulled(self, delta: Tensor) -> Tensor:
        """The transposed map, at the last values."""
        raise NotImplementedError


class IdentityRule(Rule):
    def forward(self, x: Tensor) -> Tensor:
        return x

    def tangent(self, x: Tensor | None) -> Tensor | None:
        return x

    def pulled(self, delta: Tensor) -> Tensor:
        return delta


class SumRule(IdentityRule):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return x if other is None else x + other

    def tangent(self, x: Tensor | None, other: Tensor | None = None) -> Tensor | None:
        if x is None or other is None:
            return other if x is None else x
        return x + other


class StraightRule(Rule):
    """A layer without weights whose value `of` is linear in its input; options as the reader's."""

    def __init__(self, given: Given, **options: Any) -> None:
        super().__init__(given)
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
        return delta.reshape(self.x.shape)


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
        return _average_pool_backward(delta, self.x, *self.options["options"])


class AdaptivePoolRule(StraightRule):
    def of(self, x: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(x, self.options["size"])

    def pulled(self, delta: Tensor) -> Tensor:
        if self.options["size"] == (1, 1):
            return (delta / self.x[0, 0].numel()).expand(self.x.shape)
        return _adaptive_pool_backward(delta, self.x)


class MaxPoolRule(Rule):
    """Max pooling; the positions of the maxima are found once."""

    def __init__(self, given: Given, options: tuple[Any, ...]) -> None:
        super().__init__(given)
        self.options = options
        self.x: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        value, self.places = _max_pool(x, *self.options)
        if self.x is None or self.x.shape != x.shape or self.x.stride() != x.stride():
            self.back, self.back_change = torch.empty_like(x), torch.empty_like(x)
        self.x = x
        return value

    def tangent(self, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        places = self.places
        if places.is_contiguous():
            return x.flatten(2).gather(2, places.flatten(2)).view(places.shape)
        rows, order = x.permute(0, 2, 3, 1).flatten(1, 2), places.permute(0, 2, 3, 1)
        return rows.gather(1, order.flatten(1, 2)).view(order.shape).permute(0, 3, 1, 2)

    def backward(self, delta: Tensor) -> Tensor | None:
        return self._put(delta, self.back) if self.moving else None

    def moved(self, delta: Tensor) -> Tensor:
        return self._put(delta, self.back_change)

    def _put(self, delta: Tensor, place: Tensor) -> Tensor:
        # fresh memory for so many zeros would cost more than they do
        options = (*self.options, self.places)
        return _max_pool_backward(delta, self.x, *options, grad_input=place)


class ActivationRule(Rule):
    def __init__(self, given: Given, function: Activation) -> None:
        super().__init__(given)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        value, self.saved = self.function.value(x)
        return value

    def backward(self, delta: Tensor) -> Tensor | None:
        if not self.moving:
            return None
        self.delta = delta
        return self.function.times_slope(self.saved, delta)

    def tangent(self, x: Tensor | None) -> Tensor | None:
        self.x = x
        return None if x is None else self.function.times_slope(self.saved, x)

    def moved(self, delta: Tensor) -> Tensor:
        plain = self.function.times_slope(self.saved, delta)
        if self.x is None or not self.function.curved:
            return plain
        return plain.addcmul_(self.function.second(self.saved) * self.x, self.delta)


class LinearRule(Rule):
    """A fully connected layer on (B, inputs)."""

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self.weight, self.bias = there(given.weights[0]), given.weights[1]

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return nn.functional.linear(x, self.weight, self.bias)

    def backward(self, delta: Tensor) -> Tensor | None:
        if not self.frozen:  # the gradients are delta^T x and the delta's sum
            self.delta = delta
            torch.mm(delta.t(), self.x, out=there(self.gradients[0]))
            self.write_bias(delta, 0)
        return delta.mm(self.weight) if self.moving else None

    def tangent(self, x: Tensor | None) -> Tensor | None:
        if self.frozen:
            return None if x is None else nn.functional.linear(x, self.weight)
        direction, shift = self.directions
        self.change = x if self.curved else None
        change = nn.functional.linear(self.x, there(direction), shift)
        return change if x is None else change.addmm_(x, self.weight.t())

    def moved(self, delta: Tensor) -> Tensor:
        if self.frozen:
            return delta.mm(self.weight)
        if self.curved:
            self._curve(delta)
        change = delta.mm(self.weight)
        return change.addmm_(self.delta, there(self.directions[0]))

    def _curve(self, delta: Tensor) -> None:
        rows, values = paired(delta, self.delta, self.x, self.change)
        torch.mm(rows.t(), values, out=there(self.gradients[0]))
        self.write_bias(delta, 0)


def paired(
    delta: Tensor, before: Tensor, x: Tensor, change: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Twice the examples, so that one product of the two is <delta, x> + <before, change>."""
    if change is None:
        return delta, x
    return torch.cat((delta, before)), torch.cat((x, change))


def there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
