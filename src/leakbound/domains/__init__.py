"""Domains, the form of one example: images, rows of a table. Other code uses only the interface."""

from __future__ import annotations

from collections.abc import Sequence

from leakbound.domains.base import ColumnErrors, Domain, Fields, ImageDomain, NumberDomain
from leakbound.domains.table import Column, TableDomain, column_errors

__all__ = [
    "Column",
    "ColumnErrors",
    "Domain",
    "Fields",
    "ImageDomain",
    "NumberDomain",
    "TableDomain",
    "column_errors",
    "has_neighbors",
    "of_shape",
]


def of_shape(
    shape: Sequence[int],
    input_range: tuple[float, float] = (0.0, 1.0),
    columns: Sequence[Column] = (),
) -> Domain:
    """The domain of inputs with a known shape and range, and their columns if any.

    Example:
        >>> of_shape((1, 28, 28)).name, of_shape((30,)).name
        ('images', 'values')
    """
    shape = tuple(shape)
    if columns:
        return TableDomain(shape, input_range, columns=tuple(columns))
    return (ImageDomain if has_neighbors(shape) else NumberDomain)(shape, input_range)


def has_neighbors(shape: Sequence[int]) -> bool:
    """Whether inputs of this shape count as images (C, H, W), with similar neighboring values.

    This is what an attacker assumes who knows only the shape of the model's input.

    Example:
        >>> has_neighbors((3, 32, 32)), has_neighbors((30,))
        (True, False)
    """
    return len(shape) == 3
