"""Norms in the four passes: batch norm with fixed statistics, and norms of each example alone."""

from __future__ import annotations

import torch
from torch import Tensor

from leakbound.engines.rules import Given, Rule, there

_ATEN = torch.ops.aten


class FixedNormRule(Rule):
    """Batch norm in eval mode: every channel scaled and shifted."""

    def __init__(self, given: Given, eps: float) -> None:
        super().__init__(given)
        self.weight, self.bias = given.weights
        self.gradients = given.gradients
        mean, variance = given.buffers
        if mean is None or variance is None:
            raise ValueError("buffers lacks the running statistics; give both")
        self.mean, self.variance, self.eps = mean, variance, eps
        self.rate = torch.rsqrt(variance + eps)[:, None, None]
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
        back: Tensor | None
        back, *own = _ATEN.native_batch_norm_backward.default(delta, self.x, *given)
        for place, value in zip(self.gradients, own, strict=True):
            if place is not None:
                place.copy_(value)
        return back if self.moving else None

    def tangent(self, x: Tensor | None) -> Tensor | None:
        weight, bias = self.directions
        self.change = x if self.curved else None
        moves = weight is not None or bias is not None
        if not moves:
            return None if x is None else x * self.scale
        weight = torch.zeros_like(self.mean) if weight is None else weight
        change = self._norm(self.x, weight, bias)
        return change if x is None else torch.addcmul(change, x, self.scale)

    def moved(self, delta: Tensor) -> Tensor:
        if self.curved:
            self._curve(delta)
        change = delta * self.scale
        weight = self.directions[0]
        return (
            change if weight is None else change.addcmul_(self.delta, channels(weight) * self.rate)
        )

    def _curve(self, delta: Tensor) -> None:
        weight, bias = self.gradients
        if weight is not None:
            product = delta * (self.x - channels(self.mean))
            if self.change is not None:
                product.addcmul_(self.delta, self.change)
            torch.mul(product.sum((0, 2, 3)), self.rate.flatten(), out=weight)
        if bias is not None:
            torch.sum(delta, (0, 2, 3), out=bias)

    def _norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        value: Tensor = _ATEN.native_batch_norm.default(
            x, weight, bias, self.mean, self.variance, False, 0.0, self.eps
        )[0]
        return value


class GroupNormRule(Rule):
    """Group norm of images, on PyTorch's kernels; see `StandardizedRule` for the other cases."""

    def __init__(self, given: Given, groups: int, eps: float) -> None:
        super().__init__(given)
        self.weight, self.bias = given.weights
        self.gradients = given.gradients
        self.groups, self.eps = groups, eps
        self.back: Tensor | None = None

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
        parts = self._pulled(delta, self.weight, mask)
        self.back = parts[0]
        for place, value in zip(self.gradients, parts[1:], strict=True):
            if place is not None:
                place.copy_(there(value))
        return self.back

    def tangent(self, x: Tensor | None) -> Tensor | None:
        weight, bias = self.directions or (None, None)
        moves = weight is not None
        own = self._norm(weight, bias)[0] if moves else None
        self.changes = x is not None
        if x is None:
            return own
        self.hat = self._norm(None, None)[0]
        self.hat_change = there(self._pulled(x, None, [True, False, False])[0])
        self.rate_change = self._shared(self.hat, x, None)
        scale = None if self.weight is None else channels(self.weight)
        if own is None:
            return self.hat_change if scale is None else self.hat_change * scale
        return own.addcmul_(self.hat_change, there(scale))

    def moved(self, delta: Tensor) -> Tensor:
        if self.curved:
            self._curve(delta)
        weight = self.directions[0] if self.directions else None
        scaled = delta if self.weight is None else delta * channels(self.weight)
        if weight is not None:
            scaled = scaled.addcmul_(self.delta, channels(weight))
        change = there(self._pulled(scaled, None, [True, False, False])[0])
        if self.moving:
            along = self._shared(self.hat, self.delta, self.weight)
            crossed = self._shared(self.hat_change, self.delta, self.weight)
            change.addcmul_(self.rate_change, there(self.back), value=-1)
            change.addcmul_(along, self.hat_change, value=-1)
            change.addcmul_(crossed, self.hat, value=-1)
        return change

    def _curve(self, delta: Tensor) -> None:
        weight, bias = self.gradients or (None, None)
        if weight is not None:
            product = delta * (self.hat if self.changes else self._norm(None, None)[0])
            if self.changes:
                product.addcmul_(self.delta, self.hat_change)
            torch.sum(product, (0, 2, 3), out=weight)
        if bias is not None:
            torch.sum(delta, (0, 2, 3), out=bias)

    def _norm(self, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = _ATEN.native_group_norm.default(
            self.x, weight, bias, *self.sizes, self.eps
        )
        return found

    def _pulled(
        self, delta: Tensor, weight: Tensor | None, mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        delta = delta.contiguous(memory_format=self.layout)
        given = (self.x, self.mean, self.rate, weight, *self.sizes, mask)
        parts = _ATEN.native_group_norm_backward.default(delta, *given)
        return tuple(part if wanted else None for part, wanted in zip(parts, mask, strict=True))

    def _shared(self, one: Tensor, other: Tensor, weight: Tensor | None) -> Tensor:
        size, count, places, groups = self.sizes
        totals = (one * other).sum((2, 3))
        totals = totals if weight is None else totals * weight
        rates = totals.view(size, groups, -1).sum(2).mul_(self.rate.view(size, groups))
        rates = rates.div_(places * count // groups)[:, :, None]
        return rates.expand(-1, -1, count // groups).reshape(size, count, 1, 1)


class StandardizedRule(Rule):
    """Group norm and layer norm: rows of mean 0 and variance 1, then scaled and shifted.

    Args:
        given: see `Given`.
        rows: rows an example.
        shape: the weights' shape, as it broadcasts over an example.
        eps: what is added to the variance.
    """

    def __init__(self, given: Given, rows: int, shape: tuple[int, ...], eps: float) -> None:
        super().__init__(given)
        self.rows, self.shape, self.eps = rows, shape, eps
        self.weight, self.bias = (self._wide(own) for own in given.weights)
        self.gradients = given.gradients

    def forward(self, x: Tensor) -> Tensor:
        self.before = x.shape
        rows = x.reshape(len(x), self.rows, -1)
        variance, mean = torch.var_mean(rows, 2, correction=0, keepdim=True)
        self.rate = torch.rsqrt(variance + self.eps)
        self.hat = (rows - mean).mul_(self.rate)
        return self._scaled(self.hat.view(x.shape), self.weight, self.bias)

    def backward(self, delta: Tensor) -> Tensor | None:
        self.delta = delta
        weight, bias = self.gradients
        if bias is not None:
            bias.copy_(self._summed(delta).view(bias.shape))
        if weight is not None:
            total = self._summed(delta * self.hat.view(delta.shape))
            weight.copy_(total.view(weight.shape))
        if not self.moving:
            return None
        scaled = delta if self.weight is None else delta * self.weight
        self.scaled = scaled.reshape(self.hat.shape)
        self.back, self.along = self._projected(self.scaled)
        return self.back.view(delta.shape)

    def tangent(self, x: Tensor | None) -> Tensor | None:
        weight, bias = (self._wide(own) for own in self.directions)
        self.changes = x is not None
        change = None
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
            self._curve(delta)
        scaled = delta if self.weight is None else delta * self.weight
        weight = self._wide(self.directions[0])
        if weight is not None:
            scaled = torch.addcmul(scaled, self.delta, weight)
        change, _ = self._projected(scaled.reshape(self.hat.shape))
        if self.moving:
            crossed = (self.hat_change * self.scaled).mean(2, keepdim=True)
            change.addcmul_(self.rate * self.rate_change, self.back, value=-1)
            change.addcmul_(self.rate * self.along, self.hat_change, value=-1)
            change.addcmul_(self.rate * crossed, self.hat, value=-1)
        return change.view(delta.shape)

    def _curve(self, delta: Tensor) -> None:
        weight, bias = self.gradients
        if bias is not None:
            bias.copy_(self._summed(delta).view(bias.shape))
        if weight is not None:
            product = delta * self.hat.view(delta.shape)
            if self.changes:
                product.addcmul_(self.delta, self.hat_change.view(delta.shape))
            weight.copy_(self._summed(product).view(weight.shape))

    def _projected(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        along = (self.hat * rows).mean(2, keepdim=True)
        change = rows - rows.mean(2, keepdim=True)
        return change.addcmul_(self.hat, along, value=-1).mul_(self.rate), along

    def _wide(self, own: Tensor | None) -> Tensor | None:
        return None if own is None else own.view(self.shape)

    def _summed(self, value: Tensor) -> Tensor:
        ones = [0, *(1 + at for at, side in enumerate(self.shape) if side == 1)]
        return value.sum(ones)

    @staticmethod
    def _scaled(hat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if weight is None:
            return hat
        return hat * weight if bias is None else torch.addcmul(bias, hat, weight)


def channels(weight: Tensor) -> Tensor:
    """One number a channel (C,), as it broadcasts over images."""
    return weight[:, None, None]
