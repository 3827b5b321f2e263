"""Batches by Poisson sampling from the operating system's entropy; some are empty.

A batch that can be replayed hides no example. An empty batch must still be followed by a step of
noise. PyTorch's expanded weights ("ew") reject empty batches, and so does its vmap ("functorch") in
convolutions. A training that stops there reveals that a batch was empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from opacus.data_loader import DPDataLoader  # type: ignore[import-untyped]
from opacus.grad_sample import (  # type: ignore[import-untyped]
    AbstractGradSampleModule,
    GradSampleModule,
    GradSampleModuleExpandedWeights,
)
from opacus.utils.uniform_sampler import UniformWithReplacementSampler  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from leakbound.random import secure


class SecureSampler(UniformWithReplacementSampler):  # type: ignore[misc]
    """Secure draws instead of Opacus' draws from PyTorch's global generator, whose seed reveals
    them.
    """

    def __iter__(self) -> Iterator[list[int]]:
        source = secure()
        for _ in range(self.steps):
            mask = source.uniform(self.num_samples) < self.sample_rate
            yield torch.nonzero(mask).reshape(-1).tolist()


def resampled(loader: DataLoader[Any], *, steps: int, seeded: bool) -> DataLoader[Any]:
    """Opacus' loader with a secure sampler, and `steps` batches: rounding makes 92 of 93 there.

    `seeded` keeps Opacus' sampler and the loader's generator, for experiments only.
    """
    if not isinstance(loader, DPDataLoader):
        raise ValueError(f"loader is a {type(loader).__name__}; give Opacus' DPDataLoader")
    kind = UniformWithReplacementSampler if seeded else SecureSampler
    sampler = kind(
        num_samples=len(loader.dataset),
        sample_rate=loader.sample_rate,
        generator=loader.generator if seeded else None,
        steps=steps,
    )
    # torch forbids replacing a sampler, as its batches may be in use; none are yet
    object.__setattr__(loader, "batch_sampler", sampler)
    return cast(DataLoader[Any], loader)


def counted(loader: DataLoader[Any], taken: Callable[..., None]) -> DataLoader[Any]:
    """A loader that calls `taken` for every pass over its examples, and for every batch of it."""
    kind: Any = type(loader)

    def passing(self: Any) -> Iterator[Any]:
        taken(passes=1)
        own = kind.__iter__(self)

        def given() -> Iterator[Any]:
            for batch in own:
                taken(batches=1)
                yield batch

        return given()

    loader.__class__ = type(kind.__name__, (kind,), {"__iter__": passing})
    return loader


def draws_once(loader: DataLoader[Any]) -> bool:
    """Whether one pass gives every example at most once: PyTorch's own order, no replacement."""
    own = getattr(loader, "sampler", None)
    shuffled = type(own) is RandomSampler and not own.replacement
    if type(own) is RandomSampler and (own.num_samples > len(loader.dataset)):  # type: ignore[arg-type]
        return False
    plain = type(getattr(loader, "batch_sampler", None)).__module__.startswith("torch.")
    return plain and (shuffled or type(own) is SequentialSampler)


class _EmptyBatches:
    """A wrapper that empty batches bypass: no example has a gradient."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As Opacus'; for an empty batch the plain outputs, without a graph to any parameter."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        along = 0 if self.batch_first else 1
        if not inputs or inputs[0].dim() <= along or inputs[0].shape[along]:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with torch.no_grad():
            outputs = self._module(*args, **kwargs)
        if not torch.is_grad_enabled():
            return outputs
        for parameter in self.parameters():
            if parameter.requires_grad and getattr(parameter, "grad_sample", None) is None:
                parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))
        return tree_map(_as_leaf, outputs)


class Hooked(_EmptyBatches, GradSampleModule):  # type: ignore[misc]
    """Opacus' module for "hooks" and "functorch"."""


class Expanded(_EmptyBatches, GradSampleModuleExpandedWeights):  # type: ignore[misc]
    """Opacus' module for "ew"."""


KINDS = {"hooks": Hooked, "functorch": Hooked, "ew": Expanded}
"""By `grad_sample_mode`. Ghost clipping supports empty batches unchanged."""


def wrapped(module: nn.Module, mode: str, **settings: Any) -> AbstractGradSampleModule:
    """A module with per-example gradients that supports empty batches; `mode`: a key of `KINDS`."""
    kind = KINDS[mode]
    if not isinstance(module, AbstractGradSampleModule):
        forced = {"force_functorch": True} if mode == "functorch" else {}
        return kind(module, **settings, **forced)
    if type(module) is kind and all(getattr(module, k) == v for k, v in settings.items()):
        return module
    raise ValueError(
        f"module is already a {type(module).__name__}, not one for grad_sample_mode {mode!r} with "
        f"{settings}; give the plain model"
    )


def _as_leaf(value: Any) -> Any:
    """A user's loop calls backward on an empty batch's loss, too: it ends here."""
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.requires_grad_() if floating else value
