"""The objective of a search: distance of a candidate's update from the one seen, plus penalties.

An objective is immutable. A search that changes its objective between stages takes a new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from leakbound._util.recompute import recomputed
from leakbound.attacks.base import expected_rows, seen_task
from leakbound.attacks.matching.distances import (
    DISTANCES,
    Cosine,
    Euclidean,
    disorder,
)
from leakbound.attacks.matching.settings import MatchingSettings
from leakbound.attacks.matching.terms import Smooth, Term
from leakbound.client import clients_layer_inputs, local_update, refuse_codes
from leakbound.core import LocalPlan, NotApplicable, Observation, Task
from leakbound.covariance import Structured
from leakbound.domains import smooth_axes

__all__ = ["Client", "Objective", "Value", "withheld"]


class Client(Protocol):
    """How a candidate becomes rows, if one round of the observation's own client does not define
    it.
    """

    def rows(self, images: Tensor, labels: Tensor) -> Tensor:
        """The rows (R, P) that a candidate would have sent."""
        ...

    def seen_of(self, rows: Tensor) -> Tensor:
        """What would have been seen of these rows, to be compared with `Objective.seen`."""
        ...


class Value(NamedTuple):
    """An objective's value: the total, the distance alone, and the rows behind it."""

    total: Tensor
    match: Tensor
    rows: Tensor


@dataclass(frozen=True, eq=False)
class Objective:
    """Distance between a candidate's update and the one that was seen, plus terms.

    `seen` (R, P) is white if known correlated noise was whitened. `withheld` (R, P) marks
    coordinates of the model that are known to be withheld. `variation` is the weight of the total
    variation; a first stage adds `smoothing`. `zeros_first`: withheld coordinates count as sent
    zeros, with less weight in each stage and none in the last.
    """

    observation: Observation
    task: Task
    distance: str
    seen: Tensor
    weights: Tensor | None
    whitener: Structured | None
    withheld: Tensor | None
    noise_share: float
    variation: float
    smoothing: float
    ordered: float = 0.0
    terms: tuple[Term, ...] = ()
    zeros_first: bool = False
    client: Client | None = None

    @staticmethod
    def of(
        settings: MatchingSettings,
        observation: Observation,
        zeros_first: bool = False,
    ) -> Objective:
        """Build it from the settings and an observation, without the terms that need draws."""
        refuse_codes(observation.task, observation.input_shape)
        whitener = _whitener(observation)
        seen = observation.update.rows
        hidden = withheld(observation)
        seen = seen if whitener is None else whitener.whiten(seen)
        if zeros_first and hidden is not None:
            seen = seen.masked_fill(hidden, 0.0)
        noise_share = observation.noise_share
        if whitener is not None:
            energy = float(seen.double().square().sum())
            # Whitened noise has variance 1 in every coordinate.
            noise_share = min(1.0, seen.numel() / energy) if energy > 0 else 0.0
        images = len(smooth_axes(observation.input_shape)) > 1
        variation = settings.total_variation + settings.noise_variation * noise_share**0.5
        shown = 1.0 if hidden is None else 1 - float(hidden.double().mean())
        smoothing = settings.smoothing / max(shown, 1e-3) ** 0.5 if images else 0.0
        if settings.only_images and not images:
            variation = 0.0
        if variation and not smooth_axes(observation.input_shape):
            raise NotApplicable(
                "total variation needs images (C, H, W), volumes or series, and one input is "
                f"{observation.input_shape}; set total_variation and noise_variation to 0"
            )
        return Objective(
            observation,
            _smooth(seen_task(observation), observation),
            settings.distance,
            seen,
            # After whitening, all coordinates have the same noise.
            observation.weights if whitener is None else None,
            whitener,
            hidden,
            noise_share,
            variation,
            smoothing,
            settings.ordered,
            (Smooth(variation),) if variation or smoothing else (),
            zeros_first,
        )

    def at_stage(self, factor: float) -> Objective:
        """The objective of a stage, with smoothing and zeros multiplied by this factor."""
        smooth = Smooth(self.variation + factor * self.smoothing)
        terms = tuple(smooth if isinstance(term, Smooth) else term for term in self.terms)
        weights = self.weights
        if self.zeros_first and self.withheld is not None and weights is not None:
            weights = torch.where(self.withheld, factor, weights)
        return replace(self, terms=terms, weights=weights)

    @property
    def blank(self) -> bool:
        """Whether the update is zero everywhere."""
        return not self.observation.update.rows.any()

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where each of the model's tensors starts and ends within a row."""
        return [(start, stop) for _, _, start, stop in self.task.layout]

    @cached_property
    def closed(self) -> Cosine | Euclidean | None:
        """The distance with its derivative in closed form; None if autograd has to find it."""
        if self.withheld is not None and self.ordered:
            return None
        if self.distance == "cosine" and len(self.seen) == 1:
            return Cosine(self.seen, self.weights)
        return Euclidean(self.seen, self.weights) if self.distance == "euclidean" else None

    def rows(self, images: Tensor, labels: Tensor) -> Tensor:
        """The rows (R, P) that a candidate would have sent."""
        if self.client is not None:
            return self.client.rows(images, labels)
        return expected_rows(self.observation, self.task, images, labels)

    def seen_of(self, rows: Tensor) -> Tensor:
        """What would have been seen of these rows, to be compared with `seen`."""
        if self.client is not None:
            return self.client.seen_of(rows)
        return rows if self.whitener is None else self.whitener.whiten(rows)

    def match(self, rows: Tensor) -> Tensor:
        """The distance of these rows from those that were seen."""
        return DISTANCES[self.distance](self.seen_of(rows), self.seen, self.weights, self.spans)

    def with_order(self, total: Tensor, rows: Tensor) -> Tensor:
        """Add the penalty for withheld entries of these rows that are not the largest."""
        if self.withheld is None or not self.ordered:
            return total
        return total + self.ordered * disorder(rows, self.withheld, self.spans)

    def penalties(
        self,
        images: Tensor,
        terms: tuple[Term, ...],
    ) -> list[Tensor]:
        """Each term's penalty for the images, times its weight."""
        layers = dict.fromkeys(name for term in terms for name in term.layers)
        inside: dict[str, Tensor] = {}
        if layers:
            cohort = self.observation.cohort
            inside = clients_layer_inputs(self.task, images, tuple(layers), cohort)
        return [term.weight * term(images, inside) for term in terms]

    def value(self, images: Tensor, labels: Tensor) -> Value:
        """The total, the distance alone, and the client's rows behind it; differentiable."""
        rows = self.rows(images, labels)
        match = total = self.match(rows)
        for penalty in self.penalties(images, self.terms):
            total = total + penalty
        return Value(self.with_order(total, rows), match, rows)


MOST_ROUNDS = 8
"""The latest rounds that a search explains together: each costs as much as the last one."""


@dataclass(frozen=True, eq=False)
class SameExamples:
    """The distances from what the same clients sent before, if they train on the same examples."""

    objectives: tuple[Objective, ...]
    labels: Tensor
    weight: float = 1.0
    layers: tuple[str, ...] = ()

    def __call__(self, images: Tensor, inside: Mapping[str, Tensor]) -> Tensor:
        # One round's graph at a time: all together would not fit where one does.
        return torch.stack(
            [recomputed(partial(self._off, one), images) for one in self.objectives]
        ).sum()

    def _off(self, round_: Objective, images: Tensor) -> Tensor:
        return round_.match(round_.rows(images, self.labels))


def earlier_rounds(
    settings: MatchingSettings,
    observation: Observation,
    labels: Tensor,
) -> list[Term]:
    """The term of the rounds before; none if nothing was seen of them.

    Raises:
        NotApplicable: labels are searched, or the rounds have other numbers of examples.
    """
    if not observation.history:
        return []
    if labels.is_floating_point() and labels.requires_grad:
        raise NotApplicable(
            "rounds='together' needs fixed labels, and labels='joint' searches them; use 'inferred'"
        )
    counts = {one.examples for one in (*observation.history, observation)}
    if len(counts) > 1:
        raise NotApplicable(
            f"the client's rounds have {sorted(counts)} examples, so they are not the same; use "
            "rounds='last'"
        )
    latest = observation.history[1 - MOST_ROUNDS :]
    before = tuple(Objective.of(settings, one) for one in latest)
    return [SameExamples(before, labels)]


def withheld(observation: Observation) -> Tensor | None:
    """(R, P) bool: the model's coordinates known to be withheld; None if all were sent."""
    mask = observation.update.mask
    kept = observation.task.kept
    if mask is None or not observation.threat.defense_known:
        return None
    return ~mask if kept is None else ~mask & kept


def _smooth(task: Task, observation: Observation) -> Task:
    """Simulate Adam with an epsilon of a hundredth of the gradient's root mean square.

    Adam divides each entry by its own size, so its first step shows signs, and their slopes vanish.
    Five updates (LeNet, MLP) gained 0.2 to 3.6 dB. The scale is a gray batch's.
    """
    labels = observation.labels
    if task.plan.is_sum or labels is None or task.domain is not None:
        return task
    gray = torch.full(observation.batch_shape, sum(task.input_range) / 2).to(task.parameters)
    # As an update of one step, which keeps to the memory that there is.
    once = replace(task, plan=LocalPlan(batch_size=task.plan.batch_size))
    scale = float(local_update(once, gray, labels).square().mean().sqrt())
    epsilon = max(task.plan.added, 0.01 * scale)
    return replace(task, plan=replace(task.plan, epsilon=epsilon))


def hides(observation: Observation) -> bool:
    hidden = withheld(observation)
    return hidden is not None and bool(hidden.any())


def _whitener(observation: Observation) -> Structured | None:
    """The known covariance of correlated noise; None if a mask removed part of it."""
    correlation = observation.correlation
    if correlation is None or (correlation.blocks and observation.update.mask is not None):
        return None
    return correlation.to(observation.update.rows)
