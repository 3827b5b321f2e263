"""Points of a gradient's row space whose parts come from given lists, found part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from leakbound.attacks.table.view import Block

LEAST = 1e-5
MOST = 0.05
MARGIN = 6.0
"""Relative distance from a row space: up to LEAST counts as inside, above MOST as outside, and
between them MARGIN standard deviations of the noise."""
GAP = 1.5
CHUNK = 1 << 18
FIRST = 3


class Crowded(Exception):
    """More prefixes survive than the search may keep."""


@dataclass(frozen=True, eq=False)
class Plane:
    """The row space of left @ scaled, (units, r) with orthonormal columns and (r, d).

    An entry of the gradient has noise of standard deviation `noise`, and singular values up to
    `floor` are noise. Points x meet the constraints x @ null = 0 and equal (x @ back) @ scaled.
    """

    left: Tensor
    scaled: Tensor
    noise: float
    floor: float
    null: Tensor
    back: Tensor

    @staticmethod
    def of(left: Tensor, scaled: Tensor, noise: float, floor: float) -> Plane:
        u, s, v = torch.linalg.svd(scaled, full_matrices=True)
        rank = int((s > floor).sum())
        back = v[:rank].T / s[:rank] @ u[:, :rank].T
        return Plane(left, scaled, noise, floor, v[rank:].T, back)

    def on(self, places: Tensor) -> Plane:
        """The projection onto some coordinates."""
        return Plane.of(self.left, self.scaled[:, places], self.noise, self.floor)

    @property
    def rank(self) -> int:
        return len(self.scaled)

    @property
    def determined(self) -> bool:
        """Whether each point is only one combination of the rows of `scaled`."""
        return self.scaled.shape[1] - self.null.shape[1] == self.rank

    def allowed(self, weights: Tensor) -> Tensor:
        """The distance that a point may have, both relative to its norm, as are its `weights`."""
        spread: Tensor = MARGIN * self.noise * self.null.shape[1] ** 0.5 * weights
        return spread.clamp(LEAST, MOST)

    def far(self, sums: Tensor) -> Tensor:
        """(N,) distance of points x over the allowed one, from their rows x @ null, x @ back and
        squared norm.
        """
        null = self.null.shape[1]
        size = sums[:, -1].sqrt().clamp_min(1e-300)
        allowed = self.allowed(sums[:, null:-1].norm(dim=1) / size)
        return cast(Tensor, sums[:, :null].norm(dim=1) / size / allowed)

    def outside(self, points: Tensor) -> Tensor:
        """(N,) distance of points (N, d) over the allowed one."""
        parts = points @ self.null, points @ self.back, points.square().sum(1, keepdim=True)
        return self.far(torch.cat(parts, 1))


def plane(gradient: Tensor, count: int, noise: float, rounding: float) -> Plane:
    """The row space of a gradient (units, d) of at most `count` examples.

    A singular value counts if it exceeds those of the known noise, or of rounding. If more than
    `count` do, the noise is larger than known, and only those count that stand out.
    """
    units, width = gradient.shape
    u, s, v = torch.linalg.svd(gradient, full_matrices=False)
    size = units**0.5 + width**0.5
    rank = int((s > max(rounding * float(s[0]), noise * size)).sum())
    if rank > count:
        rank = int((s[:count] > GAP * s[count]).sum())
    rest = (units - rank) * (width - rank)
    left_over = float(s[rank:].square().sum() / rest) ** 0.5 if rest else 0.0
    noise = max(noise, left_over, 1e-17 * float(s[0]))
    floor = max(noise * size, 1e-14 * float(s[0]))
    return Plane.of(u[:, :rank], s[:rank, None] * v[:rank], noise, floor)


def decode(found: Plane, blocks: Sequence[Block], cap: int) -> Tensor:
    """Options (K, len(blocks)) whose values lie in the plane, on the coordinates of all blocks.

    Blocks are added one by one. Prefixes outside the plane's projection are dropped.

    Raises:
        Crowded: more than `cap` prefixes survive.
    """
    prefixes = torch.zeros(1, 0, dtype=torch.int32)
    for count in range(1, len(blocks) + 1):
        test = _Test.of(found, blocks[:count])
        kept = []
        total = 0
        for chunk in torch.split(prefixes, max(1, CHUNK // len(blocks[count - 1].seen))):
            kept.append(test.longer(chunk))
            total += len(kept[-1])
            if total > cap:
                raise Crowded
        prefixes = torch.cat(kept)
    return prefixes


@dataclass(frozen=True, eq=False)
class _Test:
    """Whether prefixes lie in a plane. A row of `adds` is what an option adds to `Plane.far`; those
    of a block start at `starts`.
    """

    plane: Plane
    adds: Tensor
    starts: Tensor

    @staticmethod
    def of(whole: Plane, blocks: Sequence[Block]) -> _Test:
        own = whole.on(torch.cat([block.places for block in blocks]))
        wide = torch.cat([own.null, own.back], 1)
        adds = []
        start = 0
        for seen in (block.seen for block in blocks):
            part = wide[start : (start := start + seen.shape[1])]
            adds.append(torch.cat([seen @ part, seen.square().sum(1, keepdim=True)], 1))
        counts = torch.tensor([len(add) for add in adds], dtype=torch.int32)
        return _Test(own, torch.cat(adds), (counts.cumsum(0) - counts).int())

    def longer(self, prefixes: Tensor) -> Tensor:
        """Prefixes (K, k + 1) in the plane, made of prefixes (N, k) and one option more."""
        null = self.plane.null.shape[1]
        first = [*range(min(null, FIRST)), -1]
        few = self._sums(prefixes, first)[:, None] + self.adds[self.starts[-1] :, first]
        inside = torch.ones(few.shape[:2], dtype=torch.bool)
        if null:
            sizes = few[..., -1].sqrt().clamp_min(1e-300)
            norms = self.adds[:, null:-1].norm(dim=1)
            most = sum(part.max() for part in torch.tensor_split(norms, self.starts[1:].long()))
            inside = few[..., :-1].norm(dim=2) <= self.plane.allowed(most / sizes) * sizes
        old, new = inside.nonzero(as_tuple=True)
        found = torch.cat([prefixes[old], new[:, None].int()], 1)
        if null and len(found):
            found = found[self.plane.far(self._sums(found, [*range(self.adds.shape[1])])) <= 1]
        return found

    def _sums(self, prefixes: Tensor, columns: list[int]) -> Tensor:
        """(N, len(columns)) what the options of prefixes (N, k) add together."""
        if not prefixes.shape[1]:
            return torch.zeros(len(prefixes), len(columns), dtype=torch.float64)
        at = prefixes + self.starts[: prefixes.shape[1]]
        adds = self.adds[:, columns].contiguous()
        return torch.nn.functional.embedding_bag(at, adds, mode="sum")
