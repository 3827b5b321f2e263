"""Domains, the form of one example: images, table rows, series, tokens.

Other packages use the interface only.
"""

from __future__ import annotations

from collections.abc import Sequence

from leakbound.domains.base import (
    Domain,
    Fields,
    ImageDomain,
    NumberDomain,
    PartsDomain,
    SeriesDomain,
    VolumeDomain,
)
from leakbound.domains.table import Column, TableDomain
from leakbound.domains.tokens import TokenDomain

__all__ = [
    "Column",
    "Domain",
    "Fields",
    "ImageDomain",
    "NumberDomain",
    "PartsDomain",
    "SeriesDomain",
    "TableDomain",
    "TokenDomain",
    "VolumeDomain",
    "has_neighbors",
    "of_shape",
    "smooth_axes",
]


def of_shape(
    shape: Sequence[int],
    input_range: tuple[float, float] = (0.0, 1.0),
) -> Domain:
    """The domain of inputs of which only shape and range are known.

    Example:
        >>> of_shape((1, 28, 28)).name, of_shape((2, 96)).name, of_shape((30,)).name
        ('images', 'series', 'values')
        >>> of_shape((1, 32, 32, 32)).name
        'volumes'
    """
    kinds: dict[int, type[NumberDomain]] = {2: SeriesDomain, 3: ImageDomain, 4: VolumeDomain}
    return kinds.get(len(shape), NumberDomain)(tuple(shape), input_range)


def has_neighbors(shape: Sequence[int]) -> bool:
    """Whether inputs of this shape count as images (C, H, W), with similar neighboring values.

    This is what an attacker assumes who knows only the shape of the model's input.

    Example:
        >>> has_neighbors((3, 32, 32)), has_neighbors((30,))
        (True, False)
    """
    return len(shape) == 3


def smooth_axes(shape: Sequence[int]) -> tuple[int, ...]:
    """The axes along which inputs of this shape may be smooth: of images, volumes and series.

    () of others.

    Example:
        >>> smooth_axes((3, 32, 32)), smooth_axes((1, 128)), smooth_axes((30,))
        ((-2, -1), (-1,), ())
    """
    return tuple(range(1 - len(shape), 0)) if len(shape) in (2, 3, 4) else ()
