"""Defenses of an audit at equal cost: what each leaves the best attack, at the same utility.

A family is one defense in several strengths, with no defense as its weakest. Its levels have a cost
(from the trainings) and an error (S_D, from the attacks), both by seed. Two families are compared
over the costs that both span.

Source: Liu et al. 2025 (paper B), section 4.1 and figure 3: the preferred defense at a utility is
the one with the largest S_D. The paper compares by eye, without an interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Literal

from leakbound._util.groups import grouped
from leakbound._util.intervals import student_reach
from leakbound.assess.record import Assessment, CriterionInfo, Training, Values
from leakbound.report.best_attack import (
    BestAttackError,
    Rounds,
    best_attack_error,
    rounds_of,
    squared_errors,
)
from leakbound.report.equal_loss import at_loss, both_at_equal_loss, spans
from leakbound.report.tables import (
    LEVEL,
    NO_DEFENSE,
    MeanInterval,
    Names,
    ReportPart,
    defined,
    skilled,
    title,
)

__all__ = [
    "EqualCost",
    "EqualUtility",
    "ErrorAtCost",
    "FamilyPair",
    "NotCompared",
    "UtilityFamily",
    "UtilityLevel",
]

Cost = Literal["training loss", "points of test accuracy lost", "points of test error"]
POINTS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
"""Costs in points of test accuracy at which each family is read."""
LEAST_POINTS = 1.0
LEAST_LOSS = 0.05
"""Families are compared if they share more than this: points of accuracy; or a share of the
smallest loss, as the study of paper B has it (our choices)."""
ERRORS = {"psnr": "RMSE", "snr": "RMSE relative to the signal"}
"""The error of an attack, by the score of the criterion; of other scores, what is wrong."""
FEW = "fewer than two seeds have both a result of every attack and a training"
UNSKILLED = "the undefended training did not beat the majority class, so accuracy shows no cost"
Table = Mapping[int, float]
"""A number by seed."""


class UtilityLevel(ReportPart, frozen=True):
    """A defense in one strength: its mean cost and the mean error that it leaves, over seeds.

    `attack`: the one that has the smallest mean error.
    """

    defense: str
    cost: MeanInterval
    error: MeanInterval
    attack: str


class ErrorAtCost(ReportPart, frozen=True):
    """The error that a family leaves at a cost, interpolated between its levels."""

    cost: float
    error: MeanInterval


class UtilityFamily(ReportPart, frozen=True):
    """One defense in all of its strengths, the cheapest first.

    `levels`: its own, and that of no defense where the audit has it. `at`: its error at round costs
    in points of accuracy lost that it spans; empty for other costs.
    """

    defense: str
    levels: tuple[UtilityLevel, ...]
    at: tuple[ErrorAtCost, ...]


class FamilyPair(ReportPart, frozen=True):
    """Two families over the costs that both span, from `low` to `high`.

    `first` is the one with the larger mean error. `difference`: its error less the other's; the
    intervals of all pairs of a comparison hold jointly (`level`).
    """

    first: str
    second: str
    low: float
    high: float
    first_error: MeanInterval
    second_error: MeanInterval
    difference: MeanInterval

    @property
    def seen(self) -> bool:
        """Whether the interval of the difference excludes 0."""
        return self.difference.low is not None and self.difference.low > 0


class NotCompared(ReportPart, frozen=True):
    """A family, a level or a pair of families that has no number, and why."""

    what: str
    why: str


class EqualCost(ReportPart, frozen=True):
    """The families at equal cost, in one measure of cost."""

    cost: Cost
    families: tuple[UtilityFamily, ...]
    pairs: tuple[FamilyPair, ...]
    not_compared: tuple[NotCompared, ...]


class EqualUtility(ReportPart, frozen=True):
    """The defenses of an audit at equal utility, on one model and batch size.

    Attributes:
        error: the measure of errors, larger is safer: "RMSE" relative to the inputs' range (S_D),
            "RMSE relative to the signal" of series, or "columns wrong, %" and "tokens wrong, %".
        baseline: the mean error of the prior-only baseline, which no attacker needs to exceed.
        defense_known: whether the attackers know the defense and adapt to it.
        rounds: of the trainings behind the costs.
        comparisons: at equal training loss, and at equal test accuracy.
    """

    model: str
    batch_size: int
    error: str
    baseline: float
    defense_known: bool
    rounds: int
    comparisons: tuple[EqualCost, ...]


def equal_utility(
    assessments: Iterable[Assessment],
    trainings: Iterable[Training],
    names: Names,
) -> tuple[EqualUtility, ...]:
    """The comparison for every model and batch size that has trainings; empty without any.

    Errors by seed are those of the attack that is best on all other seeds (`held_out` of
    `BestAttackError`): no seed chooses its own attack. Intervals are Student's t over jackknife
    pseudo-values, so they include the uncertainty of costs and errors. They take these as nearly
    normal; of few seeds they are wide. Costs are those of short trainings, and errors those of the
    attacks that ran: a stronger attack may change the order.
    """
    trained = grouped(
        ((names.model(t), names.defense(t)), t) for t in trainings if t.status == "ok"
    )
    by_key = grouped((names.key(a), a) for a in assessments)
    found = grouped(
        ((model, size), (defense, experiments))
        for (model, size, defense), experiments in by_key.items()
        if (model, defense) in trained and not experiments[0].criterion.label_alone
    )
    made = []
    for (model, size), settings in found.items():
        levels: list[Measured] = []
        baselines: list[float] = []
        for defense, experiments in settings:
            some = trained[model, defense]
            rounds = _rounds(experiments, names)
            levels.append((defense, _error(rounds), some))
            both = {t.seed for t in some} & set(rounds.baseline)
            baselines += [math.sqrt(fmean(rounds.baseline[seed])) for seed in both]
        if not baselines:
            continue
        first = settings[0][1][0]
        made.append(
            EqualUtility(
                model,
                size,
                error=_unit(first.criterion),
                baseline=fmean(baselines),
                defense_known=first.threat.defense_known,
                rounds=max(t.rounds for *_, some in levels for t in some),
                comparisons=(_at_equal_loss(levels, names), _at_equal_accuracy(levels, names)),
            )
        )
    return tuple(made)


Measured = tuple[str, BestAttackError | None, Sequence[Training]]
"""A defense, what the best attack leaves, and its trainings."""
Level = tuple[str, BestAttackError, Table]
"""A defense, what the best attack leaves, and its cost by seed."""


def _unit(criterion: CriterionInfo) -> str:
    return ERRORS.get(criterion.metric, f"{criterion.metric} wrong, %")


def _rounds(experiments: Sequence[Assessment], names: Names) -> Rounds:
    by_attack = grouped((names.attack(a), a) for a in experiments)
    of = squared_errors if experiments[0].criterion.of is None else _squared_share_wrong
    return rounds_of(by_attack, of)


def _error(rounds: Rounds) -> BestAttackError | None:
    return best_attack_error(rounds.attacks, rounds.baseline) if rounds.baseline else None


def _squared_share_wrong(scores: Values) -> list[float]:
    """One number for all examples: the root of its mean is their mean share."""
    return [(100 - fmean(defined(scores))) ** 2]


def _at_equal_loss(levels: Sequence[Measured], names: Names) -> EqualCost:
    costs = {
        defense: {t.seed: t.training_loss for t in some if t.training_loss is not None}
        for defense, _, some in levels
    }
    smallest = min((fmean(own.values()) for own in costs.values() if own), default=0.0)
    return _compared("training loss", levels, costs, LEAST_LOSS * smallest, names)


def _at_equal_accuracy(levels: Sequence[Measured], names: Names) -> EqualCost:
    none = title(NO_DEFENSE)
    wrong = {
        defense: {t.seed: 100 * (1 - t.accuracy) for t in some if t.accuracy is not None}
        for defense, _, some in levels
    }
    plain = [some for defense, _, some in levels if defense == none]
    measure: Cost = "points of test accuracy lost" if plain else "points of test error"
    if not any(map(skilled, plain or [some for *_, some in levels])):
        return EqualCost(measure, (), (), (NotCompared("all", UNSKILLED),))
    before = wrong.get(none)
    costs = {
        defense: own if before is None else {s: own[s] - before[s] for s in own if s in before}
        for defense, own in wrong.items()
    }
    return _compared(measure, levels, costs, LEAST_POINTS, names)


def _compared(
    measure: Cost,
    levels: Sequence[Measured],
    costs: Mapping[str, Table],
    least: float,
    names: Names,
) -> EqualCost:
    left_out: list[NotCompared] = []
    attacked = [(d, error) for d, error, _ in levels if error is not None]
    left_out += [
        NotCompared(d, "no round has a result of every attack")
        for d, error, _ in levels
        if error is None
    ]
    # A round in which an attack crashed says nothing of the defense: it is left out for all.
    seeds = {seed for own in costs.values() for seed in own}
    for _, error in attacked:
        seeds &= set(error.held_out)
    if len(seeds) < 2:
        return EqualCost(measure, (), (), (*left_out, NotCompared("all", FEW)))
    kept = []
    for defense, error in attacked:
        own = costs[defense]
        # A training that diverged says something of the defense: its level is left out.
        if missing := seeds - set(own):
            why = f"no {measure.removesuffix(' lost')} for seeds {sorted(missing)}"
            left_out.append(NotCompared(defense, why))
        else:
            kept.append((defense, error, {seed: own[seed] for seed in sorted(seeds)}))
    families, curves = _families(measure, kept, names, left_out)
    pairs = _pairs(curves, least, measure, left_out)
    return EqualCost(measure, tuple(families), pairs, tuple(left_out))


def _families(
    measure: Cost,
    levels: Sequence[Level],
    names: Names,
    left_out: list[NotCompared],
) -> tuple[list[UtilityFamily], dict[str, list[tuple[Table, Table]]]]:
    """The families of at least two strengths, and the costs and errors of their levels."""
    plain = [level for level in levels if level[0] == title(NO_DEFENSE)]
    by_family = grouped((names.settings[level[0]].name, level) for level in levels)
    families = []
    curves = {}
    for family, own in by_family.items():
        if family == NO_DEFENSE:
            continue
        if len(own) < 2:
            left_out.append(NotCompared(own[0][0], "one strength; a family has two or more"))
            continue
        ordered = sorted([*plain, *own], key=lambda level: fmean(level[2].values()))
        curve = [(cost, error.held_out) for _, error, cost in ordered]
        curves[family] = curve
        at = []
        if measure == "points of test accuracy lost":
            values = [(points, at_loss(curve, points)) for points in POINTS]
            at = [ErrorAtCost(points, _positive(some)) for points, some in values if some]
        families.append(UtilityFamily(family, tuple(map(_level, ordered)), tuple(at)))
    return families, curves


def _level(level: Level) -> UtilityLevel:
    defense, error, cost = level
    return UtilityLevel(
        defense,
        _mean([*cost.values()]),
        _positive([error.held_out[seed] for seed in cost]),
        error.attack,
    )


def _pairs(
    curves: Mapping[str, list[tuple[Table, Table]]],
    least: float,
    measure: Cost,
    left_out: list[NotCompared],
) -> tuple[FamilyPair, ...]:
    known = []
    for one, other in combinations(curves, 2):
        values = both_at_equal_loss(curves[one], curves[other], least=least)
        if values[0]:
            known.append((one, other, values))
            continue
        why = f"they share no more than {least:.3g} of cost ({measure})"
        left_out.append(NotCompared(f"{one} and {other}", why))
    made = []
    # Whoever reads all pairs would find the largest of them: they share the error (Bonferroni).
    tail = (1 - LEVEL) / 2 / max(1, len(known))
    for one, other, (ours, theirs) in known:
        if fmean(ours) < fmean(theirs):
            one, other, ours, theirs = other, one, theirs, ours
        ends = spans(curves[one]), spans(curves[other])
        gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
        pair = FamilyPair(
            one,
            other,
            low=max(low for low, _ in ends),
            high=min(high for _, high in ends),
            first_error=_positive(ours),
            second_error=_positive(theirs),
            difference=_mean(gaps, tail),
        )
        made.append(pair)
    return tuple(made)


def _mean(values: Sequence[float], tail: float = (1 - LEVEL) / 2) -> MeanInterval:
    mean = fmean(values)
    reach = student_reach(values, tail)
    return MeanInterval(mean, mean - reach, mean + reach, len(values), LEVEL)


def _positive(values: Sequence[float]) -> MeanInterval:
    """Of errors: Student's interval may go below 0, an error cannot."""
    found = _mean(values)
    low = max(0.0, found.low or 0.0)
    return MeanInterval(max(0.0, found.mean), low, found.high, found.n, LEVEL)
