"""Pictures of the study: leakage against rate, accuracy against leakage, reconstructions."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from leakbound_reproductions import kept
from leakbound_reproductions.priprune import cell as cells
from leakbound_reproductions.priprune.comparisons import at_rate, by_scheme
from leakbound_reproductions.priprune.measured import ATTACKS, Measured, rate_of

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
PAPER = "sgi"


def draw(found: Measured, folder: Path) -> None:
    """All pictures for which there are experiments."""
    with matplotlib.rc_context():
        for name, part, make in (
            ("rate", "rate", _rate),
            ("tradeoff", "defended", _tradeoff),
            ("gallery", "defended", _gallery),
        ):
            own = found.where(part=part)
            if own.pairs:
                figure = make(own)
                kept.figure(figure, folder / f"{name}.png", 90)


def _rate(found: Measured) -> Figure:
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    rates = sorted({rate_of(cell) for cell, _ in found.pairs})
    for color, (name, own) in zip(COLORS, by_scheme(found).items(), strict=False):
        for axes, dense, ours in ((left, False, "sgi"), (right, True, "sgi_pruned")):
            part = own.where(dense_server=dense)
            for attack, line in ((ours, "-"), ("gi", ":")):
                known = [r for r in rates if at_rate(part, r).leak(attack)]
                values = [fmean(at_rate(part, r).leak(attack).values()) for r in known]
                label = name if attack != "gi" else None
                axes.plot(known, values, line, color=color, marker="o", ms=3, label=label)
    left.set(title="server and client share the mask", xlabel="rate", ylabel="PSNR (dB)")
    right.set(title="the client prunes a dense model", xlabel="rate")
    left.legend(fontsize=7, frameon=False)
    right.plot([], [], "k-", label="SGI")
    right.plot([], [], "k:", label="GI (blind)")
    right.legend(fontsize=7, frameon=False)
    return figure


def _tradeoff(found: Measured) -> Figure:
    marks = sorted({m for cell, _ in found.pairs for m in cell.marks} - {1})
    figure = Figure(figsize=(4.4 * len(marks), 4), layout="constrained")
    for axes, mark in zip(figure.subplots(1, len(marks), squeeze=False)[0], marks, strict=True):
        for defense in found.values("defense"):
            own = found.where(defense=defense)
            accuracy = fmean(own.accuracy().values())
            weak = fmean(own.leak(PAPER, "psnr", mark).values())
            strong = fmean(own.strongest(mark)[1].values())
            color = COLORS[_kind(defense)]
            axes.plot([weak, strong], [accuracy, accuracy], color=color, lw=1)
            axes.plot(weak, accuracy, "o", mfc="white", mec=color)
            axes.plot(strong, accuracy, "o", color=color)
            axes.annotate(
                _short(defense), (strong, accuracy), (4, 3), "data", "offset points", fontsize=6
            )
        axes.set(title=f"round {mark}", xlabel="PSNR (dB): open, SGI; full, strongest attack")
        axes.set_ylabel("accuracy at the end (%)")
    return figure


def _kind(defense: str) -> int:
    if defense == "none":
        return 0
    if defense.startswith("pri_prune"):
        return 1
    return 3 if "pseudo=false" in defense else 2


def _short(defense: str) -> str:
    parts = defense.replace("pri_prune", "PriPrune").replace("withhold,rule=", "").split(",")
    words = [p for p in parts if not p.startswith("sharing")]
    return " ".join(w.replace("pseudo=false", "real").replace("rate=", "") for w in words)


def _gallery(found: Measured) -> Figure:
    """Seed 0: a row for each defense, a column for each attacked round, its strongest attack."""
    own = found.where(seed=0)
    marks = sorted({m for cell, _ in own.pairs for m in cell.marks})
    figure = Figure(
        figsize=(1.3 * (len(marks) + 1) + 2, 1.25 * len(own.pairs)), layout="constrained"
    )
    grid = figure.subplots(len(own.pairs), len(marks) + 1, squeeze=False)
    for row, (cell, record) in zip(grid, own.pairs, strict=True):
        shape = (cell.size, cell.size)
        row[0].imshow(cells.truth(cell)[0, 0].numpy(), cmap="gray", vmin=0, vmax=1)
        row[0].set_ylabel(_short(cell.defense), fontsize=6, rotation=0, ha="right")
        for axes, mark in zip(row[1:], marks, strict=True):
            rows = [a for a in record["attacked"] if a["round"] == mark and a.get("guess")]
            if not rows:
                continue
            best = max(rows, key=lambda a: (a["psnr"][0], -ATTACKS.index(a["attack"])))
            axes.imshow(np.array(best["guess"]).reshape(shape), cmap="gray", vmin=0, vmax=255)
            axes.set_title(f"{best['attack']} {best['psnr'][0]:.0f} dB", fontsize=6)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
    for axes, title in zip(grid[0], ("true", *(f"round {m}" for m in marks)), strict=True):
        axes.set_xlabel(title, fontsize=7)
        axes.xaxis.set_label_position("top")
    return figure
