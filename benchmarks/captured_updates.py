"""What do updates of undefended clients leak? Table of docs/reference/captured_update_details.md.

    python benchmarks/captured_updates.py [--few] [--trials N]

Plain PyTorch clients train on MNIST digits (SGD, rate 0.1), models at their initial weights. The
attack gets the weights before and after, and the auxiliary information; it never sees the true
images. Each row has one client per trial, with its own images and weights. `--few` runs short
searches on few images, to check that everything runs.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from leakbound import captured, data, models
from leakbound.assess import Assessment
from leakbound.core import Batch
from leakbound.randomness import stream
from leakbound.registry import Spec

SHAPE, RATE, THRESHOLD = (1, 28, 28), 0.1, 20.0
FEW_IMAGES, FEW_STEPS = 4, 30
MLP, CONVNET = "mlp", "simple_convnet"
CLOSED, MATCHING, LOCAL = "linear_inversion", "inverting_gradients", "fed_avg_matching"


@dataclass(frozen=True)
class Client:
    """One kind of client: its training, the auxiliary information, and the attacks."""

    model: str
    count: int
    steps: int
    batch_size: int | None
    told: tuple[str, ...]
    attacks: tuple[str, ...]


STEP = ("learning_rate", "steps", "examples")
CLIENTS = (
    Client(MLP, 1, 1, None, (), (CLOSED,)),
    Client(CONVNET, 1, 1, None, (), (MATCHING,)),
    Client(CONVNET, 1, 5, None, ("learning_rate", "examples"), (LOCAL,)),
    Client(MLP, 32, 1, None, STEP, (CLOSED, MATCHING)),
    Client(MLP, 32, 4, 8, (*STEP, "batch_size"), (CLOSED, LOCAL)),
    Client(CONVNET, 32, 1, None, STEP, (MATCHING,)),
)


def trained(client: Client, batch: Batch, seed: int) -> tuple[torch.nn.Module, dict, dict]:
    """The model, and its weights before and after the client's training."""
    model = getattr(models, client.model)(
        input_shape=SHAPE, classes=10, generator=stream(seed, "model", client.model)
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    size = client.batch_size or batch.size
    parts = list(zip(batch.inputs.split(size), batch.labels.split(size), strict=True))
    for step in range(client.steps):
        inputs, labels = parts[step % len(parts)]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model, before, {name: value.clone() for name, value in model.state_dict().items()}


def specs(client: Client, few: bool) -> list[Spec]:
    """The attacks by name; searches take few steps if asked."""
    return [
        Spec(name, (("steps", FEW_STEPS),) if few and name != CLOSED else ())
        for name in client.attacks
    ]


def shown(values: list[float | None], digits: int) -> str:
    """The mean of known values, or a dash if there are none."""
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):.{digits}f}" if known else "–"


def measure(client: Client, trials: int, few: bool) -> None:
    """Print one line an attack."""
    images = data.load("mnist5k")
    count = min(client.count, FEW_IMAGES) if few else client.count
    size = None if client.batch_size is None else min(client.batch_size, max(1, count // 4))
    client = Client(client.model, count, client.steps, size, client.told, client.attacks)
    known: dict[str, Any] = {
        "learning_rate": RATE, "steps": client.steps, "examples": count, "batch_size": size,
    }  # fmt: skip
    records: dict[str, list[Assessment]] = {name: [] for name in client.attacks}
    began = time.perf_counter()
    for trial in range(trials):
        order = torch.randperm(len(images.labels), generator=stream(trial, "images"))[:count]
        batch = Batch(images.inputs[order], images.labels[order])
        model, before, after = trained(client, batch, trial)
        outcome = captured.attack_update(
            captured.load(after, before),
            model,
            captured.Settings(SHAPE, attacks=specs(client, few)),
            captured.TrainingInfo(**{name: known[name] for name in client.told}),
            truth=batch,
        )
        for record in outcome.records:
            records[record.attack.name].append(record)
    seconds = (time.perf_counter() - began) / trials
    training = f"{count} images, {client.steps} steps" + (f" of {size}" if size else "")
    for name, own in records.items():
        ok = [record for record in own if record.status == "ok"]
        values = [value for record in ok for value in record.scores]
        if not values:
            print(f"| {client.model} | {training} | {name} | {own[0].reason} |", flush=True)
            continue
        blind = [value for record in ok for value in record.baseline]
        shares = [record.capture.explained and record.capture.explained.direction for record in ok]
        hits = sum(value >= THRESHOLD for value in values)
        print(
            f"| {client.model} | {training} | {', '.join(client.told) or 'nothing'} | {name} | "
            f"{shown(values, 1)} dB | {max(values):.1f} dB | {hits} of {len(values)} | "
            f"{shown(shares, 4)} | {shown(blind, 1)} dB | {trials} | {seconds:.0f} s |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", action="store_true", help="few images, short searches")
    parser.add_argument("--trials", type=int, default=1, help="clients a row")
    given = parser.parse_args()
    print("| model | training | known | attack | mean PSNR | best | at 20 dB | explains "
          "| without update | trials | time |")  # fmt: skip
    for client in CLIENTS:
        measure(client, given.trials, given.few)


if __name__ == "__main__":
    main()
