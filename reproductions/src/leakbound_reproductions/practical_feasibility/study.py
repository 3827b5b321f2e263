"""The configurations of the study, and one round of each: a batch, its update, an attack."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from statistics import fmean
from typing import Any

import torch
from torch import nn

from leakbound import Batch, Observation, Task, ThreatModel, data, pair, play
from leakbound.attacks import GradientMatching
from leakbound.data import split
from leakbound.defenses import NoDefense
from leakbound.metrics import psnr
from leakbound.randomness import stream
from leakbound_reproductions.practical_feasibility.networks import Design, draw, network, train

MATCHED = 20.0
"""Decibels from which a reconstruction counts as a success, as in leakbound's own criterion."""
SHARES = {"public": 0.5, "test": 0.2, "private": 0.3}
"""Parts of the images: networks are trained on public ones; the attack was tuned on test ones."""
TRAINED = 60
BASE = Design()
CHOICES: dict[str, dict[str, Any]] = {
    "deep": {"depth": 3},
    "narrow": {"width": 8},
    "plain": {"skip": False},
    "post": {"before": False},
}
"""Each removes one of the four conditions that the paper names."""
DROPPED = (0.3, 0.1)
MODERN = (Design("convnext", 3), Design("vit", 3), Design("residual", 3, before=False))
"""Small forms of a ConvNeXt, a transformer and a ResNet."""
FEW = (BASE, *(replace(BASE, **change) for change in CHOICES.values()))


@dataclass(frozen=True)
class Cell:
    """One configuration.

    Attributes:
        design: the network.
        training: whether the client computes its update in training mode: batch norm with the
            statistics of the batch, dropout with fresh draws.
        batch: number of images.
        trained: whether the weights are trained or random.
        known: what the attacker has in addition to labels: "" (nothing), "statistics" (the means
            and variances of the batch in every batch norm) or "draws" (of dropout).
    """

    design: Design
    training: bool
    batch: int
    trained: bool
    known: str = ""


def cells() -> list[Cell]:
    """All configurations: a full factorial, known statistics, dropout, modern designs."""
    designs = [
        Design("residual", *own) for own in product((1, 3), (8, 32), (False, True), (False, True))
    ]
    rest = list(product((1, 4), (False, True)))
    found = [Cell(d, mode, b, t) for d in designs for mode in (False, True) for b, t in rest]
    for b, t in rest:
        for design in FEW:
            found.append(Cell(design, True, b, t, "statistics"))
            dropped = replace(design, dropout=DROPPED[0])
            found += [Cell(dropped, True, b, t, known) for known in ("", "draws")]
        found.append(Cell(replace(BASE, dropout=DROPPED[1]), True, b, t))
        found += [Cell(design, True, b, t) for design in MODERN[:2]]
    return found


def repeated() -> list[Cell]:
    """Configurations of claims on few designs, which take twice as many seeds."""
    rest = product((BASE, *MODERN), (1, 4), (False, True))
    return [Cell(design, True, b, t) for design, b, t in rest]


@cache
def _images() -> tuple[Any, dict[str, torch.Tensor]]:
    digits = data.load("digits")
    return digits, split(len(digits.labels), SHARES, seed=0, name="practical feasibility")


@cache
def _network(cell: Cell, seed: int) -> nn.Module:
    digits, parts = _images()
    own = _seed(cell, seed)
    model = network(cell.design, own)
    public = digits.batch(parts["public"])
    train(model, public.inputs, public.labels, TRAINED if cell.trained else 0, own)
    return model


def _plain(cell: Cell) -> Cell:
    """The configuration whose weights and batch this one shares."""
    return replace(cell, design=replace(cell.design, dropout=0.0), training=False, known="")


def _seed(cell: Cell, seed: int) -> int:
    """Weights, batch and start are drawn anew for each seed, design, batch size and training."""
    return int(torch.randint(2**62, (), generator=stream(seed, name(_plain(cell)))))


def attack(cell: Cell, steps: int) -> GradientMatching:
    """The attack of all configurations; the statistics of a batch are one more term."""
    given: dict[str, Any] = {"total_variation": 1e-4, "smoothing": 3e-2, "schedule": "stages"}
    if cell.known == "statistics":
        given |= {"batch_norm": 1e-3, "statistics": "exact"}
    return GradientMatching(steps=steps, **given)


def seen(cell: Cell, seed: int, part: str = "private") -> tuple[Observation, Batch]:
    """What the server sees of a client, and the client's batch."""
    digits, parts = _images()
    own = _seed(cell, seed)
    order = torch.randperm(len(parts[part]), generator=stream(own, "batch"))[: cell.batch]
    batch = digits.batch(parts[part][order])
    model = network(cell.design, own)
    model.load_state_dict(_network(_plain(cell), seed).state_dict())
    model.train(cell.training)
    mine = copy.deepcopy(model)
    draw(mine, batch.inputs, own)
    threat = ThreatModel(statistics_known=cell.known == "statistics")
    sources = [stream(own, "defense", i) for i in range(2)]
    played = play(_task(mine), [batch], NoDefense(), sources, threat=threat)
    known = mine if cell.known == "draws" else model
    return replace(played.observation, task=_task(known)), played.truth


def _task(model: nn.Module) -> Task:
    return Task.of(model, classes=10)


def score(cell: Cell, seed: int, steps: int, part: str = "private") -> tuple[float, float]:
    """The mean PSNR of the batch's images in dB, and the share of successes."""
    observation, truth = seen(cell, seed, part)
    found = attack(cell, steps)(observation, stream(_seed(cell, seed), "attack"))
    each = [value or 0.0 for value in psnr(pair(truth, found), data_range=1.0)]
    return fmean(each), fmean(value >= MATCHED for value in each)


def name(cell: Cell) -> str:
    """A short name for files and tables."""
    own = asdict(cell.design)
    words = [f"{own['family']}-{own['depth']}-{own['width']}"]
    words += ["skip" if own["skip"] else "plain", "pre" if own["before"] else "post"]
    words += [f"drop{own['dropout']:g}"] if own["dropout"] else []
    words += ["training" if cell.training else "inference", f"b{cell.batch}"]
    return "-".join([*words, "trained" if cell.trained else "random", *filter(None, [cell.known])])
