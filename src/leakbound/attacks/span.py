"""The span of a layer's gradient, and how far a candidate for the layer's input is from it.

The gradient of a linear layer is a sum of outer products, one for each token, patch or example that
the layer got. So its rows span the layer's inputs. Attacks on tokens, on low-rank adapters and on
rows of a table each test candidates of their own against such a span.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import scipy
import torch
from torch import Tensor

from leakbound.core import Laplace, Observation


@dataclass(frozen=True)
class Tolerance:
    """How far a point may be from a span that it lies in, relative to its norm.

    Attributes:
        least: what rounding allows.
        most: above it a point lies outside, whatever the noise.
        deviations: how many standard deviations of the noise a point may be away, by the number of
            directions outside of the span.
    """

    least: float
    most: float
    deviations: Callable[[int], float]


EXACT = Tolerance(0.0, 1.0, lambda free: 0.0)


@dataclass(frozen=True, eq=False)
class Span:
    """The row space of a gradient (units, d), as far as its singular values stand out.

    Attributes:
        left: (units, k) orthonormal columns; left @ scaled is the gradient without its noise.
        sizes: (k,) singular values.
        basis: (d, k) orthonormal.
        noise: standard deviation of an entry's noise.
        edge: largest singular value of a noise matrix of this shape with standard deviation 1.
        tolerance: how far points may be.
    """

    left: Tensor
    sizes: Tensor
    basis: Tensor
    noise: float
    edge: float
    tolerance: Tolerance

    @staticmethod
    def of(
        gradient: Tensor,
        ranked: Callable[[Tensor, float], int],
        tolerance: Tolerance = EXACT,
    ) -> Span:
        """The span of as many singular values as `ranked` counts, from all of them and `edge`.

        The others give the noise.
        """
        units, width = gradient.shape
        u, s, v = torch.linalg.svd(gradient.double(), full_matrices=False)
        edge = units**0.5 + width**0.5
        rank = ranked(s, edge)
        # Numbers of the matrix that a fit of this rank leaves free.
        rest = (units - rank) * (width - rank)
        noise = float(s[rank:].square().sum() / rest) ** 0.5 if rest else 0.0
        basis = v[:rank].T.contiguous()
        return Span(u[:, :rank], s[:rank], basis, noise, edge, tolerance)

    @property
    def rank(self) -> int:
        """The number of directions."""
        return len(self.sizes)

    @property
    def free(self) -> int:
        """The number of directions outside."""
        return len(self.basis) - self.rank

    @property
    def scaled(self) -> Tensor:
        """(k, d) rows, each with the norm of its singular value."""
        return self.sizes[:, None] * self.basis.T

    @property
    def floor(self) -> float:
        """The largest singular value that noise or rounding in float64 explains."""
        return max(self.noise * self.edge, 1e-14 * float(self.sizes[0]))

    @property
    def outside(self) -> Tensor:
        """(d, free) an orthonormal basis of what lies outside."""
        whole = torch.linalg.qr(self.basis, mode="complete")[0]
        return whole[:, self.rank :]

    def on(self, places: Tensor) -> Span:
        """The span's projection onto some coordinates; its `left` combines the rows of `scaled`."""
        u, s, v = torch.linalg.svd(self.scaled[:, places], full_matrices=False)
        rank = int((s > self.floor).sum())
        return Span(u[:, :rank], s[:rank], v[:rank].T, self.noise, self.edge, self.tolerance)

    def far(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """(...,) distance of points (..., d) relative to their norm, and the allowed one."""
        wide = points.double()
        inside = wide @ self.basis
        square = wide.square().sum(-1).clamp_min(1e-300)
        # By what is inside: the space outside may have thousands of directions.
        away = (1 - inside.square().sum(-1) / square).clamp_min(0).sqrt()
        weights = (inside / self.sizes).square().sum(-1) / square
        return away, self.allowed(weights.sqrt())

    def allowed(self, weights: Tensor) -> Tensor:
        """The allowed distance of points whose weights of singular directions have these norms."""
        spread = self.noise * self.tolerance.deviations(self.free) * weights
        return spread.clamp(self.tolerance.least, self.tolerance.most)

    def chance(self, allowed: Any, free: int) -> Any:
        """The chance that a random point of the span and `free` other directions is this near."""
        # A random direction's share outside of the span follows a Beta distribution.
        return scipy.stats.beta.cdf(allowed**2, free / 2, max(self.rank, 1) / 2)

    def luck(self, tests: int) -> float:
        """The expected number of random points that pass, of so many with equal weights.

        One direction outside is left out: a norm takes it from all points.
        """
        if self.free < 2:
            return float(tests)
        # The mean of no directions is NaN.
        weights = self.sizes.pow(-2).mean().sqrt().nan_to_num()
        return tests * float(self.chance(float(self.allowed(weights)), self.free - 1))


def independent(
    points: Tensor,
    most: int,
    least: float,
    basis: Tensor | None = None,
) -> tuple[list[int], Tensor]:
    """The first of points (n, d) that depend neither on those before nor on a basis (k, d).

    It ends when the basis, which is returned with them, has `most` orthonormal vectors. A point
    depends on others if at most the share `least` of it lies outside of their span.
    """
    basis = points[:0] if basis is None else basis
    kept: list[int] = []
    for at, point in enumerate(points):
        if len(basis) == most:
            break
        rest = point / point.norm()
        # Twice: one step loses digits where points are nearly dependent.
        for _ in range(2):
            rest = rest - rest @ basis.T @ basis
        if rest.norm() > least:
            kept.append(at)
            basis = torch.cat([basis, rest[None] / rest.norm()])
    return kept, basis


def above_noise(
    observation: Observation,
    values: Tensor,
    variance: Tensor,
    chance: float,
) -> Tensor:
    """Which rows (n, d) noise of these variances alone would give with less than a chance.

    Gaussian noise: |row|^2 / variance is chi-square; Laplace noise: |row|_1 / scale is Gamma.
    """
    sent = variance > 0
    free = sent.sum(1).double().clamp_min(1)
    tiny = 1e-300
    if isinstance(observation.update.law, Laplace):
        size = (values.abs() / (variance / 2).sqrt().clamp_min(tiny) * sent).sum(1)
        limit = scipy.stats.gamma.isf(chance, free.numpy())
    else:
        size = (values.square() / variance.clamp_min(tiny) * sent).sum(1)
        limit = scipy.stats.chi2.isf(chance, free.numpy())
    bare = (values * ~sent).any(1)  # a gradient where no noise is
    return (size > torch.from_numpy(limit)) | bare
