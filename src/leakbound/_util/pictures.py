"""Small HTML for notebooks: inline pictures, tables and curves, bounded in size, text escaped.

Pictures are data URIs: they load nothing and run nothing. Text takes the page's color; lines are
legible on light and dark backgrounds.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

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
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
GRAY = "#808080"
_PNG = b"\x89PNG\r\n\x1a\n"


def text(value: object) -> str:
    """Anything as escaped text of bounded length, without control characters."""
    line = " ".join(str(value)[: 4 * LONGEST].split())
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return html.escape(line if len(line) <= LONGEST else line[:LONGEST] + " ...")


def block(title: str, *parts: str) -> str:
    """A titled block of parts that are already HTML; empty ones are left out."""
    inner = "".join(f"<div style='margin:4px 0'>{part}</div>" for part in parts if part)
    return f"<div style='font-family:sans-serif'><strong>{text(title)}</strong>{inner}</div>"


def note(words: object) -> str:
    return f"<small>{text(words)}</small>"


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}g}"


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
    limits, said = _limits(shown[~broken], input_range)
    level = ((shown - limits[0]) / (limits[1] - limits[0])).clamp(0, 1)
    level = torch.where(broken, 0.5, level)
    height, width = level.shape[-2:]
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
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 1.0)
    if low >= 0 and high <= 1:
        return (0.0, 1.0), ""
    if low == high:
        low, high = low - 0.5, high + 0.5
    return (low, high), f"black is {number(low)}, white is {number(high)}"


def _png(level: Tensor) -> bytes:
    from PIL import Image

    array = (level * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array).save(buffer, format="PNG")
    return buffer.getvalue()


def _figure(content: bytes, name: str, size: Sequence[int], caption: str) -> str:
    grown = max(1, round(72 / max(size)))
    style = f"image-rendering:pixelated;width:{size[1] * grown}px;height:{size[0] * grown}px"
    wide = "min-width:124px;" if caption else ""
    return (
        f"<div style='display:inline-block;vertical-align:top;margin:0 6px 4px 0;{wide}text-align:"
        f"center'>{_image(name, style, content)}<br><small>{caption}</small></div>"
    )


def _image(name: str, style: str, content: bytes, kind: str = "png") -> str:
    code = base64.b64encode(content).decode("ascii")
    styled = f" style='{style}'" if style else ""
    return f"<img alt='{text(name)}'{styled} src='data:image/{kind};base64,{code}'>"


def curves(
    xs: Sequence[float],
    lines: Sequence[tuple[str, Sequence[float]]],
    *,
    x_name: str,
    y_name: str,
) -> str:
    """Lines over one axis as an inline picture; x is logarithmic if it spans a factor of 20.

    Values that are not finite are left out; text if fewer than two places remain. At most four
    lines (names and values) are shown.
    """
    lines = lines[: len(COLORS)]
    kept = [
        (float(x), [float(values[i]) for _, values in lines])
        for i, x in enumerate(xs)
        if math.isfinite(x) and all(math.isfinite(values[i]) for _, values in lines)
    ]
    kept.sort()
    if len(kept) < 2 or kept[0][0] == kept[-1][0]:
        return note("too few points for a curve")
    svg = _drawn(kept, x_name, y_name).encode()
    plot = _image(f"{y_name} over {x_name}", "width:360px;max-width:100%", svg, "svg+xml")
    return f"{plot}<div>{' '.join(_key(i, name) for i, (name, _) in enumerate(lines))}</div>"


def _drawn(points: list[tuple[float, list[float]]], x_name: str, y_name: str) -> str:
    left, right, top, bottom = 48.0, 348.0, 12.0, 148.0
    low, high = points[0][0], points[-1][0]
    bend = math.log if low > 0 and high / low > 20 else float
    most = max(max(values) for _, values in points)
    unit = 10.0 ** math.floor(math.log10(most)) if most > 0 else 1.0
    # the next number of the form 1, 2 or 5 times a power of ten
    ceiling = next(m * unit for m in (1, 2, 5, 10) if m * unit >= most * (1 - 1e-9))

    def place(x: float, y: float) -> str:
        share = (bend(x) - bend(low)) / (bend(high) - bend(low))
        rise = min(1.0, max(0.0, y / ceiling))
        return f"{left + share * (right - left):.1f},{bottom - rise * (bottom - top):.1f}"

    paths = "".join(
        f"<polyline points='{' '.join(place(x, values[i]) for x, values in points)}' "
        f"stroke='{COLORS[i]}' stroke-dasharray='{DASHES[i]}' fill='none' stroke-width='2'/>"
        for i in range(len(points[0][1]))
    )
    frame = f"M{left},{top} V{bottom} H{right}"
    middle = (left + right) / 2
    words = (
        (left, bottom + 14, "start", number(low)),
        (right, bottom + 14, "end", number(high)),
        (middle, bottom + 28, "middle", x_name + (" (logarithmic)" if bend is math.log else "")),
        (left - 4, bottom, "end", "0"),
        (left - 4, top + 8, "end", number(ceiling)),
        (left + 6, top + 4, "start", y_name),
    )
    labels = "".join(
        f"<text x='{x:.0f}' y='{y:.0f}' text-anchor='{side}' fill='{GRAY}'>{text(word)}</text>"
        for x, y, side, word in words
    )
    return (
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 360 184' width='360' height='184' "
        f"font-family='sans-serif' font-size='11'><path d='{frame}' fill='none' stroke='{GRAY}'/>"
        f"{paths}{labels}</svg>"
    )


def _key(index: int, name: str) -> str:
    line = (
        "<svg xmlns='http://www.w3.org/2000/svg' width='28' height='8'><path d='M0,4 H28' "
        f"stroke='{COLORS[index]}' stroke-dasharray='{DASHES[index]}' stroke-width='2'/></svg>"
    )
    image = _image("", "", line.encode(), "svg+xml")
    return f"<span style='margin-right:12px'>{image} <small>{text(name)}</small></span>"
