"""Many cells: what one costs among 32, and how many a minute an audit finishes."""

from __future__ import annotations

import os
import time

import torch
from peers.breaching_attack import Breaching

from figures.ours import settings
from figures.rounds import Spread, interleave
from figures.setting import attack_stream, setting
from figures.table import Figure
from leakbound import audit

TOGETHER = 32
MODELS = {"lenet": "LeNet", "mlp": "MLP", "simple_convnet": "SimpleConvNet"}
WORKERS = 2


def batched(rounds: int, steps: int) -> tuple[list[Figure], str]:
    """One cell of 32 in `Attack.many` against a cell alone, MNIST, one image each."""
    figures, notes = list[Figure](), ""
    for model, title in MODELS.items():
        found, note = _batched(model, title, rounds, steps)
        figures, notes = [*figures, *found], f"{notes}{title}: {note}\n\n"
    return figures, notes.strip()


def _batched(model: str, title: str, rounds: int, steps: int) -> tuple[list[Figure], str]:
    given = [setting(model, 1, seed) for seed in range(TOGETHER)]
    seen = [one.observation for one in given]
    attack = settings(steps)
    jobs = {
        "alone": lambda: attack(seen[0], attack_stream(0)),
        "32 together": lambda: attack.many(seen, [attack_stream(s) for s in range(TOGETHER)]),
    }
    times = interleave(jobs, rounds)
    ratio = times.ratio("32 together", "alone")
    each = ratio.scaled(1 / TOGETHER)
    what = f"`Attack.many` of {TOGETHER} cells with weights of their own, {steps} steps, a cell"
    name = f"{title}: one cell of {TOGETHER} batched / one alone"
    figure = Figure(name, each.text(), each.n, what, "≤ 0.35")
    alone, both = (1e3 * times.of(job).median for job in jobs)
    note = f"alone {alone:.0f} ms, {TOGETHER} together {both:.0f} ms (medians). "
    return [figure], note + f"Control: {times.speed().text(0)} GFLOP/s."


def cells_a_minute(rounds: int, cells: int, alone: int, steps: int) -> tuple[list[Figure], str]:
    """An audit with two workers against breaching on one cell after the other, two threads."""
    figures, notes = list[Figure](), ""
    for model in ("lenet", "simple_convnet"):
        found, note = _a_minute(model, rounds, cells, alone, steps)
        figures, notes = [*figures, *found], f"{notes}{MODELS[model]}: {note}\n\n"
    return figures, notes.strip()


def _a_minute(
    model: str, rounds: int, cells: int, alone: int, steps: int
) -> tuple[list[Figure], str]:
    plan = audit.parse(
        {
            "name": "cells a minute",
            "seeds": list(range(cells)),
            "data": {"source": "mnist5k"},
            "models": [{"name": model}],
            "attacks": [{"name": "inverting_gradients", "steps": steps, "total_variation": 0.0}],
        }
    )
    rates: dict[str, list[float]] = {"ours": [], "breaching": []}
    for number in range(rounds):
        for name in ("ours", "breaching") if number % 2 else ("breaching", "ours"):
            rate = _audit(plan, cells) if name == "ours" else _breaching(model, alone, steps)
            rates[name].append(rate)
    both = [mine / theirs for mine, theirs in zip(rates["ours"], rates["breaching"], strict=True)]
    ratio = Spread.of(both)
    what = (
        f"{cells} cells of {steps} steps, MNIST, one image; audit with {WORKERS} workers, their "
        "start included, against breaching's attacks one at a time, by one thread or two"
    )
    title = MODELS[model]
    figures = [
        Figure(f"{title}: cells a minute / breaching's", ratio.text(), ratio.n, what, "≥ 5"),
        Figure(f"{title}: cells a minute, audit", Spread.of(rates["ours"]).text(0), ratio.n, what),
    ]
    theirs = Spread.of(rates["breaching"]).text(1)
    return figures, f"breaching: {theirs} cells a minute ({alone} cells a round)."


def _audit(plan: audit.Plan, cells: int) -> float:
    """Cells a minute."""
    began = time.perf_counter()
    results = list(audit.run(plan, workers=WORKERS, pictures=False))
    taken = time.perf_counter() - began
    failed = [r.record for r in results if r.record.status != "ok"]
    if failed or len(results) != cells:
        raise RuntimeError(f"{len(results)} of {cells} cells came, {len(failed)} failed")
    return 60 * cells / taken


def _breaching(model: str, cells: int, steps: int) -> float:
    """Cells a minute, with one thread or with both cores: what is faster.

    Two threads are tried on one cell: where another program holds a core they wait for each other.
    """
    alone, both = _attacks(model, cells, steps, 1), 0.0
    if (os.cpu_count() or 1) > 1:
        both = _attacks(model, 1, steps, WORKERS)
    return max(alone, both)


def _attacks(model: str, cells: int, steps: int, threads: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        began = time.perf_counter()
        for seed in range(cells):
            Breaching(setting(model, 1, seed), steps).run()
        return 60 * cells / (time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
