"""Image strips as PNG bytes, named by their content."""

from __future__ import annotations

import io

import torch
from torch import Tensor

from leakbound.assess.record import picture_name

GAP = 2


def strip(images: Tensor, input_range: tuple[float, float]) -> tuple[str, bytes]:
    r"""The images (B, C, H, W) side by side as one PNG; returns its file name and bytes.

    One channel becomes gray; three RGB; of other numbers the first is shown.

    Example:
        >>> name, content = strip(torch.zeros(2, 1, 8, 8), (0.0, 1.0))
        >>> name.endswith(".png"), content[:4]
        (True, b'\x89PNG')
    """
    from PIL import Image

    low, high = input_range
    pixels = ((images.detach().cpu().double() - low) / (high - low)).clamp(0, 1)
    if pixels.shape[1] != 3:
        pixels = pixels[:, :1]
    count, channels, height, width = pixels.shape
    canvas = torch.ones(channels, height, count * width + (count - 1) * GAP, dtype=torch.float64)
    for i, image in enumerate(pixels):
        canvas[:, :, i * (width + GAP) : i * (width + GAP) + width] = image
    array = (canvas * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    picture = Image.fromarray(array[:, :, 0] if channels == 1 else array)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    content = buffer.getvalue()
    return picture_name(content), content
