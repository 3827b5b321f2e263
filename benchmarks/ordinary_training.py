"""What updates of ordinary training leak: writes docs/results/ordinary_training.json, and the same
rows into the package.

Each line is a model, an optimizer, a number of local steps and a batch size. PyTorch's own
optimizer trains on private examples; the attacker has the weights before and after, and knows the
optimizer, the rate, the steps and the batch size, but no label. A malicious server sends the same
model behind its own layer, built from public examples. About 50 minutes on two cores; `--server`
measures the malicious server's column alone, and keeps the others; `--only` measures the lines
whose model and optimizer are both named.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakbound import captured, data
from leakbound._util.intervals import clopper_pearson
from leakbound.assess.record import Assessment
from leakbound.attacks import RobbingTheFed
from leakbound.captured import Settings, TrainingInfo, obstacles
from leakbound.core import Batch, LocalPlan, Task
from leakbound.data.sources import Dataset

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import stored

RUNS = 8
BINS = 256
PUBLIC = 800
"""Units of the malicious server's layer, and the public examples that set their thresholds."""
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
    measure: str = "mean"
    after_sgd: tuple[str, ...] | None = None

    def attacks_after(self, rule: str) -> tuple[str, ...]:
        """The attacks on an update of an optimizer."""
        if self.after_sgd is not None and OPTIMIZERS[rule][1] == "sgd":
            return self.after_sgd
        return self.attacks

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
        # The mean of a row of one-hot columns says little of the row.
        measure="random",
    ),
    Kind(
        CONVOLUTIONS,
        "mnist5k",
        ("inverting_gradients,steps=300",),
        (1, 5),
        (1, 4),
        # L-BFGS gets to rounding where activations are smooth; 3,000 steps of the search do not.
        after_sgd=("dlg,steps=40,restarts=2",),
    ),
)


@cache
def _source(name: str) -> Dataset:
    return data.load(name)


def limits(kind: Kind) -> tuple[float, float]:
    """The range of the model's inputs."""
    if kind.source == "german":
        return 0.0, 1.0
    mean, deviation = MNIST
    return (0 - mean) / deviation, (1 - mean) / deviation


def batches_of(kind: Kind, count: int, seed: int) -> tuple[Batch, Batch]:
    """Private examples as the model gets them, and others that are public."""
    source = _source(kind.source)
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(source.labels), generator=draw)
    inputs = source.inputs
    if kind.source != "german":
        mean, deviation = MNIST
        inputs = (inputs - mean) / deviation
    mine, rest = order[:count], order[count : count + PUBLIC]
    return Batch(inputs[mine], source.labels[mine]), Batch(inputs[rest], source.labels[rest])


def trained(
    model: nn.Module, batch: Batch, rule: str, steps: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before and after, by PyTorch's own optimizer."""
    pytorch, _, rate, more = OPTIMIZERS[rule]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trainer = getattr(torch.optim, pytorch)(model.parameters(), lr=rate, **more)
    for _ in range(steps):
        trainer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
        trainer.step()
    return before, dict(model.state_dict())


def attacked(
    kind: Kind, model: nn.Module, rule: str, steps: int, batch: Batch, attacks: tuple[str, ...]
) -> list[Assessment]:
    """The result of every attack on an update of the model, which this trains."""
    _, name, rate, more = OPTIMIZERS[rule]
    source = _source(kind.source)
    before, after = trained(model, batch, rule, steps)
    settings = Settings(
        tuple(batch.inputs.shape[1:]),
        limits(kind),
        attacks=attacks,
        domain=source.domain if kind.source == "german" else None,
    )
    known = TrainingInfo(
        examples=batch.size,
        learning_rate=rate,
        steps=steps,
        weight_decay=more.get("weight_decay"),
        optimizer=name,
    )
    update = captured.load(after, before, kind="weights")
    return captured.attack_update(update, model, settings, known, truth=batch).records


def right(record: Assessment) -> int:
    """How many examples an attack reconstructs."""
    return sum((score or 0.0) >= record.criterion.value for score in record.scores or ())


def one(kind: Kind, rule: str, steps: int, count: int, seed: int) -> tuple[int, bool, bool]:
    """Examples that the best attack reconstructs, whether the verdict is *exposed*, and whether the
    update reveals facts.
    """
    model = kind.model(_source(kind.source), seed)
    batch, _ = batches_of(kind, count, seed)
    records = attacked(kind, model, rule, steps, batch, kind.attacks_after(rule))
    ends = {record.verdict for record in records}
    return (
        max(map(right, records), default=0),
        bool({"exposed", "exposed (certified)"} & ends),
        any(record.facts for record in records),
    )


def by_server(kind: Kind, rule: str, steps: int, count: int, seed: int) -> int:
    """Examples that a malicious server reconstructs from the same client."""
    _, name, rate, more = OPTIMIZERS[rule]
    source = _source(kind.source)
    batch, public = batches_of(kind, count, seed)
    task = Task.of(
        kind.model(source, seed),
        plan=LocalPlan(steps, rate, optimizer=name, **more),
        input_range=limits(kind),
        classes=int(source.labels.max()) + 1,
        public=public,
    )
    sent = RobbingTheFed(bins=BINS, measure=kind.measure).plant(task)
    model = sent.model.requires_grad_()
    model.load_state_dict(sent.tensors())
    (record,) = attacked(kind, model, rule, steps, batch, ("robbing_the_fed",))
    return right(record)


Cell = tuple[Kind, str, int, int]


def shown(right: int, total: int) -> str:
    """A count with its interval."""
    low, high = clopper_pearson(right, total, 0.025)
    return f"{right} of {total} ({100 * low:.0f} to {100 * high:.0f} %)"


def _honest(cell: Cell) -> list[str]:
    """A line without the malicious server."""
    torch.set_num_threads(1)
    kind, rule, steps, count = cell
    runs = [one(*cell, seed) for seed in range(RUNS)]
    return [
        kind.name,
        rule,
        str(steps),
        str(count),
        shown(sum(run[0] for run in runs), RUNS * count),
        f"{sum(run[1] for run in runs)} of {RUNS}",
        f"{sum(run[2] for run in runs)} of {RUNS}",
    ]


def _line(work: tuple[int, Cell, list[str] | None]) -> tuple[int, list[str]]:
    torch.set_num_threads(1)
    at, cell, known = work
    row = known or _honest(cell)
    *_, count = cell
    right = sum(by_server(*cell, seed) for seed in range(RUNS))
    row = [*row[:7], shown(right, RUNS * count)]
    print(" | ".join(row), flush=True)
    return at, row


def main() -> int:
    """Measure every line and write the page."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--server", action="store_true", help="the last column alone")
    options.add_argument("--only", nargs="+", metavar="NAME", help="models and optimizers")
    options.add_argument("--processes", type=int, default=2)
    given = options.parse_args()
    # The package tells its users what leaked from updates like theirs.
    place = Path(captured.__file__).parent / obstacles.MEASURED
    cells = [
        (kind, rule, steps, count)
        for kind in KINDS
        for rule in OPTIMIZERS
        for steps in kind.steps
        for count in kind.batches
    ]
    known: list[list[str] | None] = [None] * len(cells)
    if given.server or given.only:
        known = json.loads(place.read_text("utf-8"))
    table = [row or [] for row in known]
    work = []
    for at, (cell, row) in enumerate(zip(cells, known, strict=True)):
        if not given.only or {cell[0].name, cell[1]} <= set(given.only):
            work.append((at, cell, row if given.server else None))
    with multiprocessing.Pool(given.processes) as pool:
        for at, row in pool.imap(_line, work):
            table[at] = row
    page = {
        "title": "What updates of ordinary training leak",
        "sections": [{"body": [WORDS, {"columns": HEADS, "align": "llrrllll", "rows": table}]}],
    }
    (stored.FOLDER / "ordinary_training.json").write_text(stored.dumps(page), "utf-8")
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in table)
    place.write_text(f"[\n{rows}\n]\n", "utf-8")
    return 0


def _named(kind: Kind) -> str:
    """A kind with its attacks."""
    after = "" if kind.after_sgd is None else f" ({', '.join(kind.after_sgd)} after SGD)"
    return f"{kind.name}: {', '.join(kind.attacks)}{after}"


HEADS = [
    "model, data",
    "optimizer",
    "local steps",
    "batch",
    "examples reconstructed",
    "updates exposed",
    "updates with facts",
    "examples, malicious server",
]
WORDS = (
    f"Each line is {RUNS} updates of untrained models (perceptrons: 200 units; float32 weights, as "
    "PyTorch's optimizer leaves them), with a 95 % interval (Clopper and Pearson) over examples. "
    "An example counts from 20 dB, or from 90 % of its columns. The attacker knows the optimizer, "
    "the rate, the steps and the batch size, but no label and no public data; digits are "
    "normalized. Attacks: "
    + "; ".join(map(_named, KINDS))
    + ". A malicious server sends the model behind `robbing_the_fed`'s layer "
    f"({BINS} units, {PUBLIC} other examples as public ones): another update, which shows nothing "
    "of the others. It may send the agreed model instead. *Facts* are values, levels or classes "
    "that an update reveals for certain. A low share is no protection: other attacks may do better."
)

if __name__ == "__main__":
    sys.exit(main())
