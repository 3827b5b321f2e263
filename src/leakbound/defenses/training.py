"""Defenses that change the local training: several steps, dropped hidden units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from leakbound import check
from leakbound._util import copies
from leakbound.core import LocalPlan, Optimizer, Task, Unit, Unknown, Update
from leakbound.defenses.base import Context, Defense, Sent, State
from leakbound.randomness import SecureSource, Source, bernoulli


@dataclass(frozen=True, repr=False)
class LocalAggregation(Defense):
    """Take `steps` local steps on the batch before sending the change of the weights.

    Args:
        steps: number of local steps.
        learning_rate: of these steps.
        batch_size: of minibatches, taken in turn; by default those of the task's plan.
        optimizer: "sgd", "adam", "adamw", "rmsprop", "adagrad" or "lion".
        momentum: of SGD.
        weight_decay: as PyTorch's optimizer takes it.

    Guarantees: none. An attacker who knows the defense simulates the same steps.

    Source: Liu et al. 2025, local aggregation (3 and 5 steps).

    Example:
        >>> from leakbound.randomness import stream
        >>> task = LocalAggregation(3, 0.1).prepare(Task.of(nn.Linear(4, 2)), stream(0))
        >>> task.plan.steps, task.plan.learning_rate
        (3, 0.1)
    """

    accepts = frozenset({Unit.CLIENT})

    steps: int = 3
    learning_rate: float = 0.1
    batch_size: int | None = None
    optimizer: Optimizer = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check.count(steps=self.steps)
        check.positive(learning_rate=self.learning_rate)
        self._plan(None)

    def _plan(self, size: int | None) -> LocalPlan:
        size = self.batch_size or size
        return LocalPlan(
            self.steps,
            self.learning_rate,
            size,
            self.optimizer,
            self.momentum,
            weight_decay=self.weight_decay,
        )

    def prepare(self, task: Task, source: Source) -> Task:
        return replace(task, plan=self._plan(task.plan.batch_size))

    def infer(self, task: Task, update: Update) -> Task:
        return self.prepare(task, SecureSource())


class _Mask(nn.Module):
    """Multiplies a layer's input by a fixed mask over its units; used as a forward pre-hook."""

    def __init__(self, mask: Tensor, spatial: int) -> None:
        super().__init__()
        self.mask = mask.view(-1, *([1] * spatial))

    def __call__(
        self,
        module: nn.Module,
        args: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        return (args[0] * self.mask.to(args[0]), *args[1:])


@dataclass(frozen=True, repr=False)
class HiddenDropout(Defense):
    """Drop each hidden unit (channel) with probability `rate` for the whole round.

    Each client and round has one draw, the same for all its examples: the client trains a narrower
    network, whose kept units are scaled by 1 / (1 - rate). Units are the inputs of every linear
    layer and every convolution without groups, except the model's first layer.

    Args:
        rate: the probability that a unit is dropped, below 1.

    Guarantees: none. Dropped units leave columns of exact zeros in the update. An attacker who
    knows the defense infers the draw from them (`infer`).

    Source: Liu et al. 2025, section 3.4 (dropout; errata 2.9: `rate` is the drop probability).

    Example:
        >>> import torch
        >>> import leakbound as lb
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 20), nn.Sigmoid(), nn.Linear(20, 2))
        >>> batch, task = lb.Batch(torch.ones(1, 1, 2, 2), torch.tensor([0])), Task.of(model)
        >>> sent = lb.play(task, [batch], HiddenDropout(0.5), [lb.stream(0)] * 2).observation.update
        >>> zero = (task.unflatten(sent.rows[0])["3.weight"] == 0).all(0)  # dropped units show
        >>> bool(zero.any()), bool(zero.all())
        (True, False)
    """

    accepts = frozenset({Unit.CLIENT})
    keeps_law = False
    hides_law = True

    rate: float = 0.5

    def __post_init__(self) -> None:
        check.fraction(rate=self.rate)
        if self.rate == 1:
            raise ValueError("rate is 1; nothing would be left to train: give a rate below 1")

    def prepare(self, task: Task, source: Source) -> Task:
        masks = {
            name: bernoulli((width,), 1 - self.rate, source).double() / (1 - self.rate)
            for name, width, _ in _hidden_layers(task.model)
        }
        return _with_masks(task, masks)

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        return replace(update, law=Unknown("hidden units were dropped at random")), state

    def infer(self, task: Task, update: Update) -> Task:
        """Units whose outgoing weights have exactly zero gradient count as dropped."""
        # Each client has its own draw, and a sum of clients hides all of them.
        if len(update.rows) > 1 or update.unit is not Unit.CLIENT:
            return task
        weights = task.unflatten(update.rows[0])
        masks = {}
        units = 0
        dropped = 0
        for name, _, _ in _hidden_layers(task.model):
            weight = weights.get(f"{name}.weight" if name else "weight")
            if weight is None:  # frozen: nothing of it is sent
                continue
            alive = weight.transpose(0, 1).flatten(1).abs().sum(1) > 0
            units = units + len(alive)
            dropped = dropped + int((~alive).sum())
            if bool(alive.any()):
                masks[name] = alive.double() / (1 - self.rate)
        # It is unlikely that all of these units were kept: noise, or a sum, covers the zeros.
        covered = dropped == 0 and (1 - self.rate) ** units < 1e-3
        return task if covered else _with_masks(task, masks)


def _hidden_layers(model: nn.Module) -> Iterator[tuple[str, int, int]]:
    """(name, number of input units, spatial dimensions) of all layers but the first."""
    seen_first = False
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            row = (name, module.in_features, 0)
        elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            row = (name, module.in_channels, len(module.kernel_size))
        else:
            continue
        if seen_first and getattr(module, "groups", 1) == 1:
            yield row
        seen_first = True


def _with_masks(task: Task, masks: dict[str, Tensor]) -> Task:
    model = copies.duplicate(task.model)
    for name, _, spatial in _hidden_layers(task.model):
        if name in masks:
            model.get_submodule(name).register_forward_pre_hook(_Mask(masks[name], spatial))
    return replace(task, model=model)
