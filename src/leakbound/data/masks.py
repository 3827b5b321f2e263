"""Photographs with a class for every pixel."""

from __future__ import annotations

import torch
from torch import Tensor

from leakbound.data.packaged import PHOTOS, photos
from leakbound.data.raw import LUMA, Options, Raw


def photo_masks(options: Options) -> Raw:
    """Tiles of the photographs with masks of their bright parts.

    A pixel is bright if its luma is above Otsu's threshold of its photograph's tiles. No person
    drew these masks: no installed package holds real ones. The photograph of a tile counts as its
    writer.
    """
    tiles = photos(options)
    weights = torch.tensor(LUMA)[:, None, None]
    luma = (tiles.inputs.float() * weights).sum(1).round().clamp(0, 255).long()
    masks = torch.zeros_like(luma)
    for photo in range(len(PHOTOS)):
        own = tiles.labels == photo
        masks[own] = (luma[own] > otsu(luma[own])).long()
    return Raw(tiles.inputs, masks, ("dark", "bright"), (), tiles.labels, tuple(PHOTOS))


def otsu(values: Tensor) -> int:
    """The threshold of whole numbers 0..255 with the largest variance between its two sides.

    Source: Otsu 1979, equation 18.

    Example:
        >>> otsu(torch.tensor([0, 10, 10, 200, 210]))
        10
    """
    counts = torch.bincount(values.flatten(), minlength=256).double()
    below = counts.cumsum(0)
    share = below / below[-1]
    mass = (counts * torch.arange(256)).cumsum(0) / below[-1]
    between = (mass[-1] * share - mass).square() / (share * (1 - share)).clamp_min(1e-12)
    return int(between.argmax())
