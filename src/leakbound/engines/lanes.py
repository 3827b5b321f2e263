"""Sums over lanes: one lane is one example with one direction to move it along.

A round of lanes goes through the taps where the model allows it, else through `torch.func` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from leakbound import client
from leakbound.engines import taps
from leakbound.engines.squares import Power, of_lanes
from leakbound.random import Source, normal
from leakbound.types import Task

BYTES = 2**26

Rounds = Iterator[tuple[Tensor, Tensor]]
"""Lanes that go together: the examples' places (n,) and the directions (n, *S)."""

Blocks = Iterator[tuple[slice, Iterator[Tensor]]]
"""Examples that go together, and their directions (k, n, *S), a few at a time."""


class Lanes(Protocol):
    """Which lanes there are, in two orders: flat, and with each example's directions together."""

    @property
    def leading(self) -> bool:
        """Whether the first lanes of the flat order are the batch in order."""

    def rounds(self, step: int) -> Rounds:
        """At most `step` lanes at once."""

    def blocks(self, step: int) -> Blocks:
        """At most `step` lanes at once; every example comes with its first block."""


@dataclass(frozen=True, eq=False)
class Draws:
    """One Gaussian direction for each example and repetition."""

    inputs: Tensor
    source: Source
    repetitions: int
    leading: bool = True

    def rounds(self, step: int) -> Rounds:
        """See `Lanes`."""
        size = len(self.inputs)
        places = torch.arange(size, device=self.inputs.device)
        for drawn in self._drawn(max(1, step // size)):
            which, ways = places.repeat(len(drawn)), drawn.flatten(0, 1)
            for at in range(0, len(which), step):
                yield which[at : at + step], ways[at : at + step]

    def blocks(self, step: int) -> Blocks:
        """See `Lanes`; directions are drawn for the whole batch, as many as stay small."""
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
class Pixels:
    """Every entry of every example by itself."""

    inputs: Tensor
    leading: bool = False

    def rounds(self, step: int) -> Rounds:
        """See `Lanes`."""
        each = self.inputs[0].numel()
        for start in range(0, self.inputs.numel(), step):
            stop = min(start + step, self.inputs.numel())
            part = torch.arange(start, stop, device=self.inputs.device)
            yield part // each, self._ways(part % each)

    def blocks(self, step: int) -> Blocks:
        """See `Lanes`."""
        pixels = torch.arange(self.inputs[0].numel(), device=self.inputs.device)
        for at in range(len(self.inputs)):
            yield (
                slice(at, at + 1),
                (self._ways(part)[:, None] for part in torch.split(pixels, step)),
            )

    def _ways(self, pixels: Tensor) -> Tensor:
        shape = self.inputs.shape[1:]
        ways = self.inputs.new_zeros(len(pixels), shape.numel())
        return ways.scatter_(1, pixels[:, None], 1.0).view(-1, *shape)


def over_lanes(
    task: Task, inputs: Tensor, labels: Tensor, lanes: Lanes, *, chunk: int | None
) -> tuple[Power, Tensor]:
    """The sums over all lanes of the squared changes of each example's own gradient, (P,) each.

    With them the batch's gradient (P,), which is nearly free on the way.
    """
    found, size = taps.plan(task, inputs, labels), len(inputs)
    wide = found.lane_elements if found else generic_elements(task, inputs)
    sums: Power | None = None
    gradient: Tensor | None = None
    left, covered = size if lanes.leading else 0, lanes.leading
    for places, tangents in lanes.rounds(chunk or fitting(wide, inputs)):
        x, y, fresh = inputs[places], labels[places], min(left, len(places))
        fast = taps.powers(task, found, x, y, tangents, fresh) if found else None
        if fast:
            part, first = fast
            if first is not None:
                gradient = first / size if gradient is None else gradient + first / size
        else:
            part, covered = of_lanes(changes(task, x, y, tangents)), covered and not fresh
        sums, left = part if sums is None else sums.plus(part), left - fresh
    if gradient is None or not covered:
        gradient = client.gradient(task, inputs, labels).detach()
    assert sums is not None  # a batch holds at least one example
    return sums, gradient


def changes(task: Task, inputs: Tensor, labels: Tensor, tangents: Tensor) -> Tensor:
    """Change (N, P) of every example's own gradient along its own direction (N, *S).

    The generic path: works for whatever `torch.func` can differentiate.
    """

    def lane(image: Tensor, label: Tensor, tangent: Tensor) -> Tensor:
        def own(x: Tensor) -> Tensor:
            def loss(flat: Tensor) -> Tensor:
                return task.loss(client.forward(task, x[None], flat), label[None])

            found: Tensor = grad(loss)(task.parameters)
            return found

        moved: Tensor = jvp(own, (image,), (tangent,))[1]
        return moved

    each: Tensor = vmap(lane)(inputs, labels, tangents)
    return each.detach()


def generic_elements(task: Task, inputs: Tensor) -> int:
    """About how many numbers one lane of the generic path needs."""
    return 4 * len(task.parameters) + 64 * inputs[0].numel()


def fitting(elements: int, like: Tensor, limit: int = BYTES) -> int:
    """How many lanes of so many numbers fit the limit in bytes; at least 1."""
    return max(1, limit // (elements * like.element_size()))
