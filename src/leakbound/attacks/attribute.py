"""Read one attribute of a person whose other values are known, from an update of many people.

The attacker completes the person's example with every possible value of the attribute, and trains
as the client did, on each completion beside other people. What the completions change, in units of
what the other people change, is a matched filter for the value.

It covers the person who alone carries some level, such as a rare diagnosis: nobody else moves that
column, so its change is that person's own, and its sign tells the outcome even after many steps, or
from the mean over hospitals. `alone` says so: the other people are then drawn without the level.

A value is *read* if the update looks like trainings with this value, and like
hardly any training with another one: `AttributeReading.p_value`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from leakbound import check
from leakbound._util.memory import free_bytes
from leakbound.attacks.base import expected_rows, seen_task
from leakbound.client import respond
from leakbound.core import Batch, NotApplicable, Observation, Task, Update
from leakbound.engines.sensitivity import example_gradients
from leakbound.randomness import normal

__all__ = ["AttributeReading", "read_attribute"]

RELATIVE = 1e-9
"""Smallest variance of a coordinate, as a share of the largest: no other person moves it."""
ROUNDING = 1e-6
"""Assumed rounding error of a coordinate, as a share of the largest: two clients that train on the
same people in another order send values that differ by it. What was computed as a difference of
weights is rounded as they are."""
MOST = 4**8
"""Most coordinates that filters use. Of more, those that all trainings separate best are taken; the
left-out trainings helped to choose them, so `expected` is then too favorable."""
COPIES = 4
"""How often the updates of all trainings are in memory at once, measured and rounded up."""
NORMAL = 1.4826
"""From the median absolute deviation to a standard deviation, for normal values."""
FAR = 4.0
"""Values this many standard deviations apart, over left-out trainings, are distinguished well."""
ENOUGH = 3
"""After so many trainings with another value that look like the answer as much as the update does,
the value is not read, and no more are run (Besag and Clifford 1991)."""

TINY = 1e-12
"""Keeps scores finite where no training varies, and comparable where the values do not differ."""
HOPELESS = 0.1
"""With a p-value above this for one other value, further ones are not tried."""


@dataclass(frozen=True, eq=False)
class AttributeReading:
    """What an update leaks of the attribute.

    Attributes:
        value: place of the most likely completion.
        scores: (L,) log-likelihoods up to a constant, in nats, without the prior. Their scale is
            that of the attacker's own trainings, each left out in turn.
        expected: the share of the attacker's own trainings, each left out in turn, that the filter
            reads right. It is no confidence: it holds if the other people are like the public ones.
        p_value: of the hypothesis that the person has another value, whatever it is, or is not in
            the update: the value is wrong with this probability at most, if everything else is as
            assumed. None without `tests`, or where the client's noise cannot be simulated.
    """

    value: int
    scores: Tensor
    expected: float
    p_value: float | None = None


def read_attribute(
    observation: Observation,
    completions: Batch,
    generator: torch.Generator,
    *,
    prior: Tensor | None = None,
    alone: Callable[[Batch], Tensor] | None = None,
    replays: int = 8,
    tests: int = 0,
) -> AttributeReading:
    """Choose the completion of one person's example that explains the update best.

    Shapes: `completions` holds L examples (L, *S) that differ in the attribute only, which may be
    an input, such as a column, or the label.

    Args:
        observation: its auxiliary examples stand for the other people; its labels are not read.
        completions: one for each possible value.
        generator: of the draws of other people.
        prior: (L,) how likely each completion is without the update; default: all the same. It
            moves `value`, and neither `scores` nor `p_value`.
        alone: from public examples to a mask (N,) of those that may be in the update beside the
            person, if the attacker knows that the person is the only one of some kind.
        replays: number of draws of other people; each trains once for every completion.
        tests: number of further trainings with every value, for the p-value, which is 1 / (1 +
            tests) at least: 99 for .01.

    Assumptions: the person is in the update, the local training and the defense are known, and the
    other people are like the public ones.

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
    check.non_negative(tests=tests)
    public = _others(observation, alone)
    trainings = Trainings(observation, completions, _drawn_from(public, observation), public)
    fitted = trainings.fitted(max(2, replays), generator)
    value = fitted.likeliest(prior)
    p_value = trainings.p_value(fitted, value, tests, generator) if tests else None
    return AttributeReading(value, fitted.scores, fitted.expected, p_value)


class Person(NamedTuple):
    """One example (1, *S) with its label."""

    inputs: Tensor
    labels: Tensor


class Drawn(NamedTuple):
    """The other people of an update (N - 1, *S), drawn, and the person's place among them."""

    inputs: Tensor
    labels: Tensor
    place: int

    def joined(self, person: Person) -> Batch:
        """All people, in order of training."""
        place = self.place
        inputs, labels = (
            torch.cat([others[:place], own.to(others), others[place:]])
            for others, own in zip(self[:2], person, strict=True)
        )
        return Batch(inputs, labels)


def _others(
    observation: Observation,
    alone: Callable[[Batch], Tensor] | None,
) -> Batch:
    """The public examples that stand for the other people."""
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
    return _like_task(public, observation.task)


def _drawn_from(
    public: Batch,
    observation: Observation,
) -> Callable[[torch.Generator], Drawn]:
    """Draws other people from public ones, and the place of the person among them."""
    size = observation.examples

    def draw(generator: torch.Generator) -> Drawn:
        # The public people are one sample of those who may take part: a sample of this sample
        # varies as much as the unknown people do about what the public ones show.
        sample = torch.randint(public.size, (public.size,), generator=generator)
        at = sample[torch.randint(public.size, (size - 1,), generator=generator)]
        place = int(torch.randint(size, (1,), generator=generator))
        return Drawn(public.inputs[at], public.labels[at], place)

    return draw


def _like_task(
    batch: Batch,
    task: Task,
) -> Batch:
    """Public examples in the type and on the device of the client's."""
    like = task.parameters
    inputs = batch.inputs.to(like) if batch.inputs.is_floating_point() else batch.inputs
    return Batch(inputs.to(like.device), batch.labels.to(like.device))


@dataclass(frozen=True, eq=False)
class Trainings:
    """The attacker's own trainings, with one person's attribute given and the others drawn.

    Attributes:
        observation: the attacked update, its model, local training and defense.
        completions: the person's example with every value of the attribute (L, *S).
        draw: the other people of one training, and the person's place among them.
        substitutes: people one of whom takes the person's place if the person does not take part;
            None if it is certain that the person does.
    """

    observation: Observation
    completions: Batch
    draw: Callable[[torch.Generator], Drawn]
    substitutes: Batch | None = None

    def __post_init__(self) -> None:
        if self.completions.size < 2:
            raise NotApplicable("there is one completion only: the attribute is known")

    def fitted(
        self,
        replays: int,
        generator: torch.Generator,
    ) -> Fitted:
        """The filter for the value that reads left-out trainings best, and its scores."""
        observation = self.observation
        values = range(self.completions.size)
        check_memory(observation, replays * len(values))
        task = seen_task(observation)
        trained = []
        for _ in range(replays):
            # One draw of people and of their order for all values: only the attribute differs.
            drawn = self.draw(generator)
            each = [self._expected(task, drawn, self._completion(value)) for value in values]
            trained.append(torch.stack(each))
        rows = torch.stack(trained)
        sent = observation.update.rows.flatten()
        rounding = rounding_of(observation, rows)
        noise = rounding.square().repeat(len(sent) // len(rounding))
        if observation.noise_variance is not None:
            noise = noise + observation.noise_variance.flatten()
        kept = _telling(rows, noise, observation.update.mask)
        rows = rows[..., kept].double()
        noise = noise[kept]
        filters = _separations(rows, noise)
        chosen = _chosen(filters)
        rounding = rounding[kept % len(rounding)]
        return Fitted(chosen, _statistics(rows, noise), filters[chosen], kept, rounding, sent)

    def p_value(
        self,
        fitted: Fitted,
        value: int,
        tests: int,
        generator: torch.Generator,
    ) -> float | None:
        """The largest p-value of: the person has another value, or does not take part.

        The statistic against a value is by how much another one is likelier; against absence, how
        near the update is to trainings with the answer. The p-value is the rank of the update among
        `tests` trainings under the hypothesis, by the client's and the defense's own code, noise
        included. The largest one counts, so no hypothesis is rejected because of the others. If the
        update is farther from the answer than all trainings with the answer, something else is
        assumed wrongly, and the p-value is 1.

        Source: ranks of exchangeable trainings; Besag and Clifford, "Sequential Monte Carlo
        p-values", 1991.
        """
        if not can_replay(self.observation):
            return None

        def behind(
            other: int,
            row: Tensor,
        ) -> float:
            return fitted.behind(fitted.raw_of(row), other)

        def near(row: Tensor) -> float:
            return -fitted.distance(row, value)

        # Rounded as the trainings are: where nobody moves a coordinate, an exact 0 would be nearer
        # to the answer than all of them.
        seen = fitted.rounded(fitted.seen, generator)
        run = partial(self._replayed, fitted, generator)
        largest = 0.0
        if self.substitutes is not None:
            absent = partial(self._substitute, self.substitutes)
            largest = rank(near, seen, partial(run, absent), tests)
        for other in fitted.scores.argsort(descending=True).tolist():
            if largest > HOPELESS:
                return largest
            if other != value:
                rival = partial(run, partial(self._completion, other))
                largest = max(largest, rank(partial(behind, other), seen, rival, tests))
        answer = partial(self._completion, value)
        nearest = (near(run(answer)) for _ in range(tests))
        return largest if any(near(seen) >= each for each in nearest) else 1.0

    def _replayed(
        self,
        fitted: Fitted,
        generator: torch.Generator,
        person: Callable[[torch.Generator], Person],
    ) -> Tensor:
        """(K,) the kept coordinates of one training, as the client would have sent it."""
        people = self.draw(generator).joined(person(generator))
        row = replayed(self.observation, people, generator)[fitted.kept].double()
        return fitted.rounded(row, generator)

    def _completion(
        self,
        value: int,
        _: torch.Generator | None = None,
    ) -> Person:
        """The person with one value of the attribute."""
        return Person(
            self.completions.inputs[value : value + 1], self.completions.labels[value : value + 1]
        )

    def _substitute(
        self,
        people: Batch,
        generator: torch.Generator,
    ) -> Person:
        """Somebody else, drawn."""
        at = torch.randint(people.size, (1,), generator=generator)
        return Person(people.inputs[at], people.labels[at])

    def _expected(
        self,
        task: Task,
        drawn: Drawn,
        person: Person,
    ) -> Tensor:
        """(P,) the update of the drawn people, without noise."""
        people = drawn.joined(person)
        rows = expected_rows(self.observation, task, people.inputs, people.labels)
        return rows.detach().flatten()


def can_replay(observation: Observation) -> bool:
    """Whether a training by the client's own code is like the sent one, but for the people.

    What a random mask withheld is known, and other trainings withhold other parts.
    """
    update = observation.update
    masked = update.drawn or update.mask_private
    return observation.defense is not None and not masked and not observation.history


def replayed(
    observation: Observation,
    people: Batch,
    generator: torch.Generator,
) -> Tensor:
    """(R P,) the update that clients with these people, and the defense, would have sent."""
    defense = observation.defense
    assert defense is not None  # by `can_replay`
    inputs = torch.split(people.inputs, list(observation.cohort))
    labels = torch.split(people.labels, list(observation.cohort))
    task = observation.task
    sent = [
        respond(task, Batch(*part), defense, generator, each=example_gradients)[0]
        for part in zip(inputs, labels, strict=True)
    ]
    together = defense.sides[1]
    state = together.init(task)
    return together.transform(Update.stack(sent), state, None, generator)[0].rows.flatten()


def rounding_of(
    observation: Observation,
    rows: Tensor,
) -> Tensor:
    """(P,) the standard deviation of the rounding of each coordinate, float64."""
    weights = observation.task.parameters
    rate = observation.task.plan.learning_rate
    of_weights = torch.finfo(weights.dtype).eps * weights.detach().double().abs() / rate
    return (of_weights.square() + (ROUNDING * float(rows.abs().max())) ** 2).sqrt()


@dataclass(frozen=True, eq=False)
class Fitted:
    """A filter and the trainings that it was fitted to, on the coordinates `kept` of the update.

    `rounding`: the standard deviation of each of them; `sent` (R P,): the update.
    """

    filter: _MatchedFilter
    trainings: _Statistics
    separation: _Separation
    kept: Tensor
    rounding: Tensor
    sent: Tensor

    @property
    def expected(self) -> float:
        """The share of left-out trainings that are read right."""
        return self.separation.right

    def raw_of(self, row: Tensor) -> Tensor:
        """(L,) the filter's scores of the kept coordinates of an update."""
        return self.filter(self.trainings, row).scores

    @property
    def seen(self) -> Tensor:
        """(K,) the kept coordinates of the update."""
        return self.sent[self.kept].double()

    def rounded(
        self,
        row: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """(K,) a row with the assumed rounding error."""
        return row + self.rounding * normal(row.shape, generator, like=row)

    def distance(
        self,
        row: Tensor,
        value: int,
    ) -> float:
        """How far a row is from trainings with a value, on the coordinates that the filter uses."""
        telling = self.trainings.telling[: self.filter.size]
        apart = row[telling] - self.trainings.means[value, telling]
        return float((apart.square() / self.trainings.variance[telling]).sum())

    @property
    def scores(self) -> Tensor:
        """(L,) log-likelihoods up to a constant.

        Left-out trainings lead by `center`, with a deviation of `unit`: for two values with normal
        scores at plus and minus `center`, a lead of x has the log-likelihood ratio
        2 center x / unit².
        """
        separation = self.separation
        scale = max(2 * separation.apart / max(separation.unit, TINY), TINY)
        scores = scale * self.raw_of(self.seen)
        return scores - scores.max()

    def likeliest(self, prior: Tensor | None) -> int:
        """The value with the largest posterior probability."""
        scores = self.scores
        if prior is not None:
            scores = scores + prior.to(scores).clamp_min(1e-300).log()
        return int(scores.argmax())

    @staticmethod
    def behind(
        scores: Tensor,
        value: int,
    ) -> float:
        """By how much the best other value leads; negative if this one does."""
        others = torch.cat([scores[:value], scores[value + 1 :]])
        return float(others.max() - scores[value])


def rank(
    statistic: Callable[[Tensor], float],
    seen: Tensor,
    replayed: Callable[[], Tensor],
    tests: int,
) -> float:
    """How often trainings under a hypothesis have at least the statistic of what was seen."""
    largest = statistic(seen)
    as_far = 0
    for count in range(1, tests + 1):
        as_far += statistic(replayed()) >= largest
        if as_far == ENOUGH:
            return as_far / count
    return (1 + as_far) / (1 + tests)


def check_memory(
    observation: Observation,
    trainings: int,
) -> None:
    """The updates of all trainings are kept, and joined once."""
    rows = observation.update.rows
    needed = COPIES * rows.element_size() * trainings * rows.numel()
    free = free_bytes()
    if free is not None and needed > free:
        raise NotApplicable(
            f"it would take {needed / 1e9:.1f} GB for {trainings} trainings, and {free / 1e9:.1f} "
            "GB are free; give fewer replays or completions"
        )


class _Separation(NamedTuple):
    """By how much left-out trainings lead, and the share read right.

    `center` and `unit`: the median lead of the true value, and the deviation about it.
    """

    center: float
    unit: float
    right: float

    @property
    def apart(self) -> float:
        """The lead in standard deviations."""
        return self.center / self.unit


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

    def __call__(
        self,
        trainings: _Statistics,
        sent: Tensor,
    ) -> _Answer:
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


def _telling(
    rows: Tensor,
    noise: Tensor,
    mask: Tensor | None,
) -> Tensor:
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


def _moments(
    rows: Tensor,
    noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """Means (L, P), and the variance (P,) over what other people do and the noise."""
    means = rows.mean(0)
    variance = (rows - means).square().mean((0, 1)) + noise
    return means, variance.clamp_min(RELATIVE * float(variance.max()) + 1e-300)


def _separation(
    means: Tensor,
    variance: Tensor,
) -> Tensor:
    """(P,) how far a completion is from the center, in variances."""
    return ((means - means.mean(0)).square() / variance).amax(0)


def _statistics(
    rows: Tensor,
    noise: Tensor,
) -> _Statistics:
    means, variance = _moments(rows, noise)
    return _Statistics(means, variance, _separation(means, variance).argsort(descending=True))


def _separations(
    rows: Tensor,
    noise: Tensor,
) -> dict[_MatchedFilter, _Separation]:
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


def _chosen(filters: dict[_MatchedFilter, _Separation]) -> _MatchedFilter:
    """The filter that leads by most; of those that lead by far, one that reads most right.

    Few coordinates that tell the values apart by far are those that nobody else moves. A single one
    may still fail where the person's unit is active late in a training, and sometimes not at all.
    """
    enough = [candidate for candidate, separation in filters.items() if separation.apart >= FAR]
    return min(
        enough,
        key=lambda candidate: (-filters[candidate].right, candidate),
        default=max(filters, key=lambda candidate: filters[candidate].apart),
    )


def _summary(
    margin: Tensor,
    spreads: Tensor,
) -> _Separation:
    # Medians: a training in which the person is in a short last batch counts many times as much.
    center = float(margin.median())
    spread = NORMAL * float((margin - center).abs().median())
    unit = math.hypot(spread, float(spreads.mean().sqrt()))
    unit += 1e-9 * abs(center) + 1e-300
    return _Separation(center, unit, float((margin > 0).double().mean()))
