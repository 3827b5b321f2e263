"""Read one attribute of a person whose other values are known, from an update of many people.

The attacker completes the person's example with every possible value of the attribute, and trains
as the client did, on each completion beside other people drawn from public examples. What the
completions change, in units of what the other people change, is a matched filter for the value.

It covers the person who alone carries some level, such as a rare diagnosis: nobody else moves that
column, so its change is that person's own, and its sign tells the outcome even after many steps, or
from the mean over hospitals. `alone` says so: the other people are then drawn without the level.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from leakbound import check
from leakbound._util.memory import free_bytes
from leakbound.attacks.base import expected_rows, seen_task
from leakbound.core import Batch, NotApplicable, Observation, Task

__all__ = ["AttributeReading", "read_attribute"]

RELATIVE = 1e-9
"""Smallest variance of a coordinate, as a share of the largest: no other person moves it."""
MOST = 4**8
"""Most coordinates that filters use. Of more, those that all trainings separate best are taken; the
left-out trainings helped to choose them, so `expected` is then too favorable."""
COPIES = 4
"""How often the updates of all trainings are in memory at once, measured and rounded up."""
NORMAL = 1.4826
"""From the median absolute deviation to a standard deviation, for normal values."""
FAR = 4.0
"""Values this many standard deviations apart, over left-out trainings, are distinguished well."""


@dataclass(frozen=True, eq=False)
class AttributeReading:
    """What an update leaks of the attribute.

    Attributes:
        value: place of the most likely completion.
        scores: (L,) log-likelihood ratios against the mean of all completions, or cosines with
            what was sent, whichever the left-out trainings read better; the largest wins.
        expected: the share of the attacker's own trainings, each left out in turn, that the filter
            reads right. It is no confidence: it holds if the other people are like the public ones.
    """

    value: int
    scores: Tensor
    expected: float


def read_attribute(
    observation: Observation,
    completions: Batch,
    generator: torch.Generator,
    *,
    alone: Callable[[Batch], Tensor] | None = None,
    replays: int = 8,
) -> AttributeReading:
    """Choose the completion of one person's example that explains the update best.

    Shapes: `completions` holds L examples (L, *S) that differ in the attribute only, which may be
    an input, such as a column, or the label.

    Args:
        observation: its auxiliary examples stand for the other people; its labels are not read.
        completions: one for each possible value.
        generator: of the draws of other people.
        alone: from public examples to a mask (N,) of those that may be in the update beside the
            person, if the attacker knows that the person is the only one of some kind.
        replays: number of draws of other people; each trains once for every completion.

    Assumptions: the person is in the update, and the local training and the defense are known.

    Raises:
        NotApplicable: there are too few public examples, one completion only, or too little memory
            for all trainings.

    Source: this project; docs/risk.md, "What the attacker already knows".

    Example:
        >>> import leakbound as lb
        >>> draw = lb.stream(0, "people")
        >>> people = torch.rand(60, 9, generator=draw)
        >>> labels = (people[:, 0] > 0.5).long()
        >>> model = torch.nn.Linear(9, 2)
        >>> person = Batch(people[:1].expand(2, 9), torch.tensor([0, 1]))  # the outcome is unknown
        >>> seen = lb.simulate(model, (people[:4], labels[:4])).round.observation
        >>> public = Batch(people[4:], labels[4:])
        >>> from dataclasses import replace
        >>> reading = read_attribute(replace(seen, auxiliary=public), person, draw)
        >>> reading.value == int(labels[0])
        True
    """
    check.count(replays=replays)
    _check_memory(observation, replays * completions.size)
    if completions.size < 2:
        raise NotApplicable("there is one completion only: the attribute is known")
    others = _others(observation, alone)
    task = seen_task(observation)
    trained = []
    for _ in range(max(2, replays)):
        batchmates = torch.randperm(others.size, generator=generator)[: observation.examples - 1]
        order = torch.randperm(observation.examples, generator=generator)
        # One draw of people and of their order for all completions: only the attribute differs.
        trained.append(
            torch.stack(
                [
                    _update_with(observation, task, others, batchmates, order, completions, value)
                    for value in range(completions.size)
                ]
            )
        )
    rows = torch.stack(trained)
    sent = observation.update.rows.flatten()
    noise = torch.zeros_like(sent, dtype=torch.float64)
    if observation.noise_variance is not None:
        noise = observation.noise_variance.flatten()
    kept = _telling(rows, noise, observation.update.mask)
    rows = rows[..., kept].double()
    sent = sent[kept].double()
    noise = noise[kept]
    filters = _separations(rows, noise)
    enough = [candidate for candidate, separation in filters.items() if separation.apart >= FAR]
    # Few coordinates that tell the values apart by far are those that nobody else moves.
    chosen = min(enough, default=max(filters, key=lambda candidate: filters[candidate].apart))
    scores = chosen(_statistics(rows, noise), sent).scores
    expected = filters[chosen].right
    return AttributeReading(int(scores.argmax()), scores, expected)


def _check_memory(observation: Observation, trainings: int) -> None:
    """The updates of all trainings are kept, and joined once."""
    rows = observation.update.rows
    needed = COPIES * rows.element_size() * trainings * rows.numel()
    free = free_bytes()
    if free is not None and needed > free:
        raise NotApplicable(
            f"it would take {needed / 1e9:.1f} GB for {trainings} trainings, and {free / 1e9:.1f} "
            "GB are free; give fewer replays or completions"
        )


def _others(observation: Observation, alone: Callable[[Batch], Tensor] | None) -> Batch:
    public = observation.auxiliary
    if public is None:
        raise NotApplicable("it needs public examples, which stand for the other people")
    if alone is not None:
        may = alone(public)
        public = Batch(public.inputs[may], public.labels[may])
    needed = observation.examples - 1
    if public.size < needed:
        raise NotApplicable(
            f"there are {public.size} public examples for the {needed} other people of the update"
        )
    like = observation.task.parameters
    inputs = public.inputs.to(like) if public.inputs.is_floating_point() else public.inputs
    return Batch(inputs.to(like.device), public.labels.to(like.device))


def _update_with(
    observation: Observation,
    task: Task,
    others: Batch,
    batchmates: Tensor,
    order: Tensor,
    completions: Batch,
    value: int,
) -> Tensor:
    """(P,) the update of the person with one completion and of the batchmates, without noise."""
    inputs = torch.cat(
        [completions.inputs[value : value + 1].to(others.inputs), others.inputs[batchmates]]
    )
    labels = torch.cat(
        [completions.labels[value : value + 1].to(others.labels), others.labels[batchmates]]
    )
    rows = expected_rows(observation, task, inputs[order], labels[order])
    return rows.detach().flatten()


class _Separation(NamedTuple):
    """How far left-out trainings stand apart, in standard deviations, and the share read right."""

    apart: float
    right: float


class _Statistics(NamedTuple):
    """Of trainings: means (L, P), variance (P,) and the places (P,), the most telling first."""

    means: Tensor
    variance: Tensor
    telling: Tensor


class _Answer(NamedTuple):
    """Scores (L,) and how they depend on the coordinates `telling` of what was sent (L, size)."""

    scores: Tensor
    weights: Tensor
    telling: Tensor


class _MatchedFilter(NamedTuple):
    """A filter on the `size` coordinates that tell the completions apart best.

    `direction`: by the direction of the update alone. Its length depends on when the person took
    part, such as in a short last batch, or late in a training by Adam.
    """

    size: int
    direction: bool

    def __call__(self, trainings: _Statistics, sent: Tensor) -> _Answer:
        """Log-likelihood ratios, coordinates independent, or cosines; `sent` is (P,)."""
        telling = trainings.telling[: self.size]
        means = trainings.means[:, telling]
        variance = trainings.variance[telling]
        seen = sent[telling]
        if not self.direction:
            center = means.mean(0)
            shifts = means - center
            weights = shifts / variance
            scores = weights @ (seen - center) - 0.5 * (weights * shifts).sum(1)
            return _Answer(scores, weights, telling)
        lengths = (means.square() / variance).sum(1).sqrt() + 1e-300
        length = (seen.square() / variance).sum().sqrt() + 1e-300
        weights = means / variance / lengths[:, None] / length
        return _Answer(weights @ seen, weights, telling)


def _telling(rows: Tensor, noise: Tensor, mask: Tensor | None) -> Tensor:
    """Places of the coordinates that tell the completions apart, at most MOST of those sent."""
    places = torch.arange(rows.shape[-1], device=rows.device)
    if mask is not None:
        places = places[mask.flatten().bool()]
    if len(places) <= MOST:
        return places
    separation = torch.cat(
        [
            _separation(*_moments(rows[..., some].double(), noise[some]))
            for some in torch.split(places, MOST)
        ]
    )
    return places[separation.topk(MOST).indices.sort().values]


def _moments(rows: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Means (L, P), and the variance (P,) over what other people do and the noise."""
    means = rows.mean(0)
    variance = (rows - means).square().mean((0, 1)) + noise
    return means, variance.clamp_min(RELATIVE * float(variance.max()) + 1e-300)


def _separation(means: Tensor, variance: Tensor) -> Tensor:
    """(P,) how far a completion is from the center, in variances."""
    return ((means - means.mean(0)).square() / variance).amax(0)


def _statistics(rows: Tensor, noise: Tensor) -> _Statistics:
    means, variance = _moments(rows, noise)
    return _Statistics(means, variance, _separation(means, variance).argsort(descending=True))


def _separations(rows: Tensor, noise: Tensor) -> dict[_MatchedFilter, _Separation]:
    """Every filter on trainings that are left out in turn."""
    coordinates = rows.shape[-1]
    sizes = [*(4**power for power in range(12) if 4**power < coordinates), coordinates]
    filters = [_MatchedFilter(size, direction) for size in sizes for direction in (False, True)]
    margins: dict[_MatchedFilter, list[Tensor]] = {candidate: [] for candidate in filters}
    spreads: dict[_MatchedFilter, list[Tensor]] = {candidate: [] for candidate in filters}
    for left_out in range(len(rows)):
        rest = torch.cat([rows[:left_out], rows[left_out + 1 :]])
        trainings = _statistics(rest, noise)
        for value, row in enumerate(rows[left_out]):
            for candidate in filters:
                scores, weights, telling = candidate(trainings, row)
                others = [at for at in range(len(scores)) if at != value]
                nearest = others[int(scores[others].argmax())]
                margins[candidate].append(scores[value] - scores[nearest])
                # The trainings have no noise, and the update does.
                apart = (weights[value] - weights[nearest]).square()
                spreads[candidate].append((apart * noise[telling]).sum())
    return {
        candidate: _summary(torch.stack(margins[candidate]), torch.stack(spreads[candidate]))
        for candidate in filters
    }


def _summary(margin: Tensor, spreads: Tensor) -> _Separation:
    # Medians: a training in which the person is in a short last batch counts many times as much.
    center = float(margin.median())
    spread = NORMAL * float((margin - center).abs().median())
    unit = math.hypot(spread, float(spreads.mean().sqrt()))
    unit += 1e-9 * abs(center) + 1e-300
    return _Separation(center / unit, float((margin > 0).double().mean()))
