"""One experiment of the study: train a federation, attack one client, measure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from leakbound import client, data, metrics, pairing, pruning, registry
from leakbound.attacks import sparse_gradient_inversion
from leakbound.attacks.across_rounds import AcrossRounds
from leakbound.attacks.base import Attack
from leakbound.attacks.mixed_start import MixedStart
from leakbound.core import Batch, NotApplicable, Observation, Task
from leakbound.data import Dataset, federated
from leakbound.defenses.base import Chain, chain
from leakbound.metrics import INFORMATION
from leakbound.randomness import permutation, stream
from leakbound_reproductions.federation import FederatedPlan, FederatedRound, observe, train
from leakbound_reproductions.priprune import information as bits
from leakbound_reproductions.priprune.nmi import chance
from leakbound_reproductions.priprune.study import Cell

SHOWN = ("psnr", "ssim", "nmi", "binned_nmi", "adjusted_mi")
OTHERS = 20
PERMUTATIONS = 10
DRAWS = {"gi": "sgi", "sgi_pruned": "sgi"}
"""Attacks that start from the same draws as others, so that only their knowledge differs."""
Record = dict[str, Any]


def attacks(steps: int) -> Mapping[str, Attack]:
    """Every attack of the study, by its name there."""
    return {
        "sgi": sparse_gradient_inversion(steps),
        "gi": sparse_gradient_inversion(steps, mask="blind"),
        "sgi_pruned": sparse_gradient_inversion(steps, eval_point="pruned"),
        "ordered": sparse_gradient_inversion(steps, ordered=0.1),
        "rounds": AcrossRounds(steps=steps),
        "mixed": MixedStart(steps=steps),
    }


def run(cell: Cell) -> Record:
    """Train, attack and measure; the same experiment gives the same record."""
    images, labels = _split(cell)
    task = _task(cell)
    plan = _plan(cell)
    clients = images[:-2]
    test = images[-2]
    public = images[-1]
    past: list[FederatedRound] = []
    rounds = []
    found = []
    rates = {}
    for one in train(task, clients, plan, rounds=cell.rounds, seed=cell.seed, public=public):
        rates[one.number] = [turn.rate for turn in one.turns]
        past = [*past, one][-LONGEST:] if cell.marks else [one]
        if one.number in cell.marks:
            found += _attacked(cell, past, task, public, one.number)
            rounds.append(_of_round(one, test))
    last = one
    own = [_accuracy(last.personal(turn.client), test) for turn in last.turns[1:4]]
    return {
        "id": cell.id,
        "cell": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(cell).items()},
        "weights": len(task.parameters),
        "accuracy": _accuracy(last.after, test),
        "own_accuracy": fmean(own) if own else None,
        "rates": {str(n): rates[n] for n in sorted({*cell.marks, cell.rounds})},
        "rounds": rounds,
        "attacked": found,
        "labels": labels,
    }


LONGEST = 20
"""How many rounds a server remembers here; the attack on all rounds needs all of them."""


def fresh(cell: Cell) -> tuple[Task, Batch]:
    """An experiment's model at its initial weights, and its test images."""
    return _task(cell), _split(cell)[0][-2]


def linear(cell: Cell) -> float:
    """Test accuracy of logistic regression on all private images, which also set its penalty."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV

    parts, _ = _split(cell)
    private = parts[:-2]
    test = parts[-2]
    inputs = torch.cat([b.inputs for b in private]).flatten(1).numpy()
    labels = torch.cat([b.labels for b in private]).numpy()
    model = GridSearchCV(LogisticRegression(max_iter=2000), {"C": [0.03, 0.1, 0.3, 1.0]}, cv=3).fit(
        inputs, labels
    )
    return float(model.score(test.inputs.flatten(1).numpy(), test.labels.numpy()))


def truth(cell: Cell) -> Tensor:
    """The images (target, C, H, W) of client 0."""
    return _split(cell)[0][0].inputs


def _of_round(one: FederatedRound, test: Batch) -> Record:
    """Other results of the round: accuracy, densities, and the bits that the mask may leak."""
    target = one.turn(0)
    exists = pruning.prunable(target.task)
    if target.task.kept is not None:
        exists = exists & target.task.kept
    mask = target.update.mask
    count = int(exists.sum())
    sent = count if mask is None else int((exists & mask[0]).sum())
    density = 1.0 if one.task.kept is None else pruning.density(one.task, one.task.kept)
    told = bits.mask_entropy(count, sent) if sent < count else 0.0
    return {
        "round": one.number,
        "accuracy": _accuracy(one.after, test),
        "density": density,
        "rate": target.rate,
        "mask_bits": told,
    }


def _attacked(
    cell: Cell, past: Sequence[FederatedRound], task: Task, public: Batch, number: int
) -> list[Record]:
    rows = []
    observation, truth = observe(past, 0, auxiliary=public)
    if cell.dense_server:
        observation = replace(observation, task=replace(task, plan=observation.task.plan))
    for name in cell.attacks:
        if name == "rounds" and len(observation.history) != number - 1:
            continue
        rows.append(_row(cell, name, observation, truth, public, number))
    return rows


def _row(
    cell: Cell, name: str, seen: Observation, truth: Batch, public: Batch, number: int
) -> Record:
    row: Record = {"round": number, "attack": name}
    try:
        draws = stream(cell.seed, "priprune", DRAWS.get(name, name), number)
        answer = attacks(cell.steps)[name](seen, draws)
    except NotApplicable as error:
        return row | {"status": "not applicable", "reason": error.reason}
    whole = pairing.pair(truth, answer)
    first = slice(0, cell.target)
    paired = replace(
        whole,
        truth=Batch(truth.inputs[first], truth.labels[first]),
        inputs=whole.inputs[first],
        labels=None,
    )
    values = metrics.evaluate(paired, data_range=1.0, more=INFORMATION)
    row |= {k: values[k] for k in SHOWN}
    level = {}
    for measure in INFORMATION:
        each = chance(
            measure,
            paired,
            stream(cell.seed, "priprune", "chance"),
            data_range=1.0,
            others=public.inputs[:OTHERS],
            permutations=PERMUTATIONS,
        )
        level[measure.name] = {
            "permuted": [c.permuted for c in each],
            "unrelated": [c.unrelated for c in each],
            "corrected": [c.corrected for c in each],
        }
    objective = answer.objective if math.isfinite(answer.objective) else None
    if cell.target == 1:
        row["guess"] = (paired.inputs[0] * 255).round().int().flatten().tolist()
    return row | {
        "status": "ok",
        "chance": level,
        "objective": objective,
        "problem": answer.problem,
    }


def _plan(cell: Cell) -> FederatedPlan:
    scheme = None if cell.pruning == "none" else built("scheme", cell.pruning)
    return FederatedPlan(
        scheme,
        defense(cell.defense),
        batch_size=cell.shared,
        learning_rate=cell.learning_rate,
        aggregation=cell.aggregation,
        clients=cell.clients if defense(cell.defense).cohort_size > 1 else 0,
    )


def defense(text: str) -> Chain:
    """A chain from specs between plus signs, "none" for none.

    Example:
        >>> defense("pri_prune + gaussian_noise,noise_std=0.1").links[1].noise_std
        0.1
    """
    return chain(*(built("defense", one) for one in text.split(" + ") if one != "none"))


def built(kind: str, text: str, **given: Any) -> Any:
    """Build an object from its name and settings, `name,setting=value,...`."""
    name, *rest = text.split(",")
    if wrong := [pair for pair in rest if pair.count("=") != 1]:
        raise ValueError(f"{kind} {text!r} has {wrong[0]!r}; write name,setting=value,...")
    settings = {k: _value(v) for k, v in (pair.split("=") for pair in rest)}
    return registry.build(kind, name, settings, **given)


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _task(cell: Cell) -> Task:
    images = _images(cell.data, cell.size)
    shape = tuple(images.inputs.shape[1:])
    generator = stream(cell.seed, "priprune", "model")
    model = built(
        "model", cell.model, input_shape=shape, classes=images.classes, generator=generator
    )
    return Task.of(model, classes=images.classes)


@cache
def _images(source: str, size: int) -> Dataset:
    """The images; from a folder or zip, with the persons in the last part of their names."""
    person = "last" if source.startswith(("folder:", "zip:")) else None
    return data.load(source, size=size, channels=1 if person else None, person=person)


def _split(cell: Cell) -> tuple[list[Batch], list[int]]:
    """The clients' images, then those for testing, then public ones; and client 0's labels."""
    images = _images(cell.data, cell.size)
    if cell.images + 200 > len(images.labels):
        raise ValueError(
            f"images is {cell.images}, but {cell.data!r} has {len(images.labels)}; leave 200 of "
            "them for tests and public images"
        )
    order = permutation(len(images.labels), stream(cell.seed, "priprune", "split"))
    private = order[: cell.images]
    rest = order[cell.images :]
    public = rest[:100]
    test = rest[100:]
    own = private[: cell.target]
    others = private[cell.target :]
    parts = _parts(cell, images, others)
    batches = [images.batch(part) for part in (own, *parts, test, public)]
    return batches, batches[0].labels.tolist()


def _parts(cell: Cell, images: Dataset, others: Tensor) -> list[Tensor]:
    count = cell.clients - 1
    source = stream(cell.seed, "priprune", "clients")
    labels = images.labels[others]
    if cell.skew == "equal":
        found = federated.equal(len(others), count, source)
    elif cell.skew == "writer":
        own = federated.by_person(images.subset(others))
        found = [torch.cat(own[k::count]).sort().values for k in range(count) if own[k::count]]
    elif cell.skew == "class":
        found = [(labels % count == k).nonzero()[:, 0] for k in range(count)]
    else:
        share = _value(cell.skew)
        if not isinstance(share, int | float):
            raise ValueError(
                f"skew is {cell.skew!r}; give equal, class, writer, or a concentration as in '0.5'"
            )
        found = federated.dirichlet(labels, count, float(share), source, least=cell.shared)
    return [others[part] for part in found]


def _accuracy(task: Task, test: Batch) -> float:
    with torch.no_grad():
        parts = [client.forward(task, some) for some in torch.split(test.inputs, 100)]
    return float((torch.cat(parts).argmax(-1) == test.labels).double().mean())
