"""What one update gives away, measured on the client that made it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import torch

from leakbound import check
from leakbound.assess.criterion import Criterion
from leakbound.assess.measure import Measured
from leakbound.assess.measure import measure as compare
from leakbound.assess.record import EXPOSED, Bound, Verdict
from leakbound.assess.verdict import verdict
from leakbound.attacks import infer_labels
from leakbound.attacks.base import Attack
from leakbound.client import gradient
from leakbound.defenses import Chain, NoDefense
from leakbound.domains import of_shape
from leakbound.inspection import NOT_SAFE, LayerFinding, inspect
from leakbound.meter.attacks import cheap_attacks
from leakbound.meter.policy import Decision, Policy
from leakbound.risk import limits
from leakbound.risk.limits import ErrorBoundSpec, RiskSpec
from leakbound.types import Batch, Exact, Guarantee, NotApplicable, Observation, Task, Update

STAND_INS = 32
"""Public images whose outputs stand in for the batch's when labels are inferred."""
SIMILAR = 0.5
"""Cosine under which an undefended update is not the gradient of the images that were shown."""
EXPERIMENT = "experiment only: the noise is seeded, and no bound holds for who has the seed"
Values = tuple[float | None, ...]


@dataclass(frozen=True)
class AttackOutcome:
    """What one attack made of the update.

    Attributes:
        psnr: dB of each image of the batch; empty where the attack did not run, or without a batch.
        matched: by image, whether it is reconstructed and better than the prior-only baseline.
        problem: what the attack itself says is wrong, or why it could not run.
    """

    attack: str
    psnr: Values
    matched: tuple[bool, ...]
    problem: str | None
    seconds: float


@dataclass(frozen=True)
class Reading:
    """What an update would give away. It is made of private data: it is for the client alone.

    Attributes:
        verdict: "exposed", "protected", "protected on average" or "undecided".
        psnr: from which an image counts as reconstructed.
        baseline: PSNR of the prior-only baseline for each image.
        labels: share of the labels that the attacker infers right, None where it cannot.
        findings: marks of a malicious model; none is no proof of safety.
        bounds: on all attackers. `notes`: why others are not there.
        seconds: time of the whole measurement.
    """

    verdict: Verdict
    psnr: float
    decision: Decision
    outcomes: tuple[AttackOutcome, ...]
    baseline: Values
    labels: float | None
    findings: tuple[LayerFinding, ...]
    bounds: tuple[Bound, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def best_db(self) -> float | None:
        """The highest PSNR that an attack reached on any image; None where none could be judged."""
        known = [v for outcome in self.outcomes for v in outcome.psnr if v is not None]
        return max(known, default=None)

    def release(self) -> dict[str, float]:
        """The few numbers to give to a server, knowingly. They depend on private data.

        "released-exposed" (0 or 1), "released-refused" (0 or 1) and "released-best-db" (to whole
        decibels; 0 where no attack ran).
        """
        return {
            "released-exposed": float(self.verdict == EXPOSED),
            "released-refused": float(self.decision.refused),
            "released-best-db": float(round(self.best_db or 0.0)),
        }

    def record(self) -> dict[str, Any]:
        """All of it as plain values, for the client's own log."""
        decision = {"action": self.decision.action, "reasons": self.decision.reasons}
        found = {f.name: getattr(self, f.name) for f in fields(self)} | {"decision": decision}
        plain: dict[str, Any] = msgspec.to_builtins(found)
        return plain


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
    """Attack and bound what is about to leave, and decide by the policy.

    The attacks see what a server would see; only their answers meet the client's batch.

    Args:
        task: the model as the server sent it.
        update: what leaves, with its law, in gradient units.
        source: draws of attacks and of bounds; nothing of it leaves.
        batch: what was trained on. None: attacks cannot be judged, and only marks and bounds count.
        defense: what made the update, resolved; None for none.
        policy: the client's rules.
        findings: of `inspect`, where the model was inspected before; None inspects it here, on the
            task's public images alone.
        input_shape: of one image, where there is no batch.
        buffers: running statistics leave beside the update.
        seeded: the noise comes from a seed, for an experiment: no bound is given.

    Raises:
        ValueError: neither a batch nor an input shape; a batch outside of the task's input range,
            which no attack could be judged by.

    Example:
        >>> from leakbound import models
        >>> from leakbound.protocol import send
        >>> from leakbound.random import stream, uniform
        >>> net = models.mlp(input_shape=(1, 6, 6), classes=3, generator=stream(0, "model"))
        >>> task = Task.of(net, classes=3)
        >>> batch = Batch(uniform((1, 1, 6, 6), stream(0, "batch")), torch.tensor([2]))
        >>> update = send(task, batch, NoDefense(), stream(0, "noise"))
        >>> reading = measure(task, update, batch=batch, source=stream(0))
        >>> reading.verdict, reading.decision.action, reading.labels
        ('exposed', 'warn', 1.0)
    """
    began = time.perf_counter()
    shape = tuple(batch.inputs.shape[1:]) if batch is not None else input_shape
    if shape is None:
        raise ValueError("batch and input_shape are None; give the shape of one image, (C, H, W)")
    if batch is not None:
        check.within("inputs", batch.inputs, task.input_range)
    case = _Case(task, update, batch, shape, defense or NoDefense(), policy or Policy(), source)
    case = replace(case, buffers=buffers, seeded=seeded)
    if findings is None:
        findings = inspect(task, input_shape=shape)
    return case.read(tuple(findings), began)


@dataclass(frozen=True, eq=False)
class _Case:
    """One update that is about to leave, and all that the client knows of it."""

    task: Task
    update: Update
    batch: Batch | None
    shape: tuple[int, ...]
    defense: Chain
    policy: Policy
    source: torch.Generator
    buffers: bool = False
    seeded: bool = False

    def read(self, findings: tuple[LayerFinding, ...], began: float) -> Reading:
        """Attack, bound, judge and decide."""
        policy, seen = self.policy, self.view()
        criterion = Criterion.of_psnr(policy.psnr, of_shape(self.shape, self.task.input_range))
        attacks = (*cheap_attacks(), *policy.attacks)
        outcomes, baseline = [], Values()
        for attack in attacks:
            outcome, of_baseline = self.attacked(attack, seen, criterion)
            outcomes.append(outcome)
            baseline = baseline or of_baseline
        matched = [hit for outcome in outcomes for hit in outcome.matched]
        bounds, notes = self.bounds(criterion, exposed=any(matched))
        found = verdict(matched, bounds)
        words = _words(found, outcomes, policy)
        return Reading(
            verdict=found,
            psnr=policy.psnr,
            decision=policy.decide(found, findings, words, self.doubt()),
            outcomes=tuple(outcomes),
            baseline=baseline,
            labels=_labels(seen, self.batch, self.source),
            findings=findings,
            bounds=bounds,
            notes=notes if findings else (*notes, NOT_SAFE),
            seconds=time.perf_counter() - began,
        )

    def view(self) -> Observation:
        """What the server sees of this client."""
        threat, batch, update = self.policy.threat, self.batch, self.update
        return Observation(
            update=update.seen(defense_known=threat.defense_known),
            task=self.task,
            cohort=(sum(update.examples) if batch is None else batch.size,),
            input_shape=self.shape,
            threat=threat,
            labels=batch.labels.clone() if threat.labels_known and batch is not None else None,
            auxiliary=self.task.public,
            defense=self.defense if threat.defense_known else None,
        )

    def doubt(self) -> str | None:
        """Why the batch may not be what was trained on, where nothing else changed the update."""
        batch, update = self.batch, self.update
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
            f"the gradient of the images that were shown points elsewhere than the update (cosine "
            f"{similar:.2f}), so the attacks may be judged by the wrong images: show them as the "
            "model is fed (Adam, or many local steps, explain it too)"
        )

    def bounds(
        self, criterion: Criterion, *, exposed: bool
    ) -> tuple[tuple[Bound, ...], tuple[str, ...]]:
        """The bounds that there are, and why others are not."""
        if self.seeded:
            return (), (EXPERIMENT,)
        policy, released = self.policy, self.released(criterion)
        found: list[Bound] = []
        notes: list[str] = []
        try:
            limits.refuse_side_information(released)
            why = self._why_no_probability()
            if why is not None:
                raise NotApplicable(why)
            bound = limits.probability(released, RiskSpec(policy.probability))
            found += [] if bound is None else [bound]
        except NotApplicable as error:
            notes.append(f"no probability: {error.reason}")
        idle = "the policy asks for none" if policy.error_bound == "never" else None
        if policy.error_bound == "needed":
            settled = exposed or any(bound.excludes_threshold for bound in found)
            idle = "the verdict is settled without" if settled else None
            idle = idle or limits.why_no_error_bound(released)
        try:
            if idle is not None:
                raise NotApplicable(idle)
            public = self.task.public
            if public is not None and tuple(public.inputs.shape[1:]) != self.shape:
                raise NotApplicable("the public examples have another shape than the batch's")
            spec = ErrorBoundSpec("trace", "isotropic", 1, policy.draws, policy.directions)
            bound = limits.error_bound(released, spec, self.source)
            found += [] if bound is None else [bound]
        except NotApplicable as error:
            notes.append(f"no bound on the error: {error.reason}")
        return tuple(found), tuple(notes)

    def released(self, criterion: Criterion) -> limits.Released:
        """The release as bounds see it; labels count as known, since an update reveals them."""
        threat = replace(self.policy.threat, labels_known=True, statistics_known=self.buffers)
        cohort = (sum(self.update.examples) if self.batch is None else self.batch.size,)
        return limits.Released(
            task=self.task,
            update=self.update,
            defense=self.defense,
            criterion=criterion,
            threat=threat,
            cohort=cohort,
            batch=self.batch,
            public=self.task.public,
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
        """Run one attack; where the batch is at hand, measure its answer and the baseline."""
        began, name = time.perf_counter(), type(attack).__name__

        def outcome(problem: str | None, found: Measured | None = None) -> AttackOutcome:
            seconds = time.perf_counter() - began
            if found is None:
                return AttackOutcome(name, (), (), problem, seconds)
            return AttackOutcome(name, found.metrics["psnr"], found.matched, problem, seconds)

        try:
            answer = attack(seen, self.source)
        except NotApplicable as error:
            return outcome(f"not applicable: {error.reason}"), ()
        if self.batch is None:
            return outcome(answer.problem), ()
        found = compare(self.batch, answer, criterion, self.task.public, quick=True)
        return outcome(answer.problem, found), found.baseline


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
    size = int(max(int(found.max()), int(batch.labels.max()))) + 1
    both = torch.minimum(
        torch.bincount(found, minlength=size),
        torch.bincount(batch.labels.cpu(), minlength=size),
    )
    return float(both.sum()) / batch.size


def _words(found: Verdict, outcomes: Sequence[AttackOutcome], policy: Policy) -> str:
    """What the verdict rests on."""
    best = max(
        ((v, o.attack) for o in outcomes for v in o.psnr if v is not None),
        default=(None, "no attack"),
    )
    if best[0] is None:
        return "no attack could be run and judged, and no bound excludes a reconstruction"
    words = f"{best[1]} reconstructs an image at {best[0]:.1f} dB"
    if found == EXPOSED:
        return f"{words}, and the threshold is {policy.psnr:g} dB"
    return f"at best {words}, and no bound excludes {policy.psnr:g} dB"
