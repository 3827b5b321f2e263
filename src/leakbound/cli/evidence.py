"""What `leakbound evidence` does: a sign-off page and its content as JSON, for approvers."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import numpy as np

from leakbound import check
from leakbound._util.decibels import mse_of_psnr
from leakbound._util.text import printable
from leakbound.audit.run_file import versions
from leakbound.bounds import record_priors
from leakbound.bounds.law import positive, probability, single
from leakbound.cli import risk as commands_risk
from leakbound.cli.shared import check_files, write_files
from leakbound.cli.terminal import console, errors, safe
from leakbound.risk.calibrate import UNIFORM, under
from leakbound.risk.corridor import TrainingSetting, epsilon
from leakbound.risk.examples import width_of
from leakbound.risk.statement import UNINFORMED

if TYPE_CHECKING:
    from leakbound.cli import options
    from leakbound.report.evidence.schema import CorridorCurve, Epsilons, Subject
    from leakbound.report.evidence.training import TrainingBounds

PAGE, DATA, PLAN = "evidence.html", "report.json", "evidence.toml"
AROUND = 5.0
"""Decibels that the curve shows beside the thresholds."""
LONGEST = 400
"""Letters of a statement."""


@dataclass(frozen=True)
class TrainingSettings:
    """What --training states; names and meanings as in `leakbound bound`, and the clip norm."""

    noise_multiplier: float | None = None
    sampling_rate: float = 1.0
    steps: int = 1
    clip_norm: float | None = None
    delta: float = 1e-5
    participation: Literal["visible", "hidden"] = "visible"
    data: str | None = None
    dim: int | None = None
    norm: tuple[float, ...] | None = None
    psnr: tuple[float, ...] = (10.0, 15.0, 20.0, 25.0, 30.0)
    eta: tuple[float, ...] = ()
    accept: float = 0.001
    prior: Literal["sphere", "gaussian", "mixture", "gallery"] | None = None
    input_range: tuple[float, ...] = (0.0, 1.0)
    size: int | None = None
    channels: int | None = None
    exclude: tuple[str, ...] = ()


def evidence(command: options.Evidence) -> int:
    """Write the evidence of runs, of a training configuration, or of both."""
    from leakbound.report import check_installed, folder
    from leakbound.report import evidence as pages

    check_installed()
    statements, images = _statements(command.declare), not command.no_images
    out = _place(command)
    single("delta", probability("delta", command.delta))
    runs = [folder.read(place) for place in command.runs]
    names = [PLAN]
    if len(runs) + bool(command.training) > 1:
        names = [PLAN.replace(".", f"-{number}.") for number in range(1, len(runs) + 1)]
    check_files(out.parent, [out.name, DATA, *names[: len(runs)]])
    subjects = [
        pages.of_run(run, statements, _accountant(command.delta), images=images, plan=name)
        for run, name in zip(runs, names, strict=False)
    ]
    plans = {name: one.rerun.plan for name, one in zip(names, subjects, strict=False)}
    if command.training:
        with errors.status("bounding ..."):
            found = _training(command)
        subjects.append(pages.of_training(found, statements))
    content = pages.document(subjects, images=images)
    value = msgspec.to_builtins(content)
    files = {
        out.name: pages.page(content, runs).encode(),
        DATA: json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n",
        **{name: text.encode() for name, text in plans.items() if text is not None},
    }
    write_files(out.parent, files)
    console.print(f"evidence: {safe(out)}", soft_wrap=True)
    rest = [name for name in files if name != out.name]
    console.print(f"beside it: {', '.join(rest)}", soft_wrap=True)
    _warn(subjects)
    return 0


def _warn(subjects: Sequence[Subject]) -> None:
    """Say on the screen what does not hold, and what nobody stated."""
    from leakbound.report.evidence import STATEMENTS

    for subject in subjects:
        for one in subject.checks:
            if one.holds is False:
                errors.print(
                    f"leakbound: {safe(subject.name)}: does not hold: {one.words} "
                    f"({safe(one.detail)})",
                    soft_wrap=True,
                )
    items = [item for subject in subjects for item in subject.declared.items]
    silent = {one.name for one in items if one.status == "not stated" and one.name in STATEMENTS}
    if silent:
        errors.print(f"not stated: {', '.join(sorted(silent))}", soft_wrap=True)


def _statements(given: Sequence[str]) -> dict[str, str]:
    """--declare NAME=TEXT, every name known and given once."""
    from leakbound.report.evidence import STATEMENTS

    found: dict[str, str] = {}
    for name, text in _pairs("declare", given, list(STATEMENTS)):
        line = printable(text)
        if not line or len(line) > LONGEST:
            raise ValueError(
                f"declare {name} has {len(line)} letters; give a text of 1 to {LONGEST}"
            )
        found[name] = line
    return found


def _pairs(option: str, given: Sequence[str], known: Sequence[str]) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign:
            raise ValueError(f"{option} is {text!r}; write NAME=VALUE, such as {known[0]}=...")
        if name not in known:
            raise ValueError(f"{option} has no name {name!r}; {check.closest(name, list(known))}")
        if name in found:
            raise ValueError(f"{option} names {name} twice; give it once")
        found[name] = value
    return list(found.items())


def _place(command: options.Evidence) -> Path:
    """Where the page goes: a file, or a folder that holds it."""
    if not command.runs and not command.training:
        raise ValueError(
            "runs and training are not given; name the folder of a run, or --training "
            "noise_multiplier=1.0 steps=1000 ... (see docs/evidence.md)"
        )
    if len({os.path.realpath(run) for run in command.runs}) < len(command.runs):
        raise ValueError("runs name one folder twice; name each run once")
    if command.out is None:
        if len(command.runs) != 1:
            raise ValueError("out is not given; name the folder for the evidence: --out DIR")
        return command.runs[0] / PAGE
    if command.out.suffix.lower() in (".html", ".htm"):
        return command.out
    return command.out / PAGE


def _accountant(delta: float) -> Callable[[float], Epsilons]:
    """Epsilons of one full-batch release with a noise multiplier."""
    return lambda noise: _epsilons(TrainingSetting(noise, dim=1), delta)


def _epsilons(setting: TrainingSetting, delta: float) -> Epsilons:
    """Of adding or removing one example; of replacing one where that is a shift twice as long.

    It is so in every step whose participation is seen, and with full batches. Of hidden samples
    replacing has another pair of worst cases, for which there is no accountant here.
    """
    from leakbound.report.evidence.schema import Epsilons

    def stated(level: TrainingSetting) -> float | Literal["infinite"]:
        value = float(epsilon(level, delta))
        return value if math.isfinite(value) else "infinite"

    twice = setting.participation == "visible" or setting.sampling_rate == 1
    half = replace(setting, noise_multiplier=setting.noise_multiplier / 2)
    return Epsilons(delta, stated(setting), stated(half) if twice else None)


def _training(command: options.Evidence) -> TrainingBounds:
    """A training configuration with its bounds."""
    from leakbound.report.evidence.training import ThresholdBounds, TrainingBounds

    stated = _pairs("training", command.training, [one.name for one in fields(TrainingSettings)])
    given = _parsed(stated)
    if given.noise_multiplier is None:
        raise ValueError("training has no noise_multiplier; add noise_multiplier=1.0")
    if given.clip_norm is not None:
        positive("clip_norm", given.clip_norm)
    probability("accept", given.accept)
    single("delta", probability("delta", given.delta))
    same = cast(Any, given)  # it has the fields of `leakbound bound` that these read
    thresholds = commands_risk.thresholds_of(same)
    examples = commands_risk.examples_of(same)
    setting = commands_risk.setting_of(same, examples, given.noise_multiplier)
    prior = examples.prior(given.prior)
    edges = under(prior, setting, [eta for _, eta in thresholds])
    matches = [examples.matches(eta) for _, eta in thresholds]
    shares = [None if one is None else one.most for one in matches]
    words = " ".join(map(shlex.quote, command.training))
    return TrainingBounds(
        given={**asdict(given), "dim": setting.dim, "norm": setting.norm},
        stated=[name for name, _ in stated],
        epsilons=_epsilons(setting, given.delta),
        accepted=given.accept,
        prior=UNIFORM if prior is None else prior.name,
        notices=() if edges.informed else (f"{UNINFORMED}; state data=... prior=mixture",),
        thresholds=tuple(
            ThresholdBounds(
                psnr,
                float(edges.attained[i]),
                float(edges.bound[i]),
                shares[i],
                edges.verdict(i, given.accept, shares[i]),
            )
            for i, (psnr, _) in enumerate(thresholds)
        ),
        bound_scope=asdict(edges.bound_scope),
        attained_scope=asdict(edges.attained_scope),
        examples={
            "source": examples.source,
            "values": examples.dim,
            "norms": list(examples.norms),
            "examples": examples.count,
        },
        curve=_curve(thresholds, setting, prior, given),
        versions=versions(),
        command=f"leakbound evidence --training {words} --out rerun",
    )


def _curve(
    thresholds: Sequence[tuple[float, float]],
    setting: TrainingSetting,
    prior: record_priors.RecordPrior | None,
    given: TrainingSettings,
) -> CorridorCurve:
    from leakbound.report.evidence.schema import CorridorCurve

    width = width_of(cast(tuple[float, float], given.input_range))
    psnr = np.linspace(thresholds[0][0] - AROUND, thresholds[-1][0] + AROUND, 61).tolist()
    edges = under(prior, setting, [mse_of_psnr(level, width) for level in psnr])
    return CorridorCurve(
        tuple(psnr), tuple(edges.attained.tolist()), tuple(edges.bound.tolist()), given.accept
    )


def _parsed(given: Sequence[tuple[str, str]]) -> TrainingSettings:
    """NAME=VALUE, by the types of `TrainingSettings`."""
    found: dict[str, Any] = {name: _value(name, text) for name, text in given}
    settings = TrainingSettings(**found)
    if len(settings.input_range) != 2:
        raise ValueError(f"training input_range is {settings.input_range}; give LOW,HIGH")
    check.one_of(["visible", "hidden"], participation=settings.participation)
    if settings.prior is not None:
        check.one_of(["sphere", *record_priors.KINDS], prior=settings.prior)
    return settings


def _value(name: str, text: str) -> Any:
    if name in ("participation", "prior", "data"):
        return text
    if name == "exclude":
        return tuple(text.split(","))
    whole = name in ("steps", "dim", "size", "channels")
    try:
        if whole:
            return int(text)
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or any(math.isnan(number) for number in numbers):
        kind = "a whole number" if whole else "a number, or several with commas between"
        raise ValueError(f"training {name} is {text!r}; give {kind}")
    if name in ("norm", "psnr", "eta", "input_range"):
        return numbers
    if len(numbers) > 1:
        raise ValueError(f"training {name} is {text!r}; give one number")
    return numbers[0]
