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


def unit_of(values: Tensor, kind: torch.dtype) -> Tensor:
    """The distance of neighbors in a type at each value."""
    least = torch.finfo(kind).smallest_normal
    _, exponent = torch.frexp(values.double().abs().clamp_min(least))
    # Values from 2^(e - 1) to below 2^e are eps 2^(e - 1) apart.
    return torch.finfo(kind).eps * torch.exp2(exponent.double() - 1)


def spacing(
    change: Tensor,
    before: Tensor,
    sent: Tensor | None,
) -> Tensor | None:
    """The spacing of the weights if `change` is a difference to rounded weights, else None.

    Then the weights after are whole multiples of it, and those that changed did so by one or more.
    """
    if sent is not None:
        kind = narrowest(sent)
        return None if kind is None else unit_of(sent, kind)
    after = before - change
    held = narrowest(before)
    for kind in _NARROW:
        unit = unit_of(after, kind)
        off = (after / unit - (after / unit).round()).abs()
        if held is not None and torch.finfo(held).eps >= torch.finfo(kind).eps:
            # A smaller change than the spacing shows that weights are not rounded to it.
            off = torch.where((change != 0) & (change.abs() < unit / 4), 0.5, off)
        if change.any() and float(off.mean()) < ON_GRID:
            return unit
    return None


def deviation_of(weights: Tensor) -> Tensor:
    """The standard deviation of one rounding of weights, in the type that holds them."""
    return unit_of(weights, stored_type(weights)) / math.sqrt(12)
