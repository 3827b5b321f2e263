"""The numbers that a figure shows, as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, QuadMesh
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

COLORS = "<colorbar>"
"""What matplotlib calls the panel of a scale of colors."""


@dataclass(frozen=True)
class Value:
    """One point: where it is, the ends of its interval, and the shade of a point of a surface.

    Attributes:
        panel: its panel's title, or the label of the vertical axis.
        series: its line's label; empty for a line without one.
    """

    panel: str
    series: str
    x: float | str
    y: float
    low: float | None = None
    high: float | None = None
    shade: float | None = None


def table(figure: Figure, more: Iterable[Value] = ()) -> str:
    """All values as CSV, then more that no line shows.

    Bands, pictures and lines that mark a place of an axis are left out.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([field.name for field in fields(Value)])
    panels = (axes for axes in figure.axes if axes.get_label() != COLORS)
    writer.writerows(astuple(value) for axes in panels for value in values(axes))
    writer.writerows(map(astuple, more))
    return out.getvalue()


def values(axes: Axes) -> Iterator[Value]:
    """The values of one panel.

    Example:
        >>> axes = Figure().subplots()
        >>> _ = axes.set_title("a")
        >>> _ = axes.errorbar([1], [2], [0.5], label="b")
        >>> list(values(axes))
        [Value(panel='a', series='b', x=1.0, y=2.0, low=1.5, high=2.5, shade=None)]
    """
    panel = axes.get_title() or axes.get_ylabel()
    drawn = list[Any]()
    for group in axes.containers:
        if isinstance(group, ErrorbarContainer):
            line, caps, _ = group.lines
            drawn += [line, *caps]
            yield from _with_intervals(panel, group)
        elif isinstance(group, BarContainer):
            yield from _bars(panel, axes, group)
    for line in axes.get_lines():
        # Others mark a place of one axis, along the whole of the other.
        if line not in drawn and line.get_transform() == axes.transData:
            for x, y in zip(*_ends(line), strict=True):
                yield Value(panel, _label(line), x, y)
    for shape in axes.collections:
        if isinstance(shape, QuadMesh):
            yield from _surface(panel, shape)


def _with_intervals(panel: str, group: ErrorbarContainer) -> Iterator[Value]:
    line, _, bars = group.lines
    vertical = group.has_yerr
    intervals = _intervals(bars, 1 if vertical else 0)
    for x, y, (low, high) in zip(*_ends(line), intervals, strict=True):
        yield Value(panel, _label(group), x, y, low, high)


def _intervals(bars: Iterable[Any], axis: int) -> list[tuple[float, float]]:
    """The ends of the bars along an axis."""
    (own,) = [bar for bar in bars if isinstance(bar, LineCollection)]
    ends = [np.sort(np.asarray(segment)[:, axis]) for segment in own.get_segments()]
    return [(float(low), float(high)) for low, high in ends]


def _bars(panel: str, axes: Axes, group: BarContainer) -> Iterator[Value]:
    names = dict(zip(axes.get_xticks(), axes.get_xticklabels(), strict=True))
    for bar in group.patches:
        place = bar.get_x() + bar.get_width() / 2
        name = names.get(place)
        x = name.get_text().replace("\n", " ") if name is not None else float(place)
        yield Value(panel, _label(group), x, float(bar.get_height()))


def _surface(panel: str, mesh: QuadMesh) -> Iterator[Value]:
    shades = np.asarray(mesh.get_array()).ravel()
    corners = np.asarray(mesh.get_coordinates())
    centers = (corners[1:, 1:] + corners[:-1, :-1]) / 2
    # Shades are of corners that colors run between, or of the areas between corners.
    places = (corners if corners[..., 0].size == shades.size else centers).reshape(-1, 2)
    for (x, y), shade in zip(places, shades, strict=True):
        yield Value(panel, "", float(x), float(y), shade=float(shade))


def _ends(line: Line2D) -> tuple[list[float], list[float]]:
    x, y = (np.asarray(part, dtype=float).tolist() for part in line.get_data())
    return x, y


def _label(artist: Any) -> str:
    """The label that was given; matplotlib's own begin with an underscore."""
    label = str(artist.get_label() or "")
    return "" if label.startswith("_") else label
