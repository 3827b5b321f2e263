"""The form of `report.json`, and texts of strangers made fit for it."""

from __future__ import annotations

import math
import unicodedata
from typing import Any, Final, Literal

import msgspec

from leakbound.assess.record import AttackInfo, CriterionInfo, Parameters, Picture, Values, Verdict
from leakbound.report.columns import ColumnTable
from leakbound.report.equal_utility import EqualUtility
from leakbound.report.settings import DeclaredTraining, SettingRow
from leakbound.report.tables import (
    LONGEST,
    AttackSummary,
    Configuration,
    ConfigurationPart,
    ReportPart,
    Theorem,
    TrainingCost,
)

SCHEMA: Final = "leakbound-report/1"
DEEPEST = 16
MOST = 1e300
_UNSEEN = {"Cc", "Cf", "Cs", "Co"}
Status = Literal["measured", "computed", "by construction", "declared", "not stated"]
Answer = Literal["yes", "no", "in some experiments", "not stated"]
Answered = Literal["answered", "in part", "not answered", "not stated"]
NOT_STATED: Final = "not stated"
Part = Literal[
    "measured",
    "bounded",
    "declared",
    "auxiliary",
    "thresholds",
    "corridor",
    "pictures",
    "utility",
    "privacy",
    "provenance",
    "rerun",
]
"""A part of the annex, in the order of its parts."""


class Item(ReportPart, frozen=True):
    """One line of what is known, and from whom. What nobody states is "not stated"."""

    name: str
    words: str
    value: str | None
    status: Status
    source: str


class AuxiliaryLine(ReportPart, frozen=True):
    """One thing that an attacker may know besides the update."""

    name: str
    words: str
    answer: Answer
    detail: str
    source: str


class InferredLine(ReportPart, frozen=True):
    """What was inferred from a captured update."""

    update: str
    name: str
    value: str
    how: str
    certain: bool


class AttackerPart(ReportPart, frozen=True):
    """What attackers knew, and what was inferred from captured updates."""

    auxiliary: tuple[AuxiliaryLine, ...]
    inferred: tuple[InferredLine, ...]


class ThresholdLine(ReportPart, frozen=True):
    """A threshold with its origin and who accepted it."""

    name: Literal["reconstructed", "accepted"]
    words: str
    value: float | None
    unit: str
    origin: str
    accepted_by: str


class BestAttackLine(ConfigurationPart, frozen=True):
    """S_D of a configuration: what attackers leave who must choose an attack beforehand."""

    rmse: float
    low: float | None
    high: float | None
    level: float
    attack: str
    baseline_rmse: float
    rounds: int
    left_out: int


class CapturedLine(ReportPart, frozen=True):
    """How much of a captured update one reconstruction explains; a share of its energy.

    `at_best_length`: that share is the best over all lengths of the update.
    """

    update: str
    kind: str
    attack: str
    explained: float | None
    at_best_length: bool
    proof: str | None
    status: str
    note: str | None


class Ends(ReportPart, frozen=True):
    """How the experiments ended."""

    planned: int
    present: int
    ok: int
    not_applicable: int
    failed: int


class MeasuredPart(ReportPart, frozen=True):
    """What attacks did."""

    says: str
    experiments: Ends
    attacks: tuple[AttackSummary, ...]
    best_attack: tuple[BestAttackLine, ...]
    captured: tuple[CapturedLine, ...]
    columns: tuple[ColumnTable, ...]


class BoundLine(ConfigurationPart, frozen=True):
    """One bound on one configuration, over its experiments.

    `value`: the median of bounds on the error, the largest of probabilities. `psnr` in dB: of that
    error, or the threshold of a training's probability.
    """

    name: str
    kind: str
    value: float
    least: float
    most: float
    psnr: float | None
    standard_error: float | None
    accepted: float | None
    prior: str
    covers_all: bool
    theorem: int
    experiments: int
    of_experiments: int


class MissingBound(ReportPart, frozen=True):
    """Where a bound is missing, and why."""

    reason: str
    defenses: tuple[str, ...]


class BoundedPart(ReportPart, frozen=True):
    """What theorems say."""

    says: str
    bounds: tuple[BoundLine, ...]
    theorems: tuple[Theorem, ...]
    missing: tuple[MissingBound, ...]


class DeclaredPart(ReportPart, frozen=True):
    """What was stated and not checked."""

    says: str
    items: tuple[Item, ...]


class StrongestLine(ConfigurationPart, frozen=True):
    """The experiment in which a configuration's strongest attack reconstructed the best example.

    `score`, `baseline_score` and `matched` (over the threshold) are by example. `pictures`: file
    names in the run's pictures of truth, reconstruction and leak map; null without.
    """

    # JSON has whole numbers of any size, but other readers fail on them.
    verdict: Verdict
    attack: str
    seed: int
    experiment: str
    score: Values
    baseline_score: Values
    matched: tuple[bool, ...]
    problem: str | None
    proof: str | None
    pictures: dict[str, Picture] | None


class Epsilons(ReportPart, frozen=True):
    """What a mechanism means as differential privacy; null where there is no accountant."""

    delta: float
    add_remove: float | Literal["infinite"] | None
    replace: float | Literal["infinite"] | None


class PrivacyClaim(ReportPart, frozen=True):
    """A claim of differential privacy with every question about it."""

    claim: str
    epsilons: Epsilons | None
    unanswered: int
    items: tuple[Item, ...]


class EpsilonPart(ReportPart, frozen=True):
    """An audit of the client's own code: its epsilon as declared, bounded and found.

    `holds`: whether it leaks no more than it claims; null if the audit cannot tell.
    """

    client: str
    delta: float
    confidence: float
    holds: bool | None
    verdict: str
    items: tuple[Item, ...]


class Check(ReportPart, frozen=True):
    """What was computed again from the folder; `holds` is null if it cannot be known."""

    words: str
    holds: bool | None
    detail: str


class Provenance(ReportPart, frozen=True):
    """What made the records, as `run.json` says; `models` have their numbers of weights."""

    plan: Parameters
    data: Parameters
    versions: dict[str, str]
    plan_hash: str | None = None
    seeds: tuple[int, ...] = ()
    own_data: bool | None = None
    code: dict[str, str] = msgspec.field(default_factory=dict)
    machine: Parameters = msgspec.field(default_factory=dict)
    models: dict[str, int | None] = msgspec.field(default_factory=dict)
    attacks: tuple[AttackInfo, ...] = ()
    defenses: tuple[str, ...] = ()


class RunAgain(ReportPart, frozen=True):
    """How to make the same again: the plan as TOML, the command, and the hashes that result."""

    command: str
    needs: tuple[str, ...]
    plan: str | None = None
    plan_hash: str | None = None
    records_sha256: str | None = None
    utility_sha256: str | None = None
    why_not: str | None = None


class SignOff(ReportPart, frozen=True):
    """What the sign-off page says, in sentences. `date`: of the records, by their file's time.

    `revealed`: facts that the updates reveal for certain, sensitive ones first. `rows`: every
    defense setting, the most important first; the page shows those that fit. `attackers`: what one
    update adds for stranger, intruder and anyone; the limits of the rows are those of `who`.
    `persons`: where most persons are named by their reconstructions.
    """

    date: str | None
    answer: str
    advice: str
    tested: str
    attacker: str
    criterion: str
    revealed: tuple[str, ...]
    rows: tuple[SettingRow, ...]
    not_covered: tuple[str, ...]
    attackers: tuple[str, ...] = ()
    who: str = "stranger"
    persons: tuple[str, ...] = ()


class QuestionLine(ReportPart, frozen=True):
    """A question of a guideline, in our words, and how far this answers it.

    `parts`: the parts of the annex that say more.
    """

    guideline: str
    question: str
    status: Answered
    answer: str
    parts: tuple[Part, ...] = ()


class Subject(ReportPart, frozen=True, kw_only=True):
    """A run: measured, bounded and declared risk, kept apart.

    `threshold`: the value of the criterion, null where there are several.
    """

    name: str
    sign_off: SignOff
    questions: tuple[QuestionLine, ...]
    notices: tuple[str, ...]
    checks: tuple[Check, ...]
    configurations: tuple[Configuration, ...]
    measured: MeasuredPart
    bounded: BoundedPart
    declared: DeclaredPart
    attacker: AttackerPart
    thresholds: tuple[ThresholdLine, ...]
    criterion: CriterionInfo
    threshold: float | None
    strongest: tuple[StrongestLine, ...]
    utility: tuple[TrainingCost, ...]
    equal_utility: tuple[EqualUtility, ...] = ()
    differential_privacy: tuple[PrivacyClaim, ...]
    epsilon_audits: tuple[EpsilonPart, ...] = ()
    training: DeclaredTraining | None = None
    provenance: Provenance
    rerun: RunAgain


class EvidenceReport(ReportPart, frozen=True, kw_only=True):
    """Evidence on reconstruction risk.

    `images`: the page beside it shows pictures of the data, which may be private where
    `private_pictures` says so. `written_by`: in the file alone, leakbound's seal.
    """

    schema: Literal["leakbound-report/1"] = SCHEMA
    leakbound: str
    images: bool
    private_pictures: bool
    subjects: tuple[Subject, ...]
    written_by: str | msgspec.UnsetType = msgspec.UNSET


def cleaned(subject: Subject) -> Subject:
    """The same with texts that are short and hide nothing, and finite numbers.

    The plan to run again must stay as it is; TOML escapes what nobody sees.
    """
    shown = msgspec.convert(clean(msgspec.to_builtins(subject)), Subject)
    return msgspec.structs.replace(shown, rerun=subject.rerun)


def clean(value: Any, depth: int = 0) -> Any:
    """A JSON value with texts cut to `LONGEST` letters, and finite numbers.

    Letters without a shape (controls, marks that turn the reading direction) become U+FFFD.
    """
    if isinstance(value, str):
        return _shown(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return value if abs(value) < MOST and not math.isnan(value) else None
    if depth >= DEEPEST:
        return "…"
    if isinstance(value, dict):
        return {_shown(str(key)): clean(item, depth + 1) for key, item in value.items()}
    return [clean(item, depth + 1) for item in value]


def _shown(text: str) -> str:
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    # Marks that turn the reading direction could show a reader another text.
    return "".join(
        "\ufffd" if unicodedata.category(c) in _UNSEEN and c not in "\n\t" else c for c in text
    )
