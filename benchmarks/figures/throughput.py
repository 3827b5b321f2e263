"""Many experiments: the cost of one among 32, and how many per minute an audit finishes."""

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
    """One experiment of 32 in `Attack.many` against one alone, MNIST, one image each."""
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
    what = (
        f"`Attack.many` of {TOGETHER} experiments with their own weights, {steps} steps, time "
        "per experiment"
    )
    name = f"{title}: one experiment of {TOGETHER} batched / one alone"
    figure = Figure(name, each.text(), each.n, what, "≤ 0.35")
    alone, both = (1e3 * times.of(job).median for job in jobs)
    note = f"alone {alone:.0f} ms, {TOGETHER} together {both:.0f} ms (medians). "
    return [figure], note + f"Control: {times.speed().text(0)} GFLOP/s."


def per_minute(rounds: int, cells: int, alone: int, steps: int) -> tuple[list[Figure], str]:
    """An audit with two workers against breaching's attacks one at a time, two threads."""
    figures, notes = list[Figure](), ""
    for model in MODELS:
        found, note = _a_minute(model, rounds, cells, alone, steps)
        figures, notes = [*figures, *found], f"{notes}{MODELS[model]}: {note}\n\n"
    return figures, notes.strip()


def _a_minute(
    model: str, rounds: int, cells: int, alone: int, steps: int
) -> tuple[list[Figure], str]:
    plan = audit.parse(
        {
            "name": "experiments per minute",
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
        f"{cells} experiments of {steps} steps, MNIST, one image. Audit with {WORKERS} workers, "
        "start included; breaching's attacks one at a time, with one or two threads"
    )
    title = MODELS[model]
    name, mine = f"{title}: experiments per minute", Spread.of(rates["ours"])
    figures = [
        Figure(f"{name} / breaching's", ratio.text(), ratio.n, what, "≥ 6"),
        Figure(f"{name}, audit", mine.text(0), ratio.n, what),
    ]
    theirs = Spread.of(rates["breaching"]).text(1)
    return figures, f"breaching: {theirs} experiments per minute ({alone} per round)."


def _audit(plan: audit.Plan, cells: int) -> float:
    """Experiments per minute."""
    began = time.perf_counter()
    results = list(audit.run(plan, workers=WORKERS, pictures=False))
    taken = time.perf_counter() - began
    failed = [r.record for r in results if r.record.status != "ok"]
    if failed or len(results) != cells:
        raise RuntimeError(f"{len(results)} of {cells} experiments finished, {len(failed)} failed")
    return 60 * cells / taken


def _breaching(model: str, cells: int, steps: int) -> float:
    """Experiments per minute, with one thread or with both cores, whichever is faster.

    Two threads are tried on one experiment: if another program uses a core, they wait for each
    other.
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
