"""How good and how dear are the estimators of ||d g_i / d x||^2? Prints the tables of the docs.

SimpleConvNet at random weights on real MNIST, three seeds (each its own weights and images).
Accuracy is Spearman's correlation of k_i = s_i / g_i^2 with the exact oracle's, over coordinates
with g_i != 0, and the median relative error of s_i. Cost is a ratio to one `client.gradient`,
interleaved in one process with a matrix product as a control of the machine. About two minutes.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import time
from collections.abc import Callable

import torch
from scipy.stats import spearmanr
from torch import Tensor

from leakbound import client, models
from leakbound.data import load
from leakbound.random import stream
from leakbound.sensitivity import Sensitivity, sensitivity
from leakbound.types import Batch, Task

SEEDS, ROUNDS = range(3), 11
CASES: dict[int, list[tuple[str, int]]] = {
    16: [("per_sample", 1), ("per_sample", 2), ("per_sample", 3), ("batch", 10)],
    1: [(name, k) for name in ("per_sample", "batch") for k in (2, 5, 10, 20)]
    + [("per_sample", 40)],
}


def setting(seed: int, size: int) -> tuple[Task, Batch]:
    """A fresh network and `size` images of its own."""
    build = stream(seed, "benchmark", "model")
    model = models.simple_convnet(input_shape=(1, 28, 28), classes=10, generator=build)
    digits = load("mnist5k")
    drawn = torch.randperm(len(digits.labels), generator=stream(seed, "benchmark", "batch"))
    return Task.of(model, classes=10), digits.batch(drawn[:size])


def estimate(
    task: Task, batch: Batch, name: str, directions: int, repetition: int = 0
) -> Sensitivity:
    """One estimate from draws of its own."""
    source = stream(repetition, "benchmark", name, directions)
    return sensitivity(
        task, batch.inputs, batch.labels, source, estimator=name, directions=directions
    )


def score(values: Tensor, exact: Sensitivity) -> tuple[float, float]:
    """Spearman's correlation of k_i, and the median relative error of s_i."""
    live = exact.gradient != 0
    weight = exact.gradient[live].double().square()
    truth, found = exact.values[live].double(), values[live].double()
    rank = float(spearmanr(found / weight, truth / weight)[0])
    some = truth > 0
    return rank, float(((found - truth).abs()[some] / truth[some]).median())


def accuracy(size: int) -> None:
    """One line an estimator, three repetitions a seed."""
    print(f"\nBatch {size}: Spearman for each seed (mean of 3 repetitions), median relative error")
    table: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for seed in SEEDS:
        task, batch = setting(seed, size)
        start = time.perf_counter()
        exact = estimate(task, batch, "exact", 1)
        print(f"seed {seed}: oracle in {time.perf_counter() - start:.1f} s", flush=True)
        rank, _ = score(torch.ones_like(exact.values), exact)
        table.setdefault(("s = 1", 0), []).append((rank, float("nan")))
        for name, k in CASES[size]:
            runs = [score(estimate(task, batch, name, k, r).values, exact) for r in range(3)]
            rank, off = (statistics.mean(part) for part in zip(*runs, strict=True))
            table.setdefault((name, k), []).append((rank, off))
    print("| estimator | k | seed 0 | seed 1 | seed 2 | mean | median error |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for (name, k), rows in table.items():
        ranks = [rank for rank, _ in rows]
        cells = " | ".join(f"{rank:.3f}" for rank in [*ranks, statistics.mean(ranks)])
        print(f"| {name} | {k or ''} | {cells} | {statistics.mean(o for _, o in rows):.2f} |")


def cost(size: int) -> None:
    """Times in units of one gradient, interleaved, the product of two matrices as a control."""
    task, batch = setting(0, size)
    left = torch.randn(512, 512, generator=stream(0, "benchmark", "control"))
    jobs: dict[str, Callable[[], object]] = {
        "gradient": lambda: client.gradient(task, batch.inputs, batch.labels),
        "GEMM 512, four times": lambda: [left @ left for _ in range(4)],
    }
    for name, k in CASES[size]:
        jobs[f"{name}, k = {k}"] = lambda name=name, k=k: estimate(task, batch, name, k)  # type: ignore[misc]
    times: dict[str, list[float]] = {job: [] for job in jobs}
    for turn in range(ROUNDS + 1):
        for job, run in jobs.items():
            start = time.perf_counter()
            run()
            if turn:  # the first turn warms up
                times[job].append(time.perf_counter() - start)
    one = times["gradient"]
    print(f"\nBatch {size}: {ROUNDS} interleaved rounds, ratios to one gradient")
    print("| job | ms, median | ms, least | ratio of medians | of minima |")
    print("|---|--:|--:|--:|--:|")
    for job, took in times.items():
        middle, least = statistics.median(took), min(took)
        ratios = f"{middle / statistics.median(one):.2f} | {least / min(one):.2f}"
        print(f"| {job} | {1e3 * middle:.1f} | {1e3 * least:.1f} | {ratios} |")
    speeds = [4 * 2 * 512**3 / took / 1e9 for took in times["GEMM 512, four times"]]
    print(f"control: {min(speeds):.0f} to {max(speeds):.0f} GFLOP/s")


def main() -> None:
    """Costs first, on a machine that is still cool."""
    torch.set_num_threads(1)
    for size in CASES:
        cost(size)
    for size in CASES:
        accuracy(size)


if __name__ == "__main__":
    main()
