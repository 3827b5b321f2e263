"""The search loop: Adam for one search or several in lockstep, and L-BFGS for one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from leakbound._util import optimizers
from leakbound.attacks.base import boxed, outputs_of, probed, seen_task
from leakbound.attacks.blind import gray
from leakbound.attacks.labels import infer_labels
from leakbound.attacks.matching.engine import Companion, Evaluator, Search, choose_engine
from leakbound.attacks.matching.images import Images, images_for
from leakbound.attacks.matching.objective import Objective, earlier_rounds, hides
from leakbound.attacks.matching.settings import MatchingSettings
from leakbound.attacks.matching.terms import terms_for
from leakbound.attacks.pace import tick
from leakbound.client import forward
from leakbound.core import Exact, NotApplicable, Observation, Reconstruction
from leakbound.losses import NamedLoss, named
from leakbound.randomness import normal

__all__ = ["answer", "begin", "run", "solve"]

# An objective that stays above this share of its first value did not fall.
STUCK = 0.9
# Largest unexplained share of an update whose coordinates were all seen.
UNEXPLAINED = 0.1
MASKED = 1e-3
"""Largest unexplained share of an exact update if a known mask withholds a part. With fewer
coordinates, wrong images match them better (at 90 % pruned, to half a percent).
"""
# From this share of noise on, a match proves little.
MOSTLY = 0.99
# Reading a point waits for the device, and a plot needs no more.
TRACE_POINTS = 50
MARKS = (3 / 8, 5 / 8, 7 / 8)
"""The shares of the steps after which the learning rate falls to a tenth."""
LOWEST = 0.1 ** len(MARKS)
"""The factor on the rate in the last of the stages between them."""
WIDTH = 8
"""How many searches run together: more do not fit a processor's cache (measured)."""


def diagnose(
    search: Search,
    final: float,
    images: Tensor,
    labels: Tensor,
) -> str | None:
    """Why the search whose best iterate this is has failed; None if no sign of failure shows."""
    if search.vanished:
        return "gradient vanished: the objective does not change with the inputs"
    if not final < float("inf"):
        return "not finite: the objective was never a number"
    objective = search.objective
    lowest = min((v for v in search.trace if v == v), default=float("nan"))
    if objective.noise_share <= MOSTLY and not lowest <= STUCK * search.trace[0]:
        start = search.trace[0]
        return f"objective did not fall: {start:.3g} at the start, {lowest:.3g} at best"
    return unexplained_problem(objective, images, labels)


def unexplained_problem(
    objective: Objective,
    images: Tensor,
    labels: Tensor,
) -> str | None:
    """What an answer's unexplained share of the update says against it; None if nothing."""
    noise = objective.noise_share
    if noise > MOSTLY:
        return f"too much noise: it is {noise:.0%} of the update, and a match proves little"
    left = unexplained(objective, images, labels)
    if left < noise / 2:
        return (
            f"noise was fitted: the answer leaves {left:.0%} of the update unexplained, though "
            f"{noise:.0%} of it is noise"
        )
    masked = hides(objective.observation) and isinstance(objective.observation.update.law, Exact)
    if not left <= (MASKED if masked else UNEXPLAINED) + noise:
        return (
            f"objective did not fall far enough: the answer leaves {100 * left:.2g}% of the "
            f"update unexplained, of which noise would be {noise:.0%}"
        )
    return None


def unexplained(
    objective: Objective,
    images: Tensor,
    labels: Tensor,
) -> float:
    """Share of the (weighted) update energy that no multiple of a candidate's update explains."""
    task = objective.task
    plain = seen_task(objective.observation).plan
    plan = replace(task.plan, epsilon=plain.epsilon)  # a search may smooth it
    objective = replace(objective, task=replace(task, plan=plan))
    rows = objective.seen_of(objective.rows(images, labels)).detach()
    scale = 1.0 if objective.weights is None else objective.weights
    mine = (rows * scale).double().flatten()
    seen = (objective.seen * scale).double().flatten()
    both = (mine.square().sum() * seen.square().sum()).clamp_min(1e-300)
    return max(0.0, float(1 - (mine @ seen).square() / both))


def begin(
    settings: MatchingSettings,
    objective: Objective,
    generator: torch.Generator,
    *,
    images: Images | None = None,
    companion: Companion | None = None,
    many: bool = False,
) -> Search:
    """A search before its first step; images, labels, features and terms are drawn in this order.

    Args:
        settings: the attack's.
        objective: without the terms that need draws.
        generator: the source of the draws.
        images: what is searched; None: what the settings say.
        companion: what the attack estimates with the images.
        many: whether other searches may share its computation.
    """
    observation = objective.observation
    task = objective.task
    images = images or images_for(settings, task, observation, generator)
    labels = labels_of(settings, observation, generator)
    method = settings.feature_method if settings.feature_weight else None
    features = None if method is None else method.find(observation, generator)
    more = terms_for(settings, observation, task, features, generator)
    if settings.rounds == "together":
        more += earlier_rounds(settings, observation, labels)
    objective = replace(objective, terms=(*objective.terms, *more))
    search = Search(objective, images, labels, features, companion)
    search.exact = choose_engine(search, many)
    return search


def solve(
    settings: MatchingSettings,
    searches: Sequence[Search],
) -> list[Reconstruction]:
    """Run one search, or several of one `batch_key`, and return their answers."""
    run(settings, searches)
    return [answer(search) for search in searches]


def run(settings: MatchingSettings, searches: Sequence[Search]) -> None:
    """Take all steps, or stop when every search has stopped; none if the update is zero."""
    if searches[0].objective.blank:
        return
    if settings.optimizer == "lbfgs":
        for search in searches:
            _lbfgs(settings, search)
        return
    loop = Loop(settings, searches)
    for number in range(settings.steps):
        if loop.step(number):
            break


def batch_key(search: Search) -> object:
    """Equal for searches that can share an engine."""
    if search.exact is None or search.exact.choice.chain is None or search.objective.blank:
        return id(search)
    images = search.images()
    shape = search.exact.rows, tuple(images.shape), images.dtype, images.device
    loss = named(search.objective.task.loss)
    return search.exact.choice.chain.name, shape, tuple(search.labels.shape), loss


class Loop:
    """Adam for one search, or for several of one `batch_key`, with the settings' schedule."""

    def __init__(
        self,
        settings: MatchingSettings,
        searches: Sequence[Search],
    ) -> None:
        self.settings = settings
        self.evaluator = Evaluator(searches)
        variables = [variable for search in searches for variable in search.variables]
        fused = searches[0].exact is not None
        self.optimizer = optimizers.Adam(
            variables,
            lr=settings.learning_rate,
            fused=fused,
        )
        self.rate = _schedule(settings)
        self.factor = 0.0

    def step(self, number: int) -> bool:
        """Step every search that has not stopped; return whether all have."""
        settings = self.settings
        live = self.evaluator.searches
        factor = self.rate(number / settings.steps)
        if settings.schedule == "stages" and factor != self.factor:
            for search in live:
                search.enter(0.0 if factor <= LOWEST else factor)
                for variable in search.variables:
                    if variable in self.optimizer.state:  # a stage starts without momentum
                        self.optimizer.state[variable]["exp_avg"].zero_()
        self.factor = factor
        self.evaluator.evaluate()
        ended = [search for search in live if stopped(settings, search, number)]
        if ended:
            for variable in [variable for search in ended for variable in search.variables]:
                variable.grad = None  # the optimizer ignores it from now on
            live = [search for search in live if search not in ended]
            if not live:
                return True
            self.evaluator = Evaluator(live)
        for search in live:
            for variable in search.images.variables:
                if settings.signed and variable.grad is not None:
                    variable.grad.sign_()
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * factor
        self.optimizer.step()
        for search in live:
            search.images.settle(search.objective.task.input_range if settings.box else None)
        if number == settings.steps - 1:
            self.evaluator.evaluate()  # the last iterate may be the best one
        return False


def _lbfgs(settings: MatchingSettings, search: Search) -> None:
    """L-BFGS with a strong-Wolfe line search and no early tolerance.

    DLG's released code has no line search. On its own LeNet and MNIST it then reached 40 dB for 18
    of 20 images within 3 restarts; with the search, 19 of 20 in a third of the time.
    """
    optimizer = optimizers.LBFGS(
        search.variables,
        lr=settings.learning_rate,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
    evaluator = Evaluator([search])

    def closure() -> Tensor:
        evaluator.evaluate()
        return search.total

    for step in range(settings.steps):
        before = [variable.detach().clone() for variable in search.images.variables]
        optimizer.step(closure)  # type: ignore[no-untyped-call]
        after = [variable.detach() for variable in search.images.variables]
        # From an unchanged point, the next step would be the same.
        if stopped(settings, search, step) or all(map(torch.equal, before, after)):
            break


def stopped(
    settings: MatchingSettings,
    search: Search,
    number: int,
) -> bool:
    """Whether a search ends with this step; it keeps a point of its trace at intervals.

    Waits for the device at those points only.
    """
    if tick():
        return True
    every = max(1, settings.steps // TRACE_POINTS)
    if number % every and number != settings.steps - 1:
        return False
    match, best, total = torch.stack([search.match, search.best, search.total]).tolist()
    if number or settings.optimizer == "lbfgs":
        search.trace.append(match)
    low = settings.enough is not None and best <= settings.enough
    return low or search.vanished or not math.isfinite(total)


def answer(search: Search) -> Reconstruction:
    """The best iterate, and the search's diagnosis of it."""
    task = search.objective.task
    if search.objective.blank:
        return gray(search.objective.observation)
    search.recall()
    images, labels = (part.detach() for part in search.candidate())
    final = float(search.best)
    features = search.features
    problem = diagnose(search, final, images, labels)
    if problem is None and features is not None and features.problem is not None:
        problem = f"its features failed: {features.problem}"
    return Reconstruction(
        boxed(images, task),
        named(task.loss).decided(search.labels.detach()) if search.joint else labels,
        final,
        tuple(search.trace),
        problem,
        None if features is None else features.vectors,
        None if features is None else features.layer,
    )


def _schedule(settings: MatchingSettings) -> Callable[[float], float]:
    """The factor on the learning rate, by the share of the steps that is done."""
    if settings.schedule == "constant":
        return lambda done: 1.0
    if settings.schedule == "cosine":
        return lambda done: 0.5 * (1 + torch.cos(torch.tensor(torch.pi * done)).item())
    return lambda done: 0.1 ** sum(done >= mark for mark in MARKS)


def labels_of(
    settings: MatchingSettings,
    observation: Observation,
    generator: torch.Generator,
) -> Tensor:
    if settings.labels == "joint":
        return _free_labels(observation, generator)
    if settings.labels == "told" and observation.labels is not None:
        return observation.labels.clone()
    try:
        return infer_labels(observation, generator)
    except NotApplicable as error:
        if not named(observation.task.loss).by_class:
            return _free_labels(observation, generator)
        mend = "give the labels"
        with suppress(NotApplicable):
            # Called for its checks alone: the advice is given only where it works.
            _free_labels(observation, generator)
            mend += ", or search them too (labels='joint')"
        raise NotApplicable(f"{error.reason}; {mend}") from error


def _free_labels(
    observation: Observation,
    generator: torch.Generator,
) -> Tensor:
    """Where a search for the labels begins: standard normal numbers."""
    task = observation.task
    count = observation.examples
    if named(task.loss).name == "l1":
        raise NotApplicable(
            'labels under "l1" cannot be searched: its derivative is a sign; give the labels'
        )
    shape: tuple[int, ...] = (count, outputs_of(observation) or 0)
    if not named(task.loss).by_class:
        middle = sum(task.input_range) / 2
        with torch.no_grad():
            probe = torch.full(observation.batch_shape, middle).to(task.parameters)
            output = forward(task, probe)
        shape = tuple(output.shape) if output.numel() > count else (count,)
        if named(task.loss).assumed:
            _check_slope(named(task.loss), output)
    elif not shape[1]:
        raise NotApplicable("labels are to be optimized, but the number of classes is not known")
    elif named(task.loss).targets == "any":
        _check_searchable(observation, shape)
    return normal(shape, generator, like=task.parameters).requires_grad_()


def _check_slope(loss: NamedLoss, output: Tensor) -> None:
    """Reject a function that gives no derivative in masks, or takes no probabilities of classes."""
    free = torch.zeros_like(output).requires_grad_()
    try:
        with torch.enable_grad():
            slope = torch.autograd.grad(loss(output, loss.searched(free)), free)[0]
        flat = not bool(slope.any())
    except Exception:  # the user's function may raise anything
        flat = True
    if flat:
        raise NotApplicable(
            f"labels of {loss.name} cannot be searched: it has no derivative in numbers between "
            "labels; give the labels"
        )


def _check_searchable(
    observation: Observation,
    shape: tuple[int, ...],
) -> None:
    """Reject a function that does not take probabilities of classes."""
    task = observation.task
    evenly = observation.update.rows.new_full(shape, 1 / shape[1])
    try:
        with torch.no_grad():
            task.loss(
                probed(observation)[:1].expand(len(evenly), *(-1,) * (len(shape) - 1)), evenly
            )
    # The user's function may raise anything.
    except Exception as error:
        raise NotApplicable(
            f"labels of {named(task.loss).name} cannot be searched: it does not take probabilities "
            "of classes; give the labels"
        ) from error
