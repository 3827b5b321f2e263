"""Adapters of any kind, read into the model that PEFT itself built."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from leakbound import tensors
from leakbound._util import copies
from leakbound.tensors.peft_names import names_in_files, renamed

HEADER = 2**22
"""Bytes that a file may hold besides the adapter's tensors."""


def with_values(path: Path, model: nn.Module) -> nn.Module:
    """A copy of PEFT's model, in evaluation mode, with the adapter of a file.

    Raises:
        ValueError: as `values_of`, or a number is not finite.
    """
    found = values_of(path, model)
    state = model.state_dict()
    # By place in memory: the values of one tensor may stand under two names.
    written = {state[name].data_ptr() for name in found}
    lent = (
        value
        for value in model.parameters()
        if not value.requires_grad and value.data_ptr() not in written
    )
    model = copies.duplicate(model, lent=lent).eval()
    state = model.state_dict()
    for name, value in found.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ValueError(
                f"{str(path)!r}: {name} is not finite; give the adapter as it was sent"
            )
        state[name].copy_(value)
    return model


def values_of(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """A file's tensors by their names in PEFT's model.

    Raises:
        ValueError: PEFT's kind of adapter is not read, or a tensor does not fit the model.
    """
    state = model.state_dict()
    # A number has at most 8 bytes: a file that is larger than the model needs is not read.
    numbers = sum(state[name].numel() for name in names_in_files(model).values())
    most = min(tensors.files.MOST_BYTES, 8 * numbers + HEADER)
    found = renamed(model, tensors.read(path, most=most)[0])
    mend = "build the model with the config of this adapter"
    for name, value in found.items():
        if name not in state:
            raise ValueError(f"{str(path)!r}: {name} is no part of the model's adapter; {mend}")
        held = state[name]
        if value.shape != held.shape or value.is_floating_point() != held.is_floating_point():
            raise ValueError(
                f"{str(path)!r}: {name} is {tuple(value.shape)} of {value.dtype}, in the model "
                f"{tuple(held.shape)} of {held.dtype}; {mend}"
            )
    return found
