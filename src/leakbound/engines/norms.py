"""Norms in the four passes: with fixed statistics, and with those of the values themselves."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from leakbound.engines.rules import Given, Rule, there

Kernels = Callable[..., tuple[Tensor, Tensor, Tensor]]
_batch_norm: Kernels = torch.ops.aten.native_batch_norm.default
_batch_norm_backward: Kernels = torch.ops.aten.native_batch_norm_backward.default
_group_norm: Kernels = torch.ops.aten.native_group_norm.default
_layer_norm: Kernels = torch.ops.aten.native_layer_norm.default
Back = Callable[..., tuple[Tensor | None, ...]]
_group_norm_backward: Back = torch.ops.aten.native_group_norm_backward.default
_layer_norm_backward: Back = torch.ops.aten.native_layer_norm_backward.default


class FixedNormRule(Rule):
    def __init__(self, data: Given, eps: float) -> None:
        super().__init__(data)
        self.weight, self.bias = data.weights
        self.mean, self.variance = map(there, data.buffers)
        self.eps = eps
        self.rate = torch.rsqrt(self.variance + eps)

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        # In every pass, because local steps overwrite the weight.
        rate = self.rate if self.weight is None else self.rate * self.weight
        self.scale = channels(rate, x)
        return self._norm(x, self.weight, self.bias)

    def backward(self, delta: Tensor) -> Tensor | None:
        self.delta = delta
        mask = [self.moving, self.weight is not None, self.bias is not None]
        arguments = (self.weight, self.mean, self.variance, None, None, False, self.eps, mask)
        back, *gradients = _batch_norm_backward(delta, self.x, *arguments)
        self.write(*gradients)
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
        change = delta * self.scale
        weight = self.directions[0]
        if weight is None:
            return change
        return change.addcmul_(self.delta, channels(weight * self.rate, delta))

    def standard(self) -> Tensor:
        """The values, standardized."""
        return (self.x - channels(self.mean, self.x)) * channels(self.rate, self.x)

    def standard_change(self, x: Tensor) -> Tensor:
        """The change of `standard` with that of x."""
        return x * channels(self.rate, x)

    def _curve(self, delta: Tensor) -> None:
        if self.gradients[0] is not None:
            product = delta * (self.x - channels(self.mean, delta))
            if self.change is not None:
                product.addcmul_(self.delta, self.change)
            torch.mul(
                product.sum(others(delta)),
                self.rate,
                out=self.gradients[0],
            )
        self.write_bias(delta, others(delta))

    def _norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        return _batch_norm(x, weight, bias, self.mean, self.variance, False, 0.0, self.eps)[0]


class NormRule(Rule):
    """Values of mean 0 and variance 1 within some set, then scaled and shifted.

    Standardizing has a symmetric derivative P. With x' the change of x, and means over the sets,
    hat' = P x', and P delta changes by
    -(rate mean(hat x')) P delta - (rate mean(hat delta)) hat' - (rate mean(hat' delta)) hat.
    Subclasses say which kernels, and what a set is.
    """

    def __init__(self, data: Given, eps: float) -> None:
        super().__init__(data)
        self.weight, self.bias = data.weights
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        self.x = x.contiguous()  # with channels last, PyTorch's sums are up to 10 times less exact
        value, self.mean, self.rate = self._norm(self.weight, self.bias)
        return value

    def backward(self, delta: Tensor) -> Tensor | None:
        self.delta = delta
        mask = [self.moving, self.weight is not None, self.bias is not None]
        back, *gradients = self._back(delta.contiguous(), self.weight, mask)
        self.write(*gradients)
        self.back = back if self.moving else None
        return self.back

    def tangent(self, x: Tensor | None) -> Tensor | None:
        weight, bias = (
            None if direction is None else self._wide(direction) for direction in self.directions
        )
        self.hat = self.standard()
        change = None
        self.changes = x is not None
        if weight is not None:
            change = self.hat * weight if bias is None else torch.addcmul(bias, self.hat, weight)
        if x is None:
            return change
        self.hat_change = self._projected(x)
        self.rate_change = self._shared(self.hat, x, None)
        scale = None if self.weight is None else self._wide(self.weight)
        if change is None:
            return self.hat_change if scale is None else self.hat_change * scale
        return change.addcmul_(self.hat_change, there(scale))

    def moved(self, delta: Tensor) -> Tensor:
        if self.curved:
            self._curve(delta)
        weight = self.directions[0]
        scaled = delta if self.weight is None else delta * self._wide(self.weight)
        if weight is not None:
            scaled = scaled.addcmul_(self.delta, self._wide(weight))
        change = self._projected(scaled)
        if self.moving:
            along = self._shared(self.hat, self.delta, self.weight)
            crossed = self._shared(self.hat_change, self.delta, self.weight)
            change.addcmul_(self.rate_change, there(self.back), value=-1)
            change.addcmul_(along, self.hat_change, value=-1)
            change.addcmul_(crossed, self.hat, value=-1)
        return change

    def _curve(self, delta: Tensor) -> None:
        over = self._over(delta)
        if self.gradients[0] is not None:
            product = delta * self.hat
            if self.changes:
                product.addcmul_(self.delta, self.hat_change)
            torch.sum(product, over, out=self.gradients[0])
        self.write_bias(delta, over)

    def standard(self) -> Tensor:
        """The values, standardized."""
        return self._norm(None, None)[0]

    def standard_change(self, x: Tensor) -> Tensor:
        """The change of `standard` with that of x, after `tangent`."""
        return self.hat_change

    def _projected(self, change: Tensor) -> Tensor:
        """P of a change."""
        return there(self._back(change.contiguous(), None, [True, False, False])[0])

    def _wide(self, weight: Tensor) -> Tensor:
        """A weight, as it is multiplied with values."""
        return channels(weight, self.x)

    def _over(self, value: Tensor) -> tuple[int, ...]:
        """The dimensions over which a weight is shared."""
        return others(value)

    def _norm(
        self,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The value, and the sets' means and rates."""
        raise NotImplementedError

    def _back(
        self,
        delta: Tensor,
        weight: Tensor | None,
        mask: list[bool],
    ) -> tuple[Tensor | None, ...]:
        raise NotImplementedError

    def _shared(
        self,
        one: Tensor,
        other: Tensor,
        weight: Tensor | None,
    ) -> Tensor:
        """The sets' rates times their means of the (weighted) product, as they broadcast."""
        raise NotImplementedError


class GroupNormRule(NormRule):
    """Each set is a group of channels of one example."""

    def __init__(
        self,
        data: Given,
        groups: int,
        eps: float,
    ) -> None:
        super().__init__(data, eps)
        self.groups = groups

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return (len(self.x), self.x.shape[1], math.prod(self.x.shape[2:]), self.groups)

    def _norm(
        self,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _group_norm(self.x, weight, bias, *self.sizes, self.eps)

    def _back(
        self,
        delta: Tensor,
        weight: Tensor | None,
        mask: list[bool],
    ) -> tuple[Tensor | None, ...]:
        return _group_norm_backward(delta, self.x, self.mean, self.rate, weight, *self.sizes, mask)

    def _shared(
        self,
        one: Tensor,
        other: Tensor,
        weight: Tensor | None,
    ) -> Tensor:
        size, count, places, groups = self.sizes
        product = one * other
        totals = product.sum(tuple(range(2, product.ndim))) if product.ndim > 2 else product
        totals = totals if weight is None else totals * weight
        rates = totals.view(size, groups, -1).sum(2).mul_(self.rate.view(size, groups))
        rates = rates.div_(places * count // groups)[:, :, None]
        rates = rates.expand(-1, -1, count // groups)
        return rates.reshape(size, count, *[1] * (product.ndim - 2))


class LayerNormRule(NormRule):
    """Each set is one position's values over the last dimensions, of this shape."""

    def __init__(
        self,
        data: Given,
        shape: tuple[int, ...],
        eps: float,
    ) -> None:
        super().__init__(data, eps)
        self.shape = shape

    def _wide(self, weight: Tensor) -> Tensor:
        return weight

    def _over(self, value: Tensor) -> tuple[int, ...]:
        return tuple(range(value.ndim - len(self.shape)))

    def standard(self) -> Tensor:
        return (self.x - self.mean).mul_(self.rate)  # a third of the kernel's time

    def _norm(
        self,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _layer_norm(self.x, self.shape, weight, bias, self.eps)

    def _back(
        self,
        delta: Tensor,
        weight: Tensor | None,
        mask: list[bool],
    ) -> tuple[Tensor | None, ...]:
        arguments = (self.x, self.shape, self.mean, self.rate, weight, self.bias, mask)
        return _layer_norm_backward(delta, *arguments)

    def _shared(
        self,
        one: Tensor,
        other: Tensor,
        weight: Tensor | None,
    ) -> Tensor:
        product = one * other
        rows = product.flatten(product.ndim - len(self.shape))
        totals = rows.sum(-1) if weight is None else rows @ weight.flatten()
        return totals.view(self.rate.shape).mul_(self.rate).div_(rows.shape[-1])


class BatchNormRule(NormRule):
    """Each set is one channel of all examples: the batch's statistics."""

    def _norm(
        self,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without running statistics, because buffers of the model are never written to.
        return _batch_norm(self.x, weight, bias, None, None, True, 0.0, self.eps)

    def _back(
        self,
        delta: Tensor,
        weight: Tensor | None,
        mask: list[bool],
    ) -> tuple[Tensor | None, ...]:
        arguments = (weight, None, None, self.mean, self.rate, True, self.eps, mask)
        return _batch_norm_backward(delta, self.x, *arguments)

    def _shared(
        self,
        one: Tensor,
        other: Tensor,
        weight: Tensor | None,
    ) -> Tensor:
        product = one * other
        totals = product.sum(others(product)).mul_(self.rate)
        totals = totals if weight is None else totals * weight
        return channels(totals.div_(product.numel() // len(totals)), product)


def channels(weight: Tensor, like: Tensor) -> Tensor:
    """One number for each channel, as it broadcasts over values (B, C, ...)."""
    return weight.view(-1, *[1] * (like.ndim - 2))


def others(value: Tensor) -> tuple[int, ...]:
    """All dimensions but the channels'."""
    return (0, *range(2, value.ndim))
