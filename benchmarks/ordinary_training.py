"""What updates of ordinary training leak: writes docs/results/ordinary_training.json, and the same
rows into the package.

Each line is a model, an optimizer, a number of local steps and a batch size. PyTorch's own
optimizer trains on private examples; the attacker has the weights before and after, and knows the
optimizer, the rate, the steps and the batch size, but no label. About 40 minutes on two cores.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from leakbound import captured, data
from leakbound._util.intervals import clopper_pearson
from leakbound.captured import Settings, TrainingInfo, obstacles
from leakbound.core import Batch
from leakbound.data.sources import Dataset

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import stored

RUNS = 8
MNIST = 0.1307, 0.3081
"""Mean and standard deviation by which digits are normalized, as in PyTorch's example."""
OPTIMIZERS: dict[str, tuple[str, str, float, dict[str, Any]]] = {
    "SGD": ("SGD", "sgd", 0.1, {}),
    "SGD, decay .001": ("SGD", "sgd", 0.1, {"weight_decay": 1e-3}),
    "AdamW, decay .01": ("AdamW", "adamw", 1e-3, {"weight_decay": 1e-2}),
    "RMSprop": ("RMSprop", "rmsprop", 1e-3, {}),
}
"""PyTorch's class, our name, the learning rate, and more settings."""


@dataclass(frozen=True)
class Kind:
    """A model on a kind of data, its attacks, and what is tried of steps and batches."""

    name: str
    source: str
    attacks: tuple[str, ...]
    steps: Sequence[int]
    batches: Sequence[int]

    def model(self, source: Dataset, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        size = source.inputs[0].numel()
        classes = int(source.labels.max()) + 1
        if self.name == CONVOLUTIONS:
            layers: list[nn.Module] = []
            for inside, outside in ((1, 12), (12, 12)):
                layers += [nn.Conv2d(inside, outside, 5, stride=2, padding=2), nn.Sigmoid()]
            return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * 49, classes))
        return nn.Sequential(nn.Flatten(), nn.Linear(size, 200), nn.ReLU(), nn.Linear(200, classes))


CONVOLUTIONS = "two convolutions, digits"
KINDS = (
    Kind(
        "perceptron, digits",
        "mnist5k",
        ("linear_inversion", "sign_inversion"),
        (1, 5, 20),
        (1, 4, 16),
    ),
    Kind(
        "perceptron, german",
        "german",
        ("linear_inversion", "span_decoding", "touched_rows"),
        (1, 5, 20),
        (1, 4, 16),
    ),
    Kind(CONVOLUTIONS, "mnist5k", ("inverting_gradients,steps=300",), (1, 5), (1, 4)),
)


@cache
def _source(name: str) -> Dataset:
    return data.load(name)


def batch_of(kind: Kind, count: int, seed: int) -> tuple[Batch, tuple[float, float]]:
    """Private examples as the model gets them, and the range of its inputs."""
    source = _source(kind.source)
    draw = torch.Generator().manual_seed(seed)
    at = torch.randperm(len(source.labels), generator=draw)[:count]
    inputs = source.inputs[at]
    if kind.source == "german":
        return Batch(inputs, source.labels[at]), (0.0, 1.0)
    mean, deviation = MNIST
    limits = (0 - mean) / deviation, (1 - mean) / deviation
    return Batch((inputs - mean) / deviation, source.labels[at]), limits


def one(kind: Kind, rule: str, steps: int, count: int, seed: int) -> tuple[int, bool, bool]:
    """Examples that the best attack reconstructs, whether the verdict is *exposed*, and whether the
    update reveals facts.
    """
    pytorch, name, rate, more = OPTIMIZERS[rule]
    source = _source(kind.source)
    model = kind.model(source, seed)
    batch, limits = batch_of(kind, count, seed)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trainer = getattr(torch.optim, pytorch)(model.parameters(), lr=rate, **more)
    for _ in range(steps):
        trainer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
        trainer.step()
    table = kind.source == "german"
    settings = Settings(
        tuple(batch.inputs.shape[1:]),
        limits,
        attacks=kind.attacks,
        domain=source.domain if table else None,
    )
    known = TrainingInfo(
        examples=count,
        learning_rate=rate,
        steps=steps,
        weight_decay=more.get("weight_decay"),
        optimizer=name,
    )
    update = captured.load(dict(model.state_dict()), before, kind="weights")
    found = captured.attack_update(update, model, settings, known, truth=batch)
    right = [
        sum((score or 0.0) >= record.criterion.value for score in record.scores or ())
        for record in found.records
    ]
    ends = {record.verdict for record in found.records}
    return (
        max(right, default=0),
        bool({"exposed", "exposed (certified)"} & ends),
        any(record.facts for record in found.records),
    )


def _line(cell: tuple[Kind, str, int, int]) -> list[str]:
    torch.set_num_threads(1)
    kind, rule, steps, count = cell
    runs = [one(kind, rule, steps, count, seed) for seed in range(RUNS)]
    total = RUNS * count
    right = sum(run[0] for run in runs)
    low, high = clopper_pearson(right, total, 0.025)
    row = [
        kind.name,
        rule,
        str(steps),
        str(count),
        f"{right} of {total} ({100 * low:.0f} to {100 * high:.0f} %)",
        f"{sum(run[1] for run in runs)} of {RUNS}",
        f"{sum(run[2] for run in runs)} of {RUNS}",
    ]
    print(" | ".join(row), flush=True)
    return row


def main() -> int:
    """Measure every line and write the page."""
    cells = [
        (kind, rule, steps, count)
        for kind in KINDS
        for rule in OPTIMIZERS
        for steps in kind.steps
        for count in kind.batches
    ]
    with multiprocessing.Pool(int(sys.argv[1]) if len(sys.argv) > 1 else 2) as pool:
        table = pool.map(_line, cells, chunksize=1)
    page = {
        "title": "What updates of ordinary training leak",
        "sections": [{"body": [WORDS, {"columns": HEADS, "align": "llrrlll", "rows": table}]}],
    }
    (stored.FOLDER / "ordinary_training.json").write_text(stored.dumps(page), "utf-8")
    # The package tells its users what leaked from updates like theirs.
    place = Path(captured.__file__).parent / obstacles.MEASURED
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in table)
    place.write_text(f"[\n{rows}\n]\n", "utf-8")
    return 0


HEADS = [
    "model, data",
    "optimizer",
    "local steps",
    "batch",
    "examples reconstructed",
    "updates exposed",
    "updates with facts",
]
WORDS = (
    f"Each line is {RUNS} updates of untrained models (perceptrons: 200 units; float32 weights, as "
    "PyTorch's optimizer leaves them), with a 95 % interval (Clopper and Pearson) over examples. "
    "An example counts from 20 dB, or from 90 % of its columns. The attacker knows the optimizer, "
    "the rate, the steps and the batch size, but no label and no public data; digits are "
    "normalized. Attacks: "
    + "; ".join(f"{kind.name}: {', '.join(kind.attacks)}" for kind in KINDS)
    + ". *Facts* are values, levels or classes that an update reveals for certain. A low share is "
    "no protection: other attacks may do better."
)

if __name__ == "__main__":
    sys.exit(main())
