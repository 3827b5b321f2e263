"""How much noise a utility that you accept pays for, by trainings, and what it buys.

The cost of a noise is what it costs in the plan's short trainings, compared seed by seed with the
same trainings without a defense.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from leakbound._util.formats import rounded
from leakbound.assess.header import defense_name
from leakbound.assess.record import Training
from leakbound.audit.context import PlanContext, one_thread
from leakbound.audit.experiment import run_training
from leakbound.audit.plan import Plan, TrainingUnit, build_defense
from leakbound.channel.fisher import Channel, fisher_trace
from leakbound.core import NotApplicable
from leakbound.protocol import resolve, send
from leakbound.randomness import stream
from leakbound.registry import Spec, find
from leakbound.report.equal_utility import UNSKILLED
from leakbound.report.tables import MeanInterval, mean_of, skilled

LEVEL = "noise_std"
EQUAL = "gaussian_noise"
"""Equal noise on every coordinate, with which every other noise is compared."""
FORM = 'write it as in "loss<=0.05", "points<=2" or "noise<=0.01"'
_TARGET = re.compile(r"\s*(loss|points|noise)\s*(?:<=|≤)\s*([0-9.]+(?:e[-+]?[0-9]+)?)\s*", re.I)
FIRST = 0.01
STRIDE = 4.0
LEAST = 1e-7
MOST = 1e3
"""Standard deviations: at which a search starts, the factor of its steps, and where it ends."""
NEAR = 1.1
"""The answer times this costs more than the target."""
DIGITS = 3
TRIED = 8
"""About so many noises are tried of each defense."""
DIRECTIONS = 8
"""Random directions for the trace of the information."""
Links = tuple[Spec, ...]


@dataclass(frozen=True)
class UtilityTarget:
    """A cost that you accept, against the same trainings without a defense.

    `kind`: "loss" is a rise of the training loss, "points" are points of test accuracy lost, and
    "noise" is the rise of the loss under equal noise of this standard deviation.
    """

    kind: str
    most: float

    @staticmethod
    def parse(text: str) -> UtilityTarget:
        """Parse text.

        Example:
            >>> UtilityTarget.parse("points <= 2")
            UtilityTarget(kind='points', most=2.0)
        """
        match = _TARGET.fullmatch(text)
        if match is None:
            raise ValueError(f"target is {text[:200]!r}, a utility to keep; {FORM}")
        try:
            most = float(match[2])
        except ValueError:  # 1.2.3
            most = 0.0
        if not 0 < most < math.inf:
            raise ValueError(f"target is {text[:200]!r}; give a number above 0")
        return UtilityTarget(match[1].lower(), most)


@dataclass(frozen=True)
class NoiseAtUtility:
    """The noise of one defense at the accepted cost.

    Attributes:
        defense: its name and settings, without the noise_std.
        noise_std: the largest one tried whose mean cost is at most the target; 10 % more costs
            more.
        cost: what it was measured to cost, over the seeds.
        information: trace of the Fisher information of an update about its inputs, relative to that
            under equal noise of the same cost: below 1, this noise leaves less. Of private batches
            of the trainings' size, at the weights before them.
        why: why there is no such number.
    """

    defense: str
    noise_std: float
    cost: MeanInterval
    information: MeanInterval | None = None
    why: str = ""


@dataclass(frozen=True)
class NoisesAtUtility:
    """All noises of a plan at one accepted cost; the first is equal noise.

    Attributes:
        most: the accepted cost: a rise of the loss, or points of accuracy.
        plan: the given plan with these noises, for an audit that attacks at equal utility.
    """

    target: UtilityTarget
    most: float
    noises: tuple[NoiseAtUtility, ...]
    plan: Plan


def noise_at_utility(
    plan: Plan,
    target: UtilityTarget | str,
    context: PlanContext | None = None,
    watch: Callable[[int, int, str], None] = lambda done, total, current: None,
) -> NoisesAtUtility:
    """Find the noise_std of each of a plan's defenses that costs as much as you accept.

    Every noise that is tried takes a training for each of the plan's `repeats`, about eight noises
    for each defense. All use the same weights, batches and draws of noise. A plan's own noise_std
    is ignored. Equal noise (`gaussian_noise`) is always among the results.

    Args:
        plan: one model, defenses with a noise_std, and a [utility] table with two repeats or more.
        target: such as "loss<=0.05", "points<=2" (of test accuracy) or "noise<=0.01" (what equal
            noise of this standard deviation costs).
        context: the plan's data, if loaded already.
        watch: called before each training with how many are done, about how many there will be,
            and the defense.

    Raises:
        ValueError: the plan does not fit; or no noise has this cost: it is too small to be seen in
            these trainings, or they lose less under any noise.

    Example:
        >>> from leakbound.audit import parse
        >>> plan = parse({"data": {"source": "digits"}, "models": [{"name": "mlp", "hidden": [8]}],
        ...     "attacks": [{"name": "linear_inversion"}], "seeds": [0, 1],
        ...     "defenses": [{"name": "optimal_noise"}], "utility": {"rounds": 20, "repeats": 2}})
        >>> found = noise_at_utility(plan, "loss<=0.02")
        >>> [one.defense for one in found.noises]
        ['gaussian_noise', 'optimal_noise']
        >>> all(one.cost.mean <= 0.02 for one in found.noises)
        True
    """
    if isinstance(target, str):
        target = UtilityTarget.parse(target)
    equal = (Spec(EQUAL),)
    families = dict.fromkeys([equal, *(_without(links) for links in plan.defenses if links)])
    trainings = _Trainings(
        plan,
        context or PlanContext(plan.data),
        target.kind == "points",
        1 + TRIED * len(families),
        watch,
    )
    most = target.most
    if target.kind == "noise":
        most = fmean(trainings.costs(_with(equal, most)))
        if not 0 < most < math.inf:
            raise ValueError(
                f"target is noise<={target.most:g}, which costs {most:.3g} of loss in these "
                "trainings, so there is nothing to match; give larger noise, more rounds or repeats"
            )
    levels = {
        links: target.most
        if target.kind == "noise" and links == equal
        else _largest(links, trainings, most)
        for links in families
    }
    chosen = [_with(links, std) for links, std in levels.items()]
    base = trainings.information(chosen[0])
    noises = []
    for links, std in zip(chosen, levels.values(), strict=True):
        cost = mean_of(trainings.costs(links))
        assert cost is not None  # two repeats at least
        named = NoiseAtUtility(_described(links), std, cost)
        try:
            own = trainings.information(links)
        except NotApplicable as reason:
            noises.append(replace(named, why=str(reason)))
            continue
        ratios = [a / b for a, b in zip(own, base, strict=True)]
        noises.append(replace(named, information=mean_of(ratios)))
    return NoisesAtUtility(target, most, tuple(noises), replace(plan, defenses=((), *chosen)))


@dataclass(frozen=True)
class _Trainings:
    """The plan's trainings under any defense, and what an update reveals before them.

    `likely` is about how many defenses will train; `ran` lists the trainings that did.
    """

    plan: Plan
    context: PlanContext
    points: bool
    likely: int
    watch: Callable[[int, int, str], None]
    ran: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.plan.models) != 1:
            raise ValueError(f"models has {len(self.plan.models)} models; give one")
        if not self.plan.utility.rounds or len(self.seeds) < 2:
            raise ValueError(
                f"the plan trains {len(self.seeds)} times for {self.plan.utility.rounds} rounds; "
                "give [utility] with rounds, two repeats or more, and as many seeds"
            )
        if self.points and not skilled(self.undefended):
            raise ValueError(f"target is in points, but {UNSKILLED}; give more rounds, or a loss")

    @property
    def seeds(self) -> Sequence[int]:
        return self.plan.seeds[: self.plan.utility.repeats]

    @cached_property
    def undefended(self) -> list[Training]:
        return self._trained(())

    def costs(self, links: Links) -> list[float]:
        """By seed, the rise of the training loss, or the points of accuracy lost."""
        pairs = zip(self._trained(links), self.undefended, strict=True)
        return [self._cost(one) - self._cost(plain) for one, plain in pairs]

    def _cost(self, record: Training) -> float:
        if self.points:
            return -100 * (record.accuracy or 0.0)
        return math.inf if record.training_loss is None else record.training_loss

    def _trained(self, links: Links) -> list[Training]:
        return self.context.once(
            ("trained", links), lambda: [*map(self._train, self._units(links))]
        )

    def _units(self, links: Links) -> list[TrainingUnit]:
        plan = self.plan
        return [
            TrainingUnit(plan.data, plan.models[0], links, seed, plan.utility)
            for seed in self.seeds
        ]

    def _train(self, unit: TrainingUnit) -> Training:
        done = len(self.ran)
        self.watch(done, max(self.likely * len(self.seeds), done + 1), defense_name(unit.defense))
        self.ran.append(unit.id)
        record: Any = run_training(unit, self.context).record
        if record.status != "ok":
            name = defense_name(unit.defense)
            raise ValueError(f"the training under {name} ended as {record.status}: {record.reason}")
        assert isinstance(record, Training)
        return record

    def information(self, links: Links) -> list[float]:
        """By seed, the trace of the information of one client's update."""
        size = self.plan.utility.batch_size
        found = []
        with one_thread():
            for seed in self.seeds:
                task = self.context.task(self.plan.models[0], seed)
                (batch,) = self.context.batches(size, 1, seed)
                ready = resolve(build_defense(links), task, size)
                sent = send(task, batch, ready, stream(seed, "information", "noise"))
                channel = Channel(task, ready, sent.law, sent.mask, sent.mask_private)
                source = stream(seed, "information", "directions")
                found.append(fisher_trace(channel, batch, source, directions=DIRECTIONS))
        return found


def _without(links: Links) -> Links:
    """The chain with no level.

    Raises:
        ValueError: it has no noise_std to find, or more than one, or another level is given.
    """
    name = defense_name(links)
    noisy = [_takes_level(link) for link in links]
    if sum(noisy) != 1:
        raise ValueError(
            f"defenses has {name}, with {sum(noisy)} settings {LEVEL}; give chains with one"
        )
    bare = tuple(
        Spec(link.name, tuple(pair for pair in link.settings if pair[0] != LEVEL)) for link in links
    )
    build_defense(_with(bare, FIRST))  # refuses a second level, such as utility_std
    return bare


def _described(links: Links) -> str:
    return "+".join(
        ",".join([link.name, *(f"{key}={value}" for key, value in link.settings if key != LEVEL)])
        for link in links
    )


def _takes_level(link: Spec) -> bool:
    return any(one.name == LEVEL for one in find("defense", link.name).parameters)


def _with(links: Links, std: float) -> Links:
    return tuple(
        replace(link, settings=tuple(sorted((*link.settings, (LEVEL, std)))))
        if _takes_level(link)
        else link
        for link in links
    )


def _largest(links: Links, trainings: _Trainings, most: float) -> float:
    """The largest standard deviation found whose mean cost is at most `most`."""

    def fits(std: float) -> bool:
        return fmean(trainings.costs(_with(links, std))) <= most

    low = high = FIRST
    if fits(FIRST):
        while fits(high := high * STRIDE):
            low = high
            _check_range(links, high, "less")
    else:
        while not fits(low := low / STRIDE):
            high = low
            _check_range(links, low, "more")
    while high > NEAR * low:
        middle = rounded(math.sqrt(low * high), DIGITS, up=False)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _check_range(links: Links, std: float, word: str) -> None:
    if not LEAST < std < MOST:
        raise ValueError(
            f"{defense_name(links)} with {LEVEL} = {std:g} still costs {word} than the target; "
            "these trainings cannot tell: give another target, or more rounds or repeats"
        )
