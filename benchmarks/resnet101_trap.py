"""Paper C's linear trap beside a ResNet-101: adds to docs/results/mean_to_extreme_results.json.

    python benchmarks/resnet101_trap.py [IMAGES]

The reproduction takes a ResNet-18. Here are both, with group norms, at 224 x 224 pixels.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from leakbound import data
from leakbound_reproductions.mean_to_extreme import grid, trap

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import stored

PAGE = stored.FOLDER / "mean_to_extreme_results.json"
HEADING = "ResNet-101"
SIDE, REPEATS, TILES = 224, 20, 4000
WORDS = (
    "The paper's norm sink, a ResNet-101 with group norms of {weights:.1f} million weights, beside "
    "the ResNet-18 that claim 3-3 uses (`benchmarks/resnet101_trap.py`; random weights, 224 × 224 "
    "pixels, {images} images, 20 draws each). *Excess*: error of the paper's attacker over that of "
    "the law without a sink (mean, standard deviation over images). *Distance*: between errors of "
    "an attacker who knows the sink and the law with its effective noise (Kolmogorov)."
)
HEADS = ["N", "sink", "gradient norm", "noise", "excess", "distance"]


def main(images: str = "40") -> None:
    """Measure both networks."""
    torch.set_num_threads(1)
    count = int(images)
    rows = []
    for dim in trap.DIMS:
        size, channels = (2, 1) if dim == 4 else (32, 3)
        source = data.load("photos", size=size, channels=channels, limit=TILES)
        inputs = trap.images(source, count)
        for kind in trap.NETWORKS:
            began = time.perf_counter()
            found = trap.Records(inputs, trap.rest(inputs, kind, side=SIDE))
            print(dim, kind, f"{time.perf_counter() - began:.0f} s", flush=True)
            for noise in trap.PRINTED:
                box = grid.box(found, dim, kind, noise, REPEATS)
                mean, spread = box.excess
                rows.append(
                    [
                        f"{dim:,}",
                        kind,
                        f"{float(found.rest.mean()):.2f}",
                        f"{noise:g}",
                        f"{mean:.3g} ± {spread:.2g}",
                        f"{box.fit:.3f}",
                    ]
                )
                print(" | ".join(rows[-1]), flush=True)
    network = trap.NETWORKS["ResNet-101"](SIDE, torch.Generator().manual_seed(0))
    weights = sum(weight.numel() for weight in network.parameters()) / 1e6
    page = json.loads(PAGE.read_text("utf-8"))
    said = WORDS.format(weights=weights, images=count)
    table = {"columns": HEADS, "align": "rlrrrr", "rows": rows}
    page["sections"] = [one for one in page["sections"] if one.get("heading") != HEADING]
    page["sections"].append({"heading": HEADING, "body": [said, table]})
    PAGE.write_text(stored.dumps(page), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
