"""Do two workers on Ray run small experiments faster than one? Prints the ratio of their rates.

Runs 200 experiments on digits after the workers have started; the rate counts results after the
first ten. Runs with one and with two workers take turns in one process. Before each run, the same
experiments run here without Ray, as control. Takes five minutes.

    python benchmarks/ray_cells.py [--experiments 200] [--rounds 3]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import time
from collections.abc import Iterator

from leakbound import audit, cluster
from leakbound.audit import Plan, Result

WARM = 10
"""Results after which a run's clock starts."""


def plan_of(cells: int) -> Plan:
    """Experiments of about a tenth of a second each."""
    return audit.parse(
        {
            "name": "many small experiments",
            "seeds": list(range(cells)),
            "data": {"source": "digits"},
            "models": [{"name": "mlp", "hidden": [16]}],
            "attacks": [{"name": "inverting_gradients", "steps": 60}],
        }
    )


def rate(results: Iterator[Result]) -> tuple[float, list[str]]:
    """Results per second after the first ten, and the records to compare."""
    found, start = [], 0.0
    for result in results:
        found.append(repr(result.record))
        if len(found) == WARM:
            start = time.perf_counter()
    return (len(found) - WARM) / (time.perf_counter() - start), sorted(found)


def main() -> None:
    """Alternate the runs and print their medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--experiments", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    plan = plan_of(given.experiments)
    rates: dict[str, list[float]] = {"here": [], "1 worker": [], "2 workers": []}
    expected: list[str] | None = None
    for _ in range(given.rounds):
        for workers in (1, 2):
            for name, results in (
                ("here", audit.run(plan)),
                (f"{workers} worker{'s' * (workers > 1)}", cluster.run(plan, workers=workers)),
            ):
                speed, records = rate(results)
                expected = expected or records
                if records != expected:
                    raise SystemExit(f"{name}: other records than in the first run")
                rates[name].append(speed)
    print(
        f"{given.experiments} experiments, {given.rounds} rounds; every run gave the same records\n"
    )
    print("| run | experiments per second, median | smallest | largest | n |")
    print("|---|--:|--:|--:|--:|")
    for name, own in rates.items():
        middle = statistics.median(own)
        print(f"| {name} | {middle:.2f} | {min(own):.2f} | {max(own):.2f} | {len(own)} |")
    pairs = [two / one for one, two in zip(rates["1 worker"], rates["2 workers"], strict=True)]
    middle = statistics.median(pairs)
    print(f"\n2 workers / 1 worker: {middle:.2f} (pairs {min(pairs):.2f} to {max(pairs):.2f})")
    alone = statistics.median(rates["1 worker"]) / statistics.median(rates["here"])
    print(f"1 worker / here: {alone:.2f}")


if __name__ == "__main__":
    main()
