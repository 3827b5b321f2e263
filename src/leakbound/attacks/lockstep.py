"""Searches that go step by step together, and share one engine where their model allows it.

A search's bits do not depend on the company: see `engines.bundle`. One search is a lockstep too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leakbound.attacks.exact import engine_of
from leakbound.attacks.pace import tick
from leakbound.attacks.terms import smooth_slopes
from leakbound.engines.base import Engine, Pulled, aligned
from leakbound.types import Observation, Reconstruction

if TYPE_CHECKING:
    from leakbound.attacks.matching import GradientMatching
    from leakbound.attacks.search import Search

TRACE_POINTS = 50
MARKS = (3 / 8, 5 / 8, 7 / 8)
"""The shares of the steps after which a search's rate falls to a tenth."""
LOWEST = 0.1 ** len(MARKS)
"""The factor on the rate in the last of the stages between them."""
WIDTH = 8
"""How many searches go together: more no longer fit a processor's cache (measured)."""


class Lockstep:
    """Adam for searches of equal settings."""

    def __init__(self, searches: Sequence[Search]) -> None:
        self.settings = searches[0].settings
        self.live = list(searches)
        variables = [variable for search in searches for variable in search.variables]
        fused = all(search.exact is not None for search in searches)
        self.optimizer = torch.optim.Adam(variables, lr=self.settings.learning_rate, fused=fused)
        self.rate = _schedule(self.settings)
        self.factor = 0.0
        self.engine: tuple[list[Search], Engine] | None = None
        self.slopes: Tensor | None = None

    def run(self) -> None:
        """All steps, or until every search has stopped."""
        for number in range(self.settings.steps):
            if self.step(number):
                break

    def step(self, number: int) -> bool:
        """One step of every search that has not stopped; whether all have."""
        factor = self.rate(number / self.settings.steps)
        if self.settings.schedule == "stages" and factor != self.factor:
            self._enter(factor)
        self.factor = factor
        self._descend()
        ended = [search for search in self.live if stopped(search, number)]
        for search in ended:
            for variable in search.variables:
                variable.grad = None  # the optimizer leaves it alone from now on
        self.live = [search for search in self.live if search not in ended]
        if not self.live:
            return True
        for search in self.live:
            for variable in search.images.variables:
                if self.settings.signed and variable.grad is not None:
                    variable.grad.sign_()
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * factor
        self.optimizer.step()
        for search in self.live:
            search.images.settle(search.task.input_range if self.settings.box else None)
        if number == self.settings.steps - 1:
            self._descend()  # the last iterate may be the best one
        return False

    def _enter(self, factor: float) -> None:
        """A new stage: every search goes on from its best iterate, without momentum."""
        for search in self.live:
            enter(search, factor)
            for variable in search.variables:
                if variable in self.optimizer.state:
                    self.optimizer.state[variable]["exp_avg"].zero_()

    def _descend(self) -> None:
        exact = self.live[0].exact
        if len(self.live) == 1 or exact is None or exact[0].chain is None:
            for search in self.live:
                search.descend()
            return
        if self.engine is None or self.engine[0] != self.live:
            self.engine, self.slopes = (self.live, _engine(self.live)), None
        self.slopes = _together(self.live, self.engine[1], self.slopes)


def enter(search: Search, factor: float) -> None:
    """Begin a stage, whose learning rate is `factor` times the first one's.

    The total variation falls with the rate, so the best iterate so far is judged anew.
    """
    search.recall()
    fade = 0.0 if factor <= LOWEST else factor
    search.smooth.weight = search.variation + fade * search.smoothing
    if search.zeros_first and search.withheld is not None and search.weights is not None:
        search.weights = torch.where(search.withheld, fade, search.weights)
        if search.exact is not None:
            search.exact[1].forget()
    search.best = torch.full_like(search.best, float("inf"))


def stopped(search: Search, number: int) -> bool:
    """Whether a search has ended with this step; it keeps a point of its trace now and then.

    Waits for the device at those points alone.
    """
    if tick():
        return True
    every = max(1, search.settings.steps // TRACE_POINTS)
    if number % every and number != search.settings.steps - 1:
        return False
    match, best, last = torch.stack([search.last_match, search.best, search.last]).tolist()
    if number or search.settings.optimizer == "lbfgs":
        search.trace.append(match)
    enough = search.settings.enough
    low = enough is not None and best <= enough
    return low or search.vanished or not math.isfinite(last)


def _schedule(settings: GradientMatching) -> Callable[[float], float]:
    """The factor on the learning rate, by the share of the steps that is done."""
    if settings.schedule == "constant":
        return lambda done: 1.0
    if settings.schedule == "cosine":
        return lambda done: 0.5 * (1 + torch.cos(torch.tensor(torch.pi * done)).item())
    return lambda done: 0.1 ** sum(done >= mark for mark in MARKS)


def _engine(searches: Sequence[Search]) -> Engine:
    parts = [search.exact for search in searches]
    assert parts[0] is not None  # asked before
    choice, step = parts[0]
    return choice.engine([search.task for search in searches], step.rows)


def _together(searches: Sequence[Search], engine: Engine, slopes: Tensor | None) -> Tensor:
    """One evaluation of all searches by their engine; memory for slopes is handed on."""
    steps = [search.exact[1] for search in searches if search.exact is not None]
    guesses = [step.guess() for step in steps]
    inputs, labels = (torch.cat(parts) for parts in zip(*guesses, strict=True))
    plain = engine.gradient(inputs, labels)
    slopes, rows = aligned(len(plain), plain) if slopes is None else slopes, steps[0].rows
    places = [slice(at, at + rows) for at in range(0, len(plain), rows)]
    for step, place in zip(steps, places, strict=True):
        step.compare(plain[place], slopes[place])
    found, soft = engine.pull(slopes)
    smooth: list[tuple[Tensor, Tensor] | None] = [None] * len(steps)
    if all(step.smooth for step in steps):
        stacked = inputs.view(len(steps), -1, *inputs.shape[2:])
        smooth = list(zip(*smooth_slopes(stacked), strict=True))
    for step, place, own in zip(steps, places, smooth, strict=True):
        step.finish(Pulled(found[place], None if soft is None else soft[place]), own)
    return slopes


def many(
    settings: GradientMatching,
    observations: Sequence[Observation],
    generators: Sequence[torch.Generator],
) -> list[Reconstruction]:
    """A search for each observation, those of equal shapes together."""
    answers: list[Reconstruction] = []
    for start in range(0, len(observations), WIDTH):
        few = slice(start, start + WIDTH)
        pairs = zip(observations[few], generators[few], strict=True)
        searches = [settings.search(*pair) for pair in pairs]
        for search in searches:
            search.exact = engine_of(search, many=True)
        groups: dict[object, list[Search]] = defaultdict(list)
        for search in searches:
            groups[_company(search)].append(search)
        for group in groups.values():
            if len(group) > 1:
                Lockstep(group).run()
        alone = {id(group[0]) for group in groups.values() if len(group) == 1}
        answers += [s.solve() if id(s) in alone else s.answer() for s in searches]
    return answers


def _company(search: Search) -> object:
    """Equal for searches that can go together."""
    if not search.plain or search.exact is None or search.blank:
        return id(search)
    choice, step = search.exact
    if choice.chain is None:
        return id(search)
    inputs = search.inputs
    shape = step.rows, tuple(inputs.shape), inputs.dtype, inputs.device
    return choice.chain.name, shape, search.labels.ndim
