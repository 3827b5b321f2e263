"""Draws docs/images/reconstructions.png: true MNIST images and what one attack reconstructs."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from leakbound.audit import parse, run

COLUMNS = 8
ROWS = [
    ("no defense", {"name": "none"}),
    ("Gaussian noise 0.001", {"name": "gaussian_noise", "noise_std": 0.001}),
    ("Gaussian noise 0.01", {"name": "gaussian_noise", "noise_std": 0.01}),
    ("70 % pruned", {"name": "magnitude_pruning", "rate": 0.7}),
    ("99 % pruned", {"name": "magnitude_pruning", "rate": 0.99}),
    ("DP-SGD, multiplier 0.01", {"name": "dp_sgd", "noise_multiplier": 0.01}),
    ("DP-SGD, multiplier 0.1", {"name": "dp_sgd", "noise_multiplier": 0.1}),
]


def main() -> None:
    """Run the experiments and draw them."""
    plan = parse(
        {
            "data": {"source": "mnist5k"},
            "models": [{"name": "simple_convnet"}],
            "attacks": [{"name": "inverting_gradients", "steps": 1000}],
            "defenses": [row for _, row in ROWS],
            "seeds": list(range(COLUMNS)),
        }
    )
    results = {result.id: result for result in run(plan, workers=2)}
    ordered = [results[one.id] for one in plan.experiments()]
    figure = Figure(figsize=(9.2, 8.2), dpi=100, facecolor="white")
    axes = figure.subplots(len(ROWS) + 1, COLUMNS)
    for i, line in enumerate(axes):
        for j, axis in enumerate(line):
            result = ordered[max(i - 1, 0) * COLUMNS + j]
            name = result.record.pictures["truth" if i == 0 else "reconstruction"]
            image = Image.open(io.BytesIO(result.pictures[name]))
            axis.imshow(np.asarray(image), cmap="gray", vmin=0, vmax=255)
            axis.set_xticks([])
            axis.set_yticks([])
            if i:
                axis.set_xlabel(f"{result.record.scores[0]:.0f} dB", fontsize=8)
        label = "true" if i == 0 else ROWS[i - 1][0]
        line[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=10)
    figure.subplots_adjust(left=0.21, right=0.995, top=0.995, bottom=0.03, hspace=0.35, wspace=0.05)
    target = Path(__file__).parent.parent / "docs" / "images" / "reconstructions.png"
    figure.savefig(target)
    print(target)


if __name__ == "__main__":
    main()
