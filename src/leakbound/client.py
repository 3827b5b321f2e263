"""What a client computes from its batch, as pure functions.

The client and the attacker who simulates it call the same code: two copies could differ over time.
All functions are differentiable in the inputs (and in soft labels), to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from leakbound import check, losses
from leakbound._util import copies, generators
from leakbound._util.plain_calls import as_written
from leakbound._util.recompute import recomputed
from leakbound.core import (
    Batch,
    ClientContext,
    DefenseProtocol,
    LocalPlan,
    Loss,
    NotApplicable,
    Observation,
    Refused,
    Statistics,
    Task,
    Unit,
    Update,
)
from leakbound.randomness import Source

__all__ = [
    "Each",
    "Frugal",
    "WrongOutput",
    "batch_norms",
    "batch_statistics",
    "call",
    "clients_layer_inputs",
    "example_gradients",
    "fitted",
    "forward",
    "frugal",
    "gradient",
    "indivisible",
    "input_jvp",
    "is_frugal",
    "layer_inputs",
    "local_update",
    "plain_attention",
    "pure_gradient",
    "pure_simulate",
    "refuse_changing",
    "refuse_codes",
    "respond",
    "rows",
    "shown",
    "simulate",
    "statistics_of",
    "unfit",
    "watched",
]


def forward(
    task: Task,
    inputs: Tensor,
    parameters: Tensor | None = None,
) -> Tensor:
    """Model output for inputs (B, *S) at the task's weights, or at other flat weights (P,)."""
    return call(task, task.tensors(parameters), inputs)


def call(
    task: Task,
    tensors: Mapping[str, Tensor],
    inputs: Tensor,
    *,
    twice: bool = True,
) -> Tensor:
    """The output of the task's model with these tensors, by name, for inputs (B, *S).

    An output with `logits`, as from transformers' models, counts as its logits. Missing tensors are
    those of the module. `twice`: the output may be differentiated twice, or in forward mode.
    PyTorch's fused attention kernels do not support this, so plain ones are used.

    Raises:
        NotApplicable: the model looks its inputs up in a table, and these are not valid codes, or
            it takes several inputs, and the task's domain has no columns.
        WrongOutput: the output is not a tensor and has no logits, and the loss is not one of parts.
    """
    return _logits(_raw_output(task, tensors, inputs, twice=twice), task.loss)


def _raw_output(
    task: Task,
    tensors: Mapping[str, Tensor],
    inputs: Tensor,
    *,
    twice: bool = True,
) -> Any:
    """As `call`, whatever the model returns."""
    domain = task.domain
    if domain and not domain.dtype.is_floating_point and inputs.is_floating_point():
        raise NotApplicable(f"the inputs are {domain.name}, and it searches among numbers")
    # Transforms of torch.func differentiate without grad mode, too.
    traced = torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None
    try:
        with plain_attention() if twice and traced else nullcontext(), as_written():
            return functional_call(task.model, dict(tensors), (inputs,))
    except (IndexError, RuntimeError, TypeError) as error:
        if domain and not domain.dtype.is_floating_point and isinstance(error, IndexError):
            raise NotApplicable(
                f"the model raised {str(error)!r}: the sequences use more tokens or places than it "
                "has; give the model's own vocabulary, and sequences that it can take"
            ) from error
        said = " ".join(str(error).split())
        for reason, causes in ((CODES, _NO_CODE), (SEVERAL, _NO_INPUT)):
            # PyTorch has no types for these causes: only the text of an error shows them.
            if any(words in said for words in causes):
                raise NotApplicable(f"the model raised {said!r}: {reason}") from error
        raise
    except ValueError as error:
        if _ONE_EXAMPLE not in str(error):
            raise
        raise OneExample(
            "the model has batch norm in training mode, which cannot normalize a single example: "
            "give at least two (batch_size), or call model.eval()"
        ) from error


def fitted(task: Task, inputs: Tensor) -> tuple[Task, Tensor]:
    """The task with its loss in the form that fits the model's outputs for inputs (B, *S), and
    these outputs, as of `forward`, without a gradient.

    A loss of the user's own gets the model's dict, tuple or list as it is: elsewhere all of its
    tensors count as one row (B, K) of outputs. Of outputs (B, K, *S) the form of labels is found
    (`leakbound.losses.fitted`).

    Raises:
        WrongOutput: the output is no tensor, and the loss is not the user's own.
        ValueError: it has other parts than tensors of floats with a row for each example.

    Example:
        >>> class Heads(nn.Linear):
        ...     def forward(self, x):
        ...         return {"class": super().forward(x), "size": x.sum(1, keepdim=True)}
        >>> own = Task.of(Heads(4, 2), loss=lambda heads, labels: heads["class"].square().mean())
        >>> fitted(own, torch.ones(1, 4))[1].shape
        torch.Size([1, 3])
    """
    with torch.no_grad():
        output = _raw_output(task, task.tensors(), inputs)
    loss = losses.named(task.loss)
    if isinstance(output, tuple | list | Mapping) and _own_logits(output) is None:
        if loss.targets == "any" and not isinstance(loss.function, losses.OutputParts):
            loss = replace(loss, function=losses.OutputParts.of(loss.function, output, len(inputs)))
        return replace(task, loss=loss), _logits(output, loss)
    logits = _logits(output, loss)
    return replace(task, loss=losses.fitted(loss, logits)), logits


class OneExample(NotApplicable, ValueError):
    """A batch norm in training mode got a single value per channel, as of one example."""


def no_gradient(loss: Tensor) -> str:
    """Why a loss or an output cannot be trained; empty if it can."""
    if loss.requires_grad:
        return ""
    return (
        "the model's output has no gradient: its forward uses torch.no_grad, or detaches or rounds "
        "it, or all runs in torch.inference_mode; a client cannot train it so"
    )


_NO_VMAP = ("data-dependent control flow", "vmap: ")
"""In the errors of `vmap` about a model that branches on the values of its inputs, and about a loss
that changes a tensor in place, as MONAI's do.
"""
_MEND = "describe the table's columns (--schema, or domain=leakbound.domains.TableDomain)"
CODES = (
    "it looks its inputs up in a table, such as an embedding, and integer codes cannot be searched "
    f"as continuous inputs; {_MEND}, or give the part of the model behind the table"
)
SEVERAL = (
    f"it takes several inputs, and here inputs are one tensor; {_MEND}, or join them to one "
    "(leakbound.models.joined)"
)
_ONE_EXAMPLE = "Expected more than 1 value per channel"
_NO_INPUT = ("required positional argument", "required keyword-only argument")
_NO_CODE = (
    "index out of range in self",
    "is out of bounds for dimension",
    "tensors used as indices must be",
    "'indices' to have one of the following scalar types",
    "Class values must be",
)
_CODED: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], str]] = WeakKeyDictionary()


def refuse_codes(task: Task, input_shape: Sequence[int]) -> None:
    """Reject a model that uses inputs (*S), or a part of them, as integer codes.

    Its output is discontinuous in them, so searches and derivative-based bounds do not apply. The
    check detects models that convert floats to whole numbers, and models that reject other inputs.
    The result is kept as long as the model exists.

    Raises:
        NotApplicable: the model does this.

    Example:
        >>> refuse_codes(Task.of(nn.Linear(4, 2)), (4,))
    """
    known = _CODED.setdefault(task.model, {})
    shape = tuple(input_shape)
    if shape not in known:
        known[shape] = _coded(task, shape)
    if known[shape]:
        raise NotApplicable(known[shape])


def _coded(task: Task, shape: tuple[int, ...]) -> str:
    """Why the model does not take such inputs as numbers; empty if it does."""
    wholes = []
    for value in task.input_range:
        # Two examples: a batch norm in training mode refuses one.
        inputs = torch.full((2, *shape), value).to(task.parameters)
        try:
            with torch.no_grad(), _Rounded() as rounded:
                forward(task, inputs)
        except NotApplicable as error:
            return error.reason
        except Exception:  # inputs of another shape; the next caller of the model reports this
            return ""
        wholes.append(rounded.wholes)
    # Codes change with the inputs; whole numbers that stay, such as positions, are none.
    low, high = wholes
    same = len(low) == len(high) and all(map(torch.equal, low, high))
    return "" if same else f"the model takes integer codes: {CODES}"


class _Rounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the whole numbers that are made from floats."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else its first use imports PyTorch's compiler, which takes a second

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wholes: list[Tensor] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        copied = func is torch.ops.aten._to_copy.default and args[0].is_floating_point()
        if copied and not value.is_floating_point() and value.dtype != torch.bool:
            self.wholes.append(value)
        return value


REPEATS = 1e-4
"""The relative difference of gradients that rounding on other kernels may explain."""


def refuse_changing(task: Task, inputs: Tensor) -> None:
    """Reject a model that gives other gradients at the same weights and inputs (B, *S).

    Such a model draws random numbers, or changes its own state when it is called. The client's draw
    or state is not known, so what an attack simulates is not what the client computed.

    Raises:
        ValueError: the model does this.

    Example:
        >>> refuse_changing(Task.of(nn.Linear(4, 2)), torch.ones(1, 4))
    """
    held = dict(task.model.named_buffers())
    model = copies.duplicate(task.model, lent=(held[name] for name in task.frozen))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in task.tensors().items():
        # Frozen weights may be gigabytes; the client's training does not change them.
        own = value.detach()
        tensors[name].data = own if name in task.frozen else own.clone()
    first = _slopes(model, inputs, task.loss)
    drawn = generators.states()
    again = _slopes(model, inputs, task.loss)
    if generators.states() != drawn:
        raise ValueError(
            "the model draws random numbers when it is called, as F.dropout(x) does, so its "
            "gradient differs from call to call and no attack can repeat the client's; draw only "
            "in training mode (F.dropout(x, training=self.training)), and call model.eval()"
        )
    apart = float((again - first).norm() / first.norm().clamp_min(1e-30))
    if apart > REPEATS:
        moved = [
            name
            for name, value in model.named_buffers()
            if name in task.buffers and not torch.equal(value, task.buffers[name])
        ]
        where = f" ({', '.join(moved[:5])})" if moved else ""
        raise ValueError(
            f"the model changes its own state when it is called{where}: at the same weights and "
            f"inputs, the second call's gradient differs from the first by {apart:.1%}, so no "
            "attack can repeat the client's; call model.eval(), or keep the state fixed"
        )


def _slopes(
    model: nn.Module,
    inputs: Tensor,
    loss: Loss,
) -> Tensor:
    """A fixed weighted sum of the outputs, with its gradient: all that a loss would use."""
    weights = [p.requires_grad_() for p in model.parameters()]
    with torch.enable_grad(), plain_attention(), as_written():
        output = _logits(model(inputs), loss)
        # Unequal weights: a plain sum of probabilities is constant, and has no gradient.
        sizes = torch.linspace(-1, 1, output.numel()).to(output).reshape(output.shape)
        combined = (output * sizes).sum()
        parts = [output.detach()]
        if combined.requires_grad:
            parts += torch.autograd.grad(combined, weights, materialize_grads=True)
    # NaN would differ from itself.
    return torch.cat([part.double().nan_to_num().flatten() for part in parts])


class WrongOutput(ValueError):
    """A model returned neither a tensor nor an object with logits."""


def unfit(
    task: Task,
    inputs: Tensor,
    error: Exception,
) -> str:
    """Why a model that raised an error cannot take inputs (B, *S), and what to give instead."""
    said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    mend = "give inputs that it takes, of the shape of one without the batch, such as 1,28,28"
    if isinstance(error, StopIteration):
        mend = (
            "it asks for the parameters of a part that is frozen, as PEFT's prefix tuning does. "
            "Frozen ones are constants here, so prefix tuning is not supported"
        )
    elif task.domain is not None and task.domain.advice:
        mend = task.domain.advice
    elif not inputs.is_floating_point():
        mend = f"inputs hold {inputs.dtype}: give floats, or say what they are (domain)"
    elif "dtype" in str(error):
        mend = "it computes in several types: call model.float()"
    return f"the model cannot take inputs of shape {tuple(inputs.shape)} ({said}); {mend}"


def _logits(output: Any, loss: Loss) -> Tensor:
    """What a model returns as one tensor for its loss: a tensor, `logits`, or all its parts."""
    if isinstance(output, Tensor):
        return output
    if isinstance(parts := getattr(loss, "function", None), losses.OutputParts):
        return parts.joined(output)
    scores = _own_logits(output)
    if scores is not None:
        return scores
    raise WrongOutput(
        f"the model returns a {type(output).__name__}; return a tensor of class scores (B, K), or "
        "an object with them as `logits` (from a subclass of the model: a wrapper would change the "
        "names of weights), or give a loss of your own that takes what the model returns"
    )


def _own_logits(output: Any) -> Tensor | None:
    scores = output.get("logits") if isinstance(output, Mapping) else None
    scores = getattr(output, "logits", None) if scores is None else scores
    return scores if isinstance(scores, Tensor) else None


# on a CPU, too
_KERNELS = torch.backends.cuda
_LAYERS = torch.backends.mha
_SWITCHES: tuple[tuple[Callable[[], bool], Callable[[bool], None], bool], ...] = (
    (_KERNELS.math_sdp_enabled, _KERNELS.enable_math_sdp, True),
    (_KERNELS.flash_sdp_enabled, _KERNELS.enable_flash_sdp, False),
    (_KERNELS.mem_efficient_sdp_enabled, _KERNELS.enable_mem_efficient_sdp, False),
    (_KERNELS.cudnn_sdp_enabled, _KERNELS.enable_cudnn_sdp, False),
    (_LAYERS.get_fastpath_enabled, _LAYERS.set_fastpath_enabled, False),
)
"""For each PyTorch switch: its getter, its setter, and its value for plain attention."""
_LOCK = Lock()
_INSIDE: list[list[bool]] = []
"""The state of each switch before the first thread entered."""


@contextmanager
def plain_attention() -> Iterator[None]:
    """While active, attention uses kernels that can be differentiated to any order.

    PyTorch's fused kernels have no second derivative, no forward mode and no `vmap` of a gradient.

    Example:
        >>> x = torch.ones(1, 2, 4)
        >>> with plain_attention():
        ...     nn.functional.scaled_dot_product_attention(x, x, x).shape
        torch.Size([1, 2, 4])
    """
    # The switches are global and clients may run in threads: the first thread to enter sets them,
    # the last one to leave restores them. (`sdpa_kernel` does the same for attention in 28 us;
    # these calls take 8, and a small network's attack step 830.)
    with _LOCK:
        _INSIDE.append(_INSIDE[0] if _INSIDE else [ask() for ask, *_ in _SWITCHES])
        if len(_INSIDE) == 1:
            for _, switch, wanted in _SWITCHES:
                switch(wanted)
    try:
        yield
    finally:
        with _LOCK:
            before = _INSIDE.pop()
            if not _INSIDE:
                for (_, switch, _), value in zip(_SWITCHES, before, strict=True):
                    switch(value)


def layer_inputs(
    task: Task,
    inputs: Tensor,
    names: Sequence[str],
) -> dict[str, Tensor]:
    """The inputs of the named layers for inputs (B, *S), as tensors (B, ...), differentiable.

    Raises:
        ValueError: the model has no such layer, or did not call it once with one tensor.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> layer_inputs(Task.of(model), torch.ones(1, 1, 2, 2), ["1"])["1"].shape
        torch.Size([1, 4])
    """
    return watched(task, inputs, names)[1]


def watched(
    task: Task,
    inputs: Tensor,
    names: Sequence[str],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The model's output for inputs (B, *S), and `layer_inputs` of the same call."""
    calls: dict[str, list[tuple[Any, ...]]] = {name: [] for name in names}
    modules = dict(task.model.named_modules())
    if missing := [name for name in names if name not in modules]:
        raise ValueError(f"the model has no layer {missing[0]!r}; name one of its modules")
    with ExitStack() as hooks:
        for name in names:
            note = partial(lambda name, _, args: calls[name].append(args), name)
            hooks.enter_context(modules[name].register_forward_pre_hook(note))
        output = forward(task, inputs)
    inside = {}
    for name, seen in calls.items():
        if len(seen) != 1 or len(seen[0]) != 1 or not isinstance(seen[0][0], Tensor):
            raise ValueError(
                f"the model calls the layer {name!r} {len(seen)} times, or not with one tensor "
                "alone; name a layer that is called once, on its input"
            )
        inside[name] = seen[0][0]
    return output, inside


def clients_layer_inputs(
    task: Task,
    inputs: Tensor,
    names: Sequence[str],
    cohort: Sequence[int],
) -> dict[str, Tensor]:
    """As `layer_inputs`, if consecutive slices of the inputs belong to different clients.

    This differs from one call on all inputs only for a model that couples the examples.
    """
    if not task.coupled or len(cohort) == 1:
        return layer_inputs(task, inputs, names)
    each = [layer_inputs(task, part, names) for part in torch.split(inputs, list(cohort))]
    return {name: torch.cat([inside[name] for inside in each]) for name in names}


def batch_norms(task: Task) -> tuple[str, ...]:
    """The names of the model's batch norms, in the order of its modules."""
    kind = nn.modules.batchnorm._BatchNorm
    return tuple(name for name, m in task.model.named_modules() if isinstance(m, kind))


def batch_statistics(task: Task, inputs: Tensor) -> dict[str, Statistics]:
    """Mean and variance (C,) of each batch norm's input, over the batch and all positions.

    The variance is the biased one, by which a norm in training mode divides. Differentiable.
    """
    inside = layer_inputs(task, inputs, batch_norms(task))
    return {name: statistics_of(value) for name, value in inside.items()}


def statistics_of(value: Tensor) -> Statistics:
    """Mean and biased variance (C,) of (B, C, ...) over all other dimensions."""
    others = [0, *range(2, value.ndim)]
    return value.mean(others), value.var(others, unbiased=False)


def gradient(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    parameters: Tensor | None = None,
) -> Tensor:
    """Gradient (P,) of the batch-mean loss with respect to the weights.

    Inputs are (B, *S), labels (B,) class numbers, or (B, K) probabilities.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> gradient(Task.of(model), torch.ones(1, 1, 2, 2), torch.tensor([0])).shape
        torch.Size([10])
    """
    flat = task.parameters if parameters is None else parameters
    # A graph of the gradient is kept only for a second derivative: it takes memory.
    traced = torch.is_grad_enabled() and any(
        t.requires_grad for t in (inputs, labels, flat) if t.is_floating_point()
    )
    with torch.enable_grad():
        leaves = {
            name: value if value.requires_grad else value.detach().requires_grad_()
            for name, value in task.unflatten(flat).items()
        }
        output = call(task, {**task.buffers, **leaves}, inputs, twice=traced)
        loss = task.loss(output, labels)
        if wrong := no_gradient(loss):
            raise ValueError(wrong)
        # Weights that the output does not use have a gradient of 0, not None.
        parts = torch.autograd.grad(
            loss, list(leaves.values()), create_graph=traced, materialize_grads=True
        )
    return _of_kept(task, torch.cat([part.reshape(-1) for part in parts]))


def example_gradients(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
) -> Tensor:
    """Gradient of every example's loss, (B, P); their mean is `gradient`."""

    def one(
        leaves: dict[str, Tensor],
        image: Tensor,
        label: Tensor,
    ) -> Tensor:
        return task.loss(call(task, {**task.buffers, **leaves}, image[None]), label[None])

    leaves = task.unflatten(task.parameters)  # to differentiate the flat vector copies it often
    try:
        each = vmap(grad(one), in_dims=(None, 0, 0))(leaves, inputs, labels)
    except RuntimeError as error:  # such as masks of padding in transformers
        if not any(words in str(error) for words in _NO_VMAP):
            raise
        pairs = zip(
            torch.split(inputs, 1),
            torch.split(labels, 1),
            strict=True,
        )
        return torch.stack([gradient(task, *pair) for pair in pairs])
    rows = [each[name].reshape(len(inputs), leaves[name].numel()) for name in leaves]
    return _of_kept(task, torch.cat(rows, 1))


def local_update(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    slope: Callable[..., Tensor] = gradient,
) -> Tensor:
    """The update (P,) after the task's local plan, in gradient units.

    It is (theta_before - theta_after) / learning_rate: for SGD the sum of the gradients along the
    local steps, and for one step `gradient` itself. Minibatches are consecutive slices, in turn and
    again from the first, the same for client and attacker. `slope` computes a step's gradient.
    """
    if _FRUGAL.get() is not None:
        slope = _frugally(slope)
    plan = task.plan
    size = plan.batch_size or len(inputs)
    slices = [slice(a, a + size) for a in range(0, len(inputs), size)]
    first = slope(task, inputs[slices[0]], labels[slices[0]])
    total, state = stepped(plan, 1, first, task.parameters, None)
    for step in range(1, plan.steps):
        part = slices[step % len(slices)]
        moved = task.parameters - plan.learning_rate * total
        gradient_there = slope(task, inputs[part], labels[part], moved)
        change, state = stepped(plan, step + 1, gradient_there, moved, state)
        total = total + change
    return total


@dataclass(frozen=True)
class Frugal:
    """How local updates save memory: no step's graph is kept, the backward pass computes it again.

    `chunk`: a step's gradient is the weighted sum of those of so many examples each; None does not
    split it, and then no bit changes.
    """

    chunk: int | None = None


_FRUGAL: ContextVar[Frugal | None] = ContextVar("leakbound_frugal", default=None)
# A context variable: every attack below calls `local_update`, and none has to pass this on.


@contextmanager
def frugal(form: Frugal | None) -> Iterator[None]:
    """While active, `local_update` takes the memory of one step's graph, or of one chunk's.

    Derivatives are of the first order. Steps take about a forward and a backward pass longer.

    Example:
        >>> from leakbound.core import LocalPlan
        >>> task = Task.of(nn.Linear(4, 2), plan=LocalPlan(steps=3, learning_rate=0.1))
        >>> with frugal(Frugal(chunk=1)):
        ...     local_update(task, torch.ones(2, 4), torch.tensor([0, 1])).shape
        torch.Size([10])
    """
    token = _FRUGAL.set(form)
    try:
        yield
    finally:
        _FRUGAL.reset(token)


def is_frugal() -> bool:
    """Whether local updates save memory here, so that no engine may simulate them."""
    return _FRUGAL.get() is not None


def indivisible(task: Task) -> str:
    """Why a batch's gradient is no mean of its parts' gradients; empty if it is."""
    loss = losses.named(task.loss)
    if task.coupled:
        return "batch norm in training mode couples the examples of a batch"
    if loss.targets == "any":
        return f"the loss {loss.name} may not be a mean over examples"
    return "examples count by their scored tokens" if loss.of_inputs else ""


def _frugally(slope: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As `slope`, by chunks, without a graph that lasts."""
    form = _FRUGAL.get()
    assert form is not None

    def chunked(
        task: Task,
        inputs: Tensor,
        labels: Tensor,
        parameters: Tensor | None = None,
    ) -> Tensor:
        size = form.chunk or len(inputs)
        flat = task.parameters if parameters is None else parameters
        total: Tensor | None = None
        for at in range(0, len(inputs), size):
            part = inputs[at : at + size]
            value = recomputed(partial(slope, task), part, labels[at : at + size], flat)
            if len(part) == len(inputs):
                return value
            value = value * (len(part) / len(inputs))
            total = value if total is None else total + value
        assert total is not None  # a batch has examples
        return total

    return chunked


State = tuple[Tensor, ...]
TINY = 1e-30
"""Added to squares below a root, whose slope is then finite at 0; it is far below any epsilon."""


def stepped(
    plan: LocalPlan,
    step: int,
    slope: Tensor,
    weights: Tensor,
    state: State | None,
) -> tuple[Tensor, State | None]:
    """What the optimizer's step (1, 2, ...) subtracts over the learning rate; and its state."""
    decay = plan.weight_decay * weights if plan.weight_decay else None
    if decay is not None and not plan.decoupled:
        slope = slope + decay
    change, state = _direction(plan, step, slope, state)
    if decay is not None and plan.decoupled:
        change = change + decay
    return change, state


def _direction(
    plan: LocalPlan,
    step: int,
    slope: Tensor,
    state: State | None,
) -> tuple[Tensor, State | None]:
    """As `stepped`, without weight decay."""
    keep, keep_square = plan.decays
    zero = torch.zeros_like(slope)
    if plan.optimizer == "sgd":
        if not plan.momentum:
            return slope, None
        change = slope if state is None else plan.momentum * state[0] + slope
        return change, (change,)
    if plan.optimizer == "lion":
        mean = zero if state is None else state[0]
        change = (keep * mean + (1 - keep) * slope).sign()
        return change, (keep_square * mean + (1 - keep_square) * slope,)
    if plan.optimizer == "adagrad":
        square = (zero if state is None else state[0]) + slope.square()
        return slope / ((square + TINY).sqrt() + plan.added), (square,)
    mean, square = state or (zero, zero)
    square = keep_square * square + (1 - keep_square) * slope.square()
    if plan.optimizer == "rmsprop":
        return slope / ((square + TINY).sqrt() + plan.added), (mean, square)
    mean = keep * mean + (1 - keep) * slope
    root = (square / (1 - keep_square**step) + TINY).sqrt()
    return mean / (1 - keep**step) / (root + plan.added), (mean, square)


Each = Callable[[Task, Tensor, Tensor], Tensor]
"""Computes every example's gradient: `example_gradients`, or a variant without derivatives."""


def rows(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    unit: Unit,
    each: Each = example_gradients,
) -> Tensor:
    """One client's rows before any defense: (B, P) for EXAMPLE, (1, P) for CLIENT.

    Raises:
        Refused: per-example rows for a local plan with several steps or with minibatches, or for
            a model that couples the examples.
    """
    if unit is Unit.EXAMPLE and task.coupled:
        raise Refused(
            "the model has batch norm in training mode, so no example has a separate gradient; a "
            "defense on every example's gradient needs model.eval(), or group norm"
        )
    if unit is Unit.EXAMPLE:
        if not task.plan.is_gradient or (task.plan.batch_size or len(inputs)) < len(inputs):
            raise Refused(
                f"steps is {task.plan.steps}, batch_size {task.plan.batch_size} and optimizer "
                f"{task.plan.optimizer!r}; a defense on every example's gradient needs 1 step of "
                "SGD on the full batch"
            )
        return each(task, inputs, labels)
    return local_update(task, inputs, labels)[None]


def simulate(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    *,
    cohort: tuple[int, ...],
    defense: DefenseProtocol | None,
) -> Tensor:
    """The rows (R, P) that an attacker expects for a candidate of all clients' data.

    The candidate is split among the clients in order, and the known defense's deterministic part is
    applied. Without a known defense, the result is the sum of the clients' plain updates.
    """
    unit = Unit.CLIENT if defense is None else defense.starts
    places = pairwise(accumulate(cohort, initial=0))
    return _sent([rows(task, inputs[a:z], labels[a:z], unit) for a, z in places], defense)


def shown(observation: Observation, plain: Tensor) -> Tensor:
    """The view that an attacker expects of clients' rows (R, P) before any defense, in order.

    It has one row per example if the known defense starts from examples, or if examples were seen
    and no defense is known. Otherwise it has one row per client.
    """
    defense = observation.defense
    cohort = observation.cohort
    if defense is None and observation.update.unit is Unit.EXAMPLE:
        return plain
    each = defense is not None and defense.starts is Unit.EXAMPLE
    sizes = list(cohort) if each else [1] * len(cohort)
    return _sent([plain] if len(cohort) == 1 else list(torch.split(plain, sizes)), defense)


def _sent(parts: list[Tensor], defense: DefenseProtocol | None) -> Tensor:
    if defense is not None:
        alone, together = defense.sides
        parts = [alone.imitate(part) for part in parts]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    if defense is not None:
        return together.imitate(whole)
    return whole if len(whole) == 1 else whole.sum(0, keepdim=True)


def respond(
    task: Task,
    batch: Batch,
    defense: DefenseProtocol,
    source: Source,
    state: Any = None,
    each: Each = example_gradients,
) -> tuple[Update, Any]:
    """One client's defended update before any aggregation, and the client's state.

    This is the client's round, and the round of an attacker who simulates it on a candidate.
    `state` is the result of the previous round, None in the first. `each` computes examples'
    gradients.
    """
    alone, _ = defense.sides
    state = alone.init(task) if state is None else state
    trained, state = alone.begin(alone.prepare(task, source), state, source)
    plain = rows(trained, batch.inputs, batch.labels, defense.starts, each).detach()
    if not alone.gives_bound:  # otherwise an error would reveal whose gradient is not finite
        check.finite("the client's gradient", plain)
    examples = (1,) * batch.size if defense.starts is Unit.EXAMPLE else (batch.size,)
    update = Update(plain, defense.starts, examples)
    update, state = alone.transform(update, state, ClientContext(trained, batch), source)
    if task.kept is not None:  # pruned weights are not sent, and neither is noise on them
        update = update.masked(task.kept.expand_as(update.rows), by_value=False)
    return update, state


def pure_simulate(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    defense: DefenseProtocol | None,
    each: Each = example_gradients,
) -> Tensor:
    """As `simulate` for one client, but without autograd calls, so that `torch.func` can trace it.
    Another `each` may give the same values faster, without derivatives.

    Raises:
        ValueError: the local plan has minibatches.
    """
    size = task.plan.batch_size
    if defense is not None and defense.starts is Unit.EXAMPLE:
        plain = each(task, inputs, labels)
    elif (size or len(inputs)) < len(inputs):
        raise ValueError(f"batch_size is {size}; give a local plan on the full batch")
    else:
        plain = local_update(task, inputs, labels, pure_gradient)[None]
    if defense is None:
        return plain
    alone, together = defense.sides
    return together.imitate(alone.imitate(plain))


def input_jvp(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    tangent: Tensor,
) -> Tensor:
    """Change (P,) of the gradient when the inputs move along `tangent` (B, *S)."""
    return cast(Tensor, jvp(lambda x: pure_gradient(task, x, labels), (inputs,), (tangent,))[1])


def pure_gradient(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    parameters: Tensor | None = None,
) -> Tensor:
    """As `gradient`, but without autograd calls, so that `torch.func` transforms can trace it."""
    leaves = task.unflatten(task.parameters if parameters is None else parameters)
    slopes = grad(lambda x: task.loss(call(task, {**task.buffers, **x}, inputs), labels))(leaves)
    return _of_kept(task, torch.cat([slopes[name].reshape(-1) for name in leaves]))


def _of_kept(task: Task, rows: Tensor) -> Tensor:
    return rows if task.kept is None else rows * task.kept
