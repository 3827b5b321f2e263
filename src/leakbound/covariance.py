"""Structured covariances, stored as the square root that colors and whitens with them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LowRank:
    """Root I + Q diag(gain) Qᵀ over [start, stop); Q's k columns are orthonormal, gain above -1."""

    start: int
    stop: int
    basis: Tensor
    gain: Tensor

    def color(self, rows: Tensor) -> Tensor:
        return self._apply(rows, self.gain)

    def whiten(self, rows: Tensor) -> Tensor:
        return self._apply(rows, -self.gain / (1 + self.gain))

    def _apply(self, rows: Tensor, gain: Tensor) -> Tensor:
        basis = self.basis.to(rows)
        return rows + ((rows @ basis) * gain.to(rows)) @ basis.T

    @property
    def diagonal(self) -> Tensor:
        return 1 + self.basis.square() @ ((1 + self.gain).square() - 1)

    def to(self, like: Tensor) -> LowRank:
        return replace(
            self,
            basis=self.basis.to(like),
            gain=self.gain.to(like),
        )


@dataclass(frozen=True, eq=False)
class Kronecker:
    """A matrix of coordinates (a, b), row by row, with correlated rows and columns.

    The root is left ⊗ right, both symmetric and positive definite; a vector is a diagonal.
    """

    start: int
    stop: int
    left: Tensor
    right: Tensor
    left_inverse: Tensor
    right_inverse: Tensor

    def color(self, rows: Tensor) -> Tensor:
        return self._apply(rows, self.left, self.right)

    def whiten(self, rows: Tensor) -> Tensor:
        return self._apply(rows, self.left_inverse, self.right_inverse)

    def _apply(
        self,
        rows: Tensor,
        left: Tensor,
        right: Tensor,
    ) -> Tensor:
        left = left.to(rows)
        right = right.to(rows)
        matrices = rows.reshape(len(rows), len(left), len(right))
        matrices = left[:, None] * matrices if left.ndim == 1 else left @ matrices
        matrices = matrices * right if right.ndim == 1 else matrices @ right
        return matrices.reshape(rows.shape)

    @property
    def diagonal(self) -> Tensor:
        sides = (s.square() if s.ndim == 1 else s.square().sum(1) for s in (self.left, self.right))
        return torch.outer(*sides).flatten()

    def to(self, like: Tensor) -> Kronecker:
        names = ("left", "right", "left_inverse", "right_inverse")
        return replace(self, **{name: getattr(self, name).to(like) for name in names})

    @staticmethod
    def of(
        start: int,
        left: Tensor,
        right: Tensor,
    ) -> Kronecker:
        """The block whose covariance is left ⊗ right, at `start`; a vector is a diagonal."""
        roots = []
        for factor in (left, right):
            plain = factor.ndim == 1
            size, basis = (factor.double(), None) if plain else torch.linalg.eigh(factor.double())
            if not (size > 0).all():
                raise ValueError(
                    f"factor has the eigenvalue {float(size.min())}; give one that is positive "
                    "definite"
                )
            powers = [size**0.5, size**-0.5]
            roots += powers if basis is None else [(basis * p) @ basis.T for p in powers]
        a, a_inverse, b, b_inverse = (root.to(left) for root in roots)
        return Kronecker(start, start + len(left) * len(right), a, b, a_inverse, b_inverse)


@dataclass(frozen=True, eq=False)
class Structured:
    """The covariance S Sᵀ over P coordinates with S = diag(scale) · (root of every block).

    `scale` (P,) is above zero. Blocks do not overlap and are in order: one over all coordinates, or
    one per layer. Outside of blocks the root is the identity.
    """

    scale: Tensor
    blocks: tuple[LowRank | Kronecker, ...] = ()

    @staticmethod
    def of(
        diagonal: Tensor,
        factors: list[tuple[int, int, Tensor]] | None = None,
    ) -> Structured:
        """diag(diagonal) plus U Uᵀ for each (start, stop, U); U is (stop - start, k)."""
        if not ((diagonal > 0) & diagonal.isfinite()).all():
            raise ValueError(
                f"diagonal holds {float(diagonal.min())}; a covariance that whitens needs every "
                "entry finite and above zero"
            )
        scale = diagonal.sqrt()
        blocks = []
        for start, stop, factor in factors or []:
            basis, size, _ = torch.linalg.svd(factor / scale[start:stop, None], full_matrices=False)
            kept = size > 1e-12 * size[:1]  # they are sorted, and there may be none
            gain = (1 + size[kept].square()).sqrt() - 1
            blocks.append(LowRank(start, stop, basis[:, kept].contiguous(), gain))
        return Structured(scale, tuple(blocks))

    def color(self, rows: Tensor) -> Tensor:
        """S z for rows z (R, P): white noise becomes noise of this covariance."""
        return self._mix(rows, whiten=False) * self.scale.to(rows)

    def whiten(self, rows: Tensor) -> Tensor:
        """S⁻¹ y for rows y (R, P): noise of this covariance becomes white."""
        return self._mix(rows / self.scale.to(rows), whiten=True)

    def _mix(self, rows: Tensor, *, whiten: bool) -> Tensor:
        parts = []
        at = 0
        for block in self.blocks:
            part = rows[:, block.start : block.stop]
            mixed = block.whiten(part) if whiten else block.color(part)
            parts += [rows[:, at : block.start], mixed]
            at = block.stop
        return torch.cat([*parts, rows[:, at:]], 1) if parts else rows

    @property
    def diagonal(self) -> Tensor:
        """(P,) the variance of every coordinate."""
        inner = torch.ones_like(self.scale)
        for block in self.blocks:
            inner[block.start : block.stop] = block.diagonal.to(inner)
        return self.scale.square() * inner

    def dense(self) -> Tensor:
        """The whole matrix (P, P), for tests and small models."""
        root = self.color(torch.eye(len(self.scale)).to(self.scale)).T
        return root @ root.T

    def to(self, like: Tensor) -> Structured:
        """On the device and in the type of another tensor."""
        return Structured(self.scale.to(like), tuple(block.to(like) for block in self.blocks))

    def equals(self, other: Structured) -> bool:
        """Whether both have the same scale and blocks, by value."""
        if len(self.blocks) != len(other.blocks) or not _same(self.scale, other.scale):
            return False
        return all(
            type(a) is type(b)
            and all(_same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
            for a, b in zip(self.blocks, other.blocks, strict=True)
        )

    def __mul__(self, factor: float) -> Structured:
        """The covariance times a number above zero."""
        if not factor > 0:
            raise ValueError(f"factor is {factor}; give a number above 0")
        return replace(self, scale=self.scale * factor**0.5)


def _same(a: Tensor | int, b: Tensor | int) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.dtype == b.dtype and a.device == b.device
        return a is b or (same and torch.equal(a, b))
    return bool(a == b)
