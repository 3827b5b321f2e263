"""What a malicious server's layer reads through ordinary training: writes
docs/results/malicious_training.json.

PyTorch's own optimizers train two convolutions with batch norm in training mode, behind the layer.
The server knows the optimizer, its settings and the number of steps. About 30 minutes on one core.
Names of attacks as arguments measure only these, and keep the other rows of the page.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakbound import data
from leakbound._util import copies
from leakbound._util.intervals import clopper_pearson
from leakbound.attacks import Attack, Fishing, RobbingTheFed, TrapWeights
from leakbound.core import (
    Batch,
    LocalPlan,
    Observation,
    Server,
    Task,
    ThreatModel,
    Unit,
    Update,
)
from leakbound.domains import of_shape
from leakbound.pairing import squared_distances
from leakbound.randomness import stream

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import stored

RUNS = 8
FISHED = 20
"""Updates of a training, and of one under fishing, which asks for one example of each."""
BATCH = 4
MNIST = 0.1307, 0.3081
LIMITS = (0 - MNIST[0]) / MNIST[1], (1 - MNIST[0]) / MNIST[1]
ATTACKS: dict[str, Attack] = {
    "robbing_the_fed": RobbingTheFed(bins=128),
    "trap_weights": TrapWeights(rows=128),
    "fishing": Fishing("linear_inversion"),
}
OPTIMIZERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "SGD": ("SGD", "sgd", {"lr": 0.1}),
    "SGD, momentum .9": ("SGD", "sgd", {"lr": 0.1, "momentum": 0.9}),
    "Adam, decay .0001": ("Adam", "adam", {"lr": 1e-3, "weight_decay": 1e-4}),
    "AdamW, decay .01": ("AdamW", "adamw", {"lr": 1e-3, "weight_decay": 1e-2}),
    "RMSprop": ("RMSprop", "rmsprop", {"lr": 1e-3}),
    "Adagrad": ("Adagrad", "adagrad", {"lr": 1e-2}),
}
"""PyTorch's class, our name, and the settings."""
TRAININGS = ((1, 1), (5, 1), (10, 1), (5, 5), (10, 10))
"""Local steps, and how many different batches these see."""
SCALE = 1024.0
"""Of gradients in float16: PyTorch begins with more, and skips steps until it has come down."""
PRECISIONS = ("float32", "float16 autocast", "bfloat16 weights")


@dataclass(frozen=True)
class Cell:
    """One line of the table under one precision."""

    attack: str
    optimizer: str
    steps: int
    batches: int
    precision: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bfloat16 weights" else torch.float32


@cache
def digits() -> tuple[Batch, Batch]:
    """2,000 public digits and 3,000 private ones, normalized."""
    found = data.load("mnist5k")
    order = torch.randperm(5000, generator=stream(0, "malicious training"))
    inputs = (found.inputs - MNIST[0]) / MNIST[1]
    public, private = order[:2000], order[2000:]
    return (
        Batch(inputs[public], found.labels[public]),
        Batch(inputs[private], found.labels[private]),
    )


def network(seed: int, attack: str) -> nn.Module:
    """Two convolutions with batch norm in training mode; a perceptron under fishing, whose inner
    attack reads a linear layer.
    """
    torch.manual_seed(seed)
    if attack == "fishing":
        norm = nn.BatchNorm1d(128, track_running_stats=False)
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 128),
            norm,
            nn.ReLU(),
            nn.Linear(128, 10),
        )
    layers: list[nn.Module] = []
    for inside, outside in ((1, 8), (8, 16)):
        mixes = nn.BatchNorm2d(outside, track_running_stats=False)
        layers += [nn.Conv2d(inside, outside, 5, stride=2, padding=2), mixes, nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 49, 10))


def trained(task: Task, cell: Cell, batch: Batch) -> Tensor:
    """The flat weights that PyTorch's optimizer leaves."""
    model = copies.duplicate(task.model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in task.tensors().items():
        tensors[name].data = value.clone()
    pytorch, _, settings = OPTIMIZERS[cell.optimizer]
    rule = getattr(torch.optim, pytorch)(model.requires_grad_().parameters(), **settings)
    half = cell.precision == PRECISIONS[1]
    scaler = torch.amp.GradScaler("cpu", SCALE, enabled=half)
    for step in range(cell.steps):
        at = slice(step % cell.batches * BATCH, (step % cell.batches + 1) * BATCH)
        rule.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=half):
            output = model(batch.inputs[at].to(cell.dtype))
            loss = nn.functional.cross_entropy(output, batch.labels[at])
        scaler.scale(loss).backward()
        scaler.step(rule)
        scaler.update()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).float()


def read(cell: Cell, seed: int) -> tuple[int, int]:
    """How many examples of a client the server reconstructs at 20 dB, and how many there are."""
    public, private = digits()
    size = cell.batches * BATCH
    at = torch.randperm(private.size, generator=stream(seed, "batch"))[:size]
    batch = Batch(private.inputs[at], private.labels[at])
    _, name, settings = OPTIMIZERS[cell.optimizer]
    more = dict(settings)
    rate = more.pop("lr")
    part = BATCH if cell.batches > 1 else None
    agreed = Task.of(
        network(seed, cell.attack).to(cell.dtype),
        plan=LocalPlan(cell.steps, rate, batch_size=part, optimizer=name, **more),
        input_range=LIMITS,
        classes=10,
        public=Batch(public.inputs.to(cell.dtype), public.labels),
        domain=of_shape((1, 28, 28), LIMITS),
    )
    attack = ATTACKS[cell.attack]
    if isinstance(attack, Fishing):
        attack = replace(attack, expected=size)
    sent = attack.plant(agreed)
    row = (sent.parameters.float() - trained(sent, cell, batch)) / rate
    wide = sent.to("cpu", torch.float32)
    seen = Observation(
        Update(row[None], Unit.CLIENT, (size,)),
        wide,
        (size,),
        (1, 28, 28),
        threat=ThreatModel(server=Server.MALICIOUS, labels_known=False),
        auxiliary=wide.public,
    )
    answers = attack(seen, stream(seed, "attack")).inputs
    # An answer counts for the example that is nearest to it alone.
    apart = squared_distances(batch.inputs, answers)
    limit = 0.01 * (LIMITS[1] - LIMITS[0]) ** 2
    blind = squared_distances(batch.inputs, public.inputs.mean(0, keepdim=True))[:, 0]
    owner = apart.argmin(0)
    right = {
        int(i) for i, a in zip(owner, apart.amin(0), strict=True) if a <= limit and a < blind[i]
    }
    return len(right), size


def line(attack: str, optimizer: str, steps: int, batches: int) -> list[str]:
    """The row of a training: examples reconstructed, or updates of which one is."""
    row = [attack, optimizer, str(steps), str(batches)]
    fishes = attack == "fishing"
    for precision in PRECISIONS:
        cell = Cell(attack, optimizer, steps, batches, precision)
        runs = [read(cell, seed) for seed in range(FISHED if fishes else RUNS)]
        if fishes:
            runs = [(int(right > 0), 1) for right, _ in runs]
        right, total = (sum(counts) for counts in zip(*runs, strict=True))
        low, high = clopper_pearson(right, total, 0.025)
        row.append(f"{right} of {total} ({100 * low:.0f} to {100 * high:.0f} %)")
    print(" | ".join(row), flush=True)
    return row


def measured() -> list[list[str]]:
    """The rows of the page."""
    sections = json.loads(PAGE.read_text("utf-8"))["sections"]
    return [row for section in sections for row in section["body"][-1]["rows"]]


def write(rows: list[list[str]]) -> None:
    """Write the page."""
    layers = [row for row in rows if row[0] != "fishing"]
    fished = [row for row in rows if row[0] == "fishing"]
    tables = [{"columns": HEADS, "align": "llrrlll", "rows": part} for part in (layers, fished)]
    page = {
        "title": "A malicious server's layer through ordinary training",
        "sections": [
            {"body": [WORDS, tables[0]]},
            {"heading": "Fishing", "body": [FISHING, tables[1]]},
        ],
    }
    PAGE.write_text(stored.dumps(page), "utf-8")


def main() -> int:
    """Measure every line, or those of the attacks that are named, and write the page."""
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or [*ATTACKS]
    rows = []
    if wanted != [*ATTACKS]:
        rows = [row for row in measured() if row[0] not in wanted]
    for attack, optimizer, training in product(wanted, OPTIMIZERS, TRAININGS):
        rows.append(line(attack, optimizer, *training))
    write(rows)
    return 0


PAGE = stored.FOLDER / "malicious_training.json"
HEADS = ["attack", "optimizer", "local steps", "batches", *PRECISIONS]
WORDS = (
    f"Examples reconstructed (20 dB or more, and better than the mean public image) from {RUNS} "
    f"updates of batches of {BATCH}, with a 95 % interval (Clopper and Pearson) over examples. Two "
    "convolutions with batch norm in training mode, digits, PyTorch's own optimizers; 128 units. "
    "The server knows optimizer, settings and steps, and has 2,000 other digits. Steps that see "
    "several batches hold the examples of all: under trap_weights, several of 40 share most rows. "
    "PyTorch scales gradients of float16 (by 1,024 at "
    "first)."
)
FISHING = (
    f"Updates of {FISHED} from which an example is reconstructed, in the same trainings. Fishing "
    "asks for one example of an update. The model is a perceptron with batch norm in training mode "
    "(128 units), and the inner attack is linear_inversion. The server holds the model still: it "
    "sends frozen weights, plus trained ones that start at 0 with a very small gain. It puts the "
    "statistics of its own digits into batch norms."
)

if __name__ == "__main__":
    sys.exit(main())
