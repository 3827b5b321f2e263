"""What attacks on vision transformers reconstruct: prints two tables.

Crops of scikit-learn's two photographs, built-in `vit` with 3 layers and random weights, labels
known, float32 gradients. One image: `patch_inversion`, on 8-bit pixels and on pixels moved by up to
half a step. Several: `patch_span`. About 10 minutes, 1 thread.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

import leakbound as lb
from leakbound.randomness import stream, uniform

SINGLE = ((32, 4, 192), (224, 16, 384), (224, 16, 768))
SEVERAL = ((16, 8, 64, 2), (16, 8, 64, 4), (16, 4, 64, 2))


def crops(side: int, count: int, seed: int) -> Tensor:
    """(count, 3, side, side) random crops, reduced by half for sides up to 32."""
    from sklearn.datasets import load_sample_images

    found = []
    source = np.random.default_rng(seed)
    for _ in range(count):
        photo = load_sample_images().images[source.integers(2)]
        step = 2 if side <= 32 else 1
        row, column = (source.integers(size - side * step) for size in photo.shape[:2])
        own = photo[row : row + side * step : step, column : column + side * step : step]
        found.append(torch.from_numpy(np.array(own)).permute(2, 0, 1).float() / 255)
    return torch.stack(found)


def attacked(images: Tensor, attack: str, patch: int, width: int, seed: int) -> tuple[float, float]:
    """The PSNR of the worst image, and seconds."""
    model = lb.models.vit(
        input_shape=tuple(images.shape[1:]),
        classes=10,
        generator=stream(seed, "model"),
        patch=patch,
        width=width,
    )
    batch = images, torch.arange(len(images))
    start = time.perf_counter()
    found = lb.simulate(model, batch, attack=attack, seed=seed)
    return min(score or 0.0 for score in found.scores), time.perf_counter() - start


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    print("PSNR of six crops: least and median; 150 dB is exact.\n")
    print("| image, patch, width | 8-bit pixels | other pixels | s |\n|---|--:|--:|--:|")
    for side, patch, width in SINGLE:
        columns: list[list[float]] = [[], [], []]
        for seed in range(6):
            images = crops(side, 1, seed)
            moved = images + (uniform(images.shape, stream(seed, "moved"), like=images) - 0.5) / 255
            for k, own in enumerate((images, moved.clamp(0, 1))):
                score, seconds = attacked(own, "patch_inversion", patch, width, seed)
                columns[k].append(score)
                columns[2].append(seconds)
        words = (f"{min(own):.0f}, {np.median(own):.0f}" for own in columns[:2])
        middle = np.median(columns[2])
        print(
            f"| {side} × {side}, {patch}, {width} | {' | '.join(words)} | {middle:.2f} |",
            flush=True,
        )
    print("\n| image, patch, width | images | batches | all above 80 dB | least, median | s |")
    print("|---|--:|--:|--:|--:|--:|")
    for side, patch, width, count in SEVERAL:
        rounds = [
            attacked(crops(side, count, seed), "patch_span", patch, width, seed)
            for seed in range(5)
        ]
        worst, seconds = zip(*rounds, strict=True)
        cells = (
            f"{side} × {side}, {patch}, {width}",
            str(count),
            str(len(rounds)),
            f"{sum(one > 80 for one in worst)} of {len(rounds)}",
            f"{min(worst):.0f}, {np.median(worst):.0f}",
            f"{min(seconds):.0f} to {max(seconds):.0f}",
        )
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
