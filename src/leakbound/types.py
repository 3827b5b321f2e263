"""The words every other module speaks: batch, task, update, law, observation, reconstruction.

All types are frozen. Tensors inside them are never written to: what changes, returns a new value.
Information flows one way, from `Batch` to `Reconstruction`; `Observation` has no field for truth.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from leakbound.release import Exact, Gaussian, Laplace, Law, Unit, Unknown, Update

__all__ = [
    "Batch",
    "ClientContext",
    "Exact",
    "Gaussian",
    "Guarantee",
    "Laplace",
    "Law",
    "LocalPlan",
    "Loss",
    "NotApplicable",
    "Observation",
    "Reconstruction",
    "Release",
    "Server",
    "Task",
    "ThreatModel",
    "Unit",
    "Unknown",
    "Update",
]

Loss = Callable[[Tensor, Tensor], Tensor]


class Guarantee(Enum):
    """What a defense promises: differential privacy, a known release law, or nothing."""

    DIFFERENTIAL_PRIVACY = "differential privacy"
    RELEASE_LAW = "known release law"
    NONE = "none"


class Server(Enum):
    """How far the server goes: it reads what it is sent, or it also changes the model it sends."""

    HONEST = "honest"
    MALICIOUS = "malicious"


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs (B, *S) and their class labels (B,): what a client holds and wants to keep.

    Example:
        >>> Batch(torch.zeros(2, 1, 8, 8), torch.tensor([3, 5])).size
        2
    """

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.inputs.ndim < 2:
            raise ValueError(
                f"inputs has shape {tuple(self.inputs.shape)}; give a batch of images (B, C, H, W)"
            )
        if len(self.inputs) == 0:
            raise ValueError("inputs holds no example; a batch needs at least one")
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
    """Local training between two messages: `steps` of SGD; `batch_size` None is the full batch."""

    steps: int = 1
    learning_rate: float = 1.0
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; a client takes at least 1 local step")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate is {self.learning_rate}; give a finite one above 0")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")


@dataclass(frozen=True, eq=False)
class Task:
    """A model at given weights with its loss and local plan: what server and clients agree on.

    The module is an architecture only and is never mutated; `parameters` (P,) holds the weights in
    the order of `model.named_parameters()`. Build one with `Task.of`.

    Attributes:
        input_range: the box (low, high) that every input lies in, in the units the model is fed.
        label_range: the number of classes, or None where the loss takes no class labels.
    """

    model: nn.Module
    parameters: Tensor
    loss: Loss
    plan: LocalPlan = LocalPlan()
    input_range: tuple[float, float] = (0.0, 1.0)
    label_range: int | None = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(
        model: nn.Module,
        *,
        loss: Loss = nn.functional.cross_entropy,
        plan: LocalPlan | None = None,
        input_range: tuple[float, float] = (0.0, 1.0),
        classes: int | None = None,
    ) -> Task:
        """Take a module's architecture and weights; later changes of the module do not matter.

        Raises:
            ValueError: no parameters, weights that are not finite, dropout in training mode (hidden
                randomness), or a norm that computes or keeps statistics of the batch.

        Example:
            >>> task = Task.of(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
            >>> task.parameters.shape, [name for name, *_ in task.layout]
            (torch.Size([10]), ['1.weight', '1.bias'])
        """
        _refuse_training_mode(model)
        named = [p.detach().reshape(-1) for p in model.parameters()]
        if not named:
            raise ValueError("model has no parameters; there is no update to attack")
        parameters = torch.cat(named)
        if not torch.isfinite(parameters).all():
            raise ValueError("model holds weights that are not finite; load other weights")
        if not input_range[0] < input_range[1]:
            raise ValueError(f"input_range is {input_range}; give (low, high) with low < high")
        buffers = {name: value.detach().clone() for name, value in model.named_buffers()}
        shell = copy.deepcopy(model).requires_grad_(False)
        return Task(shell, parameters, loss, plan or LocalPlan(), input_range, classes, buffers)

    @cached_property
    def layout(self) -> tuple[tuple[str, torch.Size, int, int], ...]:
        """(name, shape, start, stop) of every tensor within the flat parameter vector."""
        rows, start = [], 0
        for name, parameter in self.model.named_parameters():
            rows.append((name, parameter.shape, start, start + parameter.numel()))
            start += parameter.numel()
        return tuple(rows)

    def unflatten(self, row: Tensor) -> dict[str, Tensor]:
        """A flat vector (P,) as named tensors (views, no copy)."""
        return {name: row[a:b].view(shape) for name, shape, a, b in self.layout}

    def with_parameters(self, parameters: Tensor) -> Task:
        """The same task at other weights (P,)."""
        if parameters.shape != self.parameters.shape:
            raise ValueError(
                f"parameters has shape {tuple(parameters.shape)}; "
                f"this model takes ({len(self.parameters)},)"
            )
        return replace(self, parameters=parameters)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Task:
        """The task on another device, and in another floating-point type where one is given."""

        def move(value: Tensor) -> Tensor:
            return value.to(device, dtype if value.is_floating_point() else None)

        model = copy.deepcopy(self.model).to(device, dtype)
        buffers = {name: move(value) for name, value in self.buffers.items()}
        return replace(self, model=model, parameters=move(self.parameters), buffers=buffers)


def _refuse_training_mode(model: nn.Module) -> None:
    for name, module in model.named_modules():
        where = name or "the model itself"
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"model has BatchNorm without running statistics ({where}): its output for one "
                "example depends on the others; build it with track_running_stats=True"
            )
        if not module.training:
            continue
        if getattr(module, "running_mean", None) is not None:
            raise ValueError(
                f"model has {type(module).__name__} in training mode ({where}): it depends on the "
                "batch or changes with it; call model.eval() first"
            )
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ValueError(
                f"model has dropout in training mode ({where}): call model.eval() first, or use "
                "the defense hidden_dropout, whose draws are named"
            )


@dataclass(frozen=True)
class ThreatModel:
    """What the attacker is told. The default attacker knows the defense, its law and its mask."""

    labels_known: bool = True
    defense_known: bool = True
    server: Server = Server.HONEST


@dataclass(frozen=True, eq=False)
class ClientContext:
    """What exists on the client and nowhere else; `None` in its place on the server's side."""

    task: Task
    batch: Batch


class Release(Protocol):
    """What an attacker who knows a defense can do with it (every `Defense` has these)."""

    @property
    def starts(self) -> Unit:
        """The unit of the rows that the first link wants."""
        ...

    def imitate_clients(self, clients: list[Tensor]) -> Tensor:
        """The noise-free, differentiable part of the defense on each client's rows (R, P)."""
        ...

    def infer(self, task: Task, update: Update) -> Task:
        """The task that the client really trained, as far as the update gives it away."""
        ...


@dataclass(frozen=True, eq=False)
class Observation:
    """All that the attacker sees. There is no field for the truth.

    Attributes:
        cohort: the batch size of every client whose data is in `update`.
        input_shape: shape of one input, (C, H, W).
        labels: (N,) true labels of all examples where the threat model grants them.
        auxiliary: public data of the same kind, never the victims'.
        defense: the defense, where the threat model says that it is known.
    """

    update: Update
    task: Task
    cohort: tuple[int, ...]
    input_shape: tuple[int, ...]
    threat: ThreatModel = ThreatModel()
    labels: Tensor | None = None
    auxiliary: Batch | None = None
    defense: Release | None = None

    @property
    def examples(self) -> int:
        """How many examples the attacker is to rebuild."""
        return sum(self.cohort)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the reconstruction, (N, *S)."""
        return (self.examples, *self.input_shape)

    @property
    def weights(self) -> Tensor | None:
        """(R, P) weight of each coordinate for an attacker who knows law and mask; None: all alike.

        1 / standard deviation where noise differs between coordinates, 0 where a coordinate was
        withheld. Scaled to a largest weight of 1; coordinates without noise count as if theirs were
        a thousandth of the smallest.
        """
        law, mask = self.update.law, self.update.mask
        if not self.threat.defense_known:
            return None
        spread = torch.ones((), dtype=torch.float64)
        if isinstance(law, Gaussian):
            spread = torch.as_tensor(law.covariance, dtype=torch.float64).sqrt()
        elif isinstance(law, Laplace):
            spread = torch.as_tensor(law.scale, dtype=torch.float64)
        if spread.ndim == 0 and mask is None:
            return None
        some = spread[spread > 0]
        floor = some.min() if len(some) else spread.new_ones(())
        weights = (1 / (spread / floor).clamp_min(1e-3)).to(self.update.rows)
        weights = weights.expand_as(self.update.rows)
        if mask is not None:
            weights = weights * mask
        return weights / weights.max().clamp_min(1e-30)

    @property
    def noise_variance(self) -> Tensor | None:
        """(R, P) variance of the noise whose law the attacker knows, float64; None if none is."""
        law, rows = self.update.law, self.update.rows
        if not self.threat.defense_known or not isinstance(law, Gaussian | Laplace):
            return None
        variance = law.covariance if isinstance(law, Gaussian) else 2 * law.scale**2
        wide = torch.as_tensor(variance, dtype=torch.float64, device=rows.device)
        return wide.expand_as(rows)

    @property
    def noise_share(self) -> float:
        """Expected share of noise in the (weighted) energy seen, in [0, 1]; 0 if unknown."""
        rows, weights, noise = self.update.rows.double(), self.weights, self.noise_variance
        if noise is None:
            return 0.0
        scale = torch.ones_like(rows) if weights is None else weights.double().square()
        seen = float((scale * rows.square()).sum())
        return min(1.0, float((scale * noise).sum()) / seen) if seen > 0 else 0.0


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """An attacker's answer.

    Attributes:
        inputs: (N, *S), inside the task's input range.
        labels: (N,) the labels that the attack found or was told; None if it has none.
        objective: the attack's own final objective (lower is better); NaN where it has none.
        trace: the objective over time, for plots.
        problem: why the attack thinks that it failed; None if it does not. A picture with a
            problem is no evidence of safety.
    """

    inputs: Tensor
    labels: Tensor | None = None
    objective: float = float("nan")
    trace: tuple[float, ...] = ()
    problem: str | None = None


class NotApplicable(Exception):
    """An attack's or bound's assumptions do not hold here; the message says which."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
