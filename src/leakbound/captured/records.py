"""Records of attacks on captured updates, in the audit's schema; the truth may be absent."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leakbound import check, metrics, tensors
from leakbound.assess.record import SCHEMA
from leakbound.attacks import settings_hash
from leakbound.attacks.base import Attack, expected_rows, seen_task
from leakbound.audit import plan as plans
from leakbound.audit.bench import Bench
from leakbound.audit.cells import release_of, short
from leakbound.audit.pictures import strip
from leakbound.audit.verdict import verdict
from leakbound.captured.bounds import bounds_of, named_defense
from leakbound.captured.capture import Capture
from leakbound.captured.observe import Understood
from leakbound.captured.proofs import certificate
from leakbound.defenses import Chain, chain
from leakbound.pairing import pair
from leakbound.types import Batch, Observation, Reconstruction

SHOWN, VALUES = 8, 100
"""Of how many inputs that are no pictures the record holds values, and how many of each."""


@dataclass(frozen=True)
class Case:
    """One captured update under attack: what is recorded beside the attack's own result.

    Attributes:
        at: its place among the updates of the run.
        spec: the model by name.
        declared: the defense as it was declared; what an attacker knows of it is in `understood`.
        public: where public images come from; None where there are none.
        truth: the true batch, where the user holds it; no attack sees it.
    """

    capture: Capture
    understood: Understood
    notes: tuple[str, ...]
    at: int
    spec: plans.ModelSpec
    declared: Chain = field(default_factory=chain)
    public: Bench | None = None
    truth: Batch | None = None
    threshold: float = 20.0


@dataclass(frozen=True)
class Explained:
    """How much of the captured update a guess explains, sent through the client's own functions.

    Attributes:
        share: 1 - |seen - expected|^2 / |seen|^2, at the guess's own length.
        direction: the same with the expected update scaled to fit best: the squared cosine.
        scale: that scale; where the rate is not known, an estimate of it.
    """

    share: float
    direction: float
    scale: float


@dataclass(frozen=True)
class Made:
    """A record, and the pictures that it names."""

    record: dict[str, Any]
    pictures: dict[str, bytes] = field(default_factory=dict)


def read_truth(path: Path | str) -> Batch:
    """The true batch of a file: `inputs` (or x, images) and `labels` (or y), in the model's units.

    Raises:
        ValueError: a file without these, or of other types.
    """
    named, _ = tensors.read(Path(path))
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
    if not inputs.is_floating_point() or labels.is_floating_point():
        raise ValueError(
            f"truth {str(path)!r} holds inputs of type {inputs.dtype} and labels of type "
            f"{labels.dtype}; give inputs as floats, as the model was fed, and labels as numbers"
        )
    return Batch(inputs, labels.long())


def check_truth(truth: Batch, observation: Observation) -> Batch:
    """The truth on the task's device, once it fits what was captured."""
    shape = tuple(truth.inputs.shape[1:])
    if shape != observation.input_shape or truth.size != observation.examples:
        raise ValueError(
            f"truth holds {truth.size} inputs of shape {shape}, but the update is that of "
            f"{observation.examples} of shape {observation.input_shape}; give the batch behind it"
        )
    task = observation.task
    low, high = task.input_range
    least, most = float(truth.inputs.min()), float(truth.inputs.max())
    if not (least >= low - 1e-6 * (high - low) and most <= high + 1e-6 * (high - low)):
        raise ValueError(
            f"truth runs from {least:.6g} to {most:.6g}, but input_range is {low:g} to {high:g}; "
            "give the range that the model is fed (--input-range LOW HIGH), and the truth in it"
        )
    check.labels(truth.labels, task.label_range)
    return Batch(truth.inputs.to(task.parameters), truth.labels.to(task.parameters.device))


def explained(understood: Understood, answer: Reconstruction) -> Explained | None:
    """What the guess explains; None where the attack says nothing of the labels of several images.

    Where there is a mask, only the coordinates that were sent count.
    """
    observation = understood.observation
    labels = answer.labels
    if labels is None and observation.examples == 1:
        labels = understood.labels
    if labels is None or len(labels) != observation.examples:
        return None
    task, seen = seen_task(observation), observation.update.rows
    with torch.no_grad():
        rows = expected_rows(observation, task, answer.inputs, labels.to(answer.inputs.device))
    if observation.update.mask is not None:
        rows = rows * observation.update.mask
    a, b = seen.double(), rows.detach().double()
    energy, own, both = float(a.square().sum()), float(b.square().sum()), float((a * b).sum())
    if not energy > 0 or not own > 0:
        return None
    off = float((a - b).square().sum())
    return Explained(1 - off / energy, max(0.0, both) ** 2 / (energy * own), both / own)


def record_of(case: Case, name: str, attack: Attack | None, settings: str = "") -> dict[str, Any]:
    """What a record holds before the attack has run."""
    seen = case.understood.observation
    shown = settings or repr(attack)
    built = case.declared
    links = named_defense(built)
    own = {"name": name, "settings": shown, "hash": settings_hash(attack) if attack else "none"}
    key = [case.at, case.capture.digest, name, shown, repr(built), case.spec.name, seen.cohort[0]]
    key += [repr(seen.task.plan), list(seen.input_shape), seen.threat.labels_known]
    record = {
        "schema": SCHEMA,
        "cell": plans.digest(key)[:16],
        "attack": own,
        "defense": {
            "name": plans.defense_name(links),
            "parameters": plans.plain(plans.defense_parameters(links)),
            "settings": repr(built),
            "guarantee": built.guarantee.value,
            "data_dependent_law": built.data_dependent_law,
        },
        "model": {
            "name": case.spec.name,
            "parameters": {},
            "size": len(seen.task.parameters),
            "train_steps": 0,
            "weights": None,
        },
        "data": {
            "source": "captured",
            "shape": list(seen.input_shape),
            "classes": seen.task.label_range,
        },
        "batch_size": seen.examples,
        "clients": 1,
        "seed": case.at,
        "threat": plans.plain(seen.threat),
        "threshold": {"metric": "psnr", "value": case.threshold},
        "status": "ok",
        "reason": None,
        "bounds": [],
        "bounds_note": None,
        "verdict": None,
        "capture": _capture(case),
    }
    nothing = ("problem", "objective", "release", "metrics", "blind", "pictures")
    return record | dict.fromkeys(nothing)


def judged(
    case: Case,
    record: dict[str, Any],
    spec: plans.Spec | None,
    attack: Attack,
    answer: Reconstruction,
    *,
    pictures: bool,
) -> Made:
    """The record filled in from the guess, and from the truth where there is one."""
    seen = case.understood.observation
    low, high = seen.task.input_range
    start = answer.trace[0] if answer.trace else answer.objective
    record["objective"] = {"start": short(start), "end": short(answer.objective)}
    record["problem"] = answer.problem
    share = explained(case.understood, answer)
    record["capture"] |= {
        "explained": None if share is None else _shares(share, case.understood.rate_known),
        "certificate": None
        if case.understood.defense.links
        else certificate(
            seen,
            attack,
            answer,
            None if share is None else share.direction,
            counted=case.understood.sure("batch size"),
        ),
    }
    certain = record["capture"]["certificate"] is not None
    record["release"] = _release(case.understood)
    record |= bounds_of(case, spec)
    order = None
    if case.truth is None:
        record["verdict"] = verdict([], [], case.threshold, record["bounds"], certified=certain)
    else:
        paired = pair(case.truth, answer)
        order = paired.inputs
        middle = torch.full(seen.input_shape, (low + high) / 2).to(seen.task.parameters)
        public = case.public.public if case.public is not None else None
        blind = middle if public is None else public.inputs.mean(0).to(middle)
        guess = Reconstruction(blind.expand_as(case.truth.inputs).clone())
        others = None if case.public is None else case.public.distractors
        measured = metrics.evaluate(paired, data_range=high - low, distractors=others)
        record["metrics"] = {k: [short(v) for v in values] for k, values in measured.items()}
        of_blind = metrics.psnr(pair(case.truth, guess), data_range=high - low)
        record["blind"] = {"psnr": [short(v) for v in of_blind]}
        scores = measured["psnr"], of_blind
        record["verdict"] = verdict(*scores, case.threshold, record["bounds"], certified=certain)
    inputs = answer.inputs if order is None else order
    return _shown(case, record, inputs) if pictures else Made(record)


def _capture(case: Case) -> dict[str, Any]:
    own = case.capture
    return {
        "name": own.name,
        "kind": own.kind,
        "digest": own.digest,
        "round": own.about.get("round"),
        "client": own.about.get("client"),
        "truth": case.truth is not None,
        "findings": [
            {"name": f.name, "value": f.value, "how": f.how, "sure": f.sure}
            for f in case.understood.findings
        ],
        "notes": [*own.notes, *case.notes, *case.understood.notes],
        "explained": None,
        "certificate": None,
        "values": None,
    }


def _shares(share: Explained, rate_known: bool) -> dict[str, float | None]:
    known = {"direction": short(share.direction), "scale": short(share.scale)}
    return {"share": short(share.share) if rate_known else None, **known}


def _release(understood: Understood) -> dict[str, Any]:
    seen, held = understood.observation, understood.rate_known and not understood.refuted
    return {
        **release_of(seen.update),
        "noise_share": short(seen.noise_share) if held else None,
    }


def _shown(case: Case, record: dict[str, Any], inputs: Tensor) -> Made:
    """The record with its pictures; with values, where an input is no picture."""
    if inputs.ndim != 4 or min(inputs.shape[2:]) == 1:
        rows = inputs[:SHOWN].detach().flatten(1)[:, :VALUES].double().tolist()
        record["capture"]["values"] = [[float(f"{value:.4g}") for value in row] for row in rows]
        return Made(record)
    span = case.understood.observation.task.input_range
    shown = [("reconstruction", inputs)]
    if case.truth is not None:
        shown.insert(0, ("truth", case.truth.inputs))
    files, named = {}, {}
    for name, own in shown:
        file, content = strip(own, span)
        files[file], named[name] = content, file
    return Made({**record, "pictures": named}, files)
