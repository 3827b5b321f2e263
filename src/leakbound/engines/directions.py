"""Pairs of an example and a direction along which it moves, in groups that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from leakbound.randomness import Source, normal

BYTES = 2**26


@dataclass(frozen=True, eq=False)
class RandomDirections:
    """One Gaussian direction per example and repetition.

    `leading`: the first pairs of `rounds` are the batch in order.
    """

    inputs: Tensor
    source: Source
    repetitions: int
    leading = True

    def rounds(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """At most `step` pairs at once: the examples' indices (n,) and the directions (n, *S)."""
        size = len(self.inputs)
        places = torch.arange(size, device=self.inputs.device)
        for drawn in self._drawn(max(1, step // size)):
            which = places.repeat(len(drawn))
            directions = drawn.flatten(0, 1)
            for at in range(0, len(which), step):
                yield which[at : at + step], directions[at : at + step]

    def blocks(self, step: int) -> Iterator[tuple[slice, Iterator[Tensor]]]:
        """Groups of examples, and their directions (k, n, *S), at most `step` pairs at once.

        Every example comes with its first block.
        """
        # drawn for the whole batch, as many as stay small
        size = len(self.inputs)
        few = min(step, size)
        together = max(fitting(self.inputs.numel(), self.inputs, BYTES // 8), step // few)
        for drawn in self._drawn(together):
            for start in range(0, size, few):
                part = slice(start, min(start + few, size))
                yield part, iter(torch.split(drawn[:, part], max(1, step // few)))

    def _drawn(self, together: int) -> Iterator[Tensor]:
        for start in range(0, self.repetitions, together):
            count = min(together, self.repetitions - start)
            each = [normal(self.inputs.shape, self.source, like=self.inputs) for _ in range(count)]
            yield torch.stack(each)


@dataclass(frozen=True, eq=False)
class UnitDirections:
    """Each input value of each example by itself."""

    inputs: Tensor
    leading = False

    def rounds(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        each = self.inputs[0].numel()
        for start in range(0, self.inputs.numel(), step):
            stop = min(start + step, self.inputs.numel())
            part = torch.arange(start, stop, device=self.inputs.device)
            yield part // each, self._units(part % each)

    def blocks(self, step: int) -> Iterator[tuple[slice, Iterator[Tensor]]]:
        entries = torch.arange(self.inputs[0].numel(), device=self.inputs.device)
        for at in range(len(self.inputs)):
            each = (self._units(part)[:, None] for part in torch.split(entries, step))
            yield slice(at, at + 1), each

    def _units(self, entries: Tensor) -> Tensor:
        shape = self.inputs.shape[1:]
        units = self.inputs.new_zeros(len(entries), shape.numel())
        return units.scatter_(1, entries[:, None], 1.0).view(-1, *shape)


Directions = RandomDirections | UnitDirections
"""Pairs of an example and a direction, in two orders: flat, and grouped by example."""


def fitting(elements: int, like: Tensor, limit: int = BYTES) -> int:
    """How many pairs of `elements` numbers fit the limit in bytes; at least 1."""
    return max(1, limit // (elements * like.element_size()))
