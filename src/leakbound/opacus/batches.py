"""Batches by Poisson sampling from the operating system's entropy; some are empty.

A batch that can be replayed hides no example. An empty batch must still be followed by a step of
noise. PyTorch's expanded weights ("ew") reject empty batches, and so does its vmap ("functorch") in
convolutions. A training that stops there reveals that a batch was empty.
"""

from __future__ import annotations

import warnings
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
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from leakbound.core import NotApplicable
from leakbound.randomness import secure

LIBRARIES = ("torch.", "opacus.", "leakbound.")


class SecureSampler(UniformWithReplacementSampler):  # type: ignore[misc]
    """Secure draws instead of Opacus' draws from PyTorch's global generator, whose seed reveals
    them.
    """

    def __iter__(self) -> Iterator[list[int]]:
        source = secure()
        for _ in range(self.steps):
            mask = source.uniform(self.num_samples) < self.sample_rate
            yield torch.nonzero(mask).reshape(-1).tolist()


def refuse_dropped(loader: DataLoader[Any], *, seeded: bool) -> None:
    """Reject what a Poisson sample of the whole data set would drop: rows, weights, own batches.

    Opacus drops it silently. Every other setting of a loader is kept (`drop_last` and `shuffle`
    mean nothing in a Poisson sample).

    Args:
        loader: the user's own.
        seeded: whether the loader's generator draws the batches.

    Raises:
        NotApplicable: the sampler, the batch sampler or the class of the loader chooses examples.
    """
    if isinstance(loader.dataset, IterableDataset):
        return  # Opacus refuses it
    sampler = loader.batch_sampler
    if sampler is None:
        raise NotApplicable(
            "data_loader has batch_size None, so an item of its data set may be a whole batch; "
            "Poisson sampling draws single examples: give a data set of examples and a batch_size"
        )
    if type(sampler) is not BatchSampler and not isinstance(sampler, UniformWithReplacementSampler):
        raise NotApplicable(
            f"data_loader has the batch_sampler {type(sampler).__name__}, which Poisson sampling "
            "would drop; give batch_size instead, or poisson_sampling=False to keep it"
        )
    sampler = sampler_of(loader)
    _refuse_sampler(sampler, len(loader.dataset))  # type: ignore[arg-type]
    for kind in type(loader).__mro__:
        for name in ("__iter__", "__len__", "_get_iterator"):
            method = vars(kind).get(name)
            if method is not None and not str(method.__module__).startswith(LIBRARIES):
                raise NotApplicable(
                    f"data_loader is a {type(loader).__name__}, whose own {name} Poisson sampling "
                    "would drop; give a torch.utils.data.DataLoader, or poisson_sampling=False"
                )
    generator = getattr(sampler, "generator", None) or loader.generator
    if generator is not None and not seeded:
        warnings.warn(
            "data_loader has a generator, but secure entropy draws its batches, so that nobody "
            "can replay them; for an experiment with a seed give noise_generator, too",
            stacklevel=4,
        )


def _refuse_sampler(sampler: Any, size: int) -> None:
    shuffles = (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size
    )
    if shuffles or type(sampler) is SequentialSampler:
        return
    mend = "give poisson_sampling=False to keep it"
    if hasattr(sampler, "indices"):
        mend = "give torch.utils.data.Subset(dataset, indices) as the data set instead"
    elif hasattr(sampler, "weights"):
        mend = "no guarantee covers examples that are drawn at different rates: leave it out"
    elif type(sampler) is RandomSampler:
        mend = "give shuffle=True instead, or poisson_sampling=False to keep it"
    raise NotApplicable(
        f"data_loader has the sampler {type(sampler).__name__}, which Poisson sampling would drop: "
        f"all {size} examples could be drawn, also those that it leaves out; {mend}"
    )


def resampled(
    loader: DataLoader[Any],
    *,
    steps: int,
    seeded: bool,
) -> DataLoader[Any]:
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


def counted(
    loader: DataLoader[Any],
    taken: Callable[..., None],
) -> DataLoader[Any]:
    """A loader that calls `taken` for every pass over its examples, and for every batch of it."""
    kind: Any = type(loader)

    def passing(self: Any) -> Iterator[Any]:
        taken(passes=1)  # a pass that is started may hold an example
        batches = kind.__iter__(self)

        def counting() -> Iterator[Any]:
            for batch in batches:
                taken(batches=1)
                yield batch

        return counting()

    loader.__class__ = type(kind.__name__, (kind,), {"__iter__": passing})
    return loader


def draws_once(loader: DataLoader[Any]) -> bool:
    """Whether one pass gives every example at most once: PyTorch's own order, no replacement."""
    sampler = sampler_of(loader)
    once = type(sampler) is SequentialSampler
    if type(sampler) is RandomSampler:
        size = len(loader.dataset)  # type: ignore[arg-type]
        once = not sampler.replacement and sampler.num_samples <= size
    if type(sampler) is SubsetRandomSampler:
        once = len(set(sampler.indices)) == len(sampler.indices)
    plain = type(getattr(loader, "batch_sampler", None)).__module__.startswith("torch.")
    return plain and once


def examples_of_a_pass(loader: DataLoader[Any]) -> int:
    """How many examples one pass draws: fewer than the data set where a sampler leaves some out."""
    return len(sampler_of(loader))


def sampler_of(loader: DataLoader[Any]) -> Any:
    """What draws the examples: a user's `batch_sampler` holds it, and the loader has another."""
    sampler = getattr(loader, "batch_sampler", None)
    return sampler.sampler if type(sampler) is BatchSampler else getattr(loader, "sampler", None)


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


def wrapped(
    module: nn.Module,
    mode: str,
    **settings: Any,
) -> AbstractGradSampleModule:
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
