"""What a notebook shows of audits, cells, corridors and calibrations, as HTML."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from leakbound import pictures
from leakbound.assess.record import Training
from leakbound.bounds.law import Scope
from leakbound.risk.statement import UNINFORMED, of_bound

if TYPE_CHECKING:
    from leakbound.audit.experiment import Result
    from leakbound.audit.folder import Outcome
    from leakbound.risk.calibrate import Calibration
    from leakbound.risk.corridor import Corridor, TrainingSetting

SHOWN = 7
"""Thresholds of a corridor in its table at most; the curve shows all."""
_PICTURES = {"truth": "true", "reconstruction": "reconstructed", "leak_map": "leak map"}


def of_outcome(outcome: Outcome) -> str:
    """How the experiments of an audit ended."""
    rows = [(word.replace("_", " "), n) for word, n in outcome.counts.items()]
    failed = f"failed experiments or trainings: {outcome.failed}" if outcome.failed else ""
    return pictures.block(
        f"Audit of {outcome.experiments} experiments",
        pictures.table(("verdict", "experiments"), rows),
        pictures.note(failed) if failed else "",
        pictures.note(f"records in {outcome.folder}"),
    )


def of_result(result: Result) -> str:
    """One experiment: its verdict, pictures and numbers, or why there are none."""
    record = result.record
    if isinstance(record, Training):
        names = ("training_loss", "accuracy", "reason")
        pairs = [(name.replace("_", " "), getattr(record, name)) for name in names]
        return pictures.block(record.status.replace("_", " "), pictures.facts(pairs))
    title = (record.verdict or record.status).replace("_", " ")
    what = f"{record.attack.settings} on {record.model.name} under {record.defense.settings}"
    if record.status != "ok":
        return pictures.block(title, pictures.note(what), pictures.note(record.reason))
    rows = [
        (i, *(pictures.number(value) for value in values))
        for i, values in enumerate(
            zip(record.psnr, record.baseline, record.metrics["ssim"], strict=True)
        )
    ]
    problem = record.problem
    return pictures.block(
        title,
        pictures.note(what),
        *(
            f"{pictures.note(word)}<br>{pictures.picture(result.pictures[file], word)}"
            for name, word in _PICTURES.items()
            if (file := record.pictures.get(name)) in result.pictures
        ),
        pictures.table(("example", "PSNR in dB", "prior-only baseline", "SSIM"), rows),
        pictures.note(f"the attack says that it failed: {problem}") if problem else "",
        *(pictures.note(of_bound(bound)) for bound in record.bounds),
        pictures.note(f"no bound: {record.bounds_note}") if record.bounds_note else "",
    )


def of_corridor(edges: Corridor) -> str:
    """Attained success and upper bound as curves and a table, with whom each covers."""
    names = ("attained", "no attacker exceeds")
    lines = ((names[0], edges.attained.tolist()), (names[1], edges.bound.tolist()))
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
            pictures.number(float(edges.attained[i])),
            pictures.number(float(edges.bound[i])),
        )
        for i in places
    ]
    return pictures.block(
        "Risk that an example is reconstructed",
        pictures.note(_training_words(edges.setting)),
        curve,
        pictures.table(("error at most", "blind", *names), rows),
        _uninformed(edges),
        _scopes(edges),
    )


def of_calibration(found: Calibration) -> str:
    """What was asked for, the setting that meets it, and what it means."""
    edges, setting, saved = found.corridor, found.setting, found.less_noise
    pairs: list[tuple[str, object]] = [
        ("noise multiplier", f"{setting.noise_multiplier:g}"),
        ("clip norm", f"{found.clip_norm:g}"),
        ("noise standard deviation", f"{found.noise_std:.5g} on the sum of clipped gradients"),
        ("steps", setting.steps),
        ("sampling rate", f"{setting.sampling_rate:g}"),
        ("who takes part", f"{setting.participation} to the attacker"),
        ("differential privacy", f"epsilon {_epsilon(found.epsilon)} at delta {found.delta:g}"),
        ("a prior-only baseline reaches it with", _blind(float(edges.log_kappa[0]))),
        ("attained", pictures.number(float(edges.attained[0]))),
        ("no attacker exceeds", pictures.number(float(edges.bound[0]))),
        ("prior of the examples", found.prior),
        ("verdict", found.verdict),
    ]
    marked = [
        (f"{k} (solved for)" if k.replace(" ", "_") == found.solved else k, v) for k, v in pairs
    ]
    if saved is not None:
        marked.append(
            ("less noise than against identification", f"{saved:.0%} (among {found.examples})")
        )
    return pictures.block(
        f"{found.target}", pictures.facts(marked), _uninformed(edges), _scopes(edges)
    )


def _uninformed(edges: Corridor) -> str:
    """That a prior which knows nothing about the data protects nothing."""
    return "" if edges.informed else pictures.note(UNINFORMED)


def _scopes(edges: Corridor) -> str:
    """Whom attained success and upper bound cover, in small letters."""

    def lines(name: str, scope: Scope) -> str:
        return pictures.note(f"{name}: {scope.attackers}; records: {scope.prior}") + (
            f"<br>{pictures.note(f'it does not say: {scope.not_said}')}"
        )

    return (
        f"{lines('attained', edges.attained_scope)}<br>"
        f"{lines('no attacker exceeds', edges.bound_scope)}"
    )


def _training_words(setting: TrainingSetting) -> str:
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
