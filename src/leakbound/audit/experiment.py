"""Running one experiment: a round under a defense, an attack on what it shows, its assessment."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from leakbound import registry
from leakbound._util import pictures as html
from leakbound.assess.criterion import Criterion
from leakbound.assess.measure import measure, objective_of, release_of, shown, utility_of
from leakbound.assess.record import (
    UNDECIDED,
    Assessment,
    DataInfo,
    DefenseInfo,
    Features,
    ModelInfo,
    Record,
    Threat,
    Training,
    short,
)
from leakbound.assess.verdict import verdict
from leakbound.attacks.features.errors import feature_errors, subspace_error
from leakbound.attacks.pace import noted
from leakbound.audit import plan as plans
from leakbound.audit.context import PlanContext, one_line, one_thread
from leakbound.audit.utility import Clients, train
from leakbound.client import clients_layer_inputs
from leakbound.defenses import Chain
from leakbound.metrics import Metric
from leakbound.protocol import Round, play
from leakbound.random import stream
from leakbound.risk import limits
from leakbound.risk.statement import of_bound
from leakbound.types import NotApplicable, Reconstruction, ThreatModel

DIED = "its process died (out of memory, or a crash)"
_PICTURES = {"truth": "true", "reconstruction": "reconstructed", "leak_map": "leak map"}
NO_MEMORY = "out of memory: take a smaller batch or model, or fewer workers"


@dataclass(frozen=True)
class Result:
    """A record, the pictures it names (file name to PNG bytes), and how long it took."""

    record: Record
    pictures: dict[str, bytes] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def id(self) -> str:
        """What names the unit."""
        return self.record.key

    def _repr_html_(self) -> str:
        """One experiment: its verdict, pictures and numbers, or why there are none."""
        record = self.record
        if isinstance(record, Training):
            names = ("training_loss", "accuracy", "reason")
            pairs = [(name.replace("_", " "), getattr(record, name)) for name in names]
            return html.block(record.status.replace("_", " "), html.facts(pairs))
        title = (record.verdict or record.status).replace("_", " ")
        what = f"{record.attack.settings} on {record.model.name} under {record.defense.settings}"
        if record.status != "ok":
            return html.block(title, html.note(what), html.note(record.reason))
        rows = [
            (i, *(html.number(value) for value in values))
            for i, values in enumerate(
                zip(record.psnr, record.baseline, record.metrics["ssim"], strict=True)
            )
        ]
        problem = record.problem
        return html.block(
            title,
            html.note(what),
            *(
                f"{html.note(word)}<br>{html.picture(self.pictures[file], word)}"
                for name, word in _PICTURES.items()
                if (file := record.pictures.get(name)) in self.pictures
            ),
            html.table(("example", "PSNR in dB", "prior-only baseline", "SSIM"), rows),
            html.note(f"the attack says that it failed: {problem}") if problem else "",
            *(html.note(of_bound(bound)) for bound in record.bounds),
            html.note(f"no bound: {record.bounds_note}") if record.bounds_note else "",
        )


def run_experiment(
    unit: plans.Experiment, context: PlanContext, *, pictures: bool = True
) -> Result:
    """Run one experiment; what its attack or model throws becomes a failed record, not an error.

    The record depends on the experiment, the data and the versions alone: not on others, their
    order, the process or its number of threads.

    Raises:
        ValueError: the data cannot be read.
    """
    began = time.perf_counter()

    def answer() -> tuple[Round, Reconstruction]:
        played = play_round(unit, context)
        return played, answers(unit.attack, [played], [source_of(unit)])[0]

    return assessed(unit, context, answer, pictures, began)


def assessed(
    unit: plans.Experiment,
    context: PlanContext,
    answer: Callable[[], tuple[Round, Reconstruction]],
    pictures: bool,
    began: float,
) -> Result:
    """The result of an experiment, whatever `answer` throws; `began` is when it started."""
    record = _header(unit, context)
    files: dict[str, bytes] = {}
    try:
        with one_thread():
            record, files = _judge(record, unit, context, *answer(), pictures)
    except NotApplicable as error:
        reason = " ".join(error.reason.split())
        record = replace(record, status="not_applicable", reason=reason)
    except Exception as error:  # a crash is a result of its own: recorded, counted, exit code 1
        record = replace(record, status="failed", reason=reason_of(error), verdict=UNDECIDED)
    return Result(record, files, time.perf_counter() - began)


def run_training(
    unit: plans.TrainingUnit, context: PlanContext, *, clients: Clients | None = None
) -> Result:
    """Run one short training; a crash becomes a failed record.

    Args:
        unit: what to train.
        context: the plan's data.
        clients: where the clients take their turns; None is this process.
    """
    began = time.perf_counter()
    try:
        with one_thread():
            measured = train(unit, context) if clients is None else train(unit, context, clients)
        curve = tuple((number, short(loss)) for number, loss in measured.pop("curve"))
        found = {name: short(value) for name, value in measured.items()}
        record = _training(unit, context, curve=curve, **found)
    except Exception as error:  # as above
        record = _training(unit, context, status="failed", reason=reason_of(error))
    return Result(record, {}, time.perf_counter() - began)


def died(unit: plans.Unit, context: PlanContext) -> Result:
    """The record of a unit whose process died."""
    if isinstance(unit, plans.TrainingUnit):
        return Result(_training(unit, context, status="failed", reason=DIED))
    record = _header(unit, context)
    return Result(replace(record, status="failed", reason=DIED, verdict=UNDECIDED))


def is_result(record: Record) -> bool:
    """Whether a record depends on its unit alone.

    A lack of memory and a dead process depend on the machine at that time: no result.
    """
    return record.status != "failed" or record.reason not in (DIED, NO_MEMORY)


def play_round(unit: plans.Experiment, context: PlanContext) -> Round:
    """The round of an experiment, as its attack is to see it."""
    defense = plans.build_defense(unit.defense)
    clients = context.batches(unit.batch_size, defense.cohort_size, unit.seed)
    sources = [stream(unit.seed, "defense", i) for i in range(len(clients) + 1)]
    return play(
        context.task(unit.model, unit.seed),
        clients,
        defense,
        sources,
        threat=unit.threat,
        attack=plans.build_attack(unit.attack),
        auxiliary=context.public,
    )


def answers(
    attack: plans.Spec, played: Sequence[Round], sources: Sequence[torch.Generator]
) -> list[Reconstruction]:
    """An attack's answers to several rounds, or to one: always as one of many."""
    built = plans.build_attack(attack)
    found = built.many([round_.observation for round_ in played], sources)
    if len(found) != len(played):
        raise ValueError(f"many returned {len(found)} answers to {len(played)}")
    return [noted(one) for one in found]


def source_of(unit: plans.Experiment) -> torch.Generator:
    """Where an experiment's attack draws from."""
    return stream(unit.seed, "attack", unit.attack.name, unit.batch_size)


def reason_of(error: Exception) -> str:
    """Why a unit failed, in one line that is the same in every run."""
    memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if memory or "can't allocate memory" in str(error):
        return NO_MEMORY
    return one_line(error)


def defense_info(links: tuple[plans.Spec, ...], built: Chain) -> DefenseInfo:
    """A defense as records name it."""
    return DefenseInfo(
        name=plans.defense_name(links),
        parameters=plans.plain(plans.defense_parameters(links)),
        settings=repr(built),
        guarantee=built.guarantee.value,
        data_dependent_law=built.data_dependent_law,
    )


def links_of(defense: Chain) -> tuple[plans.Spec, ...]:
    """The links of a defense as a plan would name them."""
    return tuple(
        plans.Spec(
            registry.snake(type(link).__name__),
            tuple((f.name, plans.plain(getattr(link, f.name))) for f in fields(link) if f.init),
        )
        for link in defense.links
    )


def threat_info(threat: ThreatModel) -> Threat:
    """A threat model as records name it."""
    return Threat(**plans.plain(threat))


def _model(spec: plans.ModelSpec, context: PlanContext) -> ModelInfo:
    return ModelInfo(
        name=spec.name,
        parameters=plans.plain(dict(spec.settings)),
        size=context.size(spec),
        train_steps=spec.train_steps,
        weights=spec.weights,
    )


def _header(unit: plans.Experiment, context: PlanContext) -> Assessment:
    """What a record holds before anything has run."""
    built, domain = plans.build_defense(unit.defense), context.dataset.domain
    return Assessment(
        experiment=unit.id,
        attack=plans.attack_info(unit.attack),
        defense=defense_info(unit.defense, built),
        model=_model(unit.model, context),
        data=DataInfo(
            source=unit.data.source,
            domain=domain.name,
            shape=context.input_shape,
            classes=context.dataset.classes,
        ),
        batch_size=unit.batch_size,
        clients=built.cohort_size,
        seed=unit.seed,
        threat=threat_info(unit.threat),
        criterion=Criterion.of_psnr(unit.psnr, domain).info,
    )


def _training(unit: plans.TrainingUnit, context: PlanContext, **found: Any) -> Training:
    return Training(
        training=unit.id,
        defense=defense_info(unit.defense, plans.build_defense(unit.defense)),
        model=_model(unit.model, context),
        seed=unit.seed,
        rounds=unit.utility.rounds,
        optimizer=unit.utility.optimizer,
        **found,
    )


def _judge(
    record: Assessment,
    unit: plans.Experiment,
    context: PlanContext,
    played: Round,
    answer: Reconstruction,
    images: bool,
) -> tuple[Assessment, dict[str, bytes]]:
    """The record filled in from truth and reconstruction, and the pictures."""
    domain = context.dataset.domain
    low, _ = domain.input_range
    path = unit.lpips_weights
    released = _released(unit, context, played, Criterion.of_psnr(unit.psnr, domain))
    return judged(
        record,
        played,
        answer,
        released,
        (unit.error_bound, unit.risk),
        stream(unit.seed, "bounds", unit.error_bound.kind, unit.batch_size),
        distractors=context.distractors,
        more=[] if path is None else [context.lpips(path).metric(low)],
        images=images,
    )


def judged(
    record: Assessment,
    played: Round,
    answer: Reconstruction,
    released: limits.Released,
    wanted: tuple[limits.ErrorBoundSpec, limits.RiskSpec],
    source: torch.Generator,
    *,
    distractors: Tensor | None = None,
    more: Sequence[Metric] = (),
    images: bool = True,
) -> tuple[Assessment, dict[str, bytes]]:
    """A record filled in from truth and reconstruction, and the pictures that it names.

    Args:
        record: what is known before anything has run.
        played: the round.
        answer: the attack's.
        released: what was sent, as bounds see it.
        wanted: which bounds.
        source: the bounds' draws.
        distractors: as in `measure`.
        more: metrics, as in `measure`.
        images: whether pictures of the data may be kept.
    """
    criterion = released.criterion
    domain = criterion.domain
    measured = measure(
        played.truth, answer, criterion, released.public, distractors=distractors, more=more
    )
    bounds, note = limits.bounds(released, *wanted, source)
    leaks = None
    if images and any(bound.on_error for bound in bounds):
        leaks = limits.leak_map(released, wanted[0])
    pair_ = measured.paired
    parts = shown(domain, pair_.truth.inputs, pair_.inputs, images=images, leaks=leaks)
    parts.fields.pop("values", None)
    features = None
    if answer.features is not None and answer.layer is not None:
        features = _features(played, answer.features, answer.layer)
    utility = utility_of(played.update, played.truth, played.observation)
    return replace(
        record,
        problem=answer.problem,
        objective=objective_of(answer),
        release=release_of(played.update, utility),
        features=features,
        bounds=bounds,
        bounds_note=note,
        verdict=verdict(measured.matched, bounds),
        **measured.fields,
        **parts.fields,
    ), parts.files


def _released(
    unit: plans.Experiment, context: PlanContext, played: Round, criterion: Criterion
) -> limits.Released:
    """The release as bounds see it: they do not depend on the attack, and are computed once."""
    assert isinstance(played.defense, Chain)
    return limits.Released(
        task=played.observation.task,
        update=played.update,
        defense=played.defense,
        criterion=criterion,
        threat=unit.threat,
        cohort=played.observation.cohort,
        batch=played.truth,
        public=context.public,
        key=(unit.model, unit.seed, unit.defense),
        once=context.once,
    )


def _features(played: Round, found: Tensor, layer: str) -> Features:
    """Errors of the features that the attack found, up to sign; None where a true one is zero."""
    task, inputs = played.observation.task, played.truth.inputs
    with torch.no_grad():
        cohort = played.observation.cohort
        true = clients_layer_inputs(task, inputs, [layer], cohort)[layer].flatten(1)
    if not (bool((true != 0).any(1).all()) and bool((found != 0).any(1).all())):
        return Features(layer=layer)
    errors = feature_errors(found, true, signed=False)
    return Features(
        layer=layer,
        span=short(subspace_error(found.T, true)),
        errors=tuple(short(float(error)) for error in errors),
    )
