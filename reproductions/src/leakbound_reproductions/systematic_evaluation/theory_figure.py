"""The figure of the theory: error by width, noise, dropout and pruning, and p_hat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from leakbound_reproductions import kept
from leakbound_reproductions.systematic_evaluation.sweep import NOISES, RATES, WIDTHS, Row, Withheld
from leakbound_reproductions.systematic_evaluation.theory_claims import Rows
from leakbound_reproductions.systematic_evaluation.trial import Cell

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def draw(rows: Rows, shares: Sequence[Withheld], path: Path) -> None:
    """Four panels as one PNG."""
    with matplotlib.rc_context():
        figure = Figure(figsize=(15, 3.6), layout="constrained")
        width, noise, dropping, share = figure.subplots(1, 4)
        _width(width, rows)
        _noise(noise, rows)
        _dropping(dropping, rows)
        _share(share, shares)
        for axes in (width, noise, dropping):
            axes.set(ylabel="R")
        for axes in figure.axes:
            axes.legend(frameon=False, fontsize=5.5)
        kept.figure(figure, path, 130)


def _line(axes: Axes, x: Sequence[float], rows: Sequence[Row], color: str, **style: str) -> None:
    middle = np.array([r.median for r in rows])
    around = [middle - [r.low for r in rows], [r.high for r in rows] - middle]
    axes.errorbar(x, middle, around, color=color, capsize=2, **style)  # type: ignore[arg-type]


def _width(axes: Axes, rows: Rows) -> None:
    for color, (s, batch) in zip(
        COLORS, (("relu", 1), ("relu", 2), ("cubic", 2), ("tanh", 1)), strict=True
    ):
        for method, mark in (("library", "-"), ("printed", ":")):
            own = rows.widths(s, batch, method)
            x = [r.cell.width for r in own]
            label = f"{s}, B = {batch}, {method}"
            if own:
                _line(axes, x, own, color, ls=mark, label=label)
    guide = np.array([r.cell.width for r in rows.widths("relu", 1)], dtype=float)
    axes.plot(guide, np.sqrt(20 / guide), color="black", lw=0.8, label="sqrt(n / M)")
    axes.set(xscale="log", yscale="log", xlabel="width M", title="no defense, n = 20")


def _noise(axes: Axes, rows: Rows) -> None:
    for color, batch in zip(COLORS, (1, 2), strict=False):
        own = rows.of([Cell(width=WIDTHS[-1], batch=batch, noise_std=s) for s in NOISES])
        x = [r.cell.noise_std for r in own]
        _line(axes, x, own, color, label=f"B = {batch}")
        floors = [np.sqrt(np.mean(np.square(r.floors))) for r in own]
        axes.plot(x, floors, color=color, ls="--", label=f"B = {batch}, unbiased bound")
        axes.axhline(rows[Cell(width=WIDTHS[-1], batch=batch)].median, color=color, lw=0.6)
    axes.set(
        xscale="log", yscale="log", xlabel="noise_std", title=f"Gaussian noise, M = {WIDTHS[-1]}"
    )


def _dropping(axes: Axes, rows: Rows) -> None:
    base = Cell()
    series = {
        "dropout of units": [replace(base, defense="dropout_units", level=p) for p in RATES],
        "width (1 - p) M": [replace(base, width=round((1 - p) * base.width)) for p in RATES],
        "pruning, zeros": [replace(base, defense="prune_layer", level=p) for p in RATES],
        "pruning, left out": [
            replace(base, defense="prune_layer", level=p, method="left_out") for p in RATES
        ],
    }
    for color, (label, cells) in zip(COLORS, series.items(), strict=True):
        own = rows.of(cells)
        _line(axes, RATES, own, color, label=label)
        axes.plot(RATES, [r.span for r in own], color=color, ls=":")
    axes.set(xlabel="rate (dotted: outside the span)", title="relu, B = 2, M = 8192")


def _share(axes: Axes, shares: Sequence[Withheld]) -> None:
    for color, inputs in zip(COLORS, sorted({s.inputs for s in shares}), strict=False):
        own = [s for s in shares if s.inputs == inputs]
        axes.plot([s.rate for s in own], [fmean(s.shares) for s in own], "o-", color=color, ms=3)
        axes.axvline(inputs / (inputs + 1), color=color, ls=":", label=f"n = {inputs}: n / (n + 1)")
    axes.set(xlabel="share of the gradient pruned", ylabel="p_hat", title="pruned energy")
