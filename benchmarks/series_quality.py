"""What attacks reconstruct of series and of images with masks.

Writes a section of docs/results/attack_quality.json. Each row has eight batches, each with its own
initial weights. The series are synthetic electrocardiograms, the images tiles of photographs with
masks of their bright parts; 300 examples are public. Times are CPU seconds of one thread. About
half an hour.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leakbound import models
from leakbound.assess.measure import guesses
from leakbound.attacks import Attack, GradientMatching, idlg, inverting_gradients
from leakbound.attacks.base import BestOf
from leakbound.core import Batch, Reconstruction, Task, ThreatModel
from leakbound.data.packaged import photo_masks
from leakbound.data.raw import Options, fit
from leakbound.data.series import ecg
from leakbound.defenses import NoDefense
from leakbound.domains import Domain, SeriesDomain, of_shape
from leakbound.pairing import pair
from leakbound.protocol import play
from leakbound.randomness import permutation, stream
from leakbound.report.tables import middle

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import stored

SEEDS, PUBLIC, SIDE = 8, 300, 32
HEADING = "## Series and segmentation"
KNOWN = GradientMatching(
    distance="euclidean",
    optimizer="lbfgs",
    learning_rate=1.0,
    steps=40,
    signed=False,
    schedule="constant",
    box=False,
)
"""The search of `idlg`, with the labels as given."""
SEARCHED = GradientMatching(labels="joint", total_variation=1e-3, schedule="cosine")
DILATED = {"dilation": 2, "stride": 1, "channels": (16, 16, 16), "kernel": 3}

Row = tuple[str, str, dict[str, Any], int, int, str, Attack]
SERIES: list[Row] = [
    ("conv1d, flat", "conv1d", {}, 128, 1, "idlg", idlg()),
    ("the same", "conv1d", {}, 128, 1, "inverting_gradients", inverting_gradients()),
    ("conv1d, flat, dilations 1, 2, 4", "conv1d", DILATED, 128, 1, "idlg", idlg()),
    ("conv1d, flat", "conv1d", {}, 128, 8, "L-BFGS, labels known", KNOWN),
    ("conv1d, mean", "conv1d", {"pooling": "mean"}, 128, 1, "idlg", idlg(20, restarts=1)),
    ("LSTM", "lstm", {}, 48, 1, "idlg", idlg(10, restarts=1)),
    ("GRU", "gru", {}, 48, 1, "idlg", idlg(10, restarts=1)),
    ("LSTM", "lstm", {}, 128, 1, "idlg", idlg(5, restarts=1)),
]
MASKS: list[tuple[str, str, bool, str, Attack]] = [
    ("cross-entropy", "dense_cross_entropy", True, "known", inverting_gradients(restarts=2)),
    ("Dice", "dice", True, "known", inverting_gradients(restarts=2)),
    ("cross-entropy", "dense_cross_entropy", False, "searched", BestOf(SEARCHED, 2)),
    ("Dice", "dice", False, "searched", BestOf(SEARCHED, 2)),
]


def interval(values: list[float], form: str = "") -> str:
    """The median with its exact 95 % interval; small numbers as powers of ten."""
    found = middle(values)
    assert found is not None  # eight values
    each = (found.median, found.low, found.high)
    median, low, high = (
        format(v, form) if form else f"{v:.2f}" if v >= 0.1 else f"{v:.0e}" for v in each
    )
    return f"{median} [{low}, {high}]"


def played(
    task: Task, batch: Batch, public: Batch, domain: Domain, attack: Attack, seed: int, known: bool
) -> tuple[Reconstruction, Tensor, Tensor, float]:
    """The answer, the scores' inputs of attack and baseline in order of the truth, CPU seconds."""
    sources = [stream(seed, "defense", i) for i in range(2)]
    threat = ThreatModel(labels_known=known)
    seen = play(task, [batch], NoDefense(), sources, threat=threat, auxiliary=public).observation
    start = time.process_time()
    answer = attack(seen, stream(seed, "attack"))
    spent = time.process_time() - start
    blind = pair(batch, Reconstruction(guesses(domain, batch, public)), domain.costs).inputs
    return answer, pair(batch, answer, domain.costs).inputs, blind, spent


def split(inputs: Tensor, labels: Tensor, size: int, seed: int) -> tuple[Batch, Batch]:
    order = permutation(len(inputs), stream(seed, "split"))
    parts = order[:PUBLIC], order[PUBLIC : PUBLIC + size]
    public, batch = (Batch(inputs[own], labels[own]) for own in parts)
    return public, batch


def series(row: Row) -> str:
    """One line of the table of series."""
    name, model, settings, times, size, told, attack = row
    raw = ecg(Options(size=times))
    errors, blinds, seconds = [], [], []
    for seed in range(SEEDS):
        public, batch = split(raw.inputs, raw.labels, size, seed)
        domain = SeriesDomain((1, times)).fitted(public.inputs)
        given = {"input_shape": (1, times), "classes": 2, "generator": stream(seed, "model")}
        module = getattr(models, model)(**given, **settings)
        task = Task.of(module, classes=2, domain=domain)
        _, found, blind, spent = played(task, batch, public, domain, attack, seed, known=True)
        errors.append(float(domain.distance(batch.inputs, found).median()))
        blinds.append(float(domain.distance(batch.inputs, blind).median()))
        seconds.append(spent)
    ratios = [error / blind for error, blind in zip(errors, blinds, strict=True)]
    cells = (
        *(name, times, size, told),
        interval(errors),
        interval(blinds),
        interval(ratios),
        sum(error < 1e-3 for error in errors),
        f"{max(seconds):.1f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def masks(name: str, loss: str, known: bool, told: str, attack: Attack) -> str:
    """One line of the table of masks."""
    raw = photo_masks(Options(SIDE))
    mixed = (raw.labels.double().mean((1, 2)) - 0.5).abs() < 0.4
    inputs, labels = fit(raw.inputs[mixed], Options(SIDE, 1)), raw.labels[mixed]
    labels = labels.float() if loss == "dice" else labels
    shape = (1, SIDE, SIDE)
    domain, found, better, right, seconds = of_shape(shape), [], [], [], []
    for seed in range(SEEDS):
        public, batch = split(inputs, labels, 1, seed)
        outputs = 1 if loss == "dice" else 2
        module = models.unet(input_shape=shape, classes=outputs, generator=stream(seed, "model"))
        task = Task.of(module, loss=loss, classes=2, domain=domain)
        answer, own, blind, spent = played(task, batch, public, domain, attack, seed, known)
        score, baseline = (float(domain.score(batch.inputs, x)[0]) for x in (own, blind))
        assert answer.labels is not None  # given or searched
        right.append(
            float((answer.labels.reshape(batch.labels.shape) == batch.labels).double().mean())
        )
        found.append(score)
        better.append(score - baseline)
        seconds.append(spent)
    cells = (
        *(name, told),
        interval(found, ".1f"),
        interval(better, "+.1f"),
        sum(value > 0 for value in better),
        "" if known else interval(right, ".2f"),
        f"{max(seconds):.1f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Print the tables and write the section."""
    torch.set_num_threads(1)
    lines = [
        HEADING,
        "",
        "The series are synthetic electrocardiograms of T times. Errors are root mean squared "
        "errors in standard deviations of public series. The *prior-only baseline* is the closest "
        "of the public mean, the public mean of the class, and constants. A ratio below 1 means "
        "that the attack is closer. Each row has 8 batches; brackets hold the exact 95 % interval "
        "of the median, and seconds are the longest of 8, on one thread of a CPU with AVX-512. "
        "`benchmarks/series_quality.py` writes this section.",
        "",
        "| model | T | batch | attack | error | baseline | error / baseline | < 0.001 | CPU s |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in SERIES:
        lines.append(series(row))
        print(lines[-1], flush=True)
    lines += [
        "",
        "One series behind a flat head is reconstructed. In every other row the attack is not "
        "shown to be closer than the baseline, although its objective is near 0: the verdict is "
        "*undecided*.",
        "",
        "U-Net on gray 32 × 32 tiles of photographs, with masks of what is brighter than Otsu's "
        "threshold (at least 10 % and at most 90 % of a tile). PSNR in dB; *better* is the "
        "difference to the prior-only baseline, and in how many of 8 it is above 0; *mask right* "
        "is the share of pixels. A known mask is auxiliary information.",
        "",
        "| loss | mask | PSNR | better | better in | mask right | CPU s |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for given in MASKS:
        lines.append(masks(*given))
        print(lines[-1], flush=True)
    if "--print" not in sys.argv:
        stored.keep("attack_quality", "\n".join(lines))


if __name__ == "__main__":
    main()
