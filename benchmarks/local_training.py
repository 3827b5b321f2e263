"""Local training in minibatches: optimizers and numbers of steps, known or not.

Prints a section of attack_quality.json and a table of attack_comparisons.json in docs/results.
Optimizers: one local epoch of a LeNet on scikit-learn's digits (8 x 8). Steps: a perceptron with 32
hidden units on MNIST. Weights are random. Private examples are of the private part of a split; the
settings were chosen on its test part (`--part test`). Every round has its own weights and batch,
the same for all attackers.

    python benchmarks/local_training.py [--rounds 12] [--part private] [--only steps]
"""

from __future__ import annotations

import argparse
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
from leakbound.randomness import stream

RATE = {"sgd": 0.1, "momentum": 0.1, "adam": 0.003}
"""Local learning rates, which the attacker knows."""
PLANS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "adam": {"optimizer": "adam"},
}
SEARCH: dict[str, Any] = {"total_variation": 1e-4, "smoothing": 3e-2, "schedule": "stages"}
ROWS = {(8, 4, 120): 12, (8, 4, 1000): 6, (32, 8, 300): 6}
"""The most rounds of a row on optimizers, by batch, minibatch and search steps."""
LONG = 1000
"""With so many search steps, only the attacker who knows everything runs."""
PLAIN: dict[str, Any] = {"total_variation": 1e-4, "steps": 200}
"""The search for an unknown number of steps; the numbers to try are the attack's defaults."""
LOCAL = {"10, minibatches of 2": lb.LocalPlan(10, 0.1, 2), "5, full batch": lb.LocalPlan(5, 0.1)}


def under(observation: lb.Observation, **changed: Any) -> lb.Observation:
    """The same update to an attacker who assumes another local plan."""
    plan = replace(observation.task.plan, **changed)
    return replace(observation, task=replace(observation.task, plan=plan))


def played(
    images: str, model: torch.nn.Module, plan: lb.LocalPlan, size: int, part: str, seed: int
) -> lb.Round:
    """A client's round on a batch of the part."""
    data = lb.data.load(images)
    parts = split(len(data.labels), {"test": 0.3, "private": 0.7}, seed=0, name="local training")
    order = torch.randperm(len(parts[part]), generator=stream(seed, "batch", size))[:size]
    task = lb.Task.of(model, classes=10, plan=plan)
    sources = [stream(seed, "defense", i) for i in range(2)]
    return lb.play(task, [data.batch(parts[part][order])], NoDefense(), sources)


def decibels(truth: lb.Batch, answer: Any) -> float:
    """Mean PSNR of the batch."""
    return fmean(psnr(lb.pair(truth, answer), data_range=1.0))


def by_optimizer(row: tuple[int, int, int], rule: str, part: str, seed: int) -> dict[str, float]:
    """PSNR by what is known beside labels, steps and rate; and whether the optimizer was found."""
    size, mini, steps = row
    model = lb.models.lenet(input_shape=(1, 8, 8), classes=10, generator=stream(seed, "model"))
    plan = lb.LocalPlan(size // mini, RATE[rule], mini, **PLANS[rule])
    own = played("digits", model, plan, size, part, seed)
    seen, given = own.observation, {"steps": steps, **SEARCH}
    known = GradientMatching(**given)
    scores = {"all known": decibels(own.truth, known(seen, stream(seed, "attack")))}
    if steps == LONG:
        return scores
    scores["taken for SGD"] = scores["all known"]
    if rule != "sgd":
        answer = known(under(seen, optimizer="sgd", momentum=0.0), stream(seed, "attack"))
        scores["taken for SGD"] = decibels(own.truth, answer)
    order = FedAvgMatching(local_steps=plan.steps, trial=25, **given)
    scores["order unknown"] = decibels(own.truth, order(seen, stream(seed, "attack")))
    source = stream(seed, "attack")
    chosen = replace(order, optimizers=tuple(PLANS)).find_plan(seen, source)
    answer = order(replace(seen, task=replace(seen.task, plan=chosen)), source)
    scores["order and optimizer unknown"] = decibels(own.truth, answer)
    return scores | {"found": float(chosen == plan)}


def by_steps(name: str, part: str, seed: int) -> dict[str, float]:
    """PSNR by what is known of the number of steps; and whether the number was found."""
    source, plan = stream(seed, "model"), LOCAL[name]
    model = lb.models.mlp(input_shape=(1, 28, 28), classes=10, hidden=(32,), generator=source)
    own = played("mnist5k", model, plan, 4, part, seed)
    seen, known, search = own.observation, GradientMatching(**PLAIN), FedAvgMatching(**PLAIN)
    scores = {"plan and order known": decibels(own.truth, known(seen, stream(seed, "attack")))}
    once = under(seen, steps=1, batch_size=None)
    scores["steps ignored"] = decibels(own.truth, known(once, stream(seed, "attack")))
    hidden, source = under(seen, steps=1), stream(seed, "attack")
    chosen = search.find_plan(hidden, source)
    answer = replace(search, local_steps=chosen.steps)(hidden, source)
    scores["unknown, found by the attack"] = decibels(own.truth, answer)
    return scores | {"found": float(chosen == plan)}


def words(values: list[float], sign: str = "") -> str:
    """The mean with its 95 % t interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{fmean(values):{sign}.1f} ± {half:.1f}"


def optimizers(part: str, seeds: range) -> None:
    """The table of docs/results/attack_quality.json."""
    names = ["all known", "taken for SGD", "order unknown", "order and optimizer unknown"]
    print(
        "| batch | minibatch | search steps | optimizer | n "
        f"| {' | '.join(names)} | optimizer found |"
    )
    print("|--:|--:|--:|---|--:|" + "--:|" * (len(names) + 1))
    for row, most in ROWS.items():
        for rule in PLANS:
            rounds = [by_optimizer(row, rule, part, seed) for seed in seeds[:most]]
            cells = [*(f"{number:,}" for number in row), rule, str(len(rounds))]
            cells += [words([r[own] for r in rounds]) if own in rounds[0] else "" for own in names]
            cells.append(f"{sum(r['found'] for r in rounds):.0f}" if "found" in rounds[0] else "")
            print(f"| {' | '.join(cells)} |", flush=True)


def steps(part: str, seeds: range) -> None:
    """The table of docs/results/attack_comparisons.json."""
    print(
        "| local steps | n | plan and order known | steps ignored | unknown, found by the attack "
        "| paired gain | steps found |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name in LOCAL:
        rounds = [by_steps(name, part, seed) for seed in seeds]
        cells = [words([own[key] for own in rounds]) for key in rounds[0] if key != "found"]
        pairs = [own["unknown, found by the attack"] - own["steps ignored"] for own in rounds]
        found = f"{sum(own['found'] for own in rounds):.0f}"
        cells.append(f"{words(pairs, '+')} dB")
        print(f"| {name} | {len(seeds)} | {' | '.join(cells)} | {found} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--part", default="private")
    parser.add_argument("--only", choices=["optimizers", "steps"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    for table in (optimizers, steps):
        if given.only in (None, table.__name__):
            table(given.part, range(given.rounds))


if __name__ == "__main__":
    main()
