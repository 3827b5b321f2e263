"""Many cells of equal shape in one computation, each with its own weights and its own data.

Small networks leave a processor idle between kernels: alone, a step of a digit's network takes four
times as long as its matrix products. A bundle runs the four passes of the R-operator for all
cells at once, on products of matrices alone.

Assumptions: a chain of linear layers, convolutions without groups or dilation, non-overlapping
pools, elementwise functions and one flatten; cross-entropy.

Guarantees: on one torch thread a cell's bits do not depend on how many others share its bundle, nor
on its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from leakbound.engines import bundle_layers as kinds
from leakbound.engines import pointwise
from leakbound.engines.base import Pulled, aligned
from leakbound.engines.loss import CrossEntropy, cross_entropy
from leakbound.task import Task

Build = Callable[[Tensor], kinds.Layer]
"""A layer from the flat parameters (N, P) of all cells."""

_KNOWN: WeakKeyDictionary[nn.Module, dict[int, Chain | None]] = WeakKeyDictionary()
_WORK: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], int]] = WeakKeyDictionary()
_COUNTS = Lock()
"""PyTorch's counter sees the modules of every thread."""


@dataclass(frozen=True, eq=False)
class Chain:
    """What a bundle knows of a model.

    Attributes:
        builds: its layers, one after the other.
        name: equal for models that differ in their weights alone.
        linear: whether it has no convolution.
    """

    builds: tuple[Build, ...]
    name: str
    linear: bool


def chain(task: Task, dimensions: int) -> Chain | None:
    """The chain of a model on inputs of so many dimensions; None where it is something else."""
    known = _KNOWN.setdefault(task.model, {})
    if dimensions not in known:
        known[dimensions] = _chain(task, dimensions)
    found = known[dimensions]
    return found if task.loss is nn.functional.cross_entropy else None


def work(task: Task, shape: tuple[int, ...]) -> int:
    """Floating-point operations of a forward pass at inputs (B, *S), as PyTorch counts them."""
    known = _WORK.setdefault(task.model, {})
    if shape not in known:
        inputs = next(task.model.parameters()).new_zeros(shape)
        with _COUNTS, FlopCounterMode(display=False) as counter, torch.no_grad():
            task.model(inputs)
            known[shape] = counter.get_total_flops()
    return known[shape]


class Bundle:
    """N cells of one chain: see `base.Engine`.

    Args:
        found: the model's chain.
        parameters: (N, P), every cell's weights.
        kept: (N, P) bool, False for weights that the model does not have; None: all are there.
    """

    def __init__(self, found: Chain, parameters: Tensor, kept: Tensor | None = None) -> None:
        self.cells = len(parameters)
        self.kept = kept
        self.layers = [build(parameters) for build in found.builds]
        self.found = aligned(self.cells, parameters)

    def gradient(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The gradients (N, P) for inputs (N, B, *S) and labels (N, B) or (N, B, K)."""
        with torch.no_grad():
            return self._gradient(inputs.detach(), labels.detach())

    def _gradient(self, inputs: Tensor, labels: Tensor) -> Tensor:
        a = inputs.transpose(1, 2) if inputs.ndim == 5 else inputs
        for layer in self.layers:
            a = layer.forward(a)
        self.size = a.shape[1]
        self.loss: CrossEntropy = cross_entropy(a.flatten(0, 1), labels.flatten(0, 1), self.size)
        found, d = self.found, self.loss.deltas.view(a.shape)
        for place, layer in reversed(list(enumerate(self.layers))):
            layer.gradients(d, found)
            if place:
                d = layer.back(d)
        return found if self.kept is None else found.mul_(self.kept)

    def pull(self, cotangent: Tensor) -> Pulled:
        """The slopes of sum_n <gradient_n, cotangent_n> at the last inputs."""
        with torch.no_grad():
            return self._pull(cotangent.detach())

    def _pull(self, v: Tensor) -> Pulled:
        if self.kept is not None:
            v = torch.mul(v, self.kept, out=aligned(self.cells, v))
        moved: Tensor | None = None
        for layer in self.layers:
            moved = layer.tangent(moved, v)
        assert moved is not None  # a chain has weights
        change, slopes = self.loss.moved(moved.flatten(0, 1))
        dd = change.view(moved.shape)
        for layer in reversed(self.layers):
            dd = layer.curl(dd)
        dd = dd.transpose(1, 2).clone(memory_format=torch.contiguous_format) if dd.ndim == 5 else dd
        soft = None if slopes is None else slopes.view(moved.shape)
        return Pulled(dd, soft)


def _chain(task: Task, dimensions: int) -> Chain | None:
    model = task.model
    tied = sum(1 for _ in model.named_parameters(remove_duplicate=False)) != len(task.layout)
    if tied or task.frozen or dimensions not in (2, 4):
        return None
    modules = list(_modules(model))
    if any(_altered(module) for module in model.modules()):
        return None
    builds: list[Build] = []
    start, images = 0, dimensions == 4
    for module in _pools_first(modules):
        if isinstance(module, nn.Flatten):
            if (module.start_dim, module.end_dim) != (1, -1):
                return None
            if images:
                builds.append(lambda _: kinds.Flatten())
            images = False
            continue
        build = _build(module, start, images)
        if build is None:
            return None
        builds.append(build)
        start += sum(p.numel() for p in module.parameters())
    weighted = start == len(task.parameters) and not images
    if not weighted or not builds:
        return None
    linear = not any(isinstance(module, nn.Conv2d) for module in modules)
    return Chain(tuple(builds), "; ".join(map(repr, modules)), linear)


def _altered(module: nn.Module) -> bool:
    """Whether it does something beside what its class does."""
    before = module._forward_pre_hooks or module._backward_pre_hooks
    after = module._forward_hooks or module._backward_hooks
    return bool(before or after) or "forward" in vars(module)


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of nested `Sequential`s, in turn."""
    if type(model) is not nn.Sequential:
        yield model
        return
    for child in model:
        yield from _modules(child)


def _pools_first(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Max pools before the monotone functions they follow: the same values, from fewer entries."""
    order = [m for m in modules if type(m) is not nn.Identity]
    for place, (one, after) in enumerate(pairwise(list(order))):
        function = pointwise.of_module(one)
        if function is not None and function.monotone and isinstance(after, nn.MaxPool2d):
            order[place], order[place + 1] = after, one
    return order


def _build(module: nn.Module, start: int, images: bool) -> Build | None:
    function = pointwise.of_module(module)
    if function is not None:
        return lambda _: kinds.Elementwise(function)
    if type(module) is nn.Linear and not images:
        shape, bias = (module.out_features, module.in_features), module.bias is not None
        return lambda flat: kinds.Linear(flat, start, shape, bias)
    if not images:
        return None
    if type(module) is nn.Conv2d:
        return _convolution(module, start)
    return _pool(module)


def _convolution(module: nn.Conv2d, start: int) -> Build | None:
    plain = (
        module.groups == 1 and module.padding_mode == "zeros" and _pair(module.dilation) == (1, 1)
    )
    if not plain or isinstance(module.padding, str):
        return None
    channels, bias = (module.in_channels, module.out_channels), module.bias is not None
    kernel, stride, padding = map(_pair, (module.kernel_size, module.stride, module.padding))
    return lambda flat: kinds.Convolution(flat, start, channels, kernel, bias, stride, padding)


def _pool(module: nn.Module) -> Build | None:
    kind: type[kinds.MaxPool] | type[kinds.MeanPool]
    if type(module) is nn.MaxPool2d:
        kind, plain = kinds.MaxPool, _pair(module.dilation) == (1, 1) and not module.return_indices
    elif type(module) is nn.AvgPool2d:
        kind, plain = kinds.MeanPool, module.divisor_override is None
    else:
        return None
    own = _pair(module.kernel_size)
    whole = _pair(module.stride) == own and _pair(module.padding) == (0, 0)
    return (lambda _: kind(own)) if plain and whole and not module.ceil_mode else None


def _pair(value: object) -> tuple[int, int]:
    if isinstance(value, tuple):
        first, second = value
        return int(first), int(second)
    assert isinstance(value, int)  # torch takes nothing else
    return value, value
