"""One evaluation of a search: the objective and its gradients, by an exact engine or by autograd.

An engine gives the candidate's gradient and the vector-Jacobian product to the images, so nothing
differentiates a backward pass. Several searches may share one engine: a search's bits do not depend
on the batch composition (see `engines.bundle`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from leakbound.attacks.features.base import FoundFeatures
from leakbound.attacks.matching.distances import variation_gradients
from leakbound.attacks.matching.images import Images
from leakbound.attacks.matching.objective import Objective
from leakbound.attacks.matching.terms import Smooth
from leakbound.client import is_frugal, shown
from leakbound.core import Observation, Task, Unit
from leakbound.engines.base import Engine, Pulled, aligned
from leakbound.engines.choose import Choice, choose
from leakbound.losses import named


class Companion(Protocol):
    """What an attack estimates along with the images, and how it changes the objective."""

    variables: list[Tensor]
    """The variables that the optimizer moves."""

    def place(self, objective: Objective) -> Objective:
        """The objective at the current estimate; called before every evaluation."""
        ...

    def learn(self, rows: Tensor, better: bool) -> None:
        """Learn from an evaluation: the candidate's rows, and whether it is the best."""
        ...

    def recall(self) -> None:
        """Go back to the estimate of the best iterate."""
        ...


@dataclass(frozen=True, eq=False)
class ExactEngine:
    """The engine that evaluates a search, and how many rows of gradients it has."""

    choice: Choice
    rows: int


@dataclass(eq=False)
class Search:
    """The state of one search.

    `labels` are the labels, or free numbers that are searched with the images and give labels as
    `NamedLoss.searched` says, such as logits (N, K). `direct`: known defenses have not
    changed the rows so far. `pull`: another force on the images that does not affect which iterate
    is best. `vanished`: the first evaluation had no gradient.
    """

    objective: Objective
    images: Images
    labels: Tensor
    features: FoundFeatures | None = None
    companion: Companion | None = None
    exact: ExactEngine | None = None
    direct: bool = True
    pull: Callable[[Tensor], Tensor] | None = None
    kept: list[Tensor] = field(default_factory=list)
    trace: list[float] = field(default_factory=list)
    vanished: bool = False

    def __post_init__(self) -> None:
        self.best = torch.tensor(float("inf"), device=self.objective.seen.device)
        self.total = self.match = self.best

    @property
    def joint(self) -> bool:
        return self.labels.requires_grad

    @property
    def variables(self) -> list[Tensor]:
        more = [] if self.companion is None else self.companion.variables
        return [*self.images.variables, *([self.labels] if self.joint else []), *more]

    def candidate(self) -> tuple[Tensor, Tensor]:
        """The current images (N, *S), and labels, or probabilities (N, K) of classes."""
        loss = named(self.objective.task.loss)
        return self.images(), loss.searched(self.labels) if self.joint else self.labels

    def record(
        self,
        total: Tensor,
        match: Tensor,
        gradients: Sequence[Tensor],
    ) -> Tensor:
        """Store an evaluation with its gradients; return whether it is the best so far."""
        for variable, gradient in zip(self.variables, gradients, strict=True):
            variable.grad = gradient
        with torch.no_grad():
            # False for NaN, so such an iterate is never kept.
            better = total < self.best
            self.best = torch.where(better, total, self.best)
            # Chosen on the device: a branch in Python would wait for it.
            pairs = zip(self.variables, self.kept or self.variables, strict=True)
            self.kept = [torch.where(better, now, before) for now, before in pairs]
        self.total = total.detach()
        self.match = match.detach()
        if not self.trace:
            self.trace.append(float(self.match))
            self.vanished = not any(bool(gradient.any()) for gradient in gradients)
        return better

    def shows(self, plain: Tensor) -> bool:
        """Whether the attacker sees the client's plain rows (R, P) as they are.

        Asked each time: a defense may change some rows and not others.
        """
        if self.direct:
            objective = self.objective
            sent = shown(objective.observation, plain)
            self.direct = objective.seen_of(sent) is plain
        return self.direct

    def recall(self) -> None:
        """Restore the variables of the best iterate."""
        with torch.no_grad():
            for variable, kept in zip(self.variables, self.kept, strict=False):
                variable.copy_(kept)  # nothing is kept before the first evaluation
        if self.companion is not None:
            self.companion.recall()
            self.objective = self.companion.place(self.objective)

    def enter(self, factor: float) -> None:
        """Begin a stage from the best iterate and evaluate it again, as the objective changes."""
        self.recall()
        self.objective = self.objective.at_stage(factor)
        self.best = torch.full_like(self.best, float("inf"))


def choose_engine(search: Search, many: bool = False) -> ExactEngine | None:
    """The engine of a search. None if autograd is needed: the attack simulates the client in its
    own way (`Objective.client`, `Search.companion`), cross-entropy ignores a label, memory is to be
    saved, or `engine_for` has no engine.
    """
    objective = search.objective
    if is_frugal() or objective.client is not None or search.companion is not None:
        return None
    whole = not search.labels.is_floating_point()
    if whole and (search.labels < 0).any():
        return None
    return engine_for(objective.observation, objective.task, many)


def engine_for(
    observation: Observation,
    task: Task,
    many: bool = False,
) -> ExactEngine | None:
    """The engine for an attacker's simulation of what was seen.

    None for several clients' local steps or minibatches, clients of unequal batches, several
    clients whose examples affect each other, and a model that no engine supports. `many`: other
    searches may share its steps.
    """
    plan = task.plan
    cohort = observation.cohort
    size = cohort[0]
    if any(examples != size for examples in cohort):
        return None
    unit = observation.update.unit if observation.defense is None else observation.defense.starts
    rows = observation.examples if unit is Unit.EXAMPLE else len(cohort)
    shape = (observation.examples // rows, *observation.input_shape)
    whole = plan.is_gradient and (plan.batch_size or size) >= size
    if unit is Unit.EXAMPLE and not whole:  # no example has several steps
        return None
    choice = choose(task, rows, shape, many)
    return None if choice is None else ExactEngine(choice, rows)


class Evaluator:
    """Evaluates one search, or several that share an engine (see `loop.batch_key`)."""

    def __init__(self, searches: Sequence[Search]) -> None:
        self.searches = list(searches)
        self.engine: Engine | None = None
        self.rows = 1
        self.cotangent = torch.empty(0)
        if searches[0].exact is not None:
            self.rows = searches[0].exact.rows
            tasks = [search.objective.task for search in searches]
            self.engine = searches[0].exact.choice.engine(tasks, self.rows)

    def evaluate(self) -> None:
        """Evaluate each search at its current candidate; store values and gradients there."""
        if self.engine is None:
            self._by_autograd()
        else:
            self._by_engine(self.engine)

    def _by_autograd(self) -> None:
        for search in self.searches:
            if search.companion is not None:
                search.objective = search.companion.place(search.objective)
            images, labels = search.candidate()
            total, match, rows = search.objective.value(images, labels)
            driven = total if search.pull is None else total + search.pull(images)
            gradients = torch.autograd.grad(driven, search.variables)
            better = search.record(total, match, gradients)
            if search.companion is not None:
                search.companion.learn(rows.detach(), bool(better))

    def _by_engine(self, engine: Engine) -> None:
        candidates = [_Evaluation(search) for search in self.searches]
        inputs = _joined([self._by_row(candidate.images) for candidate in candidates])
        labels = _joined([self._by_row(candidate.labels) for candidate in candidates])
        plain = engine.gradient(inputs, labels)
        if not self.cotangent.numel():
            self.cotangent = aligned(len(plain), plain)
        places = [slice(at, at + self.rows) for at in range(0, len(plain), self.rows)]
        for candidate, place in zip(candidates, places, strict=True):
            candidate.compare(plain[place], self.cotangent[place])
        pulled = engine.pull(self.cotangent)
        variations = _variations(inputs.view(len(candidates), -1, *inputs.shape[2:]), candidates)
        for candidate, place, variation in zip(candidates, places, variations, strict=True):
            soft = None if pulled.labels is None else pulled.labels[place]
            candidate.finish(Pulled(pulled.inputs[place], soft), variation)

    def _by_row(self, values: Tensor) -> Tensor:
        """Images or labels (N, ...) by row, (R, n, ...)."""
        return values.detach().view(self.rows, -1, *values.shape[1:])


class _Evaluation:
    """A search's candidate within one evaluation by an engine: the partial sums of objective and
    distance, and the factor for the gradient (None: nothing).
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self.images, self.labels = search.candidate()
        self.total = self.match = search.best
        self.factor: Tensor | None = None

    def compare(self, plain: Tensor, into: Tensor) -> None:
        """The objective at the client's plain rows (R, P); its gradient there goes to `into`."""
        search = self.search
        objective = search.objective
        if objective.closed is not None and search.shows(plain):
            match, factor = objective.closed.at(plain, into)
            self.total = self.match = match.reshape(())
            self.factor = factor.reshape(())
            return
        with torch.enable_grad():
            leaf = plain.detach().requires_grad_()
            rows = shown(objective.observation, leaf)
            match = objective.match(rows)
            total = objective.with_order(match, rows)
            into.copy_(torch.autograd.grad(total, leaf)[0])
        self.match = match.detach()
        self.total = total.detach()

    def finish(
        self,
        pulled: Pulled,
        variation: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Add the terms to the engine's result for `into`, and pass value and gradients to the
        search. `variation`: the images' total variation and its gradient, if it is a term.
        """
        search = self.search
        images = self.images
        gradient = pulled.inputs.reshape(images.shape)
        # A copy: terms are added in place, and the engine's memory is its own.
        gradient = gradient.clone() if self.factor is None else gradient * self.factor
        traced = []
        for term in search.objective.terms:
            if isinstance(term, Smooth) and variation is not None:
                self.total = self.total + term.weight * variation[0]
                gradient.add_(variation[1], alpha=term.weight)
            else:
                traced.append(term)
        if traced or search.pull is not None:
            leaf = images.detach().requires_grad_()
            with torch.enable_grad():
                parts = search.objective.penalties(leaf, tuple(traced))
                for part in parts:
                    self.total = self.total + part.detach()
                if search.pull is not None:
                    parts.append(search.pull(leaf))
                gradient += torch.autograd.grad(sum(parts[1:], parts[0]), leaf)[0]
        pixels = search.images.variables
        gradients: Sequence[Tensor] = [gradient]
        # Pixels are variables themselves; only functions of variables need the chain rule.
        if len(pixels) > 1 or images is not pixels[0]:
            gradients = torch.autograd.grad(images, pixels, gradient)
        if search.joint:
            assert pulled.labels is not None  # probabilities were given
            soft = pulled.labels.reshape(self.labels.shape)
            soft = soft if self.factor is None else soft * self.factor
            gradients = [*gradients, *torch.autograd.grad(self.labels, search.labels, soft)]
        search.record(self.total, self.match, gradients)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _variations(
    stacked: Tensor, candidates: Sequence[_Evaluation]
) -> Sequence[tuple[Tensor, Tensor] | None]:
    """Total variation of all candidates' images (N, B, C, H, W), if a term; gradients too."""
    wanted = [any(isinstance(t, Smooth) for t in c.search.objective.terms) for c in candidates]
    if all(wanted):
        return variation_gradients(stacked)
    pairs = zip(stacked, wanted, strict=True)
    return [variation_gradients(images[None])[0] if asked else None for images, asked in pairs]
