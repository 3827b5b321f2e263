"""Small HTML for notebooks: inline pictures and tables, bounded in size, text escaped.

Pictures are data URIs: they load nothing and run nothing. Text takes the page's color.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from leakbound._util.formats import format_number
from leakbound._util.text import printable

MOST = 16
"""Maximum number of pictures shown; the others are counted."""
SIDE = 96
"""Maximum pixels of a picture's longer side; larger pictures are averaged down."""
LONGEST = 300
"""Maximum characters of a text."""
ROWS = 12
"""Maximum rows of a table."""
MOST_BYTES = 1 << 20
"""Maximum size of a finished picture."""
_PNG = b"\x89PNG\r\n\x1a\n"


def text(value: object) -> str:
    """Anything as escaped text of bounded length, without control characters."""
    line = printable(str(value)[: 4 * LONGEST])  # cut first: a huge text costs no more
    return html.escape(line if len(line) <= LONGEST else line[:LONGEST] + " ...")


def block(title: str, *parts: str) -> str:
    """A titled block of parts that are already HTML; empty ones are left out."""
    inner = "".join(f"<div style='margin:4px 0'>{part}</div>" for part in parts if part)
    return f"<div style='font-family:sans-serif'><strong>{text(title)}</strong>{inner}</div>"


def note(words: object) -> str:
    return f"<small>{text(words)}</small>"


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table of escaped cells, the first column left, the others right; at most `ROWS` rows."""
    all_rows = list(rows)
    body = "".join(_row("td", row) for row in all_rows[:ROWS])
    top = f"<thead>{_row('th', head)}</thead>" if head else ""
    more = note(f"and {len(all_rows) - ROWS} more rows") if len(all_rows) > ROWS else ""
    return f"<table>{top}<tbody>{body}</tbody></table>{more}"


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Names and values as a table of two columns; a value of None is left out."""
    return table((), [pair for pair in pairs if pair[1] is not None])


def _row(kind: str, cells: Sequence[object]) -> str:
    sides = ("left", "right") if len(cells) > 2 else ("left", "left")
    inner = "".join(
        f"<{kind} style='text-align:{sides[i > 0]};padding:1px 8px'>{text(cell)}</{kind}>"
        for i, cell in enumerate(cells)
    )
    return f"<tr>{inner}</tr>"


def images(
    pixels: Tensor,
    captions: Sequence[object] = (),
    *,
    input_range: tuple[float, float] | None = None,
    name: str = "image",
) -> str:
    """Images (N, C, H, W) side by side, each with its caption; text if they are not images.

    Values outside `input_range` are clamped. None: 0 and 1 if all values lie there, else their
    smallest and largest, which a note then states. Screen readers say `name`.
    """
    if not is_image(pixels):
        shape = " x ".join(map(str, pixels.shape)) or "1"
        return note(f"{shape} numbers: no images to show")
    shown = pixels[:MOST].detach().cpu().to(torch.float64)
    broken = ~shown.isfinite()
    # One infinite value would make all others black.
    limits, said = _limits(shown[~broken], input_range)
    level = ((shown - limits[0]) / (limits[1] - limits[0])).clamp(0, 1)
    level = torch.where(broken, 0.5, level)
    height, width = level.shape[-2:]
    # A notebook keeps every picture in its file: small ones keep it small.
    factor = SIDE / max(height, width)
    if factor < 1:  # averaged down
        size = (max(1, round(height * factor)), max(1, round(width * factor)))
        level = torch.nn.functional.interpolate(level, size=size, mode="area")
    figures = []
    for i, image in enumerate(level):
        caption = text(captions[i]) if i < len(captions) else ""
        figures.append(_figure(_png(image), f"{name} {i}", image.shape[-2:], caption))
    notes = [said] if said else []
    if bool(broken.any()):
        notes.append("gray: values that are not finite")
    if len(pixels) > MOST:
        notes.append(f"and {len(pixels) - MOST} more")
    return f"<div>{''.join(figures)}</div>" + (note("; ".join(notes)) if notes else "")


def is_image(pixels: Tensor) -> bool:
    if pixels.ndim != 4 or len(pixels) == 0 or pixels.is_complex():
        return False
    return pixels.shape[1] in (1, 3) and min(pixels.shape[2:]) >= 2


def picture(content: bytes, name: str) -> str:
    """A finished PNG unchanged; text if it is not a PNG or is too large."""
    if not content.startswith(_PNG) or len(content) > MOST_BYTES:
        return note(f"{name}: not a picture of at most {MOST_BYTES} bytes")
    style = "image-rendering:pixelated;height:64px;max-width:100%;object-fit:contain"
    return _image(name, style, content)


def _limits(
    finite: Tensor, input_range: tuple[float, float] | None
) -> tuple[tuple[float, float], str]:
    if input_range is not None and input_range[0] < input_range[1]:
        return input_range, ""
    if not finite.numel():
        return (0.0, 1.0), ""
    low = float(finite.min())
    high = float(finite.max())
    if low >= 0 and high <= 1:
        return (0.0, 1.0), ""
    if low == high:
        low = low - 0.5
        high = high + 0.5
    return (low, high), f"black is {format_number(low)}, white is {format_number(high)}"


def _png(level: Tensor) -> bytes:
    from PIL import Image

    array = (level * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array).save(buffer, format="PNG")
    return buffer.getvalue()


def _figure(
    content: bytes,
    name: str,
    size: Sequence[int],
    caption: str,
) -> str:
    grown = max(1, round(72 / max(size)))
    style = f"image-rendering:pixelated;width:{size[1] * grown}px;height:{size[0] * grown}px"
    wide = "min-width:124px;" if caption else ""
    return (
        f"<div style='display:inline-block;vertical-align:top;margin:0 6px 4px 0;{wide}text-align:"
        f"center'>{_image(name, style, content)}<br><small>{caption}</small></div>"
    )


def _image(
    name: str,
    style: str,
    content: bytes,
) -> str:
    code = base64.b64encode(content).decode("ascii")
    return f"<img alt='{text(name)}' style='{style}' src='data:image/png;base64,{code}'>"
