"""The steps of a plain chain of layers: each with its tangent, its adjoint and that one's change.

A step is made at given examples (n, ...) and knows what it saw there, however many directions pass
through it afterwards. Tangents and changes of deltas have the directions in front: (k, n, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from leakbound.types import Loss


class Step(Protocol):
    """One layer at given examples."""

    def push(self, moved: Tensor) -> Tensor:
        """Change (k, n, ...) of the layer's output when its input changes by `moved`."""

    def pull(self, delta: Tensor) -> Tensor:
        """The loss's derivative by the input, (n, ...), from that by the output."""

    def pull_moved(self, delta: Tensor, change: Tensor, moved: Tensor | None) -> Tensor:
        """Change (k, n, ...) of `pull(delta)` when delta changes by `change`, the input by `moved`.

        `moved` may be None where the step is not `curved`.
        """

    @property
    def curved(self) -> bool:
        """Whether `pull_moved` needs to know how the input moves."""


@dataclass(frozen=True, eq=False)
class Weighted:
    """A Linear or Conv2d: linear in its input, so that nothing bends."""

    module: nn.Linear | nn.Conv2d
    weight: Tensor
    seen: Tensor
    curved: bool = False

    def push(self, moved: Tensor) -> Tensor:
        """See `Step`."""
        return _apart(moved, lambda x: _applied(self.module, x, self.weight, None))

    def pull(self, delta: Tensor) -> Tensor:
        """See `Step`."""
        if isinstance(self.module, nn.Linear):
            return delta @ self.weight
        return convolution_adjoints(self.module, delta, self.seen[:1], self.weight, inputs=True)

    def pull_moved(self, delta: Tensor, change: Tensor, moved: Tensor | None) -> Tensor:
        """See `Step`."""
        return _apart(change, self.pull)


@dataclass(frozen=True, eq=False)
class Pointwise:
    """An activation: its slope at every unit, and its second derivative where it has one."""

    slope: Tensor
    bend: Tensor | None

    @property
    def curved(self) -> bool:
        """See `Step`."""
        return self.bend is not None

    def push(self, moved: Tensor) -> Tensor:
        """See `Step`."""
        return moved * self.slope

    def pull(self, delta: Tensor) -> Tensor:
        """See `Step`."""
        return delta * self.slope

    def pull_moved(self, delta: Tensor, change: Tensor, moved: Tensor | None) -> Tensor:
        """See `Step`."""
        change = change * self.slope
        if self.bend is None or moved is None:
            return change
        return change.addcmul_(delta * self.bend, moved)


@dataclass(frozen=True, eq=False)
class Pooled:
    """A max pool: which unit of every window was the largest."""

    places: Tensor
    sides: torch.Size
    overlapping: bool
    curved: bool = False

    def push(self, moved: Tensor) -> Tensor:
        """See `Step`."""
        places = self.places.flatten(2)
        found = moved.flatten(-2).gather(-1, places.expand(len(moved), *places.shape))
        return found.view(len(moved), *self.places.shape)

    def pull(self, delta: Tensor) -> Tensor:
        """See `Step`."""
        return self.pull_moved(delta, delta[None], None)[0]

    def pull_moved(self, delta: Tensor, change: Tensor, moved: Tensor | None) -> Tensor:
        """See `Step`."""
        change, places = change.flatten(-2), self.places.flatten(2)
        wide = change.new_zeros(*change.shape[:-1], self.sides[0] * self.sides[1])
        places = places.expand(change.shape)
        if self.overlapping:
            wide.scatter_add_(-1, places, change)
        else:
            wide.scatter_(-1, places, change)
        return wide.view(*wide.shape[:-1], *self.sides)


@dataclass(frozen=True, eq=False)
class Straight:
    """A layer without weights that is linear in its input: a flattening, a mean pool."""

    module: nn.Module
    shape: torch.Size
    curved: bool = False

    def push(self, moved: Tensor) -> Tensor:
        """See `Step`."""
        return _apart(moved, self.module)

    def pull(self, delta: Tensor) -> Tensor:
        """See `Step`."""
        if isinstance(self.module, nn.Flatten):
            return delta.reshape(len(delta), *self.shape)
        with torch.enable_grad():
            base = delta.new_zeros(len(delta), *self.shape).requires_grad_()
            return torch.autograd.grad(self.module(base), base, delta)[0]

    def pull_moved(self, delta: Tensor, change: Tensor, moved: Tensor | None) -> Tensor:
        """See `Step`."""
        return _apart(change, self.pull)


MONOTONE = (nn.ReLU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.Softplus)
"""Activations that keep order, LeakyReLU at slopes of at least 0: max pools may go before them."""

POINTWISE = (*MONOTONE, nn.ELU, nn.GELU, nn.SiLU)
STRAIGHT = (nn.Flatten, nn.AvgPool2d, nn.AdaptiveAvgPool2d)


def take(module: nn.Module, x: Tensor, own: Mapping[str, Tensor]) -> tuple[Tensor, Step]:
    """The layer's output for inputs (n, ...) and its step there; `own` are its parameters."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        return _applied(module, x, own["weight"], own.get("bias")), Weighted(
            module, own["weight"], x
        )
    if isinstance(module, POINTWISE):
        return _pointwise(module, x)
    if isinstance(module, nn.MaxPool2d):
        return _pooled(module, x)
    return module(x), Straight(module, x.shape[1:])


def convolution_adjoints(
    module: nn.Conv2d,
    delta: Tensor,
    seen: Tensor,
    weight: Tensor,
    *,
    inputs: bool,
    groups: int = 1,
) -> Tensor:
    """The derivative by the input of a convolution (`inputs`), else that by its weight."""
    if len(seen) < len(delta):  # only its sides are read
        seen = seen.expand(len(delta), *seen.shape[1:])
    found: list[Tensor] = torch.ops.aten.convolution_backward(
        delta,
        seen,
        weight,
        [0],
        module.stride,
        module.padding,
        module.dilation,
        False,
        [0, 0],
        groups,
        [inputs, not inputs, False],
    )
    return found[0 if inputs else 1]


def _apart(moved: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
    """The layer on (k, n, ...) as on k n examples."""
    flat = layer(moved.flatten(0, 1))
    return flat.view(*moved.shape[:2], *flat.shape[1:])


def _applied(
    module: nn.Linear | nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    if isinstance(module, nn.Linear):
        return nn.functional.linear(x, weight, bias)
    return nn.functional.conv2d(x, weight, bias, module.stride, module.padding, module.dilation)


def _pointwise(module: nn.Module, x: Tensor) -> tuple[Tensor, Step]:
    if isinstance(module, nn.ReLU | nn.LeakyReLU):
        low = module.negative_slope if isinstance(module, nn.LeakyReLU) else 0.0
        slope = torch.where(x > 0, torch.ones_like(x), low)
        return x * slope, Pointwise(slope, None)
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        plain = module(x.clone())  # it may work in place
        slope = torch.autograd.grad(plain.sum(), x, create_graph=True)[0]
        bend = torch.autograd.grad(slope.sum(), x)[0]
    return plain.detach(), Pointwise(slope.detach(), bend)


def _pooled(module: nn.MaxPool2d, x: Tensor) -> tuple[Tensor, Step]:
    on_cpu = x.device.type == "cpu"
    # PyTorch's own pool on the CPU is an order faster with the channels last
    x = x.contiguous(memory_format=torch.channels_last) if on_cpu else x
    how = (module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
    best, places = nn.functional.max_pool2d(x, *how, return_indices=True)
    kernel, stride = (_pair(part) for part in (module.kernel_size, module.stride))
    apart = _pair(module.dilation) == (1, 1) and all(
        s >= k for s, k in zip(stride, kernel, strict=True)
    )
    return best.contiguous(), Pooled(places.contiguous(), x.shape[2:], not apart)


def _pair(value: object) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def loss_delta(loss: Loss, output: Tensor, labels: Tensor) -> Tensor:
    """The derivative (n, K) of every example's own loss by its output."""
    if _plain(loss, output, labels):
        return torch.softmax(output, 1) - nn.functional.one_hot(labels.long(), output.shape[1])
    return _by_autograd(loss, output, labels)[1].detach()


def loss_change(loss: Loss, output: Tensor, labels: Tensor, moved: Tensor) -> Tensor:
    """The change (k, n, K) of `loss_delta` when the output changes by `moved`."""
    if _plain(loss, output, labels):
        chances = torch.softmax(output, 1)
        weighed = chances * moved
        return weighed - chances * weighed.sum(-1, keepdim=True)
    leaf, delta = _by_autograd(loss, output, labels)
    if not delta.requires_grad:
        return torch.zeros_like(moved)
    # the second derivative is symmetric, and no example's loss depends on another's output
    each = [torch.autograd.grad(delta, leaf, way, retain_graph=True)[0] for way in moved]
    return torch.stack(each)


def _plain(loss: Loss, output: Tensor, labels: Tensor) -> bool:
    """Cross-entropy of class numbers, none of them ignored."""
    whole = labels.ndim == 1 and not labels.is_floating_point() and output.ndim == 2
    return loss is nn.functional.cross_entropy and whole and bool((labels >= 0).all())


def _by_autograd(loss: Loss, output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = output.detach().requires_grad_()
        total = loss(leaf, labels) * len(output)
        return leaf, torch.autograd.grad(total, leaf, create_graph=True)[0]
