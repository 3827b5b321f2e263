"""The words every other module speaks: batch, task, update, law, observation, reconstruction.

All types are frozen. Tensors inside them are never written to: what changes, returns a new value.
Information flows one way, from `Batch` to `Reconstruction`; `Observation` has no field for truth.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from leakbound.random import Source, laplace, normal

Loss = Callable[[Tensor, Tensor], Tensor]


class Unit(IntEnum):
    """Whose contribution one row of an `Update` holds. A chain of defenses only coarsens it."""

    EXAMPLE = 0
    CLIENT = 1
    COHORT = 2

    @property
    def noun(self) -> str:
        """The unit as a word for messages: 'example', 'client' or 'cohort'."""
        return self.name.lower()


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
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; it must be above 0")
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
            ValueError: no parameters, weights that are not finite, or BatchNorm or dropout in
                training mode (their output depends on the batch or on hidden randomness).

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
        if not module.training:
            continue
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"model has BatchNorm in training mode ({name or 'the model itself'}): its output "
                "for one example depends on the others; call model.eval() first"
            )
        if isinstance(module, nn.modules.dropout._DropoutNd) and getattr(module, "p", 0) > 0:
            raise ValueError(
                f"model has dropout in training mode ({name or 'the model itself'}): call "
                "model.eval() first, or use the defense hidden_dropout, whose draws are named"
            )


@dataclass(frozen=True, eq=False)
class Exact:
    """The release is a deterministic function of the data (given the mask, where there is one)."""

    private: bool = False


@dataclass(frozen=True, eq=False)
class Gaussian:
    """Gaussian noise on the release; `covariance` is a scalar or a diagonal (P,)."""

    covariance: float | Tensor
    private: bool = False


@dataclass(frozen=True, eq=False)
class Laplace:
    """Laplace noise on the release; `scale` is a scalar or one number a coordinate (P,)."""

    scale: float | Tensor
    private: bool = False


@dataclass(frozen=True, eq=False)
class Unknown:
    """No law is known of the release given the data, for the stated reason."""

    reason: str
    private: bool = True


Law = Exact | Gaussian | Laplace | Unknown
"""What is known of a release given the data. `private`: the law itself depends on the batch."""


@dataclass(frozen=True, eq=False)
class Update:
    """What leaves a client, in gradient units: (theta_before - theta_after) / learning_rate.

    Defenses change an update only through `scaled`, `noised`, `masked`, `summed` and `opaque`,
    which keep the declared law true, so that attacks and bounds can trust it.

    Attributes:
        rows: (R, P), one row a unit.
        examples: how many examples each row holds, R numbers.
        law: the noise of each row, independent between rows.
        mask: (R, P) bool, False where a coordinate is withheld (sent as zero); None: all are sent.
        bound: the L2 bound on what one example can add to a row; None where nothing bounds it.
    """

    rows: Tensor
    unit: Unit
    examples: tuple[int, ...]
    law: Law = Exact()
    mask: Tensor | None = None
    bound: float | None = None

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or len(self.rows) != len(self.examples):
            raise ValueError(
                f"rows has shape {tuple(self.rows.shape)} and examples names "
                f"{len(self.examples)} rows; give rows (R, P) and R numbers"
            )

    def scaled(self, factor: float) -> Update:
        """Every row times a number that does not depend on the data."""
        law: Law = self.law
        if isinstance(law, Gaussian):
            law = replace(law, covariance=law.covariance * factor**2)
        elif isinstance(law, Laplace):
            law = replace(law, scale=law.scale * abs(factor))
        bound = None if self.bound is None else self.bound * abs(factor)
        return replace(self, rows=self.rows * factor, law=law, bound=bound)

    def noised(self, noise: Gaussian | Laplace, source: Source) -> Update:
        """Add independent noise of the given law to every coordinate, masked ones too.

        Noise covers the zeros of a mask, so the mask is no longer visible: it is dropped.
        """
        if isinstance(noise, Gaussian):
            spread = torch.as_tensor(noise.covariance, device=self.rows.device).sqrt()
            draw = normal(self.rows.shape, source, like=self.rows)
        else:
            spread = torch.as_tensor(noise.scale, device=self.rows.device)
            draw = laplace(self.rows.shape, source, like=self.rows)
        rows = self.rows + draw * spread.to(self.rows.dtype)
        return replace(self, rows=rows, law=_sum_of(self.law, noise), mask=None)

    def masked(self, mask: Tensor, *, by_value: bool) -> Update:
        """Withhold the coordinates where `mask` (R, P) is False.

        Args:
            mask: what is still sent.
            by_value: the mask was chosen from the rows themselves. It is then an observation of
                its own (the law is private), and after noise no law is known any more.
        """
        law: Law = self.law
        if by_value and isinstance(law, Exact):
            law = Exact(private=True)
        elif by_value and not isinstance(law, Unknown):
            law = Unknown("coordinates were chosen by their noisy values")
        joint = mask if self.mask is None else mask & self.mask
        return replace(self, rows=self.rows * mask, law=law, mask=joint)

    def summed(self, unit: Unit) -> Update:
        """All rows added into one row of a coarser unit."""
        law: Law = self.law
        count: int | Tensor = len(self.rows)
        if self.mask is not None and not isinstance(law, Exact):
            count = self.mask.sum(0)
        if isinstance(law, Gaussian):
            law = replace(law, covariance=law.covariance * count)
        elif isinstance(law, Laplace) and len(self.rows) > 1:
            law = Unknown("a sum of Laplace draws is not Laplace")
        mask = None if self.mask is None else self.mask.any(0, keepdim=True)
        rows = self.rows.sum(0, keepdim=True)
        return Update(rows, unit, (sum(self.examples),), law, mask, self.bound)

    def opaque(self, rows: Tensor, reason: str, *, bound: float | None = None) -> Update:
        """Rows changed by any other function of the rows alone: noise laws do not survive it."""
        law: Law = self.law
        if isinstance(law, Gaussian | Laplace):
            law = Unknown(reason)
        return replace(self, rows=rows, law=law, bound=bound)

    @staticmethod
    def stack(updates: list[Update]) -> Update:
        """One-row updates of several clients as one update with a row for each."""
        first = updates[0]
        mask = None
        if any(u.mask is not None for u in updates):
            mask = torch.cat(
                [
                    torch.ones_like(u.rows, dtype=torch.bool) if u.mask is None else u.mask
                    for u in updates
                ]
            )
        law = first.law
        if not all(_same_law(law, u.law) for u in updates):
            law = Unknown("the clients' release laws differ")
        rows = torch.cat([u.rows for u in updates])
        examples = tuple(n for u in updates for n in u.examples)
        return Update(rows, first.unit, examples, law, mask, first.bound)


def _sum_of(law: Law, noise: Gaussian | Laplace) -> Law:
    if isinstance(law, Exact):
        return replace(noise, private=noise.private or law.private)
    if isinstance(law, Gaussian) and isinstance(noise, Gaussian):
        return Gaussian(law.covariance + noise.covariance, law.private or noise.private)
    return law if isinstance(law, Unknown) else Unknown("noise of two different laws was added")


def _same_law(a: Law, b: Law) -> bool:
    if type(a) is not type(b) or a.private != b.private:
        return False
    if isinstance(a, Gaussian) and isinstance(b, Gaussian):
        return _same_number(a.covariance, b.covariance)
    if isinstance(a, Laplace) and isinstance(b, Laplace):
        return _same_number(a.scale, b.scale)
    return True


def _same_number(a: float | Tensor, b: float | Tensor) -> bool:
    return torch.equal(torch.as_tensor(a), torch.as_tensor(b))


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
        withheld. Scaled to a largest weight of 1.
        """
        if not self.threat.defense_known:
            return None
        rows, law = self.update.rows, self.update.law
        spread: float | Tensor = 1.0
        if isinstance(law, Gaussian):
            spread = torch.as_tensor(law.covariance).sqrt()
        elif isinstance(law, Laplace):
            spread = torch.as_tensor(law.scale)
        weights = torch.as_tensor(spread, dtype=rows.dtype, device=rows.device)
        if weights.ndim == 0 and self.update.mask is None:
            return None
        floor = weights[weights > 0].min() if bool((weights > 0).any()) else weights.new_ones(())
        weights = (floor / weights.clamp_min(floor * 1e-3)).clamp_max(1e3).expand_as(rows)
        weights = weights / weights.max()
        return weights if self.update.mask is None else weights * self.update.mask


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
