"""Copies of users' modules that can be called with other weights, and without their wrappers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from leakbound._util.text import printable

Module = TypeVar("Module", bound=nn.Module)

PLAIN = (Tensor, nn.Parameter)
"""Types whose values a copy may share; others, as of quantized weights, hold more than values."""
INNER = ("_orig_mod", "_checkpoint_wrapped_module")
"""Where a wrapper keeps its module: that of torch.compile, and that of activation checkpoints."""


def plain(model: nn.Module) -> nn.Module:
    """A copy of a user's model without the wrappers that change only how it runs.

    Those are compiled modules, wrapped checkpoints and data parallel modules. The weights keep
    their order; their names lose the wrapper's part. The values of frozen weights are shared.

    Raises:
        ValueError: it is no module, it cannot be copied, or its weights cannot be replaced or have
            no values.

    Example:
        >>> list(plain(nn.DataParallel(nn.Linear(2, 1))).state_dict())
        ['weight', 'bias']
    """
    refuse(model)
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model.module
    frozen = (value for value in model.parameters() if not value.requires_grad)
    return _unwrapped(duplicate(model, lent=frozen))


def refuse(model: nn.Module) -> None:
    """Reject a model whose weights cannot be replaced, or have no values."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {_what(model)}; give a torch.nn.Module with its weights")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"model has TorchScript ({name or 'the model itself'}), whose weights cannot be "
                "replaced; give the Python module from which torch.jit made it"
            )
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(value):
            raise ValueError(
                f"model has a weight without a shape ({name}, of a lazy layer); call the model on "
                "an input first"
            )
        if value.is_inference():
            raise ValueError(
                f"model has a tensor of torch.inference_mode ({name}), which cannot be trained; "
                "build the model outside of it"
            )
        if value.is_meta:
            raise ValueError(
                f"model has a tensor without values ({name} is on the meta device); build the "
                "model without torch.device('meta'), and load its weights"
            )
    kinds = {p.dtype: name for name, p in model.named_parameters() if p.requires_grad}
    for kind, name in kinds.items():
        if not kind.is_floating_point:
            raise ValueError(f"model has weights of type {kind} ({name}); give weights of floats")
    if len(kinds) > 1:
        listed = ", ".join(f"{name} is {str(kind)[6:]}" for kind, name in kinds.items())
        raise ValueError(
            f"model has trained weights of {len(kinds)} types ({listed}); give them one type, such "
            "as by model.float()"
        )


def compiled(model: nn.Module) -> bool:
    """Whether torch.compile changed a module of the model.

    Example:
        >>> compiled(nn.Linear(1, 1))
        False
    """
    return any(
        # `Module.compile()` sets this attribute and leaves no wrapper.
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )


def duplicate(
    module: Module,
    *,
    shared: bool = False,
    lent: Iterable[Tensor] = (),
) -> Module:
    """A deep copy, also of a module that keeps results of earlier calls among its attributes.

    Old weight norms, pruning and models that store activations do this. PyTorch copies no tensor
    that has a history, so such a result is copied as a number, without one. `shared`: weights and
    buffers are not copied, for calls that replace them. `lent`: weights whose values the copy
    shares, frozen, since those of a language model take gigabytes. Nobody may write into them.
    """
    memo: dict[int, Any] = {id(value): _lent(value) for value in lent if type(value) in PLAIN}
    if shared:
        every = (*module.parameters(), *module.buffers())
        memo |= {id(value): value for value in every}
    for shared_tensor in module.modules():
        for value in _tensors(vars(shared_tensor).values()):
            if not value.is_leaf or torch._C._functorch.is_functorch_wrapped_tensor(value):
                memo[id(value)] = _number(value)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        said = printable(str(error))[:200]
        raise ValueError(
            f"model cannot be copied ({type(error).__name__}: {said}); keep files, locks and "
            "results of earlier calls out of the module"
        ) from error


def _lent(value: Tensor) -> Tensor:
    """Another tensor with the same values in the same memory, frozen."""
    own = value.detach()
    return nn.Parameter(own, requires_grad=False) if isinstance(value, nn.Parameter) else own


def _unwrapped(module: nn.Module) -> nn.Module:
    for name in INNER:
        inner = module._modules.get(name)
        if inner is not None:
            return _unwrapped(inner)
    for name, child in module._modules.items():
        module._modules[name] = None if child is None else _unwrapped(child)
    module._compiled_call_impl = None  # what `Module.compile()` has set
    return module


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, dict) and not isinstance(value, nn.Module):
            yield from (one for one in value.values() if isinstance(one, Tensor))


def _number(value: Tensor) -> Tensor:
    """The value without its history; zeros where a transform has ended that knew the value."""
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return torch.zeros(value.shape, dtype=value.dtype)
    return value.detach().clone()


def _what(model: Any) -> str:
    if isinstance(model, type):
        return f"class ({model.__name__})"
    state = isinstance(model, dict) and all(isinstance(v, Tensor) for v in model.values())
    return "state dict" if state else type(model).__name__
