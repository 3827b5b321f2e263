"""Paper C's figures, redrawn, with the corrected distribution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from scipy import stats
from torch import Tensor

from leakbound.bounds import from_scratch, identification
from leakbound.randomness import normal, stream
from leakbound_reproductions import kept
from leakbound_reproductions.mean_to_extreme import trap
from leakbound_reproductions.mean_to_extreme.draws import chi_square
from leakbound_reproductions.mean_to_extreme.grid import Box, Certificate
from leakbound_reproductions.mean_to_extreme.unbiased import (
    unbiased_error,
    unbiased_noise,
    unbiased_success,
)

NOISE = 5e-4
WIDE = 5000.0
"""Noise multiplier and clip norm of figure 2."""
ROWS = 1, 10, 100, 1000, 10_000
PICTURED = 1, 1000
BLUE = "#0072b2"
RED = "#d55e00"
GREEN = "#009e73"
GRAY = "#808080"


def calibration(folder: Path) -> None:
    """Figure 1: noise that keeps the risk at 10 %, against eta, for N = 1 and N = 3,072."""
    with matplotlib.rc_context():
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        for axes, dim, top in zip(figure.subplots(1, 2), (1, 3072), (6.0, 0.9), strict=True):
            e = np.linspace(0.01, top, 200)
            paper = unbiased_noise(0.1, dim=dim, eta=e / dim)
            axes.plot(e, paper, color=BLUE, label="paper C (unbiased attackers)")
            if dim > 1:
                exact = from_scratch.exact.noise_for(0.1, dim=dim, eta=e / dim)
                axes.plot(e, exact, color=RED, label="gamma* (all estimators of the linear trap)")
            else:
                for kappa, mark in ((1 / 11, "o"), (1 / 13, "s")):
                    noise = identification.gaussian.noise_for(0.1, kappa=kappa)
                    label = f"identification, kappa = 1/{round(1 / kappa)}"
                    axes.plot([0], [noise], mark, color=GREEN, label=label)
            axes.set(title=f"N = {dim}", xlabel="e = N eta / |X|^2", ylabel="noise multiplier")
            axes.legend(frameon=False)
        kept.figure(figure, folder / "noise_over_eta.png", 130)


def rows(measured: Mapping[str, Sequence[float]], folder: Path) -> None:
    """Caption of figure 2: variance relative to its minimum, by rows of the linear trap."""
    counts = sorted(map(int, measured))
    line = np.linspace(counts[0], counts[-1], 200)
    found = []
    for count in counts:
        value, interval = chi_square(measured[str(count)], 784)
        low, high = interval(0.95)
        found.append((value, value - low, high - value))
    values, *ends = np.transpose(found)
    with matplotlib.rc_context():
        figure = Figure(figsize=(5, 3.4), layout="constrained")
        axes = figure.subplots()
        axes.plot(line, np.maximum(1, 25 / line), color=BLUE, label="max(1, (C / |X|)² / M)")
        axes.errorbar(counts, values, ends, fmt="o", color=RED, capsize=3, label="measured")
        axes.axvline(25, color=GRAY, ls=":", label="M = (C / |X|)²")
        axes.set(
            xscale="log", xlabel="rows M of the linear trap", ylabel="variance / (sigma² |X|²)"
        )
        axes.legend(frameon=False)
        kept.figure(figure, folder / "trap_rows.png", 130)


def pictured(image: Tensor, folder: Path) -> None:
    """Figure 2: an image (C, H, W) in [0, 1], read from few rows and from enough.

    The mean of the rows is drawn from its law.
    """
    norm = float(image.norm())
    source = stream(0, "paper C", "figure 2")
    shown = {"true image": image}
    reached = []
    spreads = []
    for count in ROWS:
        noise = from_scratch.effective_noise(NOISE, clip_norm=WIDE, norm=norm, rows=count)
        spreads.append(float(noise) * norm)
        guess = image + spreads[-1] * normal(image.shape, source, like=image)
        reached.append(-10 * math.log10(float((guess - image).square().mean())))
        if count in PICTURED:
            shown[f"M = {count:,}: {reached[-1]:.0f} dB"] = guess.clamp(0, 1)
    with matplotlib.rc_context():
        figure = Figure(figsize=(13, 3.4), layout="constrained")
        *panels, last = figure.subplots(1, 1 + len(shown))
        for axes, (title, picture) in zip(panels, shown.items(), strict=True):
            axes.imshow(picture.permute(1, 2, 0).numpy())
            axes.set(title=title, xticks=[], yticks=[])
        last.plot(ROWS, -20 * np.log10(spreads), color=BLUE, label="law")
        last.plot(ROWS, reached, "o", color=RED, label="drawn")
        last.axvline((WIDE / norm) ** 2, color=GRAY, ls=":", label="M = (C / |X|)²")
        last.set(xscale="log", xlabel="rows M of the linear trap", ylabel="PSNR (dB)")
        last.legend(frameon=False)
        kept.figure(figure, folder / "rows_pictured.png", 90)


def surface(folder: Path) -> None:
    """Figure 3: the risk by noise and eta, N = 1 as printed and N = 784 corrected."""
    noise = np.logspace(-1, 1, 60)
    e = np.linspace(0.005, 0.5, 60)
    wide = np.logspace(-2.5, 0, 60)
    with matplotlib.rc_context():
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        panels = (
            ("paper C, N = 1", noise, unbiased_success(noise, dim=1, eta=e[:, None])),
            ("paper C, N = 784", wide, unbiased_success(wide, dim=784, eta=e[:, None] / 784)),
            ("gamma*, N = 784", wide, from_scratch.exact(wide, dim=784, eta=e[:, None] / 784)),
        )
        for axes, (title, x, z) in zip(figure.subplots(1, 3), panels, strict=True):
            mesh = axes.pcolormesh(x, e, z, cmap="cividis", vmin=0, vmax=1, shading="gouraud")
            axes.set(xscale="log", title=title, xlabel="noise multiplier", ylabel="e")
        figure.colorbar(mesh, ax=figure.axes, label="probability")
        kept.figure(figure, folder / "risk_surface.png", 130)


def boxes(rows: Sequence[Box], dim: int, folder: Path) -> None:
    """Figure 4 (N = 4) or 5 (N = 3,072): errors of 500 images by noise, with the distribution."""
    with matplotlib.rc_context():
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        for axes, kind in zip(figure.subplots(1, 3, sharey=True), trap.KINDS, strict=True):
            own = [row for row in rows if (row.dim, row.kind) == (dim, kind)]
            fine = np.logspace(-2.3, 1.3, 100)
            for share, alpha in ((0.95, 0.15), (0.5, 0.3)):
                edges = [
                    unbiased_error(fine, dim=dim, gamma=g, norm=trap.NORM)
                    for g in ((1 - share) / 2, (1 + share) / 2)
                ]
                axes.fill_between(fine, *edges, color=BLUE, alpha=alpha, lw=0)
            boxes = axes.bxp(
                [_drawn(row) for row in own],
                positions=[row.noise for row in own],
                widths=[0.3 * row.noise for row in own],
                manage_ticks=False,
                showfliers=False,
                medianprops={"color": RED},
            )
            for part, lines in boxes.items():
                for line in lines:
                    line.set_label(part)
            zero = axes.axhline(trap.NORM**2 / dim, color=GRAY, ls=":", label="zero image")
            axes.set(xscale="log", yscale="log", title=kind, xlabel="noise multiplier")
        figure.axes[0].set_ylabel("mean squared error")
        figure.axes[0].legend(handles=[zero], frameon=False)
        kept.figure(figure, folder / f"errors_{dim}.png", 130)


def _drawn(row: Box) -> dict[str, float]:
    names = ("whislo", "q1", "med", "q3", "whishi")
    return dict(zip(names, row.quantiles, strict=True))


def certificates(rows: Sequence[Certificate], folder: Path) -> None:
    """What paper C promises, and what the best estimator attains."""
    with matplotlib.rc_context():
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        for axes, dim in zip(figure.subplots(1, 2, sharey=True), trap.DIMS, strict=True):
            own = [row for row in rows if row.dim == dim]
            for level, color in zip(sorted({r.promised for r in own}), "krbg", strict=False):
                line = [row for row in own if row.promised == level]
                noise = [row.noise for row in line]
                axes.plot(noise, [r.exact for r in line], color=color, label=f"promised {level:g}")
                axes.axhline(level, color=color, ls=":", lw=0.8)
                shares = [stats.beta.ppf(0.5, r.hits + 0.5, r.n - r.hits + 0.5) for r in line]
                axes.plot(noise, shares, "o", color=color, ms=4)
            axes.set(xscale="log", yscale="log", ylim=(1e-4, 1.5), title=f"N = {dim}")
            axes.set_xlabel("noise multiplier")
        figure.axes[0].set_ylabel("success (points measured)")
        figure.axes[0].legend(frameon=False)
        kept.figure(figure, folder / "certificates.png", 130)
