"""Comparable times: jobs take turns within one process, with a control for machine load.

A ratio is formed within each round and reported as median and range, because the speed of a shared
machine changes between rounds by more than the measured differences.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from figures.counting import Product
from leakbound.randomness import normal, stream

Job = Callable[[], object]
SIDE = 512
CONTROL = "matrix product"


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of n measurements."""

    median: float
    least: float
    most: float
    n: int

    @staticmethod
    def of(values: list[float]) -> Spread:
        """Of what was measured."""
        return Spread(statistics.median(values), min(values), max(values), len(values))

    def scaled(self, factor: float) -> Spread:
        """Of every value times a factor above 0."""
        return Spread(factor * self.median, factor * self.least, factor * self.most, self.n)

    def text(self, digits: int = 2) -> str:
        """For a table."""
        return f"{self.median:.{digits}f} ({self.least:.{digits}f} to {self.most:.{digits}f})"


@dataclass(frozen=True)
class Times:
    """Seconds of one call of each job in each round."""

    seconds: Mapping[str, list[float]]

    def of(self, job: str) -> Spread:
        """Seconds of one call."""
        return Spread.of(self.seconds[job])

    def ratio(self, job: str, other: str) -> Spread:
        """Of the two within each round."""
        pairs = zip(self.seconds[job], self.seconds[other], strict=True)
        return Spread.of([mine / theirs for mine, theirs in pairs])

    def speed(self) -> Spread:
        """The control's, in billions of operations a second."""
        return Spread.of([2e-9 * SIDE**3 / taken for taken in self.seconds[CONTROL]])


def interleave(jobs: Mapping[str, Job], rounds: int, least: float = 0.1) -> Times:
    """Run the jobs in turn after a warm-up; each turn repeats its job for at least `least` seconds.

    Every other round runs them in reverse, so that no job profits from its neighbor.
    """
    left = normal((SIDE, SIDE), stream(0, "bench", "control"))
    every = {CONTROL: lambda: left @ left, **jobs}
    calls = {name: _calls(job, least) for name, job in every.items()}
    taken: dict[str, list[float]] = {name: [] for name in every}
    for number in range(rounds):
        names = list(every) if number % 2 == 0 else list(reversed(every))
        for name in names:
            job, count = every[name], calls[name]
            began = time.perf_counter()
            for _ in range(count):
                job()
            taken[name].append((time.perf_counter() - began) / count)
    return Times(taken)


def turns(jobs: Mapping[str, Job], rounds: int, warm: int = 1) -> dict[str, list[float]]:
    """Seconds of every job in every round, one call each, except the first `warm` rounds."""
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(warm + rounds):
        for name, job in jobs.items():
            took = _once(job)
            if number >= warm:
                taken[name].append(took)
    return taken


def _calls(job: Job, least: float) -> int:
    """The number of calls that fill the smallest time; also warms up."""
    job()
    began = time.perf_counter()
    job()
    return max(1, round(least / (time.perf_counter() - began)))


def products_alone(counts: Counter[Product]) -> Job:
    """The same matrix products alone: the time of the arithmetic.

    Each product uses the faster of two libraries' kernels for its shape. On AMD processors,
    oneDNN's are up to 2.4 times as fast as the ones that `torch.mm` calls.
    """
    source, ready = stream(0, "bench", "products"), list[tuple[Job, int]]()
    for shape, number in counts.items():
        a = normal((shape.rows, shape.inner), source)
        b = normal((shape.columns, shape.inner), source)
        ready.append((_fastest(_kernels(a, b)), number))

    def run() -> None:
        for job, number in ready:
            for _ in range(number):
                job()

    return run


def _kernels(a: torch.Tensor, b: torch.Tensor) -> list[Job]:
    """Ways to compute a times b transposed."""
    turned, out = b.t().contiguous(), torch.empty(len(a), len(b))
    found: list[Job] = [lambda: torch.mm(a, turned, out=out), lambda: torch.mm(a, b.t(), out=out)]
    if torch.backends.mkldnn.is_available():
        product = torch.ops.mkldnn._linear_pointwise
        found.append(lambda: product(a, b, None, "none", [], ""))
    return found


def _fastest(jobs: list[Job]) -> Job:
    """The kernel with the smallest of five times."""
    least = [min(_once(job) for _ in range(5)) for job in jobs]
    return jobs[least.index(min(least))]


def _once(job: Job) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began
