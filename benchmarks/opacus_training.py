"""Does noise of a public shape train better than isotropic noise at equal epsilon?

A small CNN with group norm on real MNIST digits through Opacus' own loaders: `RiskEngine` with and
without a public shape, at one noise multiplier, so at one epsilon. The clip norm of each arm is the
median (whitened) norm of public images' gradients at the initial weights; its learning rate is
chosen on a seed that is not reported. Pairs share initial weights and batches. Prints a table;
`--tiny` checks in seconds that it runs. About five minutes of one core.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
import time
import warnings

import numpy as np
import torch
from scipy import optimize, stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from leakbound import data
from leakbound.bounds import conversions
from leakbound.client import example_gradients
from leakbound.defenses.whitening import Whiten
from leakbound.opacus import PublicRoot, RiskEngine
from leakbound.random import stream
from leakbound.types import Batch, Task

EPSILON, DELTA = 3.0, 1e-5
BATCH, EPOCHS, SEEDS = 175, 10, 8
RATES = (0.25, 0.5, 1.0, 2.0)
"""Learning rate times clip norm: what one example moves the weights by, times the batch."""
ARMS: dict[str, Whiten | None] = {
    "isotropic": None,
    "whitened, energy": Whiten(refresh=20),
    "whitened, layers": Whiten(correlation="layers", refresh=20),
}


def model(seed: int) -> nn.Module:
    """16 and 32 channels, group norm, ReLU, an average pool."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 5, 2, 2),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.AvgPool2d(3, 2),
            nn.Flatten(),
            nn.Linear(288, 10),
        )


def parts() -> dict[str, Batch]:
    """Disjoint parts of the digits: public 500, train 3,500, test 1,000."""
    digits = data.load("mnist5k")
    shares = {"public": 0.1, "train": 0.7, "test": 0.2}
    rows = data.split(len(digits.labels), shares, seed=0, name="opacus")
    return {name: Batch(digits.inputs[at], digits.labels[at]) for name, at in rows.items()}


def clip_norm(net: nn.Module, public: Batch, whiten: Whiten | None) -> float:
    """The median norm of public images' gradients, in the coordinates that are clipped."""
    part = Batch(public.inputs[:64], public.labels[:64])
    rows = example_gradients(Task.of(net), part.inputs, part.labels)
    if whiten is not None:
        root = PublicRoot.of(net, public, whiten, examples=BATCH)
        rows = root.now([True] * len(root.parameters)).whiten(rows)
    return float(rows.norm(dim=1).median())


def train(seed: int, arm: str, rate: float, noise: float, held: dict[str, Batch], epochs: int):
    """Test accuracy, epsilon by the statement, and seconds of one training run."""
    whiten = ARMS[arm]
    net = model(seed)
    clip = clip_norm(net, held["public"], whiten)
    own, public = held["train"], held["public"]
    engine = RiskEngine()
    began = time.perf_counter()
    shaped = {} if whiten is None else {"whiten": whiten, "public": public}
    private, optimizer, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=rate / clip, momentum=0.5),
        data_loader=DataLoader(
            TensorDataset(own.inputs, own.labels),
            batch_size=BATCH,
            generator=stream(seed, "batches"),
        ),
        noise_multiplier=noise,
        max_grad_norm=clip,
        noise_generator=stream(seed, "noise"),
        **shaped,
    )
    for _ in range(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(private(inputs), labels).backward()
            optimizer.step()
    seconds = time.perf_counter() - began
    net.eval()
    with torch.no_grad():
        right = (net(held["test"].inputs).argmax(1) == held["test"].labels).double().mean()
    found = engine.risk(dim=784, norm=9.2, psnr=20, delta=DELTA)
    return float(right), found.epsilon, seconds


def main() -> None:
    """The table and the paired intervals."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    torch.set_num_threads(1)
    tiny = "--tiny" in sys.argv
    epochs, seeds = (1, 2) if tiny else (EPOCHS, SEEDS)
    held = parts()
    steps = -(-held["train"].size // BATCH)
    at = {"delta": DELTA, "steps": epochs * steps, "sampling_rate": 1 / steps}
    noise = optimize.brentq(lambda s: conversions.epsilon(s, **at) - EPSILON, 0.3, 30.0)
    size = sum(p.numel() for p in model(0).parameters())
    print(f"{size} weights, {epochs} epochs of {steps} steps, noise multiplier {noise:.3f}")
    found: dict[str, list[float]] = {}
    for arm in ARMS:
        tuned = {r: train(1000, arm, r, noise, held, epochs)[0] for r in RATES}
        best = max(tuned, key=lambda r: tuned[r])
        runs = [train(seed, arm, best, noise, held, epochs) for seed in range(seeds)]
        found[arm] = [100 * right for right, *_ in runs]
        seconds = np.median([took for *_, took in runs])
        print(
            f"{arm}: rate {best:g} of {tuned}; accuracy {np.mean(found[arm]):.2f} % "
            f"{[round(v, 1) for v in found[arm]]}, epsilon {runs[0][1]:.3f}, {seconds:.1f} s",
            flush=True,
        )
    for arm in list(ARMS)[1:]:
        gap = np.array(found[arm]) - np.array(found["isotropic"])
        low, high = stats.t.interval(0.95, len(gap) - 1, gap.mean(), stats.sem(gap))
        print(
            f"{arm} less isotropic: {gap.mean():.2f} points [{low:.2f}, {high:.2f}], n={len(gap)}"
        )


if __name__ == "__main__":
    main()
