"""Tables of a report: what the records say, counted with intervals and averaged over nothing else.

An experiment is one attack on one batch under one defense; its value is the mean over its examples.
A pair of attack and defense that does not apply is no experiment and is not counted. A
configuration is all experiments of one model, batch size and defense. Bounds are on every
attacker: a lower bound on the mean error, as PSNR an upper bound, or the probability of success.
Scores are in the unit of the run's criterion.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from scipy.special import bdtr

from leakbound._util.decibels import mse_of_psnr, psnr_of_mse
from leakbound._util.groups import grouped
from leakbound._util.intervals import clopper_pearson, student_reach
from leakbound._util.text import digest
from leakbound.assess.record import (
    PROTECTS,
    Assessment,
    AttackInfo,
    Basis,
    Bound,
    DefenseInfo,
    ModelInfo,
    Record,
    Training,
    Verdict,
)
from leakbound.assess.verdict import LEVEL as CHANCE
from leakbound.assess.verdict import by_chance, named_by_chance, of_configuration
from leakbound.report.folder import Run

LEVEL = 0.95
NO_DEFENSE = "none"
SHOWN = 30
"""How many of a long list a page shows."""
NAMED = 2
"""How many parameters a label names where none varies."""
LONGEST = 600
"""How many letters of a sentence a page shows."""
EARLY = 5
"""The round whose loss shows how fast a model learns at first."""
K = TypeVar("K", bound=Hashable)
ConfigurationKey = tuple[str, int, str]
"""Model, batch size and defense, as the page calls them."""
AttackKey = tuple[str, int, str, str]
"""The same, and the attack."""


class ReportPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all that `report.json` consists of."""


class MedianInterval(ReportPart, frozen=True):
    """A median over experiments. `level`: of low to high; null where they are min and max."""

    median: float
    low: float
    high: float
    n: int
    level: float | None


class ShareInterval(ReportPart, frozen=True):
    """`hits` of `n`, with a Clopper-Pearson interval; of a table's column, with Wilson's."""

    hits: int
    n: int
    value: float
    low: float
    high: float
    level: float


class MeanInterval(ReportPart, frozen=True):
    """A mean over seeds with Student's t interval, which one seed has not."""

    mean: float
    low: float | None
    high: float | None
    n: int
    level: float


class Theorem(ReportPart, frozen=True):
    """What bounds of one name, prior and accepted probability rest on: one footnote.

    `accepted`: for a probability, the one that the plan accepts; null for bounds on the error.
    """

    number: int
    name: str
    prior: str
    rests_on_prior: bool
    covers: str
    covers_all: bool
    equation: str
    assumptions: tuple[str, ...]
    accepted: str | None


class ErrorBoundRow(ReportPart, frozen=True):
    """The strongest lower bound on every attacker's mean error, as PSNR in dB.

    The median over the `experiments` of `of_experiments` that ran and hold it.
    """

    psnr: float
    name: str
    prior: str
    theorem: int
    experiments: int
    of_experiments: int


class SuccessBoundRow(ReportPart, frozen=True):
    """No attacker matches an example more often: the largest probability over the experiments.

    `basis`: what it rests on. `others`: the same by what else such a bound rests on. `attained`: an
    attack that works (`attack`) matches at least so often. `rare`: the largest share of public
    examples that are unlike all others; None if they were not counted.
    """

    probability: float
    basis: Basis
    others: tuple[tuple[Basis, float], ...]
    attained: float | None
    attack: str | None
    rare: float | None
    prior: str
    accepted: float | None
    theorem: int
    experiments: int
    of_experiments: int


class NamedShare(ReportPart, frozen=True):
    """How often reconstructions name the right one of M candidates: "is it this person?"

    Attributes:
        attack, matcher: the pair with the largest share; the interval allows for that choice.
        p_value: of so many right names by lot, over all pairs together; decides *person named*.
        chance: 1 / M, the share without the update; the mean where M differs.
        candidates: the largest M.
        bound: no attacker is right more often; None if no bound is known.
        near: how many galleries hold a near copy of the true one, whose name counts as wrong.
        score: the attack's median score over experiments, of the criterion.
    """

    attack: str
    matcher: str
    share: ShareInterval
    p_value: float
    chance: float
    candidates: int
    bound: float | None
    near: int
    score: float | None

    @property
    def beyond_chance(self) -> bool:
        """Whether chance does not explain the share."""
        return self.p_value <= CHANCE


class ConfigurationPart(ReportPart, frozen=True):
    """Something about one configuration."""

    model: str
    batch_size: int
    defense: str

    @property
    def key(self) -> ConfigurationKey:
        return self.model, self.batch_size, self.defense


class AttackSummary(ConfigurationPart, frozen=True):
    """What one attack did on one configuration.

    `score` and `baseline_score` are of the experiments' means over examples, `best_score` of one.
    `did_not_converge`: experiments whose attack reports a problem. `reconstructed`: examples over
    the threshold. `identified`: of a gallery, by the best matcher.
    """

    attack: str
    score: MedianInterval | None
    ssim: MedianInterval | None
    lpips: MedianInterval | None
    best_score: float | None
    baseline_score: float | None
    reconstructed: ShareInterval | None
    identified: NamedShare | None
    labels_right: float | None
    ran: int
    did_not_converge: int
    not_applicable: int
    failed: int

    @property
    def unreliable(self) -> bool:
        """Whether at least half of its experiments report that the attack did not converge."""
        return self.ran > 0 and 2 * self.did_not_converge >= self.ran


class Configuration(ConfigurationPart, frozen=True):
    """What all attacks together did on one model, batch size and defense, and what bounds it.

    Attributes:
        strongest_attack: the one that reconstructed the best single example (`best_score`); where
            nothing was measured, one whose reconstruction is proved to be right.
        reconstructed: the examples over the threshold, of the attack that has the largest share;
            the interval allows for that choice. `reconstructed_by`: this attack.
        proved: experiments whose update proves that the reconstruction is the input.
        chance: the p-value of all permutation tests together; None without a test.
        mean_error: the PSNR of the mean squared error over all examples of the attack that comes
            closest: what `error_bound` limits. `baseline`: the same of the prior-only baseline.
            Null for other scores than PSNR.
    """

    guarantee: str
    data_dependent_law: bool
    verdict: Verdict
    strongest_attack: str | None
    best_score: float | None
    reconstructed: ShareInterval | None
    reconstructed_by: str | None
    proved: int
    chance: float | None
    mean_error: float | None
    baseline: float | None
    error_bound: ErrorBoundRow | None
    success_bound: SuccessBoundRow | None
    identified: NamedShare | None
    experiments: int
    failed: int


class TrainingCost(ReportPart, frozen=True):
    """Loss and test accuracy of a model under a defense, over the training seeds that ran.

    Attributes:
        loss: the training loss, without the trainings that `diverged`.
        lowest, highest: accuracies of single seeds.
        balanced_accuracy, auc: means of the balanced accuracy and of the area under the ROC curve.
        majority: the accuracy of the best constant answer.
        lost, auc_lost: against no defense, paired by seed. None where the training without a
            defense shows no skill by that measure: then nothing can be lost.
        unskilled: that training did not beat the majority class.
        failed: trainings without a result, which enter no mean.
        kept, sent: of a pruned model, the share of weights that pruning left and the bytes of a
            client's message, as means.
    """

    model: str
    defense: str
    rounds: int
    loss: MeanInterval | None
    diverged: int
    accuracy: MeanInterval | None
    lowest: float | None
    highest: float | None
    balanced_accuracy: float | None
    auc: float | None
    majority: float | None
    lost: MeanInterval | None
    auc_lost: MeanInterval | None
    unskilled: bool
    failed: int
    kept: float | UnsetType = UNSET
    sent: float | UnsetType = UNSET

    @property
    def cost_unknown(self) -> bool:
        """Whether a defense's cost is not known because no training shows any skill."""
        return self.unskilled and self.defense != title(NO_DEFENSE)


@dataclass(frozen=True)
class TrainingCurve:
    """One model's training under one defense: means over the seeds that ran.

    `losses` holds the rounds that all seeds have, with None where a loss is no number.
    """

    model: str
    defense: str
    optimizer: str
    losses: dict[int, float | None]
    n: int

    @property
    def early(self) -> float | None:
        return self.losses.get(EARLY)

    @property
    def rounds(self) -> int:
        return max(self.losses)

    @property
    def last(self) -> float | None:
        return self.losses[self.rounds]


@dataclass(frozen=True)
class DefenseSetting:
    """A defense with one choice of its parameters.

    `strength`: those that vary under its name; of a single setting, its first numbers.
    """

    name: str
    label: str
    strength: tuple[tuple[str, Any], ...]

    @property
    def number(self) -> float:
        """The strength as one number, where it is one numeric parameter; otherwise 0."""
        values = [value for _, value in self.strength]
        return float(values[0]) if len(values) == 1 and _is_number(values[0]) else 0.0

    @property
    def short(self) -> str:
        """The strength alone, where its defense is named beside it."""
        return ", ".join(plain(value) for _, value in self.strength)


class Names:
    """What a page calls models, defenses and attacks: one label for each distinct setting."""

    def __init__(
        self,
        assessments: Iterable[Assessment],
        trainings: Iterable[Training] = (),
    ) -> None:
        self.settings: dict[str, DefenseSetting] = {}
        self.attacks: dict[str, AttackInfo] = {}
        self.models: dict[str, ModelInfo] = {}
        assessments = list(assessments)
        both: list[Record] = [*assessments, *trainings]
        kinds = grouped((record.defense.name, record.defense.parameters) for record in both)
        hashes = grouped(((a.attack.name, a.attack.round), a.attack.hash) for a in assessments)
        self._several = len({a.attack.round for a in assessments}) > 1
        self._varying = {name: _varying(rows) for name, rows in kinds.items()}
        # Two settings of one attack would look alike: their hashes tell them apart.
        self._twins = {name for (name, _), some in hashes.items() if len({*some}) > 1}
        for record in both:
            setting = self._setting(record.defense)
            self.settings.setdefault(setting.label, setting)
            self.models.setdefault(self.model(record), record.model)
        for a in assessments:
            self.attacks.setdefault(self.attack(a), a.attack)

    def model(self, record: Record) -> str:
        model = record.model
        notes = [_pair(*item) for item in model.parameters.items()]
        if model.train_steps:
            notes.append(f"trained {model.train_steps} steps")
        if model.weights:
            notes.append(f"weights {model.weights}")
        return model.name + (f" ({', '.join(notes)})" if notes else "")

    def defense(self, record: Record) -> str:
        return self._setting(record.defense).label

    def attack(self, assessment: Assessment, *, of_round: bool = True) -> str:
        """The attack's label, with the round where several are attacked."""
        attack = assessment.attack
        name = attack.name
        if name in self._twins:
            # Without the round, which the hash names.
            name = f"{name} [{digest(attack.settings)[:6] if self._several else attack.hash[:6]}]"
        numbered = self._several and isinstance(attack.round, int)
        return f"{name}, round {attack.round}" if of_round and numbered else name

    def key(self, assessment: Assessment) -> ConfigurationKey:
        return self.model(assessment), assessment.batch_size, self.defense(assessment)

    def attack_key(self, assessment: Assessment) -> AttackKey:
        return *self.key(assessment), self.attack(assessment)

    def _setting(self, defense: DefenseInfo) -> DefenseSetting:
        name = defense.name
        values = defense.parameters
        numbers = [key for key, value in values.items() if _is_number(value)]
        # Only what differs between the settings helps a reader to tell them apart.
        varying = self._varying[name] or numbers[:NAMED]
        strength = tuple((key, values.get(key)) for key in varying)
        label = " ".join([title(name), *(_pair(*item) for item in strength)])
        return DefenseSetting(name, label, strength)


class Theorems:
    """The footnotes of a page: one for each bound's name, prior, attackers and accepted risk."""

    def __init__(self, assessments: Iterable[Assessment]) -> None:
        kinds = grouped((_bound_key(bound), bound) for a in assessments for bound in a.bounds)
        self._by_key: dict[Any, Theorem] = {}
        for number, (key, bounds) in enumerate(kinds.items(), 1):
            name, prior, covers, accepted = key
            equations = dict.fromkeys(cut(bound.equation) for bound in bounds if bound.equation)
            sentences = dict.fromkeys(cut(text) for b in bounds for text in b.assumptions[:SHOWN])
            self._by_key[key] = Theorem(
                number,
                name,
                prior,
                any(bound.rests_on_prior for bound in bounds),
                covers,
                covers == "all",
                "; ".join(list(equations)[:SHOWN]),
                tuple(sentences)[:SHOWN],
                accepted,
            )
        self.all = list(self._by_key.values())

    def of(self, bound: Bound) -> Theorem:
        return self._by_key[_bound_key(bound)]


class RunSummary:
    """The records of a run, named, grouped and counted once for all of its pages.

    `names`: those that several runs share.
    """

    def __init__(self, run: Run, names: Names | None = None) -> None:
        self.run = run
        self.assessments = run.assessments
        self.names = names or Names(run.assessments, run.trainings)
        self.theorems = Theorems(run.assessments)
        self.configurations = configurations(run.assessments, self.names, self.theorems)
        self.attacks = attack_summaries(run.assessments, self.names)
        self.costs = training_costs(run.trainings, self.names)
        # How many settings of model and batch size a defense must hold on.
        self.pairs = {(row.model, row.batch_size) for row in self.configurations}


def middle(values: Sequence[float]) -> MedianInterval | None:
    """The median with an exact interval from order statistics (binomial, no assumption on shape).

    Below six values no such interval has 95 %: then the smallest and the largest are given.
    """
    if not values:
        return None
    ordered = sorted(values)
    n = len(values)
    # The largest rank at which both tails together still miss at most 5 %.
    rank = 0
    while rank < n // 2 and bdtr(rank, n, 0.5) <= (1 - LEVEL) / 2:
        rank += 1
    low, high = (ordered[rank - 1], ordered[n - rank]) if rank else (ordered[0], ordered[-1])
    return MedianInterval(median(ordered), low, high, n, LEVEL if rank else None)


def share(hits: int, n: int) -> ShareInterval | None:
    """A share with its Clopper-Pearson interval; None of nothing."""
    if n == 0:
        return None
    return ShareInterval(hits, n, hits / n, *clopper_pearson(hits, n, (1 - LEVEL) / 2), LEVEL)


def largest_share(
    matched: Mapping[K, Sequence[bool]],
) -> tuple[K, ShareInterval] | tuple[None, None]:
    """The name with the largest share of hits, and the interval of its true share.

    The interval follows from the hits and n that are shown, and from nothing else. It is wider than
    that of a name that was chosen beforehand: all names together share the error (Bonferroni). Of
    equal shares, that with the highest lower limit counts.

    Example:
        >>> name, share = largest_share({"a": [True, False], "b": [True, True]})
        >>> name, share.hits, share.n
        ('b', 2, 2)
    """
    counts = {name: (sum(hits), len(hits)) for name, hits in matched.items() if hits}
    if not counts:
        return None, None
    tail = (1 - LEVEL) / (2 * len(counts))
    limits = {name: clopper_pearson(*count, tail) for name, count in counts.items()}
    # Equal shares of different n are not equally certain.
    best = max(counts, key=lambda name: (counts[name][0] / counts[name][1], limits[name]))
    hits, n = counts[best]
    return best, ShareInterval(hits, n, hits / n, *limits[best], LEVEL)


def mean_of(values: Sequence[float]) -> MeanInterval | None:
    """A mean over seeds with its 95 % interval by Student's t; None of nothing."""
    if not values:
        return None
    mean = fmean(values)
    if len(values) == 1:
        return MeanInterval(mean, None, None, 1, LEVEL)
    reach = student_reach(values, (1 - LEVEL) / 2)
    return MeanInterval(mean, mean - reach, mean + reach, len(values), LEVEL)


def mean_error(psnrs: Iterable[float]) -> float | None:
    """The PSNR of the mean squared error of examples with these PSNRs; never above their mean."""
    errors = [mse_of_psnr(psnr) for psnr in psnrs]
    return psnr_of_mse(math.fsum(errors) / len(errors)) if errors else None


def mean_value(
    assessment: Assessment,
    metric: str | None = None,
) -> float | None:
    """The mean of a metric over examples; by default of the criterion's score."""
    return _mean(defined(assessment.metrics.get(metric or assessment.criterion.metric, ())))


def defined(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def attack_summaries(
    assessments: Iterable[Assessment],
    names: Names,
) -> list[AttackSummary]:
    by_attack = grouped((names.attack_key(a), a) for a in assessments)
    return [_attack_summary(key, some, names) for key, some in by_attack.items()]


def _attack_summary(
    key: AttackKey,
    experiments: Sequence[Assessment],
    names: Names,
) -> AttackSummary:
    ok = [a for a in experiments if a.status == "ok"]
    count = Counter(a.status for a in experiments)

    def values(metric: str | None) -> list[float]:
        return defined(mean_value(a, metric) for a in ok)

    baseline = defined(_mean(defined(a.baseline)) for a in ok)
    matched = [hit for a in ok for hit in a.matched]
    return AttackSummary(
        *key,
        score=middle(values(None)),
        ssim=middle(values("ssim")),
        lpips=middle(values("lpips")),
        best_score=max((score for a in ok for score in defined(a.scores)), default=None),
        baseline_score=median(baseline) if baseline else None,
        reconstructed=share(sum(matched), len(matched)),
        identified=named_share(ok, names),
        labels_right=_mean(values("label_accuracy")),
        ran=len(ok),
        did_not_converge=sum(bool(a.problem) for a in ok),
        not_applicable=count["not_applicable"],
        failed=count["failed"],
    )


def configurations(
    assessments: Iterable[Assessment],
    names: Names,
    theorems: Theorems | None = None,
) -> list[Configuration]:
    assessments = list(assessments)
    theorems = theorems or Theorems(assessments)
    by_key = grouped((names.key(a), a) for a in assessments)
    return [_configuration(key, some, names, theorems) for key, some in by_key.items()]


def _configuration(
    key: ConfigurationKey,
    experiments: Sequence[Assessment],
    names: Names,
    theorems: Theorems,
) -> Configuration:
    ok = [a for a in experiments if a.status == "ok"]
    scores = grouped((names.attack(a), score) for a in ok for score in defined(a.scores))
    strongest = max(scores, key=lambda label: max(scores[label]), default=None)
    psnrs = [*scores.values()] if experiments[0].criterion.has_errors else []
    matched = grouped((names.attack(a), hit) for a in ok for hit in a.matched)
    by, reconstructed = largest_share(matched)
    proved = [names.attack(a) for a in experiments if a.certificate]
    defense = experiments[0].defense
    return Configuration(
        *key,
        guarantee=defense.guarantee,
        data_dependent_law=defense.data_dependent_law,
        verdict=of_configuration(experiments),
        strongest_attack=strongest or next(iter(proved), None),
        best_score=max(scores[strongest]) if strongest else None,
        reconstructed=reconstructed,
        reconstructed_by=by,
        proved=len(proved),
        chance=by_chance(experiments),
        mean_error=max(defined(map(mean_error, psnrs)), default=None),
        # Other scores than PSNR have no mean squared error.
        baseline=mean_error(v for a in ok if psnrs for v in defined(a.baseline)),
        error_bound=strongest_bound(ok, theorems),
        success_bound=success_bound(ok, theorems),
        identified=named_share(ok, names),
        experiments=len(ok),
        failed=sum(a.status == "failed" for a in experiments),
    )


def named_share(ran: Sequence[Assessment], names: Names) -> NamedShare | None:
    """The largest share over attacks and matchers; None if nothing was matched."""
    by_pair = grouped(
        ((names.attack(a), found.how), found) for a in ran for found in a.reidentified
    )
    right = {pair: [hit for one in found for hit in one.answers] for pair, found in by_pair.items()}
    best, share_ = largest_share(right)
    p_value = named_by_chance(by_pair.values())
    if best is None or share_ is None or p_value is None:
        return None
    found = by_pair[best]
    examples = [(one, len(one.answers)) for one in found]
    bounds = [(one.bound, count) for one, count in examples if one.bound is not None]
    scores = defined(mean_value(a) for a in ran if names.attack(a) == best[0])
    # F is concave: the mean of F(1 / M) bounds the share over examples with several M.
    bound = None
    if len(bounds) == len(found):
        bound = math.fsum(own * count for own, count in bounds) / share_.n
    return NamedShare(
        *best,
        share=share_,
        p_value=p_value,
        chance=math.fsum(count / one.candidates for one, count in examples) / share_.n,
        candidates=max(one.candidates for one in found),
        bound=bound,
        near=sum(one.near for one in found),
        score=median(scores) if scores else None,
    )


def strongest_bound(
    ran: Sequence[Assessment],
    theorems: Theorems,
) -> ErrorBoundRow | None:
    """The strongest bound on all attackers' error over experiments that ran.

    Bounds of different name or prior are not mixed: the one with the lowest median PSNR is taken.
    """
    levels = grouped(
        (theorems.of(bound), bound.psnr)
        for a in ran
        for bound in a.bounds
        if bound.covers == "all" and bound.psnr is not None
    )
    rows = [
        ErrorBoundRow(median(some), one.name, one.prior, one.number, len(some), len(ran))
        for one, some in levels.items()
    ]
    # An upper bound on PSNR: the lowest says most.
    return min(rows, key=lambda row: row.psnr, default=None)


def rare_share(rows: Iterable[Configuration]) -> float | None:
    """The largest share of rare public examples behind the bounds of configurations."""
    bounds = [row.success_bound for row in rows]
    return max(defined(bound.rare for bound in bounds if bound is not None), default=None)


def success_bound(
    ran: Sequence[Assessment],
    theorems: Theorems,
) -> SuccessBoundRow | None:
    """The probability that covers all attackers, of the worst experiment."""
    by_basis = grouped(
        (bound.basis, (bound.probability, bound))
        for a in ran
        for bound in a.bounds
        if bound.covers == "all" and bound.probability is not None
    )
    # `PROTECTS` goes from what needs the fewest conditions to what needs most.
    worst = {
        basis: max(by_basis[basis], key=lambda pair: pair[0])
        for basis in PROTECTS
        if basis in by_basis
    }
    if not worst:
        return None
    basis, (value, bound) = next(iter(worst.items()))
    # A limit that some experiment lacks is none for the configuration.
    others = tuple(
        (other, most)
        for other, (most, _) in worst.items()
        if other != basis and len(by_basis[other]) == len(ran)
    )
    best = max(
        (a.attained for a in ran if a.attained),
        key=lambda one: one.success,
        default=None,
    )
    one = theorems.of(bound)
    return SuccessBoundRow(
        probability=value,
        basis=basis,
        others=others,
        attained=None if best is None else best.success,
        attack=None if best is None else best.attack,
        rare=max(defined(b.rare for a in ran for b in a.bounds), default=None),
        prior=one.prior,
        accepted=bound.accepted,
        theorem=one.number,
        experiments=len(by_basis[basis]),
        of_experiments=len(ran),
    )


def training_costs(
    trainings: Iterable[Training], names: Names
) -> dict[tuple[str, str], TrainingCost]:
    """By model and defense; failed trainings are counted, not averaged."""
    every = grouped(((names.model(t), names.defense(t)), t) for t in trainings)
    ran = {key: [t for t in some if t.status == "ok"] for key, some in every.items()}
    costs = {}
    for (model, defense), ok in ran.items():
        plain = ran.get((model, title(NO_DEFENSE)), [])
        defended = defense != title(NO_DEFENSE)
        able = skilled(plain)
        accuracies = defined(t.accuracy for t in ok)
        losses = defined(t.training_loss for t in ok)
        costs[model, defense] = TrainingCost(
            model,
            defense,
            rounds=max(t.rounds for t in every[model, defense]),
            loss=mean_of(losses),
            diverged=len(ok) - len(losses),
            accuracy=mean_of(accuracies),
            lowest=min(accuracies, default=None),
            highest=max(accuracies, default=None),
            balanced_accuracy=_mean(defined(t.balanced_accuracy for t in ok)),
            auc=_mean(defined(t.auc for t in ok)),
            majority=_mean(defined(t.majority for t in ok)),
            lost=_lost(plain, ok, "accuracy") if defended and able else None,
            auc_lost=_lost(plain, ok, "auc") if defended and _ranks(plain) else None,
            unskilled=bool(plain) and not able,
            failed=len(every[model, defense]) - len(ok),
            **_pruned(ok),
        )
    return costs


def _pruned(trainings: Iterable[Training]) -> dict[str, float]:
    """What pruning left, and the bytes of a message; nothing of a dense model."""
    ends = [t.pruned for t in trainings if not isinstance(t.pruned, UnsetType)]
    if not ends:
        return {}
    return {"kept": fmean(end.kept for end in ends), "sent": fmean(end.sent for end in ends)}


def loss_curves(
    trainings: Iterable[Training],
    names: Names,
) -> list[TrainingCurve]:
    by_defense = grouped(
        ((names.model(t), names.defense(t), t.optimizer), dict(t.curve))
        for t in trainings
        if t.status == "ok" and t.curve
    )
    rows = []
    for key, curves in by_defense.items():
        # Seeds that stopped early would bend the mean of later rounds.
        rounds = sorted(set(curves[0]).intersection(*curves))
        losses = {}
        for number in rounds:
            values = defined(curve[number] for curve in curves)
            losses[number] = fmean(values) if len(values) == len(curves) else None
        if losses:
            rows.append(TrainingCurve(*key, losses, len(curves)))
    return rows


def _lost(
    before: Sequence[Training],
    after: Sequence[Training],
    measure: str,
) -> MeanInterval | None:
    """What a measure lost, paired by seed."""
    plain = {t.seed: getattr(t, measure) for t in before}
    pairs = [(plain.get(t.seed), getattr(t, measure)) for t in after]
    return mean_of([one - two for one, two in pairs if one is not None and two is not None])


def skilled(trainings: Sequence[Training]) -> bool:
    """Whether trainings beat the best constant answer, by a one-sided exact limit.

    All seeds are tested on the same examples, so those count once.
    """
    tested = min((t.tested for t in trainings if t.tested is not None), default=0)
    majority = max(defined(t.majority for t in trainings), default=None)
    if not tested or majority is None:
        return bool(trainings)
    accuracy = _mean(defined(t.accuracy for t in trainings)) or 0.0
    # Rounded down: it must not count an answer as right that was not.
    low, _ = clopper_pearson(math.floor(accuracy * tested), tested, 1 - LEVEL)
    return low > majority


def _ranks(trainings: Sequence[Training]) -> bool:
    """Whether the AUC of trainings is above one half by more than two standard errors."""
    areas = defined(t.auc for t in trainings)
    error = max(defined(t.auc_error for t in trainings), default=math.inf)
    return bool(areas) and fmean(areas) > 0.5 + 2 * error


def missing_bounds(
    assessments: Iterable[Assessment],
    names: Names,
) -> dict[str, list[str]]:
    """Why a bound is missing: by reason the defenses that it holds for."""
    reasons = grouped((cut(a.bounds_note), names.defense(a)) for a in assessments if a.bounds_note)
    return {reason: list(dict.fromkeys(some)) for reason, some in reasons.items()}


def title(defense: str) -> str:
    return "no defense" if defense == NO_DEFENSE else defense


def cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def plain(value: Any) -> str:
    """A JSON value as short text; numbers without digits that say nothing."""
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(plain, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return str(value)


def _bound_key(bound: Bound) -> tuple[str, str, str, str | None]:
    # Bounds on the error have no accepted probability, so it cannot separate them.
    accepted = None
    if not bound.on_error:
        accepted = "none named" if bound.accepted is None else f"{bound.accepted:g}"
    return cut(bound.name), cut(bound.prior), cut(bound.covers), accepted


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _varying(rows: list[dict[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row)
    texts = {name: {json.dumps(row.get(name), sort_keys=True) for row in rows} for name in names}
    return [name for name, values in texts.items() if len(values) > 1]


def _pair(name: str, value: Any) -> str:
    return f"{name}={plain(value)}"
