"""Batches that hold no record: Poisson sampling draws them, and a step of noise alone must follow.

PyTorch's expanded weights ("ew") refuse them, and so does its vmap ("functorch") in convolutions:
a training would stop in the middle, and that it stopped would tell that a batch was empty.
"""

from __future__ import annotations

from typing import Any

import torch
from opacus.grad_sample import (  # type: ignore[import-untyped]
    AbstractGradSampleModule,
    GradSampleModule,
    GradSampleModuleExpandedWeights,
)
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


class _EmptyBatches:
    """A wrapper that batches of no record pass by: no example has a gradient."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As Opacus'; of an empty batch the plain outputs, which lead back to no parameter."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        along = 0 if self.batch_first else 1
        if not given or given[0].dim() <= along or given[0].shape[along]:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with torch.no_grad():
            found = self._module(*args, **kwargs)
        if not torch.is_grad_enabled():
            return found
        for parameter in self.parameters():
            if parameter.requires_grad and getattr(parameter, "grad_sample", None) is None:
                parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))
        return tree_map(_leaf, found)


class Hooked(_EmptyBatches, GradSampleModule):  # type: ignore[misc]
    """Opacus' module of "hooks" and "functorch"."""


class Expanded(_EmptyBatches, GradSampleModuleExpandedWeights):  # type: ignore[misc]
    """Opacus' module of "ew"."""


KINDS = {"hooks": Hooked, "functorch": Hooked, "ew": Expanded}
"""By `grad_sample_mode`. Ghost clipping takes empty batches as it is."""


def wrapped(module: nn.Module, mode: str, **settings: Any) -> AbstractGradSampleModule:
    """What gives every example's gradient, and takes empty batches too.

    Args:
        module: the plain model, or one that this wrapped before with the same settings.
        mode: a key of `KINDS`.
        settings: `batch_first` and `loss_reduction` of Opacus' modules.

    Raises:
        ValueError: a module that was wrapped otherwise.
    """
    kind = KINDS[mode]
    if not isinstance(module, AbstractGradSampleModule):
        return kind(
            module, **settings, **({"force_functorch": True} if mode == "functorch" else {})
        )
    if type(module) is kind and all(getattr(module, k) == v for k, v in settings.items()):
        return module
    raise ValueError(
        f"module is a {type(module).__name__} already, not one for grad_sample_mode {mode!r} with "
        f"{settings}; give the plain model"
    )


def _leaf(value: Any) -> Any:
    """A user's loop calls backward on the loss of nobody, too: it ends here."""
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.requires_grad_() if floating else value
