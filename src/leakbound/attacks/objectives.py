"""How far a guessed update is from the one that was seen, and what makes an image unlikely."""

from __future__ import annotations

import torch
from torch import Tensor

Span = tuple[int, int]
TINY = 1e-12


def cosine(guess: Tensor, seen: Tensor, weights: Tensor | None, spans: list[Span]) -> Tensor:
    """1 - cosine between whole rows (R, P), mean over rows; blind to each row's scale.

    Source: Geiping et al. 2020, eq. 4 ('sim').
    """
    if weights is not None:
        guess, seen = guess * weights, seen * weights
    dot = (guess * seen).sum(1)
    return (1 - dot / (_length(guess) * _length(seen))).mean()


def _length(rows: Tensor) -> Tensor:
    """L2 norm of each row, at least `TINY`, with a finite slope at zero."""
    return rows.square().sum(1).clamp_min(TINY**2).sqrt()


def cosine_layers(guess: Tensor, seen: Tensor, weights: Tensor | None, spans: list[Span]) -> Tensor:
    """1 - cosine of every tensor on its own, mean over tensors ('simlocal').

    Source: Geiping et al. 2020, released code.
    """
    parts = []
    for a, b in spans:
        own = None if weights is None else weights[:, a:b]
        parts.append(cosine(guess[:, a:b], seen[:, a:b], own, []))
    return torch.stack(parts).mean()


def cosine_weighted(
    guess: Tensor, seen: Tensor, weights: Tensor | None, spans: list[Span]
) -> Tensor:
    """1 - cosine of every tensor, weighted by how many of its coordinates were seen not to be zero.

    Source: Liu et al. 2025 (paper B), eq. 9.
    """
    parts, counts = [], []
    for a, b in spans:
        own = None if weights is None else weights[:, a:b]
        parts.append(cosine(guess[:, a:b], seen[:, a:b], own, []))
        counts.append(((seen if weights is None else seen * weights)[:, a:b] != 0).sum())
    share = torch.stack(counts) / torch.stack(counts).sum().clamp_min(1)
    return (share * torch.stack(parts)).sum()


def euclidean(guess: Tensor, seen: Tensor, weights: Tensor | None, spans: list[Span]) -> Tensor:
    """Sum of squared differences; with weights 1/std the Gaussian log-likelihood up to a constant.

    Source: Zhu et al. 2019, eq. 4.
    """
    difference = guess - seen if weights is None else (guess - seen) * weights
    return difference.square().sum()


def manhattan(guess: Tensor, seen: Tensor, weights: Tensor | None, spans: list[Span]) -> Tensor:
    """Sum of absolute differences; with weights 1/scale the Laplace log-likelihood."""
    difference = guess - seen if weights is None else (guess - seen) * weights
    return difference.abs().sum()


DISTANCES = {
    "cosine": cosine,
    "cosine_layers": cosine_layers,
    "cosine_weighted": cosine_weighted,
    "euclidean": euclidean,
    "manhattan": manhattan,
}


def disorder(rows: Tensor, withheld: Tensor, spans: list[Span]) -> Tensor:
    """How far rows (R, P) are from a client's who withholds the largest entries of every tensor.

    The mean over withheld entries of max(0, 1 - |entry| / s)², s the largest |entry| that is sent
    of the same tensor; 0 where nothing of it is sent. `withheld` is (R, P), bool.

    Source: ours.

    Example:
        >>> rows, withheld = torch.tensor([[1.0, 2.0, -4.0]]), torch.tensor([[True, False, True]])
        >>> disorder(rows, withheld, [(0, 3)]).item()
        0.125
    """
    total, count = rows.new_zeros(()), torch.zeros((), device=rows.device)
    for a, b in spans:
        size, hidden = rows[:, a:b].abs(), withheld[:, a:b]
        largest = (size * ~hidden).amax(1, keepdim=True).detach()
        counted = hidden & (largest > 0)
        short = (1 - size / largest.clamp_min(TINY)).relu() * counted
        total, count = total + short.square().sum(), count + counted.sum()
    return total / count.clamp_min(1)


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels, down plus across; images (B, C, H, W).

    Source: Geiping et al. 2020 (anisotropic form, no padding).

    Example:
        >>> total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])).item()
        1.0
    """
    parts = (images.diff(dim=-2), images.diff(dim=-1))
    return torch.stack([part.abs().sum() / max(1, part.numel()) for part in parts]).sum()
