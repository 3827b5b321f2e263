"""How accurate and how expensive are the estimators of ||d g_i / d x||^2? Prints the docs' tables.

    python benchmarks/sensitivity.py                  # cost and accuracy on MNIST, about 2 minutes
    python benchmarks/sensitivity.py --part sizes --data photos       # by batch and input size
    python benchmarks/sensitivity.py --part size_costs --data photos  # the same, timed
    python benchmarks/sensitivity.py --part stale     # how fast an estimate goes stale in training

SimpleConvNet with random weights on real images, three seeds (each with its own weights and
images). Accuracy is Spearman's correlation of k_i = s_i / g_i^2 with the exact oracle's, over
coordinates with g_i != 0, and the median relative error of s_i. Cost is relative to one
`client.gradient`, interleaved in one process with a matrix product as control.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from figures.rounds import turns
from scipy.stats import spearmanr
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from leakbound import client, models
from leakbound.core import Batch, Task
from leakbound.data import load
from leakbound.engines.sensitivity import Sensitivity, sensitivity
from leakbound.randomness import stream

SEEDS = range(3)
Case = tuple[str, int]
"""An estimator with its directions."""

CASES: dict[int, list[Case]] = {
    16: [*[("per_sample", k) for k in (1, 2, 3)], ("batch", 10)],
    1: [*[("per_sample", k) for k in (2, 5, 10, 12, 20, 40)], ("batch", 10), ("batch", 20)],
}
SIZES = {"digits": (8,), "mnist5k": (16, 28), "photos": (32, 64)}
SIZE_CASES: list[Case] = [("per_sample", 1), ("per_sample", 3)]
BATCHES = (1, 4, 16, 64)
MANY: Case = ("per_sample", 40)
"""What counts as the truth of `stale`: known to about 5 %."""
REFERENCE = 20_000_000
"""Above so many lanes times entries of an image many directions stand for the oracle."""


def setting(seed: int, size: int, data: str = "mnist5k", side: int = 28) -> tuple[Task, Batch]:
    """A fresh network and `size` of its own images."""
    build = stream(seed, "benchmark", "model")
    images = load(data, size=side)
    channels, high, wide = images.inputs.shape[1:]
    model = models.simple_convnet(input_shape=(channels, high, wide), classes=10, generator=build)
    drawn = torch.randperm(len(images.labels), generator=stream(seed, "benchmark", "batch"))
    return Task.of(model, classes=10), images.batch(drawn[:size])


def estimate(task: Task, batch: Batch, case: Case, repetition: int = 0) -> Sensitivity:
    """One estimate from its own draws."""
    name, k = case
    source = stream(repetition, "benchmark", *case)
    return sensitivity(
        task,
        batch.inputs,
        batch.labels,
        source,
        estimator=name,
        directions=k,
    )


def score(values: Tensor, exact: Sensitivity) -> tuple[float, float]:
    """Spearman's correlation of k_i, and the median relative error of s_i."""
    live = exact.gradient != 0
    weight = exact.gradient[live].double().square()
    truth, found = exact.values[live].double(), values[live].double()
    rank = float(spearmanr(found / weight, truth / weight)[0])
    some = truth > 0
    return rank, float(((found - truth).abs()[some] / truth[some]).median())


def title(case: Case) -> str:
    """The estimator's name in the tables."""
    name, k = case
    return f"`{name}`, k = {k}"


def accuracy(size: int) -> None:
    """One line per estimator, three repetitions per seed."""
    print(f"\nBatch {size}: Spearman for each seed (mean of 3 repetitions), median relative error")
    table: dict[str, list[tuple[float, float]]] = {}
    for seed in SEEDS:
        task, batch = setting(seed, size)
        start = time.perf_counter()
        exact = estimate(task, batch, ("exact", 1))
        print(f"seed {seed}: oracle in {time.perf_counter() - start:.1f} s", flush=True)
        rank, _ = score(torch.ones_like(exact.values), exact)
        table.setdefault("s = 1", []).append((rank, float("nan")))
        for case in CASES[size]:
            runs = [score(estimate(task, batch, case, r).values, exact) for r in range(3)]
            rank, off = (statistics.mean(part) for part in zip(*runs, strict=True))
            table.setdefault(title(case), []).append((rank, off))
    print("| estimator | seed 0 | seed 1 | seed 2 | mean | median error |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, rows in table.items():
        ranks = [rank for rank, _ in rows]
        cells = " | ".join(f"{rank:.3f}" for rank in [*ranks, statistics.mean(ranks)])
        print(f"| {name} | {cells} | {statistics.mean(o for _, o in rows):.2f} |", flush=True)


def timed(task: Task, batch: Batch, cases: list[Case], rounds: int) -> dict[str, list[float]]:
    """The gradient, a control, and the estimators."""
    left = torch.randn(512, 512, generator=stream(0, "benchmark", "control"))
    jobs: dict[str, Callable[[], object]] = {
        "gradient": lambda: client.gradient(task, batch.inputs, batch.labels),
        "control": lambda: [left @ left for _ in range(4)],
    }
    for case in cases:
        jobs[title(case)] = lambda case=case: estimate(task, batch, case)  # type: ignore[misc]
    return turns(jobs, rounds)


def cost(size: int, rounds: int) -> None:
    """Times in units of one gradient, interleaved, with a matrix product as control."""
    task, batch = setting(0, size)
    times = timed(task, batch, CASES[size], rounds)
    one = times["gradient"]
    print(f"\nBatch {size}: {rounds} interleaved rounds, ratios to one gradient")
    print("| job | ms, median | ms, least | ratio of medians | of minima | rounds, 10 to 90 % |")
    print("|---|--:|--:|--:|--:|--:|")
    for job, took in times.items():
        middle, least = statistics.median(took), min(took)
        each = statistics.quantiles((a / b for a, b in zip(took, one, strict=True)), n=10)
        ratios = f"{middle / statistics.median(one):.2f} | {least / min(one):.2f}"
        spread = f"{each[0]:.2f} to {each[-1]:.2f}"
        print(f"| {job} | {1e3 * middle:.1f} | {1e3 * least:.1f} | {ratios} | {spread} |")
    speeds = [4 * 2 * 512**3 / took / 1e9 for took in times["control"]]
    print(f"control: {min(speeds):.0f} to {max(speeds):.0f} GFLOP/s", flush=True)


def peak(run: Callable[[], object]) -> int:
    """Peak bytes of a run, counted by PyTorch's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = recorded.profiler.kineto_results.events()
    live = top = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            top = max(top, live)
    return top


def reference(task: Task, batch: Batch) -> tuple[Sensitivity, str]:
    """The oracle, or many directions if it is too expensive."""
    if batch.inputs.numel() * batch.inputs[0].numel() <= REFERENCE:
        return estimate(task, batch, ("exact", 1)), "exact"
    many = 300 if batch.size <= 4 else 75
    return estimate(task, batch, ("per_sample", many), 99), f"k = {many}"


def sizes(data: str) -> None:
    """Accuracy and memory by batch and input size, one line per setting."""
    heads = " | ".join(f"{title(c)} | error | MB" for c in SIZE_CASES)
    print(f"\n| input | batch | s = 1 | {heads} | gradient, MB | reference |")
    print("|---|" + "--:|" * (3 + 3 * len(SIZE_CASES)) + "---|")
    for side in SIZES[data]:
        for size in BATCHES:
            _one_size(data, side, size)


def _one_size(data: str, side: int, size: int) -> None:
    found: dict[Case, list[tuple[float, float]]] = {case: [] for case in SIZE_CASES}
    plain, kind = [], ""
    for seed in SEEDS:
        task, batch = setting(seed, size, data, side)
        truth, kind = reference(task, batch)
        plain.append(score(torch.ones_like(truth.values), truth)[0])
        for case in SIZE_CASES:
            found[case].append(score(estimate(task, batch, case).values, truth))
    task, batch = setting(0, size, data, side)
    cells = []
    for case in SIZE_CASES:
        ranks, errors = zip(*found[case], strict=True)
        held = peak(lambda case=case: estimate(task, batch, case)) / 1e6  # type: ignore[misc]
        spread = f"{statistics.mean(ranks):.3f} ({min(ranks):.3f}–{max(ranks):.3f})"
        cells.append(f"{spread} | {statistics.mean(errors):.2f} | {held:.0f}")
    own = peak(lambda: client.gradient(task, batch.inputs, batch.labels)) / 1e6
    name, line = "x".join(map(str, batch.inputs.shape[1:])), " | ".join(cells)
    print(
        f"| {data} {name} | {size} | {statistics.mean(plain):.2f} | {line} | {own:.0f} | {kind} |"
    )
    sys.stdout.flush()


def size_costs(data: str, rounds: int) -> None:
    """Costs by batch and input size, one line per setting."""
    heads = " | ".join(title(case) for case in SIZE_CASES)
    print(f"\n| input | batch | {heads} | gradient, ms |")
    print("|---|" + "--:|" * (2 + len(SIZE_CASES)))
    for side in SIZES[data]:
        for size in BATCHES:
            task, batch = setting(0, size, data, side)
            times = timed(task, batch, SIZE_CASES, rounds)
            one = times.pop("gradient")
            times.pop("control")
            cells = []
            for took in times.values():
                each = sorted(a / b for a, b in zip(took, one, strict=True))
                cells.append(f"{statistics.median(each):.1f} ({each[0]:.1f}–{each[-1]:.1f})")
            name = "x".join(map(str, batch.inputs.shape[1:]))
            line = " | ".join(cells)
            print(f"| {data} {name} | {size} | {line} | {1e3 * statistics.median(one):.1f} |")
            sys.stdout.flush()


def wasted(used: Tensor, truth: Sensitivity) -> float:
    """tr J_F of noise allocated by `used`, relative to the smallest possible, at equal loss U2.

    Noise std^2 ~ sqrt(used) / |g|, with today's gradient.
    """
    g = truth.gradient.double().abs()
    s = truth.values.double()
    root = used.double().clamp_min(1e-6 * float(used.double().mean())).sqrt()
    return float((g * root).sum() * (s * g / root).sum() / (g * s.sqrt()).sum() ** 2)


def stale(batch_size: int = 16) -> None:
    """Quality of an estimate that is r steps old, for the same images and for others."""
    print("\n| weights | estimate | steps | Spearman s | Spearman k | tr J_F over the least |")
    print("|---|---|--:|--:|--:|--:|")
    rows: dict[tuple[int, str, int], list[tuple[float, ...]]] = {}
    for seed in SEEDS:
        for start in (0, 50, 200):
            for (name, after), values in _stale(seed, start, batch_size).items():
                rows.setdefault((start, name, after), []).append(values)
    for (start, name, after), each in rows.items():
        cells = [
            f"{statistics.mean(part):.3f} ({min(part):.3f}–{max(part):.3f})"
            for part in zip(*each, strict=True)
        ]
        print(f"| after {start} | {name} | {after} | " + " | ".join(cells) + " |", flush=True)


def _stale(seed: int, start: int, size: int) -> dict[tuple[str, int], tuple[float, ...]]:
    task, batch = setting(seed, size)
    digits = load("mnist5k")
    order = torch.randperm(len(digits.labels), generator=stream(seed, "benchmark", "batch"))
    others, pool = digits.batch(order[size : 2 * size]), order[2 * size :]
    adam = torch.optim.Adam([flat := task.parameters.clone()], lr=1e-3)

    def train(steps: int, turn: int) -> Task:
        for step in range(steps):
            drawn = torch.randint(len(pool), (64,), generator=stream(seed, "train", turn, step))
            part, now = digits.batch(pool[drawn]), task.with_parameters(flat.clone())
            flat.grad = client.gradient(now, part.inputs, part.labels)
            adam.step()
        return task.with_parameters(flat.clone())

    here = train(start, 0)
    old = {
        "same images": estimate(here, batch, MANY, 1).values,
        "other images": estimate(here, others, MANY, 1).values,
    }
    found: dict[tuple[str, int], tuple[float, ...]] = {}
    passed = 0
    for after in (0, 1, 5, 10, 50):
        now, passed = train(after - passed, 1 + after), after
        truth = estimate(now, batch, MANY, 2)
        given = dict(old)
        if after in (0, 50):
            given["s = 1"] = torch.ones_like(truth.values)
            for case in (("per_sample", 1), ("per_sample", 2)):
                given[f"{title(case)}, today"] = estimate(now, batch, case).values
        for name, used in given.items():
            live = truth.values > 0
            told = bool((used != used[0]).any())
            rank = float(spearmanr(used[live], truth.values[live])[0]) if told else 0.0
            found[name, after] = (rank, score(used, truth)[0], wasted(used, truth))
    return found


def main() -> None:
    """Measure costs first, while the machine is cool."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--part",
        choices=("main", "cost", "accuracy", "sizes", "size_costs", "stale"),
        default="main",
    )
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds of a timing")
    parser.add_argument("--data", choices=tuple(SIZES), default="mnist5k", help="of `sizes`")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.part in ("main", "cost"):
        for size in CASES:
            cost(size, given.rounds)
    if given.part in ("main", "accuracy"):
        for size in CASES:
            accuracy(size)
    if given.part == "sizes":
        sizes(given.data)
    if given.part == "size_costs":
        size_costs(given.data, given.rounds)
    if given.part == "stale":
        stale()


if __name__ == "__main__":
    main()
