"""Assess an attack on a captured update; the truth may not be known."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from leakbound import tensors
from leakbound.assess import record as records
from leakbound.assess.certificate import Proof, certificate
from leakbound.assess.chance import halves
from leakbound.assess.criterion import Criterion
from leakbound.assess.facts import facts_of
from leakbound.assess.limits import ErrorBoundSpec, Limits, of_release
from leakbound.assess.measure import Measured, measure, objective_of, release_of, shown
from leakbound.assess.released import Released
from leakbound.assess.success import RiskSpec
from leakbound.assess.verdict import verdict
from leakbound.attacks import settings_hash
from leakbound.attacks.base import Attack, expected_rows, seen_task
from leakbound.audit import plan as plans
from leakbound.audit.context import DISTRACTORS
from leakbound.audit.experiment import defense_info, links_of, model_info, threat_info
from leakbound.captured import declared
from leakbound.captured.capture import Capture
from leakbound.captured.observe import InferredContext, fitting
from leakbound.core import Batch, Observation, Reconstruction
from leakbound.data import SOURCES, Dataset, load
from leakbound.data.sources import at_path
from leakbound.data.table import SUFFIXES
from leakbound.defenses import Chain, chain
from leakbound.domains import Domain, has_neighbors
from leakbound.losses import named, next_labels
from leakbound.randomness import stream

PART = 1 << 22
"""Entries of an update that are compared in double precision at a time."""
NO_PUBLIC = "a bound is for images of a known kind: give public images (--public DATA)"
NO_NOISE = "the declared noise was not added to this update: no bound that needs it holds"
NO_LAW = "no noise of a known distribution was declared: the update itself bounds no attacker"


@dataclass(frozen=True)
class Case:
    """One captured update under attack: what is recorded together with the attack's own result.

    `at` is its position among the updates of the run; `declared` the defense as it was declared
    (what an attacker knows of it is in `inferred`). No attack sees `truth`.
    """

    capture: Capture
    inferred: InferredContext
    notes: tuple[str, ...]
    at: int
    spec: plans.ModelSpec
    criterion: Criterion
    declared: Chain = field(default_factory=chain)
    public: PublicExamples | None = None
    truth: Batch | None = None
    people: int = 1


def read_truth(given: Batch | Path | str | None, schema: str | None = None) -> Batch | None:
    """The true batch, from a file with `inputs` (or x, images) and `labels` (or y), or a source."""
    if given is not None and not isinstance(given, Batch | Path | str):
        raise ValueError(
            f"truth is a {type(given).__name__}; give leakbound.Batch(inputs, labels), or a file "
            "that holds both"
        )
    if not isinstance(given, Path | str):
        return given
    text = str(given)
    rows = text.startswith("table:") or text.lower().endswith(SUFFIXES)
    if at_path(text) or (rows and schema is not None):
        source = load(text, schema=schema if rows else None)
        return source.batch(torch.arange(len(source.labels)))
    path = given
    named = tensors.read(Path(given))[0]
    found = []
    for names in (("inputs", "x", "images"), ("labels", "y")):
        here = [name for name in names if name in named]
        if len(here) != 1:
            raise ValueError(
                f"truth {str(path)!r} holds {sorted(named)[:10]}; give exactly one of "
                f"{', '.join(names)}"
            )
        found.append(named[here[0]])
    inputs, labels = found
    return Batch(inputs, labels if labels.is_floating_point() else labels.long())


def check_truth(truth: Batch, observation: Observation) -> Batch:
    """The truth on the task's device, after a check that it fits the capture."""
    shape = tuple(truth.inputs.shape[1:])
    if shape != observation.input_shape or truth.size != observation.examples:
        raise ValueError(
            f"truth holds {truth.size} inputs of shape {shape}, but the update is that of "
            f"{observation.examples} of shape {observation.input_shape}; give the batch behind it"
        )
    task = observation.task
    kind = torch.float32 if task.domain is None else task.domain.dtype
    if truth.inputs.is_floating_point() != kind.is_floating_point:
        takes = "floats" if kind.is_floating_point else "whole numbers"
        raise ValueError(
            f"truth holds inputs of type {truth.inputs.dtype}; give inputs as {takes}, as the "
            "model gets them"
        )
    low, high = task.input_range
    least = float(truth.inputs.min())
    most = float(truth.inputs.max())
    if not (least >= low - 1e-6 * (high - low) and most <= high + 1e-6 * (high - low)):
        raise ValueError(
            f"truth runs from {least:.6g} to {most:.6g}, but input_range is {low:g} to {high:g}; "
            "give the range of the model's input (--input-range LOW HIGH), and the truth in it"
        )
    labels = truth.labels
    loss = named(task.loss)
    if loss.targets == "any" or not (labels.is_floating_point() and loss.has_classes):
        labels = fitting(task, labels, observation.input_shape)
    loss.check(labels, task.label_range)
    kind = kind if not kind.is_floating_point else task.parameters.dtype
    device = task.parameters.device
    return Batch(truth.inputs.to(device, kind), labels.to(device))


def contradicted(truth: Batch, inferred: InferredContext) -> tuple[str, ...]:
    """Notes on labels of the truth that the update or the given labels contradict."""
    observation = inferred.observation
    notes = list[str]()
    if not named(observation.task.loss).by_class:
        return ()
    own = sorted(truth.labels.flatten().tolist())
    certain = {
        int(item) for fact in inferred.facts if fact.kind == "classes" for item in fact.items
    }
    if lost := sorted(certain - set(own)):
        notes.append(
            f"the truth has no example of class {', '.join(map(str, lost))}, which occurs by the "
            "signs of the last layer's bias gradients (for plain cross-entropy, without weight "
            "decay or noise): is it the batch behind this update?"
        )
    given = observation.labels
    if given is not None and sorted(given.flatten().tolist()) != own:
        notes.append("the given labels are not those of the truth: check both")
    return tuple(notes)


def explained(inferred: InferredContext, answer: Reconstruction) -> records.Explained | None:
    """The share of the update that the reconstruction explains; None if the attack infers no labels
    for several images. With a mask, only the coordinates that were sent count.
    """
    observation = inferred.observation
    labels = answer.labels
    if labels is None and observation.examples == 1:
        labels = inferred.labels
    domain = observation.task.domain
    if domain is not None and named(observation.task.loss).name == "next_token":
        labels = next_labels(answer.inputs, domain.padding)
    if labels is None or len(labels) != observation.examples:
        return None
    task = seen_task(observation)
    seen = observation.update.rows
    with torch.no_grad():
        rows = expected_rows(observation, task, answer.inputs, labels.to(answer.inputs.device))
    if observation.update.mask is not None:
        rows = rows * observation.update.mask
    sums = torch.zeros(4, dtype=torch.float64, device=seen.device)
    parts = (torch.split(part.flatten(), PART) for part in (seen, rows.detach()))
    for one, two in zip(*parts, strict=True):  # an update may have gigabytes
        a = one.double()
        b = two.double()
        sums += torch.stack([a @ a, b @ b, a @ b, (a - b) @ (a - b)])
    energy, own, both, off = sums.tolist()
    if not energy > 0 or not own > 0:
        return None
    direction = max(0.0, both) ** 2 / (energy * own)
    return records.Explained(share=1 - off / energy, direction=direction, scale=both / own)


def header(case: Case, name: str, attack: Attack | None, settings: str = "") -> records.Assessment:
    seen = case.inferred.observation
    built = case.declared
    shown_ = settings or repr(attack)
    key = [case.at, case.capture.digest, name, shown_, repr(built), case.spec.name, seen.cohort[0]]
    key += [repr(seen.task.plan), list(seen.input_shape), seen.threat.labels_known]
    key += [named(seen.task.loss).name]
    own = case.capture
    found = case.inferred
    return records.Assessment(
        experiment=plans.digest(key)[:16],
        attack=records.AttackInfo(
            name=name, settings=shown_, hash=settings_hash(attack) if attack else "none"
        ),
        defense=defense_info(links_of(built), built),
        model=model_info(case.spec.name, seen.task),
        data=records.DataInfo(
            source="captured",
            domain=case.criterion.domain.name,
            shape=tuple(seen.input_shape),
            classes=seen.task.label_range,
        ),
        batch_size=seen.examples,
        clients=1,
        seed=case.at,
        threat=threat_info(seen.threat),
        criterion=case.criterion.info,
        capture=records.CaptureInfo(
            name=own.name,
            kind=own.kind,
            digest=own.digest,
            round=own.about.get("round"),
            client=own.about.get("client"),
            truth=case.truth is not None,
            findings=tuple(records.FindingInfo(**vars(finding)) for finding in found.findings),
            notes=(*own.notes, *case.notes, *found.notes),
            undeclared=own.about.get(declared.NOTE),
        ),
    )


def judged(
    case: Case,
    before: records.Assessment,
    attack: Attack,
    answer: Reconstruction,
    *,
    pictures: bool,
) -> tuple[records.Assessment, dict[str, bytes]]:
    inferred = case.inferred
    capture = before.capture
    seen = inferred.observation
    assert capture is not None  # set by `header`
    share = explained(inferred, answer)
    proof = Proof()
    if not inferred.defense.links:
        direction = None if share is None else share.direction
        sure = {finding.name for finding in inferred.findings if finding.sure}
        proof = certificate(seen, attack, answer, direction, sure, inferred.decay)
    limits = limits_of(case)
    own = _measured(case, answer, proof.certificate is not None)
    public = None if case.public is None else case.public.halves[0]
    facts = facts_of(seen, answer, case.criterion.domain, public, inferred.facts)
    if inferred.decay is not None:  # a small gradient beside it may have been lost by rounding
        facts = tuple(fact for fact in facts if fact.kind != "zero values")
    measured = dict[str, Any]()
    matched = tuple[bool, ...]()
    truth = None
    inputs = answer.inputs
    baseline = None
    agreement = answer.agreement
    if own is not None:
        measured = own.fields
        matched = own.matched
        baseline = own.guess
        agreement = own.agreement
        truth = own.paired.truth.inputs
        inputs = own.paired.inputs
    parts = shown(
        *(case.criterion.domain, truth, inputs),
        images=pictures,
        baseline=baseline,
        agreement=agreement,
    )
    values = parts.fields.pop("values", None)
    known = inferred.rate_known
    if share is not None:
        share = records.Explained(
            share=records.short(share.share) if known else None,
            direction=records.short(share.direction),
            scale=records.short(share.scale),
        )
    capture = replace(capture, explained=share, values=values)
    noise = records.short(seen.noise_share) if known and not inferred.refuted else None
    return replace(
        before,
        problem=answer.problem,
        objective=objective_of(answer),
        release=release_of(seen.update, {}, noise_share=noise),
        bounds=limits.bounds,
        attained=limits.attained,
        bounds_note=limits.note,
        verdict=verdict(
            matched,
            limits.bounds,
            certified=proof.certificate is not None,
            attained=limits.attained,
            facts=facts,
        ),
        facts=facts,
        certificate=proof.certificate,
        layer_input=proof.layer_input,
        capture=capture,
        **measured,
        **parts.fields,
    ), parts.files


def _measured(case: Case, answer: Reconstruction, proved: bool) -> Measured | None:
    """The answer compared with the truth; None if that is not known."""
    if case.truth is None:
        return None
    public = None
    others = None
    decoys = None
    if case.public is not None:
        (public, decoys) = case.public.halves
        others = case.public.distractors
    return measure(
        *(case.truth, answer, case.criterion, public),
        distractors=others,
        decoys=decoys,
        proved=proved,
    )


class PublicExamples:
    """Examples of a public data source, in the units of the model's input.

    A random half is kept from attacks as decoys.
    """

    def __init__(self, dataset: Dataset, input_range: tuple[float, float] | None) -> None:
        own = dataset.batch(torch.arange(len(dataset.labels)))
        inputs = own.inputs
        if input_range is not None:
            low, high = input_range
            inputs = low + (high - low) * inputs
        self.every = Batch(inputs, own.labels)
        self.origins = dataset.origins
        self.domain = dataset.domain.fitted(dataset.inputs)

    @cached_property
    def halves(self) -> tuple[Batch | None, Batch | None]:
        """What attacks get, and decoys."""
        return halves(self.every)

    @cached_property
    def distractors(self) -> torch.Tensor | None:
        """Examples among which a reconstruction must identify its own original."""
        public = self.halves[0]
        return None if public is None else public.inputs[:DISTRACTORS]


def public_examples(source: str, form: Domain, schema: str | None = None) -> PublicExamples:
    """Public examples of a data source; images are resized to the model's input if it is square."""
    wanted = form.shape
    span = form.input_range if form.rescaled else None
    if source in SOURCES:
        schema = None
    dataset = load(source, schema=schema)
    own = tuple(dataset.inputs.shape[1:])
    if own != wanted and has_neighbors(wanted) and wanted[1] == wanted[2]:
        dataset = load(source, size=wanted[1], channels=wanted[0])
        own = tuple(dataset.inputs.shape[1:])
    if own != wanted:
        raise ValueError(
            f"public data {source!r} has examples of shape {own}, the model takes {wanted}; give "
            "examples of that shape"
        )
    return PublicExamples(dataset, span)


def limits_of(case: Case) -> Limits:
    inferred = case.inferred
    if not inferred.defense.links:
        return Limits(note=NO_LAW)
    if inferred.refuted:
        return Limits(note=NO_NOISE)
    if case.public is None:
        return Limits(note=NO_PUBLIC)
    seen = inferred.observation
    public = case.public.every
    batch = case.truth
    if batch is None and inferred.labels is not None:  # only labels count of a stand-in
        batch = Batch(public.inputs[:1].expand(seen.batch_shape), inferred.labels)
    released = Released(
        task=seen.task,
        update=seen.update,
        defense=inferred.defense,
        criterion=case.criterion,
        threat=seen.threat,
        cohort=seen.cohort,
        batch=batch,
        public=public,
        origins=case.public.origins,
        truth_known=case.truth is not None,
        key=(case.at, case.spec),
    )
    spec = ErrorBoundSpec()
    source = stream(case.at, "bounds", spec.kind, seen.examples)
    return of_release(released, spec, RiskSpec(people=case.people), source)
