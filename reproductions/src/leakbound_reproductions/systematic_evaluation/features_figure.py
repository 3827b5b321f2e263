"""PSNR of paper B's attack with and without its features: paper B's figure 4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.figure import Figure

from leakbound_reproductions import kept
from leakbound_reproductions.systematic_evaluation.measured import Measured
from leakbound_reproductions.systematic_evaluation.parts import HONEST

VARIANTS = {"with features": HONEST[0], "without": "without features"}
COLORS = "#0072b2", "#d55e00"
WIDTHS = 0.8, 0.4
"""Of bars one before the other, so that both stand at their defense."""


def draw(found: Measured, path: Path) -> bool:
    """One panel for each set of images, bars for each defense; False without experiments.

    Lines run from the lowest to the highest round.
    """
    tables = {data: found.ablation(data, longest=True) for data in found.data}
    tables = {
        data: {
            defense: own
            for defense, own in table.items()
            if all(own.get(name) for name in VARIANTS.values())
        }
        for data, table in tables.items()
    }
    tables = {data: table for data, table in tables.items() if table}
    if not tables:
        return False
    with matplotlib.rc_context():
        figure = Figure(figsize=(5.6 * len(tables), 4), layout="constrained")
        panels = figure.subplots(1, len(tables), squeeze=False, sharey=True)[0]
        for axes, (data, table) in zip(panels, tables.items(), strict=True):
            places = range(len(table))
            axes.set_xticks(places, list(table), rotation=60, ha="right", fontsize=7)
            for (label, name), color, wide in zip(VARIANTS.items(), COLORS, WIDTHS, strict=True):
                every = [_decibels(own[name]) for own in table.values()]
                means = [fmean(own) for own in every]
                axes.bar(places, means, wide, color=color, label=label)
                low, high = zip(*((min(own), max(own)) for own in every), strict=True)
                axes.vlines(places, low, high, color="k", lw=0.8)
            axes.set(title=data)
        panels[0].set_ylabel("PSNR (dB)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        kept.figure(figure, path, 100)
    return True


def _decibels(errors: Mapping[int, float]) -> list[float]:
    return [-10 * math.log10(error) for error in errors.values()]
