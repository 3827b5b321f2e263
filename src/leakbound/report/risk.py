"""Pictures of the risk corridor: over the threshold, and as a surface over noise too."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import AbstractPathEffect, withStroke
from numpy.typing import NDArray

from leakbound.report.drawing import COLORS, GRAY, STYLE

Array = NDArray[Any]
FAINTEST = 1e-9
"""Probabilities below this are drawn at it."""


def corridor_png(
    thresholds: Sequence[float], lower: Array, upper: Array, accepted: float, *, label: str
) -> bytes:
    """Both edges over the threshold, the accepted probability across; as PNG.

    Shapes: `thresholds`, `lower`, `upper` (n,), thresholds rising.
    """

    def draw(axes: Axes) -> None:
        low, high = np.maximum(lower, FAINTEST), np.maximum(upper, FAINTEST)
        axes.fill_between(thresholds, low, high, color=COLORS[4], alpha=0.35, lw=0)
        axes.plot(thresholds, high, color=COLORS[0], label="no attacker exceeds")
        axes.plot(thresholds, low, color=COLORS[1], ls="--", label="attained on a linear trap")
        axes.axhline(accepted, color=GRAY, ls=":", label=f"accepted: {accepted:g}")
        axes.set(yscale="log", ylim=(FAINTEST, 1.5), xlabel=label, ylabel="probability")
        axes.legend(frameon=False, loc="best")

    return _png(draw, (5.4, 3.6))


def surface_png(
    noises: Sequence[float],
    thresholds: Sequence[float],
    upper: Array,
    lower: Array,
    accepted: float,
    *,
    label: str,
) -> bytes:
    """The upper edge in color over noise and threshold; where each edge is the accepted risk.

    Shapes: `upper`, `lower` (thresholds, noises).
    """

    def draw(axes: Axes) -> None:
        shown = np.maximum(upper, FAINTEST)
        mesh = axes.pcolormesh(
            noises, thresholds, shown, norm=LogNorm(FAINTEST, 1), cmap="cividis", shading="gouraud"
        )
        edge: list[AbstractPathEffect] = [withStroke(linewidth=3.5, foreground="k")]
        for values, style, words in ((upper, "-", "upper"), (lower, "--", "lower")):
            axes.plot([], [], color="w", ls=style, path_effects=edge, label=f"{words} edge")
            if values.min() < accepted < values.max():
                shade = np.log(np.maximum(values, 1e-300))
                lines = axes.contour(
                    noises, thresholds, shade, [np.log(accepted)], colors="w", linestyles=style
                )
                lines.set_path_effects(edge)
        axes.legend(title=f"risk of {accepted:g}", loc="upper right", framealpha=0.85)
        axes.set(xscale="log", xlabel="noise multiplier", ylabel=label)
        axes.grid(False)
        bar = axes.figure.colorbar(mesh, ax=axes)
        bar.set_label("probability that no attacker exceeds")

    return _png(draw, (5.8, 3.8))


def _png(draw: Any, size: tuple[float, float]) -> bytes:
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE | {"text.parse_math": True})
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
        return buffer.getvalue()
