"""The engine for per-example gradients of plain chains of layers: each example passes once.

However many directions an example has, its forward and backward pass are made once; only the
changes along the directions pass through the layers again. Kernels are chosen by hand: no autograd,
max pools with the channels last, activations after the pools, and one grouped convolution for the
weight changes of several pairs of an example and a direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from leakbound.core import Task
from leakbound.engines import weight_changes as changes
from leakbound.engines.activations import Activation, Clamp, Rectifier
from leakbound.engines.calls import sequence
from leakbound.engines.directions import BYTES, Directions, RandomDirections, fitting
from leakbound.engines.loss import example_delta_changes, example_deltas
from leakbound.engines.reader import Kind, Layer, Unreadable, plain_weights, pools_first
from leakbound.engines.weight_changes import Forward, PlainLayer, Power, convolution_adjoints
from leakbound.randomness import Source
from leakbound.task import weight_names

_STRAIGHT = (Kind.RESHAPE, Kind.MAX_POOL, Kind.AVERAGE_POOL, Kind.ADAPTIVE_POOL)
_SIZES: WeakKeyDictionary[nn.Module, dict[Any, int]] = WeakKeyDictionary()
_CACHED = 2**24
_WIDTH = 4096
"""Number of columns whose products are summed at once."""

Parts = tuple[tuple[str, nn.Module, Activation | None], ...]
"""The model's modules in order, with the prefixes of their parameters' names and, of an activation,
its function."""


def plan(task: Task, inputs: Tensor) -> Parts | None:
    """The parts of the task's model for inputs (B, *S); None if the engine does not support it."""
    try:
        layers = sequence(task, tuple(inputs.shape[1:]))
    except Unreadable:
        return None
    known = all(_computed(task, layer) for layer in layers)
    if not known or len(layers[-1].after) != 1 or not any(layer.owns for layer in layers):
        return None
    order = [(own.name, own.options.get("function")) for own in pools_first(layers, exactly=False)]
    return tuple((f"{n}." if n else "", task.model.get_submodule(n), f) for n, f in order)


def _computed(task: Task, layer: Layer) -> bool:
    kind = layer.kind
    function = layer.options.get("function")
    if kind in (Kind.LINEAR, Kind.CONVOLUTION):
        return plain_weights(task.model.get_submodule(layer.name))
    if isinstance(function, Rectifier):
        return function.slope >= 0
    return kind in _STRAIGHT or (function is not None and not isinstance(function, Clamp))


class ChainStep:
    """One layer at given examples (n, ...): its tangent, its adjoint and the adjoint's change.

    Tangents and changes of deltas have the directions as leading dimension: (k, n, ...).
    """

    curved = False
    """Whether `pull_moved` needs the input's change."""

    def push(self, moved: Tensor) -> Tensor:
        """The change of the output when the input changes by `moved`."""
        raise NotImplementedError

    def pull(self, delta: Tensor) -> Tensor:
        """The loss's derivative by the input, (n, ...), from that by the output."""
        raise NotImplementedError

    def pull_moved(self, delta: Tensor, change: Tensor, moved: Tensor | None) -> Tensor:
        """The change of `pull(delta)` when delta changes by `change` and the input by `moved`."""
        return _apart(change, self.pull)


class WeightedStep(ChainStep):
    def __init__(self, module: nn.Linear | nn.Conv2d, own: Mapping[str, Tensor], x: Tensor) -> None:
        self.module = module
        self.weight = own["weight"]
        self.seen = x

    def of(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if isinstance(self.module, nn.Linear):
            return nn.functional.linear(x, self.weight, bias)
        module = self.module
        how = (module.stride, module.padding, module.dilation)
        return nn.functional.conv2d(x, self.weight, bias, *how)  # type: ignore[arg-type]

    def push(self, moved: Tensor) -> Tensor:
        return _apart(moved, self.of)

    def pull(self, delta: Tensor) -> Tensor:
        if isinstance(self.module, nn.Linear):
            return delta @ self.weight
        return convolution_adjoints(self.module, delta, self.seen[:1], self.weight, inputs=True)


class ActivationStep(ChainStep):
    def __init__(self, slope: Tensor, second: Tensor | None) -> None:
        self.slope = slope
        self.second = second
        self.curved = second is not None

    def push(self, moved: Tensor) -> Tensor:
        return moved * self.slope

    def pull(self, delta: Tensor) -> Tensor:
        return delta * self.slope

    def pull_moved(self, delta: Tensor, change: Tensor, moved: Tensor | None) -> Tensor:
        change = change * self.slope
        if self.second is None or moved is None:
            return change
        return change.addcmul_(delta * self.second, moved)


class PoolStep(ChainStep):
    def __init__(self, places: Tensor, sides: torch.Size, overlapping: bool) -> None:
        self.places = places
        self.sides = sides
        self.overlapping = overlapping

    def push(self, moved: Tensor) -> Tensor:
        places = self.places.flatten(2)
        found = moved.flatten(-2).gather(-1, places.expand(len(moved), *places.shape))
        return found.view(len(moved), *self.places.shape)

    def pull(self, delta: Tensor) -> Tensor:
        return self.pull_moved(delta, delta[None], None)[0]

    def pull_moved(self, delta: Tensor, change: Tensor, moved: Tensor | None) -> Tensor:
        change = change.flatten(-2)
        places = self.places.flatten(2)
        wide = change.new_zeros(*change.shape[:-1], self.sides[0] * self.sides[1])
        places = places.expand(change.shape)
        if self.overlapping:
            wide.scatter_add_(-1, places, change)
        else:
            wide.scatter_(-1, places, change)
        return wide.view(*wide.shape[:-1], *self.sides)


class StraightStep(ChainStep):
    """A layer without weights that is linear in its input: a flattening, a mean pool."""

    def __init__(self, module: nn.Module, shape: torch.Size) -> None:
        self.module = module
        self.shape = shape

    def push(self, moved: Tensor) -> Tensor:
        return _apart(moved, self.module)

    def pull(self, delta: Tensor) -> Tensor:
        if isinstance(self.module, nn.Flatten):
            return delta.reshape(len(delta), *self.shape)
        with torch.enable_grad():
            base = delta.new_zeros(len(delta), *self.shape).requires_grad_()
            return torch.autograd.grad(self.module(base), base, delta)[0]


def take(
    module: nn.Module, function: Activation | None, x: Tensor, own: Mapping[str, Tensor]
) -> tuple[Tensor, ChainStep]:
    """The layer's output for inputs (n, ...) and its step there; `own` are its parameters."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        step = WeightedStep(module, own, x)
        return step.of(x, own.get("bias")), step
    if isinstance(module, nn.MaxPool2d):
        return _pooled(module, x)
    if function is None:
        return module(x), StraightStep(module, x.shape[1:])
    if isinstance(function, Rectifier):
        slope = torch.where(x > 0, torch.ones_like(x), function.slope)
        return x * slope, ActivationStep(slope, None)
    # not by the table's formulas, which round differently: these bits are autograd's
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        plain = module(x.clone())  # it may work in place
        slope = torch.autograd.grad(plain.sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(slope.sum(), x)[0]
    return plain.detach(), ActivationStep(slope.detach(), second)


def _pooled(module: nn.MaxPool2d, x: Tensor) -> tuple[Tensor, ChainStep]:
    on_cpu = x.device.type == "cpu"
    # PyTorch's own pool on the CPU is about ten times faster with the channels last
    x = x.contiguous(memory_format=torch.channels_last) if on_cpu else x
    how = (module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
    best, places = nn.functional.max_pool2d(x, *how, return_indices=True)
    sizes = (module.kernel_size, module.stride, module.dilation)
    kernel, stride, dilation = (s if isinstance(s, tuple) else (s, s) for s in sizes)
    apart = dilation == (1, 1) and all(s >= k for s, k in zip(stride, kernel, strict=True))
    return best.contiguous(), PoolStep(places.contiguous(), x.shape[2:], not apart)


def _apart(moved: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
    """The layer on (k, n, ...) as on k n examples."""
    flat = layer(moved.flatten(0, 1))
    return flat.view(*moved.shape[:2], *flat.shape[1:])


class ChainPoint:
    """A chain at n examples (n, *S) and their labels: all that does not depend on a direction."""

    def __init__(self, task: Task, parts: Parts, inputs: Tensor, labels: Tensor) -> None:
        tensors = task.tensors(task.parameters.detach())
        self.task = task
        self.labels = labels
        self.output = inputs
        self.steps: list[tuple[str, ChainStep]] = []
        for name, module, function in parts:
            self.output, step = take(module, function, self.output, _own(tensors, name, module))
            self.steps.append((name, step))
        self.first = next(at for at, (_, step) in enumerate(self.steps) if _trains(step))

    @cached_property
    def deltas(self) -> tuple[Tensor, ...]:
        """Derivatives of each example's own loss by the outputs, from the first trained step on."""
        delta = example_deltas(self.task.loss, self.output, self.labels)
        deltas = [delta]
        for _, step in reversed(self.steps[self.first + 1 :]):
            delta = step.pull(delta)
            deltas.append(delta)
        return tuple(reversed(deltas))

    def inputs_moved(self, directions: Tensor) -> dict[str, Tensor]:
        """The input changes (k, n, D) of the plain Linear layers, along (k, n, *S)."""
        outer = [_trains(s) and changes.is_outer(s.module, s.seen) for _, s in self.steps]
        found = {}
        moved = directions
        for at, (name, step) in enumerate(self.steps):
            if outer[at]:
                found[name] = moved
            if not any(outer[at + 1 :]):
                break
            moved = step.push(moved)
        return found

    def gradient(self) -> Tensor:
        return self._joined({name: changes.gradient(*at) for name, at in self._weighted()}, 0)

    def each(self, directions: Tensor | None = None) -> Tensor:
        """Every example's own gradient (n, P), or its change along its own direction (n, *S)."""
        if directions is None:
            own = {name: changes.each_gradient(*at) for name, at in self._weighted()}
        else:
            own = {name: changes.each_change(*at) for name, at in self._moved(directions[None])}
        return self._joined(own, 1)

    def products(self) -> Tensor:
        """Inner products (n, n) of the examples' own gradients, in float64. Those of a Linear
        layer are products of its inputs' and its deltas': no gradient of its weights is made.
        """
        total = self.output.new_zeros(len(self.output), len(self.output), dtype=torch.float64)
        trained = {name for name, *_ in self.task.layout}
        for name, at in self._weighted():
            module, seen, delta = at
            if changes.is_outer(module, seen):
                inner = gram(delta)
                total += inner * gram(seen) if f"{name}weight" in trained else 0
                total += inner if f"{name}bias" in trained else 0
                continue
            for part, own in changes.each_gradient(*at).items():
                total += gram(own.flatten(1)) if name + part in trained else 0
        return total

    def power(self, directions: Tensor, more: Mapping[str, Forward] | None = None) -> Power:
        """The sums (P,) over directions (k, n, *S) of each example's own squared changes."""
        total = {}
        norm = {}
        for name, at in self._moved(directions):
            found = changes.powers(*at, more.get(name) if more else None)
            total[name] = {part: power.total for part, power in found.items()}
            norm[name] = {part: power.norm for part, power in found.items()}
        return Power(self._joined(total, 0), self._joined(norm, 0))

    def power_of(self, more: Mapping[str, Forward]) -> Power:
        """The contribution of further directions to `power`, (P,); 0 except for Linear weights."""
        total, norm = self.output.new_zeros(2, len(self.task.parameters))
        places = {name: slice(start, stop) for name, _, start, stop in self.task.layout}
        for name, (_, _, delta) in self._weighted():
            if name in more and f"{name}weight" in places:  # perhaps only its bias is trained
                found = more[name].power(delta)
                place = places[f"{name}weight"]
                total[place] = found.total.flatten()
                norm[place] = found.norm.flatten()
        return Power(total, norm)

    def along(self, directions: Tensor) -> Tensor:
        """The change (k, P) of the sum of the gradients when all examples move at once."""
        found = {name: changes.changes(*at) for name, at in self._moved(directions)}
        return self._joined(found, 1)

    def _weighted(self) -> Iterator[tuple[str, tuple[PlainLayer, Tensor, Tensor]]]:
        """The weighted steps' layers, inputs and deltas, by name."""
        for (name, step), delta in zip(self.steps[self.first :], self.deltas, strict=True):
            if _trains(step):
                yield name, (step.module, step.seen, delta)

    def _moved(
        self, directions: Tensor
    ) -> Iterator[tuple[str, tuple[PlainLayer, Tensor, Tensor, Tensor, Tensor]]]:
        """As `_weighted`, from the last to the first, each tensor followed by its change."""
        seen: list[Tensor | None] = []
        moved = directions
        for _, step in self.steps:
            seen.append(moved if step.curved or _trains(step) else None)
            moved = step.push(moved)
        change = example_delta_changes(self.task.loss, self.output, self.labels, moved)
        for at in reversed(range(self.first, len(self.steps))):
            (name, step) = self.steps[at]
            delta = self.deltas[at - self.first]
            before = seen.pop()
            if _trains(step):
                assert before is not None  # kept above
                yield name, (step.module, step.seen, before, delta, change)
            if at > self.first:
                change = step.pull_moved(delta, change, before)

    def _joined(self, found: Mapping[str, Mapping[str, Tensor]], front: int) -> Tensor:
        parts = {name + part: value for name, own in found.items() for part, value in own.items()}
        return torch.cat([parts[name].flatten(front) for name, *_ in self.task.layout], front)


def gram(rows: Tensor) -> Tensor:
    """Inner products (n, n) of rows (n, P), summed in float64: similar rows differ by little."""
    total = rows.new_zeros(len(rows), len(rows), dtype=torch.float64)
    for part in torch.split(rows, _WIDTH, 1):
        part = part.double()
        total += part @ part.T
    return (total + total.T) / 2


def _own(tensors: Mapping[str, Tensor], name: str, module: nn.Module) -> dict[str, Tensor]:
    return {part: tensors[name + part] for part in weight_names(module) if name + part in tensors}


def _trains(step: ChainStep) -> TypeGuard[WeightedStep]:
    return isinstance(step, WeightedStep) and any(True for _ in step.module.parameters())


@dataclass(frozen=True, eq=False)
class ChainPasses:
    """A batch (B, ...) and a plain chain for it, `chunk` pairs at a time."""

    task: Task
    inputs: Tensor
    labels: Tensor
    chunk: int | None
    parts: Parts
    _last: dict[tuple[int, int], ChainPoint] = field(default_factory=dict)

    def point(self, part: slice) -> ChainPoint:
        """The chain at some examples; the last one is kept."""
        key = (part.start, part.stop)
        if key not in self._last:
            self._last.clear()
            x = self.inputs[part]
            y = self.labels[part]
            self._last[key] = ChainPoint(self.task, self.parts, x, y)
        return self._last[key]

    def step(self, limit: int = BYTES) -> int:
        wide = elements(self.task, self.parts, self.inputs[:1])
        return self.chunk or fitting(wide, self.inputs, limit)

    def powers(
        self, pairs: Directions, more: Mapping[str, Forward] | None = None
    ) -> tuple[Power, Tensor]:
        """Sums (P,) over pairs of each example's own squared changes; the batch's gradient (P,).

        `more` holds the results of further directions for Linear inputs, by prefix.
        """
        parts: list[Power] = []
        gradient = torch.zeros_like(self.task.parameters)
        left = 0
        for part, directions in pairs.blocks(self.step()):
            point = self.point(part)
            own = {name: forward.of(part) for name, forward in (more or {}).items()}
            if part.start == left:  # not visited before
                gradient = gradient + point.gradient()
                left = part.stop
                parts += [point.power_of(own)] if own else []
            for few in directions:
                parts = [reduce(Power.plus, [*parts, point.power(few, own)])]
        return parts[0], gradient / len(self.inputs)

    def forward_only(self, source: Source, directions: int, forward: int) -> dict[str, Forward]:
        """The results of `forward` more directions per example for plain Linear layers' inputs."""
        squares: dict[str, Tensor] = {}
        fourths: dict[str, Tensor] = {}
        size = len(self.inputs)
        pairs = RandomDirections(self.inputs, source, forward)
        for part, drawn in pairs.blocks(self.step(_CACHED)):
            for few in drawn:
                for name, moved in self.point(part).inputs_moved(few).items():
                    if name not in squares:
                        squares[name] = moved.new_zeros(size, moved.shape[-1])
                        fourths[name] = squares[name].clone()
                    square = moved.square()
                    squares[name][part] += square.sum(0)
                    fourths[name][part] += square.square_().sum(0)
        share = directions / (directions + forward)
        found = {
            name: Forward(sums / forward, share, share * sums, share**2 * fourths[name])
            for name, sums in squares.items()
        }
        plain = next((at for at in self.parts if not isinstance(at[1], nn.Flatten)), None)
        if plain is not None and isinstance(plain[1], nn.Linear) and plain[0] in found:
            ones = torch.ones_like(squares[plain[0]])  # its input is the flattened image itself
            found[plain[0]] = Forward(ones, 0.0, directions * ones, 0 * ones)
        return found

    def along(self, directions: Tensor) -> Tensor:
        total = directions.new_zeros(len(directions), len(self.task.parameters))
        few = self.step()
        for part in self._slices():
            step = max(1, few // (part.stop - part.start))
            for at in range(0, len(directions), step):
                total[at : at + step] += self.point(part).along(directions[at : at + step, part])
        return total / len(self.inputs)

    def gradient(self) -> Tensor:
        total = torch.zeros_like(self.task.parameters)
        for part in self._slices():
            total += self.point(part).gradient()
        return total / len(self.inputs)

    def _slices(self) -> list[slice]:
        few = self.step()
        size = len(self.inputs)
        return [slice(at, min(at + few, size)) for at in range(0, size, few)]


def elements(task: Task, parts: Parts, one: Tensor) -> int:
    """Approximate count of numbers for one direction of one example (1, *S), with its passes."""
    known = _SIZES.setdefault(task.model, {})
    key = (one.shape, one.dtype, one.device)
    if key not in known:
        tensors = task.tensors(task.parameters.detach())
        kept = one.numel()
        largest = 0
        for name, module, function in parts:
            out, step = take(module, function, one, _own(tensors, name, module))
            largest = max(largest, one.numel() + out.numel())
            kept += 2 * out.numel() + one.numel() * (step.curved or _trains(step))
            one = out
        known[key] = kept + 2 * largest
    return known[key]
