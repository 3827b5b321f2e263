"""Measure on the client what one update reveals, and decide by the client's policy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
import torch
from msgspec.structs import replace as replace_record

from leakbound import check
from leakbound.assess.chance import halves
from leakbound.assess.criterion import Criterion
from leakbound.assess.facts import together
from leakbound.assess.header import attack_info, defense_info, header, model_info
from leakbound.assess.judge import (
    OWN_TRAINING,
    Evidence,
    RiskSettings,
    judge,
    judge_given,
)
from leakbound.assess.limits import ErrorBoundSpec
from leakbound.assess.record import (
    CERTIFIED,
    DISCLOSURES,
    EXPOSED,
    EXPOSURES,
    ON_AVERAGE,
    UNSETTLED,
    Assessment,
    AttackInfo,
    Bound,
    CriterionInfo,
    Verdict,
)
from leakbound.assess.released import Released
from leakbound.assess.sentences import of_fact
from leakbound.assess.success import RiskSpec
from leakbound.assess.verdict import of_configuration
from leakbound.attacks import LinearInversion, infer_labels, label_accuracy
from leakbound.attacks.base import Attack
from leakbound.attacks.knowing import with_known
from leakbound.client import gradient
from leakbound.core import (
    Batch,
    Exact,
    Guarantee,
    NotApplicable,
    Observation,
    Task,
    ThreatModel,
    Unit,
    Update,
)
from leakbound.defenses import Chain, NoDefense
from leakbound.domains import of_shape
from leakbound.domains.known import KnownValues, as_marked
from leakbound.inspection import KINDS, NOT_SAFE, LayerFinding, inspect
from leakbound.meter.attacks import PlantedLayer

STAND_INS = 32
"""Public images whose outputs replace the batch's when labels are inferred."""
SHOWN = 3
"""How many facts a reason names."""
SIMILAR = 0.5
"""Cosine below which an undefended update is not the gradient of the given images."""
EXPERIMENT = "experiment only: the noise is seeded, and no bound holds against anyone with the seed"
COUNTED = (
    "the bounds take the number of examples as public: the defense divides by it, so the level of "
    "the noise reveals it"
)
MANY_TESTS = (
    "an attack matched an example, but several attacks are several tests, and the public examples "
    "are too few to exclude chance for all of them: give more"
)
NO_ATTACK = "none"
MEASURED = "measured update"
"""The name of what a meter measures, in its assessment."""
ACTIONS = ("ignore", "warn", "refuse")
REFUSALS = ("error", "send nothing useful")
SEND = "send"
WARN = "warn"
REFUSE = "refuse"

BLIND_TO_LABELS = ThreatModel(labels_known=False)


@dataclass(frozen=True)
class Policy:
    """The client's own rules. They stay on the client.

    Args:
        psnr: the PSNR in dB from which an example counts as reconstructed.
        share: of a table, the share of columns within tolerance from which a row does. Matches
            count only if chance does not explain them, by half of the task's public examples, which
            no attack sees.
        on_leak: what to do if an attack reaches it: "ignore", "warn" or "refuse".
        on_planted: the same if the server's model has the marks of a malicious one.
        accepted: kinds of marks (`inspection.KINDS`) that cause no action, such as "zeroed paths"
            if the agreed model is pruned.
        on_facts: the same if no attack reaches it, but the update reveals facts, such as words or
            values that are 0.
        on_undecided: the same if no attack reaches it and no bound excludes it.
        on_refuse: "error" answers that the client refuses, and nothing else; "send nothing useful"
            answers with the received weights, which hides the refusal only in a sum of many
            clients. For mods.
        probability: the largest accepted probability that an attacker reaches it under
            differential privacy; None: no such bound is computed. It holds for examples like the
            task's public ones, at least 64.
        people: the largest number of one person's examples in an update, for that probability;
            None is 1.
        error_bound: whether to estimate the Cramér-Rao bound on the error. It is shown, but decides
            nothing.
        draws: draws of the prior over which the bound's information is averaged.
        directions: random directions for each draw; fewer are cheaper.
        attacks: attacks to run in addition to the closed-form ones, at their own cost.
        threat: what the attacker knows.

    Example:
        >>> Policy(on_leak="refused")
        Traceback (most recent call last):
        ...
        ValueError: on_leak is 'refused'; did you mean 'refuse'? (known: ignore, refuse, warn)
    """

    psnr: float = 20.0
    share: float = 0.9
    on_leak: str = "warn"
    on_planted: str = "refuse"
    accepted: tuple[str, ...] = ()
    on_facts: str = "warn"
    on_undecided: str = "ignore"
    on_refuse: str = "error"
    probability: float | None = 0.001
    people: int | None = None
    error_bound: bool = False
    draws: int = 4
    directions: int = 2
    attacks: tuple[Attack, ...] = ()
    threat: ThreatModel = BLIND_TO_LABELS

    def __post_init__(self) -> None:
        check.positive(psnr=self.psnr, share=self.share)
        check.one_of(ACTIONS, on_leak=self.on_leak, on_planted=self.on_planted)
        check.one_of(
            ACTIONS,
            on_facts=self.on_facts,
            on_undecided=self.on_undecided,
        )
        check.one_of(REFUSALS, on_refuse=self.on_refuse)
        for kind in self.accepted:
            check.one_of(KINDS, accepted=kind)
        check.count(
            draws=self.draws,
            directions=self.directions,
        )
        check.given(check.count, people=self.people)
        if self.draws < 2:
            raise ValueError("draws is 1; give at least 2, for a standard error")
        if self.probability is not None and not 0 < self.probability < 1:
            raise ValueError(f"probability is {self.probability!r}; give one between 0 and 1")
        if not isinstance(self.attacks, tuple):
            raise ValueError(f"attacks is a {type(self.attacks).__name__}; give a tuple of attacks")

    @property
    def bounded(self) -> ErrorBoundSpec:
        """The lower bounds on the error: those that cost nothing, or also an estimate."""
        if not self.error_bound:
            return ErrorBoundSpec("sample")
        return ErrorBoundSpec("trace", "isotropic", 1, self.draws, self.directions)

    def before(self, findings: Sequence[LayerFinding]) -> Decision:
        """The decision about the model that the server sent, before any training."""
        return _strictest(self._rules(findings))

    def decide(
        self,
        verdict: Verdict,
        findings: Sequence[LayerFinding],
        words: str,
        doubt: str | None = None,
    ) -> Decision:
        """The decision about an update; `words` support the verdict, `doubt` questions it."""
        rules = self._rules(findings)
        if doubt is not None:
            rules.append((WARN, doubt))
        actions = (
            (EXPOSURES, self.on_leak),
            (DISCLOSURES, self.on_facts),
            ((*UNSETTLED, ON_AVERAGE), self.on_undecided),  # a mean excludes no single example
        )
        rules += [(action, f"{verdict}: {words}") for some, action in actions if verdict in some]
        return _strictest(rules)

    def _rules(self, findings: Sequence[LayerFinding]) -> list[tuple[str, str]]:
        return [
            (self.on_planted, f"the server's model looks malicious ({mark.kind}): {mark.words}")
            for mark in findings
            if mark.kind not in self.accepted
        ]


@dataclass(frozen=True)
class Decision:
    """Whether the update leaves ("send", "warn", "refuse"), with reasons for the client."""

    action: str
    reasons: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """Whether nothing may leave."""
        return self.action == REFUSE


def _strictest(rules: list[tuple[str, str]]) -> Decision:
    reasons = tuple(words for action, words in rules if action != "ignore")
    if not reasons:
        return Decision(SEND)
    refused = any(action == REFUSE for action, _ in rules)
    return Decision(REFUSE if refused else WARN, reasons)


@dataclass(frozen=True)
class Reading:
    """What an update would reveal. It contains private data: it is only for the client.

    Attributes:
        verdict: one of `VERDICTS`, on all attacks together.
        assessments: of the update without an attack, with the bounds on all attackers; then of
            every attack.
        labels: share of the labels that the attacker infers correctly, None if it cannot infer any.
        findings: marks of a malicious model; none is no proof of safety.
        notes: why other bounds are missing, and what the present ones take as public.
        seconds: time of the whole measurement.
    """

    verdict: Verdict
    decision: Decision
    assessments: tuple[Assessment, ...]
    labels: float | None
    findings: tuple[LayerFinding, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def criterion(self) -> CriterionInfo:
        """What counts as reconstructed."""
        return self.assessments[0].criterion

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """Bounds on all attackers."""
        return self.assessments[0].bounds

    @property
    def best(self) -> float | None:
        """The highest score of an attack on any example, in dB, or in percent of a table's columns.

        None if none could be evaluated.
        """
        scores = [score for one in self.assessments for score in one.scores]
        return max((score for score in scores if score is not None), default=None)

    def release(self) -> dict[str, float]:
        """The few numbers that the client may send to a server. They depend on private data.

        "released-exposed" (0 or 1), "released-refused" (0 or 1) and "released-best" (to whole
        decibels, or percent of columns; 0 if no attack ran).
        """
        return {
            "released-exposed": float(self.verdict in EXPOSURES),
            "released-refused": float(self.decision.refused),
            "released-best": float(round(self.best or 0.0)),
        }

    def record(self) -> dict[str, Any]:
        """The whole reading as plain values, for the client's own log."""
        return cast(dict[str, Any], msgspec.to_builtins(self))


def measure(
    task: Task,
    update: Update,
    *,
    source: torch.Generator,
    batch: Batch | None = None,
    defense: Chain | None = None,
    policy: Policy | None = None,
    findings: Sequence[LayerFinding] | None = None,
    input_shape: tuple[int, ...] | None = None,
    buffers: bool = False,
    seeded: bool = False,
) -> Reading:
    """Attack and bound an update before it leaves, and decide by the policy.

    The attacks see what a server would see; only their answers are compared with the client's
    batch.

    Args:
        task: the model as the server sent it.
        update: what leaves, with its distribution, in gradient units.
        source: draws of attacks and of bounds.
        batch: the training batch. None: attacks cannot be evaluated, and only marks and bounds
            count.
        defense: what made the update, resolved.
        policy: the client's rules.
        findings: of `inspect`; None inspects the model here, on the task's public images only.
        input_shape: of one example, if there is no batch.
        buffers: running statistics leave with the update.
        seeded: the noise comes from a seed, for an experiment: no bound is given.

    Raises:
        ValueError: neither a batch nor an input shape is given; the batch is outside the task's
            input range.

    Example:
        >>> from leakbound import models, protocol, randomness
        >>> weights = randomness.stream(0, "model")
        >>> net = models.mlp(input_shape=(1, 6, 6), classes=3, generator=weights)
        >>> task, source = Task.of(net, classes=3), randomness.stream(0, "batch")
        >>> batch = Batch(randomness.uniform((1, 1, 6, 6), source), torch.tensor([2]))
        >>> update = protocol.send(task, batch, NoDefense(), source)
        >>> reading = measure(task, update, batch=batch, source=source)
        >>> reading.verdict, reading.decision.action, reading.labels
        ('exposed', 'warn', 1.0)
    """
    began = time.perf_counter()
    shape = tuple(batch.inputs.shape[1:]) if batch is not None else input_shape
    if shape is None:
        raise ValueError("batch and input_shape are None; give the shape of one example")
    if batch is not None:
        check.within("inputs", batch.inputs, task.input_range)
    defense = defense or NoDefense()
    policy = policy or Policy()
    if findings is None:
        findings = inspect(task, input_shape=shape)
    findings = tuple(findings)
    evidence = _evidence(task, update, batch, shape, defense, policy, buffers, seeded)
    seen = evidence.observation
    settings = RiskSettings(
        policy.bounded,
        RiskSpec(policy.probability, people=policy.people),
        quick=True,
        pictures=False,
    )
    # Without an attack first: its bounds stand even if no attack applies to the model.
    records = [judge(evidence, settings)[0]]
    doubts = [_doubt(task, update, batch, defense)]
    closed_forms = (LinearInversion(), PlantedLayer())
    # An attack that is named twice is one test, not two.
    attacks = {attack_info(attack): attack for attack in (*closed_forms, *policy.attacks)}
    for about, attack in attacks.items():
        record = replace_record(evidence.record, attack=about)
        try:
            answer = with_known(seen, attack(seen, source))
            attacked = replace(
                evidence,
                record=record,
                attack=attack,
                reconstruction=answer,
            )
            record, _, doubt = judge_given(attacked, settings)
            doubts.append(doubt)
        except NotApplicable as error:
            record = replace_record(
                record,
                status="not_applicable",
                reason=error.reason,
            )
        records.append(record)
    # Several attacks are several tests: together they have the level of one.
    verdict = of_configuration(records)
    if verdict != EXPOSED and any(one.verdict == EXPOSED for one in records):
        doubts.append(MANY_TESTS)
    facts = together([fact for one in records for fact in one.facts])
    words = _words(verdict, records, evidence.release.criterion.domain.noun)
    if verdict in DISCLOSURES:
        words = "; ".join(map(of_fact, facts[:SHOWN]))
    doubt = "; ".join(filter(None, doubts)) or None
    return Reading(
        verdict=verdict,
        decision=policy.decide(verdict, findings, words, doubt),
        assessments=tuple(records),
        labels=_labels(seen, batch, source),
        findings=findings,
        notes=tuple(_notes(evidence, records[0], findings)),
        seconds=time.perf_counter() - began,
    )


def _evidence(
    task: Task,
    update: Update,
    batch: Batch | None,
    shape: tuple[int, ...],
    defense: Chain,
    policy: Policy,
    buffers: bool,
    seeded: bool,
) -> Evidence:
    """The update without an attack. Attacks see half of the public examples, bounds count all."""
    domain = task.domain or of_shape(shape, task.input_range)
    half, decoys = halves(task.public)
    threat = replace(policy.threat, known=as_marked(domain, policy.threat.known))
    criterion = Criterion.of(domain, psnr=policy.psnr, share=policy.share, known=threat.known)
    known = None
    if criterion.known is not None and batch is not None:
        known = KnownValues(criterion.known, criterion.known.values(batch.inputs))
    seen = Observation(
        update=update.seen(defense_known=threat.defense_known),
        task=replace(task, domain=domain, public=half),
        cohort=(sum(update.examples) if batch is None else batch.size,),
        input_shape=domain.shape,
        threat=threat,
        labels=batch.labels.clone() if threat.labels_known and batch is not None else None,
        auxiliary=half,
        defense=defense if threat.defense_known else None,
        known=known,
    )
    release = Released(
        task=seen.task,
        update=update,
        defense=defense,
        criterion=criterion,
        # Nobody knows what a server has: bounds cover one that knows the labels.
        threat=replace(threat, labels_known=True, statistics_known=buffers),
        cohort=seen.cohort,
        batch=batch,
        public=task.public,
    )
    record = header(
        MEASURED,
        AttackInfo(name=NO_ATTACK, settings="", hash="none"),
        defense_info(defense),
        model_info(type(task.model).__name__, task),
        seen,
        criterion,
        source=MEASURED,
        seed=0,
    )
    return Evidence(
        record,
        seen,
        release,
        truth=batch,
        public=half,
        decoys=decoys,
        certain=OWN_TRAINING,
        unbounded=EXPERIMENT if seeded else None,
    )


def _doubt(
    task: Task,
    update: Update,
    batch: Batch | None,
    defense: Chain,
) -> str | None:
    """Why the batch may not be the training batch, if nothing else changed the update."""
    plain = not defense.links and isinstance(update.law, Exact) and len(update.rows) == 1
    if batch is None or not plain:
        return None
    expected = gradient(task, batch.inputs, batch.labels).detach().double()
    seen = update.rows[0].double()
    size = float(expected.norm() * seen.norm())
    similar = float(expected @ seen) / size if size > 0 else 1.0
    if similar >= SIMILAR:
        return None
    return (
        "the gradient of the given examples has another direction than the update (cosine "
        f"{similar:.2f}), so the attacks may be compared with the wrong ones: give examples as "
        "the model gets them (Adam, or many local steps, explain it too)"
    )


def _notes(
    evidence: Evidence,
    record: Assessment,
    findings: Sequence[LayerFinding],
) -> Iterator[str]:
    """Why bounds are missing, and what the present ones take as public."""
    defense = evidence.release.defense
    if record.bounds_note is not None:
        yield record.bounds_note
    private = defense.guarantee is Guarantee.DIFFERENTIAL_PRIVACY
    if evidence.unbounded is None and not private:
        why = "the defense gives no differential privacy"
        if not defense.links and not isinstance(evidence.release.update.law, Exact):
            why = "no defense was given (defense=), though the update has noise"
        yield f"no probability: {why}"
    if record.bounds and defense.starts is Unit.EXAMPLE:
        yield COUNTED
    if not findings:
        yield NOT_SAFE


def _labels(
    seen: Observation,
    batch: Batch | None,
    source: torch.Generator,
) -> float | None:
    """Share of the batch's labels that the attacker infers, as a multiset."""
    if batch is None:
        return None
    public = seen.auxiliary
    few = None if public is None else Batch(public.inputs[:STAND_INS], public.labels[:STAND_INS])
    try:
        return label_accuracy(
            infer_labels(replace(seen, auxiliary=few), source).cpu(), batch.labels
        )
    except NotApplicable:
        return None


def _words(
    verdict: Verdict,
    records: Sequence[Assessment],
    noun: str,
) -> str:
    criterion = records[0].criterion
    certificates = [one.certificate for one in records if one.certificate is not None]
    if verdict == CERTIFIED and certificates:
        return certificates[0]
    values = [(v, one.attack.name) for one in records for v in one.scores if v is not None]
    if not values:
        return "no attack could run and be evaluated, and no bound excludes a reconstruction"
    best, attack = max(values)
    words = f"{attack} reconstructs one {noun} to {criterion.shown(best)}"
    if verdict == EXPOSED:
        return f"{words}, and the threshold is {criterion.goal}"
    chance = ", which may be chance" if criterion.of and best >= criterion.value else ""
    return f"at best {words}{chance}, and no bound excludes {criterion.goal}"
