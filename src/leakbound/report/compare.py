"""Two runs beside each other: what changed, on which pairs, and whether the comparison is fair."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from leakbound._util import files
from leakbound.assess.record import CERTIFIED, EXPOSED, VERDICTS, Assessment, Threat, Training
from leakbound.report import best_attack, tables
from leakbound.report.best_attack import BASELINE, BestAttackError
from leakbound.report.folder import Run
from leakbound.report.tables import Configuration, ConfigurationKey, Names, grouped, plain
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
        return 1 if self.low > 0 else -1 if self.high < 0 else 0

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


Setting = tuple[str, int, str, str]
"""Model, batch size, defense and attack."""


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
    only: tuple[tuple[tuple[Setting, int], ...], ...]
    experiments: tuple[int, int]


def difference(pairs: Sequence[tuple[float, float]]) -> Difference | None:
    """The mean of second - first over pairs, with its 95 % interval; None of none.

    It takes the differences as nearly normal; of few pairs that are skewed it is too narrow.
    """
    gaps = [second - first for first, second in pairs]
    found = tables.mean_of(gaps)
    if found is None:
        return None
    first, second = (fmean(side) for side in zip(*pairs, strict=True))
    return Difference(found.n, first, second, found.mean, found.low, found.high, not any(gaps))


def compare(first: Run, second: Run) -> RunComparison:
    own = first.assessments, _aligned(first.assessments, second.assessments)
    axes = {a.criterion.axis for a in (*own[0], *own[1])}
    names = Names([*own[0], *own[1]], [*first.trainings, *second.trainings])
    groups = _by_setting(own[0], names), _by_setting(own[1], names)
    shared = [key for key in groups[0] if key in groups[1]]
    pairs = [
        (groups[0][key][seed], groups[1][key][seed])
        for key in shared
        for seed in groups[0][key]
        if seed in groups[1][key]
    ]
    grave, notes = concerns(first, second, pairs)
    return RunComparison(
        axis=own[0][0].criterion.axis,
        unit=own[0][0].criterion.unit,
        grave=grave,
        notes=notes,
        identical=tuple(name for name in JOURNALS if _same_bytes(first, second, name)),
        verdicts=_verdicts(own[0], own[1], names),
        attacks=tuple(
            _attack(key, groups[0][key], groups[1][key]) for key in shared if len(axes) == 1
        ),
        best_attack=_best_attack(own[0], own[1], names),
        accuracies=_accuracies(first.trainings, second.trainings, names),
        both=len(shared),
        only=(_only(groups[0], groups[1]), _only(groups[1], groups[0])),
        experiments=(len(pairs), sum(one == other for one, other in pairs)),
    )


def _aligned(first: Iterable[Assessment], second: Iterable[Assessment]) -> list[Assessment]:
    """The second run's, an attack of one setting in each run taken as the same attack."""
    second = list(second)
    here, there = (grouped((a.attack.name, a.attack.hash) for a in own) for own in (first, second))
    moved = {
        name: own[0]
        for name, own in here.items()
        if len({*own}) == 1 and len({*there.get(name, ())}) == 1
    }
    return [
        replace(a, attack=replace(a.attack, hash=moved[a.attack.name]))
        if a.attack.name in moved
        else a
        for a in second
    ]


def _by_setting(own: Iterable[Assessment], names: Names) -> dict[Setting, dict[int, Assessment]]:
    found = grouped(((*names.key(a), names.attack(a)), a) for a in own)
    return {key: {a.seed: a for a in some} for key, some in found.items()}


def _verdicts(
    first: Sequence[Assessment], second: Sequence[Assessment], names: Names
) -> tuple[VerdictPair, ...]:
    """Configurations in both: those that became less safe first, then safer, then the rest."""
    here, there = (
        {row.key: row for row in tables.configurations(own, names)} for own in (first, second)
    )
    pairs = [VerdictPair(row, there[key]) for key, row in here.items() if key in there]
    return tuple(sorted(pairs, key=lambda pair: (-1, 1, 0).index(pair.change)))


def _attack(
    key: Setting, first: Mapping[int, Assessment], second: Mapping[int, Assessment]
) -> AttackPair:
    values = [_values(own, tables.mean_value) for own in (first, second)]
    errors = [_values(own, _rmse) for own in (first, second)]
    unpaired = len(values[0].keys() ^ values[1].keys())
    return AttackPair(key[:3], key[3], _over_seeds(*values), _over_seeds(*errors), unpaired)


def _values(
    own: Mapping[int, Assessment], value: Callable[[Assessment], float | None]
) -> dict[int, float]:
    ran = {seed: value(a) for seed, a in own.items() if a.status == "ok"}
    return {seed: found for seed, found in ran.items() if found is not None}


def _rmse(own: Assessment) -> float | None:
    return (
        math.sqrt(fmean(best_attack.squared_errors(own.scores)))
        if best_attack.measured(own)
        else None
    )


def _over_seeds(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    return difference([(first[seed], second[seed]) for seed in sorted(first) if seed in second])


def _best_attack(
    first: Sequence[Assessment], second: Sequence[Assessment], names: Names
) -> tuple[BestAttackPair, ...]:
    here, there = (
        {
            (table.model, table.batch_size, row.defense): row.found
            for table in best_attack.best_attack_tables(own, (), names)
            for row in table.rows
        }
        for own in (first, second)
    )
    pairs = []
    for key, one in here.items():
        other = there.get(key)
        if key in there and (one or other):
            rounds = _over_seeds(one.held_out, other.held_out) if one and other else None
            pairs.append(BestAttackPair(key, one, other, rounds))
    return tuple(pairs)


def _accuracies(
    first: Iterable[Training], second: Iterable[Training], names: Names
) -> tuple[AccuracyPair, ...]:
    here, there = (
        grouped(
            ((names.model(t), names.defense(t)), (t.seed, t.accuracy))
            for t in trainings
            if t.status == "ok" and t.accuracy is not None
        )
        for trainings in (first, second)
    )
    pairs = [(key, _over_seeds(dict(own), dict(there.get(key, ())))) for key, own in here.items()]
    return tuple(AccuracyPair(*key, both) for key, both in pairs if both is not None)


def _only(
    own: Mapping[Setting, Mapping[int, Assessment]],
    other: Mapping[Setting, Mapping[int, Assessment]],
) -> tuple[tuple[Setting, int], ...]:
    counts = {key: len(some.keys() - other.get(key, {}).keys()) for key, some in own.items()}
    return tuple((key, count) for key, count in counts.items() if count)


def _same_bytes(first: Run, second: Run, name: str) -> bool:
    paths = [run.folder / name for run in (first, second)]
    contents = [files.read(path) if path.exists() else b"" for path in paths]
    return bool(contents[0]) and contents[0] == contents[1]


def concerns(
    first: Run, second: Run, pairs: Sequence[tuple[Assessment, Assessment]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Why numbers of two runs do not mean the same, and what else differs.

    `pairs` are experiments of equal settings.
    """
    runs = {"A": first, "B": second}
    one = first.info
    other = second.info
    threats = [sorted({threat_words(a.threat) for a in r.assessments}) for r in runs.values()]
    limits = [sorted({a.criterion.text for a in r.assessments}) for r in runs.values()]
    grave = [
        *_differ("threat models", threats, "the attackers are not the same"),
        *_differ("thresholds", limits, "verdicts do not compare"),
        *_data(first, second),
        *_batches(pairs),
        *_trainings(first, second),
    ]
    notes = []
    for letter, run in runs.items():
        count = len(run.assessments)
        failed = sum(a.status == "failed" for a in run.assessments)
        if run.missing:
            words = f"{letter} is not finished: {run.missing} of {run.info.experiments} experiments"
            grave.append(f"{words} are missing.")
        if failed:
            notes.append(f"In {letter} {failed} of {count} experiments failed.")
    notes += _settings(pairs)
    notes += _facts("The versions differ", one.versions, other.versions)
    notes += _facts("The machines differ", one.machine, other.machine)
    if one.plan_hash != other.plan_hash:
        notes.append(f"The plans differ: {one.plan_hash} and {other.plan_hash}.")
    return tuple(grave), tuple(notes)


def threat_words(threat: Threat) -> str:
    known = {"labels": threat.labels_known, "defense": threat.defense_known}
    words = [f"{what} {'known' if said else 'not known'}" for what, said in known.items()]
    more = ["statistics known"] * threat.statistics_known
    return ", ".join([f"{threat.server} server", *words, *more])


def _differ(what: str, sides: Sequence[Sequence[str]], so: str) -> Iterator[str]:
    if sides[0] != sides[1]:
        said = [" or ".join(side) or "none" for side in sides]
        yield f"The {what} differ: A {said[0]}; B {said[1]}. So {so}."


def _data(first: Run, second: Run) -> Iterator[str]:
    one, other = (run.info.data for run in (first, second))
    if one.fingerprint != other.fingerprint:
        said = [f"{data.source} ({data.fingerprint[:12]})" for data in (one, other)]
        yield (
            f"The data differ: A {said[0]}; B {said[1]}. A seed does not name the same examples."
        )


def _batches(pairs: Iterable[tuple[Assessment, Assessment]]) -> Iterator[str]:
    """Pairs whose batches differ: the baseline scores differently on them."""
    scores = [
        (one.baseline, other.baseline)
        for one, other in pairs
        if all(a.status == "ok" and a.baseline for a in (one, other))
    ]
    count = sum(one != other for one, other in scores)
    if count:
        yield (
            f"In {count} of {len(scores)} pairs of experiments the prior-only baseline scores "
            "differently, so the batches, or the public examples, are not the same."
        )


def _trainings(first: Run, second: Run) -> Iterator[str]:
    plans = [json.dumps(run.info.plan.get("utility"), sort_keys=True) for run in (first, second)]
    if first.trainings and second.trainings and plans[0] != plans[1]:
        words = "The trainings behind the test accuracy differ, so accuracies do not compare: "
        yield f"{words}A {plans[0]}; B {plans[1]}."


def _settings(pairs: Iterable[tuple[Assessment, Assessment]]) -> Iterable[str]:
    """Attacks and defenses of one name whose full settings differ."""
    return dict.fromkeys(
        f"{mine.name} has other settings: A {mine.settings}; B {theirs.settings}."
        for one, other in pairs
        for mine, theirs in ((one.attack, other.attack), (one.defense, other.defense))
        if mine.settings != theirs.settings
    )


def _facts(what: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        f"{key} {plain(one.get(key))} and {plain(other.get(key))}"
        for key in sorted({*one, *other})
        if one.get(key) != other.get(key)
    ]
    if rows:
        yield f"{what}: {', '.join(rows)}."


def write_comparison(first: Run, second: Run, path: Path) -> RunComparison:
    """Write the page of two runs; returns what it says. The same inputs give the same bytes."""
    check_installed()
    found = compare(first, second)
    save(path, render_comparison(first, second, found))
    return found


def render_comparison(first: Run, second: Run, found: RunComparison) -> str:
    intervals = [row.score for row in found.attacks if row.score and row.score.low is not None]
    context = {
        "runs": [("A", first), ("B", second)],
        "names": [_name(first), _name(second)],
        "criteria": [run.assessments[0].criterion for run in (first, second)],
        "rmse": any(row.rmse for row in found.attacks),
        "found": found,
        "summary": summary(found),
        "grave": found.grave,
        "notes": found.notes,
        "changed": any(pair.change for pair in found.verdicts),
        "baseline": BASELINE,
        "moved": {-1: "less safe in B", 1: "safer in B", 0: "the same"},
        "signed": signed,
        "tiny": tiny,
        "interval": _interval,
        "intervals": len(intervals),
        "by_chance": decimal(0.05 * len(intervals)),
        "seen": sum(bool(one.side) for one in intervals),
    }
    return rendered("compare.html.j2", context)


def signed(value: float | None, digits: int = 1) -> str:
    if value is None:
        return "–"
    text = decimal(value, digits)
    if not text.strip("−0."):
        return text.removeprefix("−")
    return text if value < 0 else f"+{text}"


def tiny(value: float | None) -> str:
    """A difference of any size in three digits, with its sign."""
    if not value:
        return "–" if value is None else "0"
    return ("+" if value > 0 else "") + significant(value)


def summary(found: RunComparison) -> str:
    counts = Counter(pair.change for pair in found.verdicts)
    changed = counts[-1] + counts[1]
    many = plural(counts.total(), "configuration")
    if not found.verdicts:
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


def _interval(found: Difference | None, *, small: bool = False) -> str:
    if found is None or found.low is None or found.high is None:
        return "–"
    show = tiny if small else signed
    return f"{show(found.low)} to {show(found.high)}"
