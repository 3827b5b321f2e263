"""Run one experiment: a round under a defense, an attack on what it shows, its assessment."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from leakbound._util import pictures as html
from leakbound._util import stops
from leakbound._util.formats import format_number
from leakbound._util.groups import grouped
from leakbound._util.text import digest, plain
from leakbound.assess import record as records
from leakbound.assess.chance import Replay
from leakbound.assess.criterion import Criterion
from leakbound.assess.header import defense_info, defense_name, threat_info
from leakbound.assess.judge import OWN_TRAINING, Evidence, RiskSettings, judge
from leakbound.assess.measure import release_of, utility_of
from leakbound.assess.released import Released
from leakbound.attacks.base import Attack
from leakbound.attacks.features.base import feature_errors, subspace_error
from leakbound.attacks.knowing import with_known
from leakbound.attacks.pace import noted, planned
from leakbound.audit import plan as plans
from leakbound.audit.attacked_round import OTHERS, attacked_round
from leakbound.audit.context import (
    PlanContext,
    one_line,
    one_thread,
    others_in_round,
    persons_of,
)
from leakbound.audit.utility import tested, train
from leakbound.client import clients_layer_inputs
from leakbound.core import Batch, NotApplicable, Reconstruction, Refused, ThreatModel
from leakbound.defenses import Chain
from leakbound.metrics import Metric, information
from leakbound.protocol import Round
from leakbound.pruning import PrunedTurn, bytes_sent, density, existing
from leakbound.randomness import stream
from leakbound.registry import Spec
from leakbound.risk.statement import of_bound

DIED = "its process died (out of memory, or a crash)"
_PICTURES = {"truth": "true", "reconstruction": "reconstructed", "leak_map": "leak map"}
TRIAL = 5.0
"""Seconds for what is tried before the first experiment."""
LATER = "bounds are for a client's first update, and this client sent others before"
NO_MEMORY = "out of memory: use a smaller batch or model, or fewer workers"


@dataclass(frozen=True)
class Result:
    """A record, the pictures it names (file name to PNG bytes), and how long it took."""

    record: records.Record
    pictures: dict[str, bytes] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def id(self) -> str:
        """The name of the unit."""
        return self.record.key

    def _repr_html_(self) -> str:
        record = self.record
        if isinstance(record, records.Training):
            names = ("training_loss", "accuracy", "reason")
            pairs = [(name.replace("_", " "), getattr(record, name)) for name in names]
            return html.block(record.status.replace("_", " "), html.facts(pairs))
        title = (record.verdict or record.status).replace("_", " ")
        what = f"{record.attack.settings} on {record.model.name} under {record.defense.settings}"
        if record.release is not None and (record.release.round or 1) > 1:
            what += f", in round {record.release.round}"
        if record.status != "ok":
            return html.block(title, html.note(what), html.note(record.reason))
        columns = zip(record.scores, record.baseline, strict=True)
        rows = [(i, *map(format_number, values)) for i, values in enumerate(columns)]
        score = f"{record.criterion.axis} in {record.criterion.unit}"
        problem = record.problem
        return html.block(
            title,
            html.note(what),
            *(
                f"{html.note(word)}<br>{html.picture(self.pictures[file], word)}"
                for name, word in _PICTURES.items()
                if (file := record.pictures.get(name)) in self.pictures
            ),
            html.table(("example", score, "prior-only baseline"), rows),
            html.note(f"the attack reports a problem: {problem}") if problem else "",
            *(html.note(of_bound(bound)) for bound in record.bounds),
            html.note(f"no bound: {record.bounds_note}") if record.bounds_note else "",
        )


def run_experiment(
    unit: plans.Experiment,
    context: PlanContext,
    *,
    pictures: bool = True,
) -> Result:
    """Run one experiment; an exception of its attack or model becomes a failed record.

    The record depends only on the experiment, the data and the versions. It does not depend on
    other experiments, their order, the process or its number of threads.
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
    """The result of an experiment, whatever `answer` raises; `began` is its start time.

    Raises:
        KeyboardInterrupt: a stop came, whatever the code in between made of it.
    """
    record = _header(unit, context)
    files: dict[str, bytes] = {}
    try:
        with one_thread():
            record, files = _judge(record, unit, context, *answer(), pictures)
    except (NotApplicable, Refused) as error:
        record = replace(record, status="not_applicable", reason=_said(error))
    except Exception as error:  # a crash is also a result: recorded, counted, exit code 1
        stops.reraise(error)
        record = replace(
            record,
            status="failed",
            reason=reason_of(error),
            verdict=records.UNDECIDED,
        )
    stops.check()
    return Result(record, files, time.perf_counter() - began)


def run_training(unit: plans.TrainingUnit, context: PlanContext) -> Result:
    """Run one short training; a crash becomes a failed record."""
    began = time.perf_counter()
    try:
        with one_thread():
            measured = train(unit, context)
        curve = tuple((number, records.short(loss)) for number, loss in measured.pop("curve"))
        values = {
            name: records.short(value) if isinstance(value, float) else value
            for name, value in measured.items()
        }
        record = _training(unit, context, curve=curve, **values)
    except (NotApplicable, Refused) as error:
        record = _training(
            unit,
            context,
            status="not_applicable",
            reason=_said(error),
        )
    except Exception as error:  # as above
        stops.reraise(error)
        record = _training(
            unit,
            context,
            status="failed",
            reason=reason_of(error),
        )
    stops.check()
    return Result(record, {}, time.perf_counter() - began)


def refused(
    units: Iterable[plans.Experiment],
    context: PlanContext,
) -> list[str]:
    """What a model or its data refuse, in sentences: known before the first experiment.

    One round of each model and defense is tried, for at most `TRIAL` seconds together.
    """
    experiments = grouped(((unit.model, unit.defense), unit) for unit in units if unit.defense)
    said = []
    end = time.monotonic() + TRIAL
    for (model, defense), some in experiments.items():
        if time.monotonic() > end:
            break
        try:
            with one_thread():
                play_round(some[0], context, planted=False)
        except (NotApplicable, Refused) as error:
            name = defense_name(defense)
            said.append(
                f"{name} on {model.name} is not run ({len(some)} experiments): {_said(error)}"
            )
        except Exception as error:  # its record reports the reason
            stops.reraise(error)
    return said


def _said(error: Exception) -> str:
    return " ".join(str(error).split())


def died(unit: plans.Unit, context: PlanContext) -> Result:
    if isinstance(unit, plans.TrainingUnit):
        return Result(_training(unit, context, status="failed", reason=DIED))
    record = _header(unit, context)
    return Result(
        replace(
            record,
            status="failed",
            reason=DIED,
            verdict=records.UNDECIDED,
        )
    )


def play_round(
    unit: plans.Experiment,
    context: PlanContext,
    *,
    planted: bool = True,
) -> Round:
    """The round behind an experiment; without `planted`, of the model that no attack changed."""
    defense = plans.build_defense(unit.defense)
    clients = context.batches(unit.batch_size, defense.cohort_size, unit.seed)
    return _round_of(unit, context, clients, planted=planted)


def _round_of(
    unit: plans.Experiment,
    context: PlanContext,
    clients: Sequence[Batch],
    *draws: str | int,
    planted: bool = True,
) -> Round:
    """The round of these clients; `draws` name the noise, which differs between replays."""
    defense = plans.build_defense(unit.defense)
    # One source for each client, and the last one for links on their sum.
    sources = [stream(unit.seed, *draws, "defense", i) for i in range(len(clients) + 1)]
    return attacked_round(
        context.task(unit.model, unit.seed),
        clients,
        defense,
        sources,
        number=unit.round,
        others=partial(others_in_round, context, unit.batch_size, len(clients), unit.seed),
        other_sources=[stream(unit.seed, "defense", "others", i) for i in range(OTHERS)],
        threat=context.threat(unit.threat),
        attack=plans.build_attack(unit.attack) if planted else None,
        auxiliary=context.public,
        scheme=unit.model.scheme,
    )


def answers(
    attack: Spec,
    played: Sequence[Round],
    sources: Sequence[torch.Generator],
) -> list[Reconstruction]:
    """An attack's results on several rounds, or on one: always as one of many."""
    built = plans.build_attack(attack)
    reconstructions = built.many([round_.observation for round_ in played], sources)
    if len(reconstructions) != len(played):
        raise ValueError(f"many returned {len(reconstructions)} answers to {len(played)}")
    return [
        noted(with_known(round_.observation, one))
        for round_, one in zip(played, reconstructions, strict=True)
    ]


def source_of(unit: plans.Experiment) -> torch.Generator:
    return stream(unit.seed, "attack", unit.attack.name, unit.batch_size)


def reason_of(error: Exception) -> str:
    """Why a unit failed, in one line that is the same in every run."""
    # On a CPU, PyTorch raises a plain RuntimeError with this text.
    memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if memory or "can't allocate memory" in str(error):
        return NO_MEMORY
    return one_line(error)


def _model(spec: plans.ModelSpec, context: PlanContext) -> records.ModelInfo:
    return records.ModelInfo(
        name=spec.name,
        parameters=plain(dict(spec.settings)),
        size=context.size(spec),
        train_steps=spec.train_steps,
        weights=spec.weights,
        loss=context.loss.name,
    )


def _attack(unit: plans.Experiment) -> records.AttackInfo:
    info = plans.attack_info(unit.attack)
    if unit.round is None:
        return info
    return replace(info, hash=digest([info.hash, unit.round]), round=unit.round)


def _header(
    unit: plans.Experiment,
    context: PlanContext,
) -> records.Assessment:
    built = plans.build_defense(unit.defense)
    domain = context.domain
    return records.Assessment(
        experiment=unit.id,
        attack=_attack(unit),
        defense=defense_info(built, unit.defense),
        model=_model(unit.model, context),
        data=records.DataInfo(
            source=unit.data.source,
            domain=domain.name,
            shape=context.input_shape,
            classes=context.dataset.classes,
        ),
        batch_size=unit.batch_size,
        clients=built.cohort_size,
        seed=unit.seed,
        threat=threat_info(context.threat(unit.threat)),
        criterion=criterion_of(unit, context).info,
    )


def _training(
    unit: plans.TrainingUnit,
    context: PlanContext,
    **values: Any,
) -> records.Training:
    return records.Training(
        training=unit.id,
        defense=defense_info(plans.build_defense(unit.defense), unit.defense),
        model=_model(unit.model, context),
        seed=unit.seed,
        rounds=unit.utility.rounds,
        optimizer=unit.utility.optimizer,
        **values,
    )


def _judge(
    record: records.Assessment,
    unit: plans.Experiment,
    context: PlanContext,
    played: Round,
    answer: Reconstruction,
    images: bool,
) -> tuple[records.Assessment, dict[str, bytes]]:
    model = unit.model
    drawn = unit.batch_size, len(played.observation.cohort), unit.seed
    release = released(
        played,
        criterion_of(unit, context),
        context.threat(unit.threat),
        context.counted,
        origins=context.origins,
        persons=persons_of(context, *drawn),
        same_law=context.same_law,
        private=context.private if unit.risk.these else None,
        # User code may load any weights, so whether they depend on examples is not known.
        # So may a mask, and what it leaves is not drawn as new weights are.
        fresh=model.weights is None
        and not model.train_steps
        and ":" not in model.name
        and model.scheme is None,
        key=(model, unit.seed, unit.defense),  # bounds do not depend on the attack
        once=context.once,
    )
    evidence = Evidence(
        record,
        played.observation,
        release,
        plans.build_attack(unit.attack),
        answer,
        truth=played.truth,
        public=context.counted,
        decoys=context.others(*drawn),
        replay=replay_of(
            plans.build_attack(unit.attack), played, partial(_round_of, unit, context), unit.seed
        ),
    )
    low, _ = context.domain.input_range
    metrics: tuple[Metric, ...] = ()
    if unit.lpips_weights is not None:
        metrics += (context.lpips(unit.lpips_weights).metric(low),)
    if over_rounds(unit) and context.domain.distance_is_rmse and context.domain.has_neighbors:
        metrics += information(low)
    settings = RiskSettings(
        unit.error_bound,
        unit.risk,
        metrics,
        pictures=images,
    )
    record, files = judged(played, evidence, settings)
    if over_rounds(unit) and record.release is not None:
        record = replace(record, release=_in_training(unit, context, played, record.release))
    return record, files


def over_rounds(unit: plans.Experiment) -> bool:
    """Whether the record is about the training, too: its model is pruned, or its round is named."""
    return unit.model.scheme is not None or unit.round is not None


def _in_training(
    unit: plans.Experiment,
    context: PlanContext,
    played: Round,
    release: records.ReleaseInfo,
) -> records.ReleaseInfo:
    """The release as part of its training; of a pruned model, what is left counts as the whole."""
    task = played.observation.task
    key = "accuracy", unit.model, unit.seed, unit.defense, unit.batch_size, played.number
    accuracy = None
    if context.dataset.classes and len(context.splits["test"]):
        accuracy = context.once(key, lambda: tested(task, context)["accuracy"])
    scheme = unit.model.scheme
    training = records.RoundInfo(
        kept=round(density(task, existing(task)), 9),
        sent=bytes_sent(scheme, task, played.update, played.number),
        dense=len(task.parameters) * task.parameters.element_size(),
        accuracy=records.short(accuracy),
    )
    release = replace(release, training=training)
    if scheme is None:
        return release
    shown = PrunedTurn(task, played.update).shown[existing(task)]
    chosen = scheme.adapts and scheme.adjusts(played.number)
    return replace(
        release,
        withheld=records.short(1 - float(shown.double().mean())),
        data_dependent=release.data_dependent or chosen,
    )


def replay_of(
    attack: Attack,
    played: Round,
    round_of: Callable[..., Round],
    seed: int,
) -> Replay | None:
    """How to attack what the same clients would have sent of other inputs; None if it takes steps.

    `round_of` plays the round of other batches; words after them name its draws.
    """
    if planned(attack):
        return None
    cohort = played.observation.cohort

    def replay(inputs: Tensor, number: int) -> Tensor:
        parts = zip(
            torch.split(inputs, list(cohort)),
            torch.split(played.truth.labels, list(cohort)),
            strict=True,
        )
        again = round_of([Batch(*part) for part in parts], "replay", number)
        answer = attack(again.observation, stream(seed, "replay", number, "attack"))
        return with_known(again.observation, answer).inputs

    return replay


def criterion_of(unit: plans.Experiment, context: PlanContext) -> Criterion:
    known = context.threat(unit.threat).known
    return Criterion.of(context.domain, psnr=unit.psnr, share=unit.share, known=known)


def judged(
    played: Round,
    evidence: Evidence,
    settings: RiskSettings,
) -> tuple[records.Assessment, dict[str, bytes]]:
    """The assessment of an attack on a round that was played here, and the pictures it names.

    The judge sees what it would see of a captured update, and the true batch. What only the audit
    knows of the round is added: its number, the defense's effect and cost, errors of features.
    """
    evidence = dataclasses.replace(
        evidence, certain=OWN_TRAINING, unbounded=LATER if played.number > 1 else None
    )
    record, files = judge(evidence, settings)
    answer = evidence.reconstruction
    features = None
    if answer is not None and answer.features is not None and answer.layer is not None:
        features = _features(played, answer.features, answer.layer)
    utility = utility_of(played.update, played.truth, played.observation)
    release = replace(
        release_of(played.update, utility), round=played.number, effective=played.acts
    )
    return replace(record, release=release, features=features), files


def released(
    played: Round,
    criterion: Criterion,
    threat: ThreatModel,
    public: Batch | None,
    **shared: Any,
) -> Released:
    """A round's release for the bounds; `shared` is its name if it is one of many."""
    assert isinstance(played.defense, Chain)
    return Released(
        task=played.observation.task,
        update=played.update,
        defense=played.defense,
        criterion=criterion,
        threat=threat,
        cohort=played.observation.cohort,
        batch=played.truth,
        public=public,
        **shared,
    )


def _features(
    played: Round,
    features: Tensor,
    layer: str,
) -> records.Features:
    """Errors of the features that the attack found, up to sign; None if a true one is zero."""
    task = played.observation.task
    inputs = played.truth.inputs
    with torch.no_grad():
        cohort = played.observation.cohort
        true = clients_layer_inputs(task, inputs, [layer], cohort)[layer].flatten(1)
    if not (bool((true != 0).any(1).all()) and bool((features != 0).any(1).all())):
        return records.Features(layer=layer)
    errors = feature_errors(features, true, signed=False)
    return records.Features(
        layer=layer,
        span=records.short(subspace_error(features.T, true)),
        errors=tuple(records.short(float(error)) for error in errors),
    )
