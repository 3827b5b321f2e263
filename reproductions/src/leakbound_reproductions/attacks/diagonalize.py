"""Joint decomposition of small symmetric tensors into shared, non-orthogonal components."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from leakbound import check
from leakbound.randomness import normal

__all__ = ["coefficients", "decompose"]

SWEEPS = 300
ROUGH = 8
STILL = 1e-13
FINE = 1e-11
CANCELS = 1e-8
LARGEST_STEP = 0.9


def joint_diagonalize(matrices: Tensor, start: Tensor | None = None) -> Tensor:
    """Components U (B, B), columns of length 1, with every matrix U D Uᵀ of (L, B, B) and D nearly
    diagonal (Ziehe et al. 2004, FFDIAG).

    Each step replaces the unmixing matrix V by (I + E) V, with E the minimizer of the linearized
    off-diagonal sum of squares. V does not stay orthogonal.
    """
    if matrices.ndim != 3 or matrices.shape[1] != matrices.shape[2] or len(matrices) == 0:
        raise ValueError(f"matrices has shape {tuple(matrices.shape)}; give (L, B, B)")
    wide = (matrices + matrices.mT).double() / 2
    size = wide.shape[1]
    eye = torch.eye(size, dtype=wide.dtype, device=wide.device)
    unmixing = eye if start is None else torch.linalg.pinv(start.double())
    for _ in range(SWEEPS):
        rotated = unmixing @ wide @ unmixing.T
        step = _step(rotated)
        length = float(step.norm())
        if length > LARGEST_STEP:
            step = step * (LARGEST_STEP / length)
        unmixing = unmixing + step @ unmixing
        unmixing = unmixing / unmixing.norm(dim=1, keepdim=True)
        if length < STILL:
            break
    return unit_columns(torch.linalg.pinv(unmixing))


def _step(rotated: Tensor) -> Tensor:
    """The zero-diagonal E for which (I + E) D (I + E)ᵀ has the least first-order off-diagonals."""
    diagonal = rotated.diagonal(dim1=1, dim2=2)
    z = diagonal.T @ diagonal
    y = torch.einsum("lj,lij->ij", diagonal, rotated)
    own = z.diagonal()
    bottom = own[:, None] * own - z.square()
    step = (z * y.T - own[:, None] * y) / bottom.clamp_min(1e-12 * float(own.max()) ** 2 + 1e-300)
    step.fill_diagonal_(0)
    return step


def unit_columns(matrix: Tensor) -> Tensor:
    lengths: Tensor = matrix.norm(dim=0, keepdim=True)
    return matrix / lengths.clamp_min(1e-300)


def polish(
    tensors: Sequence[Tensor], start: Tensor, *, sweeps: int = SWEEPS, still: float = STILL
) -> tuple[Tensor, float]:
    """Components of least sum over all tensors of |T - sum_i c_i u_i^(x)p|² / p!, columns of length
    1, and the share of the energy that they leave.

    Every tensor of the stacks (L, B, B) and (L, B, B, B) has separate coefficients. Alternating
    least squares in one mode, with the result put into all modes; the best sweep is kept.
    """
    stacks = [t.double() for t in tensors if t.numel()]
    energy = sum(float(t.square().sum()) / math.factorial(t.ndim - 1) for t in stacks)
    current = best = unit_columns(start.double())
    least = math.inf
    moved = math.inf
    for sweep in range(sweeps + 1):
        top = torch.zeros_like(current)
        bottom = torch.zeros_like(current)
        held = 0.0
        gram = current.T @ current
        for stack in stacks:
            order = stack.ndim - 1
            seen = _one_mode(stack, current)
            inner = torch.einsum("lai,ai->li", seen, current)
            c = _solved(gram**order, inner)
            held += float((c * inner).sum()) / math.factorial(order)
            weight = 1 / math.factorial(order - 1)
            top += weight * torch.einsum("lai,li->ai", seen, c)
            bottom += weight * gram ** (order - 1) * (c.T @ c)
        left = 1 - held / energy if energy > 0 else 1.0
        if left < CANCELS:
            left = _left(stacks, current) / energy
        if left < least:
            best = current
            least = left
        if sweep == sweeps or moved < still or not math.isfinite(left):
            break
        ridge = 1e-14 * float(bottom.diagonal().max()) * torch.eye(len(gram)).to(gram)
        following = unit_columns(torch.linalg.solve(bottom + ridge, top.T).T)
        signs = torch.where((following * current).sum(0) < 0, -1.0, 1.0)
        moved = float((following * signs - current).norm())
        current = following
    return best, min(1.0, max(0.0, least))


def _left(stacks: Sequence[Tensor], components: Tensor) -> float:
    """The weighted energy of the residuals."""
    left = 0.0
    for stack in stacks:
        c = coefficients(stack, components)
        fit = torch.einsum(_SUM[stack.ndim], c, *[components] * (stack.ndim - 1))
        left += float((stack - fit).square().sum()) / math.factorial(stack.ndim - 1)
    return left


_SUM = {3: "li,ai,bi->lab", 4: "li,ai,bi,ci->labc"}


def _one_mode(stack: Tensor, components: Tensor) -> Tensor:
    """(L, B, B): every tensor with component i in all modes but the first."""
    seen = stack @ components
    return seen if stack.ndim == 3 else torch.einsum("labi,bi->lai", seen, components)


def _solved(gram: Tensor, inner: Tensor) -> Tensor:
    """Inner products (L, B) times gram⁻¹; components that coincide share them."""
    ridge = 1e-14 * torch.eye(len(gram)).to(gram)
    found: Tensor = torch.linalg.solve(gram + ridge, inner.T).T
    return found


def coefficients(stack: Tensor, components: Tensor) -> Tensor:
    """Least-squares coefficients (L, B) of every tensor of a stack in the components."""
    inner = torch.einsum("lai,ai->li", _one_mode(stack, components), components)
    return _solved((components.T @ components) ** (stack.ndim - 1), inner)


def decompose(
    tensors: Sequence[Tensor], generator: torch.Generator, *, restarts: int = 10
) -> tuple[Tensor, float]:
    """The shared components of symmetric tensors: best of several starts, by the energy left.

    A start takes the eigenvectors of M_a M_b⁻¹, M_a and M_b random linear combinations of all
    slices (Jennrich); the best are diagonalized jointly, then polished.

    Shapes:
        tensors: stacks (L, B, B) and (L, B, B, B).

    Returns:
        Components (B, B), columns of length 1, the strongest first, and the share of the energy
        that they leave.

    Source: Kuleshov et al. 2015, with Jennrich's starts in place of random projections alone.
    """
    check.count(restarts=restarts)
    size = tensors[0].shape[1]
    slices = torch.cat([t.double().reshape(-1, size, size) / _root(t) for t in tensors])
    starts = [torch.eye(size).to(slices)]
    for _ in range(restarts):
        mixes = normal((2, len(slices)), generator, like=slices)
        first, second = torch.einsum("ml,lab->mab", mixes, slices)
        vectors = torch.linalg.eig(first @ torch.linalg.pinv(second))[1]
        real = torch.where(vectors.real.norm(dim=0) > 0, vectors.real, vectors.imag)
        starts.append(_spread(unit_columns(real)))
    quick = [polish(tensors, start, sweeps=ROUGH) for start in starts]
    best = min(quick, key=lambda pair: pair[1])
    joint = joint_diagonalize(slices, best[0])
    if bool(joint.isfinite().all()):
        quick.append(polish(tensors, joint, sweeps=ROUGH))
    best = min(quick, key=lambda pair: pair[1])
    found, left = polish(tensors, best[0], still=FINE)
    energy = sum(coefficients(t.double(), found).square().sum(0) for t in tensors)
    return found[:, torch.as_tensor(energy).argsort(descending=True)], left


def _root(stack: Tensor) -> float:
    return math.sqrt(math.factorial(stack.ndim - 1))


def _spread(components: Tensor) -> Tensor:
    """The same columns moved apart a little if some coincide (a complex pair's real parts)."""
    values = torch.linalg.svdvals(components)
    if float(values[-1]) > 1e-6:
        return components
    eye = torch.eye(len(components)).to(components)
    return unit_columns(components + 0.1 * eye)
