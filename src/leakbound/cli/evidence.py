"""What `leakbound evidence` does: a sign-off page, its annex and both as JSON, for approvers."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from leakbound import check
from leakbound._util.text import printable
from leakbound.audit.run_file import versions
from leakbound.bounds.law import probability, single
from leakbound.cli import options, parser
from leakbound.cli.risk import bounded
from leakbound.cli.shared import check_files, write_files
from leakbound.cli.terminal import console, errors, safe
from leakbound.risk.calibrate import UNIFORM
from leakbound.risk.corridor import Corridor, TrainingSetting, around, epsilon
from leakbound.risk.examples import width_of
from leakbound.risk.statement import UNINFORMED

if TYPE_CHECKING:
    from leakbound.cli import options
    from leakbound.report.evidence.parts import CorridorCurve, Epsilons, EvidenceReport, Subject
    from leakbound.report.evidence.subjects import TrainingBounds
    from leakbound.report.folder import Run

PAGE, DATA, PLAN = "evidence.html", "report.json", "evidence.toml"
RECORDS = ("run.json", "records.jsonl", "utility.jsonl")
LEFT_OUT = ("out", "json", "explain", "share", "schema")


@dataclass(frozen=True, kw_only=True)
class StatedTraining(options.BoundOptions):
    """What --training states: options of `leakbound bound`, and the clip norm."""

    clip_norm: float | None = None


STATED = [f.name for f in fields(StatedTraining) if f.name not in LEFT_OUT]
OF_DEPLOYMENTS = ("deployment", "flower", "nvflare", "audience")
LONGEST = 400
"""Letters of a statement."""


def evidence(command: options.Evidence) -> int:
    from leakbound.report import check_installed, folder
    from leakbound.report import evidence as pages

    check_installed()
    statements, images = _statements(command.declare), not command.no_examples
    out = _place(command)
    single("delta", probability("delta", command.delta))
    runs = [folder.read(place) for place in command.runs]
    names = [PLAN]
    if len(runs) + bool(command.training) > 1:
        names = [PLAN.replace(".", f"-{number}.") for number in range(1, len(runs) + 1)]
    check_files(out.parent, [out.name, _annex(out), DATA, *names[: len(runs)]])

    def accountant(noise: float) -> Epsilons:
        return _epsilons(TrainingSetting(noise, dim=1), command.delta)

    subjects = [
        pages.of_run(run, statements, accountant, images=images, plan=name)
        for run, name in zip(runs, names, strict=False)
    ]
    if command.training:
        with errors.status("bounding ..."):
            found = _training(command)
        subjects.append(pages.of_training(found, statements))
    content = pages.document(subjects, images=images)
    written = _write(out, content, list(zip(runs, names, strict=False)))
    console.say(f"sign-off page: {safe(out)}")
    console.say(f"in the same folder: {', '.join(written)}")
    _warn(subjects)
    return 0


def _write(out: Path, content: EvidenceReport, runs: Sequence[tuple[Run, str]]) -> list[str]:
    """Write the page after the files that it names with their digests; the names of these.

    `runs`: those of the first subjects, and what their plan's file is called.
    """
    from leakbound.report import evidence as pages

    annex = _annex(out)
    value = msgspec.to_builtins(content)
    plans = {
        name: one.rerun.plan.encode()
        for one, (_, name) in zip(content.subjects, runs, strict=False)
        if one.rerun.plan is not None
    }
    beside = {
        annex: pages.annex(content, [run for run, _ in runs]).encode(),
        DATA: json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n",
        **plans,
    }
    write_files(out.parent, beside)
    common = pages.digests(out.parent, (annex, DATA))
    digests = [
        pages.digests(run.folder, RECORDS)
        | common
        | pages.digests(out.parent, [name] if name in plans else [])
        for run, name in runs
    ]
    digests += [common] * (len(content.subjects) - len(runs))
    write_files(out.parent, {out.name: pages.page(content, digests).encode()})
    return list(beside)


def _annex(page: Path) -> str:
    return f"{page.stem}-annex{page.suffix}"


def _warn(subjects: Sequence[Subject]) -> None:
    """Say on the screen what does not hold, and what nobody stated."""
    from leakbound.report.evidence import STATEMENTS

    for subject in subjects:
        for one in subject.checks:
            if one.holds is False:
                errors.say(
                    f"leakbound: {safe(subject.name)}: does not hold: {one.words} "
                    f"({safe(one.detail)})"
                )
    items = [item for subject in subjects for item in subject.declared.items]
    silent = {one.name for one in items if one.status == "not stated" and one.name in STATEMENTS}
    if silent:
        errors.say(f"not stated: {', '.join(sorted(silent))}")


def _statements(given: Sequence[str]) -> dict[str, str]:
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


def _epsilons(setting: TrainingSetting, delta: float) -> Epsilons:
    """Of adding or removing one example; of replacing one where that is a shift twice as long.

    It is so in every step whose participation is seen, and with full batches. Of hidden samples
    replacing has another pair of worst cases, for which there is no accountant here.
    """
    from leakbound.report.evidence.parts import Epsilons

    def stated(level: TrainingSetting) -> float | Literal["infinite"]:
        value = float(epsilon(level, delta))
        return value if math.isfinite(value) else "infinite"

    twice = setting.participation == "visible" or setting.sampling_rate == 1
    half = replace(setting, noise_multiplier=setting.noise_multiplier / 2)
    return Epsilons(delta, stated(setting), stated(half) if twice else None)


def _training(command: options.Evidence) -> TrainingBounds:
    from leakbound.report.evidence.subjects import ThresholdBounds, TrainingBounds

    names = [name for name in STATED if name not in OF_DEPLOYMENTS]
    stated = dict(_pairs("training", command.training, names))
    given = _options(stated)
    check.given(check.positive, clip_norm=given.clip_norm)
    probability("accept", given.accept)
    single("delta", probability("delta", given.delta))
    examples, edges, rows = bounded(given)
    if examples.domain is not None:
        raise ValueError(
            f"training has data {given.data!r}, whose distance is no mean squared error; this page "
            "states such a training by mean squared errors alone: see leakbound bound"
        )
    setting, words = edges.setting, " ".join(map(shlex.quote, command.training))
    known = {**asdict(given), "dim": setting.dim, "norm": setting.norm}
    shown = ("psnr", "attained", "bound", "matched", "verdict")
    return TrainingBounds(
        given={name: known[name] for name in STATED},
        stated=list(stated),
        epsilons=_epsilons(setting, given.delta),
        accepted=given.accept,
        prior=UNIFORM if edges.prior is None else edges.prior.name,
        notices=() if edges.basis is not None else (f"{UNINFORMED}; state data=...",),
        thresholds=tuple(ThresholdBounds(*(row[name] for name in shown)) for row in rows),
        bound_scope=asdict(edges.bound_scope),
        attained_scope=asdict(edges.attained_scope),
        examples={
            "source": examples.source,
            "values": examples.dim,
            "norms": list(examples.norms),
            "examples": examples.count,
        },
        curve=_curve(edges, given),
        versions=versions(),
        command=f"leakbound evidence --training {words} --out rerun",
    )


def _curve(edges: Corridor, given: options.BoundOptions) -> CorridorCurve:
    from leakbound.report.evidence.parts import CorridorCurve

    psnr, eta, _ = around(edges.prior, edges.eta, width_of(given.input_range), 61)
    edges = edges.at(eta)
    return CorridorCurve(
        tuple(psnr), tuple(edges.attained.tolist()), tuple(edges.bound.tolist()), given.accept
    )


def _options(stated: Mapping[str, str]) -> StatedTraining:
    """The options of `leakbound bound` that NAME=VALUE pairs state, read as on its command line."""
    if "noise_multiplier" not in stated:
        raise ValueError("training has no noise_multiplier; add noise_multiplier=1.0")
    known, words = parser.arguments(StatedTraining), list[str]()
    for name, text in stated.items():
        own = known[name]
        if own.flag and text not in ("true", "false"):
            raise ValueError(f"training {name} is {text!r}; give true or false")
        values = text.split(",") if own.nargs else [text]
        words += [own.option] * (text == "true") if own.flag else [own.option, *values]
    try:
        return parser.parse(StatedTraining, words, "training")
    except ValueError as error:
        raise ValueError(f"training: {error}") from None
