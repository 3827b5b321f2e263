"""What a notebook shows of audits, cells, corridors and calibrations, as HTML."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from leakbound._util import pictures
from leakbound.audit.bound_text import floor_sentence
from leakbound.audit.corridor_verdict import UNINFORMED
from leakbound.bounds.law import Scope

if TYPE_CHECKING:
    from leakbound.audit.calibrate import Calibration
    from leakbound.audit.cells import Result
    from leakbound.audit.corridor import Corridor, Setting
    from leakbound.audit.folder import Outcome

SHOWN = 7
"""Thresholds of a corridor in its table at most; the curve shows all."""
_PICTURES = {"truth": "true", "reconstruction": "rebuilt", "leak_map": "leak map"}


def of_outcome(outcome: Outcome) -> str:
    """How the cells of an audit ended."""
    rows = [(word.replace("_", " "), n) for word, n in outcome.counts.items()]
    failed = f"failed cells or trainings: {outcome.failed}" if outcome.failed else ""
    return pictures.block(
        f"Audit of {outcome.cells} cells",
        pictures.table(("verdict", "cells"), rows),
        pictures.note(failed) if failed else "",
        pictures.note(f"records in {outcome.folder}"),
    )


def of_result(result: Result) -> str:
    """One cell: its verdict, pictures and numbers, or why there are none."""
    record = result.record
    title = f"{record.get('verdict') or record['status'].replace('_', ' ')}"
    if "attack" not in record:
        return pictures.block(title, _training(record))
    what = (
        f"{record['attack']['settings']} on {record['model']['name']} under "
        f"{record['defense']['settings']}"
    )
    if record["status"] != "ok":
        return pictures.block(title, pictures.note(what), pictures.note(record["reason"]))
    problem = record["problem"]
    return pictures.block(
        title,
        pictures.note(what),
        *_strips(result),
        _scores(record),
        pictures.note(f"the attack says that it failed: {problem}") if problem else "",
        *(pictures.note(_bound(bound)) for bound in record["bounds"]),
        pictures.note(f"no floor: {record['bounds_note']}") if record["bounds_note"] else "",
    )


def of_corridor(edges: Corridor) -> str:
    """Both edges as curves and a table, with whom each covers."""
    names = ("attained", "no attacker exceeds")
    lines = ((names[0], edges.lower.tolist()), (names[1], edges.upper.tolist()))
    curve = ""
    if len(edges.eta) > 1:
        axes = ("mean squared error reached", "probability")
        curve = pictures.curves(edges.eta.tolist(), lines, x_name=axes[0], y_name=axes[1])
    order = np.argsort(edges.eta)
    last = len(order) - 1
    places = [order[round(last * i / (SHOWN - 1))] for i in range(SHOWN)]
    places = places if last >= SHOWN else list(order)
    rows = [
        (
            pictures.number(float(edges.eta[i])),
            _blind(float(edges.log_kappa[i])),
            pictures.number(float(edges.lower[i])),
            pictures.number(float(edges.upper[i])),
        )
        for i in places
    ]
    return pictures.block(
        "Risk that a record is rebuilt",
        pictures.note(_training_words(edges.setting)),
        curve,
        pictures.table(("error at most", "blind", *names), rows),
        _uninformed(edges),
        _scopes(edges),
    )


def of_calibration(found: Calibration) -> str:
    """What was asked for, the setting that meets it, and what it means."""
    edges, setting, saved = found.edges, found.setting, found.less_noise
    pairs: list[tuple[str, object]] = [
        ("noise multiplier", f"{setting.noise_multiplier:g}"),
        ("clip norm", f"{found.clip_norm:g}"),
        ("noise standard deviation", f"{found.noise_std:.5g} on the sum of clipped gradients"),
        ("steps", setting.steps),
        ("sampling rate", f"{setting.sampling_rate:g}"),
        ("who takes part", f"{setting.participation} to the attacker"),
        ("differential privacy", f"epsilon {_epsilon(found.epsilon)} at delta {found.delta:g}"),
        ("a blind guess reaches it with", _blind(float(edges.log_kappa[0]))),
        ("attained", pictures.number(float(edges.lower[0]))),
        ("no attacker exceeds", pictures.number(float(edges.upper[0]))),
        ("prior of the records", found.prior),
        ("verdict", found.verdict),
    ]
    marked = [
        (f"{k} (solved for)" if k.replace(" ", "_") == found.solved else k, v) for k, v in pairs
    ]
    if saved is not None:
        marked.append(
            ("less noise than against identification", f"{saved:.0%} (among {found.records})")
        )
    return pictures.block(
        f"{found.target}", pictures.facts(marked), _uninformed(edges), _scopes(edges)
    )


def _uninformed(edges: Corridor) -> str:
    """That a prior which knows nothing about the data protects nothing."""
    return "" if edges.informed else pictures.note(UNINFORMED)


def _scopes(edges: Corridor) -> str:
    """Whom both edges cover, in small letters."""

    def lines(name: str, scope: Scope) -> str:
        return pictures.note(f"{name}: {scope.attackers}; records: {scope.prior}") + (
            f"<br>{pictures.note(f'it does not say: {scope.not_said}')}"
        )

    return (
        f"{lines('attained', edges.lower_scope)}<br>"
        f"{lines('no attacker exceeds', edges.upper_scope)}"
    )


def _training_words(setting: Setting) -> str:
    steps = "1 step" if setting.steps == 1 else f"{setting.steps} steps"
    rate = f" at sampling rate {setting.sampling_rate:g}" if setting.sampling_rate < 1 else ""
    return (
        f"noise multiplier {setting.noise_multiplier:g}, {steps}{rate}; records of {setting.dim} "
        f"values and norm {setting.norm:g} or more"
    )


def _blind(log_kappa: float) -> str:
    """A probability from its natural logarithm, which may be far below what a float holds."""
    if not math.isfinite(log_kappa):
        return "0"
    if log_kappa > -300:
        return pictures.number(math.exp(log_kappa))
    return f"10^{log_kappa / math.log(10):.0f}"


def _epsilon(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "infinite"


def _training(record: dict[str, Any]) -> str:
    pairs = [(k.replace("_", " "), record.get(k)) for k in ("training_loss", "accuracy", "reason")]
    return pictures.facts(pairs)


def _strips(result: Result) -> list[str]:
    files = result.record["pictures"] or {}
    return [
        f"{pictures.note(word)}<br>{pictures.picture(result.pictures[files[name]], word)}"
        for name, word in _PICTURES.items()
        if files.get(name) in result.pictures
    ]


def _scores(record: dict[str, Any]) -> str:
    measured, blind = record["metrics"], record["blind"]["psnr"]
    rows = [
        (i, *(pictures.number(value) for value in values))
        for i, values in enumerate(zip(measured["psnr"], blind, measured["ssim"], strict=True))
    ]
    return pictures.table(("example", "PSNR in dB", "without the update", "SSIM"), rows)


def _bound(bound: dict[str, Any]) -> str:
    """One floor or risk law of a record in a sentence."""
    if bound.get("probability") is not None:
        return (
            f"{bound['name']}: with probability {bound['probability']:.3g} at most, for "
            f"{bound['covers']} attackers, under the prior {bound['prior']}"
        )
    return floor_sentence(bound)
