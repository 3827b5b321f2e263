"""The base of pruning schemes, the weights that may be pruned, and checks of masks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from leakbound import check, client
from leakbound.core import Batch, Task
from leakbound.randomness import Source
from leakbound.tensors import weight_spans

SCOPES = ("global", "layer")


@dataclass(frozen=True)
class LayerCount:
    """How many weights of one tensor are kept."""

    name: str
    kept: int
    total: int

    @property
    def density(self) -> float:
        """The fraction that is kept."""
        return self.kept / self.total


@dataclass(frozen=True)
class Pruning(ABC):
    """Base of all schemes: a mask for the first round and, for adaptive ones, for later rounds.

    In every round (from 1) where `adjusts(round_)`, each client may first choose a mask
    (`client_mask`) and send its `report` with its update. After the aggregation the server chooses
    the new mask (`server_mask`). A weight that is restored starts at 0.

    Class attributes:
        reads_data: the first mask is chosen from images, and leaks them.
        adapts: clients choose masks or send reports during training, in addition to the update.

    Args:
        rate: the fraction of the prunable weights (see `prunable`) to prune, 0 <= rate < 1: exactly
            floor(rate * n) of n; of equal scores the lower index is pruned first.

    Raises:
        ValueError: the rate is outside [0, 1), or a layer would lose all its weights.
    """

    reads_data: ClassVar[bool] = False
    adapts: ClassVar[bool] = False

    rate: float = 0.3

    def __post_init__(self) -> None:
        check.fraction(rate=self.rate)
        if self.rate == 1:
            raise ValueError(f"rate is {self.rate!r}; give a number below 1, or no weight remains")

    def start(
        self,
        task: Task,
        batch: Batch | None,
        source: Source,
    ) -> Tensor:
        """The mask (P,) of the first round, chosen by the server for a model that is not pruned.

        `batch` is public data or one client's, if the scheme reads any; the mask then leaks it.
        """
        if task.kept is not None:
            raise ValueError("task is already pruned; give task.pruned(None)")
        return intact(task, self._first(task, batch, source))

    def adjusts(self, round_: int) -> bool:
        """Whether the mask changes in this round (from 1)."""
        check.count(round_=round_)
        return False

    def client_mask(
        self,
        task: Task,
        batch: Batch,
        round_: int,
    ) -> Tensor | None:
        """A client's own mask (P,) before its local training; None: it keeps the server's."""
        return None

    def report(
        self,
        task: Task,
        batch: Batch,
        round_: int,
    ) -> Tensor | None:
        """What a client sends in addition to its update, (P,); None: nothing."""
        return None

    def added_bytes(
        self,
        task: Task,
        round_: int,
    ) -> int:
        """Bytes that a client sends in a round besides its weights: a report, or its own mask."""
        return 0

    def server_mask(
        self,
        task: Task,
        report: Tensor | None,
        round_: int,
    ) -> Tensor:
        """The new mask (P,) after the aggregation; for a scheme that does not adapt, the old one.

        Args:
            task: `parameters` are the averaged weights, including those that only some clients
                have; `kept` is the old mask.
            report: the mean of the clients' reports, weighted by their examples.
            round_: the round, from 1.
        """
        return old_mask(task)

    @abstractmethod
    def _first(
        self,
        task: Task,
        batch: Batch | None,
        source: Source,
    ) -> Tensor:
        """The mask (P,) of the first round."""


def prunable(task: Task) -> Tensor:
    """Which weights may be pruned, (P,) bool: tensors of 2 or more dimensions, no biases, no norms.

    Example:
        >>> task = Task.of(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, 1)))
        >>> prunable(task).tolist()
        [True, True, False]
    """
    mask = torch.zeros_like(task.parameters, dtype=torch.bool)
    for _, start, stop in spans(task):
        mask[start:stop] = True
    return mask


def spans(task: Task) -> tuple[tuple[str, int, int], ...]:
    """(name, start, stop) of every prunable tensor within the flat parameter vector."""
    rows = weight_spans(task)
    if not rows:
        raise ValueError("the model has no weights of 2 or more dimensions; nothing can be pruned")
    return rows


def layer_counts(task: Task, mask: Tensor) -> tuple[LayerCount, ...]:
    """What a mask (P,) keeps of every prunable tensor, in the model's order.

    Example:
        >>> task = Task.of(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, 2)))
        >>> mask = torch.tensor([True, False, True, True, True, True])
        >>> layer_counts(task, mask)
        (LayerCount(name='1.weight', kept=3, total=4),)
    """
    _check_fits(task, mask)
    return tuple(LayerCount(name, int(mask[a:b].sum()), b - a) for name, a, b in spans(task))


def density(task: Task, mask: Tensor) -> float:
    """The fraction of the prunable weights that a mask (P,) keeps."""
    counts = layer_counts(task, mask)
    return sum(c.kept for c in counts) / sum(c.total for c in counts)


def named_masks(task: Task, mask: Tensor) -> dict[str, Tensor]:
    """The mask (P,) as one boolean tensor per prunable weight, by its name in the module.

    The masks fit the module from which the task was made, for instance for torch's own pruning.

    Example:
        >>> from torch.nn.utils import prune
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> mask = torch.arange(10) > 3
        >>> for name, kept in named_masks(Task.of(model), mask).items():
        ...     layer, _, own = name.rpartition(".")
        ...     _ = prune.custom_from_mask(model.get_submodule(layer), own, kept)
        >>> name, int((model[1].weight == 0).sum())
        ('1.weight', 4)
    """
    _check_fits(task, mask)
    named = task.unflatten(mask)
    return {name: named[name].clone() for name, _, _ in spans(task)}


def keep_largest(
    task: Task,
    scores: Tensor,
    rate: float,
    scope: str,
) -> Tensor:
    if scope == "layer":
        return keep_counts(task, scores, [b - a - gone(rate, b - a) for _, a, b in spans(task)])
    among = prunable(task)
    total = int(among.sum())
    return ~among | top(scores, among, total - gone(rate, total))


def keep_counts(
    task: Task,
    scores: Tensor,
    counts: Sequence[int],
) -> Tensor:
    """Keep `counts` of every prunable tensor, by highest scores (P,), and all other weights."""
    mask = torch.ones_like(scores, dtype=torch.bool)
    for (_, start, stop), count in zip(spans(task), counts, strict=True):
        mask[start:stop] = top(scores[start:stop], mask[start:stop], count)
    return mask


def top(
    scores: Tensor,
    among: Tensor,
    count: int,
) -> Tensor:
    """Mask of the `count` highest scores where `among` is True; of equal ones the last."""
    mask = torch.zeros_like(among)
    index = among.nonzero().squeeze(1)
    values = scores[index]
    check.finite("the scores of the weights", values)
    if count > 0:
        least = values.kthvalue(len(values) - count + 1).values
        above = index[values > least]
        equal = index[values == least]
        mask[above] = True
        mask[equal[len(equal) + len(above) - count :]] = True
    return mask


def gone(rate: float, total: int) -> int:
    """floor(rate * total), with 0.29 of 100 as 29, which float rounding makes smaller."""
    return math.floor(rate * total + 1e-9)


def full_gradient(task: Task, batch: Batch) -> Tensor:
    """The gradient (P,) at the pruned weights, including the weights that pruning removed."""
    return client.gradient(replace(task, kept=None), batch.inputs, batch.labels).detach()


def given_batch(scheme: Pruning, batch: Batch | None) -> Batch:
    if batch is None:
        raise ValueError(
            f"batch is None; {type(scheme).__name__} chooses its mask with a batch: give public "
            "data, or one client's"
        )
    return batch


def old_mask(task: Task) -> Tensor:
    if task.kept is None:
        raise ValueError("task is not pruned; give task.pruned(mask), mask from the scheme's start")
    return task.kept


def _check_fits(task: Task, mask: Tensor) -> None:
    if mask.shape != task.parameters.shape or mask.dtype != torch.bool:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} and type {mask.dtype}; this model takes "
            f"({len(task.parameters)},) of torch.bool"
        )


def intact(task: Task, mask: Tensor) -> Tensor:
    """Return the mask; raise a ValueError if it cuts the model: some layer keeps no weight."""
    for layer in layer_counts(task, mask):
        if layer.kept == 0:
            raise ValueError(
                f"the mask keeps none of the {layer.total} weights of {layer.name!r}, so the model "
                'is cut; give a lower rate, scope="layer" if the scheme has it, or use synflow '
                "on a model of ReLUs"
            )
    return mask
