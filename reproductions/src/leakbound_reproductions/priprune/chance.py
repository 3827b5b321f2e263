"""Claim 4-0: raw NMI can score noise above a true reconstruction. Which measures do not?

Real images are degraded in known ways (true but partial reconstructions) and compared with
candidates that do not depend on them. Run it with `python -m
leakbound_reproductions.priprune.chance [PICTURE]`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from leakbound import data
from leakbound.core import Batch
from leakbound.metrics import INFORMATION, METRICS, Metric
from leakbound.pairing import Paired
from leakbound.randomness import normal, permutation, stream, uniform
from leakbound_reproductions import kept
from leakbound_reproductions.paired import Gain, gain

IMAGES = 200
SETS = ("digits on black", "digits on white", "photographs", "clear photographs")
CONTRAST = 0.2
"""Smallest standard deviation of the pixels of a clear photograph's tile."""
MEASURES: tuple[Metric, ...] = (*INFORMATION, *(m for m in METRICS if m.name in ("psnr", "ssim")))
NOISE = "uniform noise"
OTHER = "another image"
BLUE = "#0072b2"
RED = "#d55e00"
GRAY = "#808080"

Maker = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Row:
    """One kind of candidate for the images of one set.

    Attributes:
        knows: whether it is made from the true image.
        means: of every measure, with 95 % intervals over the images.
        below_noise, below_other: for every measure, how many images have a lower value for this
            candidate than for noise, and than for another image of the set.
    """

    data: str
    guess: str
    knows: bool
    n: int
    means: dict[str, Gain]
    below_noise: dict[str, int]
    below_other: dict[str, int]


def share(hits: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share (Clopper and Pearson)."""
    found = stats.binomtest(hits, n).proportion_ci(0.95, "exact")
    return float(found.low), float(found.high)


def images(name: str, count: int) -> tuple[Tensor, Tensor]:
    """Images of a set and as many others, both (count, C, H, W) in [0, 1], drawn at random."""
    whole = data.load("photos" if "photographs" in name else "mnist5k").inputs
    if name == "clear photographs":
        whole = whole[whole.flatten(1).std(1) >= CONTRAST]
    drawn = whole[permutation(len(whole), stream(0, "chance", "images"))[: 2 * count]]
    drawn = 1 - drawn if name == "digits on white" else drawn
    return drawn[:count], drawn[count:]


def _at(decibels: float, error: Maker) -> Maker:
    """Add an error scaled to this PSNR, then clamp to [0, 1] (which raises the PSNR)."""

    def spoil(truth: Tensor, source: torch.Generator) -> Tensor:
        added = error(truth, source)
        size = added.flatten(1).square().mean(1).sqrt().reshape(-1, 1, 1, 1)
        return (truth + added / size * 10 ** (-decibels / 20)).clamp(0, 1)

    return spoil


def _smooth(truth: Tensor, source: torch.Generator) -> Tensor:
    coarse = normal((*truth.shape[:2], 3, 3), source)
    return interpolate(coarse, size=truth.shape[2:], mode="bicubic", align_corners=True)


def _noise(truth: Tensor, source: torch.Generator) -> Tensor:
    return normal(truth.shape, source)


def _washed_out(truth: Tensor, source: torch.Generator) -> Tensor:
    return 0.2 + 0.6 * truth + 0.05 * normal(truth.shape, source)


def _blur(truth: Tensor, source: torch.Generator) -> Tensor:
    return interpolate(avg_pool2d(truth, 4), size=truth.shape[2:], mode="bilinear")


def _shuffled(truth: Tensor, source: torch.Generator) -> Tensor:
    rows = [row[permutation(len(row), source)] for row in truth.flatten(1)]
    return torch.stack(rows).reshape(truth.shape)


PARTIAL: dict[str, Maker] = {
    "shading at 20 dB": _at(20, _smooth),
    "shading at 15 dB": _at(15, _smooth),
    "noise at 20 dB": _at(20, _noise),
    "noise at 15 dB": _at(15, _noise),
    "washed out, noise": _washed_out,
    "4 gray levels": lambda truth, _: (truth * 3).round() / 3,
    "2 gray levels": lambda truth, _: (truth > 0.5).float(),
    "blur": _blur,
}
"""True reconstructions, degraded."""

IGNORANT: dict[str, Maker] = {
    NOISE: lambda truth, source: uniform(truth.shape, source),
    "normal noise": lambda truth, source: 0.5 + 0.25 * normal(truth.shape, source),
    "its pixels shuffled": _shuffled,
}
"""Candidates that use no pixel; the last uses how often each gray level occurs."""


def guesses(name: str, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The true images of a set and every candidate for them, by name."""
    truth, others = images(name, count)
    found = {OTHER: others}
    for guess, make in (IGNORANT | PARTIAL).items():
        found[guess] = make(truth, stream(0, "chance", name, guess))
    return truth, found


def rows(count: int = IMAGES) -> list[Row]:
    """Every candidate for `count` images of every set: one to two minutes for 200."""
    found = []
    for name in SETS:
        truth, made = guesses(name, count)
        values = {guess: _values(truth, image) for guess, image in made.items()}
        for guess, own in values.items():
            found.append(
                Row(
                    name,
                    guess,
                    guess in PARTIAL,
                    count,
                    {m: gain(own[m].tolist()) for m in own},
                    *(
                        {m: int((own[m] < values[bar][m]).sum()) for m in own}
                        for bar in (NOISE, OTHER)
                    ),
                )
            )
    return found


def _values(
    truth: Tensor, guess: Tensor
) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    labels = torch.zeros(len(truth), dtype=torch.int64)
    paired = Paired(Batch(truth, labels), guess, None, tuple(range(len(truth))))
    return {
        measure.name: np.array(measure.function(paired, data_range=1.0), dtype=np.float64)
        for measure in MEASURES
    }


def table(found: Sequence[Row]) -> list[str]:
    """Means, and the share of images for which noise, and another image, score higher."""
    lines = [
        "| images | candidate | NMI | 16 bins | AMI | PSNR | SSIM "
        "| noise above it by NMI | 16 bins | AMI, PSNR, SSIM | another image above it by NMI "
        "| AMI | PSNR |",
        "|---|---|--:|--:|--:|--:|--:|---|---|---|---|---|---|",
    ]
    for row in found:
        means = (f"{row.means[m.name].mean:.{1 if m.unit else 2}f}" for m in MEASURES)
        cells = [row.data, row.guess, *means]
        if row.knows:
            three = (row.below_noise[m] for m in ("adjusted_mi", "psnr", "ssim"))
            cells += [
                _percent(row.below_noise["nmi"], row.n),
                _percent(row.below_noise["binned_nmi"], row.n),
                ", ".join(f"{hits / row.n:.0%}" for hits in three),
                *(_percent(row.below_other[m], row.n) for m in ("nmi", "adjusted_mi", "psnr")),
            ]
        else:
            cells += ["–"] * 6
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _percent(hits: int, n: int) -> str:
    low, high = share(hits, n)
    return f"{hits / n:.0%} ({low:.0%} to {high:.0%})"


def draw(found: Sequence[Row], path: Path) -> None:
    """Four measures on average, with each set's image of the highest contrast."""
    shown = [m for m in MEASURES if m.name != "binned_nmi"]
    names = list(dict.fromkeys(row.data for row in found))
    with matplotlib.rc_context({"font.size": 8}):
        figure = Figure(figsize=(10, 4.1 * len(names)), layout="constrained")
        ratios = [0.35, *[1] * len(shown)]
        axes = figure.subplots(len(names), len(shown) + 1, width_ratios=ratios, squeeze=False)
        for line, name in zip(axes, names, strict=True):
            own = [row for row in found if row.data == name]
            own.sort(key=lambda row: row.means["nmi"].mean)
            _thumbnails(line[0], name, own)
            for axis, measure in zip(line[1:], shown, strict=True):
                _panel(axis, own, measure)
        kept.figure(figure, path, 85)


def _thumbnails(axes: Axes, name: str, own: Sequence[Row]) -> None:
    truth, made = guesses(name, own[0].n)
    clearest = int(truth.flatten(1).std(1).argmax())
    pictures = [truth[clearest], *(made[row.guess][clearest] for row in reversed(own))]
    column = torch.cat([p.clamp(0, 1).expand(3, -1, -1) for p in pictures], dim=1)
    axes.imshow(column.permute(1, 2, 0).numpy(), extent=(0, 1, -0.5, len(own) + 0.5), aspect="auto")
    axes.set(xticks=[], ylim=(-0.5, len(own) + 0.5), title=f"{name}, n = {own[0].n}")
    axes.set_yticks(range(len(own) + 1), [*(row.guess for row in own), "the true image"])


def _panel(axes: Axes, own: Sequence[Row], measure: Metric) -> None:
    for height, row in enumerate(own):
        mean = row.means[measure.name]
        color = BLUE if row.knows else RED
        axes.errorbar(
            [mean.mean], [height], xerr=[[mean.mean - mean.low], [mean.high - mean.mean]],
            fmt="o" if row.knows else "x", color=color, ms=5,
        )  # fmt: skip
    (noise,) = (row.means[measure.name].mean for row in own if row.guess == NOISE)
    axes.axvline(noise, color=GRAY, ls=":", lw=1)
    unit = f" ({measure.unit})" if measure.unit else ""
    axes.set(ylim=(-0.5, len(own) + 0.5), yticks=[], title=measure.name + unit)


if __name__ == "__main__":
    measured = rows()
    print("\n".join(table(measured)))
    drawn = [row for row in measured if row.data != "digits on white"]  # as on black, nearly
    draw(drawn, Path(sys.argv[1] if len(sys.argv) > 1 else "nmi_chance.png"))
