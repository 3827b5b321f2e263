"""The facts of an Opacus training, read from its live objects."""

from __future__ import annotations

import math
from typing import Any

from opacus.data_loader import DPDataLoader  # type: ignore[import-untyped]
from opacus.optimizers import DPOptimizer  # type: ignore[import-untyped]
from torch.utils.data import DataLoader

from leakbound.opacus.batches import draws_once, examples_of_a_pass
from leakbound.opacus.optimizer import SecureDPOptimizer
from leakbound.risk.deployment import Deployment, Mistake
from leakbound.risk.deployment.file import described


def describe(
    optimizer: DPOptimizer,
    loader: DataLoader[Any],
    *,
    epochs: int,
    rounds: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    coupled: bool | None = None,
    new_engine: bool | None = None,
    sends: tuple[str, ...] | None = None,
) -> tuple[Deployment, tuple[Mistake, ...]]:
    """What a client's private training protects, as `leakbound bound --deployment` takes it.

    Args:
        optimizer: as `make_private` returned it.
        loader: the same.
        epochs: local epochs of a round.
        rounds: of the federation; None: not stated. 1 for a training in one place.
        epsilon: what the accountant says, to be compared.
        delta: of that epsilon.
        coupled: whether examples see each other (batch norm, contrastive losses); None: not stated.
        new_engine: whether every round makes a new `PrivacyEngine`, as a new accountant counts
            one round only.
        sends: what leaves besides the update, such as "metrics"; () for nothing.

    Source: Opacus 1.6, `PrivacyEngine.make_private`.

    Example:
        >>> import torch
        >>> from leakbound.opacus import RiskEngine
        >>> data = torch.utils.data.TensorDataset(torch.rand(40, 4), torch.arange(40) % 2)
        >>> model = torch.nn.Linear(4, 2)
        >>> _, optimizer, loader = RiskEngine().make_private(
        ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     data_loader=torch.utils.data.DataLoader(data, batch_size=4),
        ...     noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False)
        >>> facts, mistakes = describe(optimizer, loader, epochs=2, epsilon=1.0)
        >>> facts.local.sampler, [one.name for one in mistakes]
        ('shuffled', ['shuffled-batches'])
    """
    sampler = "poisson" if isinstance(loader, DPDataLoader) else None
    if sampler is None and draws_once(loader):
        sampler = "shuffled"
    size = examples_of_a_pass(loader)
    norm = optimizer.max_grad_norm
    layers = isinstance(norm, list | tuple)
    stated = epsilon is not None
    return described(
        {
            "title": "Opacus training",
            "clip.kind": None if layers else "example",
            "clip.norm": None if layers else norm,
            "noise.multiplier": float(optimizer.noise_multiplier),
            "noise.at": "optimizer",
            "noise.seeded": _seeded(optimizer),
            "correlation": "none",
            "rounds": rounds,
            "participation.law": "all",
            "local.epochs": epochs,
            "local.batch": _batch(size, len(loader)),
            "local.steps": epochs * len(loader),
            "local.examples": size,
            "local.rate": 1 / len(loader),
            "local.normalizer": "expected",
            "local.sampler": sampler,
            "local.coupled": coupled,
            "local.new_engine": new_engine,
            "record.examples_per_client": size,
            "claim.epsilon": epsilon,
            "claim.delta": delta if stated else None,
            "claim.unit": "example" if stated else None,
            "claim.amplified": True if stated else None,
            "sends": sends,
        }
    )


def _seeded(optimizer: DPOptimizer) -> bool | None:
    """Whether the noise can be replayed; None if it is not known."""
    if getattr(optimizer, "secure_mode", False):
        return False
    if optimizer.generator is not None:
        return True
    # Opacus' own draws come from torch's global generator, which may be seeded anywhere
    return False if isinstance(optimizer, SecureDPOptimizer) else None


def _batch(size: int, batches: int) -> int | None:
    """The size of a batch, so that a pass has this number of batches; None if there is none.

    Loaders keep a smaller last batch, or drop it.
    """
    whole = math.ceil(size / batches)
    if math.ceil(size / whole) == batches:
        return whole
    fewer = max(1, size // batches)
    return fewer if size // fewer == batches else None
