"""Running one cell: a round under a defense, an attack on what it shows, a record of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from leakbound import metrics
from leakbound.assess.record import SCHEMA
from leakbound.attacks.features.errors import feature_errors, subspace_error
from leakbound.attacks.pace import noted
from leakbound.audit import plan as plans
from leakbound.audit.bench import Bench, one_line, one_thread
from leakbound.audit.floors import floors, leak_map
from leakbound.audit.pictures import strip
from leakbound.audit.risk import risks
from leakbound.audit.tables import records_of_a_table
from leakbound.audit.utility import Clients, train
from leakbound.audit.verdict import UNDECIDED, verdict
from leakbound.client import clients_layer_inputs, gradient
from leakbound.pairing import pair
from leakbound.protocol import Round, play
from leakbound.random import stream
from leakbound.types import Exact, Gaussian, NotApplicable, Reconstruction, Update

DIED = "its process died (out of memory, or a crash)"
NO_MEMORY = "out of memory: take a smaller batch or model, or fewer workers"


@dataclass(frozen=True)
class Result:
    """A record, the pictures it names (file name to PNG bytes), and how long it took."""

    id: str
    record: dict[str, Any]
    pictures: dict[str, bytes] = field(default_factory=dict)
    seconds: float = 0.0

    def _repr_html_(self) -> str:
        from leakbound.audit.notebook import of_result

        return of_result(self)


def run_cell(cell: plans.Cell, bench: Bench, *, pictures: bool = True) -> Result:
    """Run one cell; what its attack or model throws becomes a failed record, not an error.

    The record depends on the cell, the data and the versions alone: not on other cells, their
    order, the process or its number of threads.

    Raises:
        ValueError: the data cannot be read.
    """
    began = time.perf_counter()

    def answer() -> tuple[Round, Reconstruction]:
        played = play_cell(cell, bench)
        return played, answers(cell.attack, [played], [source_of(cell)])[0]

    return _recorded(cell, bench, answer, pictures, began)


def judged(
    cell: plans.Cell,
    bench: Bench,
    played: Round,
    answer: Reconstruction,
    pictures: bool,
    seconds: float,
) -> Result:
    """The result of a cell whose attack has answered, after so many seconds."""
    began = time.perf_counter() - seconds
    return _recorded(cell, bench, lambda: (played, answer), pictures, began)


def _recorded(
    cell: plans.Cell,
    bench: Bench,
    answer: Callable[[], tuple[Round, Reconstruction]],
    pictures: bool,
    began: float,
) -> Result:
    record = _header(cell, bench)
    shown: dict[str, bytes] = {}
    try:
        with one_thread():
            shown = _judge(record, cell, bench, *answer(), pictures)
    except NotApplicable as error:
        reason = " ".join(error.reason.split())
        record |= _blank() | {"status": "not_applicable", "reason": reason, "verdict": None}
    except Exception as error:  # a crash is a result of its own: recorded, counted, exit code 1
        record |= _blank() | _failure(reason_of(error)) | {"verdict": UNDECIDED}
        shown = {}
    return Result(cell.id, record, shown, time.perf_counter() - began)


def run_utility(cell: plans.UtilityCell, bench: Bench, *, clients: Clients | None = None) -> Result:
    """Run one short training; a crash becomes a failed record.

    Args:
        cell: what to train.
        bench: the plan's data.
        clients: where the clients take their turns; None is this process.
    """
    began = time.perf_counter()
    record = _header(cell, bench)
    try:
        with one_thread():
            measured = train(cell, bench) if clients is None else train(cell, bench, clients)
            curve = [[number, short(loss)] for number, loss in measured.pop("curve")]
            record |= {name: short(value) for name, value in measured.items()}
            record["curve"] = curve
    except Exception as error:  # as above
        record |= _failure(reason_of(error))
    return Result(cell.id, record, {}, time.perf_counter() - began)


def died(cell: plans.Unit, bench: Bench) -> Result:
    """The record of a unit whose process died."""
    record = _header(cell, bench) | _failure(DIED)
    if isinstance(cell, plans.Cell):
        record["verdict"] = UNDECIDED
    return Result(cell.id, record)


def is_result(record: Mapping[str, Any]) -> bool:
    """Whether a record depends on its unit alone.

    A lack of memory and a dead process depend on the machine at that time: no result.
    """
    return record["status"] != "failed" or record["reason"] not in (DIED, NO_MEMORY)


def play_cell(cell: plans.Cell, bench: Bench) -> Round:
    """The round of a cell, as its attack is to see it."""
    attack = plans.build_attack(cell.attack)
    defense = plans.build_defense(cell.defense)
    clients = bench.batches(cell.batch_size, defense.cohort_size, cell.seed)
    sources = [stream(cell.seed, "defense", i) for i in range(len(clients) + 1)]
    return play(
        bench.task(cell.model, cell.seed),
        clients,
        defense,
        sources,
        threat=cell.threat,
        attack=attack,
        auxiliary=bench.public,
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


def source_of(cell: plans.Cell) -> torch.Generator:
    """Where a cell's attack draws from."""
    return stream(cell.seed, "attack", cell.attack.name, cell.batch_size)


def _failure(reason: str) -> dict[str, Any]:
    return {"status": "failed", "reason": reason}


def reason_of(error: Exception) -> str:
    """Why a unit failed, in one line that is the same in every run."""
    memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if memory or "can't allocate memory" in str(error):
        return NO_MEMORY
    return one_line(error)


def _blank() -> dict[str, Any]:
    names = ("problem", "objective", "release", "metrics", "blind", "pictures", "bounds_note")
    return dict.fromkeys(names) | {"bounds": []}


def _header(cell: plans.Cell | plans.UtilityCell, bench: Bench) -> dict[str, Any]:
    """What a record holds before anything has run."""
    common = {
        "schema": SCHEMA,
        "defense": _defense(cell.defense),
        "model": _model(cell.model, bench),
        "seed": cell.seed,
        "status": "ok",
        "reason": None,
    }
    if isinstance(cell, plans.UtilityCell):
        rest = {
            "rounds": cell.utility.rounds,
            "optimizer": cell.utility.optimizer,
            "training_loss": None,
            "accuracy": None,
            "curve": [],
        }
        return common | {"unit": cell.id} | rest
    return common | {
        "cell": cell.id,
        "attack": plans.attack_record(cell.attack),
        "data": {
            "source": cell.data.source,
            "shape": list(bench.input_shape),
            "classes": bench.dataset.classes,
        },
        "batch_size": cell.batch_size,
        "clients": plans.build_defense(cell.defense).cohort_size,
        "threat": plans.plain(cell.threat),
        **_blank(),
        "threshold": {"metric": "psnr", "value": cell.threshold},
        "verdict": None,
    }


def _defense(links: tuple[plans.Spec, ...]) -> dict[str, Any]:
    built = plans.build_defense(links)
    return {
        "name": plans.defense_name(links),
        "parameters": plans.plain(plans.defense_parameters(links)),
        "settings": repr(built),
        "guarantee": built.guarantee.value,
        "data_dependent_law": built.data_dependent_law,
    }


def _model(spec: plans.ModelSpec, bench: Bench) -> dict[str, Any]:
    return {
        "name": spec.name,
        "parameters": plans.plain(dict(spec.settings)),
        "size": bench.size(spec),
        "train_steps": spec.train_steps,
        "weights": spec.weights,
    }


def _judge(
    record: dict[str, Any],
    cell: plans.Cell,
    bench: Bench,
    played: Round,
    answer: Reconstruction,
    pictures: bool,
) -> dict[str, bytes]:
    """Fill the record from truth and guess; returns the pictures."""
    low, high = played.observation.task.input_range
    width = high - low
    paired = pair(played.truth, answer)
    path = cell.lpips_weights
    more = [] if path is None else [bench.lpips(path).metric(low)]
    measured = metrics.evaluate(paired, data_range=width, distractors=bench.distractors, more=more)
    guess = Reconstruction(bench.blind.expand_as(played.truth.inputs).clone())
    blind = metrics.psnr(pair(played.truth, guess), data_range=width)
    record["metrics"] = {k: [short(v) for v in values] for k, values in measured.items()}
    record["blind"] = {"psnr": [short(v) for v in blind]}
    start = answer.trace[0] if answer.trace else answer.objective
    record["objective"] = {"start": short(start), "end": short(answer.objective)}
    record["problem"] = answer.problem
    if answer.features is not None and answer.layer is not None:
        record["features"] = _features(played, answer.features, answer.layer)
    record["release"] = {**release_of(played.update), "utility": _utility(played)}
    record |= _bounds(cell, bench, played)
    record["verdict"] = verdict(measured["psnr"], blind, cell.threshold, record["bounds"])
    columns = bench.dataset.columns
    if columns:
        record["columns"] = records_of_a_table(columns, paired, values=pictures)
    if not pictures or columns:
        return {}
    width_of = played.observation.task.input_range
    shown = [("truth", paired.truth.inputs, width_of), ("reconstruction", paired.inputs, width_of)]
    leaks = leak_map(cell, bench, played) if _has_floor(record) else None
    if leaks is not None:
        shown.append(("leak_map", leaks, (0.0, 1.0)))
    files = {}
    for name, images, span in shown:
        file, content = strip(images, span)
        files[file] = content
        record["pictures"] = {**(record["pictures"] or {}), name: file}
    return files


def _features(played: Round, found: Tensor, layer: str) -> dict[str, Any]:
    """Errors of the features that the attack found, up to sign; None where a true one is zero."""
    task, inputs = played.observation.task, played.truth.inputs
    with torch.no_grad():
        cohort = played.observation.cohort
        true = clients_layer_inputs(task, inputs, [layer], cohort)[layer].flatten(1)
    known: dict[str, Any] = {"layer": layer, "span": None, "errors": None}
    if bool((true != 0).any(1).all()) and bool((found != 0).any(1).all()):
        known["span"] = short(subspace_error(found.T, true))
        errors = feature_errors(found, true, signed=False)
        known["errors"] = [short(float(error)) for error in errors]
    return known


def _bounds(cell: plans.Cell, bench: Bench, played: Round) -> dict[str, Any]:
    """The floors and the risk laws of a cell, and why some are not there."""
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    for law in (floors, risks):
        try:
            found += law(cell, bench, played)
        except NotApplicable as error:
            notes.append(" ".join(error.reason.split()))
    bounds = [
        {k: short(v) if isinstance(v, float) else v for k, v in bound.items()} for bound in found
    ]
    return {"bounds": bounds, "bounds_note": "; ".join(notes) or None}


def _has_floor(record: dict[str, Any]) -> bool:
    return any(bound.get("probability") is None for bound in record["bounds"])


def release_of(update: Update) -> dict[str, Any]:
    """What is known of an update's noise and of what it leaves out."""
    withheld = 0.0 if update.mask is None else 1 - float(update.mask.double().mean())
    return {
        "law": type(update.law).__name__,
        "private": update.law.private or update.mask_private,
        "withheld": short(withheld),
        "unit": update.unit.noun,
    }


def _utility(played: Round) -> dict[str, float | None]:
    """First-order utility kept, and the equal noise of the same second-order cost (paper A).

    Shares of the plain gradient's: <g, E y> / ||g||², and sqrt(Σ g² v / ||g||²) for noise of
    variances v; None where the release is not that of one client's gradient, or has no known law.
    """
    update, truth = played.update, played.truth
    nothing: dict[str, float | None] = {"first_order": None, "second_order": None}
    plain = len(update.rows) == 1 and len(played.observation.cohort) == 1
    if not plain or played.observation.task.plan.steps > 1:
        return nothing
    g = gradient(played.observation.task, truth.inputs, truth.labels).detach().double()
    total, law = float(g.square().sum()), update.law
    if not total > 0 or not isinstance(law, Exact | Gaussian):
        return nothing
    variance = law.variance if isinstance(law, Gaussian) else 0.0
    noise = float((g.square() * torch.as_tensor(variance).to(g)).sum()) / total
    if isinstance(law, Gaussian):
        return {"first_order": None, "second_order": short(noise**0.5)}
    share = float((g * update.rows[0].double()).sum()) / total
    return {"first_order": short(share), "second_order": 0.0}


def short(value: float | None) -> float | None:
    """Nine digits, and None for what JSON has no number for."""
    if value is None or value != value or value in (float("inf"), float("-inf")):
        return None
    return float(f"{value:.9g}")
