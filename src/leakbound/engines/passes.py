"""Sums over lanes of plain chains of layers: see `chain`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from leakbound.engines import chain
from leakbound.engines.lanes import BYTES, Draws, Lanes, fitting
from leakbound.engines.products import Forward
from leakbound.engines.squares import Power
from leakbound.random import Source
from leakbound.types import Task

_CACHED = 2**24


@dataclass(frozen=True, eq=False)
class Passes:
    """A batch (B, ...) and a plain chain to send it through, some examples at a time.

    Attributes:
        chunk: how many lanes go together; None: as many as a limit of memory allows.
    """

    task: Task
    layers: chain.Layers
    inputs: Tensor
    labels: Tensor
    chunk: int | None
    _last: dict[tuple[int, int], chain.Point] = field(default_factory=dict)

    def point(self, part: slice) -> chain.Point:
        """The chain at some examples; the last one is kept."""
        key = (part.start, part.stop)
        if key not in self._last:
            self._last.clear()
            x, y = self.inputs[part], self.labels[part]
            self._last[key] = chain.Point.at(self.task, self.layers, x, y)
        return self._last[key]

    def step(self, limit: int = BYTES) -> int:
        """How many lanes go together, by the limit in bytes."""
        wide = chain.lane_elements(self.task, self.layers, self.inputs[:1])
        return self.chunk or fitting(wide, self.inputs, limit)

    def over_lanes(
        self, lanes: Lanes, more: Mapping[str, Forward] | None = None
    ) -> tuple[Power, Tensor]:
        """As `lanes.over_lanes`, with what further directions say of Linear inputs, by prefix."""
        parts: list[Power] = []
        gradient, left = torch.zeros_like(self.task.parameters), 0
        for part, ways in lanes.blocks(self.step()):
            point = self.point(part)
            own = {name: told.of(part) for name, told in (more or {}).items()}
            if part.start == left:  # not met before
                gradient, left = gradient + point.gradient(), part.stop
                parts += [point.power_of(own)] if own else []
            for few in ways:
                parts = [reduce(Power.plus, [*parts, point.power(few, own)])]
        return parts[0], gradient / len(self.inputs)

    def forward_only(self, source: Source, directions: int, forward: int) -> dict[str, Forward]:
        """What `forward` directions of every example say of the inputs of plain Linear layers.

        `directions` is how many full ones they will join. A Linear on the image itself needs none:
        its input moves as the image does.
        """
        squares: dict[str, Tensor] = {}
        fourths: dict[str, Tensor] = {}
        size = len(self.inputs)
        for part, ways in Draws(self.inputs, source, forward).blocks(self.step(_CACHED)):
            for few in ways:
                for name, moved in self.point(part).inputs_moved(few).items():
                    if name not in squares:
                        squares[name] = moved.new_zeros(size, moved.shape[-1])
                        fourths[name] = squares[name].clone()
                    square = moved.square()
                    squares[name][part] += square.sum(0)
                    fourths[name][part] += square.square_().sum(0)
        share = directions / (directions + forward)
        found = {
            name: Forward(sums / forward, share, share * sums, share**2 * fourths[name])
            for name, sums in squares.items()
        }
        plain = chain.on_the_image(self.layers)
        if plain in found:
            ones = torch.ones_like(squares[plain])
            found[plain] = Forward(ones, 0.0, directions * ones, 0 * ones)
        return found

    def along(self, ways: Tensor) -> Tensor:
        """The change (k, P) of the batch's gradient along directions (k, B, *S)."""
        total = ways.new_zeros(len(ways), len(self.task.parameters))
        few = self.step()
        for part in self._parts():
            step = max(1, few // (part.stop - part.start))
            for at in range(0, len(ways), step):
                total[at : at + step] += self.point(part).along(ways[at : at + step, part])
        return total / len(self.inputs)

    def gradient(self) -> Tensor:
        """The batch's gradient (P,)."""
        total = torch.zeros_like(self.task.parameters)
        for part in self._parts():
            total += self.point(part).gradient()
        return total / len(self.inputs)

    def _parts(self) -> list[slice]:
        few, size = self.step(), len(self.inputs)
        return [slice(at, min(at + few, size)) for at in range(0, size, few)]
