"""What do malicious servers read of 4 clients x 64 images in one sum, and do clients notice?

First part: 12 rounds behind secure aggregation, each with a fresh model and fresh private images.
An image counts as read at 20 dB or more, if the mean public image is farther from it. Second part:
the share of 30 malicious models that `inspect` marks, as published and disguised, with 95 % Wilson
intervals. Ordinary models are those of `inspection.py`. Third part: how many of 64 digits remain
under a fishing output layer. About 40 minutes on one core; `--few` does
two rounds and three models, `--part` one part alone.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from inspection import Data, disguised
from scipy import stats
from torch import Tensor

from leakbound.attacks import (
    Attack,
    Codebook,
    Fishing,
    LinearTrap,
    Loki,
    MeanImage,
    RobbingTheFed,
    TrapWeights,
    inverting_gradients,
)
from leakbound.client import forward
from leakbound.core import Batch, Reconstruction, Server, Task, ThreatModel
from leakbound.defenses import Defense, GaussianNoise, SecureAggregation, chain
from leakbound.inspection import inspect
from leakbound.pairing import pair, squared_distances
from leakbound.protocol import play
from leakbound.randomness import normal, stream

CLIENTS, EACH, ROUNDS, MODELS = 4, 64, 12, 30
SHORT = inverting_gradients(steps=1000, restarts=1)

MLP, WIDE = {"hidden": (256,)}, {"hidden": (1024,)}
Row = tuple[str, str, str, dict[str, object], Attack]
READ: tuple[Row, ...] = (
    ("robbing_the_fed, 256 bins", "mnist5k", "lenet", {}, RobbingTheFed(bins=256)),
    ("trap_weights, 256 rows", "mnist5k", "lenet", {}, TrapWeights(rows=256, expected=256)),
    ("codebook, 100 words", "mnist5k", "lenet", {}, Codebook()),
    ("loki, 256 bins", "mnist5k", "lenet", {}, Loki(bins=256)),
    ("fishing feature + linear", "mnist5k", "mlp", MLP, Fishing("linear_inversion", "feature")),
    ("fishing direction + linear", "mnist5k", "mlp", MLP, Fishing("linear_inversion")),
    ("fishing direction + matching", "mnist5k", "lenet", {}, Fishing(SHORT)),
    ("fishing class + linear", "mnist5k", "mlp", MLP, Fishing("linear_inversion", "class")),
    ("fishing class + sparse", "mnist5k", "mlp", MLP, Fishing("sparse_recovery", "class")),
    (
        "fishing class + sparse, one model for all",
        *("mnist5k", "mlp", WIDE, Fishing("sparse_recovery", "class", alone=False)),
    ),
    ("robbing_the_fed, 256 bins", "photos", "lenet", {}, RobbingTheFed(bins=256)),
    ("loki, 256 bins", "photos", "lenet", {}, Loki(bins=256)),
    ("fishing direction + matching", "photos", "lenet", {}, Fishing(SHORT)),
    ("fishing class + sparse", "photos", "mlp", MLP, Fishing("sparse_recovery", "class")),
)
NOISY = ("loki, 256 bins", "mnist5k", "lenet", {}, Loki(bins=256))


def psnr(truth: Tensor, answer: Reconstruction) -> Tensor:
    """(N,) in dB, paired such that most images are read: errors above 20 dB's count as 20 dB's."""

    def costs(a: Tensor, b: Tensor) -> Tensor:
        return squared_distances(a, b).clamp_max(0.01)

    own = pair(Batch(truth, torch.zeros(len(truth))), answer, costs).inputs
    error = (own.double() - truth.double()).square().flatten(1).mean(1)
    return -10 * error.clamp_min(1e-15).log10()


def read(
    own: Data, model: str, settings: dict[str, object], attack: Attack, seed: int, defense: Defense
) -> tuple[int, int, float]:
    """How many images an attack and the mean public image read, and the seconds of the attack."""
    task = own.task(model, 1000 + seed, **settings)
    order = torch.randperm(len(own.rest), generator=stream(seed, "private"))
    own_images = [own.rest[part] for part in order[: CLIENTS * EACH].split(EACH)]
    batches = [own.all.batch(index) for index in own_images]
    sources = [stream(seed, "defense", i) for i in range(CLIENTS + 1)]
    threat = ThreatModel(server=Server.MALICIOUS)
    seen = play(task, batches, defense, sources, threat=threat, attack=attack)
    began = time.perf_counter()
    answer = attack(seen.observation, stream(seed, "attack"))
    took = time.perf_counter() - began
    blind = MeanImage()(seen.observation, stream(seed, "blind"))
    found, prior = (psnr(seen.truth.inputs, one) for one in (answer, blind))
    return int(((found >= 20) & (found > prior)).sum()), int((prior >= 20).sum()), took


def interval(counts: list[float]) -> str:
    """The mean of rounds and its 95 % t interval."""
    values = torch.tensor(counts).double()
    half = stats.t.ppf(0.975, len(counts) - 1) * float(values.std()) / len(counts) ** 0.5
    return f"{float(values.mean()):.1f} ± {half:.1f}"


def first_part(sources: dict[str, Data], rounds: int, only: str) -> None:
    """The table of images read."""
    print("| images, model | attack | images read of 256 | rounds with some | mean image | s |")
    print("|---|---|--:|--:|--:|--:|")
    summed = SecureAggregation(CLIENTS)
    table = [(*row, summed) for row in READ]
    table += [(*NOISY, chain(GaussianNoise(std), summed)) for std in (0.01, 0.1)]
    for name, source, model, settings, attack, defense in table:
        if not name.startswith(only):
            continue
        own, tried = sources[source], []
        for seed in range(rounds):
            tried.append(read(own, model, settings, attack, seed, defense))
        counts, blind, seconds = zip(*tried, strict=True)
        noise = "" if defense is summed else f", {defense!r}"
        print(
            f"| {source}, {model} | {name}{noise} | {interval(list(counts))} | "
            f"{sum(count > 0 for count in counts)} of {rounds} | {sum(blind) / rounds:.1f} | "
            f"{sum(seconds) / rounds:.1f} |",
            flush=True,
        )


def noisy_head(task: Task, seed: int, noise: float = 0.01) -> Task:
    """The other classes' rows of an output layer get noise of a share of the largest row."""
    flat = task.parameters.clone()
    parts = task.unflatten(flat)
    name = [n for n in parts if n.endswith(".weight")][-1]
    rows = parts[name]
    size = noise * rows.norm(dim=1).max() / rows.shape[1] ** 0.5
    rows.add_(size * normal(rows.shape, stream(seed, "head"), like=rows))
    return task.with_parameters(flat)


def noisy_routes(task: Task, seed: int) -> Task:
    """Disguised rows, and noise of 1 % instead of zeros in the kernels."""
    flat = disguised_rows(task, seed).parameters.clone()
    kernels = task.unflatten(flat)["routes.weight"]
    kernels.add_(0.01 * normal(kernels.shape, stream(seed, "kernels"), like=kernels))
    return task.with_parameters(flat)


def disguised_rows(task: Task, seed: int) -> Task:
    """Rows in another order and scale with 1 % of noise, for a layer without biases."""
    flat = task.parameters.clone()
    weight = task.unflatten(flat)["layer.weight"]
    source = stream(seed, "disguise")
    weight.copy_(weight[torch.randperm(len(weight), generator=source)])
    size = weight.square().mean(1, keepdim=True).sqrt()
    weight.add_(0.01 * size * normal(weight.shape, source, like=weight))
    return task.with_parameters(flat)


def same(task: Task, seed: int) -> Task:
    """No disguise."""
    return task


def rows_of(task: Task, seed: int) -> Task:
    """The disguise of `inspection.py`."""
    return disguised(task, "layer", seed)


Disguise = Callable[[Task, int], Task]
SENT: tuple[tuple[str, Attack, tuple[Disguise, ...]], ...] = (
    ("robbing_the_fed", RobbingTheFed(bins=256), (same, rows_of)),
    ("trap_weights", TrapWeights(), (same, rows_of)),
    ("linear_trap", LinearTrap(), (same,)),
    ("codebook", Codebook(), (same,)),
    ("fishing, class", Fishing(target="class"), (same, noisy_head)),
    ("fishing, feature", Fishing(target="feature"), (same, noisy_head)),
    ("fishing, direction", Fishing(target="direction"), (same, noisy_head)),
    ("loki", Loki(), (same, noisy_routes)),
)
KINDS = (("mnist5k", "lenet"), ("mnist5k", "mlp"), ("photos", "lenet"))


def wilson(hits: int, n: int) -> str:
    """A share with its 95 % interval."""
    low, high = stats.binomtest(hits, n).proportion_ci(method="wilson")
    return f"{hits} of {n} ({100 * low:.1f} to {100 * high:.1f} %)"


def second_part(sources: dict[str, Data], models: int) -> None:
    """The table of marks; every second model was trained for 100 steps before."""
    bases = []
    for i in range(models):
        source, model = KINDS[i % len(KINDS)]
        task = sources[source].task(model, 2000 + i)
        bases.append(sources[source].trained(task, 100, "sgd", i) if i % 2 else task)
    marks = [bool(inspect(task)) for task in bases]
    print(f"the {models} models before: marked {wilson(sum(marks), models)}")
    print("| sent | disguise | marked | from the weights alone | kinds of marks |")
    print("|---|---|--:|--:|---|")
    for name, attack, disguises in SENT:
        for disguise in disguises:
            found, bare, kinds = 0, 0, Counter[str]()
            for i, task in enumerate(bases):
                planted = disguise(attack.plant_each(task, CLIENTS)[0], i)
                seen = inspect(planted)
                found += bool(seen)
                kinds.update({one.kind for one in seen})
                bare += bool(inspect(replace(planted, public=None)))
            words = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
            shown = wilson(found, models), wilson(bare, models)
            print(f"| {name} | {disguise.__name__} | {shown[0]} | {shown[1]} | {words} |")


def third_part(own: Data, models: int) -> None:
    """How many of 64 private digits remain under each output layer, on average."""
    private = own.all.batch(own.rest)
    for target in ("class", "feature", "direction"):
        left = []
        for seed in range(models):
            task = Fishing(target=target).plant(own.task("lenet", 1000 + seed))
            parts = task.unflatten(task.parameters)
            weight = [part for name, part in parts.items() if name.endswith("weight")][-1]
            label = int(weight.norm(dim=1).argmax())
            chance = forward(task, private.inputs).softmax(1)[:, label]
            weights = (chance - (private.labels == label).to(chance)).abs()
            left.append(EACH * float(weights.mean()))
        print(f"{target}: {interval(left)} of {EACH} remain (n = {models} models)")


def split(source: str) -> Data:
    """Public, for tuning, and private examples: settings were tuned on the second part."""
    own = Data(source)
    order = torch.randperm(len(own.all.labels), generator=torch.Generator().manual_seed(5))
    public, _, own.rest = order.tensor_split([len(order) // 5, 3 * len(order) // 5])
    own.public = own.all.batch(public)
    return own


def main() -> None:
    """Both tables."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--few", action="store_true", help="two rounds, three models")
    options.add_argument("--part", type=int, choices=(1, 2, 3), help="one part alone")
    options.add_argument("--only", default="", help="the rows of the first part that start so")
    given = options.parse_args()
    torch.set_num_threads(1)
    sources = {name: split(name) for name in ("mnist5k", "photos")}
    if given.part in (None, 1):
        first_part(sources, 2 if given.few else ROUNDS, given.only)
    if given.part in (None, 2):
        second_part(sources, 3 if given.few else MODELS)
    if given.part in (None, 3):
        third_part(sources["mnist5k"], 3 if given.few else MODELS)


if __name__ == "__main__":
    main()
