"""The rounding that stored weights leave in an update."""

from __future__ import annotations

import math

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
_NARROW = (torch.bfloat16, torch.float16, torch.float32)
ON_GRID = 0.1
"""The mean distance from whole multiples of a spacing up to which values have it; random ones have
a quarter.
"""

NEAR = 1e-6
"""The relative difference up to which a value in float32 is one of half precision."""


def stored_type(value: Tensor) -> torch.dtype:
    """The coarsest type that holds all values of a tensor: mixed precision leaves halves in it."""
    if value.dtype in HALVES or not bool((value != 0).any()):  # zeros fit every type
        return value.dtype
    for kind in HALVES:
        if torch.equal(value, value.to(kind).to(value.dtype)):
            return kind
    return value.dtype


def narrowest(values: Tensor) -> torch.dtype | None:
    """The narrowest type that holds all values exactly; None if only float64 does."""
    return next((kind for kind in _NARROW if torch.equal(values.to(kind).double(), values)), None)


def type_near(values: Tensor, other: torch.dtype) -> torch.dtype:
    """The coarsest type of halves that values fit, up to what float32 rounds; else `other`."""
    # The coarser one first: float16 holds most values of bfloat16.
    for kind in reversed(HALVES):
        if torch.allclose(values.to(kind).to(values), values, rtol=NEAR, atol=0):
            return kind
    return other


def unit_of(values: Tensor, kind: torch.dtype) -> Tensor:
    """The distance of neighbors in a type at each value."""
    least = torch.finfo(kind).smallest_normal
    _, exponent = torch.frexp(values.double().abs().clamp_min(least))
    # Values from 2^(e - 1) to below 2^e are eps 2^(e - 1) apart.
    return torch.finfo(kind).eps * torch.exp2(exponent.double() - 1)


def grid(
    change: Tensor,
    before: Tensor,
    sent: Tensor | None,
) -> torch.dtype | None:
    """The type of the weights if `change` is a difference to rounded weights, else None.

    Then the weights after are whole multiples of their spacing, and those that changed did so by
    one or more.
    """
    if sent is not None:
        return narrowest(sent)
    after = before - change
    held = narrowest(before)
    for kind in _NARROW:
        unit = unit_of(after, kind)
        off = (after / unit - (after / unit).round()).abs()
        if held is not None and torch.finfo(held).eps >= torch.finfo(kind).eps:
            # A smaller change than the spacing shows that weights are not rounded to it.
            off = torch.where((change != 0) & (change.abs() < unit / 4), 0.5, off)
        if change.any() and float(off.mean()) < ON_GRID:
            return kind
    return None


def spacing(
    change: Tensor,
    before: Tensor,
    sent: Tensor | None,
) -> Tensor | None:
    """The spacing of the weights after, if they are of a type that `grid` finds; else None."""
    kind = grid(change, before, sent)
    return None if kind is None else unit_of(before - change if sent is None else sent, kind)


def deviation_of(weights: Tensor) -> Tensor:
    """The standard deviation of one rounding of weights, in the type that holds them."""
    return unit_of(weights, stored_type(weights)) / math.sqrt(12)
