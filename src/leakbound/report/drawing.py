"""What all plots of a report share: style, colors, and SVG that can stand on one page.

Names stay out of the SVG where they can: only parameter names and numbers are drawn. Text keeps to
currentColor. Marks are told apart by shape as well as by color, and the colors also under each of
the three kinds of color blindness (a test simulates them); the page gives lighter ones on dark.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = ("#1e78b4", "#ff4b0f", "#4b1e3c", "#c37878", "#9600ff", "#780f00", "#2d0f87")
"""Of lines on a light ground; a page may set others as --line-0 to --line-6."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GRAY = "#808080"
INK = "#010203"
"""Stands for currentColor, which matplotlib does not know."""
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "leakbound",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": GRAY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRAY,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "xtick.color": GRAY,
    "ytick.color": GRAY,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
}


@dataclass(frozen=True)
class Panel:
    """One plot with the words that stand around it."""

    title: str
    svg: str
    notes: tuple[str, ...]
    description: str


def keys(labels: Sequence[str], prefix: str) -> list[tuple[str, str]]:
    """A legend: each label with a small SVG of its line and marker; `prefix` starts their ids."""
    return [(label, _key(index, f"{prefix}{index}")) for index, label in enumerate(labels)]


@contextmanager
def figure(
    prefix: str, size: tuple[float, float] = (4.3, 3.0), *, bare: bool = False
) -> Iterator[tuple[Axes, list[str]]]:
    """Axes to draw on, `bare` without room for labels; after the block, the list holds the SVG."""
    output: list[str] = []
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has other fonts
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        drawn = Figure(figsize=size)
        drawn.patch.set_alpha(0)
        left, bottom, end = (0, 0, 1) if bare else (0.56 / size[0], 0.5 / size[1], 0.97)
        axes = drawn.add_axes((left, bottom, end - left, end - bottom))
        axes.patch.set_alpha(0)
        yield axes, output
        output.append(_svg(drawn, prefix))


def _svg(drawn: Figure, prefix: str) -> str:
    """The figure as an <svg> element whose ids are unlike those of any other on the page."""
    buffer = io.StringIO()
    drawn.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg ") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)

    def rename(tag: re.Match[str]) -> str:
        own = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}-", tag.group())
        return re.sub(": (#[0-9a-f]{6})", _paint, own)

    return re.sub(r"<[^>]+>", rename, text).strip()


def _paint(found: re.Match[str]) -> str:
    """A color of the drawing as the page's own, where it may have one."""
    drawn = found.group(1)
    if drawn == INK:
        return ": currentColor"
    return f": var(--line-{COLORS.index(drawn)}, {drawn})" if drawn in COLORS else found.group()


def ceiling_key(prefix: str) -> str:
    """The legend's small SVG of a ceiling."""
    with _key_axes(prefix) as (axes, output):
        draw_ceiling(axes, [0.2, 1, 1.8], [0, 0, 0], size=7)
    return output[0]


def draw_ceiling(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], *, joined: bool = True, size: float = 13
) -> None:
    """A ceiling: bars in the color of the text, joined by a thin broken line."""
    line = (0, (6, 2, 1, 2)) if joined else "none"
    axes.plot(xs, ys, "_", color=INK, ls=line, lw=0.9, ms=size, mew=2.2)


def _key(index: int, prefix: str) -> str:
    with _key_axes(prefix) as (axes, output):
        axes.plot([0.2, 1, 1.8], [0, 0, 0], color=color(index))
        axes.plot([1], [0], MARKERS[index % len(MARKERS)], color=color(index))
    return output[0]


@contextmanager
def _key_axes(prefix: str) -> Iterator[tuple[Axes, list[str]]]:
    with figure(prefix, (0.42, 0.2), bare=True) as (axes, output):
        axes.axis("off")
        axes.set(xlim=(0, 2), ylim=(-1, 1))
        yield axes, output


def color(index: int) -> str:
    """The color of the line with this number."""
    return COLORS[index % len(COLORS)]


def span(counts: Sequence[int], word: str) -> str:
    """The range of some counts with their noun.

    Example:
        >>> span([2, 3], "batch")
        '2 to 3 batches'
    """
    low, high = min(counts), max(counts)
    ending = "" if high == 1 else ("es" if word.endswith("ch") else "s")
    return f"{low} {word}{ending}" if low == high else f"{low} to {high} {word}{ending}"
