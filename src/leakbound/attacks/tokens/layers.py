"""What a language model's layers see of tokens, up to a layer and no further."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from leakbound.client import call
from leakbound.domains import TokenDomain, tokens_of
from leakbound.types import NotApplicable, Task

NUMBERS = 1 << 24
"""Most activations (tokens times width) that one call of the model computes per layer."""


class _Reached(Exception):
    """The layer was called; what follows it is not computed."""


def domain_of(task: Task) -> TokenDomain:
    """The domain of the task's sequences."""
    domain = tokens_of(task.domain)
    if domain is None:
        raise NotApplicable("the inputs are not sequences of tokens")
    return domain


@torch.no_grad()
def inputs_of(task: Task, name: str, sequences: Tensor) -> Tensor:
    """What the module `name` gets for sequences (N, n), as (N, n, d); later layers do not run.

    Raises:
        NotApplicable: the model does not call the module with one tensor (N, n, d).
    """
    found: list[Tensor] = []

    def stop(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(given, Tensor):
            found.append(given)
        raise _Reached

    hook = task.model.get_submodule(name).register_forward_pre_hook(stop, with_kwargs=True)
    try:
        call(task, task.tensors(), sequences, twice=False)
    except _Reached:
        pass
    finally:
        hook.remove()
    if not found or found[0].ndim != 3 or found[0].shape[:2] != sequences.shape:
        raise NotApplicable(f"the model does not call the layer {name!r} with one vector a token")
    return found[0]


def dictionary(
    task: Task, name: str, places: int, tokens: Sequence[int] | Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of (tokens (K,), what the module `name` gets for each at every place (K, places, d)).

    Each token is repeated over a whole sequence. So this is what a layer gets that mixes no places
    before it, such as the first attention layer.
    """
    domain = domain_of(task)
    every = torch.arange(domain.vocabulary) if tokens is None else torch.as_tensor(tokens)
    device = task.parameters.device
    width = inputs_of(task, name, every[:1, None].expand(1, places).to(device)).shape[-1]
    for part in torch.split(every, max(1, NUMBERS // (places * width))):
        yield part, inputs_of(task, name, part[:, None].expand(-1, places).to(device))
