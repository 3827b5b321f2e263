"""Whether an attack on an update fits into memory and time, decided before it runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakbound import client
from leakbound._util.formats import format_number
from leakbound._util.memory import GB
from leakbound.attacks import Attack
from leakbound.attacks.matching.cost import Cost, StepCost, first_within, measure
from leakbound.attacks.tokens.matching import soft
from leakbound.captured.findings import TRIAL, Finding
from leakbound.captured.observe import InferredContext
from leakbound.core import NotApplicable, Observation
from leakbound.losses import named
from leakbound.randomness import stream

COST = "cost of a search step"
"""The name of its finding."""
LONG = 1.0
MUCH = 1e9
"""Seconds and bytes of a search step from which its cost is worth a line."""
FEW = 2
"""Tokens of which closed forms on text weigh candidates, to measure a training."""
JUDGED = 3
"""Simulated trainings beside a search: before it, its diagnosis, and what its answer explains."""


@dataclass(frozen=True)
class Budgeted:
    """The form in which something runs, or why it is refused; `after`: seconds to judge it."""

    cost: Cost | None = None
    refused: str = ""
    after: float = 0.0


def step_cost(
    inferred: InferredContext,
    seconds: float = math.inf,
    room: float = math.inf,
    *,
    engines: bool = True,
) -> StepCost | None:
    """The measured cost of simulated training, None if it cannot be simulated; as `measure`."""
    observation = inferred.observation
    with suppress(NotApplicable):  # of other data than text
        # Closed forms need few candidates: what they explain is a training alone.
        observation = soft(observation, stream(0, "cost"), None if engines else FEW)

    def labels(inputs: Tensor) -> Tensor:
        return _labels(observation, inputs)

    # A user's loss or model may raise anything on labels that are not its own.
    with suppress(NotApplicable, ValueError, RuntimeError, TypeError, IndexError):
        return measure(observation, labels, seconds, room, engines=engines)
    return None


def _labels(observation: Observation, inputs: Tensor) -> Tensor:
    if observation.labels is not None:
        places = torch.arange(len(inputs), device=inputs.device) % len(observation.labels)
        return observation.labels[places]
    task = observation.task
    if named(task.loss).by_class:
        return torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
    with torch.no_grad():
        return named(task.loss).searched(torch.zeros_like(client.forward(task, inputs)))


def cost_finding(cost: StepCost | None) -> Finding | None:
    """A search step's cost as a finding; None if it is short and small."""
    if cost is None or (cost.usual.seconds < LONG and cost.usual.bytes < MUCH):
        return None
    few = cost.search.examples
    also = "" if cost.search.two is None else f" and on {2 * few}"
    how = (
        f"from one local step on {few}{also}, for {cost.examples} examples and {cost.steps} local "
        f"step{'s' * (cost.steps != 1)}, if no memory is saved"
    )
    value = f"{_seconds(cost.usual.seconds)}, {_gigabytes(cost.usual.bytes)}"
    return Finding(COST, value, how, False)


def with_cost(inferred: InferredContext, cost: StepCost | None) -> InferredContext:
    """The context with the finding of the cost in place of an earlier one."""
    found = cost_finding(cost)
    others = tuple(one for one in inferred.findings if one.name != COST)
    return replace(inferred, findings=others if found is None else (*others, found))


def training_fit(
    cost: StepCost | None,
    room: float,
    seconds: float,
) -> Budgeted:
    """Whether what an answer explains can be computed: one training without derivatives."""
    if cost is None:
        return Budgeted()
    return _fit(cost, cost.trainings(), room, seconds, "a simulated training")


def search_fit(
    cost: StepCost | None,
    room: float,
    seconds: float,
    attack: Attack,
    rounds: int = 1,
) -> Budgeted:
    """Whether a search can take its first step in so many bytes, and in its share of the time. It
    may explain several rounds, one after the other.
    """
    if cost is None:
        return Budgeted()
    after = JUDGED * first_within(cost.trainings(), room).seconds
    trainings = rounds * attack.step_trainings
    forms = (replace(form, seconds=trainings * form.seconds) for form in cost.search_steps())
    return _fit(cost, forms, room, seconds, "its first step", after)


def trial_fit(
    cost: StepCost | None,
    untried: tuple[int, ...],
    room: float,
    seconds: float,
) -> Budgeted:
    """Whether the numbers of local steps can be compared by short searches in so many seconds."""
    if cost is None:
        return Budgeted()
    most = replace(cost, steps=max(untried))
    fit = _fit(most, most.search_steps(), room, math.inf, "a search step")
    if fit.cost is None:
        return fit
    steps = TRIAL * sum(untried) / max(untried)
    total = steps * fit.cost.seconds
    if total <= seconds:
        return fit
    return Budgeted(refused=f"they would take {_seconds(total)}, and {_seconds(seconds)} are left")


def _fit(
    cost: StepCost,
    forms: Iterator[Cost],
    room: float,
    seconds: float,
    what: str,
    after: float = 0.0,
) -> Budgeted:
    best = first_within(forms, room)
    if best.bytes > room:
        split = f"; it cannot be split, since {cost.why}" if cost.why else ""
        return Budgeted(
            refused=f"{what} takes about {_gigabytes(best.bytes)} of memory, and "
            f"{_gigabytes(room)} are left for it{split}"
        )
    if best.seconds + after > seconds:
        judged = f" and to judge it {_seconds(after)}" if after else ""
        return Budgeted(
            refused=f"{what} takes about {_seconds(best.seconds)}{judged}, and its share of the "
            f"time is {_seconds(seconds)}"
        )
    return Budgeted(best, after=after)


def _seconds(value: float) -> str:
    return f"{_short(value)} s"


def _gigabytes(value: float) -> str:
    return f"{_short(value / GB)} GB"


def _short(value: float) -> str:
    return format_number(value) if value < 100 else f"{value:,.0f}"
