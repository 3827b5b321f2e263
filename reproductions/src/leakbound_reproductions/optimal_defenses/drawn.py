"""The paper's figures, redrawn: error against loss, error by level, training curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from leakbound_reproductions.optimal_defenses.figures import layers, plot, save
from leakbound_reproductions.optimal_defenses.points import Key
from leakbound_reproductions.optimal_defenses.settings import (
    CUT,
    EQUAL,
    FIGURES,
    KEPT,
    LOUD,
    MAGNITUDE,
    PRUNED,
)
from leakbound_reproductions.optimal_defenses.settings import OURS as OPTIMAL
from leakbound_reproductions.optimal_defenses.verdicts import Measured, noise, rate
from leakbound_reproductions.outcome import Figure

NAMED = {"noise": "noise level", "pruning": "pruning rate"}
SHOWN = {"noise": "noise", "pruning": "pruning", "color": "pruning of color images"}
LOOKS = (("o-", "#0072b2"), ("s--", "#d55e00"))


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
        colored = {
            "optimal": [rate(PRUNED, level) for level, _ in FIGURES],
            "magnitude": [rate(MAGNITUDE, CUT)],
        }
        found.append(_scatter(measured.on_color, "color", colored, folder, "figure 2"))
    return (*found, _curves(measured, folder), _layers(measured, folder))


def _mean(values: Mapping[int, float]) -> float:
    return float(np.mean(list(values.values())))


def _scatter(
    measured: Measured, kind: str, families: dict[str, list[Key]], folder: Path, paper: str
) -> Figure:
    figure, (axes,) = plot(1, 1, (6, 4.2))
    for (label, keys), (look, color) in zip(families.items(), LOOKS, strict=True):
        x = [_mean(measured.error(key)) for key in keys]
        axes.plot(x, [_mean(measured.losses[key]) for key in keys], look, color=color, label=label)
    axes.set(xscale="log", xlabel="mean squared error of the reconstruction")
    axes.set_ylabel("loss after 5 steps")
    axes.legend(frameon=False)
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
    figure, (axes,) = plot(1, 1, (6, 4.2))
    for (label, keys), (look, color) in zip(families.items(), LOOKS, strict=True):
        levels = [key.level for key in keys]
        values = [_mean(measured.error(key)) for key in keys]
        axes.plot(levels, values, look, color=color, label=label)
    axes.set(yscale="log", ylabel="mean squared error of the reconstruction")
    axes.set_xlabel("noise (root mean square)" if kind == "noise" else "share withheld")
    if kind == "noise":
        axes.set_xscale("log")
    axes.legend(frameon=False)
    save(figure, folder / f"{kind}_error.png")
    return Figure(f"{kind}_error.png", f"Reconstruction error by {NAMED[kind]}.", paper)


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
