"""Whether what is said of the records fits the first of them."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from leakbound.risk import Target


def refuse_misfit(
    loader: DataLoader[Any], dim: int, target: Target | str, input_range: float
) -> None:
    """Compare with the data set's first record, where it has one that can be read by its number.

    Args:
        loader: whose data set holds the records; no random stream of it moves.
        dim: number of values of one record.
        target: the accepted risk; the range matters to one in decibels alone.
        input_range: width of the range of an input, where `target` is in words.

    Raises:
        ValueError: another number of values, or a wider range.

    Example:
        >>> records = torch.utils.data.TensorDataset(torch.rand(5, 1, 2, 2), torch.arange(5))
        >>> refuse_misfit(DataLoader(records), 3, "psnr>=20 with probability<=0.1", 1.0)
        Traceback (most recent call last):
        ...
        ValueError: dim is 3, but the first record of data_loader has 4 values; give their number
    """
    inputs = _first(loader.dataset)
    if not inputs:
        return
    whole = sum(part.numel() for part in inputs)
    if dim not in (inputs[0].numel(), whole):
        raise ValueError(
            f"dim is {dim}, but the first record of data_loader has {inputs[0].numel()} values; "
            "give their number"
        )
    if isinstance(target, str):
        target = Target.parse(target, input_range=input_range)
    values = inputs[0].detach()
    if target.psnr is None or not values.is_floating_point() or values.numel() == 0:
        return
    if float(values.max()) - float(values.min()) > width(target) * (1 + 1e-6):
        raise ValueError(
            f"input_range is {width(target):.4g}, but the first record of data_loader spans more; "
            "give the width of the range that inputs can have"
        )


def width(target: Target) -> float:
    """The width of the range of inputs that makes a target's decibels its error."""
    if target.psnr is None:
        raise ValueError("target has no psnr; give one in decibels")
    return math.sqrt(target.eta * 10 ** (target.psnr / 10))


def _first(dataset: Any) -> list[Tensor]:
    """The tensors of the first record that are no single number, the input first as a rule."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return []
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            record = dataset[0]
    except Exception:  # whatever a data set may raise; the training will tell
        return []
    finally:
        random.setstate(state)
    parts = record if isinstance(record, tuple | list) else [record]
    return [part for part in parts if isinstance(part, Tensor) and part.ndim > 0]
