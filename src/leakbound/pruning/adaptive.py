"""Schemes that change the mask during training: PruneFL and FedDST."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leakbound import check
from leakbound.core import Batch, Task
from leakbound.pruning.base import (
    Pruning,
    full_gradient,
    gone,
    intact,
    keep_counts,
    keep_largest,
    old_mask,
    prunable,
    spans,
    top,
)
from leakbound.randomness import Source, uniform

RULES = ("rate", "time")


@dataclass(frozen=True)
class PruneFL(Pruning):
    """Remove small weights and restore those with large gradients, at intervals of rounds.

    The smallest weights in use of every layer compete with all that are out by g²/t: the mean
    squared gradient over the weight's time. It starts with the largest weights of every layer,
    without the paper's prior training of one client.

    Leakage: in an adjusting round a client reports its squared gradient of ALL weights, pruned ones
    too. That releases |g| exactly, in addition to the update. A protection of the update must cover
    the report as well.

    Args:
        rate: the fraction to prune; see `rule`.
        every: adjust in every round that is a multiple of this.
        candidates: the fraction of each layer's weights that may be removed in one adjustment.
        half_life: `candidates` halves in this many rounds (the paper's text: 10000); None: it
            stays, as in the authors' code.
        rule: "rate" always keeps 1 - rate of all weights. "time" is the paper's: it keeps what
            raises the sum of g² per second of a round, so the rate holds only at the start.
        times: seconds per round that one weight of each prunable tensor costs, in the model's
            order; None: 5.56e-6 each, the paper's time to send one. Its Conv-2 for FEMNIST, with 5
            local steps: (5.56e-6, 4.106e-5, 6.525e-6, 6.45e-6).
        constant: seconds per round that pruning cannot save (rule "time").

    Source: Jiang et al. 2022, PruneFL, algorithm 2.

    Example:
        >>> PruneFL(rate=0.5, every=10).adjusts(20), PruneFL().adjusts(20)
        (True, False)
    """

    adapts = True

    every: int = 50
    candidates: float = 0.3
    half_life: int | None = None
    rule: str = "rate"
    times: tuple[float, ...] | None = None
    constant: float = 6.245

    def __post_init__(self) -> None:
        super().__post_init__()
        check.count(every=self.every)
        check.fraction(candidates=self.candidates)
        check.one_of(RULES, rule=self.rule)
        check.positive(constant=self.constant)
        if self.half_life is not None:
            check.count(half_life=self.half_life)
        for time in self.times or ():
            check.positive(times=time)

    def adjusts(self, round_: int) -> bool:
        check.count(round_=round_)
        return round_ % self.every == 0

    def report(
        self,
        task: Task,
        batch: Batch,
        round_: int,
    ) -> Tensor | None:
        """The squared gradient (P,) of all weights at the round's start, in adjusting rounds."""
        return full_gradient(task, batch).square() if self.adjusts(round_) else None

    def added_bytes(
        self,
        task: Task,
        round_: int,
    ) -> int:
        numbers = len(task.parameters) if self.adjusts(round_) else 0
        return numbers * task.parameters.element_size()

    def server_mask(
        self,
        task: Task,
        report: Tensor | None,
        round_: int,
    ) -> Tensor:
        if not self.adjusts(round_):
            return old_mask(task)
        shape = None if report is None else tuple(report.shape)
        if report is None or report.shape != task.parameters.shape:
            raise ValueError(
                f"report has shape {shape}; PruneFL takes the mean of the clients' reports, "
                f"({len(task.parameters)},)"
            )
        check.finite("report", report)
        stay = self._stay(task, round_)
        times = self._times(task)
        wide = report.double()
        if self.rule == "time":
            return intact(task, worth_their_time(wide, times, stay, self.constant))
        total = int(prunable(task).sum())
        back = total - gone(self.rate, total) - int((stay & prunable(task)).sum())
        if back < 0:
            raise ValueError(
                f"task keeps more weights than rate {self.rate} allows; use the mask of "
                "a scheme with the same rate"
            )
        return intact(task, stay | top(wide / times, ~stay, back))

    def _first(
        self,
        task: Task,
        batch: Batch | None,
        source: Source,
    ) -> Tensor:
        return keep_largest(task, task.parameters.abs(), self.rate, "layer")

    def _stay(
        self,
        task: Task,
        round_: int,
    ) -> Tensor:
        """The old mask without each layer's smallest weights, which compete."""
        mask = old_mask(task) | ~prunable(task)
        part = self.candidates
        if self.half_life is not None:
            part *= 0.5 ** (round_ / self.half_life)
        for _, start, stop in spans(task):
            used = mask[start:stop].clone()
            count = int(used.sum())
            sizes = task.parameters[start:stop].abs()
            mask[start:stop] = top(sizes, used, count - gone(part, count))
        return mask

    def _times(self, task: Task) -> Tensor:
        """Seconds (P,) of every weight; 0 for those that are not prunable."""
        rows = spans(task)
        each = (5.56e-6,) * len(rows) if self.times is None else self.times
        if len(each) != len(rows):
            raise ValueError(
                f"times has {len(each)} entries; this model has {len(rows)} prunable tensors: "
                + ", ".join(name for name, _, _ in rows)
            )
        seconds = torch.zeros_like(task.parameters, dtype=torch.float64)
        for (_, start, stop), time in zip(rows, each, strict=True):
            seconds[start:stop] = time
        return seconds


def worth_their_time(
    gains: Tensor,
    times: Tensor,
    stay: Tensor,
    constant: float,
) -> Tensor:
    """The mask with the most gain per second: all of `stay`, and others that raise the ratio.

    In the order of gain per time, each weight is added while its own ratio is above that of all
    before it, Σ gains / (constant + Σ times); times (P,), float64, are above 0 outside `stay`.
    """
    rest = (~stay).nonzero().squeeze(1)
    ratio = gains[rest] / times[rest]
    order = ratio.argsort(descending=True, stable=True)
    gain = gains[stay].sum() + gains[rest][order].cumsum(0) - gains[rest][order]
    time = constant + times[stay].sum() + times[rest][order].cumsum(0) - times[rest][order]
    better = gains[rest][order] * time > gain * times[rest][order]
    count = int(better.sum())  # once False it stays False: later ratios are lower
    mask = stay.clone()
    mask[rest[order[:count]]] = True
    return mask


@dataclass(frozen=True)
class FedDST(Pruning):
    """Move some weights of every client to where its gradient is large; the server averages.

    Each layer keeps the number of weights from the Erdős-Rényi-kernel rule. In an adjusting round a
    client drops the part a_r = (alpha / 2) (1 + cos(pi r / end)) of each layer's smallest weights.
    It adds as many of the weights that are then out, those with the largest gradient at the weights
    that it received. The server keeps each layer's largest averaged weights.

    Leakage: a client's mask, which is visible in its message, shows where its gradient is large.

    Args:
        rate: the fraction to prune, over all layers.
        every: adjust in every round that is a multiple of this.
        alpha: the approximate part of a layer that moves in the first rounds.
        end: from this round on the mask stays (the authors: half of all rounds).

    Assumptions: the gradient is taken before the local training (the authors: near its end).

    Source: Bibikar et al. 2022, FedDST; layers as Evci et al. 2020, RigL.

    Example:
        >>> [FedDST(end=30).adjusts(r) for r in (5, 10, 20, 30, 40)]
        [False, True, True, False, False]
    """

    adapts = True

    every: int = 10
    alpha: float = 0.5
    end: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check.count(every=self.every, end=self.end)
        check.fraction(alpha=self.alpha)

    def adjusts(self, round_: int) -> bool:
        check.count(round_=round_)
        return round_ % self.every == 0 and round_ < self.end

    def client_mask(
        self,
        task: Task,
        batch: Batch,
        round_: int,
    ) -> Tensor | None:
        mask = old_mask(task).clone()
        if not self.adjusts(round_):
            return None
        part = self.alpha / 2 * (1 + math.cos(math.pi * round_ / self.end))
        slopes = full_gradient(task, batch).abs()
        check.finite("the client's gradient", slopes)
        for _, start, stop in spans(task):
            used = mask[start:stop].clone()
            moved = gone(part, int(used.sum()))
            stays = top(task.parameters[start:stop].abs(), used, int(used.sum()) - moved)
            mask[start:stop] = stays | top(slopes[start:stop], ~stays, moved)
        return mask

    def added_bytes(
        self,
        task: Task,
        round_: int,
    ) -> int:
        bits = int(prunable(task).sum()) if self.adjusts(round_) else 0
        return math.ceil(bits / 8)

    def server_mask(
        self,
        task: Task,
        report: Tensor | None,
        round_: int,
    ) -> Tensor:
        old = old_mask(task)
        if not self.adjusts(round_):
            return old
        return intact(task, keep_counts(task, task.parameters.abs(), erk(task, self.rate)))

    def _first(
        self,
        task: Task,
        batch: Batch | None,
        source: Source,
    ) -> Tensor:
        like = torch.zeros((), dtype=torch.float64, device=task.parameters.device)
        scores = uniform(task.parameters.shape, source, like=like)
        return keep_counts(task, scores, erk(task, self.rate))


def erk(task: Task, rate: float) -> tuple[int, ...]:
    """How many weights of every prunable tensor the Erdős-Rényi-kernel rule keeps.

    A layer of shape (o, i, k, l) gets a number in proportion to o + i + k + l, at most its size;
    the excess of a full layer goes to the others. Exactly n - floor(rate * n) of n are kept.
    """
    shapes = {name: shape for name, shape, _, _ in task.layout}
    sizes = [stop - start for _, start, stop in spans(task)]
    sums = [sum(shapes[name]) for name, _, _ in spans(task)]
    left = sum(sizes) - gone(rate, sum(sizes))
    counts = list(sizes)
    free = set(range(len(sizes)))
    while True:
        scale = left / sum(sums[i] for i in free) if free else 0.0
        full = {i for i in free if scale * sums[i] >= sizes[i]}
        if not full:
            break
        free -= full
        left -= sum(sizes[i] for i in full)
    for i in free:
        counts[i] = math.floor(scale * sums[i])
    short = left - sum(counts[i] for i in free)
    by_part = sorted(free, key=lambda i: (counts[i] - scale * sums[i], i))
    for i in by_part[:short]:
        counts[i] += 1
    return tuple(counts)
