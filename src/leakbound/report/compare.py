"""Two runs beside each other: what changed, on which pairs, and whether the comparison is fair."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from msgspec.structs import replace

from leakbound._util import files
from leakbound._util.groups import grouped
from leakbound.assess.record import CERTIFIED, EXPOSED, VERDICTS, Assessment, Threat
from leakbound.report import best_attack, tables
from leakbound.report.best_attack import BASELINE, BestAttackError
from leakbound.report.folder import Run
from leakbound.report.tables import (
    AttackKey,
    Configuration,
    ConfigurationKey,
    Names,
    RunSummary,
    plain,
)
from leakbound.report.template import check_installed, decimal, plural, rendered, save, significant

FILE = "compare.html"
JOURNALS = ("records.jsonl", "utility.jsonl")


@dataclass(frozen=True)
class Difference:
    """The second minus the first of `n` pairs; `low`, `high` by Student's t, None from one pair."""

    n: int
    first: float
    second: float
    mean: float
    low: float | None
    high: float | None
    same: bool

    @property
    def side(self) -> int:
        """1 where the interval lies above 0, -1 where it lies below, else 0."""
        if self.same or self.low is None or self.high is None:
            return 0
        return (self.low > 0) - (self.high < 0)

    @property
    def words(self) -> str:
        if self.same:
            return "the same in every pair"
        if self.low is None:
            return "one pair: no interval"
        return {1: "higher in B", -1: "lower in B", 0: "no difference can be seen"}[self.side]


@dataclass(frozen=True)
class VerdictPair:
    """One configuration in both runs."""

    first: Configuration
    second: Configuration

    @property
    def change(self) -> int:
        """1 safer in the second, -1 less safe, 0 the same."""
        before, after = (
            # A proof makes an exposure certain, and no worse.
            VERDICTS.index(EXPOSED if row.verdict == CERTIFIED else row.verdict)
            for row in (self.first, self.second)
        )
        return (after > before) - (after < before)


@dataclass(frozen=True)
class AttackPair:
    """One attack on one configuration in both runs, over the seeds that ran in both.

    `score` in the criterion's unit, `rmse` relative to the inputs' range, of PSNRs only; `unpaired`
    seeds have a value in one run only.
    """

    key: ConfigurationKey
    attack: str
    score: Difference | None
    rmse: Difference | None
    unpaired: int


@dataclass(frozen=True)
class BestAttackPair:
    """S_D of one configuration; `held_out`: the difference of `BestAttackError.held_out`."""

    key: ConfigurationKey
    first: BestAttackError | None
    second: BestAttackError | None
    held_out: Difference | None


@dataclass(frozen=True)
class AccuracyPair:
    model: str
    defense: str
    accuracy: Difference


@dataclass(frozen=True)
class RunComparison:
    """All that a page says about two runs; their scores have this axis and unit.

    `grave`: why their numbers do not mean the same; `notes`: what else differs. `both` counts
    settings, `only` those of one run alone (or of some seeds) with their experiments;
    `experiments`: how many are in both, and how many of these have equal records.
    """

    axis: str
    unit: str
    grave: tuple[str, ...]
    notes: tuple[str, ...]
    identical: tuple[str, ...]
    verdicts: tuple[VerdictPair, ...]
    attacks: tuple[AttackPair, ...]
    best_attack: tuple[BestAttackPair, ...]
    accuracies: tuple[AccuracyPair, ...]
    both: int
    only: tuple[tuple[tuple[AttackKey, int], ...], ...]
    experiments: tuple[int, int]


Experiments = dict[AttackKey, dict[int, Assessment]]
"""By setting (model, batch size, defense and attack) and seed."""


def difference(pairs: Sequence[tuple[float, float]]) -> Difference | None:
    """The mean of second - first over pairs, with its 95 % interval; None of none.

    It takes the differences as nearly normal; of few pairs that are skewed it is too narrow.
    """
    gaps = [second - first for first, second in pairs]
    gap = tables.mean_of(gaps)
    if gap is None:
        return None
    first, second = (fmean(side) for side in zip(*pairs, strict=True))
    return Difference(gap.n, first, second, gap.mean, gap.low, gap.high, not any(gaps))


def compare(first: Run, second: Run) -> RunComparison:
    second = dataclasses.replace(second, assessments=_aligned(first, second))
    runs = first, second
    names = Names([*first.assessments, *second.assessments], [*first.trainings, *second.trainings])
    one, other = (RunSummary(run, names) for run in runs)
    here, there = (_by_setting(summary) for summary in (one, other))
    shared = [setting for setting in here if setting in there]
    pairs = [
        (a, there[setting][seed])
        for setting in shared
        for seed, a in here[setting].items()
        if seed in there[setting]
    ]
    contents = {
        name: [files.read(r.folder / name) if (r.folder / name).exists() else b"" for r in runs]
        for name in JOURNALS
    }
    # Scores of different measures are not subtracted.
    comparable = len({a.criterion.axis for run in runs for a in run.assessments}) == 1
    grave, notes = concerns(first, second, pairs)
    criterion = first.assessments[0].criterion
    return RunComparison(
        axis=criterion.axis,
        unit=criterion.unit,
        grave=grave,
        notes=notes,
        identical=tuple(name for name, (a, b) in contents.items() if a and a == b),
        verdicts=_verdicts(one, other),
        attacks=tuple(
            _attack(setting, here[setting], there[setting]) for setting in shared if comparable
        ),
        best_attack=_best_attack(one, other),
        accuracies=_accuracies(one, other),
        both=len(shared),
        only=(_only(here, there), _only(there, here)),
        experiments=(len(pairs), sum(a == b for a, b in pairs)),
    )


def _aligned(first: Run, second: Run) -> list[Assessment]:
    """The second run's, an attack of one setting in each run taken as the same attack."""
    # Versions of leakbound may hash one setting differently, and the names then differ.
    here, there = (
        grouped((a.attack.name, a.attack.hash) for a in run.assessments) for run in (first, second)
    )
    moved = {
        name: hashes[0]
        for name, hashes in here.items()
        if len({*hashes}) == 1 and len({*there.get(name, ())}) == 1
    }
    return [
        replace(a, attack=replace(a.attack, hash=moved.get(a.attack.name, a.attack.hash)))
        for a in second.assessments
    ]


def _by_setting(summary: RunSummary) -> Experiments:
    by_setting = grouped((summary.names.attack_key(a), a) for a in summary.assessments)
    return {setting: {a.seed: a for a in some} for setting, some in by_setting.items()}


def _verdicts(
    first: RunSummary,
    second: RunSummary,
) -> tuple[VerdictPair, ...]:
    """Configurations in both: those that became less safe first, then safer, then the rest."""
    there = {row.key: row for row in second.configurations}
    pairs = [VerdictPair(row, there[row.key]) for row in first.configurations if row.key in there]
    # What got worse must not hide below what stayed.
    return tuple(sorted(pairs, key=lambda pair: (-1, 1, 0).index(pair.change)))


def _attack(
    setting: AttackKey,
    first: Mapping[int, Assessment],
    second: Mapping[int, Assessment],
) -> AttackPair:
    def by_seed(
        experiments: Mapping[int, Assessment],
        value: Callable[[Assessment], float | None],
    ) -> dict[int, float]:
        known = {seed: value(a) for seed, a in experiments.items() if a.status == "ok"}
        return {seed: score for seed, score in known.items() if score is not None}

    scores, others = (by_seed(side, tables.mean_value) for side in (first, second))
    errors = [by_seed(side, _rmse) for side in (first, second)]
    return AttackPair(
        setting[:3],
        setting[3],
        score=_over_seeds(scores, others),
        rmse=_over_seeds(*errors),
        unpaired=len(scores.keys() ^ others.keys()),
    )


def _rmse(assessment: Assessment) -> float | None:
    if not best_attack.measured(assessment):
        return None
    return math.sqrt(fmean(best_attack.squared_errors(assessment.scores)))


def _over_seeds(
    first: Mapping[int, float],
    second: Mapping[int, float],
) -> Difference | None:
    return difference([(first[seed], second[seed]) for seed in sorted(first) if seed in second])


def _best_attack(
    first: RunSummary,
    second: RunSummary,
) -> tuple[BestAttackPair, ...]:
    here, there = (
        {
            (table.model, table.batch_size, row.defense): row.found
            for table in best_attack.best_attack_tables(run.assessments, (), run.names)
            for row in table.rows
        }
        for run in (first, second)
    )
    pairs = []
    for key, one in here.items():
        other = there.get(key)
        if key in there and (one or other):
            # Held out: no round chooses its own attack, which would make every defense look worse.
            rounds = _over_seeds(one.held_out, other.held_out) if one and other else None
            pairs.append(BestAttackPair(key, one, other, rounds))
    return tuple(pairs)


def _accuracies(
    first: RunSummary,
    second: RunSummary,
) -> tuple[AccuracyPair, ...]:
    here, there = (
        grouped(
            ((run.names.model(t), run.names.defense(t)), (t.seed, t.accuracy))
            for t in run.run.trainings
            if t.status == "ok" and t.accuracy is not None
        )
        for run in (first, second)
    )
    pairs = [(key, _over_seeds(dict(some), dict(there.get(key, ())))) for key, some in here.items()]
    return tuple(AccuracyPair(*key, both) for key, both in pairs if both is not None)


def _only(
    here: Experiments,
    there: Experiments,
) -> tuple[tuple[AttackKey, int], ...]:
    counts = {key: len(some.keys() - there.get(key, {}).keys()) for key, some in here.items()}
    return tuple((key, count) for key, count in counts.items() if count)


def concerns(
    first: Run,
    second: Run,
    pairs: Sequence[tuple[Assessment, Assessment]],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Why numbers of two runs do not mean the same, and what else differs.

    `pairs` are experiments of equal settings.
    """
    one = first.info
    other = second.info
    grave = []

    def differ(
        what: str,
        words: Callable[[Assessment], str],
        so: str,
    ) -> None:
        a, b = (sorted({words(a) for a in run.assessments}) for run in (first, second))
        if a != b:
            said = f"A {' or '.join(a) or 'none'}; B {' or '.join(b) or 'none'}"
            grave.append(f"The {what} differ: {said}. So {so}.")

    differ("threat models", lambda a: threat_words(a.threat), "the attackers are not the same")
    differ("thresholds", lambda a: a.criterion.text, "verdicts do not compare")
    if one.data.fingerprint != other.data.fingerprint:
        data = [f"{i.data.source} ({i.data.fingerprint[:12]})" for i in (one, other)]
        words = f"The data differ: A {data[0]}; B {data[1]}."
        grave.append(f"{words} A seed does not name the same examples.")
    # The prior-only baseline scores differently on other batches.
    baselines = [
        (a.baseline, b.baseline)
        for a, b in pairs
        if a.status == b.status == "ok" and a.baseline and b.baseline
    ]
    count = sum(here != there for here, there in baselines)
    if count:
        grave.append(
            f"In {count} of {len(baselines)} pairs of experiments the prior-only baseline scores "
            "differently, so the batches, or the public examples, are not the same."
        )
    plans = [json.dumps(info.plan.get("utility"), sort_keys=True) for info in (one, other)]
    if first.trainings and second.trainings and plans[0] != plans[1]:
        words = "The trainings behind the test accuracy differ, so accuracies do not compare: "
        grave.append(f"{words}A {plans[0]}; B {plans[1]}.")
    notes = []
    for letter, run in {"A": first, "B": second}.items():
        failed = sum(a.status == "failed" for a in run.assessments)
        if run.missing:
            words = f"{letter} is not finished: {run.missing} of {run.info.experiments} experiments"
            grave.append(f"{words} are missing.")
        if failed:
            notes.append(f"In {letter} {failed} of {len(run.assessments)} experiments failed.")
    # Attacks and defenses of one name whose full settings differ.
    notes += dict.fromkeys(
        f"{here.name} has other settings: A {here.settings}; B {there.settings}."
        for a, b in pairs
        for here, there in ((a.attack, b.attack), (a.defense, b.defense))
        if here.settings != there.settings
    )
    for what, name in (("versions", "versions"), ("machines", "machine")):
        here = getattr(one, name)
        there = getattr(other, name)
        rows = [
            f"{key} {plain(here.get(key))} and {plain(there.get(key))}"
            for key in sorted({*here, *there})
            if here.get(key) != there.get(key)
        ]
        if rows:
            notes.append(f"The {what} differ: {', '.join(rows)}.")
    if one.plan_hash != other.plan_hash:
        notes.append(f"The plans differ: {one.plan_hash} and {other.plan_hash}.")
    return tuple(grave), tuple(notes)


def threat_words(threat: Threat) -> str:
    known = {"labels": threat.labels_known, "defense": threat.defense_known}
    words = [f"{what} {'known' if said else 'not known'}" for what, said in known.items()]
    more = ["statistics known"] * threat.statistics_known
    more += [f"{threat.known} known"] if threat.known else []
    return ", ".join([f"{threat.server} server", *words, *more])


def write_comparison(
    first: Run,
    second: Run,
    path: Path,
) -> RunComparison:
    """Write the page of two runs; returns what it says. The same inputs give the same bytes."""
    check_installed()
    comparison = compare(first, second)
    save(path, render_comparison(first, second, comparison))
    return comparison


def render_comparison(
    first: Run,
    second: Run,
    comparison: RunComparison,
) -> str:
    scores = [row.score for row in comparison.attacks]
    intervals = [score for score in scores if score and score.low is not None]
    context = {
        "runs": [("A", first), ("B", second)],
        "names": [_name(first), _name(second)],
        "criteria": [run.assessments[0].criterion for run in (first, second)],
        "comparison": comparison,
        "summary": summary(comparison),
        "baseline": BASELINE,
        "signed": signed,
        "tiny": tiny,
        "intervals": len(intervals),
        "by_chance": decimal(0.05 * len(intervals)),
        "seen": sum(bool(one.side) for one in intervals),
    }
    return rendered("compare.html.j2", context)


def signed(value: float | None) -> str:
    if value is None:
        return "–"
    text = decimal(value)
    # A zero has no sign, whatever it was rounded from.
    if not text.strip("−0."):
        return text.removeprefix("−")
    return text if value < 0 else f"+{text}"


def tiny(value: float | None) -> str:
    """A difference of any size in three digits, with its sign."""
    if not value:
        return "–" if value is None else "0"
    return ("+" if value > 0 else "") + significant(value)


def summary(comparison: RunComparison) -> str:
    counts = Counter(pair.change for pair in comparison.verdicts)
    changed = counts[-1] + counts[1]
    many = plural(counts.total(), "configuration")
    if not comparison.verdicts:
        return "The runs share no configuration of model, batch size and defense."
    if not changed:
        return f"No verdict changed: {many} in both runs."
    ways = [f"{counts[-1]} less safe in B"] * bool(counts[-1])
    ways += [f"{counts[1]} safer in B"] * bool(counts[1])
    return f"{changed} of {many} changed verdict: {' and '.join(ways)}."


def _name(run: Run) -> str:
    name = run.info.name
    folder = run.folder.resolve().name
    return name if folder == name else f"{name} ({folder})"
