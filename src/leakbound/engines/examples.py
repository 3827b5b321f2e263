"""Every example's own gradient, and how it changes along directions in the inputs.

The passes are those of the single engine, by the same rules, with constant weights. A row is an
example, or one of several copies of it that move along different directions. A layer's weight
gradient is a product of its input `a` and its output's delta `d`. So its change is two such
products: of `a` with the delta's change `dd`, and of the input's change `da` with `d`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from leakbound import client
from leakbound.core import Task
from leakbound.engines.calls import read
from leakbound.engines.directions import Directions, copied
from leakbound.engines.loss import example_delta_changes, example_deltas
from leakbound.engines.norms import FixedNormRule, NormRule
from leakbound.engines.reader import Kind, Layer, Layers, Shape, pools_first
from leakbound.engines.rules import Given, Passes, Rule
from leakbound.engines.single import RULES, arbitrary_weights, chosen
from leakbound.randomness import normal

_KNOWN: WeakKeyDictionary[nn.Module, dict[Any, Layers | None]] = WeakKeyDictionary()
_NORMS = (Kind.BATCH_NORM, Kind.GROUP_NORM, Kind.LAYER_NORM)
_SHARED = {
    Kind.IDENTITY,
    Kind.SCALE,
    Kind.RESHAPE,
    Kind.AVERAGE_POOL,
    Kind.ADAPTIVE_POOL,
    Kind.MAX_POOL,
    Kind.ACTIVATION,
    Kind.LINEAR,
    Kind.CONVOLUTION,
    Kind.BATCH_NORM,
}
"""Layers whose rules take changes along several directions at once, at the same values."""
_TOGETHER = 2**19
"""Numbers of weight changes that are held at once."""
_GROUPED = 2**16
"""Up to this many weights, one grouped convolution is faster than a convolution for each row."""
_WIDTH = 4096
"""Number of columns whose products are summed at once."""
_CLOSE = 1e-7
"""Largest relative difference from autograd in float64."""


def plan(task: Task, inputs: Tensor) -> Passes | None:
    """Passes through the task's model for inputs (B, *S), or None: derivatives need `torch.func`.

    A model is compared once with autograd, in float64. The answer is kept while the model lives.
    Code of the user's may later do something else, so its outputs are compared for each batch;
    then the forward pass has been made.
    """
    known = _KNOWN.setdefault(task.model, {})
    key = tuple(inputs.shape[1:])
    if key not in known:
        known[key] = _plan(task, key)
    layers = known[key]
    if layers is None:
        return None
    passes = _passes(task, layers)
    if _only_library(task.model) or _follows(task, passes, inputs.detach()):
        return passes
    return None


def _only_library(model: nn.Module) -> bool:
    """Whether no module runs code of the user's."""
    return all(
        type(module).__module__.startswith(("torch.nn.", "leakbound.models."))
        and not (module._forward_hooks or module._forward_pre_hooks)
        for module in model.modules()
    )


@torch.no_grad()
def _follows(
    task: Task,
    passes: Passes,
    inputs: Tensor,
) -> bool:
    """Whether the layers still give the model's outputs, up to rounding."""
    wanted = client.forward(task, inputs)
    output = passes.forward(inputs)
    if output.shape != wanted.shape:
        return False
    rounding = torch.finfo(wanted.dtype).eps ** 0.5
    return bool((output - wanted).norm() <= rounding * wanted.norm())


def _plan(task: Task, shape: Shape) -> Layers | None:
    try:
        weights = arbitrary_weights(task)
        # A mean over examples that gives no output a special place.
        loss = lambda outputs, _: torch.sin(outputs).flatten(1).mean(1).mean()  # noqa: E731
        plain = replace(
            task,
            public=None,
            parameters=weights,
            kept=None,
            loss=loss,
        )
        double = plain.to(task.parameters.device, torch.float64)
        layers = pools_first(read(plain, shape), exactly=False)  # constants have the task's type
        # A trained weight that is a value itself has no input and delta of its own per example.
        alone = all(layer.kind is not Kind.TENSOR for layer in layers if layer.owns)
        return layers if alone and _agrees(double, layers, shape) else None
    except (torch.OutOfMemoryError, MemoryError):  # does not depend on the model
        raise
    except Exception:  # a user's model may raise anything while it is traced
        return None


@torch.enable_grad()
def _agrees(
    task: Task,
    layers: Layers,
    shape: Shape,
) -> bool:
    """Whether rows are examples in every layer, and the sums over them are autograd's."""
    source = torch.Generator().manual_seed(0)
    for size in (2, 3):  # another dimension of an input cannot have both
        inputs = normal((size, *shape), source, like=task.parameters).requires_grad_()
        labels = torch.zeros(size, dtype=torch.long, device=inputs.device)
        gradient = client.gradient(task, inputs, labels)
        cotangent = normal(gradient.shape, source, like=gradient)
        # Of a sum: with a cotangent, PyTorch imports sympy to compare the shapes.
        (slopes,) = torch.autograd.grad((gradient * cotangent).sum(), inputs)
        rows = ExampleRows(task, _passes(task, layers), inputs.detach(), labels)
        if any(len(a) != size or len(d) != size for _, a, d in rows.weighted()):
            return False
        last = torch.zeros_like(slopes)
        last[-1] = 1  # when one example moves, nothing of the others does
        if any(at.da[:-1].any() or at.dd[:-1].any() for at in rows.moved(last)):
            return False
        direction = normal(inputs.shape, source, like=slopes)
        change = float(rows.along(direction, 1)[0] @ cotangent) / size
        wanted = float((slopes * direction).sum())
        spread = float(slopes.norm() * direction.norm())
        off = (rows.gradient() / size - gradient.detach()).norm()
        if not bool(off <= _CLOSE * gradient.norm()) or not abs(change - wanted) <= _CLOSE * spread:
            return False
    return True


def _passes(task: Task, layers: Layers) -> Passes:
    tensors = task.tensors(task.parameters.detach())
    made = list[Rule]()
    for layer in layers:
        weights = chosen(layer.weights, tensors)
        constant = (None,) * len(weights)
        buffers = chosen(layer.buffers, task.buffers)
        data = Given(weights, buffers, constant, layer.moving, curved=False)
        made.append(RULES[layer.kind](data, **layer.options))
    return Passes(layers, made)


class Moved(NamedTuple):
    """A weighted layer with its input (N, ...), its delta (N, ...), and their changes."""

    layer: Layer
    a: Tensor
    da: Tensor
    d: Tensor
    dd: Tensor


class ExampleRows:
    """A model at N rows, all that does not depend on directions: examples (n, *S) with their
    labels, and these again until there are `copies` of each.
    """

    @torch.no_grad()
    def __init__(
        self,
        task: Task,
        passes: Passes,
        inputs: Tensor,
        labels: Tensor,
        copies: int = 1,
    ) -> None:
        self.task = task
        self.tensors = task.tensors(task.parameters.detach())
        self.passes = passes
        self.size = len(inputs)
        self.copies = copies
        if not all(layer.kind in _SHARED for layer, _ in passes.layers):
            inputs = repeated(inputs, copies)
            labels = repeated(labels, copies)
            self.copies = 1
        self.labels = labels
        made = bool(passes.values) and torch.equal(passes.values[0], inputs)
        self.output = passes.values[passes.last] if made else passes.forward(inputs)
        self.deltas = passes.backward(example_deltas(task.loss, self.output, labels))

    def weighted(self) -> Iterator[tuple[Layer, Tensor, Tensor]]:
        """The layers with trained weights, their inputs and deltas."""
        for layer, rule in self.passes.layers:
            if layer.owns:
                a = self.passes.values[layer.sources[0]]
                if isinstance(rule, NormRule | FixedNormRule):
                    a = rule.standard()
                yield layer, a, self.deltas[layer.output]

    def moved(self, directions: Tensor) -> Iterator[Moved]:
        """As `weighted`, when each row moves along its direction (N, *S)."""
        tangents = self.passes.tangent(directions)
        last = tangents[self.passes.last].view(-1, *self.output.shape)
        change = example_delta_changes(self.task.loss, self.output, self.labels, last)
        weighted = [(layer, rule) for layer, rule in self.passes.layers if layer.owns]
        seen = {layer.output: tangents[layer.sources[0]] for layer, _ in weighted}
        for layer, rule in weighted:
            if isinstance(rule, NormRule | FixedNormRule):
                seen[layer.output] = rule.standard_change(seen[layer.output])
        del tangents  # memory that is free before the next pass is used again by it
        changes = self.passes.moved(change.flatten(0, 1), to_inputs=False)
        for layer, a, d in self.weighted():
            yield Moved(layer, a, seen[layer.output], d, changes[layer.output])

    def gradient(self) -> Tensor:
        """(P,) the sum of the examples' gradients."""
        batch = slice(self.size)
        each = (
            (at, self._sums(at, a[batch, None], d[batch, None])) for at, a, d in self.weighted()
        )
        return self._joined(each)[0]

    def each(self, directions: Tensor | None = None) -> Tensor:
        """(N, P) the rows' gradients, or their changes along directions (N, *S)."""
        if directions is None:
            plain = ((at, self._sums(at, a[None], d[None])) for at, a, d in self.weighted())
            return self._joined(plain)
        changes = list[tuple[Layer, list[Tensor]]]()
        for at in self.moved(directions):
            x, y = self._pairs(at)
            changes.append((at.layer, self._sums(at.layer, x, y, y[:1])))
        return self._joined(changes)

    def along(self, directions: Tensor, copies: int) -> Tensor:
        """(copies, P) the changes of the sum of the gradients over each copy of the batch.

        The rows are the batch `copies` times in a row.
        """
        changes = list[tuple[Layer, list[Tensor]]]()
        for at in self.moved(directions):
            # The examples of one copy are summed, too.
            x, y = (
                factor.view(2, copies, -1, *factor.shape[2:]).transpose(1, 2).flatten(0, 1)
                for factor in self._pairs(at)
            )
            changes.append((at.layer, self._sums(at.layer, x, y, y[: len(y) // 2])))
        return self._joined(changes)

    def squares(self, directions: Tensor) -> Tensor:
        """(P,) the sum of the rows' squared changes."""
        return self._joined((at.layer, self._squares(at)) for at in self.moved(directions))[0]

    def products(self) -> Tensor:
        """Inner products (N, N) of the rows' gradients, in float64. Those of a Linear layer are
        products of its inputs' and its deltas': no gradient of its weights is made.
        """
        total = self.output.new_zeros(
            len(self.output),
            len(self.output),
            dtype=torch.float64,
        )
        for layer, a, d in self.weighted():
            weight, bias = (name in self.task.names for name in layer.weights)
            if layer.kind is Kind.LINEAR and a.ndim == 2:
                inner = gram(d)
                total += inner * gram(a) if weight else 0
                total += inner if bias else 0
                continue
            for gradients in self._trained(layer, self._sums(layer, a[None], d[None])).values():
                total += gram(gradients.flatten(1))
        return total

    def _pairs(self, at: Moved) -> tuple[Tensor, Tensor]:
        """Inputs and deltas (2, N, ...) whose products are summed: of (a, dd), and of (da, d)."""
        x = torch.cat([*[at.a] * self.copies, at.da])
        y = torch.cat([at.dd, *[at.d] * self.copies])
        return x.view(2, -1, *x.shape[1:]), y.view(2, -1, *y.shape[1:])

    def _squares(self, at: Moved) -> list[Tensor]:
        if at.layer.kind is Kind.LINEAR and at.a.ndim == 2:
            a = repeated(at.a, self.copies)
            d = repeated(at.d, self.copies)
            return [_outer_squares(a, at.da, d, at.dd)[None], at.dd.square().sum(0)[None]]
        weight = self.tensors[str(at.layer.weights[0])]
        step = max(1, _TOGETHER // weight.numel())
        parts = zip(*(torch.split(factor, step, 1) for factor in self._pairs(at)), strict=True)
        each = [
            [change.square().sum(0) for change in self._sums(at.layer, x, y, y[:1])]
            for x, y in parts
        ]
        return [torch.stack(squares).sum(0)[None] for squares in zip(*each, strict=True)]

    def _sums(
        self,
        layer: Layer,
        x: Tensor,
        y: Tensor,
        shift: Tensor | None = None,
    ) -> list[Tensor]:
        """The weight's products (m, ...) of x and y (s, m, ...), summed over s, and the bias's.

        The bias's is the sum of `shift` (s, m, ...) over s and positions; by default of y.
        """
        shift = y if shift is None else shift
        if layer.kind is Kind.LINEAR:
            positions = range(2, y.ndim - 1)
            if len(x) == 1 and x.ndim == 3:
                weight = y[0, :, :, None] * x[0, :, None]
            else:
                rows, columns = (factor.transpose(0, 1).flatten(1, -2) for factor in (y, x))
                weight = torch.bmm(rows.mT, columns)
        elif layer.kind is Kind.CONVOLUTION:
            positions = range(3, y.ndim)
            weight = _convolved(self.tensors[str(layer.weights[0])], layer.options, x, y)
        else:
            inner = len(layer.options["shape"]) if layer.kind is Kind.LAYER_NORM else 0
            positions = range(2, y.ndim - inner) if inner else range(3, y.ndim)
            weight = (x * y).sum([0, *positions])
        return [weight, shift.sum([0, *positions])]

    def _trained(
        self,
        layer: Layer,
        parts: Sequence[Tensor],
    ) -> dict[str, Tensor]:
        pairs = zip(layer.weights, parts, strict=True)
        return {name: part for name, part in pairs if name is not None and name in self.task.names}

    def _joined(self, by_layer: Iterable[tuple[Layer, list[Tensor]]]) -> Tensor:
        """(m, P) of the layers' parts (m, ...)."""
        parts = dict[str, Tensor]()
        for layer, tensors in by_layer:
            parts |= self._trained(layer, tensors)
        return torch.cat([parts[name].flatten(1) for name, *_ in self.task.layout], 1)


@dataclass(frozen=True, eq=False)
class ExamplePasses:
    """A batch (B, *S) and passes through its model, at most `step` rows at a time."""

    task: Task
    inputs: Tensor
    labels: Tensor
    passes: Passes
    step: int
    _last: dict[tuple[int, int, int], ExampleRows] = field(default_factory=dict)

    def rows(self, part: slice, copies: int) -> ExampleRows:
        """Some examples, each `copies` times; the last ones are kept."""
        key = (part.start, part.stop, copies)
        if key not in self._last:
            self._last.clear()
            x = self.inputs[part]
            y = self.labels[part]
            self._last[key] = ExampleRows(self.task, self.passes, x, y, copies)
        return self._last[key]

    def squares(self, pairs: Directions) -> tuple[Tensor, Tensor]:
        """The sums (P,) of each pair's squared changes, and the batch's gradient (P,)."""
        total = torch.zeros_like(self.task.parameters)
        gradient = torch.zeros_like(self.task.parameters)
        seen = 0
        for part, directions in pairs.blocks(self.step):
            rows = self.rows(part, len(directions))
            total += rows.squares(directions.flatten(0, 1))
            if part.start == seen:  # not visited before
                gradient += rows.gradient()
                seen = part.stop
        return total, gradient / len(self.inputs)

    def along(self, directions: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient's changes (k, P) when the batch moves along (k, B, *S); the gradient."""
        size = len(self.inputs)
        few = min(self.step, size)
        changes = directions.new_zeros(len(directions), len(self.task.parameters))
        gradient = torch.zeros_like(self.task.parameters)
        for at in range(0, size, few):
            part = slice(at, min(at + few, size))
            start = 0
            for group in torch.split(directions[:, part], copied(self.step, few)):
                rows = self.rows(part, len(group))
                changes[start : start + len(group)] += rows.along(group.flatten(0, 1), len(group))
                start += len(group)
            gradient += rows.gradient()
        return changes / size, gradient / size


def elements(passes: Passes) -> int:
    """Approximate count of numbers for one row, with its passes."""
    # values, what their derivatives need, deltas, and the changes of values and deltas
    first, _ = passes.layers[0]
    return 5 * sum(math.prod(layer.after) for layer, _ in passes.layers) + math.prod(first.before)


def _convolved(
    weight: Tensor,
    options: Any,
    x: Tensor,
    y: Tensor,
) -> Tensor:
    """Weight gradients (m, *W) of a convolution, summed over s, from x and y (s, m, ...)."""
    *how, groups = options["options"]
    turned = options.get("turned")
    more = (turned is not None, turned or [0] * len(how[0]))
    mask = [False, True, False]
    count = x.shape[1]
    if weight.numel() > _GROUPED or 1 < x.shape[2] < 8:
        each = [
            torch.ops.aten.convolution_backward(
                y[:, at], x[:, at], weight, None, *how, *more, groups, mask
            )[1]
            for at in range(count)
        ]
        return torch.stack(each)
    # every row is a group of channels, so that one convolution serves all
    wide = weight.new_empty(count * len(weight), *weight.shape[1:])  # only its sides are used
    x = x.flatten(1, 2)
    y = y.flatten(1, 2)
    gradients: Tensor = torch.ops.aten.convolution_backward(
        y, x, wide, None, *how, *more, count * groups, mask
    )[1]
    return gradients.view(count, *weight.shape)


def repeated(rows: Tensor, copies: int) -> Tensor:
    """All rows, `copies` times in a row."""
    return rows if copies == 1 else rows.repeat(copies, *[1] * (rows.ndim - 1))


def _outer_squares(
    a: Tensor,
    da: Tensor,
    d: Tensor,
    dd: Tensor,
) -> Tensor:
    """The sum over rows of (dd a^T + d da^T)^2, as products of matrices."""
    left = torch.maximum(a.abs().amax(), da.abs().amax())
    right = torch.maximum(d.abs().amax(), dd.abs().amax())
    # float32 loses squares below 1e-38; relative to the largest they are harmless
    left, right = (tensor.clamp_min(torch.finfo(a.dtype).tiny) for tensor in (left, right))
    a, da = (tensor / left for tensor in (a, da))
    d, dd = (tensor / right for tensor in (d, dd))
    total = (dd * dd).T @ (a * a)
    total.addmm_((dd * d).T, a * da, alpha=2).addmm_((d * d).T, da * da)
    return total.clamp_min_(0) * (left * right).square()  # rounding may leave a little below 0


def gram(rows: Tensor) -> Tensor:
    """Inner products (n, n) of rows (n, P), summed in float64: similar rows differ by little."""
    total = rows.new_zeros(len(rows), len(rows), dtype=torch.float64)
    for part in torch.split(rows, _WIDTH, 1):
        part = part.double()
        total += part @ part.T
    # BLAS may round (i, j) and (j, i) differently.
    return (total + total.T) / 2
