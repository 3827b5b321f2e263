"""Data sets that code builds, as PyTorch's, torchvision's and MONAI's: items with a label each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakbound._util import user_code
from leakbound._util.text import row_of_text
from leakbound.data.raw import Options, Raw, flags, numbered, within_limit

INPUTS = (
    "image",
    "inputs",
    "input",
    "x",
    "img",
    "pixel_values",
)
LABELS = (
    "label",
    "labels",
    "target",
    "y",
    "mask",
    "seg",
)
"""Keys of an item that is a dictionary; the first that it has counts."""
SHAPES = (
    "(C, H, W) for an image, (C, D, H, W) for a volume, or (C, T) for a series; rows of a table "
    "need a schema (table:PATH)"
)


def read_code(source: str, options: Options) -> Raw:
    """The items of a data set that "package.module:name,key=value" builds, with PyTorch's seed 0.

    An item is a dictionary (keys as in `INPUTS` and `LABELS`), a tuple of an input and a label, or
    an input alone, whose label is 0. Parts of an input, in a dictionary or tuple, are joined to
    (n,). A label is a class number, a number, zeros and ones, or a
    class map of the input's places.
    """
    row = row_of_text("data", source)
    build = user_code.find("data", row.pop("name"))
    with user_code.seeded(torch.Generator().manual_seed(0)):
        try:
            data = build(**row)
            items = [_pair(item, at) for at, item in enumerate(_items(data, options.limit))]
            again = next(_items(data, 1), None)
        except RefusedItem:
            raise
        except Exception as error:  # it runs the user's code
            said = " ".join(str(error).split())[:300]
            raise ValueError(f"its code raised {type(error).__name__}: {said}") from error
    if not items:
        raise ValueError("it holds no item; give a data set with at least one")
    first = items[0][0]
    if again is None or not torch.equal(_pair(again, 0)[0], first):
        raise ValueError(
            "item 0 is another at the second reading; leave random transforms (and shuffling) out"
        )
    for at, (values, _) in enumerate(items):
        if values.shape != first.shape or values.dtype != first.dtype:
            raise ValueError(
                f"item {at} has shape {tuple(values.shape)} and type {values.dtype}, but item 0 "
                f"{tuple(first.shape)} and {first.dtype}; resize all to one size in the data set"
            )
    within_limit(f"{len(items)} items of {tuple(first.shape)}", 4 * len(items) * first.numel())
    inputs = torch.stack([values for values, _ in items])
    labels, names = _labels([label for _, label in items], inputs)
    return Raw(inputs, labels, names)


class RefusedItem(ValueError):
    """An item that is no input with a label; the message names it and the mend."""


def _items(data: Any, limit: int | None) -> Iterator[Any]:
    """The items in order; DataLoaders are refused, because their items are batches."""
    if isinstance(data, torch.utils.data.DataLoader):
        raise RefusedItem("it is a DataLoader, whose items are batches; return its data set")
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return (data[at] for at in islice(range(len(data)), limit))
    return islice(iter(data), limit)


def _pair(item: Any, at: int) -> tuple[Tensor, Any]:
    """The input of an item as uint8 or float32, and its label."""
    label: Any = 0
    values = item
    if isinstance(item, Mapping):
        held = [key for key in INPUTS if key in item]
        if not held:
            raise RefusedItem(
                f"item {at} has the keys {', '.join(map(str, item))[:200]}; give its input under "
                f"one of {', '.join(INPUTS)}"
            )
        values = item[held[0]]
        for key in LABELS:
            if key in item:
                label = item[key]
                break
    elif isinstance(item, Sequence) and not isinstance(item, str):
        if not 1 <= len(item) <= 2:
            raise RefusedItem(f"item {at} has {len(item)} parts; give an input and a label")
        values = item[0]
        label = item[1] if len(item) == 2 else 0
    return _values(values, at), label


def _values(values: Any, at: int) -> Tensor:
    if isinstance(values, Mapping | tuple | list):
        # As `leakbound.models.joined` takes them.
        parts = values.values() if isinstance(values, Mapping) else values
        flat = [_floats(_part(part, at), at).flatten() for part in parts]
        if not flat:
            raise RefusedItem(f"item {at} has an input without parts; give one tensor or more")
        return torch.cat(flat)
    tensor = _part(values, at)
    if tensor.ndim not in (2, 3, 4) or not tensor.numel():
        raise RefusedItem(f"item {at} has an input of shape {tuple(tensor.shape)}; give {SHAPES}")
    return tensor if tensor.dtype == torch.uint8 else _floats(tensor, at)


def _part(values: Any, at: int) -> Tensor:
    """A tensor, an array or an image as a tensor."""
    if not isinstance(values, Tensor):
        array = np.asarray(values)
        if array.dtype.kind not in "uif":
            raise RefusedItem(
                f"item {at} has an input of type {type(values).__name__}; give a tensor, an array "
                "or an image"
            )
        # Pillow's images have their channels last, or none.
        if hasattr(values, "getbands"):
            array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
        values = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
    tensor: Tensor = values.detach().cpu().as_subclass(Tensor)
    return tensor


def _floats(tensor: Tensor, at: int) -> Tensor:
    """In [0, 1] as float32."""
    if tensor.dtype == torch.uint8:
        return tensor / 255
    tensor = tensor.float()
    low = float(tensor.min())
    high = float(tensor.max())
    finite = math.isfinite(low) and math.isfinite(high)
    if not finite or low < 0 or high > 1:
        raise RefusedItem(
            f"item {at} has values from {low:g} to {high:g}; give uint8, or scale floats to [0, 1] "
            "in the data set (MONAI: ScaleIntensity)"
        )
    return tensor


def _labels(given: list[Any], inputs: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """The labels of all items, and the names of their classes."""
    try:
        parts = [torch.as_tensor(label).detach().cpu().as_subclass(Tensor) for label in given]
        labels = torch.stack(parts)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"labels differ in shape, or are no numbers ({' '.join(str(error).split())[:200]}); "
            "give each item a number, zeros and ones, or a class map"
        ) from None
    places = tuple(inputs.shape[2:])
    if labels.shape[1:] == (1, *places):
        labels = labels[:, 0]
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 2:
        return flags("labels", labels)
    if labels.shape[1:] not in ((), places):
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}; give a class number, L zeros and ones, or a "
            f"class map of shape {places}"
        )
    whole = not labels.is_floating_point() or bool((labels == labels.round()).all())
    if labels.ndim == 1 and labels.is_floating_point():
        return labels.float(), ()
    if not whole:
        raise ValueError("labels are class maps of fractions; give whole numbers of classes")
    return labels.long(), numbered("its", labels.long())
