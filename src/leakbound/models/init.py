"""Initial weights from a generator: PyTorch's default law, without its global random state."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from leakbound.random import uniform

_WEIGHTED = (nn.Linear, nn.Conv2d)
_NORMS = (nn.GroupNorm, nn.BatchNorm2d)


def initialized(
    build: Callable[[], nn.Module], generator: torch.Generator, *, bound: float | None = None
) -> nn.Module:
    """The module that `build` describes, in eval mode, its weights drawn from `generator`.

    Linear and convolution weights and biases are uniform in +-`bound`, which is 1/sqrt(fan_in)
    where it is None (PyTorch's default: kaiming_uniform with a = sqrt(5)). Norms start as the
    identity. Global random state is neither read nor written.

    Example:
        >>> a = initialized(lambda: nn.Linear(4, 2), torch.Generator().manual_seed(0))
        >>> bool(a.weight.abs().max() <= 0.5), a.training
        (True, False)
    """
    with torch.device("meta"):
        empty = build()
    model = empty.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, _WEIGHTED):
            limit = module.weight[0].numel() ** -0.5 if bound is None else bound
            for parameter in module.parameters():
                _fill(parameter, limit, generator)
        elif isinstance(module, _NORMS):
            module.reset_parameters()
        elif any(True for _ in _own_tensors(module)):
            raise TypeError(f"{type(module).__name__} has tensors but no initial law here")
    return model.eval()


@torch.no_grad()
def _fill(parameter: Tensor, limit: float, generator: torch.Generator) -> None:
    draw = uniform(parameter.shape, generator, like=parameter)
    parameter.copy_((2 * draw - 1) * limit)


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
