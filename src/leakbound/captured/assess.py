"""Assess an attack on a captured update; the truth may not be known."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from leakbound import tensors
from leakbound._util.memory import CPU
from leakbound._util.results import Fact
from leakbound._util.text import digest
from leakbound.assess import header as headers
from leakbound.assess import record as records
from leakbound.assess.chance import Replay, halves
from leakbound.assess.criterion import Criterion
from leakbound.assess.facts import facts_of, without_zeros
from leakbound.assess.header import attack_info, defense_info, model_info
from leakbound.assess.judge import Evidence, RiskSettings, judge_given
from leakbound.assess.measure import release_of
from leakbound.assess.released import Released
from leakbound.assess.success import RiskSpec
from leakbound.attacks.base import Attack, expected_rows, seen_task
from leakbound.attacks.knowing import with_known
from leakbound.attacks.pace import planned
from leakbound.captured import declared
from leakbound.captured.budget import Budgeted
from leakbound.captured.capture import Capture
from leakbound.captured.observe import InferredContext, fitting
from leakbound.captured.obstacles import measured, obstacles
from leakbound.client import frugal
from leakbound.core import Batch, Observation, Reconstruction
from leakbound.data import SOURCES, Dataset, load
from leakbound.data.schema import Schema
from leakbound.data.sources import at_path
from leakbound.data.table import SUFFIXES, read_columns
from leakbound.domains import Domain, has_neighbors
from leakbound.domains.known import KnownValues, known_parts
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

    `at` is its position among the updates of the run. No attack sees `truth`. `server` is what a
    malicious server gets from such a training, if that was simulated.
    """

    capture: Capture
    inferred: InferredContext
    notes: tuple[str, ...]
    at: int
    title: str
    criterion: Criterion
    public: PublicExamples | None = None
    truth: Batch | None = None
    people: int | None = None
    server: str | None = None

    @cached_property
    def about(self) -> tuple[tuple[records.ObstacleInfo, ...], str | None]:
        """What stands between the update and an answer, and what leaked from updates like it."""
        inferred = self.inferred
        between = obstacles(self.capture, inferred, public=self.public is not None)
        return between, measured(inferred, server=self.server is None)


def read_truth(
    truth: Batch | Path | str | None,
    schema: str | None = None,
) -> Batch | None:
    """The true batch, from a file with `inputs` (or x, images) and `labels` (or y), or a source."""
    if truth is None or isinstance(truth, Batch):
        return truth
    if not isinstance(truth, Path | str):
        raise ValueError(
            f"truth is a {type(truth).__name__}; give leakbound.Batch(inputs, labels), or a file "
            "that holds both"
        )
    text = str(truth)
    rows = text.startswith("table:") or text.lower().endswith(SUFFIXES)
    if at_path(text) or (rows and schema is not None):
        source = load(text, schema=schema if rows else None)
        return source.batch(torch.arange(len(source.labels)))
    named, _ = tensors.read(Path(truth))
    parts = []
    for names in (("inputs", "x", "images"), ("labels", "y")):
        present = [name for name in names if name in named]
        if len(present) != 1:
            raise ValueError(
                f"truth {text!r} holds {sorted(named)[:10]}; give exactly one of {', '.join(names)}"
            )
        parts.append(named[present[0]])
    inputs, labels = parts
    return Batch(inputs, labels if labels.is_floating_point() else labels.long())


def read_known(
    text: str,
    form: Domain,
    values: Path | str | None = None,
    truth: Batch | None = None,
    schema: Schema | None = None,
) -> KnownValues:
    """The parts that an attacker has of every example, from a file or from the true batch.

    Args:
        text: names the parts, as `known_parts` reads it.
        form: the domain of whole examples.
        values: a table's file (CSV or Parquet) that holds the known columns, and perhaps others,
            with a row for each example of the update; or tensors, `known` (N, K) or whole `inputs`.
        truth: gives its known parts if there is no file.
        schema: of a table's file.

    Raises:
        ValueError: nobody says the values, or the file does not hold them.
    """
    parts = known_parts(form, text)
    if values is None:
        if truth is None:
            raise ValueError(
                f"known is {text!r}, but nobody says what its values are; give them with "
                "--known-values FILE, or the true batch (--truth)"
            )
        return KnownValues(parts, parts.values(truth.inputs))
    path = Path(values)
    if schema is not None and path.suffix.lower() in SUFFIXES:
        placed = schema.domain.placed
        columns = [column for column, start, _ in placed if bool(parts.places[start])]
        return KnownValues(parts, read_columns(path, columns, schema.delimiter))
    named, _ = tensors.read(path)
    size = math.prod(parts.part.shape)
    held = named.get("known")
    whole = named.get("inputs")
    if held is not None and held.ndim and held.numel() == len(held) * size:
        return KnownValues(parts, held.reshape(-1, *parts.part.shape))
    if whole is not None and whole.shape[1:] == form.shape:
        return KnownValues(parts, parts.values(whole))
    shown = {name: tuple(tensor.shape) for name, tensor in list(named.items())[:5]}
    raise ValueError(
        f"known values {str(path)!r} holds {shown}; give known (N, {size}), or inputs, whole "
        f"examples of shape {form.shape}"
    )


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
    # Stored values may be rounded. Negated, so that NaN is refused, too.
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
    true = sorted(truth.labels.flatten().tolist())
    classes = (fact.items for fact in inferred.facts if fact.kind == "classes")
    certain = {int(label) for labels in classes for label in labels}
    if lost := sorted(certain - set(true)):
        notes.append(
            f"the truth has no example of class {', '.join(map(str, lost))}, which occurs by the "
            "signs of the last layer's bias gradients (for plain cross-entropy, without weight "
            "decay or noise): is it the batch behind this update?"
        )
    known = observation.labels
    if known is not None and sorted(known.flatten().tolist()) != true:
        notes.append("the given labels are not those of the truth: check both")
    return tuple(notes)


def explained(
    inferred: InferredContext,
    answer: Reconstruction,
) -> records.Explained | None:
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
    # Sums of parts: an update may be too large for a copy in double precision.
    sums = torch.zeros(4, dtype=torch.float64, device=seen.device)
    parts = (torch.split(part.flatten(), PART) for part in (seen, rows.detach()))
    for one, two in zip(*parts, strict=True):  # an update may have gigabytes
        a = one.double()
        b = two.double()
        sums += torch.stack([a @ a, b @ b, a @ b, (a - b) @ (a - b)])
    energy, expected, both, off = sums.tolist()
    if not energy > 0 or not expected > 0:
        return None
    # An update in the opposite direction explains nothing.
    direction = max(0.0, both) ** 2 / (energy * expected)
    return records.Explained(
        share=1 - off / energy,
        direction=direction,
        scale=both / expected,
    )


def header(
    case: Case,
    name: str,
    attack: Attack | None,
) -> records.Assessment:
    """What is attacked and how; `attack` is None if it could not be built."""
    inferred = case.inferred
    seen = inferred.observation
    declared_defense = inferred.declared
    capture = case.capture
    about = records.AttackInfo(name=name, settings=name, hash="none")
    if attack is not None:
        about = attack_info(attack, name)
    key = [case.at, capture.digest, name, about.settings, repr(declared_defense), case.title]
    key += [seen.cohort[0], repr(seen.task.plan), list(seen.input_shape)]
    key += [seen.threat.labels_known, seen.threat.known, named(seen.task.loss).name]
    empty = headers.header(
        digest(key),
        about,
        defense_info(declared_defense),
        model_info(case.title, seen.task),
        seen,
        case.criterion,
        source="captured",
        seed=case.at,
    )
    info = records.CaptureInfo(
        name=capture.name,
        kind=capture.kind,
        digest=capture.digest,
        round=capture.about.get("round"),
        client=capture.about.get("client"),
        truth=case.truth is not None,
        findings=tuple(records.FindingInfo(**vars(finding)) for finding in inferred.findings),
        notes=(*capture.notes, *case.notes, *inferred.notes),
        undeclared=capture.about.get(declared.NOTE),
        obstacles=case.about[0],
        measured=case.about[1],
        server=case.server,
    )
    return replace(empty, capture=info)


def judged(
    case: Case,
    attack: Attack,
    reconstruction: Reconstruction,
    judging: Budgeted | None,
    *,
    name: str,
    pictures: bool,
) -> tuple[records.Assessment, dict[str, bytes]]:
    """The assessment of an attack on a captured update, and the pictures that it names.

    `judging` is how a training on the reconstruction fits into memory and time; None if it explains
    nothing.
    """
    inferred = case.inferred
    seen = inferred.observation
    share = None
    replay = None
    if judging is not None and not judging.refused:
        with frugal(None if judging.cost is None else judging.cost.form):
            share = explained(inferred, reconstruction)
        replay = _replay(case, attack)
    public, decoys = (None, None) if case.public is None else case.public.halves
    unbounded = NO_PUBLIC if case.public is None else None
    if inferred.refuted:
        unbounded = NO_NOISE
    if not inferred.defense.links:
        unbounded = NO_LAW
    evidence = Evidence(
        header(case, name, attack),
        seen,
        _release(case),
        attack,
        reconstruction,
        truth=case.truth,
        public=public,
        decoys=decoys,
        certain={finding.name for finding in inferred.findings if finding.sure},
        agreement=None if share is None else share.direction,
        decay=inferred.decay,
        facts=inferred.facts,
        unbounded=unbounded,
        replay=replay,
    )
    settings = RiskSettings(risk=RiskSpec(people=case.people), pictures=pictures)
    record, files, doubt = judge_given(evidence, settings)
    rate_known = inferred.rate_known
    # Without the learning rate, the update's length has no unit.
    if share is not None:
        share = records.Explained(
            share=records.short(share.share) if rate_known else None,
            direction=records.short(share.direction),
            scale=records.short(share.scale),
        )
    noise = records.short(seen.noise_share) if rate_known and not inferred.refuted else None
    capture = record.capture
    assert capture is not None  # set by `header`
    if judging is not None and judging.refused:
        unknown = f"what reconstructions explain was not computed: {judging.refused}"
        capture = replace(capture, notes=(*capture.notes, unknown))
    if doubt is not None:
        capture = replace(capture, truth=False, notes=(*capture.notes, doubt))
    return replace(
        record,
        release=release_of(seen.update, {}, noise_share=noise),
        capture=replace(capture, explained=share),
    ), files


def known_facts(case: Case) -> tuple[Fact, ...]:
    """What the update shows without an attack."""
    inferred = case.inferred
    public = None if case.public is None else case.public.halves[0]
    domain = case.criterion.whole
    facts = facts_of(inferred.observation, None, domain, public, inferred.facts)
    return without_zeros(facts) if inferred.decay is not None else facts


def _replay(case: Case, attack: Attack) -> Replay | None:
    """How to attack what the client would have sent of other inputs; None if nobody knows.

    What training on the truth does not explain, such as noise that nobody declared, stays in every
    update. Without it, an attack would read replays and return the victims.
    """
    truth = case.truth
    if truth is None or case.inferred.declared.links or planned(attack):
        return None
    seen = case.inferred.observation
    labels = truth.labels
    of_truth = explained(case.inferred, Reconstruction(truth.inputs, labels))
    if of_truth is None or of_truth.scale is None:
        return None
    scale = of_truth.scale

    def sent(inputs: Tensor) -> Tensor:
        return scale * expected_rows(seen, seen_task(seen), inputs, labels).detach()

    def replay(inputs: Tensor, number: int) -> Tensor:
        change = (sent(inputs) - sent(truth.inputs)).reshape_as(seen.update.rows)
        if seen.update.mask is not None:
            change = change * seen.update.mask
        update = dataclasses.replace(seen.update, rows=seen.update.rows + change)
        again = dataclasses.replace(seen, update=update)
        answer = attack(again, stream(case.at, "replay", number))
        return with_known(again, answer).inputs

    return replay


class PublicExamples:
    """Examples of a public data source, in the units of the model's input.

    A random half is kept from attacks as decoys.
    """

    def __init__(
        self,
        dataset: Dataset,
        input_range: tuple[float, float] | None,
        device: torch.device,
    ) -> None:
        every = dataset.batch(torch.arange(len(dataset.labels)))
        low, high = input_range or (0.0, 1.0)
        inputs = every.inputs
        if input_range is not None:
            inputs = low + (high - low) * inputs
        self.every = Batch(inputs.to(device), every.labels.to(device))
        self.origins = dataset.origins
        self.domain = dataset.domain.fitted(dataset.inputs)

    @cached_property
    def halves(self) -> tuple[Batch | None, Batch | None]:
        """What attacks get, and decoys."""
        return halves(self.every)


def public_examples(
    source: str,
    form: Domain,
    schema: str | None = None,
    device: torch.device = CPU,
) -> PublicExamples:
    """Public examples of a data source; images are resized to the model's input if it is square."""
    wanted = form.shape
    # A packaged table has its own schema.
    dataset = load(source, schema=None if source in SOURCES else schema)
    if dataset.inputs.shape[1:] != wanted and has_neighbors(wanted) and wanted[1] == wanted[2]:
        dataset = load(source, size=wanted[1], channels=wanted[0])
    if dataset.inputs.shape[1:] != wanted:
        raise ValueError(
            f"public data {source!r} has examples of shape {tuple(dataset.inputs.shape[1:])}, the "
            f"model takes {wanted}; give examples of that shape"
        )
    own = dataset.domain
    if not (form.rescaled or own.rescaled) and form.input_range != own.input_range:
        # Of text with words of its own, what is frequent would be another word's share.
        raise ValueError(
            f"public data {source!r} has values from {own.input_range[0]:g} to "
            f"{own.input_range[1]:g}, and the model takes {form.input_range[0]:g} to "
            f"{form.input_range[1]:g}; give text in the model's own tokens (npz:FILE)"
        )
    return PublicExamples(dataset, form.input_range if form.rescaled else None, device)


def _release(case: Case) -> Released:
    inferred = case.inferred
    seen = inferred.observation
    public = None if case.public is None else case.public.every
    batch = case.truth
    # Only the labels count of a stand-in for an unknown batch.
    if batch is None and public is not None and inferred.labels is not None:
        batch = Batch(public.inputs[:1].expand(seen.batch_shape), inferred.labels)
    return Released(
        task=seen.task,
        update=seen.update,
        defense=inferred.defense,
        criterion=case.criterion,
        threat=seen.threat,
        cohort=seen.cohort,
        batch=batch,
        public=public,
        origins=None if case.public is None else case.public.origins,
        truth_known=case.truth is not None,
        key=(case.at, case.title),
    )
