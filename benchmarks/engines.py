"""How fast are the engines, compared with other tools and with the arithmetic alone?

Writes docs/results/speed_against_peers.json. Needs breaching in the environment; `make bench` makes
such an environment and runs this script in it. Takes about fifteen minutes. `--only ROW` measures
one row again. `--tiny` checks that everything runs; it writes nothing.

    make bench
    .bench-env/bin/python benchmarks/engines.py --only convnet --rounds 11
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from figures import attacks, programs, sensitivities, steps, throughput
from figures.table import Figure, write

Measured = tuple[list[Figure], str]


class Effort(NamedTuple):
    """How much is measured."""

    rounds: int
    tiny: bool


def rows() -> dict[str, tuple[str, Callable[[Effort], Measured]]]:
    """Every row's title and what measures it."""
    found: dict[str, tuple[str, Callable[[Effort], Measured]]] = {}
    for case in steps.CASES:
        found[case.row] = (
            f"Step: {case.title}",
            lambda e, c=case: steps.run(c, e.rounds, 0.0 if e.tiny else 0.2),
        )
    found["attack"] = (
        "Whole attack",
        lambda e: attacks.run(2 if e.tiny else 5, 20 if e.tiny else 1000),
    )
    found["batched"] = (
        "Experiments in a batch",
        lambda e: throughput.batched(e.rounds, 5 if e.tiny else 100),
    )
    found["experiments"] = (
        "Experiments per minute",
        lambda e: (
            throughput.per_minute(1, 4, 1, 5) if e.tiny else throughput.per_minute(3, 128, 3, 300)
        ),
    )
    for size in sensitivities.WAYS:
        found[f"sensitivity{size}"] = (
            f"Sensitivity, B = {size}",
            lambda e, n=size: sensitivities.run(n, e.rounds, *((1, 1) if e.tiny else (3, 3))),
        )
    found["demo"] = ("The built-in audit", lambda e: programs.demo(1, quick_only=e.tiny))
    return found


def main() -> None:
    """Measure the rows in turn; the page is written after each, so a stop loses only one row."""
    known = rows()
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=9, help="interleaved rounds (at least 7)")
    options.add_argument("--only", action="append", choices=list(known), help="a row; repeatable")
    options.add_argument("--tiny", action="store_true", help="two rounds, nothing written")
    given = options.parse_args()
    effort = Effort(2 if given.tiny else max(7, given.rounds), given.tiny)
    torch.set_num_threads(1)
    refused = 0
    for name in given.only or known:
        title, measure = known[name]
        try:
            figures, note = measure(effort)
        except RuntimeError as error:  # a comparison that would say nothing; the others go on
            print(f"{title}: {error}", flush=True)
            refused += 1
            continue
        for figure in figures:
            print(f"{figure.name}: {figure.measured} (target {figure.target or '-'})", flush=True)
        if not given.tiny:
            write(figures, {title: note} if note else {})
    if refused:
        raise SystemExit(f"{refused} rows were not measured")


if __name__ == "__main__":
    main()
