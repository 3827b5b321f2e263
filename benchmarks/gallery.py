"""Draws docs/images/gallery: what attacks rebuild, from real runs on data inside packages.

    python benchmarks/gallery.py [NAME ...]

Beside each picture stands what was measured, in numbers.json; docs/gallery.md quotes it, and a test
compares the two.
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
from matplotlib.figure import Figure
from PIL import Image

from leakbound.assess.measure import GAP
from leakbound.audit import Result, parse, run

FOLDER = Path(__file__).parent.parent / "docs" / "images" / "gallery"
SEEDS = 8
EXPOSED = 20.0
COLORS = 128
"""Of a drawn picture, so that its file stays small."""
Rows = Sequence[tuple[str, Mapping[str, Any]]]


def cells(plan: Mapping[str, Any]) -> list[Result]:
    """A plan's results, in its order: defenses, then attacks, then seeds."""
    parsed = parse({"seeds": list(range(SEEDS)), "error_bound": {"kind": "none"}} | dict(plan))
    found = {result.id: result for result in run(parsed, workers=1)}
    return [found[cell.id] for cell in parsed.experiments()]


def picture(result: Result, name: str) -> np.ndarray:
    """One picture of a cell: its images side by side as they are stored."""
    file = result.pictures[result.record.pictures[name]]
    return np.asarray(Image.open(io.BytesIO(file)))


def psnr(result: Result) -> list[float]:
    """Of every image of a cell."""
    return list(result.record.psnr)


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
    results = cells({**plan, "defenses": [defense for _, defense in rows]})
    lines = [("true", [(picture(r, "truth"), "") for r in results[:SEEDS]])]
    told = {}
    for place, (label, _) in enumerate(rows):
        mine = results[place * SEEDS : (place + 1) * SEEDS]
        lines.append(
            (label, [(picture(r, "reconstruction"), f"{psnr(r)[0]:.0f} dB") for r in mine])
        )
        told[label] = said([psnr(r)[0] for r in mine])
    draw(name, lines)
    return {"n": SEEDS, "psnr": told}


def noise() -> dict[str, Any]:
    """One attack on color photographs under growing noise."""
    plan = {
        "data": {"source": "photos", "size": 32},
        "models": [{"name": "simple_convnet"}],
        "attacks": [{"name": "inverting_gradients", "steps": 300}],
    }
    levels = (0.001, 0.003, 0.01, 0.03)
    rows = [("no noise", {"name": "none"})] + [
        (f"noise {level:g}", {"name": "gaussian_noise", "noise_std": level}) for level in levels
    ]
    return by_defense("noise", plan, rows)


def trap() -> dict[str, Any]:
    """The best attack on a planted linear layer, under differential privacy."""
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
    """A batch of 16, read out of a planted layer and matched by an honest server."""
    batch = 16
    common = {"data": {"source": "mnist5k"}, "batch_sizes": [batch]}
    honest = cells(
        common
        | {
            "models": [{"name": "simple_convnet"}],
            "attacks": [{"name": "inverting_gradients", "steps": 1000}],
            "seeds": list(range(4)),
        }
    )
    planted = cells(
        common
        | {
            "models": [{"name": "simple_convnet"}],
            "attacks": [{"name": "robbing_the_fed", "bins": 512}],
            "threat": {"server": "malicious"},
        }
    )
    lines: list[tuple[str, Any]] = []
    told = {}
    for label, results in (("honest server", honest), ("planted layer", planted)):
        found = np.array([psnr(r) for r in results])
        told[label] = {
            "psnr": said(list(found.flat)),
            "rebuilt": f"{int(np.sum(found >= EXPOSED))} of {found.size}",
        }
        notes = [f"{value:.0f} dB" for value in psnr(results[0])]
        rebuilt = _tiles(results[0], "reconstruction")
        lines += [] if lines else [("true", [(i, "") for i in _tiles(results[0], "truth")])]
        lines.append((label, list(zip(rebuilt, notes, strict=True))))
    draw("malicious", [(label, line[:SEEDS]) for label, line in lines])
    return told


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
    results = cells(plan)
    lines = [("true", [(picture(r, "truth"), "") for r in results[:SEEDS]])]
    told: dict[str, Any] = {"n": SEEDS}
    for place, label in enumerate(levels):
        mine = results[place * SEEDS : (place + 1) * SEEDS]
        rebuilt = [(picture(r, "reconstruction"), f"{psnr(r)[0]:.0f} dB") for r in mine]
        lines.append((label, rebuilt))
        lines.append(("its leak map", [(picture(r, "leak_map"), "") for r in mine]))
        told[label] = {"psnr": said([psnr(r)[0] for r in mine])}
    draw("leak_map", lines)
    return told


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
