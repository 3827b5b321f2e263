"""Convert between NVFlare's exchange objects and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.shareable import Shareable
from torch import Tensor

from leakbound.client_side.round import COARSE, PrivateError

WEIGHTS = DataKind.WEIGHTS
CHANGE = DataKind.WEIGHT_DIFF
KINDS = {WEIGHTS: "weights", CHANGE: "delta"}
"""What an object of weights holds, as a capture names it."""


def exchanged(shareable: Shareable, what: str) -> DXO:
    """The weights, or change of weights, in a message.

    Raises:
        ValueError: it holds something else, or encrypted or quantized numbers.
    """
    try:
        dxo = from_shareable(shareable)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{what} holds no exchange object: send a DXO of weights") from error
    if dxo.data_kind not in KINDS:
        raise ValueError(
            f"{what} holds {str(dxo.data_kind)[:40]!r}; send WEIGHTS or WEIGHT_DIFF, not several "
            "objects in one"
        )
    if algorithm := dxo.get_meta_prop(MetaKey.PROCESSED_ALGORITHM):
        raise ValueError(
            f"{what} is processed by {str(algorithm)[:40]!r}; put the leakbound filter before that "
            "filter"
        )
    return dxo


def tensor(value: Any, what: str) -> Tensor:
    """A copy of an array or tensor of numbers, on the CPU.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if not isinstance(value, np.ndarray | np.number | float | int | bool):
        raise ValueError(
            f"{what} is a {type(value).__name__}, no array; name the leakbound filter under "
            "task_data_filters, too, so that NVFlare loads the weights before it"
        )
    array = np.array(value)
    if array.dtype.kind not in "uifb":
        raise ValueError(f"{what} holds values of type {array.dtype}; send numbers")
    return torch.from_numpy(array)


def read(
    data: Mapping[str, Any],
    like: Mapping[str, Tensor],
    what: str,
    *,
    private: bool,
) -> dict[str, Tensor]:
    """The arrays of a message as tensors, in the types and shapes of `like` (a state dict).

    Raises:
        ValueError: a name or shape is not the model's; if they are `private`, a value that is not
            finite is a PrivateError.
    """
    tensors = {}
    for name, value in data.items():
        if name not in like:
            known = ", ".join(list(like)[:6])
            raise ValueError(
                f"{what} holds {str(name)[:60]!r}, which the filter's model does not have (it has "
                f"{known}); give the filter the model that is trained"
            )
        one = tensor(value, f"{what}: {name}")
        if one.shape != like[name].shape:
            raise ValueError(
                f"{what}: {name} has shape {tuple(one.shape)}, but the model's is "
                f"{tuple(like[name].shape)}; give the filter the model that is trained"
            )
        if not bool(torch.isfinite(one).all()):
            kind = PrivateError if private else ValueError
            raise kind(f"{what}: {name} holds values that are NaN or infinite")
        tensors[name] = one.to(like[name].dtype)
    return tensors


def write(value: Tensor, like: Any) -> Any:
    """A tensor in the kind and type of a message's array."""
    if isinstance(like, Tensor):
        return value.detach().to(like)
    return value.detach().cpu().numpy().astype(np.asarray(like).dtype)


def coarsest(values: Mapping[str, Any]) -> float:
    """The largest relative step of the arrays' floating-point types."""
    types = {tensor(value, name).dtype for name, value in values.items()}
    steps = (torch.finfo(kind).eps for kind in types if kind.is_floating_point)
    return max(steps, default=COARSE)
