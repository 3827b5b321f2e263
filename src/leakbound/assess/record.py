"""The record format: an assessment of an update, or the cost of a defense in a training.

A line of `records.jsonl` is an `Assessment`, of `utility.jsonl` a `Training`, of `diagnosis.jsonl`
a `Diagnosis`, of `reidentified.jsonl` a `Reidentified`, and `run.json` is a `RunInfo`. All code
reads and writes them here (docs/reference/records.schema.json).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, cast, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from leakbound._util import files
from leakbound._util.docstrings import cleaned
from leakbound._util.results import ColumnResult, Fact, SequenceResult

SCHEMA: Final = 1
DELTA: Final = 1e-5
"""The delta at which a bound gives the release's epsilon."""
EXPOSED: Final = "exposed"
CERTIFIED: Final = "exposed (certified)"
NAMED: Final = "person named"
ATTRIBUTE: Final = "attribute exposed"
WORDS: Final = "words exposed"
FACTS: Final = "facts exposed"
RECOVERABLE: Final = "recoverable in principle"
GUESSABLE: Final = "undecided (guessable)"
NOT_RUN: Final = "not run"
UNDECIDED: Final = "undecided"
ON_AVERAGE: Final = "protected on average"
UNDER_MODEL: Final = "protected under a model"
HONEST: Final = "protected from an honest server"
THESE: Final = "protected (these examples)"
PROTECTED: Final = "protected from strangers"
INTRUDERS: Final = "protected from intruders"
ESTIMATE: Final = "estimate"
"""`covers` of a bound that is estimated and not proven: it covers nobody for certain."""
Verdict = Literal[
    "exposed (certified)",
    "exposed",
    "person named",
    "attribute exposed",
    "words exposed",
    "facts exposed",
    "recoverable in principle",
    "undecided (guessable)",
    "not run",
    "undecided",
    "protected on average",
    "protected under a model",
    "protected from an honest server",
    "protected (these examples)",
    "protected from strangers",
    "protected from intruders",
]
VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)
"""From the worst to the best."""
EXPOSURES: Final = (EXPOSED, CERTIFIED)
"""An attack reconstructed an example, by the truth or by a proof."""
DISCLOSURES: Final = (NAMED, ATTRIBUTE, WORDS, FACTS)
"""No example is reconstructed, but the update reveals something about them."""
UNSETTLED: Final = (RECOVERABLE, GUESSABLE, UNDECIDED, UNDER_MODEL)
"""Nothing is shown or proven: a model of the data proves nothing about real examples."""
OPEN: Final = (*DISCLOSURES, *UNSETTLED)
"""Whether whole examples can be reconstructed is not settled."""
Basis = Literal["sample", "known parts", "examples", "known model", "fitted model"]
PROTECTS: Final[dict[Basis, Verdict]] = {
    "sample": PROTECTED,
    "known parts": INTRUDERS,
    "examples": THESE,
    "known model": HONEST,
    "fitted model": UNDER_MODEL,
}
"""The verdict for a bound that excludes the threshold, by what the bound rests on."""
PRESENT: Final = "information present, search fails"
ABSENT: Final = "information absent"
UNKNOWN: Final = "unknown"
Why = Literal["information present, search fails", "information absent", "unknown"]
"""The words of a diagnosis."""
Unit = Literal["noise", "rounding"]
Status = Literal["ok", "not_applicable", "failed"]
# Squares and sums of these numbers stay finite, so readers need no further check.
Number = Annotated[float, Meta(ge=-1e300, le=1e300)]
Decibels = Annotated[float, Meta(ge=-1000, le=1000)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Values = tuple[Number | None, ...]
# A plain file name: a record from elsewhere must not name a file outside its folder.
Picture = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\.png$")]
Parameters = dict[str, Any]


class Damage(ValueError):
    """The reason why a line is not a valid record."""


class RecordPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts of a record: frozen, without unknown fields."""


class AttackInfo(RecordPart, frozen=True, kw_only=True):
    """An attack by name, with its full settings as text and their hash.

    `round`: the one that it attacks, where the plan names it; the hash then names it, too. Attacks
    on several rounds of one training are no independent tries.
    """

    name: str
    settings: str
    hash: str
    round: Count | UnsetType = UNSET


class DefenseInfo(RecordPart, frozen=True, kw_only=True):
    """A defense by name, and what it guarantees.

    `data_dependent_law`: its noise or mask depends on the private batch.
    """

    name: str
    parameters: Parameters
    settings: str
    guarantee: str
    data_dependent_law: bool


class ModelInfo(RecordPart, frozen=True, kw_only=True):
    """A model by name; `size` counts its weights, None if it could not be built.

    `loss` is what clients train it on: a name in `leakbound.losses.LOSSES`, or a description.
    """

    name: str
    parameters: Parameters
    size: Count | None = None
    train_steps: Count = 0
    weights: str | None = None
    loss: str = "cross_entropy"


class DataInfo(RecordPart, frozen=True, kw_only=True):
    """The source of the examples, and the form of one example."""

    source: str
    domain: str
    shape: tuple[Count, ...]
    classes: Count | None = None


class Threat(RecordPart, frozen=True, kw_only=True):
    """What the attacker knows besides the update."""

    labels_known: bool
    defense_known: bool
    server: Literal["honest", "malicious"]
    statistics_known: bool
    known: str = ""


class CriterionInfo(RecordPart, frozen=True, kw_only=True):
    """What counts as reconstructed: a score of at least `value`, a distance of at most `within`.

    The distance is that of the domain, in its natural units. The score is "psnr" (dB), "snr" (dB on
    a series' worst channel), "columns" (percent of a table's `of` columns within tolerance) or
    "tokens" (percent of a sequence's `of` tokens). Only what an attacker does not have from
    elsewhere counts: `known` names what it has. If these are all columns, `of` is 0, and the label
    is asked for.
    """

    metric: Literal["psnr", "snr", "columns", "tokens"] = "psnr"
    value: Decibels
    within: Annotated[float, Meta(ge=0, le=1e300)]
    of: Count | None = None
    known: str = ""

    @property
    def label_alone(self) -> bool:
        """Whether the attacker has every column and asks for the label."""
        return self.of == 0

    @property
    def unit(self) -> str:
        """The unit of the score."""
        return "dB" if self.of is None else "%"

    @property
    def noun(self) -> str:
        """What one example is called, where its parts are counted."""
        return {"columns": "row", "tokens": "sequence"}.get(self.metric, "example")

    @property
    def axis(self) -> str:
        """What the score is, for axes and headings."""
        named = {"psnr": "PSNR", "snr": "SNR"}
        return named.get(self.metric, f"{self.metric} right")

    @property
    def has_errors(self) -> bool:
        """Whether scores are PSNRs, from which mean squared errors follow."""
        return self.axis == "PSNR"

    @property
    def parts_match(self) -> str | None:
        """When one part of an example counts as right; None where examples have no parts."""
        matches = {
            "columns": "numbers within their tolerance, categories equal",
            "tokens": "each in its place",
        }
        return matches.get(self.metric)

    @property
    def has_vocabulary(self) -> bool:
        """Whether examples are sequences of a vocabulary's tokens."""
        return self.noun == "sequence"

    @property
    def goal(self) -> str:
        """What meets it at least, such as "20 dB" or "18 of 20 columns"."""
        if self.label_alone:
            return "the label"
        if self.of is not None:
            return f"{self.of - round(self.within)} of {self.of} {self.metric}"
        return f"{self.value:g} {self.unit}"

    @property
    def text(self) -> str:
        """The criterion as text, such as "20 dB PSNR or more"."""
        if self.label_alone:
            return self.goal
        what = self.goal if self.of is not None else f"{self.goal} {self.axis}"
        return f"{what} of the unknown part or more" if self.known else f"{what} or more"

    def shown(self, score: float) -> str:
        """A score as text, such as "21.3 dB" or "17 of 20 columns"."""
        if self.of is not None:
            return f"{round(score * self.of / 100)} of {self.of} {self.metric}"
        return f"{score:.1f} {self.unit}"


class RoundInfo(RecordPart, frozen=True, kw_only=True):
    """The model that clients got in a round of a training, and what one of them sent.

    Attributes:
        kept: the share of its weights that pruning left, biases not counted.
        sent: bytes of a client's message: numbers as the model has them, masks a bit for a weight.
        dense: the same without pruning and withholding.
        accuracy: of the model on test examples; None without classes.
    """

    kept: Probability
    sent: Count
    dense: Count
    accuracy: Number | None = None


class ReleaseInfo(RecordPart, frozen=True, kw_only=True):
    """What is known about an update's noise and about what it withholds.

    `utility`: share of the plain gradient's first-order progress that is kept, and the second-order
    cost of the noise, both relative (paper A). `noise_share`: the noise's share of the update's
    energy. `round`: of the training, 1 for the first; None: not known. `effective`: False if a
    defense that needs some rounds had no effect yet. `training`: of that round, where the model is
    pruned or the plan names rounds.
    """

    law: str
    data_dependent: bool
    withheld: Number | None
    unit: str
    utility: dict[str, Number | None] = {}
    noise_share: Number | None = None
    round: Count | None = None
    effective: bool = True
    # Left out of a record that has none, which keeps its bytes.
    training: RoundInfo | UnsetType = UNSET


class ObjectiveValues(RecordPart, frozen=True, kw_only=True):
    """The attack's objective before and after."""

    start: Number | None
    end: Number | None


class Bound(RecordPart, frozen=True, kw_only=True):
    """A statement about all attackers (`covers` "all"), some of them, or an "estimate" of one.

    It is either a lower bound on the mean squared error (`probability` is None, `psnr` is the same
    in dB), or an upper bound on any attacker's probability to meet the criterion.

    Attributes:
        rests_on_prior: it holds only on average over `prior`.
        confidence: of the bound, over the public examples or over the draws of the prior.
        basis: what it rests on. "sample": `public_examples` independent public examples show it,
            for any distribution; "known parts": the same for an attacker who has parts of the
            example. "examples": it is exact for these private examples. "known model":
            as "sample", for the sent model only. "fitted model": examples follow a model that was
            fitted to public ones.
        largest_ball: the most public examples that one candidate may match (one per class if labels
            are known).
        rare: share of public examples that no candidate matches together with another one. The
            bound averages over examples, and says least about such ones.
        density_margin: how many times as dense as public examples private ones may be.
        unit: whose reconstruction it is about: one example, or one person with at most so many.
        excludes_threshold: no attacker meets the criterion, or none more often than `accepted`.
        on_average: the bound on the mean error lies above the criterion's; single lucky examples
            are not excluded.
        epsilon: of the release, at DELTA: what it means for membership.
        equation: source of the formula.
    """

    name: str
    value: Annotated[float, Meta(ge=0, le=1e300)]
    psnr: Decibels | None
    prior: str
    covers: str
    rests_on_prior: bool
    excludes_threshold: bool
    on_average: bool
    equation: str | None = None
    assumptions: tuple[str, ...] = ()
    standard_error: Number | None = None
    probability: Probability | None = None
    accepted: Probability | None = None
    basis: Basis = "fitted model"
    confidence: Probability | None = None
    public_examples: Count | None = None
    largest_ball: Count | None = None
    rare: Probability | None = None
    density_margin: Number | None = None
    unit: str = "one example"
    epsilon: Number | None = None

    @property
    def model_free(self) -> bool:
        """Whether it needs no model of the data."""
        return self.basis != "fitted model"

    @property
    def on_error(self) -> bool:
        """Whether it bounds the error; otherwise it is a probability."""
        return self.probability is None


class Completed(RecordPart, frozen=True, kw_only=True):
    """What the best imputer completes from the known parts, without the update.

    Attributes:
        imputer: its name.
        matched, total: how many of the counted public examples it completes within the criterion.
        at_least: lower confidence limit on its success.
    """

    imputer: str
    matched: Annotated[int, Meta(ge=0)]
    total: Count
    at_least: Probability

    @property
    def share(self) -> float:
        """The measured success."""
        return self.matched / self.total


class AttackerRow(RecordPart, frozen=True, kw_only=True):
    """What an update adds for one attacker, at one threshold.

    Attributes:
        attacker: "stranger" knows the population, "intruder" also `knows`, "anyone" any q.
        knows: the known parts, as text.
        goal: what counts as reconstructed: of the unknown part alone, for the intruder.
        without: upper confidence limit on the success without the update; None for anyone.
        bound: no attacker of this kind exceeds it with the update; None for anyone.
        gain: the update adds at most this.
        measured: what the best imputer completes without the update; the intruder's alone.
        from_measured: the bound if the success without the update is the measured share.
    """

    attacker: Literal["stranger", "intruder", "anyone"]
    knows: str = ""
    goal: str
    without: Probability | None = None
    bound: Probability | None = None
    gain: Probability
    measured: Completed | None = None
    from_measured: Probability | None = None


class Attained(RecordPart, frozen=True, kw_only=True):
    """Success of working attacks on examples like the public ones, as confidence limits.

    Attributes:
        attack: the best attack.
        success: lower limit on its probability to reconstruct an example.
        baseline: limits on that of the best prior-only baseline, (lower, upper).
        public_examples: number of examples that built the attacks, and others that counted them.
    """

    attack: str
    success: Probability
    baseline: tuple[Probability, Probability]
    accepted: Probability
    confidence: Probability
    public_examples: Count

    @property
    def recoverable(self) -> bool:
        """The attack succeeds more often than is accepted, and more often than the baseline."""
        return self.success > max(self.accepted, self.baseline[1])

    @property
    def guessable(self) -> bool:
        """The prior-only baseline succeeds more often than is accepted."""
        return self.baseline[0] > self.accepted


class Features(RecordPart, frozen=True, kw_only=True):
    """Errors of the layer inputs that the attack reconstructed, up to sign."""

    layer: str
    span: Number | None = None
    errors: Values | None = None


class Chance(RecordPart, frozen=True, kw_only=True):
    """A permutation test of whether matches are chance: the victims against decoys, or replays.

    Attributes:
        p_value: probability of matches at least as good if the candidates ignore the victims. None:
            there are too few decoys for a test.
        decoys: number of examples that the attack never saw, drawn like the victims, and with the
            same labels.
        level: an attack counts only if `p_value` is at most this.
        replays: number of trainings on other unknown parts that were attacked, too, and compared
            instead, for who has so much of the examples that few decoys have the same.
        closer: without a test, whether a match is ten times closer than any guess without the
            update comes to any example; it counts then.
    """

    p_value: Probability | None
    decoys: Count
    level: Probability
    replays: Count = 0
    closer: bool = False

    @property
    def against(self) -> str:
        """What the matches are compared with."""
        if self.replays:
            return f"{self.replays} trainings on other unknown parts"
        return f"{self.decoys} example{'s' * (self.decoys != 1)} that the attack never saw"

    @property
    def excluded(self) -> bool:
        """Whether chance does not explain the matches."""
        return self.closer if self.p_value is None else self.p_value <= self.level


class Reidentification(RecordPart, frozen=True, kw_only=True):
    """Whether a matcher names the right person: "is it this one?", for each example.

    Attributes:
        matcher: "nearest", "edges", or the user's "module:callable".
        right: by example, whether it is named among `candidates`, of which it is one.
        candidates: M; all others are examples that the attack never saw, with the same label.
        counted: by example, whether it counts: of one person, and of near copies, the first alone.
            Empty if all do. The answers of those that count are independent.
        by_person: whether the true candidate is another example of the same person; otherwise it is
            the example itself.
        near: in how many galleries another candidate meets the criterion for the true one. Naming
            it counts as wrong.
        noise_multiplier: of the release, by which `bound` follows; None if no such bound is known.
        bound: no attacker and no matcher is right more often.
    """

    matcher: str
    right: tuple[bool, ...]
    candidates: Annotated[int, Meta(ge=2, le=2**63 - 1)]
    counted: tuple[bool, ...] = ()
    by_person: bool = False
    near: Count = 0
    noise_multiplier: Number | None = None
    bound: Probability | None = None

    def __post_init__(self) -> None:
        if self.counted and len(self.counted) != len(self.right):
            raise ValueError("right and counted differ in length")

    @property
    def answers(self) -> tuple[bool, ...]:
        """Whether each example that counts is named."""
        counted = self.counted or (True,) * len(self.right)
        return tuple(hit for hit, one in zip(self.right, counted, strict=True) if one)

    @property
    def how(self) -> str:
        """The matcher, and what it was asked for."""
        return f"{self.matcher} by person" if self.by_person else self.matcher


class Explained(RecordPart, frozen=True, kw_only=True):
    """How much of a captured update the reconstruction explains.

    `share`: at the reconstruction's length, None if the learning rate is not known. `direction`: at
    the best length, the squared cosine. `scale`: that length.
    """

    share: Number | None
    direction: Number | None
    scale: Number | None


class FindingInfo(RecordPart, frozen=True, kw_only=True):
    """Something inferred from a captured update: what, how, and whether it is certain."""

    name: str
    value: str
    how: str
    sure: bool


class ObstacleInfo(RecordPart, frozen=True, kw_only=True):
    """What stands between an update and an answer, and what would take it away."""

    what: str
    then: str


class CaptureInfo(RecordPart, frozen=True, kw_only=True):
    """The captured update behind an assessment.

    Attributes:
        truth: whether the true batch was given, so that errors are measured.
        undeclared: what was seen to change the update, but is no defense that can be declared.
        values: reconstructed values of inputs that are not pictures.
        obstacles: what keeps attacks from an answer, the most important first.
        measured: what was reconstructed from updates like this one.
        server: what a malicious server gets from other, simulated updates of such a training.
    """

    name: str
    kind: str
    digest: str
    truth: bool
    round: str | None = None
    client: str | None = None
    findings: tuple[FindingInfo, ...] = ()
    notes: tuple[str, ...] = ()
    undeclared: str | None = None
    explained: Explained | None = None
    values: tuple[tuple[Number, ...], ...] | None = None
    obstacles: tuple[ObstacleInfo, ...] = ()
    measured: str | None = None
    server: str | None = None


class Assessment(RecordPart, frozen=True, kw_only=True):
    """One attack on one update under one defense: what it reconstructed, and what bounds it.

    Attributes:
        experiment: its name; in an audit, the hash of its configuration.
        problem: why the attack reports its own failure. This is no evidence of safety.
        metrics: by name, one number per example in the order of the truth. Empty if the truth is
            not known, as is `baseline`, the score of the prior-only baseline.
        matched: by example, whether the criterion is met, the baseline is beaten and `chance` does
            not explain it.
        chance: how likely matches this good are without the update; None if the update proves the
            reconstruction, or if nothing was compared with the truth.
        reidentified: whether reconstructions name the right example of a gallery, by matcher.
        facts: what the update reveals though no example is reconstructed, what matters most first.
        certificate: why the reconstruction is certainly the input, if the update proves it.
        layer_input: why it is certainly what the first layer got, but may differ from the example.
        attained: success of a malicious server's best attack, if the noise is known.
        bounds_note: why bounds are missing.
        attackers: what the update adds for a stranger, for who has the known parts, and for anyone;
            empty if the release is not private.
        verdict: None if the attack does not apply.
    """

    schema: Literal[1] = SCHEMA
    experiment: str
    attack: AttackInfo
    defense: DefenseInfo
    model: ModelInfo
    data: DataInfo
    batch_size: Count
    clients: Count
    seed: Whole
    threat: Threat
    criterion: CriterionInfo
    status: Status = "ok"
    reason: str | None = None
    problem: str | None = None
    objective: ObjectiveValues | None = None
    release: ReleaseInfo | None = None
    metrics: dict[str, Values] = {}
    baseline: Values = ()
    matched: tuple[bool, ...] = ()
    bounds: tuple[Bound, ...] = ()
    attained: Attained | None = None
    bounds_note: str | None = None
    attackers: tuple[AttackerRow, ...] = ()
    verdict: Verdict | None = None
    pictures: dict[str, Picture] = {}
    features: Features | None = None
    columns: tuple[ColumnResult, ...] | None = None
    sequences: tuple[SequenceResult, ...] | None = None
    chance: Chance | None = None
    reidentified: tuple[Reidentification, ...] = ()
    facts: tuple[Fact, ...] = ()
    certificate: str | None = None
    layer_input: str | None = None
    capture: CaptureInfo | None = None

    def __post_init__(self) -> None:
        lengths = {len(values) for values in self.metrics.values()}
        lengths |= {len(one.right) for one in self.reidentified}
        if len(lengths | {len(self.baseline), len(self.matched)}) > 1 and (
            self.metrics or self.baseline or self.matched
        ):
            raise ValueError("metrics, baseline, matched and reidentified differ in length")

    @property
    def key(self) -> str:
        """The name of the record in its file."""
        return self.experiment

    @property
    def end(self) -> str:
        """How it ended: its verdict, "not_applicable" or "failed"."""
        return self.verdict or self.status if self.status == "ok" else self.status

    @property
    def truth_known(self) -> bool:
        """Whether errors were measured: always, except for captured updates without their batch."""
        return self.capture is None or self.capture.truth

    @property
    def scores(self) -> Values:
        """The criterion's score of every example; empty if the truth is not known."""
        return self.metrics.get(self.criterion.metric, ())


class Start(RecordPart, frozen=True, kw_only=True):
    """A search that started near the truth: the score before and after."""

    before: Decibels
    after: Decibels


class Witness(RecordPart, frozen=True, kw_only=True):
    """Another example with the same update as the truth.

    `score` says how far from the truth it is. `distance` is that of the two updates, in standard
    deviations of the noise or rounding. `error`: no test tells them apart with a smaller one.
    """

    score: Decibels
    distance: Number
    error: Probability | None


class Diagnosis(RecordPart, frozen=True, kw_only=True):
    """Why an experiment is undecided, by an auditor who knows the truth: no verdict.

    Attributes:
        experiment: the assessment that it belongs to.
        starts: searches from ever farther starts.
        radius: the lowest starting score from which a search came closer and met the threshold.
        noise: the unit of the conditioning: the known noise, or the update's own rounding.
        inputs: numbers in the batch.
        determined: how many of their directions the update determines to the threshold, as a range.
        expected: the score of an attacker with a Gaussian prior of public examples, as a range.
        note: why a test is missing.
    """

    schema: Literal[1] = SCHEMA
    experiment: str
    word: Why
    starts: tuple[Start, ...]
    radius: Decibels | None
    noise: Unit | None
    inputs: Count
    determined: tuple[Number, Number] | None
    expected: tuple[Decibels, Decibels] | None
    witness: Witness | None
    note: str | None = None

    @property
    def key(self) -> str:
        """The name of the record in its file."""
        return self.experiment

    @property
    def end(self) -> str:
        """How it ended: its word."""
        return self.word


class Reidentified(RecordPart, frozen=True, kw_only=True):
    """What further matchers found in the stored reconstructions of an experiment."""

    schema: Literal[1] = SCHEMA
    experiment: str
    found: tuple[Reidentification, ...]

    @property
    def key(self) -> str:
        """The name of the record in its file."""
        return self.experiment

    @property
    def end(self) -> str:
        """How it ended: the matchers that ran."""
        return ", ".join(one.matcher for one in self.found)


class Training(RecordPart, frozen=True, kw_only=True):
    """A short federated training under a defense: what the defense costs.

    Attributes:
        accuracy, balanced_accuracy, auc: on test examples; the last two see rare classes.
        majority: the accuracy of the best constant answer, which a model must beat.
        tested: number of answers behind them.
        auc_error: standard error of the AUC if the model learned nothing.
        curve: (round, training loss), the rounds rising.
        pruned: of a pruned model: the last round, with the mean bytes of a client's message over
            all rounds.
    """

    schema: Literal[1] = SCHEMA
    training: str
    defense: DefenseInfo
    model: ModelInfo
    seed: Whole
    rounds: Count
    optimizer: str
    status: Status = "ok"
    reason: str | None = None
    training_loss: Number | None = None
    accuracy: Number | None = None
    balanced_accuracy: Number | None = None
    majority: Probability | None = None
    tested: Count | None = None
    auc: Number | None = None
    auc_error: Number | None = None
    curve: tuple[tuple[Count, Number | None], ...] = ()
    pruned: RoundInfo | UnsetType = UNSET

    def __post_init__(self) -> None:
        rounds = [number for number, _ in self.curve]
        if any(a >= b for a, b in pairwise(rounds)):
            raise ValueError("the rounds of the curve do not rise")
        if self.status == "ok" and self.accuracy is None:
            raise ValueError("accuracy is missing")

    @property
    def key(self) -> str:
        """The name of the record in its file."""
        return self.training

    @property
    def end(self) -> str:
        """How it ended: "ok", "not_applicable" or "failed"."""
        return self.status


class DataFacts(RecordPart, frozen=True, kw_only=True):
    """The data of a run; `copies` were left out, `weights` are the digests of weight files."""

    source: str
    fingerprint: str
    examples: Count
    shape: tuple[Count, ...]
    classes: Count | None = None
    copies: Count = 0
    weights: dict[str, str] = msgspec.field(default_factory=dict)


class RunInfo(RecordPart, frozen=True, kw_only=True):
    """The content of `run.json`.

    `plan` has every list of values expanded. `code`: digests of the Python files that it names.
    `notes`: what was left out of the data, and what to check. `written_by`: the seal that
    `files.write` adds.
    """

    schema: Literal[1] = SCHEMA
    plan: Parameters
    plan_hash: str
    data: DataFacts
    code: dict[str, str] = msgspec.field(default_factory=dict)
    versions: dict[str, str]
    machine: dict[str, str | int]
    pictures: bool
    experiments: Count
    own_data: bool
    notes: tuple[str, ...] = ()
    written_by: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def name(self) -> str:
        return str(self.plan.get("name") or "audit")

    @property
    def fields(self) -> dict[str, Any]:
        return cast(dict[str, Any], msgspec.json.decode(msgspec.json.encode(self)))


Record = Assessment | Training
R = TypeVar("R", Assessment, Training, Diagnosis, Reidentified)
P = TypeVar("P", bound=RecordPart)
KEYS: dict[type[Record | Diagnosis | Reidentified], str] = {
    Assessment: "experiment",
    Training: "training",
    Diagnosis: "experiment",
    Reidentified: "experiment",
}
"""The field that identifies the kind of a record and of its file."""


def decode(line: bytes, kind: type[P]) -> P:
    """The record in a line; raises `Damage` if it holds none."""
    try:
        return msgspec.json.decode(line, type=kind)
    # A line may be nested thousands deep, by accident or on purpose.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damage(str(error)) from None


def encode(record: Record | Diagnosis | Reidentified) -> bytes:
    return files.encode(msgspec.to_builtins(record))


def read(path: Path, kind: type[R]) -> Iterator[R | Damage]:
    """The records of a file; for a damaged line, the `Damage` with the reason."""
    with files.opened(path) as stream:
        for line in stream:
            try:
                yield decode(line, kind)
            except Damage as damage:
                yield damage


def schema() -> dict[str, Any]:
    """The JSON schema of `Assessment`, `Training`, `Diagnosis` and `Reidentified`."""
    kinds = (Assessment, Training, Diagnosis, Reidentified)
    schemas, parts = msgspec.json.schema_components(kinds)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of records.jsonl, utility.jsonl, diagnosis.jsonl or reidentified.jsonl",
        "anyOf": list(schemas),
        "$defs": {name.removeprefix("#/$defs/"): cleaned(value) for name, value in parts.items()},
    }


def short(value: float | None) -> float | None:
    # JSON has neither NaN nor infinity.
    if value is None or value != value or value in (float("inf"), float("-inf")):
        return None
    return float(f"{value:.9g}")


def picture_name(content: bytes) -> str:
    """The name of a picture's file: the start of its content's SHA-256."""
    return f"{hashlib.sha256(content).hexdigest()[:16]}.png"


def is_picture(path: Path) -> bool:
    """Whether the file exists and its content matches its name."""
    try:
        return path.name == picture_name(files.read(path))
    except OSError:
        return False
