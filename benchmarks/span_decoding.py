"""How many rows does a gradient's span reveal? Prints a table of attack_comparisons.json.

German credit: 30 % of the rows are public, batches are drawn from the others, six for each line,
each with its own initial weights (perceptron with 100 and 100 units unless stated). A row counts if
all 20 columns are right. Times are CPU seconds of one thread. About half a minute.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from leakbound import data, models
from leakbound.attacks import LinearInversion, SpanDecoding, TouchedRows
from leakbound.attacks.base import Attack
from leakbound.core import Batch, LocalPlan, Observation, Reconstruction, Task
from leakbound.defenses import Clip, GaussianNoise, NoDefense, Quantization
from leakbound.domains import TableDomain
from leakbound.pairing import pair
from leakbound.protocol import play
from leakbound.randomness import permutation, stream

SEEDS = 6
TABLE = data.load("german")
assert TABLE.columns is not None
ORDER = permutation(1000, stream(0, "split"))
PUBLIC = Batch(TABLE.inputs[ORDER[:300]], TABLE.labels[ORDER[:300]])
DOMAIN = TableDomain(TABLE.columns).fitted(PUBLIC.inputs)
CATEGORIES = [k for k, column in enumerate(DOMAIN.columns) if column.categorical]


class Embedded(nn.Module):
    """An embedding of width 4 for each category, then two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        levels = [len(column.names) for column in DOMAIN.columns if column.categorical]
        self.tables = nn.ModuleList(nn.Embedding(count, 4) for count in levels)
        inside = 4 * len(levels) + len(DOMAIN.columns) - len(levels)
        layers = nn.Linear(inside, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU()
        self.head = nn.Sequential(*layers, nn.Linear(100, 2))

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        found = [table(codes[:, k]) for k, table in enumerate(self.tables)]
        return self.head(torch.cat([numbers, *found], 1))


def scene(size: int, seed: int, *, embedded: bool = False, **more: Any) -> Any:
    """A round of one client."""
    at = ORDER[300:][permutation(700, stream(seed, "batch"))[:size]]
    given: dict[str, Any] = {"hidden": (100, 100), "activation": "relu"}
    given |= {key: more.pop(key) for key in ("hidden", "activation") if key in more}
    defense, columns = more.pop("defense", NoDefense()), DOMAIN.columns
    torch.manual_seed(seed)
    model: nn.Module = (
        Embedded()
        if embedded
        else models.mlp(
            input_shape=DOMAIN.shape,
            classes=1 if more.get("loss") in ("mse", "bce") else 2,
            generator=stream(seed, "model"),
            **given,
        )
    )
    if embedded:
        columns = tuple(
            replace(c, encoding="embedding") if c.categorical else c for c in DOMAIN.columns
        )
    domain = TableDomain(columns).fitted(PUBLIC.inputs)
    task = Task.of(model, domain=domain, classes=2, **more)
    labels = TABLE.labels[at]
    if more.get("loss") in ("mse", "bce"):
        labels = labels.float()
    sources = [stream(seed, "defense", k) for k in range(2)]
    batch = Batch(TABLE.inputs[at], labels)
    return play(task, [batch], defense, sources, auxiliary=PUBLIC)


def rounded(observation: Observation, kind: torch.dtype | None) -> Observation:
    if kind is None:
        return observation
    update = observation.update
    return replace(observation, update=replace(update, rows=update.rows.to(kind).float()))


def line(name: str, size: int, attack: Attack, kind: torch.dtype | None = None, **more: Any) -> str:
    """A line of the table: rows, categories, answers without a problem, seconds."""
    rows = named = clean = 0
    seconds = []
    for seed in range(SEEDS):
        played = scene(size, seed, **more)
        seen, start = rounded(played.observation, kind), time.process_time()
        answer: Reconstruction = attack(seen, stream(seed, "attack"))
        seconds.append(time.process_time() - start)
        matched = pair(played.truth, answer, DOMAIN.costs).inputs
        wrong = DOMAIN.misses(played.truth.inputs, matched)
        rows += int((~wrong.any(1)).sum())
        named += int((~wrong[:, CATEGORIES].any(1)).sum())
        clean += answer.problem is None
    total = SEEDS * size
    middle = f"{statistics.median(seconds):.2g} ({max(seconds):.2g})"
    shares = f"{rows} of {total} | {named} of {total} | {clean} of {SEEDS}"
    return f"| {name} | {size} | {shares} | {middle} |"


def touched(size: int) -> str:
    """How many columns' levels the embeddings reveal exactly."""
    right = 0
    for seed in range(SEEDS):
        played = scene(size, seed, embedded=True)
        found = TouchedRows().levels(played.observation)
        values = list(zip(*DOMAIN.rows(played.truth.inputs), strict=True))
        right += sum(set(found[DOMAIN.columns[k].name]) == set(values[k]) for k in CATEGORIES)
    return f"{right} of {SEEDS * len(CATEGORIES)}"


def main() -> None:
    torch.set_num_threads(1)
    head = "| setting | batch | rows | all categories | no problem | s, median (largest) |"
    print(head, "|---|--:|--:|--:|--:|--:|", sep="\n")
    span = SpanDecoding()
    for size in (1, 8, 16, 24, 32):
        print(line("cross-entropy", size, span), flush=True)
    print(line("48 and 48 units", 24, span, hidden=(48, 48)))
    print(line("tanh", 16, span, activation="tanh"))
    print(line("MSE", 16, span, loss="mse"))
    print(line("BCE", 16, span, loss="bce"))
    print(line("clip 0.01", 16, span, defense=Clip(0.01)))
    print(line("5 local steps, full batch", 16, span, plan=LocalPlan(5, 0.05)))
    print(line("10 local steps on 4 rows", 16, span, plan=LocalPlan(10, 0.05, 4)))
    print(line("40 local steps on 4 rows", 16, span, plan=LocalPlan(40, 0.05, 4)))
    for size in (4, 8, 16):
        print(line("float16 file", size, span, torch.float16))
        print(line("bfloat16 file", size, span, torch.bfloat16))
        print(line("noise 1e-5", size, span, defense=GaussianNoise(1e-5)))
        print(line("8-bit quantization", size, span, defense=Quantization(8)))
    for size in (1, 8, 16, 24):
        print(line("embeddings, `touched_rows`", size, TouchedRows(), embedded=True), flush=True)
    for size in (1, 8, 24, 32):
        print(line("`linear_inversion`", size, LinearInversion()), flush=True)
    for size in (1, 8, 32):
        print(f"touched levels exact at batch {size}: {touched(size)} columns", flush=True)


if __name__ == "__main__":
    main()
