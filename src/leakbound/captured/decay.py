"""Weight decay in a captured update, found by its multiple of the weights before, and subtracted.

SGD with weight decay, also with momentum and over several steps, changes the weights by a multiple
of the weights before plus a weighted sum of gradients. AdamW and LAMB do so in one step, LAMB with
another multiple in each tensor. The gradients of few examples have a low rank, and those of dead
units or empty inputs are zero. The weights have neither property, so they give the multiple away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leakbound.core import Task
from leakbound.randomness import permutation, stream

ROWS = 64
WIDER = 4
"""Rows of a part of a weight matrix, and how many times more columns it may have."""
LINES = 4096
"""Rows and columns of a weight matrix that are tested for a gradient of zero."""
LEAST = 6
"""The fewest rows of a matrix, and the fewest rows or columns with a gradient of zero."""
FITS = 3.0
"""What may remain of a multiple of the weights, in units of the entries' rounding."""
SURE = 8.0
CLEAR = 4.0
"""A multiple counts from this many standard errors on, if it changes each weight by more than this
many times its rounding. Rounding itself may be biased by less.
"""
ALIKE = 1e-2
"""The relative difference up to which multiples of two tensors are the same."""
REFINED = 6
"""Steps that refine a multiple."""


@dataclass(frozen=True)
class DecayShare:
    """A multiple of the weights before in an update's tensor, and its standard error.

    `rounding` is that of an entry, relative to the weights.
    """

    value: float
    error: float
    rounding: float

    @property
    def sure(self) -> bool:
        return self.value > max(SURE * self.error, CLEAR * self.rounding)


@dataclass(frozen=True)
class Decay:
    """The multiple of the weights before in each tensor: `found` in it, or `assumed` as in others.

    Tensors that are in neither have none.
    """

    found: Mapping[str, float]
    assumed: Mapping[str, float]

    @property
    def common(self) -> float | None:
        """The multiple of all tensors with one; None if they differ."""
        shares = set(self.found.values())
        return shares.pop() if len(shares) == 1 else None

    def over(self, rate: float) -> Decay:
        """In gradient units, of a change of the weights at this learning rate."""
        found, assumed = (
            {name: share / rate for name, share in part.items()}
            for part in (self.found, self.assumed)
        )
        return Decay(found, assumed)

    def subtracted(
        self,
        task: Task,
        row: Tensor,
        spread: Tensor,
    ) -> Tensor:
        """The update (P,) without its multiples of the weights.

        Rows and columns of a matrix in which only rounding is left become zero, as they are without
        decay: what an input did not touch must not look touched.
        """
        rest = row.clone()
        held = task.unflatten(task.parameters)
        parts = task.unflatten(rest)
        rounding = task.unflatten(spread)
        for name, share in {**self.found, **self.assumed}.items():
            part = parts[name]
            part -= share * held[name]
            if part.ndim > 1:
                lines = part.flatten(1)
                limit = rounding[name].flatten(1)
                for line, most in ((lines, limit), (lines.T, limit.T)):
                    energy = line.square().sum(1)
                    line[energy <= FITS**2 * most.square().sum(1)] = 0
        return rest


def same(task: Task, share: float) -> Decay:
    """The same multiple in every tensor."""
    return Decay(dict.fromkeys(sorted(task.names), share), {})


def detected(
    task: Task,
    row: Tensor,
    spread: Tensor,
) -> Decay | None:
    """The weight decay that an update (P,) shows; None if it shows none.

    `spread` (P,) is the standard deviation of each entry's rounding. A matrix shows it by its rank,
    or by rows and columns without a gradient. A bias shows it beside the matrix of its layer.
    Tensors that do not show it are assumed to have that of the others, if these agree.
    """
    parts, held, rounding = map(task.unflatten, (row, task.parameters, spread))
    source = stream(0, "captured", "decay")
    shares = dict[str, DecayShare]()
    for name, part in parts.items():
        if part.ndim > 1:
            weight = held[name].flatten(1)
            share = _of_matrix(part.flatten(1), weight, rounding[name].flatten(1), source)
            if share is not None:
                shares[name] = share
    if not any(share.sure for share in shares.values()):
        return None
    for name, part in parts.items():
        beside = f"{name.rpartition('.')[0]}.weight".removeprefix(".")
        if part.ndim == 1 and name != beside and beside in shares:
            # The matrix spans the bias's gradient only without its decay.
            multiple = shares[beside].value if shares[beside].sure else 0.0
            rest = (parts[beside] - multiple * held[beside]).flatten(1)
            limit = rounding[beside].flatten(1)
            # Some layers, such as those of GPT-2, hold their matrix with the outputs in columns.
            for weight, error in ((rest, limit), (rest.T, limit.T)):
                if len(weight) != len(part) or name in shares:
                    continue
                share = _of_bias(part, held[name], rounding[name], weight, error)
                if share is not None:
                    shares[name] = share
    sure = {name: share for name, share in shares.items() if share.sure}
    common = _common([*sure.values()])
    unknown = parts.keys() - shares.keys()
    if common is None:
        return Decay({name: share.value for name, share in sure.items()}, {})
    biases = [share.sure for name, share in shares.items() if parts[name].ndim == 1]
    if biases and not any(biases):  # groups without decay hold biases and the scales of norms
        unknown = {name for name in unknown if parts[name].ndim > 1}
    return Decay(dict.fromkeys(sure, common), dict.fromkeys(sorted(unknown), common))


def _common(shares: list[DecayShare]) -> float | None:
    """The one multiple behind several, the surer ones counting more; None if they differ."""
    weights = [1 / share.error**2 for share in shares]
    mean = math.fsum(w * s.value for w, s in zip(weights, shares, strict=True)) / sum(weights)
    apart = (abs(s.value - mean) - SURE * s.error for s in shares)
    return mean if all(off <= ALIKE * abs(mean) for off in apart) else None


def _of_matrix(
    change: Tensor,
    held: Tensor,
    spread: Tensor,
    source: torch.Generator,
) -> DecayShare | None:
    """The multiple of the weights (M, N) in a change; None if it does not show whether there is."""
    if min(change.shape) < LEAST:
        return None
    # Wide: `_of_rank` multiplies by the pseudoinverse of the weights from the right.
    if change.shape[0] > change.shape[1]:
        change = change.T
        held = held.T
        spread = spread.T
    rows, columns = (permutation(n, source) for n in change.shape)
    lines = (
        _of_lines(*(t[rows[:LINES]] for t in (change, held, spread))),
        _of_lines(*(t.T[columns[:LINES]] for t in (change, held, spread))),
    )
    known = [line for line in lines if line is not None]
    if known:
        return min(known, key=lambda share: share.error)
    rows = rows[:ROWS]
    columns = columns[: WIDER * len(rows)]
    return _of_rank(*(t[rows][:, columns].double() for t in (change, held, spread)))


def _of_lines(
    change: Tensor,
    held: Tensor,
    spread: Tensor,
) -> DecayShare | None:
    """The multiple in rows (K, N) whose gradient is zero, so that nothing else is in them."""
    change = change.double()
    held = held.double()
    spread = spread.double()
    energy = held.square().sum(1)
    share = (change * held).sum(1) / energy.clamp_min(1e-300)  # rows of zeros are left out below
    rest = (change - share[:, None] * held).square().sum(1)
    plain = (energy > 0) & (rest <= FITS**2 * spread.square().sum(1))
    if int(plain.sum()) < LEAST:
        return None
    return _pooled(change[plain], held[plain], spread[plain])


def _of_rank(
    change: Tensor,
    held: Tensor,
    spread: Tensor,
) -> DecayShare | None:
    """The multiple by which a change (M, N) has at most half of its rank left."""
    try:
        # A gradient of at most half the rank leaves the multiple in half of the eigenvalues.
        start = torch.linalg.eigvals(change @ torch.linalg.pinv(held)).real.median()
        # A better multiple leaves less of the weights, and so better directions without a gradient.
        for _ in range(REFINED):
            outer, _, _ = torch.linalg.svd(change - start * held, full_matrices=False)
            free = outer[:, len(change) // 2 :].T  # no gradient has a part in these directions
            # Orthonormal directions do not change the size of the rounding.
            one = _pooled(free @ change, free @ held, spread[: len(free)])
            if one is None:
                return None
            start = torch.tensor(one.value, dtype=change.dtype)
    except RuntimeError:  # no decomposition was found
        return None
    return one


def _of_bias(
    change: Tensor,
    held: Tensor,
    spread: Tensor,
    weight: Tensor,
    rounding: Tensor,
) -> DecayShare | None:
    """The multiple in a bias (M,), whose gradient lies in the span of the matrix's columns."""
    outer, size, _ = torch.linalg.svd(weight.double(), full_matrices=False)
    # A matrix of independent errors has about the norm of its longest row plus longest column.
    noise = float(rounding.double().norm(dim=0).max() + rounding.double().norm(dim=1).max())
    rank = int((size > max(FITS * noise, 1e-6 * float(size[0]))).sum())
    if len(change) - rank < LEAST:
        return None
    # QR completes the span to a basis: its other columns are orthogonal to every gradient.
    full = torch.linalg.qr(torch.cat([outer[:, :rank], torch.eye(len(change)).to(outer)], 1))[0]
    free = full[:, rank:].T
    level = spread.double().square().mean().sqrt().expand(len(free), 1)
    return _pooled(free @ change.double()[:, None], free @ held.double()[:, None], level)


def _pooled(
    change: Tensor,
    held: Tensor,
    spread: Tensor,
) -> DecayShare | None:
    """The multiple of one tensor in another, if rounding alone is left; else None."""
    energy = float(held.square().sum())
    if not energy > 0:
        return None
    share = float((change * held).sum()) / energy
    # Values that are stated as exact still have the rounding of this computation.
    level = max(float(spread.square().mean().sqrt()), 1e-12 * float(change.abs().max()))
    rest = change - share * held
    if not float(rest.square().mean().sqrt()) <= FITS * level:
        return None
    error = level / math.sqrt(energy)
    # The third number is the level over the weights' root mean square.
    return DecayShare(share, error, error * math.sqrt(held.numel()))
