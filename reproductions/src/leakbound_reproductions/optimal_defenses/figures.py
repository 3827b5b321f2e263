"""The figures of the study: privacy against utility, training curves, noise by layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from leakbound_reproductions import kept
from leakbound_reproductions.optimal_defenses.claims import COSTS, LAYERS, NOISES, RATES, Study
from leakbound_reproductions.optimal_defenses.points import Key

FAMILIES: dict[str, list[tuple[str, list[Key]]]] = {
    "noise": [
        ("equal noise", [Key("gaussian_noise", "noise_std", x) for x in NOISES]),
        ("local, RMS", [Key("local_optimal_noise", "noise_std", x) for x in NOISES]),
        ("local, U2", [Key("local_optimal_noise", "utility_std", x) for x in COSTS]),
        ("public, utility rule", [Key("optimal_noise", "noise_std", x) for x in NOISES]),
        ("public, energy, layers", [Key("optimal_noise", "noise_std", x, LAYERS) for x in NOISES]),
    ],
    "pruning": [
        ("magnitude", [Key("magnitude_pruning", "rate", x) for x in RATES]),
        ("local optimal", [Key("local_optimal_pruning", "rate", x) for x in RATES]),
        ("public optimal", [Key("optimal_pruning", "rate", x) for x in RATES]),
    ],
}
MARKERS = "osD^v"


def scatter(study: Study, kind: str, folder: Path) -> Path:
    """Error against training loss after 5 rounds, for both attackers (figures 7 and 10)."""
    figure, axes = plot(1, 2, (10, 4.2))
    for axis, attacker in zip(axes, ("naive", "aware"), strict=True):
        for marker, (label, keys) in zip(MARKERS, FAMILIES[kind], strict=False):
            errors = [float(np.mean(list(study.error(k, attacker).values()))) for k in keys]
            losses = [float(np.mean(list(study.loss(k).values()))) for k in keys]
            axis.plot(errors, losses, marker=marker, label=label, linewidth=1)
        axis.set_xscale("log")
        axis.set_xlabel("mean squared error of the reconstruction")
        axis.set_title({"naive": "the paper's attack", "aware": "best attack that knows"}[attacker])
    axes[0].set_ylabel("training loss after 5 rounds")
    axes[0].legend(fontsize=8)
    return save(figure, folder / f"{kind}_scatter.png")


def errors(study: Study, kind: str, folder: Path) -> Path:
    """Error against the level of the defense (figures 5, 8 and 13)."""
    figure, axes = plot(1, 2, (10, 4.2))
    for axis, attacker in zip(axes, ("naive", "aware"), strict=True):
        for marker, (label, keys) in zip(MARKERS, FAMILIES[kind], strict=False):
            values = [float(np.mean(list(study.error(k, attacker).values()))) for k in keys]
            levels = [key.level for key in keys]
            axis.plot(levels, values, marker=marker, label=label, linewidth=1)
        axis.set_yscale("log")
        if kind == "noise":
            axis.set_xscale("log")
        axis.set_xlabel("noise level (gradient units)" if kind == "noise" else "share withheld")
        axis.set_title({"naive": "the paper's attack", "aware": "best attack that knows"}[attacker])
    axes[0].set_ylabel("mean squared error")
    axes[0].legend(fontsize=8)
    return save(figure, folder / f"{kind}_error.png")


def layers(stds: Mapping[str, float], sizes: Mapping[str, int], folder: Path) -> Path:
    """The local form's noise in each tensor (figure 14)."""
    figure, axes = plot(1, 1, (7, 3.6))
    axis = axes[0]
    names = list(stds)
    axis.bar(range(len(names)), [stds[name] for name in names], color="#4878a8")
    axis.set_xticks(range(len(names)))
    labels = [f"{name}\n{sizes[name]:,}" for name in names]
    axis.set_xticklabels(labels, fontsize=7)
    axis.set_yscale("log")
    axis.set_ylabel("RMS noise in the tensor")
    return save(figure, folder / "noise_by_layer.png")


def plot(height: int, width: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure with a row of panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(height, width, squeeze=False)[0]
    for axis in axes:
        axis.grid(visible=True, alpha=0.3)
        axis.tick_params(axis="x", which="both", labelrotation=30, labelsize=8)
    return figure, axes


def save(figure: Any, path: Path) -> Path:
    """Write it; the same figure gives the same bytes."""
    kept.figure(figure, path, 110)
    return path
