"""What does the leak meter cost a client? Prints times relative to its training step.

Real images (MNIST for SimpleConvNet, photographs for the others), one local step, no defense and
Gaussian noise. Steps, inspections and measurements are interleaved in one process; a second plain
step is the control. With the meter in every k-th round, a round costs the inspection and 1/k of the
measurement. About five minutes on one core; `--quick` takes only the smallest model.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
from collections.abc import Callable

import torch
from figures.rounds import turns

from leakbound import client, data, models
from leakbound.core import Batch, Task, Update
from leakbound.defenses import Chain, GaussianNoise, NoDefense, chain
from leakbound.inspection import inspect
from leakbound.meter import Policy, measure
from leakbound.protocol import send
from leakbound.randomness import stream

SIZES = (1, 16, 32)
EVERY = 10
MODELS: dict[str, tuple[str, str, dict[str, str]]] = {
    "SimpleConvNet": ("simple_convnet", "mnist5k", {}),
    "ConvNet": ("convnet64", "photos", {"norm": "none"}),
    "ResNet-18": ("resnet18", "photos", {}),
}
BOUNDED = Policy(error_bound=True)


def setting(name: str) -> tuple[Task, data.Dataset]:
    """A fresh model and its images; the first 256 are public."""
    build, source, settings = MODELS[name]
    own = data.load(source, limit=600)
    shape = tuple(own.inputs.shape[1:])
    net = getattr(models, build)(
        input_shape=shape, classes=own.classes, generator=stream(0, "model"), **settings
    )
    public = Batch(own.inputs[:256], own.labels[:256])
    return Task.of(net, classes=own.classes, public=public), own


def cost(name: str, size: int, rounds: int) -> str:
    """One line of the table."""
    task, own = setting(name)
    batch = Batch(own.inputs[256 : 256 + size], own.labels[256 : 256 + size])
    noise = chain(GaussianNoise(0.01))
    plain, noisy = (send(task, batch, d, stream(0, "send")) for d in (NoDefense(), noise))
    findings = inspect(task)

    def step() -> object:
        return client.gradient(task, batch.inputs, batch.labels)

    def read(update: Update, defense: Chain, policy: Policy) -> object:
        return measure(
            task,
            update,
            source=stream(0),
            batch=batch,
            defense=defense,
            policy=policy,
            findings=findings,
        )

    jobs: dict[str, Callable[[], object]] = {
        "step": step,
        "inspect": lambda: inspect(task),
        "measure": lambda: read(plain, NoDefense(), Policy()),
        "with a bound": lambda: read(noisy, noise, BOUNDED),
        "step again": step,
    }
    middle = {job: statistics.median(taken) for job, taken in turns(jobs, rounds).items()}
    one = middle["step"]
    shown = [f"{middle[j] / one:.2f}" for j in ("inspect", "measure", "with a bound")]
    often = (middle["inspect"] + middle["measure"] / EVERY) / one
    control = middle["step again"] / one
    cells = " | ".join([f"{1e3 * one:.1f}", *shown, f"{often:.2f}", f"{control:.2f}"])
    return f"| {name} | {size} | {cells} |"


def main() -> None:
    """The table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="SimpleConvNet alone, three rounds")
    quick = options.parse_args().quick
    torch.set_num_threads(1)
    print("ratios to one training step (medians of interleaved runs)")
    print(
        "| model | batch | step, ms | inspect | measure | measure with a bound "
        f"| meter, every {EVERY} | step again |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name in list(MODELS)[: 1 if quick else None]:
        for size in SIZES:
            print(cost(name, size, 3 if quick else 9), flush=True)


if __name__ == "__main__":
    main()
