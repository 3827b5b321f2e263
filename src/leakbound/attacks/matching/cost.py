"""What a step of a search costs, in seconds and bytes, before a search runs.

One local step is measured on few examples, and on twice as many. A line through both gives the cost
for a batch. A search step simulates all local steps and differentiates them, so it holds the graphs
of all of them, unless it is frugal (`client.Frugal`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from leakbound import client
from leakbound._util.memory import PeakBytes
from leakbound.attacks.base import expected_rows, seen_task
from leakbound.attacks.matching.engine import Evaluator, ExactEngine, engine_for
from leakbound.attacks.matching.loop import begin
from leakbound.attacks.matching.objective import Objective
from leakbound.attacks.matching.settings import MatchingSettings
from leakbound.client import Frugal, frugal, indivisible
from leakbound.core import LocalPlan, Observation, Task
from leakbound.randomness import stream

FEW = 2
"""Examples of the first measurement: kernels for one differ, and a batch norm in training mode
refuses it.
"""
PLANNING = 10
"""How many search steps on few examples it takes to choose an engine, in seconds and in bytes: the
engine is compared with autograd, in double precision too (measured on DenseNet121: 5 to 10).
"""
SAVED = 2
"""An engine makes large models' steps faster by less than this: they take .79 to .86 of autograd's
time (docs/results/engine_costs.json), and small models' steps fit anyway.
"""
SLICED = 4
"""Copies of the candidate and its gradient where steps take slices of it."""
SUMS = 5
"""Vectors like the weights that several steps or chunks hold: sums, moved weights, gradients."""
QUICK = 0.05
"""Seconds below which a measurement is repeated: clocks and caches make short ones uncertain."""
ROOM = 1.5
"""How many times the counted bytes a process may take: kernels have memory of their own, and freed
pieces stay with the allocator. Measured: 1.05 to 1.4 on DenseNet121, without the counting.
"""


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes of a computation, and how it saves memory, if it does."""

    seconds: float
    bytes: float
    form: Frugal | None = None


@dataclass(frozen=True)
class CostLine:
    """A cost as a line in the number of examples, through measurements at n and 2 n.

    Without the second one, it is proportional to their number, but for the `fixed` bytes.
    """

    examples: int
    one: Cost
    two: Cost | None = None
    fixed: float = 0.0

    def at(self, examples: int) -> Cost:
        if self.two is None:
            times = examples / self.examples
            grown = self.fixed + times * (self.one.bytes - self.fixed)
            return Cost(times * self.one.seconds, grown)
        each = (self.two.bytes - self.one.bytes) / self.examples
        more = examples - 2 * self.examples
        # A first call is slow: a second one that is not slower is no sign that examples are free.
        pace = max(
            (self.two.seconds - self.one.seconds) / self.examples,
            self.two.seconds / (4 * self.examples),
        )
        return Cost(
            max(self.two.seconds + pace * more, self.two.seconds / 4),
            max(self.two.bytes + each * more, 0.0),
        )


@dataclass(frozen=True)
class StepCost:
    """What simulated training costs: a local step that a search differentiates, and one alone.

    `engine`: a local step of a search that uses an engine, None if autograd computes all.
    `planned`: whether one was looked for, which takes long for a large model. `state`: bytes that
    a search holds for each local step beside its graph. `weights`: bytes of all. `image`: bytes of
    an example, of which a candidate has `count`. A local step has `examples`, and there are
    `steps`. `why`: why a step cannot be split into chunks, empty if it can.
    """

    search: CostLine
    engine: CostLine | None
    alone: CostLine
    state: float
    weights: float
    image: float
    count: int
    examples: int
    steps: int
    why: str
    planned: bool = True

    def of(self, task: Task, examples: int) -> StepCost:
        """The same model's cost under another local plan of so many examples."""
        part = min(task.plan.batch_size or examples, examples)
        return replace(self, count=examples, examples=part, steps=task.plan.steps)

    @property
    def usual(self) -> Cost:
        """A search step that keeps the graphs of all local steps, or is one call of an engine."""
        one = (self.engine or self.search).at(self.examples)
        return Cost(self.steps * one.seconds, ROOM * self.steps * one.bytes)

    def search_steps(self) -> Iterator[Cost]:
        """A search step in all its forms, those that save most memory last."""
        if self.planned:
            yield self.usual
        for size in self._sizes():
            if self.planned and self.steps == 1 and size == self.examples:
                continue  # the graph of the only step is needed at once
            one = self.search.at(size)
            calls = self.steps * math.ceil(self.examples / size)
            again = self.alone.at(size).seconds  # its graph is computed twice
            held = one.bytes + self.steps * self.state + SLICED * self.image * self.count
            chunk = None if size == self.examples else size
            yield Cost(calls * (one.seconds + again), ROOM * held, Frugal(chunk))

    def trainings(self) -> Iterator[Cost]:
        """One simulated training without derivatives in the inputs, in all its forms."""
        for size in self._sizes():
            one = self.alone.at(size)
            calls = self.steps * math.ceil(self.examples / size)
            form = None if size == self.examples else Frugal(size)
            held = one.bytes + self.state + SUMS * self.weights
            yield Cost(calls * one.seconds, ROOM * held, form)

    def _sizes(self) -> Iterator[int]:
        size = self.examples
        yield size
        while size > 1 and not self.why:
            size = math.ceil(size / 2)
            yield size


def first_within(costs: Iterator[Cost], allowed: float) -> Cost:
    """The first form that takes at most so many bytes; else the one that takes the least."""
    every = list(costs)
    fits = (cost for cost in every if cost.bytes <= allowed)
    return next(fits, min(every, key=lambda cost: cost.bytes))


def measure(
    observation: Observation,
    labels: Callable[[Tensor], Tensor],
    seconds: float = math.inf,
    room: float = math.inf,
    *,
    engines: bool = True,
) -> StepCost:
    """Measure the search of one client's batch on few of its examples.

    Args:
        observation: of one client.
        labels: gives some labels (n, ...) for inputs (n, *S).
        seconds: a second search step that would take longer is left out, and so is an engine.
        room: bytes; an engine whose choice would take more is left out.
        engines: whether a search follows, which may use one.

    Raises:
        NotApplicable: no search simulates this training.
    """
    task = seen_task(observation)
    # The terms of the strongest search by default; other terms cost less than these.
    strong = MatchingSettings(batch_norm=1e-3 if task.plan.steps == 1 else 0.0)
    narrow = [_narrow(observation, count, labels) for count in (FEW, 2 * FEW)]
    alone = _line([_timed(partial(_training, seen)) for seen in narrow])
    first = _timed(partial(_search, narrow[0], strong))
    if 2 * first.seconds > seconds:
        del narrow[1]
    searches = [first, *(_timed(partial(_search, seen, strong)) for seen in narrow[1:])]
    size = task.parameters.element_size()
    found = StepCost(
        _line(searches, alone),
        None,
        alone,
        _state(task, observation.input_shape),
        size * task.parameters.numel(),
        size * math.prod(observation.input_shape),
        1,
        1,
        1,
        indivisible(task),
    ).of(task, observation.examples)
    planned = PLANNING * first.seconds <= seconds and PLANNING * first.bytes <= room
    # Where no engine saves enough, looking for one takes the time of what could still run.
    planned = planned and found.usual.seconds <= SAVED * seconds
    engine = engine_for(observation, task) if planned and engines else None
    if engine is not None:
        exact = [_timed(partial(_search, seen, strong, engine)) for seen in narrow]
        found = replace(found, engine=_line(exact, alone))
    return replace(found, planned=planned)


def _line(costs: list[Cost], alone: CostLine | None = None) -> CostLine:
    """Through one or two measurements; a training alone holds the same weights."""
    fixed = 0.0 if alone is None else alone.at(0).bytes
    return CostLine(FEW, costs[0], costs[1] if len(costs) > 1 else None, fixed)


def _narrow(
    observation: Observation,
    count: int,
    labels: Callable[[Tensor], Tensor],
) -> Observation:
    """The same observation as if one local step had been taken on so many examples."""
    plan = replace(observation.task.plan, steps=1, batch_size=None)
    middle = sum(observation.task.input_range) / 2
    inputs = torch.full((count, *observation.input_shape), middle)
    return replace(
        observation,
        update=replace(observation.update, examples=(count,)),
        cohort=(count,),
        task=replace(observation.task, plan=plan),
        labels=labels(inputs.to(observation.task.parameters)),
        known=None,
    )


def _search(
    observation: Observation,
    settings: MatchingSettings,
    engine: ExactEngine | None = None,
) -> Callable[[], object]:
    """An evaluation of a search, as its steps repeat it."""
    objective = Objective.of(settings, observation)
    with frugal(Frugal()):  # it chooses no other engine
        search = begin(settings, objective, stream(0, "cost"))
    search.exact = engine
    return Evaluator([search]).evaluate


def _training(observation: Observation) -> Callable[[], object]:
    """A training alone, by SGD: an optimizer's state would hide how the graph grows at first."""
    low, high = observation.task.input_range
    inputs = torch.full(observation.batch_shape, (low + high) / 2).to(observation.task.parameters)
    labels = observation.labels
    assert labels is not None  # set by `_narrow`
    task = replace(seen_task(observation), plan=LocalPlan())

    def train() -> None:
        with torch.no_grad():
            expected_rows(observation, task, inputs, labels)

    return train


def _timed(prepare: Callable[[], Callable[[], object]]) -> Cost:
    """Bytes of what is prepared and of its first call, and seconds of the quickest call."""
    with PeakBytes() as counted:
        call = prepare()
        began = time.monotonic()
        call()
    seconds = time.monotonic() - began
    if seconds < QUICK:
        for _ in range(2):
            began = time.monotonic()
            call()
            seconds = min(seconds, time.monotonic() - began)
    return Cost(seconds, counted.peak)


def _state(task: Task, input_shape: tuple[int, ...]) -> float:
    """Bytes that a search holds for a local step beside the step's own graph.

    Measured with gradients that are multiples of the weights, which cost no call of the model.
    """
    inputs = torch.zeros(1, *input_shape).to(task.parameters).requires_grad_()

    def slope(
        task: Task,
        inputs: Tensor,
        labels: Tensor,
        flat: Tensor | None = None,
    ) -> Tensor:
        return inputs.sum() * (task.parameters if flat is None else flat)

    peaks = []
    for steps in (2, 3):
        trained = replace(task, plan=replace(task.plan, steps=steps, batch_size=None))
        with frugal(Frugal()), PeakBytes() as counted:
            total = client.local_update(trained, inputs, inputs, slope)
            torch.autograd.grad(total.square().sum(), inputs)
        peaks.append(counted.peak)
    return float(max(0, peaks[1] - peaks[0]))
