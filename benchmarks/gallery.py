"""Draws docs/images/gallery: what attacks reconstruct, from real runs on data inside packages.

    python benchmarks/gallery.py [NAME ...]

numbers.json holds what was measured; docs/gallery.md quotes it, and a test compares the two.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from leakbound import Batch, models, simulate, stream
from leakbound.assess.measure import GAP
from leakbound.audit import Result, parse, run

FOLDER = Path(__file__).parent.parent / "docs" / "images" / "gallery"
SEEDS = 8
EXPOSED = 20.0
COLORS = 128
"""Of a drawn picture, so that its file stays small."""
Rows = Sequence[tuple[str, Mapping[str, Any]]]


def experiments(plan: Mapping[str, Any]) -> list[Result]:
    """A plan's results, in its order: defenses, then attacks, then seeds."""
    parsed = parse({"seeds": list(range(SEEDS)), "error_bound": {"kind": "none"}} | dict(plan))
    found = {result.id: result for result in run(parsed, workers=1)}
    return [found[one.id] for one in parsed.experiments()]


def picture(result: Result, name: str) -> np.ndarray:
    """One picture of an experiment: its images side by side as they are stored."""
    file = result.pictures[result.record.pictures[name]]
    return np.asarray(Image.open(io.BytesIO(file)))


def psnr(result: Result) -> list[float]:
    """Of every image of an experiment."""
    return list(result.record.scores)


def said(values: Sequence[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.1f} dB ({min(values):.1f} to {max(values):.1f})"


def draw(name: str, lines: Sequence[tuple[str, Sequence[tuple[np.ndarray, str]]]]) -> None:
    """Lines of pictures, each with a label in front and a note below every picture."""
    columns = max(len(line) for _, line in lines)
    high = 1.02 * len(lines) + 0.05
    figure = Figure(figsize=(1.9 + 0.92 * columns, high), dpi=90, facecolor="white")
    axes = figure.subplots(len(lines), columns, squeeze=False)
    for (label, line), row in zip(lines, axes, strict=True):
        for axis in row:
            axis.set_xticks([])
            axis.set_yticks([])
        for axis, (image, note) in zip(row, line, strict=False):
            axis.imshow(image, cmap="gray", vmin=0, vmax=255)
            axis.set_xlabel(note, fontsize=8, labelpad=2)
        row[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9)
    left = 1.8 / figure.get_figwidth()
    figure.subplots_adjust(left=left, right=0.995, top=0.99, bottom=0.05, hspace=0.3, wspace=0.06)
    drawn = io.BytesIO()
    figure.savefig(drawn)
    FOLDER.mkdir(parents=True, exist_ok=True)
    small = Image.open(drawn).convert("RGB").quantize(COLORS)
    small.save(FOLDER / f"{name}.png", optimize=True)


def by_defense(name: str, plan: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
    """One attack under several defenses: true images, then a line for each defense."""
    results = experiments({**plan, "defenses": [defense for _, defense in rows]})
    lines = [("true", [(picture(r, "truth"), "") for r in results[:SEEDS]])]
    measured = {}
    for place, (label, _) in enumerate(rows):
        mine = results[place * SEEDS : (place + 1) * SEEDS]
        lines.append(
            (label, [(picture(r, "reconstruction"), f"{psnr(r)[0]:.0f} dB") for r in mine])
        )
        measured[label] = said([psnr(r)[0] for r in mine])
    draw(name, lines)
    return {"n": SEEDS, "psnr": measured}


SIDE = 48
CROPS: Mapping[str, tuple[int, int, int, int]] = {
    "astronaut": (110, 10, 330, 230),
    "chelsea": (95, 5, 365, 275),
    "coffee": (100, 0, 500, 400),
    "china.jpg": (150, 0, 577, 427),
    "flower.jpg": (130, 0, 557, 427),
    "stereo_motorcycle": (120, 0, 620, 500),
    "rocket": (190, 60, 450, 320),
    "retina": (0, 0, 1411, 1411),
}
"""Photographs of scikit-image and scikit-learn, each with its square (left, top, right, bottom)."""


def photographs() -> Tensor:
    """(8, 3, SIDE, SIDE) photographs, each as large as its square allows."""
    from skimage import data
    from sklearn.datasets import load_sample_image

    found = []
    for name, square in CROPS.items():
        whole = load_sample_image(name) if name.endswith(".jpg") else getattr(data, name)()
        image = Image.fromarray(whole[0] if isinstance(whole, tuple) else whole)
        small = image.crop(square).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
        found.append(torch.from_numpy(np.asarray(small) / 255.0).permute(2, 0, 1).float())
    return torch.stack(found)


def noise() -> dict[str, Any]:
    """One attack on color photographs under growing noise, a model and an update for each."""
    images = photographs()
    rows = {"no noise": "none"}
    rows |= {f"noise {s:g}": f"gaussian_noise,noise_std={s:g}" for s in (0.001, 0.003, 0.01, 0.03)}
    lines = [("true", [(_shown(image), "") for image in images])]
    found = {}
    for label, defense in rows.items():
        played = [_attacked(images, place, defense) for place in range(len(images))]
        values = [result.psnr[0] for result in played]
        shown = [_shown(result.reconstruction[0]) for result in played]
        lines.append((label, [(i, f"{v:.0f} dB") for i, v in zip(shown, values, strict=True)]))
        found[label] = said(values)
    draw("noise", lines)
    return {"n": len(images), "psnr": found}


def _attacked(images: Tensor, place: int, defense: str) -> Any:
    """One image, one update of an untrained model that knows eight classes."""
    made = models.simple_convnet(
        input_shape=tuple(images.shape[1:]), classes=len(images), generator=stream(place, "model")
    )
    batch = Batch(images[place : place + 1], torch.tensor([place]))
    attack = "inverting_gradients,steps=300"
    return simulate(made, batch, defense=defense, attack=attack, seed=place, error_bound="none")


def _shown(image: Tensor) -> np.ndarray:
    """An image of values between 0 and 1 as pixels."""
    return np.asarray((image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0))


def trap() -> dict[str, Any]:
    """The best attack on a linear trap, under differential privacy."""
    plan = {
        "data": {"source": "mnist5k"},
        "models": [{"name": "mlp"}],
        "attacks": [{"name": "linear_trap"}],
        "threat": {"server": "malicious"},
    }
    levels = (0.001, 0.003, 0.01, 0.03, 0.1, 1.0)
    rows = [
        (f"multiplier {level:g}", {"name": "dp_sgd", "noise_multiplier": level}) for level in levels
    ]
    return by_defense("trap", plan, rows)


def malicious() -> dict[str, Any]:
    """A batch of 16, reconstructed by a malicious layer and by an honest server."""
    batch = 16
    common = {"data": {"source": "mnist5k"}, "batch_sizes": [batch]}
    honest = experiments(
        common
        | {
            "models": [{"name": "simple_convnet"}],
            "attacks": [{"name": "inverting_gradients", "steps": 1000}],
            "seeds": list(range(4)),
        }
    )
    malicious_layer = experiments(
        common
        | {
            "models": [{"name": "simple_convnet"}],
            "attacks": [{"name": "robbing_the_fed", "bins": 512}],
            "threat": {"server": "malicious"},
        }
    )
    lines: list[tuple[str, Any]] = []
    measured = {}
    for label, results in (("honest server", honest), ("malicious layer", malicious_layer)):
        found = np.array([psnr(r) for r in results])
        measured[label] = {
            "psnr": said(list(found.flat)),
            "reconstructed": f"{int(np.sum(found >= EXPOSED))} of {found.size}",
        }
        notes = [f"{value:.0f} dB" for value in psnr(results[0])]
        answers = _tiles(results[0], "reconstruction")
        lines += [] if lines else [("true", [(i, "") for i in _tiles(results[0], "truth")])]
        lines.append((label, list(zip(answers, notes, strict=True))))
    draw("malicious", [(label, line[:SEEDS]) for label, line in lines])
    return measured


def _tiles(result: Result, name: str) -> list[np.ndarray]:
    """The images of a batch, which the audit stores side by side."""
    sheet, wide = picture(result, name), result.record.data.shape[2]
    return [sheet[:, x : x + wide] for x in range(0, sheet.shape[1], wide + GAP)]


def leak_map() -> dict[str, Any]:
    """Which pixels an attacker may know, under two levels of noise."""
    levels = {"noise 0.1": 0.1, "noise 0.3": 0.3}
    plan = {
        "data": {"source": "mnist5k"},
        "models": [{"name": "mlp", "activation": "tanh"}],  # smooth: its bounds are proved
        "attacks": [{"name": "inverting_gradients", "steps": 1000}],
        "error_bound": {"kind": "full"},
        "defenses": [{"name": "gaussian_noise", "noise_std": level} for level in levels.values()],
    }
    results = experiments(plan)
    lines = [("true", [(picture(r, "truth"), "") for r in results[:SEEDS]])]
    measured: dict[str, Any] = {"n": SEEDS}
    for place, label in enumerate(levels):
        mine = results[place * SEEDS : (place + 1) * SEEDS]
        answers = [(picture(r, "reconstruction"), f"{psnr(r)[0]:.0f} dB") for r in mine]
        lines.append((label, answers))
        lines.append(("its leak map", [(picture(r, "leak_map"), "") for r in mine]))
        measured[label] = {"psnr": said([psnr(r)[0] for r in mine])}
    draw("leak_map", lines)
    return measured


PICTURES = {"leak_map": leak_map, "noise": noise, "trap": trap, "malicious": malicious}


def main() -> None:
    """Draw the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PICTURES)}")
    file = FOLDER / "numbers.json"
    for name in parser.parse_args().names or PICTURES:
        print(f"drawing {name}", flush=True)
        found = PICTURES[name]()
        known = json.loads(file.read_text("utf-8")) if file.exists() else {}
        known[name] = found
        file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
