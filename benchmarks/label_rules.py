"""How many labels of a batch do published rules infer? Prints docs/label_inference.md's tables.

SimpleConvNet on MNIST without a defense: three networks (fresh, or trained for 200 steps on public
images) with 10 batches of each kind. Accuracy is that of the multiset, with a 95 % interval over
batches. About two minutes on one core.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys

import numpy as np
import torch

from leakbound.attacks.labels import LABEL_RULES, infer, label_accuracy
from leakbound.audit import PlanContext
from leakbound.audit.plan import DataSpec, ModelSpec
from leakbound.core import Batch, NotApplicable, Observation, Task, ThreatModel
from leakbound.defenses import LocalAggregation, NoDefense
from leakbound.protocol import play
from leakbound.randomness import permutation, stream

NETWORKS, BATCHES, SIZES = 3, 10, (1, 4, 16, 64)
STATES = {"fresh": 0, "trained": 200}
KINDS = ("uniform", "skewed")
BENCH = PlanContext(DataSpec())


def draw(kind: str, size: int, seed: int, turn: int) -> Batch:
    """A private batch: uniform, or half of it from one class."""
    data, private = BENCH.dataset, BENCH.splits["private"]
    source = stream(seed, "label rules", kind, size, turn)
    order = private[permutation(len(private), source)]
    if kind == "skewed":
        labels = data.labels[order]
        first = order[labels == labels[0]][: (size + 1) // 2]
        rest = order[labels != labels[0]][: size - len(first)]
        order = torch.cat([first, rest])
    return data.batch(order[:size])


def see(task: Task, batch: Batch, steps: int, public: bool, seed: int, turn: int) -> Observation:
    """The observation of an attacker who does not know the labels."""
    defense = LocalAggregation(steps, 0.1) if steps > 1 else NoDefense()
    return play(
        task,
        [batch],
        defense,
        [stream(seed, "label rules", turn, i) for i in range(2)],
        threat=ThreatModel(labels_known=False),
        auxiliary=BENCH.public if public else None,
    ).observation


def measure(state: str, kind: str, size: int, steps: int, public: bool) -> dict[str, str]:
    """Rule -> accuracy in percent with its interval; "-" where it does not apply."""
    found: dict[str, list[float]] = {rule: [] for rule in LABEL_RULES}
    for seed in range(NETWORKS):
        task = BENCH.task(ModelSpec("simple_convnet", train_steps=STATES[state]), seed)
        for turn in range(BATCHES):
            batch = draw(kind, size, seed, turn)
            seen = see(task, batch, steps, public, seed, turn)
            for rule, all_found in found.items():
                try:
                    labels = infer(rule, seen, stream(seed, "label rules", rule, turn))
                except NotApplicable:
                    continue
                all_found.append(label_accuracy(labels, batch.labels))
    return {rule: _cell(values) for rule, values in found.items()}


def _cell(values: list[float]) -> str:
    if not values:
        return "–"
    spread = 1.96 * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{100 * np.mean(values):.1f} ± {100 * spread:.1f}"


def table(steps: int, public: bool, sizes: tuple[int, ...]) -> None:
    """One line per kind of batch, one column per rule."""
    images = "public images" if public else "random images"
    print(f"\n**{steps} local step{'s' * (steps > 1)}, {images} stand in**\n")
    print("| network | batch | labels | " + " | ".join(LABEL_RULES) + " |")
    print("|---|--:|---|" + "--:|" * len(LABEL_RULES))
    for state in STATES:
        for size in sizes:
            for kind in KINDS if size > 1 else KINDS[:1]:
                cells = measure(state, kind, size, steps, public)
                print(f"| {state} | {size} | {kind} | {' | '.join(cells.values())} |", flush=True)


def main() -> None:
    """All tables."""
    torch.set_num_threads(1)
    for steps, sizes in ((1, SIZES), (10, SIZES[1:3])):
        for public in (False, True):
            table(steps, public, sizes)


if __name__ == "__main__":
    sys.exit(main())
