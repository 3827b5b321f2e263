"""Does `inspect` find malicious layers, and only these? 100 malicious and 112 ordinary models.

Malicious: imprints, trap weights, linear traps and special heads in many settings, in front of a
model and inside one. Half of them have shuffled rows, each row scaled by its own positive factor,
and 1 % of noise. Ordinary: models of every kind with fresh and trained weights, five distributions
of initial weights, dense and pruned. The last part has attackers who know what the inspection tests
for. About two minutes on one core; `--few` takes a tenth of each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from leakbound import client, data, models
from leakbound.attacks import LinearTrap, RobbingTheFed, TrapWeights
from leakbound.core import Batch, NotApplicable, Task
from leakbound.inspection import LayerFinding, inspect, statistics
from leakbound.pruning import Magnitude, Random, Snip
from leakbound.randomness import normal, stream, uniform
from leakbound_reproductions.attacks.head import special_head

Named = tuple[str, Task]
PUBLIC = 400


class Data:
    """One source, split into public images (what a server knows) and images to train on."""

    def __init__(self, source: str, **settings: Any) -> None:
        self.all = data.load(source, **settings)
        order = torch.randperm(len(self.all.labels), generator=stream(0, "order"))
        self.public = self.all.batch(order[:PUBLIC])
        self.rest = order[PUBLIC:]

    def task(self, model: str, seed: int, law: str = "default", **settings: Any) -> Task:
        """A fresh model; `law` is the distribution of its initial weights."""
        shape = tuple(self.all.inputs.shape[1:])
        source = stream(seed, "model", model)
        build = getattr(models, model)
        net = build(input_shape=shape, classes=self.all.classes, generator=source, **settings)
        redraw(net, law, seed)
        return Task.of(net, classes=self.all.classes, public=self.public)

    def trained(self, task: Task, steps: int, kind: str, seed: int) -> Task:
        """Some steps of SGD with momentum, or Adam, on batches of 32."""
        weights = nn.Parameter(task.parameters.clone())
        optimizer: torch.optim.Optimizer = torch.optim.SGD([weights], lr=0.02, momentum=0.9)
        if kind == "adam":
            optimizer = torch.optim.Adam([weights], lr=1e-3)
        source = stream(seed, "training")
        for _ in range(steps):
            index = self.rest[torch.randint(len(self.rest), (32,), generator=source)]
            batch = self.all.batch(index)
            slope = client.gradient(task, batch.inputs, batch.labels, weights.detach()).detach()
            weights.grad = slope * min(1.0, 5.0 / float(slope.norm()))
            optimizer.step()
        return task.with_parameters(weights.detach())


def redraw(net: nn.Module, law: str, seed: int) -> None:
    """Other initial weights of linear layers and convolutions; "default" is PyTorch's own."""
    source = stream(seed, "law")
    for module in net.modules():
        if law == "default" or not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        if law == "kaiming":
            nn.init.kaiming_normal_(module.weight, generator=source)
        elif law == "xavier":
            nn.init.xavier_uniform_(module.weight, generator=source)
        elif law == "orthogonal":
            nn.init.orthogonal_(module.weight, generator=source)
        elif law == "small":
            nn.init.normal_(module.weight, std=0.02, generator=source)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


GRAY: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mlp", {}),
    ("mlp", {"hidden": (256, 128)}),
    ("two_layer", {"width": 512}),
    ("lenet", {}),
    ("simple_convnet", {}),
)
COLOR: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mlp", {"hidden": (200,)}),
    ("lenet", {}),
    ("simple_convnet", {}),
    ("vgg", {"width": 0.25}),
    ("resnet18", {"width": 16}),
)
SMALL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mlp", {"hidden": (64,)}),
    ("mlp", {"hidden": (512,), "activation": "tanh"}),
)
LAWS = ("kaiming", "xavier", "orthogonal", "small")
PRUNINGS = (Magnitude(rate=0.9, scope="layer"), Random(rate=0.5), Snip(rate=0.5, scope="layer"))


def ordinary(sources: dict[str, Data]) -> Iterator[Named]:
    """112 models without malicious layers."""
    table = (("mnist5k", GRAY), ("photos", COLOR), ("digits", SMALL))
    for name, kinds in table:
        own = sources[name]
        for model, settings in kinds:
            words = f"{name} {model} {settings or ''}"
            steps = 100 if model in ("resnet18", "vgg") else 300
            fresh = own.task(model, 1, **settings)
            yield f"{words} fresh", fresh
            yield f"{words} fresh again", own.task(model, 2, **settings)
            for kind in ("sgd", "adam"):
                yield f"{words} {kind} {steps}", own.trained(fresh, steps, kind, 1)
            for law in LAWS[: 2 if steps == 100 else 3]:
                yield f"{words} {law}", own.task(model, 3, law, **settings)
            small = own.task(model, 4, "small", **settings)
            yield f"{words} small sgd", own.trained(small, steps, "sgd", 2)
    for name, kinds in table:
        own = sources[name]
        for model, settings in kinds[:2]:
            for pruning in PRUNINGS:
                task = own.task(model, 5, **settings)
                kept = pruning.start(task, own.public, stream(0, "pruning"))
                yield (
                    f"{name} {model} pruned {pruning!r}",
                    own.trained(task.pruned(kept), 300, "sgd", 3),
                )


def planted(sources: dict[str, Data]) -> Iterator[Named]:
    """100 malicious models: 50 settings, each as published and once more disguised."""
    for i, (words, task, layer) in enumerate(settings_of_plants(sources)):
        yield words, task
        yield f"{words}, disguised", disguised(task, layer, i)


def settings_of_plants(sources: dict[str, Data]) -> Iterator[tuple[str, Task, str | None]]:
    """Description, task with the malicious layer, and the name of that layer."""
    for name in ("mnist5k", "photos", "digits"):
        base = sources[name].task("mlp" if name == "digits" else "simple_convnet", 11)
        for measure in ("mean", "cosine", "random"):
            for bins in (32, 1000):
                attack = RobbingTheFed(bins=bins, measure=measure)
                yield f"{name} {measure} imprint of {bins}", attack.plant(base), "layer"
        for scale in (None, 0.5, 0.9, 0.97, 1.0):
            trap = TrapWeights(rows=256, scale=scale)
            yield f"{name} trap weights of scale {scale}", trap.plant(base), "layer"
        yield f"{name} linear trap", LinearTrap().plant(base), None
        yield f"{name} linear trap beside", LinearTrap(inside=True).plant(base), None
        for measure in ("mean", "cosine"):
            words = f"{name} {measure} imprint inside an MLP"
            yield words, inside(sources[name], RobbingTheFed(bins=128, measure=measure)), "1"
    base = sources["mnist5k"].task("mlp", 12)
    yield "trap weights inside an MLP", inside(sources["mnist5k"], TrapWeights(rows=128)), "1"
    yield "special head", special_head(base, 64, stream(0, "head")), "3"
    few = TrapWeights(rows=64, scale=0.9)
    yield "64 rows of trap weights", few.plant(base), "layer"
    yield "32 rows of trap weights", replace(few, rows=32).plant(base), "layer"
    yield "16 bins", RobbingTheFed(bins=16).plant(base), "layer"


def inside(own: Data, attack: RobbingTheFed | TrapWeights) -> Task:
    """The layer written into the first layer of an agreed MLP, with equal outgoing weights."""
    task = own.task("mlp", 13, hidden=(128,))
    front = attack.plant(task)
    parts = front.unflatten(front.parameters)
    flat = task.parameters.clone()
    own_parts = task.unflatten(flat)
    scale = attack.gain * len(parts["layer.bias"])
    own_parts["1.weight"].copy_(parts["layer.weight"] * scale)
    own_parts["1.bias"].copy_(parts["layer.bias"] * scale)
    own_parts["3.weight"].copy_(own_parts["3.weight"][:, :1].expand_as(own_parts["3.weight"]))
    return task.with_parameters(flat)


def disguised(task: Task, layer: str | None, seed: int, noise: float = 0.01) -> Task:
    """Rows shuffled, each times its own factor in (1/8, 8), and noise of 1 % of its size."""
    if layer is None:
        return task
    flat = task.parameters.clone()
    parts = task.unflatten(flat)
    weight, bias = parts[f"{layer}.weight"], parts[f"{layer}.bias"]
    source = stream(seed, "disguise")
    order = torch.randperm(len(weight), generator=source)
    factor = 8 ** (2 * uniform((len(weight),), source, like=weight) - 1)
    columns = layer == "3"  # of a special head it is the columns that count
    size = weight.square().mean(1).sqrt()
    if not columns:
        weight.copy_(weight[order] * factor[:, None])
        bias.copy_(bias[order] * factor)
        size = size[order] * factor
    weight.add_(noise * size[:, None] * normal(weight.shape, source, like=weight))
    bias.add_(noise * bias.abs() * normal(bias.shape, source, like=bias))
    return task.with_parameters(flat)


def evasions(sources: dict[str, Data]) -> Iterator[Named]:
    """Malicious layers that evade the tests; some kinds are never found without probes."""
    for name in ("mnist5k", "photos"):
        own = sources[name]
        base = own.task("simple_convnet", 21)
        still = own.public.inputs.flatten(1).var(0) < 1e-6
        source = stream(0, "evasion", name)
        for measure in ("mean", "cosine"):
            task = RobbingTheFed(bins=128, measure=measure).plant(base)
            for noise in (0.03, 0.1, 0.3):
                words = f"{name} {measure} imprint, noise {noise:.0%} on the rows"
                yield words, disguised(task, "layer", 1, noise)
            if bool(still.any()):
                flat = task.parameters.clone()
                weight = task.unflatten(flat)["layer.weight"]
                size = weight.norm(dim=1, keepdim=True)
                draw = normal(weight.shape, source, like=weight) * still
                weight.add_(3 * size * draw / draw.norm(dim=1, keepdim=True))
                words = f"{name} {measure} imprint, rows differ where images are empty"
                yield words, task.with_parameters(flat)
        yield f"{name} tuned trap weights, random numbers of negative weights", uneven(base, source)


def uneven(base: Task, source: torch.Generator, rows: int = 256, expected: int = 8) -> Task:
    """Trap weights tuned as in the library, but with independent random signs."""
    task = TrapWeights(rows=rows, expected=expected).plant(base)
    assert base.public is not None
    images = base.public.inputs.flatten(1)
    size = normal((rows, images.shape[1]), source).abs()
    negative = uniform(size.shape, source) < 0.5
    down, up = images @ (size * negative).T, images @ (size * ~negative).T
    scale = (down / up.clamp_min(1e-6)).quantile(1 / expected, 0)[:, None]
    flat = task.parameters.clone()
    weight = task.unflatten(flat)["layer.weight"]
    fresh = torch.where(negative, -size, scale * size)
    weight.copy_(fresh * weight.norm() / fresh.norm())
    return task.with_parameters(flat)


def bare(task: Task) -> Task:
    """The task without public images."""
    return replace(task, public=None)


def judged(
    named: Iterator[Named], every: int, probes: Callable[[Task], Batch | None]
) -> tuple[int, int, list[tuple[str, list[LayerFinding], list[LayerFinding]]]]:
    """How many of how many models were flagged, and what was found and measured on each."""
    rows, flagged = [], 0
    for i, (words, task) in enumerate(named):
        if i % every:
            continue
        found = list(inspect(task, probes(task)))
        flagged += bool(found)
        rows.append((words, found, list(statistics(task, probes(task)))))
    return flagged, len(rows), rows


def margins(
    rows: list[tuple[str, list[LayerFinding], list[LayerFinding]]],
) -> dict[str, tuple[float, str]]:
    """The largest statistic of every kind, and the model that has it."""
    worst: dict[str, tuple[float, str]] = {}
    for words, _, measured in rows:
        for one in measured:
            kind = "parallel rows" if one.kind in ("imprint", "near-duplicate rows") else one.kind
            if kind not in worst or one.strength > worst[kind][0]:
                worst[kind] = (one.strength, f"{words}, {one.layer}")
    return worst


def weakest(
    rows: list[tuple[str, list[LayerFinding], list[LayerFinding]]],
) -> dict[str, tuple[float, str]]:
    """The smallest statistic of every kind among the models that were flagged by it."""
    least: dict[str, tuple[float, str]] = {}
    for words, found, _ in rows:
        for one in found:
            if one.kind not in least or one.strength < least[one.kind][0]:
                least[one.kind] = (one.strength, words)
    return least


def main() -> int:
    """Print the table; exit code 1 unless all malicious and no ordinary models are flagged."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--few", action="store_true", help="a tenth of each")
    every = 10 if options.parse_args().few else 1
    torch.set_num_threads(1)
    sources = {
        "mnist5k": Data("mnist5k"),
        "photos": Data("photos"),
        "digits": Data("digits"),
    }

    def nothing(_: Task) -> Batch | None:
        return None  # the task's public images are the probes

    caught, tried, rows = judged(planted(sources), every, nothing)
    false, fine, quiet = judged(ordinary(sources), every, nothing)
    print(f"malicious models flagged: {caught} of {tried}")
    for words, found, _ in rows:
        if not found:
            print(f"  missed: {words}")
    print(f"ordinary models flagged: {false} of {fine}")
    for words, found, _ in quiet:
        for one in found:
            print(f"  false alarm: {words}: {one.layer} {one.kind} {one.strength:.4g}")
    print("attackers who know the tests (with public probes; then without any)")
    for words, task in evasions(sources):
        answers = [", ".join(f.kind for f in inspect(t)) or "not found" for t in (task, bare(task))]
        print(f"  {words}: {answers[0]}; {answers[1]}")
    print("largest statistic of an ordinary model")
    for kind, (value, words) in sorted(margins(quiet).items()):
        print(f"  {kind}: {value:.4g} ({words})")
    print("smallest statistic of a malicious model that was flagged by it")
    for kind, (value, words) in sorted(weakest(rows).items()):
        print(f"  {kind}: {value:.4g} ({words})")
    return 0 if caught == tried and false == 0 else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NotApplicable as error:
        sys.exit(str(error))
