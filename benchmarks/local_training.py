"""One local epoch in minibatches of 4, by optimizer, known or not: a section of
docs/attack_quality.md.

LeNet with random weights on scikit-learn's digits (8 x 8). Private examples are of the private part
of a split; the settings were chosen on its test part (`--part test`). Every round has its own
weights and batch, the same for all attackers.

    python benchmarks/local_training.py [--rounds 12] [--part private]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from scipy import stats

import leakbound as lb
from leakbound.attacks import FedAvgMatching, GradientMatching
from leakbound.data import split
from leakbound.defenses import NoDefense
from leakbound.metrics import psnr
from leakbound.random import stream

RATE = {"sgd": 0.1, "momentum": 0.1, "adam": 0.003}
"""Local learning rates, which the attacker knows."""
PLANS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "adam": {"optimizer": "adam"},
}
SEARCH: dict[str, Any] = {"total_variation": 1e-4, "smoothing": 3e-2, "schedule": "stages"}
STEPS = {8: 120, 32: 60}


def plain(observation: lb.Observation) -> lb.Observation:
    """The same update to an attacker who takes the client's optimizer for SGD."""
    plan = replace(observation.task.plan, optimizer="sgd", momentum=0.0)
    return replace(observation, task=replace(observation.task, plan=plan))


def attackers(size: int) -> dict[str, Callable[[lb.Observation, torch.Generator], Any]]:
    """For each state of knowledge, an attack; labels, steps and learning rate are known."""
    given = {"steps": STEPS[size], **SEARCH}
    known = GradientMatching(**given)
    found = {"all known": known, "taken for SGD": lambda seen, source: known(plain(seen), source)}
    if size == 8:
        told = {"local_steps": size // 4, "trial": 25, **given}
        found["order unknown"] = FedAvgMatching(**told)
        found["order and optimizer unknown"] = FedAvgMatching(optimizers=tuple(PLANS), **told)
    return found


def one_round(size: int, rule: str, part: str, seed: int) -> dict[str, float]:
    """Mean PSNR of the batch by attacker; and whether the optimizer was found."""
    digits = lb.data.load("digits")
    parts = split(len(digits.labels), {"test": 0.3, "private": 0.7}, seed=0, name="local training")
    order = torch.randperm(len(parts[part]), generator=stream(seed, "batch", size))[:size]
    model = lb.models.lenet(input_shape=(1, 8, 8), classes=10, generator=stream(seed, "model"))
    plan = lb.LocalPlan(size // 4, RATE[rule], 4, **PLANS[rule])
    task = lb.Task.of(model, classes=10, plan=plan)
    sources = [stream(seed, "defense", i) for i in range(2)]
    played = lb.play(task, [digits.batch(parts[part][order])], NoDefense(), sources)
    scores = {}
    seen = played.observation
    for name, attack in attackers(size).items():
        view, source = seen, stream(seed, "attack")
        if isinstance(attack, FedAvgMatching) and attack.optimizers:
            chosen = attack.find_plan(seen, source)
            scores["found"] = float(chosen == plan)
            view = replace(seen, task=replace(task, plan=chosen))
            attack = replace(attack, optimizers=())
        answer = attack(view, source)
        scores[name] = fmean(psnr(lb.pair(played.truth, answer), data_range=1.0))
    return scores


def words(values: list[float]) -> str:
    """The mean with its 95 % t interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{fmean(values):.1f} ± {half:.1f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--part", default="private")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = list(attackers(8))
    print(f"| batch | optimizer | n | {' | '.join(names)} | optimizer found |")
    print("|--:|---|--:|" + "--:|" * len(names) + "--:|")
    for size in STEPS:
        for rule in PLANS:
            rows = [one_round(size, rule, given.part, seed) for seed in range(given.rounds)]
            cells = [words([row[n] for row in rows]) if n in rows[0] else "" for n in names]
            found = f"{sum(row['found'] for row in rows):.0f}" if "found" in rows[0] else ""
            start = f"| {size} | {rule} | {len(rows)} |"
            print(f"{start} {' | '.join(cells)} | {found} |", flush=True)


if __name__ == "__main__":
    main()
