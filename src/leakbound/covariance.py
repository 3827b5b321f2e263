"""A covariance of diagonal plus low rank, by the square root that colors and whitens with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """A low-rank part over the coordinates [start, stop): orthonormal columns and their gains."""

    start: int
    stop: int
    basis: Tensor
    gain: Tensor


@dataclass(frozen=True, eq=False)
class Structured:
    """The covariance S Sᵀ over P coordinates with S = diag(scale) (I + Σ_blocks Q diag(gain) Qᵀ).

    Shapes:
        scale (P,), above zero; in each block Q (stop - start, k) with orthonormal columns and gain
        (k,) above -1. Blocks do not overlap: one over all coordinates, or one a layer.

    Example:
        >>> shape = Structured.of(torch.ones(3), [(0, 2, torch.tensor([[1.0], [1.0]]))])
        >>> shape.dense()
        tensor([[2., 1., 0.],
                [1., 2., 0.],
                [0., 0., 1.]])
    """

    scale: Tensor
    blocks: tuple[Block, ...] = ()

    @staticmethod
    def of(diagonal: Tensor, factors: list[tuple[int, int, Tensor]] | None = None) -> Structured:
        """diag(diagonal) plus U Uᵀ for each (start, stop, U); U is (stop - start, k).

        Raises:
            ValueError: an entry of the diagonal that is not above zero and finite.
        """
        if not bool(((diagonal > 0) & diagonal.isfinite()).all()):
            raise ValueError(
                f"diagonal holds {float(diagonal.min())}; a covariance that whitens needs every "
                "entry finite and above zero"
            )
        scale = diagonal.sqrt()
        blocks = []
        for start, stop, factor in factors or []:
            basis, size, _ = torch.linalg.svd(factor / scale[start:stop, None], full_matrices=False)
            kept = size > 1e-12 * size.max().clamp_min(1e-300)
            gain = (1 + size[kept].square()).sqrt() - 1
            blocks.append(Block(start, stop, basis[:, kept].contiguous(), gain))
        return Structured(scale, tuple(blocks))

    def color(self, rows: Tensor) -> Tensor:
        """S z for rows z (R, P): white noise becomes noise of this covariance."""
        return self._mix(rows, invert=False) * self.scale.to(rows)

    def whiten(self, rows: Tensor) -> Tensor:
        """S⁻¹ y for rows y (R, P): noise of this covariance becomes white."""
        return self._mix(rows / self.scale.to(rows), invert=True)

    def _mix(self, rows: Tensor, *, invert: bool) -> Tensor:
        parts, at = [], 0
        for block in self.blocks:
            part = rows[:, block.start : block.stop]
            gain, basis = block.gain.to(rows), block.basis.to(rows)
            gain = -gain / (1 + gain) if invert else gain
            parts += [rows[:, at : block.start], part + ((part @ basis) * gain) @ basis.T]
            at = block.stop
        return torch.cat([*parts, rows[:, at:]], 1) if parts else rows

    @property
    def diagonal(self) -> Tensor:
        """(P,) the variance of every coordinate."""
        inner = torch.ones_like(self.scale)
        for block in self.blocks:
            extra = (1 + block.gain).square() - 1
            inner[block.start : block.stop] += block.basis.square() @ extra
        return self.scale.square() * inner

    def dense(self) -> Tensor:
        """The whole matrix (P, P), for tests and small models."""
        root = self.color(torch.eye(len(self.scale)).to(self.scale)).T
        return root @ root.T

    def to(self, like: Tensor) -> Structured:
        """On the device and in the type of another tensor."""
        blocks = (replace(b, basis=b.basis.to(like), gain=b.gain.to(like)) for b in self.blocks)
        return Structured(self.scale.to(like), tuple(blocks))

    def __mul__(self, factor: float) -> Structured:
        """The covariance times a number above zero."""
        if not factor > 0:
            raise ValueError(f"factor is {factor}; a covariance can be scaled by what is above 0")
        return replace(self, scale=self.scale * factor**0.5)
