"""What stands between a captured update and an answer, and what is known to leak from like ones."""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import suppress
from functools import cache
from importlib import resources

import torch
from torch import nn

from leakbound.assess.record import ObstacleInfo
from leakbound.attacks.analytic import first_layer
from leakbound.attacks.rounding import HALVES, stored_type
from leakbound.captured.capture import Capture
from leakbound.captured.observe import InferredContext
from leakbound.captured.server import UPDATE
from leakbound.core import NotApplicable, Observation

MEASURED = "ordinary_training.json"
"""Rows of [model and data, optimizer, steps, batch, examples reconstructed, updates exposed,
updates with facts, examples reconstructed by a malicious server from other updates], by
benchmarks/ordinary_training.py.
"""
LINEAR = {"table": "perceptron, german"}
"""The rows for a first layer that sees the example, by the domain's name."""
OPTIONS = {
    "optimizer": ("is taken for {value}, which is not certain", "--optimizer NAME"),
    "learning rate": ("is {value}, which is not certain", "--learning-rate RATE"),
    "local steps": ("are taken for {value}, which is not certain", "--local-steps N"),
    "batch size": ("is taken for {value}, which is not certain", "--batch-size N"),
    "labels": ("are not certain", "--labels LABELS"),
}
"""How a fact that is not certain is said, and the option that gives it."""


def obstacles(
    capture: Capture,
    inferred: InferredContext,
    *,
    public: bool,
) -> tuple[ObstacleInfo, ...]:
    """What keeps attacks on an update from an answer, the most important first.

    `public`: whether attacks have public examples.
    """
    seen = inferred.observation
    plan = seen.task.plan
    found = list[ObstacleInfo]()

    def add(what: str, then: str) -> None:
        found.append(ObstacleInfo(what=what, then=then))

    # The last finding of a name counts: what is inferred follows what is not known.
    last = {one.name: one for one in inferred.findings}
    for name, (says, option) in OPTIONS.items():
        stated = name == "learning rate" and seen.layer_rates
        if name in last and not last[name].sure and not stated:
            value = last[name].value
            add(f"the {name} {says.format(value=value)}", option)
    if not plan.is_sum and plan.steps > 1:
        add(
            f"{plan.steps} steps of {plan.rule} each divide gradients by their size, so no "
            "closed form inverts their sum",
            "attacks that simulate the training, with a larger --time",
        )
    kind = _most_values(capture)
    if kind in HALVES:
        add(
            f"the file holds values in {str(kind)[6:]}, whose rounding hides small changes",
            "the same in float32",
        )
    if seen.examples > 1:
        more = f" over {plan.steps} local steps" if plan.steps > 1 else ""
        add(f"{seen.examples} examples{more} are added up", "a larger --time, or smaller batches")
    if seen.task.coupled:
        mixes = "batch norm in training mode mixes the examples of a batch"
        add(mixes, "a larger --time" if public else "--public DATA")
    if inferred.defense.links and not public:
        add("a defense is declared", "--public DATA for its bounds")
    if inferred.defense.links and seen.history:
        rounds = len(seen.history) + 1
        add(
            f"{rounds} rounds of the client were seen, and each bound here is of one update",
            "leakbound bound --deployment FILE",
        )
    if not public:
        add("attacks have no public examples, so they know nothing of the data", "--public DATA")
    return tuple(found)


def _most_values(capture: Capture) -> torch.dtype:
    """The type that most of the file's numbers fit: ones of a norm fit every type."""
    counts = Counter[torch.dtype]()
    for value in capture.update.values():
        counts[stored_type(value)] += value.numel() if value.is_floating_point() else 0
    return max(counts, key=counts.__getitem__)


def measured(inferred: InferredContext, *, server: bool = True) -> str | None:
    """What was reconstructed from the nearest updates of a measured table; None if none is near.

    `server`: also by a malicious server, from other updates of the same training.
    """
    row = _nearest(inferred.observation, decays=inferred.decay is not None)
    if row is None:
        return None
    name, rule, steps, batch, right, exposed, facts, planted = row
    step = "1 local step" if steps == "1" else f"{steps} local steps"
    text = (
        f"The nearest measured updates ({name}, untrained; {rule}; {step}; batch {batch}; no "
        f"defense): {right} examples were reconstructed, {exposed} updates exposed, {facts} "
        "revealed facts. Other models may leak more, and a low share is no protection."
    )
    if not server:
        return text
    return (
        f"{text} From the same training, a malicious server that sends its own layer first "
        f"reconstructed {planted}: this {UPDATE}."
    )


@cache
def _table() -> tuple[tuple[str, ...], ...]:
    text = resources.files("leakbound.captured").joinpath(MEASURED).read_text("utf-8")
    return tuple(map(tuple, json.loads(text)))


def _nearest(seen: Observation, *, decays: bool) -> tuple[str, ...] | None:
    """The row of the same kind of model and optimizer whose steps and batch are nearest.

    None for kinds of models that are not in the table, such as those of text, and for LARS and
    LAMB.
    """
    plan = seen.task.plan
    kind = _kind(seen)
    if kind is None or seen.layer_rates:
        return None
    if plan.optimizer == "sgd":
        rule = "SGD, decay" if decays else "SGD"
    else:
        rule = "RMSprop" if plan.optimizer == "rmsprop" else "AdamW"
    rows = [
        row
        for row in _table()
        if kind in row[0] and row[1].startswith(rule) and (rule != "SGD" or row[1] == "SGD")
    ]

    def distance(row: tuple[str, ...]) -> float:
        steps = abs(math.log(plan.steps / int(row[2])))
        return steps + abs(math.log(seen.examples / int(row[3])))

    return min(rows, key=distance, default=None)


def _kind(seen: Observation) -> str | None:
    """What the table calls this kind of model and data."""
    domain = seen.task.domain
    if domain is not None and not domain.dtype.is_floating_point:
        return None
    with suppress(NotApplicable):
        first_layer(seen.task, seen.input_shape)
        return LINEAR.get("" if domain is None else domain.name, "perceptron, digits")
    convolves = any(isinstance(layer, nn.Conv2d) for layer in seen.task.model.modules())
    return "convolutions" if convolves else None
