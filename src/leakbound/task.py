"""A client's batch and the public setting: local plans, and the model at its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from leakbound import check, losses
from leakbound._util import copies
from leakbound._util.recurrent import step_by_step
from leakbound.domains import Domain
from leakbound.domains.arguments import adapt

Optimizer = Literal["sgd", "adam", "adamw", "rmsprop", "adagrad", "lion"]
Loss = Callable[[Tensor, Tensor], Tensor]
_DROPOUT = nn.modules.dropout._DropoutNd
_ORDER = "_leakbound_weights"
"""The attribute in which a module with frozen weights keeps the names of all weights."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs (B, *S) and their labels: a client's private examples.

    Labels are class numbers (B,), or what the task's loss takes (see `leakbound.losses.NamedLoss`).

    Example:
        >>> Batch(torch.zeros(2, 1, 8, 8), torch.tensor([3, 5])).size
        2
    """

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{name} is a {type(value).__name__}; give a tensor (torch.as_tensor)"
                )
        if self.labels.ndim < 1:
            raise ValueError(
                f"labels is one number ({self.labels}) without a dimension; give one label for "
                "each example, such as torch.tensor([3])"
            )
        if self.inputs.ndim < 2:
            raise ValueError(
                f"inputs has shape {tuple(self.inputs.shape)}; give a batch of examples, such as "
                "images (B, C, H, W)"
            )
        if len(self.inputs) == 0:
            raise ValueError("inputs holds no example; give at least one")
        if len(self.inputs) != len(self.labels):
            raise ValueError(
                f"inputs holds {len(self.inputs)} examples and labels {len(self.labels)}; "
                "give one label for each"
            )

    @property
    def size(self) -> int:
        """The number of examples."""
        return len(self.inputs)


@dataclass(frozen=True)
class LocalPlan:
    """Local training between two messages.

    Args:
        steps: number of optimizer steps.
        learning_rate: of these steps.
        batch_size: of minibatches, taken in turn; None is the full batch.
        optimizer: "sgd", "adam", "adamw", "rmsprop", "adagrad" as in PyTorch, or "lion" (Chen et
            al. 2023); its state starts anew.
        momentum: of SGD, as in PyTorch.
        epsilon: what the optimizer adds to its denominator; None is PyTorch's default for it.
        betas: of Adam, AdamW and Lion; RMSprop's `alpha` is the second. None: the defaults.
        weight_decay: as in PyTorch: added to gradients, or decoupled (AdamW, Lion).
    """

    steps: int = 1
    learning_rate: float = 1.0
    batch_size: int | None = None
    optimizer: Optimizer = "sgd"
    momentum: float = 0.0
    epsilon: float | None = None
    betas: tuple[float, float] | None = None
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check.given(check.positive, epsilon=self.epsilon)
        check.non_negative(weight_decay=self.weight_decay)
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; give at least 1 local step")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate is {self.learning_rate}; give a finite one above 0")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; give at least 1")
        check.one_of(get_args(Optimizer), optimizer=self.optimizer)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}; give a number from 0 to below 1")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum is {self.momentum}; {self.rule} takes none, leave it out")
        if not all(0 <= beta < 1 for beta in self.betas or ()):
            raise ValueError(f"betas is {self.betas}; give two numbers from 0 to below 1")

    @property
    def added(self) -> float:
        """What the optimizer adds to its denominator: `epsilon`, or PyTorch's default."""
        if self.epsilon is not None:
            return self.epsilon
        return 1e-10 if self.optimizer == "adagrad" else 1e-8

    @property
    def decays(self) -> tuple[float, float]:
        """The share of the old average of gradients, and of their squares, that a step keeps."""
        if self.betas is not None:
            return self.betas
        defaults = {"lion": (0.9, 0.99), "rmsprop": (0.0, 0.99)}
        return defaults.get(self.optimizer, (0.9, 0.999))

    @property
    def rule(self) -> str:
        """The optimizer as people write it.

        Example:
            >>> LocalPlan(optimizer="adamw").rule
            'AdamW'
        """
        names = {"sgd": "SGD", "adamw": "AdamW", "rmsprop": "RMSprop"}
        return names.get(self.optimizer, self.optimizer.capitalize())

    @property
    def decoupled(self) -> bool:
        """Whether weight decay shrinks the weights beside the gradient's step, as in AdamW."""
        return self.optimizer in ("adamw", "lion")

    @property
    def is_gradient(self) -> bool:
        """Whether the update is the gradient of its first batch."""
        return self.steps == 1 and self.is_sum

    @property
    def is_sum(self) -> bool:
        """Whether the update is a weighted sum of gradients along the training."""
        return self.optimizer == "sgd" and not self.weight_decay

    @property
    def total_weight(self) -> float:
        """The sum of the weights of the gradients in the update of SGD: `steps` without momentum.

        Example:
            >>> LocalPlan(steps=2, momentum=0.5).total_weight
            2.5
        """
        kept = self.momentum
        # In closed form: a file may state a billion steps.
        return (self.steps - kept * (1 - kept**self.steps) / (1 - kept)) / (1 - kept)


@dataclass(frozen=True, eq=False)
class Task:
    """A model at given weights with its loss and local plan, known to server and clients.

    `parameters` (P,) holds the weights that local training changes, in the order of
    `model.named_parameters()`; an update has one entry for each. Frozen parameters (`requires_grad`
    is False) are public constants: they are in `buffers`, like running statistics. The module is
    only an architecture and is never changed. Build a task with `Task.of`.

    Attributes:
        buffers: every other tensor of the model, by name.
        input_range: the range (low, high) of every input, in the model's input units.
        label_range: the number of classes, or None if the loss takes no class labels.
        public: public data of the same kind as the clients', on which a defense may be tuned
            without leaking anything.
        domain: what one input is, where more is known than its range: a table's columns, a series.
        kept: (P,) bool, False for weights that pruning removed from the model: they are zero and
            have no gradient. None: none were removed. See `pruned`.
    """

    model: nn.Module
    parameters: Tensor
    loss: Loss
    plan: LocalPlan = LocalPlan()
    input_range: tuple[float, float] = (0.0, 1.0)
    label_range: int | None = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    public: Batch | None = None
    kept: Tensor | None = None
    domain: Domain | None = None

    @staticmethod
    def of(
        model: nn.Module,
        *,
        loss: str | Loss = nn.functional.cross_entropy,
        plan: LocalPlan | None = None,
        input_range: tuple[float, float] = (0.0, 1.0),
        classes: int | None = None,
        public: Batch | None = None,
        domain: Domain | None = None,
    ) -> Task:
        """Copy a module's architecture and trained weights, which may then change without effect.

        Parameters with `requires_grad` False are frozen: they are not part of the update. Their
        values are shared, as those of a language model take gigabytes: do not write into them.
        `loss` is a name in `leakbound.losses.LOSSES`, PyTorch's module or function, or any function
        of outputs and labels that returns a scalar.

        Raises:
            ValueError: no parameters, no trained ones, weights that are not finite, dropout in
                training mode (hidden randomness), an instance norm that keeps statistics, or a
                model that cannot take the domain's columns (see `leakbound.models.adapted`).

        Batch norm in training mode stays in this mode, as on a client: it uses the statistics of
        the batch, its running ones are dropped, and examples are then `coupled`.

        Example:
            >>> task = Task.of(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
            >>> task.parameters.shape, [name for name, *_ in task.layout]
            (torch.Size([10]), ['1.weight', '1.bias'])
            >>> adapted = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
            >>> [name for name, *_ in Task.of(adapted).layout]
            ['1.weight', '1.bias']
        """
        copies.refuse(model)
        _refuse_training_mode(model)
        named = trained(model)
        if not named:
            first = next((name for name, _ in model.named_parameters()), None)
            if first is None:
                raise ValueError("model has no parameters; there is no update to attack")
            raise ValueError(
                f"model has no trainable parameter: all are frozen ({first!r} has requires_grad "
                "False), so a client sends no update; call requires_grad_(True) on what the "
                "clients train"
            )
        parameters = torch.cat([p.detach().reshape(-1) for p in named.values()])
        if not all(check.is_finite(p) for p in model.parameters()):
            raise ValueError("model holds weights that are not finite; load other weights")
        if domain is None and not input_range[0] < input_range[1]:
            raise ValueError(f"input_range is {input_range}; give (low, high) with low < high")
        bare = shell(model)
        for norm in _batch_norms(bare):
            if norm.training or norm.running_mean is None:
                norm.running_mean = norm.running_var = norm.num_batches_tracked = None
                norm.track_running_stats = False
        adapt(step_by_step(bare), domain)
        loss = losses.named(loss)
        return Task(
            bare,
            parameters,
            loss,
            plan or LocalPlan(),
            input_range if domain is None else domain.input_range,
            classes if loss.has_classes else None,
            _held(bare),
            public,
            domain=domain,
        )

    @cached_property
    def layout(self) -> tuple[tuple[str, torch.Size, int, int], ...]:
        """(name, shape, start, stop) of every tensor within the flat parameter vector."""
        rows = []
        start = 0
        for name, parameter in self.model.named_parameters():
            rows.append((name, parameter.shape, start, start + parameter.numel()))
            start += parameter.numel()
        return tuple(rows)

    @property
    def coupled(self) -> bool:
        """Whether a batch norm couples the examples of a batch."""
        return any(norm.running_mean is None for norm in _batch_norms(self.model))

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The frozen parameters by name; they are among `buffers`."""
        return {name: self.buffers[name] for name in _frozen(self.model)}

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the trained parameters, which an update shows."""
        return frozenset(name for name, *_ in self.layout)

    def unflatten(self, row: Tensor) -> dict[str, Tensor]:
        """A flat vector (P,) as named tensors (views, no copy)."""
        return {name: row[a:b].view(shape) for name, shape, a, b in self.layout}

    def tensors(self, parameters: Tensor | None = None) -> dict[str, Tensor]:
        """Every tensor of the model by name, at the task's weights or at others (P,)."""
        flat = self.parameters if parameters is None else parameters
        return {**self.buffers, **self.unflatten(flat)}

    def with_parameters(self, parameters: Tensor) -> Task:
        """The same task at other weights (P,)."""
        if parameters.shape != self.parameters.shape:
            raise ValueError(
                f"parameters has shape {tuple(parameters.shape)}; "
                f"this model takes ({len(self.parameters)},)"
            )
        if self.kept is not None:
            parameters = parameters * self.kept
        return replace(self, parameters=parameters)

    def pruned(self, kept: Tensor | None) -> Task:
        """The same weights where `kept` (P,) is True, permanent zeros elsewhere; None: dense.

        Example:
            >>> task = Task.of(nn.Sequential(nn.Flatten(), nn.Linear(2, 1)))
            >>> small = task.pruned(torch.tensor([True, False, True]))
            >>> (small.parameters != 0).tolist(), small.pruned(None).kept is None
            ([True, False, True], True)
        """
        if kept is None:
            return replace(self, kept=None)
        if kept.shape != self.parameters.shape or kept.dtype != torch.bool:
            raise ValueError(
                f"kept has shape {tuple(kept.shape)} and type {kept.dtype}; this model takes "
                f"({len(self.parameters)},) of torch.bool"
            )
        return replace(self, parameters=self.parameters * kept, kept=kept)

    def to(
        self,
        device: torch.device | str,
        dtype: torch.dtype | None = None,
    ) -> Task:
        """The task on another device, and in another floating-point type if one is given."""

        def move(value: Tensor) -> Tensor:
            return value.to(device, dtype if value.is_floating_point() else None)

        # `Module.to` changes the module itself, and tasks share theirs.
        model = copies.duplicate(self.model).to(device, dtype)
        buffers = {name: move(value) for name, value in self.buffers.items()}
        public = self.public and Batch(move(self.public.inputs), self.public.labels.to(device))
        kept = None if self.kept is None else self.kept.to(device)
        moved = replace(
            self,
            model=model,
            buffers=buffers,
            public=public,
            kept=kept,
        )
        return replace(moved, parameters=move(self.parameters))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that local training changes, by name: an update has entries only for these.

    Example:
        >>> list(trained(nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))))
        ['1.weight', '1.bias']
    """
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def weight_names(module: nn.Module) -> tuple[str, ...]:
    """Names of a module's direct weights in the order of its state dict, trained or frozen."""
    return tuple(getattr(module, _ORDER, module._parameters))


def drops(module: nn.Module) -> bool:
    """Whether a module in its mode draws dropout, alone or between recurrent layers.

    Example:
        >>> drops(nn.LSTM(1, 2, num_layers=2, dropout=0.1)), drops(nn.Dropout(0.5).eval())
        (True, False)
    """
    rate: float = getattr(module, "p", 0.0) if isinstance(module, _DROPOUT) else 0.0
    rate = module.dropout if isinstance(module, nn.RNNBase) else rate
    return module.training and rate > 0


def shell(model: nn.Module) -> nn.Module:
    """A copy with only the trained parameters as parameters; frozen ones become its buffers."""
    bare = copies.plain(model)
    for module in bare.modules():
        frozen = {
            k: p for k, p in module._parameters.items() if p is not None and not p.requires_grad
        }
        if frozen:
            setattr(module, _ORDER, weight_names(module))
        for name, parameter in frozen.items():
            del module._parameters[name]
            module.register_buffer(name, parameter.detach())
    return bare.requires_grad_(False)


def _frozen(bare: nn.Module) -> list[str]:
    """The names of a shell's buffers that are frozen weights."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in bare.named_modules()
        for name in weight_names(module)
        if name in module._buffers
    ]


def _held(bare: nn.Module) -> dict[str, Tensor]:
    """A shell's buffers by name; frozen weights share their values."""
    frozen = {*_frozen(bare)}
    own = {name: value.detach() for name, value in bare.named_buffers()}
    return {name: value if name in frozen else value.clone() for name, value in own.items()}


def _batch_norms(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    kind = nn.modules.batchnorm._BatchNorm
    return [module for module in model.modules() if isinstance(module, kind)]


def _refuse_training_mode(model: nn.Module) -> None:
    for name, module in model.named_modules():
        where = name or "the model itself"
        if not module.training or isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        if getattr(module, "running_mean", None) is not None:
            raise ValueError(
                f"model has {type(module).__name__} in training mode ({where}): it changes with "
                "the batch; call model.eval() first"
            )
        if drops(module):
            raise ValueError(
                f"model has dropout in training mode ({where}): call model.eval() first, or use "
                "the defense hidden_dropout, whose draws are named"
            )
