"""The paper's figures, redrawn: errors, losses, training curves, reconstructions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leakbound_reproductions.gallery import Strip, draw
from leakbound_reproductions.optimal_defenses.figures import layers, plot, save
from leakbound_reproductions.optimal_defenses.points import Key, first_records
from leakbound_reproductions.optimal_defenses.settings import (
    CUT,
    EQUAL,
    FIGURES,
    KEPT,
    LOUD,
    MAGNITUDE,
    PRUNED,
    Setting,
)
from leakbound_reproductions.optimal_defenses.settings import OURS as OPTIMAL
from leakbound_reproductions.optimal_defenses.verdicts import Measured, noise, rate
from leakbound_reproductions.outcome import Figure

NAMED = {
    "noise": "noise level",
    "pruning": "pruning rate",
    "color_noise": "noise level, on color images",
}
SHOWN = {
    "noise": "noise",
    "pruning": "pruning",
    "color": "pruning on color images",
    "color_noise": "noise on color images",
}
LOOKS = (("o-", "#0072b2"), ("s--", "#d55e00"))
GALLERIES = {
    "naive": ("noise_gallery.png", "figure 11"),
    "color": ("color_gallery.png", "figure 3"),
}
"""By audit: the file of its reconstructions, and the paper's figure."""


def all_figures(measured: Measured, folder: Path) -> tuple[Figure, ...]:
    """Draw them all."""
    setting = measured.setting
    kinds = {
        "noise": (
            {"optimal": OPTIMAL, "equal": EQUAL},
            noise,
            setting.noises,
            ("figure 10", "figure 8"),
        ),
        "pruning": (
            {"optimal": PRUNED, "magnitude": MAGNITUDE},
            rate,
            setting.rates,
            ("figure 7", "figure 5"),
        ),
    }
    found = []
    for kind, (names, key, levels, papers) in kinds.items():
        families = {label: [key(n, level) for level in levels] for label, n in names.items()}
        found.append(_scatter(measured, kind, families, folder, papers[0]))
        found.append(_errors(measured, kind, families, folder, papers[1]))
    if measured.color:
        found += _on_color(measured.on_color, folder)
    found += [_curves(measured, folder), _layers(measured, folder)]
    return (*found, *_galleries(setting, folder))


def _on_color(colored: Measured, folder: Path) -> list[Figure]:
    pruned = {
        "optimal": [rate(PRUNED, level) for level, _ in FIGURES],
        "magnitude": [rate(MAGNITUDE, CUT)],
    }
    levels = colored.setting.color_noises
    noisy = {
        label: [noise(name, level) for level in levels]
        for label, name in (("optimal", OPTIMAL), ("equal", EQUAL))
    }
    return [
        _scatter(colored, "color", pruned, folder, "figure 2"),
        _scatter(colored, "color_noise", noisy, folder, "figure 4"),
        _errors(colored, "color_noise", noisy, folder, "figure 13"),
        _losses(colored, noisy, folder),
    ]


def _galleries(setting: Setting, folder: Path) -> list[Figure]:
    """Reconstructions of the first batch, under the defenses that the paper shows."""
    quiet = max(level for level in setting.noises if level < LOUD)
    shown = {
        "naive": {
            f"equal noise {quiet:g}": noise(EQUAL, quiet),
            f"optimal noise {LOUD:g}": noise(OPTIMAL, LOUD),
        },
        "color": {
            f"{CUT:.0%} magnitude pruning": rate(MAGNITUDE, CUT),
            f"{KEPT:.0%} optimal pruning": rate(PRUNED, KEPT),
        },
    }
    found = []
    for name, defenses in shown.items():
        own = folder / name
        records = first_records(own) if own.exists() else {}
        strips = [
            Strip(label, records[key], own) for label, key in defenses.items() if key in records
        ]
        file, paper = GALLERIES[name]
        if draw({"images": strips}, folder / file):
            caption = "The first batch, and what the paper's attack makes of it under each defense."
            found.append(Figure(file, caption, paper))
    return found


def _mean(values: Mapping[int, float]) -> float:
    return float(np.mean(list(values.values())))


def _scatter(
    measured: Measured, kind: str, families: dict[str, list[Key]], folder: Path, paper: str
) -> Figure:
    figure, axes = _lines(
        families,
        lambda key: (_mean(measured.error(key)), _mean(measured.losses[key])),
    )
    axes.set(xscale="log", xlabel="mean squared error of the reconstruction")
    axes.set_ylabel("loss after 5 steps")
    save(figure, folder / f"{kind}_scatter.png")
    return Figure(
        f"{kind}_scatter.png",
        f"Reconstruction error against the loss after 5 steps, with {SHOWN[kind]}. Lower right is "
        "better.",
        paper,
    )


def _errors(
    measured: Measured, kind: str, families: dict[str, list[Key]], folder: Path, paper: str
) -> Figure:
    figure, axes = _lines(families, lambda key: (key.level, _mean(measured.error(key))))
    axes.set(yscale="log", ylabel="mean squared error of the reconstruction")
    axes.set_xlabel("share withheld" if kind == "pruning" else "noise (root mean square)")
    if kind != "pruning":
        axes.set_xscale("log")
    save(figure, folder / f"{kind}_error.png")
    return Figure(f"{kind}_error.png", f"Reconstruction error by {NAMED[kind]}.", paper)


def _losses(measured: Measured, families: dict[str, list[Key]], folder: Path) -> Figure:
    figure, axes = _lines(families, lambda key: (key.level, _mean(measured.losses[key])))
    axes.set(xscale="log", xlabel="noise (root mean square)", ylabel="loss after 5 steps")
    save(figure, folder / "color_noise_loss.png")
    caption = f"Loss after 5 steps by {NAMED['color_noise']}."
    return Figure("color_noise_loss.png", caption, "figure 12")


def _lines(
    families: Mapping[str, Sequence[Key]], point: Callable[[Key], tuple[float, float]]
) -> tuple[Any, Any]:
    """A line for each of two families, through a point for each of its defenses."""
    figure, (axes,) = plot(1, 1, (6, 4.2))
    for (label, keys), (look, color) in zip(families.items(), LOOKS, strict=True):
        x, y = zip(*map(point, keys), strict=True)
        axes.plot(x, y, look, color=color, label=label)
    axes.legend(frameon=False)
    return figure, axes


def _curves(measured: Measured, folder: Path) -> Figure:
    figure, panels = plot(1, 2, (10, 4.2))
    pairs = (
        {
            f"{KEPT:.0%} optimal pruning": rate(PRUNED, KEPT),
            f"{CUT:.0%} magnitude": rate(MAGNITUDE, CUT),
        },
        {f"optimal noise {LOUD:g}": noise(OPTIMAL, LOUD), "equal noise": noise(EQUAL, LOUD)},
    )
    for axes, pair in zip(panels, pairs, strict=True):
        for (label, key), (look, color) in zip(pair.items(), LOOKS, strict=True):
            curves = list(measured.trained[key].curves.values())
            rounds = sorted(curves[0])
            means = [float(np.mean([curve[at] for curve in curves])) for at in rounds]
            axes.plot(rounds, means, look, color=color, label=label)
        axes.set(xlabel="round", ylabel="training loss")
        axes.legend(frameon=False)
    save(figure, folder / "training.png")
    return Figure(
        "training.png", "Training loss by round, means over seeds.", "figure 6 and figure 9"
    )


def _layers(measured: Measured, folder: Path) -> Figure:
    every = list(measured.layers.values())
    means = {name: float(np.mean([one[name] for one in every])) for name in every[0]}
    layers(means, measured.sizes, folder)
    return Figure(
        "noise_by_layer.png",
        f"Noise of each tensor under optimal noise {LOUD:g}, with its number of parameters.",
        "figure 14",
    )
