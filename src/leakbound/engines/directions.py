"""Pairs of an example and a direction along which it moves, in groups that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from leakbound.randomness import Source, normal

BYTES = 2**26
TOGETHER = 32
"""Up to this many rows, small kernels take as long for several directions as for one."""


@dataclass(frozen=True, eq=False)
class RandomDirections:
    """One Gaussian direction per example and repetition."""

    inputs: Tensor
    source: Source
    repetitions: int

    def blocks(self, step: int) -> Iterator[tuple[slice, Tensor]]:
        """Some examples and their directions (k, n, *S), at most `step` pairs.

        Examples come in order, and those of equal slices one after another.
        """
        size = len(self.inputs)
        few = min(step, size)
        copies = copied(step, few)
        # drawn for the whole batch, as many as stay small
        together = max(fitting(self.inputs.numel(), self.inputs, BYTES // 8), step // few)
        for start in range(0, self.repetitions, together):
            count = min(together, self.repetitions - start)
            # Each draw covers the whole batch, so directions do not depend on the memory limit.
            each = [normal(self.inputs.shape, self.source, like=self.inputs) for _ in range(count)]
            drawn = torch.stack(each)
            for at in range(0, size, few):
                part = slice(at, min(at + few, size))
                for directions in torch.split(drawn[:, part], copies):
                    yield part, directions


@dataclass(frozen=True, eq=False)
class UnitDirections:
    """Each input value of each example by itself."""

    inputs: Tensor

    def blocks(self, step: int) -> Iterator[tuple[slice, Tensor]]:
        """As `RandomDirections.blocks`."""
        shape = self.inputs.shape[1:]
        entries = torch.arange(shape.numel(), device=self.inputs.device)
        for at in range(len(self.inputs)):
            for part in torch.split(entries, step):
                units = self.inputs.new_zeros(len(part), shape.numel())
                units.scatter_(1, part[:, None], 1.0)
                yield slice(at, at + 1), units.view(-1, 1, *shape)


Directions = RandomDirections | UnitDirections
"""Pairs of an example and a direction, grouped by example."""


def copied(step: int, examples: int) -> int:
    """How many directions of each example pass at once, if `step` pairs fit in memory."""
    return max(1, min(step, TOGETHER) // examples)


def fitting(
    elements: int,
    like: Tensor,
    limit: int = BYTES,
) -> int:
    """How many pairs of `elements` numbers fit the limit in bytes; at least 1."""
    return max(1, limit // (elements * like.element_size()))
