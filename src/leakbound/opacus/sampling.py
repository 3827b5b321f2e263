"""Poisson sampling from the operating system's entropy: a batch that can be replayed hides none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from opacus.data_loader import DPDataLoader  # type: ignore[import-untyped]
from opacus.utils.uniform_sampler import UniformWithReplacementSampler  # type: ignore[import-untyped]
from torch.utils.data import DataLoader

from leakbound.random import secure


class SecureSampler(UniformWithReplacementSampler):  # type: ignore[misc]
    """Every record is in a batch with probability `sample_rate`, by 52-bit uniforms of the system.

    Opacus' sampler draws float32 uniforms of PyTorch's global generator: whoever knows its seed
    knows the batches, and amplification by sampling is lost.

    Example:
        >>> batches = list(SecureSampler(num_samples=1000, sample_rate=0.5, steps=3))
        >>> len(batches), all(300 < len(batch) < 700 for batch in batches)
        (3, True)
    """

    def __iter__(self) -> Iterator[list[int]]:
        source = secure()
        for _ in range(self.steps):
            mask = source.uniform(self.num_samples) < self.sample_rate
            yield torch.nonzero(mask).reshape(-1).tolist()


def resampled(loader: DataLoader[Any], *, steps: int, seeded: bool) -> DataLoader[Any]:
    """Opacus' loader with `steps` batches an epoch at a rate of 1 / steps, and a secure sampler.

    Opacus makes int(1 / (1 / steps)) batches, which rounding turns into 92 for 93.

    Args:
        loader: as Opacus made it.
        steps: the length of the loader that it was made from.
        seeded: keep Opacus' sampler and the loader's generator, for experiments only.

    Raises:
        ValueError: a loader that is not Opacus' own.
    """
    if not isinstance(loader, DPDataLoader):
        raise ValueError(f"loader is a {type(loader).__name__}; give Opacus' DPDataLoader")
    kind = UniformWithReplacementSampler if seeded else SecureSampler
    generator = loader.generator if seeded else None
    sampler = kind(
        num_samples=len(loader.dataset),
        sample_rate=loader.sample_rate,
        generator=generator,
        steps=steps,
    )
    # torch forbids to exchange a sampler, as its batches may be on their way; none are yet
    object.__setattr__(loader, "batch_sampler", sampler)
    made: DataLoader[Any] = loader
    return made
