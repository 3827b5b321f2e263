"""Norms in the four passes: batch norm with fixed statistics, and norms within each example."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from leakbound.engines.rules import Given, Rule, there

Kernels = Callable[..., tuple[Tensor, Tensor, Tensor]]
_batch_norm: Kernels = torch.ops.aten.native_batch_norm.default
_batch_norm_backward: Kernels = torch.ops.aten.native_batch_norm_backward.default
_group_norm: Kernels = torch.ops.aten.native_group_norm.default
_group_norm_backward: Callable[..., tuple[Tensor | None, ...]] = (
    torch.ops.aten.native_group_norm_backward.default
)


class FixedNormRule(Rule):
    def __init__(self, given: Given, eps: float) -> None:
        super().__init__(given)
        self.weight, self.bias = given.weights
        self.mean, self.variance = map(there, given.buffers)
        self.eps, self.rate = eps, torch.rsqrt(self.variance + eps)[:, None, None]
        self.renew()

    def renew(self) -> None:
        self.scale = self.rate if self.weight is None else self.rate * channels(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return self._norm(x, self.weight, self.bias)

    def backward(self, delta: Tensor) -> Tensor | None:
        self.delta = delta
        mask = [self.moving, self.weight is not None, self.bias is not None]
        given = (self.weight, self.mean, self.variance, None, None, False, self.eps, mask)
        back, *own = _batch_norm_backward(delta, self.x, *given)
        self.write(*own)
        return back if self.moving else None

    def tangent(self, x: Tensor | None) -> Tensor | None:
        weight, bias = self.directions
        self.change = x if self.curved else None
        if weight is None and bias is None:
            return None if x is None else x * self.scale
        weight = torch.zeros_like(self.mean) if weight is None else weight
        change = self._norm(self.x, weight, bias)
        return change if x is None else torch.addcmul(change, x, self.scale)

    def moved(self, delta: Tensor) -> Tensor:
        if self.curved:
            self._curve(delta)
        change, weight = delta * self.scale, self.directions[0]
        if weight is None:
            return change
        return change.addcmul_(self.delta, channels(weight) * self.rate)

    def _curve(self, delta: Tensor) -> None:
        if self.gradients[0] is not None:
            product = delta * (self.x - channels(self.mean))
            if self.change is not None:
                product.addcmul_(self.delta, self.change)
            torch.mul(product.sum((0, 2, 3)), self.rate.flatten(), out=self.gradients[0])
        self.write_bias(delta, (0, 2, 3))

    def _norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return _batch_norm(x, weight, bias, self.mean, self.variance, False, 0.0, self.eps)[0]


class GroupNormRule(Rule):
    """Group norm of images, on PyTorch's kernels; see `StandardizedRule` for the other cases."""

    def __init__(self, given: Given, groups: int, eps: float) -> None:
        super().__init__(given)
        self.weight, self.bias = given.weights
        self.groups, self.eps = groups, eps

    def forward(self, x: Tensor) -> Tensor:
        last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        self.layout = torch.channels_last if last else torch.contiguous_format
        self.x = x = x.contiguous(memory_format=self.layout)
        self.sizes = (len(x), x.shape[1], x.shape[2] * x.shape[3], self.groups)
        value, self.mean, self.rate = self._norm(self.weight, self.bias)
        return value

    def backward(self, delta: Tensor) -> Tensor | None:
        self.delta = delta
        mask = [self.moving, self.weight is not None, self.bias is not None]
        back, *own = self._back(delta, self.weight, mask)
        self.write(*own)
        self.back = back if self.moving else None
        return self.back

    def tangent(self, x: Tensor | None) -> Tensor | None:
        weight, bias = self.directions
        own = None if weight is None else self._norm(weight, bias)[0]
        self.changes = x is not None
        if x is None:
            return own
        self.hat = self._norm(None, None)[0]
        self.hat_change = self._projected(x)
        self.rate_change = self._shared(self.hat, x, None)
        scale = None if self.weight is None else channels(self.weight)
        if own is None:
            return self.hat_change if scale is None else self.hat_change * scale
        return own.addcmul_(self.hat_change, there(scale))

    def moved(self, delta: Tensor) -> Tensor:
        if self.curved:
            self._curve(delta)
        weight = self.directions[0]
        scaled = delta if self.weight is None else delta * channels(self.weight)
        if weight is not None:
            scaled = scaled.addcmul_(self.delta, channels(weight))
        change = self._projected(scaled)
        if self.moving:
            along = self._shared(self.hat, self.delta, self.weight)
            crossed = self._shared(self.hat_change, self.delta, self.weight)
            change.addcmul_(self.rate_change, there(self.back), value=-1)
            change.addcmul_(along, self.hat_change, value=-1)
            change.addcmul_(crossed, self.hat, value=-1)
        return change

    def _curve(self, delta: Tensor) -> None:
        if self.gradients[0] is not None:
            product = delta * (self.hat if self.changes else self._norm(None, None)[0])
            if self.changes:
                product.addcmul_(self.delta, self.hat_change)
            torch.sum(product, (0, 2, 3), out=self.gradients[0])
        self.write_bias(delta, (0, 2, 3))

    def _norm(self, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return _group_norm(self.x, weight, bias, *self.sizes, self.eps)

    def _projected(self, change: Tensor) -> Tensor:
        """The derivative of standardizing, applied to a change: it is symmetric."""
        return there(self._back(change, None, [True, False, False])[0])

    def _back(
        self, delta: Tensor, weight: Tensor | None, mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        delta = delta.contiguous(memory_format=self.layout)
        given = (self.x, self.mean, self.rate, weight, *self.sizes, mask)
        return _group_norm_backward(delta, *given)

    def _shared(self, one: Tensor, other: Tensor, weight: Tensor | None) -> Tensor:
        """The groups' rates times their means of the (weighted) product, as (B, C, 1, 1)."""
        size, count, places, groups = self.sizes
        totals = (one * other).sum((2, 3))
        totals = totals if weight is None else totals * weight
        rates = totals.view(size, groups, -1).sum(2).mul_(self.rate.view(size, groups))
        rates = rates.div_(places * count // groups)[:, :, None]
        return rates.expand(-1, -1, count // groups).reshape(size, count, 1, 1)


class StandardizedRule(Rule):
    """Group norm and layer norm: rows of mean 0 and variance 1, then scaled and shifted.

    `rows` per example; `shape` is that of the weights, as it broadcasts over an example.
    """

    def __init__(self, given: Given, rows: int, shape: tuple[int, ...], eps: float) -> None:
        super().__init__(given)
        self.rows, self.shape, self.eps = rows, shape, eps
        self.weight, self.bias = map(self._wide, given.weights)

    def forward(self, x: Tensor) -> Tensor:
        self.before = x.shape
        rows = x.reshape(len(x), self.rows, -1)
        variance, mean = torch.var_mean(rows, 2, correction=0, keepdim=True)
        self.rate = torch.rsqrt(variance + self.eps)
        self.hat = (rows - mean).mul_(self.rate)
        return self._scaled(self.hat.view(x.shape), self.weight, self.bias)

    def backward(self, delta: Tensor) -> Tensor | None:
        self.delta = delta
        self._sum_up(delta, None)
        if not self.moving:
            return None
        scaled = delta if self.weight is None else delta * self.weight
        self.scaled = scaled.reshape(self.hat.shape)
        self.back, self.along = self._projected(self.scaled)
        return self.back.view(delta.shape)

    def tangent(self, x: Tensor | None) -> Tensor | None:
        weight, bias = map(self._wide, self.directions)
        self.hat_change, change = None, None
        if x is not None:
            self.hat_change, self.rate_change = self._projected(x.reshape(self.hat.shape))
            change = self.hat_change.view(x.shape)
            change = change if self.weight is None else change * self.weight
        if weight is not None:
            own = self._scaled(self.hat.view(self.before), weight, bias)
            return own if change is None else own.add_(change)
        return change if bias is None or change is None else change + bias

    def moved(self, delta: Tensor) -> Tensor:
        if self.curved:
            self._sum_up(delta, self.hat_change)
        scaled = delta if self.weight is None else delta * self.weight
        weight = self._wide(self.directions[0])
        if weight is not None:
            scaled = torch.addcmul(scaled, self.delta, weight)
        change, _ = self._projected(scaled.reshape(self.hat.shape))
        if self.moving:
            hat_change = there(self.hat_change)
            crossed = (hat_change * self.scaled).mean(2, keepdim=True)
            change.addcmul_(self.rate * self.rate_change, self.back, value=-1)
            change.addcmul_(self.rate * self.along, hat_change, value=-1)
            change.addcmul_(self.rate * crossed, self.hat, value=-1)
        return change.view(delta.shape)

    def _sum_up(self, delta: Tensor, hat_change: Tensor | None) -> None:
        """Write the gradients, or their changes, as sums over the elements that share a weight."""
        weight, bias = self.gradients
        over = [0, *(1 + at for at, side in enumerate(self.shape) if side == 1)]
        if bias is not None:
            bias.copy_(delta.sum(over).view(bias.shape))
        if weight is not None:
            product = delta * self.hat.view(delta.shape)
            if hat_change is not None:
                product.addcmul_(self.delta, hat_change.view(delta.shape))
            weight.copy_(product.sum(over).view(weight.shape))

    def _projected(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The (symmetric) derivative of standardizing applied to the rows' change, and <hat,
        change>.
        """
        along = (self.hat * rows).mean(2, keepdim=True)
        change = rows - rows.mean(2, keepdim=True)
        return change.addcmul_(self.hat, along, value=-1).mul_(self.rate), along

    def _wide(self, own: Tensor | None) -> Tensor | None:
        return None if own is None else own.view(self.shape)

    @staticmethod
    def _scaled(hat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if weight is None:
            return hat
        return hat * weight if bias is None else torch.addcmul(bias, hat, weight)


def channels(weight: Tensor) -> Tensor:
    return weight[:, None, None]
