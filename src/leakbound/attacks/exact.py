"""One step of a search by an engine: the objective at a gradient, and its slope.

The engine gives the gradient of the guess and pulls the objective's slope back to the images, so
that nothing differentiates a backward pass. A step has three parts, so that several searches can
share one engine between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leakbound.attacks.objectives import Cosine, Euclidean, closed, disorder
from leakbound.attacks.terms import Smooth, Term, smooth_slopes
from leakbound.client import clients_layer_inputs, shown
from leakbound.engines.base import Pulled
from leakbound.engines.choose import Choice, choose
from leakbound.types import Observation, Task, Unit

if TYPE_CHECKING:
    from leakbound.attacks.search import Search


def choice(observation: Observation, task: Task, many: bool = False) -> tuple[Choice, int] | None:
    """The engine for an attacker's simulation of what was seen, and how many rows it has.

    None where autograd is needed: several clients' local steps or minibatches, clients of unequal
    batches, examples that see each other, or a model that no engine reads.
    """
    plan, cohort = task.plan, observation.cohort
    size = cohort[0]
    if any(own != size for own in cohort) or task.coupled:
        return None
    unit = observation.update.unit if observation.defense is None else observation.defense.starts
    rows = observation.examples if unit is Unit.EXAMPLE else len(cohort)
    shape = (observation.examples // rows, *observation.input_shape)
    whole = plan.steps == 1 and (plan.batch_size or size) >= size
    if unit is Unit.EXAMPLE and not whole:  # no example has several steps of its own
        return None
    found = choose(task, rows, shape, many)
    return None if found is None else (found, rows)


def engine_of(search: Search, many: bool = False) -> tuple[Choice, Step] | None:
    """How a search evaluates by an engine; None where autograd is needed.

    Args:
        search: one that evaluates in the usual way.
        many: whether others may share its steps.
    """
    if not search.usual:
        return None
    if not search.joint and bool((search.labels < 0).any()):  # cross-entropy ignores those
        return None
    found = choice(search.observation, search.task, many)
    return None if found is None else (found[0], Step(search, found[1]))


class Step:
    """The parts of one evaluation of a search's objective and slopes, around an engine."""

    def __init__(self, search: Search, rows: int) -> None:
        self.search, self.rows = search, rows
        self.factor: Tensor | None = None
        self.direct = True

    @property
    def smooth(self) -> list[Smooth]:
        """The total variations among the search's terms, which it may still add to."""
        return [term for term in self.search.terms if isinstance(term, Smooth)]

    @property
    def traced(self) -> list[Term]:
        """All others."""
        return [term for term in self.search.terms if not isinstance(term, Smooth)]

    def guess(self) -> tuple[Tensor, Tensor]:
        """The guess for every row: inputs (R, n, *S), labels (R, n) or (R, n, K)."""
        search = self.search
        self.images = search.inputs = search.images()
        self.labels = search.labels.softmax(-1) if search.joint else search.labels
        inputs, labels = self.images.detach(), self.labels.detach()
        return (
            inputs.view(self.rows, -1, *inputs.shape[1:]),
            labels.view(self.rows, -1, *labels.shape[1:]),
        )

    @cached_property
    def closed(self) -> Cosine | Euclidean | None:
        """The distance in closed form, for rows that are seen as they are."""
        search = self.search
        if search.withheld is not None and search.settings.ordered:
            return None
        return closed(search.settings.distance, search.seen, search.weights)

    def forget(self) -> None:
        """The search's weights have changed: the distance is made anew."""
        self.__dict__.pop("closed", None)

    def compare(self, plain: Tensor, into: Tensor) -> None:
        """The objective at rows (R, P) of the guess; its slope goes to `into` (R, P), by `factor`.

        What `into` gives when pulled is to be multiplied by the factor, if there is one.
        """
        search = self.search
        if self.closed is not None and self.direct:
            # asked anew each time: a defense may change some rows and leave others
            self.direct = search.expected(shown(search.observation, plain)) is plain
        if self.closed is not None and self.direct:
            self.match, self.factor = self.closed.at(plain, into)
            self.total = self.match
            return
        self.factor = None
        with torch.enable_grad():
            leaf = plain.detach().requires_grad_()
            rows = shown(search.observation, leaf)
            match = search.distance(
                search.expected(rows), search.seen, search.weights, search.spans
            )
            total = match
            if search.withheld is not None and search.settings.ordered:
                out_of_order = disorder(rows, search.withheld, search.spans)
                total = total + search.settings.ordered * out_of_order
            into.copy_(torch.autograd.grad(total, leaf)[0])
        self.match, self.total = match.detach(), total.detach()

    def finish(self, pulled: Pulled, smooth: tuple[Tensor, Tensor] | None = None) -> None:
        """Add the other summands, keep the best guess, leave slopes in the variables.

        Args:
            pulled: what the engine gives for the slope.
            smooth: the images' total variation and its slope in them, where they are at hand.
        """
        search, images = self.search, self.images
        slope = pulled.inputs.reshape(images.shape)
        slope = slope.clone() if self.factor is None else slope * self.factor
        if self.smooth:
            if smooth is None:
                (value,), slopes = smooth_slopes(images.detach()[None])
                smooth = value, slopes[0]
            for term in self.smooth:
                self.total = self.total + term.weight * smooth[0]
                slope.add_(smooth[1], alpha=term.weight)
        if self.traced or search.pull is not None:
            slope += self._traced()
        pixels = search.images.variables
        if len(pixels) == 1 and images is pixels[0]:
            slopes_of: Sequence[Tensor] = [slope]
        else:
            slopes_of = torch.autograd.grad(images, pixels, slope)
        if search.joint:
            assert pulled.labels is not None  # soft labels were given
            soft = pulled.labels.reshape(self.labels.shape)
            soft = soft if self.factor is None else soft * self.factor
            slopes_of = [*slopes_of, *torch.autograd.grad(self.labels, search.labels, soft)]
        absorb(search, self.total, self.match, slopes_of)

    def _traced(self) -> Tensor:
        """Add the terms that autograd differentiates; the slope of all that moves the images."""
        search, leaf = self.search, self.images.detach().requires_grad_()
        with torch.enable_grad():
            inside: dict[str, Tensor] = {}
            if search.layers:
                cohort = search.observation.cohort
                inside = clients_layer_inputs(search.task, leaf, search.layers, cohort)
            parts = [term.weight * term(leaf, inside) for term in self.traced]
            for part in parts:
                self.total = self.total + part.detach()
            if search.pull is not None:
                parts.append(search.pull(leaf))
            (slope,) = torch.autograd.grad(sum(parts[1:], parts[0]), leaf)
        return slope


def absorb(search: Search, total: Tensor, match: Tensor, gradients: Sequence[Tensor]) -> None:
    """Keep the best iterate of the last evaluation, and its gradients in the variables."""
    for variable, own in zip(search.variables, gradients, strict=True):
        variable.grad = own
    with torch.no_grad():
        better = total < search.best
        search.best = torch.where(better, total, search.best)
        kept = search.kept or search.variables
        pairs = zip(search.variables, kept, strict=True)
        search.kept = [torch.where(better, now, before) for now, before in pairs]
    search.last, search.last_match = total.detach(), match.detach()
    if not search.trace:
        search.trace.append(float(search.last_match))
        search.vanished = not any(bool(own.any()) for own in gradients)
