"""What one update gives away, measured on the client that made it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from leakbound import check, metrics
from leakbound.attacks import infer_labels
from leakbound.attacks.base import Attack
from leakbound.client import gradient
from leakbound.defenses import Chain, NoDefense
from leakbound.inspection import NOT_SAFE, LayerFinding, inspect
from leakbound.meter.attacks import cheap_attacks
from leakbound.meter.limits import Limit, probability, told_beside, trace_bound, useless_floor
from leakbound.meter.policy import EXPOSED, Decision, Policy, judge
from leakbound.pairing import pair
from leakbound.types import Batch, Exact, NotApplicable, Observation, Reconstruction, Task, Update

STAND_INS = 32
"""Public images whose outputs stand in for the batch's when labels are inferred."""
ALIKE = 0.5
"""Cosine under which an undefended update is not the gradient of the images that were shown."""
EXPERIMENT = "experiment only: the noise is seeded, and no bound holds for who has the seed"
Values = tuple[float | None, ...]


@dataclass(frozen=True)
class Outcome:
    """What one attack made of the update.

    Attributes:
        psnr: dB of each image of the batch; empty where the attack did not run, or without a batch.
        problem: what the attack itself says is wrong, or why it could not run.
    """

    attack: str
    psnr: Values
    problem: str | None
    seconds: float


@dataclass(frozen=True)
class Reading:
    """What an update would give away. It is made of private data: it is for the client alone.

    Attributes:
        verdict: "exposed", "protected", "protected on average" or "undecided".
        blind: PSNR of the guess that sees no update, for each image.
        labels: share of the labels that the attacker infers right, None where it cannot.
        findings: marks of a planted model; none is no proof of safety.
        limits: bounds on all attackers. `notes`: why others are not there.
        seconds: time of the whole measurement.
    """

    verdict: str
    threshold_db: float
    decision: Decision
    outcomes: tuple[Outcome, ...]
    blind: Values
    labels: float | None
    findings: tuple[LayerFinding, ...]
    limits: tuple[Limit, ...]
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
        return {
            "verdict": self.verdict,
            "threshold_db": self.threshold_db,
            "action": self.decision.action,
            "reasons": list(self.decision.reasons),
            "attacks": [
                {
                    "attack": o.attack,
                    "psnr": [_short(v) for v in o.psnr],
                    "problem": o.problem,
                    "seconds": _short(o.seconds),
                }
                for o in self.outcomes
            ],
            "blind": [_short(v) for v in self.blind],
            "labels": _short(self.labels),
            "findings": [
                {"layer": f.layer, "kind": f.kind, "strength": _short(f.strength), "words": f.words}
                for f in self.findings
            ],
            "limits": [
                {
                    "name": limit.name,
                    "value": _short(limit.value),
                    "psnr": _short(limit.psnr),
                    "excludes": limit.excludes,
                    "on_average": limit.on_average,
                    "covers": limit.covers,
                    "words": limit.words,
                }
                for limit in self.limits
            ],
            "notes": list(self.notes),
            "seconds": _short(self.seconds),
        }


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
        source: draws of attacks and of the floor; nothing of it leaves.
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
        attacks = (*cheap_attacks(), *policy.attacks)
        outcomes = tuple(_attacked(a, seen, self.batch, self.source) for a in attacks)
        blind = _blind(self.task, self.batch)
        pairs = [(v, b) for o in outcomes for v, b in zip(o.psnr, blind, strict=False)]
        values, others = [v for v, _ in pairs], [b for _, b in pairs]
        limits, notes = self.limits(
            judge(values, others, policy.threshold_db, excluded=False, on_average=False) == EXPOSED
        )
        verdict = judge(
            values,
            others,
            policy.threshold_db,
            excluded=any(limit.excludes for limit in limits),
            on_average=any(limit.on_average for limit in limits),
        )
        words = _words(verdict, outcomes, policy)
        return Reading(
            verdict=verdict,
            threshold_db=policy.threshold_db,
            decision=policy.decide(verdict, findings, words, self.doubt()),
            outcomes=outcomes,
            blind=blind,
            labels=_labels(seen, self.batch, self.source),
            findings=findings,
            limits=limits,
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
        alike = float(own @ seen) / size if size > 0 else 1.0
        if alike >= ALIKE:
            return None
        return (
            f"the gradient of the images that were shown points elsewhere than the update (cosine "
            f"{alike:.2f}), so the attacks may be judged by the wrong images: show them as the "
            "model is fed (Adam, or many local steps, explain it too)"
        )

    def limits(self, exposed: bool) -> tuple[tuple[Limit, ...], tuple[str, ...]]:
        """The bounds that there are, and why others are not."""
        task, update, batch, policy = self.task, self.update, self.batch, self.policy
        found: list[Limit] = []
        notes: list[str] = []
        if self.seeded:
            return (), (EXPERIMENT,)
        try:
            told_beside(task, self.buffers)
        except NotApplicable as error:
            return (), (error.reason,)
        try:
            found.append(probability(task, update, batch, self.shape, self.defense, policy))
        except NotApplicable as error:
            notes.append(f"no probability: {error.reason}")
        idle = "the policy asks for none" if policy.floor == "never" else None
        if policy.floor == "needed":
            settled = exposed or any(limit.excludes for limit in found)
            idle = "the verdict is settled without" if settled else None
            idle = idle or useless_floor(task, update, batch, self.defense)
        try:
            if idle is not None:
                raise NotApplicable(idle)
            floor = trace_bound(task, update, batch, self.shape, self.defense, policy, self.source)
            found.append(floor)
        except NotApplicable as error:
            notes.append(f"no floor: {error.reason}")
        return tuple(found), tuple(notes)


def _attacked(
    attack: Attack, seen: Observation, batch: Batch | None, source: torch.Generator
) -> Outcome:
    """Run one attack and, where the truth is at hand, pair its answer with it."""
    began, name = time.perf_counter(), type(attack).__name__
    try:
        answer = attack(seen, source)
    except NotApplicable as error:
        return Outcome(name, (), f"not applicable: {error.reason}", time.perf_counter() - began)
    psnr = () if batch is None else _psnr(seen.task, batch, answer)
    return Outcome(name, psnr, answer.problem, time.perf_counter() - began)


def _psnr(task: Task, batch: Batch, answer: Reconstruction) -> Values:
    low, high = task.input_range
    return tuple(metrics.psnr(pair(batch, answer), data_range=high - low))


def _blind(task: Task, batch: Batch | None) -> Values:
    """PSNR of the guess that sees no update: the mean public image, or mid-gray."""
    if batch is None:
        return ()
    low, high = task.input_range
    public = task.public
    if public is not None and public.inputs.shape[1:] == batch.inputs.shape[1:]:
        guess = public.inputs.mean(0).to(batch.inputs)
    else:
        guess = torch.full_like(batch.inputs[0], (low + high) / 2)
    return _psnr(task, batch, Reconstruction(guess.expand_as(batch.inputs).clone()))


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


def _words(verdict: str, outcomes: Sequence[Outcome], policy: Policy) -> str:
    """What the verdict rests on."""
    best = max(
        ((v, o.attack) for o in outcomes for v in o.psnr if v is not None),
        default=(None, "no attack"),
    )
    if best[0] is None:
        return "no attack could be run and judged, and no bound excludes a reconstruction"
    told = f"{best[1]} rebuilds an image at {best[0]:.1f} dB"
    if verdict == EXPOSED:
        return f"{told}, and the threshold is {policy.threshold_db:g} dB"
    return f"at best {told}, and no bound excludes {policy.threshold_db:g} dB"


def _short(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")
