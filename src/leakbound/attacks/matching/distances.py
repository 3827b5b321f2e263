"""Distances between a candidate's update and the one seen, and image penalties."""

from __future__ import annotations

import torch
from torch import Tensor

from leakbound.domains import smooth_axes

Span = tuple[int, int]
# Its square is still a normal number in float32.
TINY = 1e-12
# Numbers of a row that are multiplied and added up at a time: they stay in a core's cache. A whole
# row of 11 million took a sixth of a step, most of it to get memory for the squares.
BLOCK = 2**18


def cosine(
    candidate: Tensor,
    seen: Tensor,
    weights: Tensor | None,
    spans: list[Span],
) -> Tensor:
    """1 - cosine between whole rows (R, P), mean over rows; independent of each row's scale.

    Computed as half the squared distance of the rows' directions, which keeps its digits where 1 -
    cosine would round to 0. A row of zeros has cosine 0 with every row (Geiping et al. 2020).
    """
    if weights is not None:
        candidate = candidate * weights
        seen = seen * weights
    lengths = _length(candidate), _length(seen)
    apart = candidate / lengths[0][:, None] - seen / lengths[1][:, None]
    zeros = sum((length <= TINY).to(candidate.dtype) for length in lengths)
    return ((apart.square().sum(1) + zeros) / 2).mean()


def _length(rows: Tensor) -> Tensor:
    """L2 norm of each row, at least `TINY`, with a finite derivative at zero."""
    return rows.square().sum(1).clamp_min(TINY**2).sqrt()


def _each_tensor(
    candidate: Tensor,
    seen: Tensor,
    weights: Tensor | None,
    spans: list[Span],
) -> Tensor:
    """`cosine` of every tensor."""
    parts = []
    for a, b in spans:
        trust = None if weights is None else weights[:, a:b]
        parts.append(cosine(candidate[:, a:b], seen[:, a:b], trust, []))
    return torch.stack(parts)


def cosine_layers(
    candidate: Tensor,
    seen: Tensor,
    weights: Tensor | None,
    spans: list[Span],
) -> Tensor:
    """1 - cosine of each tensor separately, mean over tensors ('simlocal')."""
    return _each_tensor(candidate, seen, weights, spans).mean()


def cosine_signal(
    candidate: Tensor,
    seen: Tensor,
    weights: Tensor | None,
    spans: list[Span],
) -> Tensor:
    """As `cosine_layers`; with weights 1/std, a tensor counts by its share of signal energy."""
    parts = _each_tensor(candidate, seen, weights, spans)
    signal = torch.ones_like(parts)
    if weights is not None:
        energies = [(seen[:, a:b] * weights[:, a:b]).square().mean() for a, b in spans]
        signal = (1 - 1 / torch.stack(energies)).clamp_min(0)
    signal = torch.where(signal.any(), signal, 1.0)  # noise alone: all count the same
    return (signal / signal.sum() * parts).sum()


def cosine_weighted(
    candidate: Tensor,
    seen: Tensor,
    weights: Tensor | None,
    spans: list[Span],
) -> Tensor:
    """As `cosine_layers`, weighted by how many coordinates were not zero (paper B, app. F)."""
    white = seen if weights is None else seen * weights
    counts = torch.stack([(white[:, a:b] != 0).sum() for a, b in spans])
    share = counts / counts.sum().clamp_min(1)
    return (share * _each_tensor(candidate, seen, weights, spans)).sum()


def euclidean(
    candidate: Tensor,
    seen: Tensor,
    weights: Tensor | None,
    spans: list[Span],
) -> Tensor:
    """Sum of squared differences; with weights 1/std the Gaussian log-likelihood, shifted."""
    difference = candidate - seen if weights is None else (candidate - seen) * weights
    return difference.square().sum()


def manhattan(
    candidate: Tensor,
    seen: Tensor,
    weights: Tensor | None,
    spans: list[Span],
) -> Tensor:
    """Sum of absolute differences; with weights 1/scale the Laplace log-likelihood."""
    difference = candidate - seen if weights is None else (candidate - seen) * weights
    return difference.abs().sum()


DISTANCES = {
    "cosine": cosine,
    "cosine_layers": cosine_layers,
    "cosine_signal": cosine_signal,
    "cosine_weighted": cosine_weighted,
    "euclidean": euclidean,
    "manhattan": manhattan,
}


class Cosine:
    """`cosine` of each of several rows (N, P) to a fixed one, with its derivative in closed form.

    Sums of products use pairwise halves: BLAS adds them up in turn, which over 11 million numbers
    loses the fourth digit.
    """

    def __init__(self, seen: Tensor, weights: Tensor | None) -> None:
        self.weights = weights
        self.seen = seen if weights is None else seen * weights
        self.inverse = self.seen.square().sum(1).clamp_min(TINY**2).rsqrt()
        count = seen.shape[1]
        size = BLOCK if seen.device.type == "cpu" else max(1, count)
        self.blocks = [slice(at, at + size) for at in range(0, count, size)]
        self.scratch = torch.empty_like(self.seen[:, :size]).flatten()

    def at(self, candidate: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
        """The distances (N,) of (N, P), and factors (N,) of `into` (N, P): the derivatives.

        The component of `seen` orthogonal to the candidate gives both: its squared length is (1 -
        cos)(1 + cos).
        """
        white = candidate if self.weights is None else candidate * self.weights
        pairs = [(white[:, block], self.seen[:, block]) for block in self.blocks]
        squares = []
        products = []
        for own, seen in pairs:  # both of a block in turn, while it is in the cache
            squares.append(self._product(own, own))
            products.append(self._product(own, seen))
        square = _total(squares)
        inner = _total(products)
        scale = square.clamp_min(TINY**2).rsqrt() * self.inverse  # their product may overflow
        # for a vanishing candidate the length is clamped, and no longer depends on it
        along = -torch.where(square > TINY**2, inner / square, 0.0)[:, None]
        left = []
        for (own, seen), block in zip(pairs, self.blocks, strict=True):
            rest = torch.addcmul(seen, own, along, out=into[:, block])
            # `vector_norm` adds in turn, too
            left.append(self._product(rest, rest))
        across = _total(left).sqrt() * self.inverse
        cosine = inner * scale
        if self.weights is not None:
            into.mul_(self.weights)
        return torch.where(cosine > 0, across.square() / (1 + cosine), 1 - cosine), -scale

    def _product(self, one: Tensor, other: Tensor) -> Tensor:
        into = self.scratch[: one.numel()].view(one.shape)
        return torch.mul(one, other, out=into).sum(1)


def _total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


class Euclidean:
    """`euclidean` to fixed rows, with its derivative in closed form."""

    def __init__(self, seen: Tensor, weights: Tensor | None) -> None:
        self.seen = seen
        self.weights = weights
        self.two = torch.full((), 2.0, dtype=seen.dtype, device=seen.device)

    def at(self, candidate: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
        torch.sub(candidate, self.seen, out=into)
        if self.weights is not None:
            into.mul_(self.weights)
        value = into.square().sum()
        if self.weights is not None:
            into.mul_(self.weights)
        return value, self.two


def disorder(
    rows: Tensor,
    withheld: Tensor,
    spans: list[Span],
) -> Tensor:
    """How far rows (R, P) are from those of a client that withholds each tensor's largest entries.
    It is the mean over `withheld` entries (R, P) of max(0, 1 - |entry| / s)². Here s is the largest
    |entry| that is sent of the same tensor; the value is 0 if nothing of it is sent.
    """
    total = rows.new_zeros(())
    count = torch.zeros((), device=rows.device)
    for a, b in spans:
        size = rows[:, a:b].abs()
        hidden = withheld[:, a:b]
        largest = (size * ~hidden).amax(1, keepdim=True).detach()
        counted = hidden & (largest > 0)
        short = (1 - size / largest.clamp_min(TINY)).relu() * counted
        total = total + short.square().sum()
        count = count + counted.sum()
    return total / count.clamp_min(1)


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbors, no padding: of images (B, C, H, W) down plus across,
    of series (B, C, T) along time.
    """
    parts = [images.diff(dim=axis) for axis in smooth_axes(images.shape[1:])]
    return torch.stack([part.abs().sum() / max(1, part.numel()) for part in parts]).sum()


def variation_gradients(images: Tensor) -> list[tuple[Tensor, Tensor]]:
    """`total_variation` of each of several batches (N, B, *S), and its gradient in it."""
    values = [list[Tensor]() for _ in images]
    gradients = torch.zeros_like(images)
    for axis in smooth_axes(images.shape[2:]):
        step = images.diff(dim=axis)
        count = max(1, step[0].numel())
        side = step.shape[axis]
        # One by one: a joint sum would round differently with the number of searches.
        for sums, part in zip(values, step.abs(), strict=True):
            sums.append(part.sum() / count)
        step.sign_().div_(count)
        gradients.narrow(axis, 1, side).add_(step)
        gradients.narrow(axis, 0, side).sub_(step)
    return list(
        zip(
            (torch.stack(sums).sum() for sums in values),
            gradients,
            strict=True,
        )
    )
