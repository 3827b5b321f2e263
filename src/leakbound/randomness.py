"""All random draws: named streams for experiments, the system's entropy for releases.

There are two sources and one set of functions. `stream(seed, *path)` names a draw, so that order,
resuming and parallelism do not change it. `secure()` is for noise on a real client's update: it
cannot be replayed.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "GRID",
    "SecureSource",
    "Source",
    "bernoulli",
    "laplace",
    "normal",
    "on_grid",
    "permutation",
    "secure",
    "stream",
    "uniform",
]


class SecureSource:
    """Uniform bits from the operating system's cryptographic generator; it has no seed.

    Draws are 52-bit uniforms mapped in float64. What is made of them is released through `on_grid`
    (docs/sharp_edges/floating_point_noise.md).
    """

    def uniform(self, count: int) -> Tensor:
        """`count` numbers in the open interval (0, 1), float64."""
        raw = np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
        # The half keeps draws off 0 and 1, where the normal quantile is infinite.
        return torch.from_numpy(((raw >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52)


Source = torch.Generator | SecureSource
"""The source of draws: a seeded stream (experiments only) or the operating system."""


def stream(seed: int, *path: str | int) -> torch.Generator:
    """A generator named by a seed and a path, independent of any other name.

    Example:
        >>> a, b = stream(0, "noise", 1), stream(0, "noise", 1)
        >>> bool(torch.equal(normal((3,), a), normal((3,), b)))
        True
    """
    # A separator that names do not contain, and types, so that no two paths have one name.
    name = "\x1f".join([str(int(seed)), *(f"{type(p).__name__}:{p}" for p in path)])
    digest = hashlib.sha256(name.encode()).digest()
    # On the CPU, so that an experiment has the same draws on every device.
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") & (2**63 - 1))


def secure() -> SecureSource:
    """The operating system's entropy, for every release of a real client's update."""
    return SecureSource()


def uniform(
    shape: Sequence[int],
    source: Source,
    *,
    like: Tensor | None = None,
) -> Tensor:
    """Uniform draws in [0, 1) of the given shape, in the type and on the device of `like`."""
    cast = _cast(_drawn(shape, source, _wide(like)), like)
    return cast.clamp_max_(1 - torch.finfo(cast.dtype).eps / 2)  # the cast may round up to 1


def normal(
    shape: Sequence[int],
    source: Source,
    *,
    like: Tensor | None = None,
) -> Tensor:
    """Standard normal draws of the given shape, in the type and on the device of `like`."""
    if isinstance(source, SecureSource):
        draw = torch.special.ndtri(source.uniform(math.prod(shape))).reshape(tuple(shape))
    else:
        draw = torch.randn(tuple(shape), generator=source, dtype=_wide(like))
    return _cast(draw, like)


def laplace(
    shape: Sequence[int],
    source: Source,
    *,
    like: Tensor | None = None,
) -> Tensor:
    """Standard Laplace draws (scale 1, variance 2) of the given shape."""
    centered = _drawn(shape, source, torch.float64) - 0.5
    # A draw of exactly 0 would give log(0): infinite noise.
    draw = -centered.sign() * torch.log1p(-2 * centered.abs().clamp_max(0.5 - 2.0**-54))
    return _cast(draw, like)


def bernoulli(
    shape: Sequence[int],
    probability: float,
    source: Source,
    *,
    like: Tensor | None = None,
) -> Tensor:
    """Booleans that are True with the given probability, on the device of `like`."""
    draw = uniform(shape, source) < probability
    return draw if like is None else draw.to(like.device)


GRID = -24
"""Releases with secure noise lie on a grid of this power of two below the noise."""


def on_grid(values: Tensor, spread: float | Tensor) -> Tensor:
    """Round noisy values to a grid of 2^-24 to 2^-25 of the noise's spread; spread 0: unchanged.

    A float that was scaled and added cannot take every value, and the possible values leak the
    number underneath. On a grid that is wide compared with the spacing of the draws, many draws
    lead to each number; everything after it is post-processing. `spread` broadcasts against
    `values`.

    Source: Mironov 2012; Holohan and Braghin 2021; docs/sharp_edges/floating_point_noise.md.

    Example:
        >>> on_grid(torch.tensor([1 / 3], dtype=torch.float64), 1.5).item() * 2**24
        5592405.0
    """
    size = torch.as_tensor(spread, dtype=values.dtype, device=values.device)
    _, power = torch.frexp(size)
    cell = torch.ldexp(torch.ones_like(size), power - 1 + GRID)
    return torch.where(size > 0, torch.round(values / cell) * cell, values)


def permutation(count: int, source: torch.Generator) -> Tensor:
    """A random order of 0..count-1."""
    return torch.randperm(count, generator=source)


def _drawn(
    shape: Sequence[int],
    source: Source,
    dtype: torch.dtype,
) -> Tensor:
    if isinstance(source, SecureSource):
        return source.uniform(math.prod(shape)).reshape(tuple(shape))
    return torch.rand(tuple(shape), generator=source, dtype=dtype)


def _wide(like: Tensor | None) -> torch.dtype:
    # A 16-bit draw would take few values, so it is drawn in float64 and rounded.
    return torch.float32 if like is None or like.dtype == torch.float32 else torch.float64


def _cast(draw: Tensor, like: Tensor | None) -> Tensor:
    if like is None:
        return draw.to(torch.float32)
    return draw.to(device=like.device, dtype=like.dtype)
