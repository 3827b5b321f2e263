"""Cost of sensitivities with the paper's quality, in gradients, including the gradient itself.

SimpleConvNet with random weights on real MNIST. Quality is Spearman's correlation of s_i / g_i²
with the exact oracle's over coordinates with g_i != 0, mean over seeds and repetitions.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from scipy.stats import spearmanr

from figures.counting import count
from figures.rounds import Times, interleave
from figures.setting import Setting, setting
from figures.table import Figure
from leakbound import client
from leakbound.engines.sensitivity import Sensitivity, sensitivity
from leakbound.randomness import stream

QUALITY = 0.975
Way = tuple[str, int]
WAYS: dict[int, tuple[Way, ...]] = {
    16: (("per_sample", 2), ("per_sample", 3), ("batch", 10)),
    1: (*(("per_sample", k) for k in (10, 12, 20)), ("batch", 10)),
}
TARGETS = {16: "≤ 4.5", 1: "< 8"}


class Measured(NamedTuple):
    """Quality of one estimator, and its cost by time and by count."""

    rank: float
    least: float
    n: int
    counted: float


def run(size: int, rounds: int, seeds: int, repetitions: int) -> tuple[list[Figure], str]:
    """The cheapest estimator with the paper's quality, and a table of all."""
    settings = [setting("simple_convnet", size, seed) for seed in range(seeds)]
    one = settings[0]
    images, labels = one.truth.inputs, one.labels

    def gradient() -> object:
        return client.gradient(one.task, images, labels)

    jobs = {"gradient": gradient}
    jobs |= {_name(way): lambda w=way: _estimate(one, w, 0) for way in WAYS[size]}  # type: ignore[misc]
    times = interleave(jobs, rounds)
    unit = count(gradient).operations
    exact = [_estimate(given, ("exact", 1), 0) for given in settings]
    found = {}
    for way in WAYS[size]:
        ranks = [
            _rank(_estimate(given, way, repetition), truth)
            for given, truth in zip(settings, exact, strict=True)
            for repetition in range(repetitions)
        ]
        counted = count(jobs[_name(way)]).operations / unit
        found[_name(way)] = Measured(statistics.mean(ranks), min(ranks), len(ranks), counted)
    return _figures(size, found, times), _note(found, times)


def _name(way: Way) -> str:
    name, k = way
    return f"{name}, k = {k}"


def _estimate(given: Setting, way: Way, repetition: int) -> Sensitivity:
    name, k = way
    source = stream(repetition, "bench", *(str(part) for part in way))
    inputs = given.truth.inputs
    return sensitivity(given.task, inputs, given.labels, source, estimator=name, directions=k)


def _rank(found: Sensitivity, exact: Sensitivity) -> float:
    live = exact.gradient != 0
    weight = exact.gradient[live].double().square()
    return float(spearmanr(found.values[live] / weight, exact.values[live] / weight)[0])


def _figures(size: int, found: dict[str, Measured], times: Times) -> list[Figure]:
    good = [name for name, one in found.items() if one.rank >= QUALITY]
    if not good:
        return []
    best = min(good, key=lambda name: times.ratio(name, "gradient").median)
    ratio, one = times.ratio(best, "gradient"), found[best]
    what = f"{best}: Spearman {one.rank:.3f} (n = {one.n}); counted {one.counted:.2f}"
    title = f"sensitivity of the paper's quality, B = {size}: gradients"
    return [Figure(title, ratio.text(), ratio.n, what, TARGETS[size], f"{one.counted:.2f}")]


def _note(found: dict[str, Measured], times: Times) -> str:
    lines = ["| estimator | Spearman, mean (least) | n | gradients, counted | gradients, timed |"]
    lines.append("|---|--:|--:|--:|--:|")
    for name, one in found.items():
        rank = f"{one.rank:.3f} ({one.least:.3f}) | {one.n}"
        timed = times.ratio(name, "gradient").text()
        lines.append(f"| {name} | {rank} | {one.counted:.2f} | {timed} |")
    lines.append(f"\nControl: {times.speed().text(0)} GFLOP/s. n = {times.speed().n} rounds.")
    return "\n".join(lines)
