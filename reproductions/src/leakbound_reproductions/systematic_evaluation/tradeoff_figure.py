"""BestAttackError against training loss: paper B's figure 3."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from leakbound_reproductions import kept
from leakbound_reproductions.systematic_evaluation.measured import HONEST, Measured, family

LOOKS = (
    ("#0072b2", "o"),
    ("#d55e00", "s"),
    ("#009e73", "D"),
    ("#cc79a7", "^"),
    ("#e69f00", "v"),
    ("#56b4e9", "P"),
    ("#000000", "X"),
    ("#999999", "*"),
    ("#8c564b", "h"),
    ("#bcbd22", "<"),
    ("#17becf", ">"),
    ("#7f3c8d", "p"),
)


def draw(found: Measured, path: Path) -> None:
    """One panel for each set of images and batch size, against an honest server."""
    panels = [(data, batch) for data in found.data for batch in found.batches(data)]
    with matplotlib.rc_context():
        figure = Figure(figsize=(4.6 * len(panels), 4.2), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, (data, batch) in zip(axes, panels, strict=True):
            _panel(axis, found, data, batch)
        axes[0].set_ylabel("error that the strongest attack leaves (RMSE)")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
        kept.figure(figure, path, 120)


def _panel(axes: Axes, found: Measured, data: str, batch: int) -> None:
    losses = found.trained(data)
    strengths = found.strengths(data, batch, HONEST)
    names = list(dict.fromkeys(family(defense) for defense in strengths))
    for (color, marker), name in zip(LOOKS, names, strict=False):
        own = [d for d in strengths if family(d) == name and losses.get(d)]
        x = [fmean(losses[d].values()) for d in own]
        y = [strengths[d].rmse for d in own]
        low = [strengths[d].rmse - strengths[d].low for d in own]
        high = [strengths[d].high - strengths[d].rmse for d in own]
        if own:
            axes.errorbar(
                x, y, [low, high], color=color, marker=marker, lw=0.8, elinewidth=0.5, label=name
            )
        for defense, across, up in zip(own, x, y, strict=True):
            level = defense.removeprefix(name).strip()
            axes.annotate(level, (across, up), (3, 3), textcoords="offset points", fontsize=5)
    axes.axhline(fmean(s.baseline for s in strengths.values()), color="gray", ls=":", lw=1)
    axes.set(title=f"{data}, B = {batch}", xlabel="training loss after the last round")
