"""Is leakbound's strong attack stronger than Inverting Gradients? Prints tables.

Both attacks get the same model, batches, noise draws and number of steps. Both are tuned first, on
other batches and with the same number of trials, by the mean RMSE over two defenses. Then the
script prints, per data set, paired differences of RMSE for batches of 4 and 8 under none, clip,
noise 0.01 and pruning 0.7. It also runs the strong attack with one part removed at a time.

    python benchmarks/strong_attack.py [--data mnist5k zip:PATH ...] [--out FILE] [--workers 2]

Color images are any source that `leakbound.data.load` reads at 32 x 32.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from scipy import stats

from leakbound import data, models
from leakbound.attacks import (
    Attack,
    ByNoise,
    GradientMatching,
    inverting_gradients,
    strong_matching,
)
from leakbound.core import NotApplicable, Task
from leakbound.defenses import Clip, Defense, GaussianNoise, MagnitudePruning, NoDefense
from leakbound.metrics import mse
from leakbound.pairing import pair
from leakbound.protocol import play
from leakbound.randomness import permutation, stream

STEPS, TUNING, TESTS, FEW = 300, range(100, 103), range(8), range(5)
DEFENSES: dict[str, Defense] = {
    "none": NoDefense(),
    "clip 1": Clip(1.0),
    "noise 0.01": GaussianNoise(0.01),
    "prune 0.7": MagnitudePruning(0.7),
}
TRIALS: dict[str, list[dict[str, float]]] = {
    "plain": [
        {"learning_rate": rate, "total_variation": smooth, "noise_variation": noise}
        for rate, smooth, noise in (
            (0.1, 1e-4, 0.04),
            (0.1, 1e-3, 0.04),
            (0.1, 1e-2, 0.04),
            (0.1, 1e-3, 0.2),
            (0.03, 1e-3, 0.04),
            (0.03, 1e-3, 0.2),
        )
    ],
    "strong": [
        {
            "total_variation": smooth,
            "feature_weight": weight,
            "prior_rate": rate,
            "prior_variation": drawn,
        }
        for smooth, weight, rate, drawn in (
            (1e-3, 0.1, 1e-3, 1e-3),
            (1e-3, 0.3, 1e-3, 1e-2),
            (3e-3, 0.1, 3e-3, 1e-3),
            (3e-3, 0.3, 3e-3, 1e-2),
            (3e-4, 0.3, 1e-3, 3e-2),
            (1e-3, 1.0, 5e-4, 3e-3),
        )
    ],
}
BUILD: dict[str, Callable[..., Attack]] = {"plain": inverting_gradients, "strong": strong_matching}
WITHOUT: dict[str, dict[str, dict[str, Any]]] = {
    "none": {
        "all parts": {},
        "without features": {"features": "none"},
        "without total variation": {"total_variation": 0.0, "noise_variation": 0.0},
        "features as cosines, not the span": {"feature_form": "cosine"},
        "deep prior in place of pixels": {
            "image": "deep_prior",
            "signed": False,
            "learning_rate": 1e-3,
        },
    },
    "noise 0.01": {
        "all parts": {},
        "pixels in place of the deep prior": {
            "image": "pixels",
            "signed": True,
            "learning_rate": 0.1,
        },
        "plain cosine": {"distance": "cosine"},
        "without total variation": {"total_variation": 0.0, "noise_variation": 0.0},
        "with features": {"features": "cocktail_party", "feature_form": "span"},
    },
}
Job = tuple[str, Attack, str, int, int, str]


@cache
def images(source: str) -> tuple[data.Dataset, torch.Tensor]:
    """The data in a fixed random order; the last tenth is public."""
    found = data.load(source, limit=5000, size=28 if source == "mnist5k" else 32)
    return found, permutation(len(found.labels), stream(0, "strong", "order"))


def rmse(job: Job) -> float:
    """Root of the mean squared error of one attack over all images of a batch."""
    torch.set_num_threads(1)
    source, attack, defense, size, seed, _ = job
    kind, order = images(source)
    public, private = order[: len(order) // 10], order[len(order) // 10 :]
    drawn = permutation(len(private), stream(seed, "strong", "batch", size))[:size]
    model = models.simple_convnet(
        input_shape=(kind.inputs.shape[1], kind.inputs.shape[2], kind.inputs.shape[3]),
        classes=kind.classes,
        generator=stream(seed, "strong", "model"),
    )
    played = play(
        Task.of(model, classes=kind.classes),
        [kind.batch(private[drawn])],
        DEFENSES[defense],
        [stream(seed, "strong", "defense", i) for i in range(2)],
        auxiliary=kind.batch(public),
    )
    try:
        answer = attack(played.observation, stream(seed, "strong", "attack"))
    except NotApplicable:
        return float("nan")
    found = mse(pair(played.truth, answer), data_range=1.0)
    return float(np.sqrt(np.mean([value for value in found if value is not None])))


def run(jobs: list[Job], workers: int, what: str) -> Iterator[float]:
    """Run all of them in order, with a progress bar."""
    with ProcessPoolExecutor(workers) as pool:
        yield from track(pool.map(rmse, jobs), description=what, total=len(jobs))


def tuned(source: str, workers: int) -> dict[str, Attack]:
    """The best trial of each attack, by mean RMSE on the tuning batches."""
    best: dict[str, Attack] = {}
    for name, build in BUILD.items():
        tried = [build(STEPS, **trial) for trial in TRIALS[name]]
        jobs: list[Job] = [
            (source, attack, defense, 4, seed, name)
            for attack in tried
            for defense in ("none", "noise 0.01")
            for seed in TUNING
        ]
        found = np.array(list(run(jobs, workers, f"{source}: tuning {name}")))
        scores = found.reshape(len(tried), -1).mean(1)
        for trial, score in zip(TRIALS[name], scores, strict=True):
            print(f"{source} {name} {trial}: RMSE {score:.4f}")
        best[name] = tried[int(np.nanargmin(scores))]
        print(f"{source} {name} tuned: {best[name]!r}")
    return best


def compared(source: str, best: dict[str, Attack], workers: int) -> list[dict[str, Any]]:
    """The paired comparison, one row per setting."""
    settings = [(defense, size) for size in (4, 8) for defense in DEFENSES]
    jobs: list[Job] = [
        (source, best[name], defense, size, seed, name)
        for defense, size in settings
        for name in ("plain", "strong")
        for seed in TESTS
    ]
    found = np.array(list(run(jobs, workers, f"{source}: comparing")))
    rows = []
    for (defense, size), pairs in zip(settings, found.reshape(-1, 2, len(TESTS)), strict=True):
        gap = pairs[1] - pairs[0]
        half = stats.t.ppf(0.975, len(gap) - 1) * gap.std(ddof=1) / len(gap) ** 0.5
        rows.append(
            {
                "data": source,
                "defense": defense,
                "batch": size,
                "plain": float(pairs[0].mean()),
                "strong": float(pairs[1].mean()),
                "difference": float(gap.mean()),
                "half_width": float(half),
                "better": int((gap < 0).sum()),
                "n": len(gap),
            }
        )
    return rows


def ablated(source: str, strong: Attack, workers: int) -> list[dict[str, Any]]:
    """The strong attack with one part changed: batch 4, no defense and noise 0.01."""
    assert isinstance(strong, ByNoise)
    rows = []
    for defense, changes in WITHOUT.items():
        own = strong.clean if defense == "none" else strong.noisy
        assert isinstance(own, GradientMatching)
        variants = [replace(own, **change) for change in changes.values()]
        jobs: list[Job] = [
            (source, attack, defense, 4, seed, "") for attack in variants for seed in FEW
        ]
        found = np.array(list(run(jobs, workers, f"{source}: parts, {defense}")))
        table = found.reshape(len(variants), len(FEW))
        for name, errors in zip(changes, table, strict=True):
            gap = errors - table[0]
            half = stats.t.ppf(0.975, len(gap) - 1) * gap.std(ddof=1) / len(gap) ** 0.5
            row: dict[str, Any] = {"data": source, "defense": defense, "variant": name}
            row |= {"rmse": float(errors.mean()), "worse_by": float(gap.mean())}
            rows.append(row | {"half_width": float(half), "n": len(gap)})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """A table in Markdown."""
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        cells = [f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    """Tune, compare, and remove single parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="+", default=["mnist5k"], help="sources of images")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for source in given.data:
        best = tuned(source, given.workers)
        rows = compared(source, best, given.workers)
        show(rows)
        parts = ablated(source, best["strong"], given.workers)
        show(parts)
        found[Path(source.rpartition(":")[2]).stem] = {
            "tuned": {name: repr(attack) for name, attack in best.items()},
            "compared": rows,
            "ablated": parts,
        }
        if given.out:
            given.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
