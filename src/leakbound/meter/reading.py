"""Measure on the client what one update reveals, and decide by the client's policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
import torch

from leakbound import check
from leakbound._util.results import Fact
from leakbound.assess import limits
from leakbound.assess.chance import halves
from leakbound.assess.criterion import Criterion
from leakbound.assess.facts import facts_of, together
from leakbound.assess.limits import ErrorBoundSpec
from leakbound.assess.measure import measure as compare
from leakbound.assess.record import (
    DISCLOSURES,
    EXPOSED,
    EXPOSURES,
    UNSETTLED,
    Bound,
    CriterionInfo,
    Verdict,
)
from leakbound.assess.released import Released, refuse_side_information
from leakbound.assess.sentences import of_fact
from leakbound.assess.success import RiskSpec, model_probability, sample_probability
from leakbound.assess.verdict import verdict
from leakbound.attacks import LinearInversion, infer_labels, label_accuracy
from leakbound.attacks.base import Attack
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
from leakbound.domains import Domain, of_shape
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
Values = tuple[float | None, ...]
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
        people: the largest number of one person's examples in an update, for that probability.
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
    people: int = 1
    error_bound: bool = False
    draws: int = 4
    directions: int = 2
    attacks: tuple[Attack, ...] = ()
    threat: ThreatModel = BLIND_TO_LABELS

    def __post_init__(self) -> None:
        check.positive(psnr=self.psnr, share=self.share)
        actions = {"on_leak": self.on_leak, "on_planted": self.on_planted}
        actions["on_facts"] = self.on_facts
        check.one_of(ACTIONS, **actions, on_undecided=self.on_undecided)
        check.one_of(REFUSALS, on_refuse=self.on_refuse)
        for kind in self.accepted:
            check.one_of(KINDS, accepted=kind)
        check.count(draws=self.draws, directions=self.directions, people=self.people)
        if self.draws < 2:
            raise ValueError("draws is 1; give at least 2, for a standard error")
        if self.probability is not None and not 0 < self.probability < 1:
            raise ValueError(f"probability is {self.probability!r}; give one between 0 and 1")
        if not isinstance(self.attacks, tuple):
            raise ValueError(f"attacks is a {type(self.attacks).__name__}; give a tuple of attacks")

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
        if verdict in EXPOSURES:
            rules.append((self.on_leak, f"{verdict}: {words}"))
        if verdict in DISCLOSURES:
            rules.append((self.on_facts, f"{verdict}: {words}"))
        if verdict in UNSETTLED:
            rules.append((self.on_undecided, f"{verdict}: {words}"))
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
    named = [rule for rule in rules if rule[0] != "ignore"]
    refused = any(action == "refuse" for action, _ in named)
    action = REFUSE if refused else WARN if named else SEND
    return Decision(action, tuple(words for _, words in named))


@dataclass(frozen=True)
class AttackOutcome:
    """The result of one attack on the update.

    Attributes:
        scores: of each example of the batch, such as its PSNR in dB; empty if the attack did not
            run, or without a batch.
        matched: for each example, whether it is reconstructed and better than the prior-only
            baseline.
        problem: what the attack itself reports as wrong, or why it could not run.
        facts: what the update reveals for certain.
    """

    attack: str
    scores: Values
    matched: tuple[bool, ...]
    problem: str | None
    seconds: float
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True)
class Reading:
    """What an update would reveal. It contains private data: it is only for the client.

    Attributes:
        verdict: one of `VERDICTS`.
        criterion: what counts as reconstructed.
        baseline: score of the prior-only baseline for each example.
        labels: share of the labels that the attacker infers correctly, None if it cannot infer any.
        findings: marks of a malicious model; none is no proof of safety.
        bounds: on all attackers.
        notes: why other bounds are missing, and what the present ones take as public.
        seconds: time of the whole measurement.
    """

    verdict: Verdict
    criterion: CriterionInfo
    decision: Decision
    outcomes: tuple[AttackOutcome, ...]
    baseline: Values
    labels: float | None
    findings: tuple[LayerFinding, ...]
    bounds: tuple[Bound, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def best(self) -> float | None:
        """The highest score of an attack on any example, in dB, or in percent of a table's columns.

        None if none could be evaluated.
        """
        known = (v for outcome in self.outcomes for v in outcome.scores if v is not None)
        return max(known, default=None)

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
    rules = defense or NoDefense(), policy or Policy()
    domain = task.domain or of_shape(shape, task.input_range)
    public, decoys = halves(task.public)
    seen = task if decoys is None else replace(task, public=public)
    case = _Case(seen, update, batch, domain, *rules, source, buffers, seeded, task.public, decoys)
    if findings is None:
        findings = inspect(task, input_shape=shape)
    return case.read(tuple(findings), began)


@dataclass(frozen=True, eq=False)
class _Case:
    """`task` holds the public examples that attacks may see; bounds count all of `public`."""

    task: Task
    update: Update
    batch: Batch | None
    domain: Domain
    defense: Chain
    policy: Policy
    source: torch.Generator
    buffers: bool
    seeded: bool
    public: Batch | None
    decoys: Batch | None

    @property
    def cohort(self) -> tuple[int, ...]:
        return (sum(self.update.examples) if self.batch is None else self.batch.size,)

    def read(self, findings: tuple[LayerFinding, ...], began: float) -> Reading:
        policy = self.policy
        seen = self.view()
        criterion = Criterion.of(self.domain, psnr=policy.psnr, share=policy.share)
        attacks = (LinearInversion(), PlantedLayer(), *policy.attacks)  # closed forms are cheap
        ran = [self.attacked(attack, seen, criterion) for attack in attacks]
        outcomes = tuple(outcome for outcome, _ in ran)
        baseline = next((found for _, found in ran if found), ())
        matched = [hit for outcome in outcomes for hit in outcome.matched]
        bounds, notes = self.bounds(criterion)
        revealed = together([fact for outcome in outcomes for fact in outcome.facts])
        found = verdict(matched, bounds, facts=revealed)
        words = _words(found, outcomes, criterion.info, self.domain.noun)
        if found in DISCLOSURES:
            words = "; ".join(map(of_fact, revealed[:SHOWN]))
        return Reading(
            verdict=found,
            criterion=criterion.info,
            decision=policy.decide(found, findings, words, self.doubt()),
            outcomes=outcomes,
            baseline=baseline,
            labels=_labels(seen, self.batch, self.source),
            findings=findings,
            bounds=bounds,
            notes=notes if findings else (*notes, NOT_SAFE),
            seconds=time.perf_counter() - began,
        )

    def view(self) -> Observation:
        threat = self.policy.threat
        batch = self.batch
        update = self.update
        return Observation(
            update=update.seen(defense_known=threat.defense_known),
            task=self.task,
            cohort=self.cohort,
            input_shape=self.domain.shape,
            threat=threat,
            labels=batch.labels.clone() if threat.labels_known and batch is not None else None,
            auxiliary=self.task.public,
            defense=self.defense if threat.defense_known else None,
        )

    def doubt(self) -> str | None:
        """Why the batch may not be the training batch, if nothing else changed the update."""
        batch = self.batch
        update = self.update
        plain = not self.defense.links and isinstance(update.law, Exact) and len(update.rows) == 1
        if batch is None or not plain:
            return None
        own = gradient(self.task, batch.inputs, batch.labels).detach().double()
        seen = update.rows[0].double()
        size = float(own.norm() * seen.norm())
        similar = float(own @ seen) / size if size > 0 else 1.0
        if similar >= SIMILAR:
            return None
        return (
            "the gradient of the given examples has another direction than the update (cosine "
            f"{similar:.2f}), so the attacks may be compared with the wrong ones: give examples as "
            "the model gets them (Adam, or many local steps, explain it too)"
        )

    def bounds(self, criterion: Criterion) -> tuple[tuple[Bound, ...], tuple[str, ...]]:
        """The available bounds, and why others are missing."""
        if self.seeded:
            return (), (EXPERIMENT,)
        policy = self.policy
        released = self.released(criterion)
        found: list[Bound] = []
        notes: list[str] = []
        try:
            refuse_side_information(released)
            why = self._why_no_probability()
            if why is not None:
                raise NotApplicable(why)
            asked = RiskSpec(policy.probability, people=policy.people)
            for of in (sample_probability, model_probability)[: 1 + self.domain.distance_is_rmse]:
                bound = of(released, asked)
                found += [] if bound is None else [bound]
        except NotApplicable as error:
            notes.append(f"no probability: {error.reason}")
        try:
            if not policy.error_bound:
                raise NotApplicable("the policy asks for none")
            public = self.public
            if public is not None and tuple(public.inputs.shape[1:]) != self.domain.shape:
                raise NotApplicable("the public examples and the batch differ in shape")
            spec = ErrorBoundSpec("trace", "isotropic", 1, policy.draws, policy.directions)
            bound = limits.error_bound(released, spec, self.source)
            found += [] if bound is None else [bound]
        except NotApplicable as error:
            notes.append(f"no bound on the error: {error.reason}")
        if found and self.defense.starts is Unit.EXAMPLE:
            notes.append(COUNTED)
        return tuple(found), tuple(notes)

    def released(self, criterion: Criterion) -> Released:
        """The release as bounds see it; labels count as known, since an update reveals them."""
        threat = replace(self.policy.threat, labels_known=True, statistics_known=self.buffers)
        return Released(
            task=self.task,
            update=self.update,
            defense=self.defense,
            criterion=criterion,
            threat=threat,
            cohort=self.cohort,
            batch=self.batch,
            public=self.public,
        )

    def _why_no_probability(self) -> str | None:
        if self.policy.probability is None:
            return "the policy accepts no probability"
        if not self.defense.links and not isinstance(self.update.law, Exact):
            return "no defense was given (defense=), though the update has noise"
        if self.defense.guarantee is not Guarantee.DIFFERENTIAL_PRIVACY:
            return "the defense gives no differential privacy"
        return None

    def attacked(
        self, attack: Attack, seen: Observation, criterion: Criterion
    ) -> tuple[AttackOutcome, Values]:
        began = time.perf_counter()
        scores = Values()
        baseline = Values()
        matched: tuple[bool, ...] = ()
        facts: tuple[Fact, ...] = ()
        try:
            answer = attack(seen, self.source)
            problem = answer.problem
            facts = facts_of(seen, answer, self.domain, self.task.public)
            if self.batch is not None:
                found = compare(
                    *(self.batch, answer, criterion, self.task.public),
                    quick=True,
                    decoys=self.decoys,
                )
                scores = found.metrics[self.domain.metric]
                matched = found.matched
                baseline = found.baseline
        except NotApplicable as error:
            problem = f"not applicable: {error.reason}"
        seconds = time.perf_counter() - began
        name = type(attack).__name__
        return AttackOutcome(name, scores, matched, problem, seconds, facts), baseline


def _labels(seen: Observation, batch: Batch | None, source: torch.Generator) -> float | None:
    """Share of the batch's labels that the attacker infers, as a multiset."""
    if batch is None:
        return None
    public = seen.auxiliary
    few = None if public is None else Batch(public.inputs[:STAND_INS], public.labels[:STAND_INS])
    try:
        found = infer_labels(replace(seen, auxiliary=few), source).cpu()
    except NotApplicable:
        return None
    return label_accuracy(found, batch.labels)


def _words(
    found: Verdict, outcomes: Sequence[AttackOutcome], criterion: CriterionInfo, noun: str
) -> str:
    values = [(v, o.attack) for o in outcomes for v in o.scores if v is not None]
    if not values:
        return "no attack could run and be evaluated, and no bound excludes a reconstruction"
    best, attack = max(values)
    words = f"{attack} reconstructs one {noun} to {criterion.shown(best)}"
    if found == EXPOSED:
        return f"{words}, and the threshold is {criterion.goal}"
    chance = ", which may be chance" if criterion.of and best >= criterion.value else ""
    return f"at best {words}{chance}, and no bound excludes {criterion.goal}"
