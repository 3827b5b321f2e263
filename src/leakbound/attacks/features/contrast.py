"""The contrast of independent component analysis, and the rotation that maximizes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from leakbound.attacks.features.lowrank import NotSeparable
from leakbound.random import normal

TURNS, SETTLED, DRAWS = 300, 1e-9, 10


def contrasts(sources: Tensor, slope: float = 1.0, *, literal: bool = False) -> Tensor:
    """How far every source is from Gaussian, [mean_t log cosh(a s_t) / a - c_a]^2, (B,).

    Rows (B, n) are first scaled to mean square 1. `slope` is a; c_a is what a Gaussian has, and
    `literal` leaves it out, as the paper prints the term.

    Source: Hyvarinen 1999; Kariyappa et al. 2023.
    """
    unit = sources / sources.square().mean(1, keepdim=True).sqrt().clamp_min(1e-300)
    center = 0.0 if literal else gaussian_level(slope)
    squared: Tensor = (log_cosh(slope * unit).mean(1) / slope - center).square()
    return squared


def log_cosh(values: Tensor) -> Tensor:
    """The log of cosh, without overflow."""
    size = values.abs()
    return size + functional.softplus(-2 * size) - math.log(2)


@lru_cache
def gaussian_level(slope: float) -> float:
    """c_a = E log cosh(a z) / a for a standard normal z.

    Example:
        >>> round(gaussian_level(1.0), 6)
        0.374567
    """
    from scipy.integrate import quad

    def density(z: float) -> float:
        size = slope * z
        if size < 1:
            value = math.log1p(2 * math.sinh(size / 2) ** 2)
        else:
            value = size + math.log1p(math.exp(-2 * size)) - math.log(2)
        return value * math.exp(-z * z / 2) * math.sqrt(2 / math.pi) / slope

    edges = sorted({0.0, *(min(k / slope, 40.0) for k in (1, 3, 10, 20)), 2.0, 6.0, 40.0})
    return float(sum(quad(density, a, b, epsabs=0, epsrel=1e-13)[0] for a, b in pairwise(edges)))


def whitener(rows: Tensor) -> Tensor:
    """(B, B) the matrix that makes rows (B, n) uncorrelated, of mean square 1.

    Raises:
        NotSeparable: the rows are linearly dependent.
    """
    values, vectors = torch.linalg.eigh(rows @ rows.T / rows.shape[1])
    if not bool(values.min() > 1e-13 * values.max()):
        raise NotSeparable("the sources' differences from their means are linearly dependent")
    root: Tensor = (vectors / values.sqrt()).T
    return root


def rotation(
    white: Tensor,
    generator: torch.Generator,
    *,
    slope: float = 1.0,
    literal: bool = False,
    restarts: int = 1,
) -> Tensor:
    """The orthogonal matrix (B, B) of the largest contrast on whitened rows (B, n).

    From each random start FastICA's symmetric fixed-point iteration; the start of the largest
    contrast then climbs the contrast itself, by L-BFGS over rotations.
    """
    if len(white) == 1:
        return torch.eye(1).to(white)

    def reached(turn: Tensor) -> Tensor:
        return contrasts(turn @ white, slope, literal=literal).mean()

    starts = []
    for _ in range(restarts):
        turn = torch.linalg.qr(normal(white.shape[:1] * 2, generator, like=white))[0]
        starts.append(turn if literal else _fixed_point(turn, white, slope))
    best = max(starts, key=lambda turn: float(reached(turn)))
    start = float(reached(best))

    def loss(raw: Tensor) -> Tensor:
        return -reached(torch.matrix_exp(raw - raw.T) @ best) / max(start, 1e-300)

    raw = minimized(loss, torch.zeros_like(best))
    turned: Tensor = torch.matrix_exp(raw - raw.T) @ best
    return turned


def gaussian_ceiling(shape: tuple[int, int], generator: torch.Generator, slope: float) -> float:
    """The largest contrast that the rotation finds in Gaussian rows (B, n), in a few draws.

    By chance; it falls as 1 / n, so that fewer columns are drawn and the result is scaled.
    """
    rows, columns = shape
    drawn = min(columns, max(500, 50 * rows))
    largest = 0.0
    for _ in range(DRAWS):
        white = normal((rows, drawn), generator, like=torch.zeros((), dtype=torch.float64))
        white = whitener(white) @ white
        turn = torch.linalg.qr(normal((rows, rows), generator, like=white))[0]
        turn = _fixed_point(turn, white, slope, 60)
        largest = max(largest, float(contrasts(turn @ white, slope).max()))
    return largest * drawn / columns


def minimized(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """L-BFGS with a line search; the start itself where that leaves the finite numbers."""
    with torch.enable_grad():
        value = start.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        search = torch.optim.LBFGS(
            [value],
            max_iter=300,
            history_size=20,
            tolerance_grad=1e-8,
            tolerance_change=1e-11,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            now = loss(value)
            value.grad = torch.autograd.grad(now, value)[0].contiguous()
            return now

        search.step(closure)  # type: ignore[no-untyped-call]
    found = value.detach()
    return found if bool(found.isfinite().all()) else start


def _fixed_point(turn: Tensor, white: Tensor, slope: float, turns: int = TURNS) -> Tensor:
    for _ in range(turns):
        level = (slope * (turn @ white)).tanh()
        bend = slope * (1 - level.square()).mean(1, keepdim=True)
        u, _, vh = torch.linalg.svd(level @ white.T / white.shape[1] - bend * turn)
        before, turn = turn, u @ vh
        if float(((turn * before).sum(1).abs() - 1).abs().max()) < SETTLED:
            break
    return turn
