"""What `leakbound evidence` does: one page and one JSON for people who must sign."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from leakbound import check
from leakbound._util.text import printable
from leakbound.audit.calibrate import UNIFORM, under
from leakbound.audit.corridor import Corridor, Setting, epsilon
from leakbound.audit.corridor_verdict import UNINFORMED, verdict_of
from leakbound.audit.reach import reach
from leakbound.audit.run_file import versions
from leakbound.bounds import ladder
from leakbound.bounds.law import positive, probability, single
from leakbound.cli import risk as commands_risk
from leakbound.cli.shared import check_files, write_files
from leakbound.cli.terminal import console, errors, safe

if TYPE_CHECKING:
    from leakbound.cli import options

PAGE, DATA, PLAN = "evidence.html", "report.json", "evidence.toml"
AROUND = 5.0
"""Decibels that the curve shows beside the thresholds."""
LONGEST = 400
"""Letters of a statement."""


@dataclass(frozen=True)
class Training:
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
    from leakbound.report import evidence as pages

    pages.check_installed()
    statements, images = _statements(command.declare), not command.no_images
    out = _place(command)
    single("delta", probability("delta", command.delta))
    runs = [pages.read_run(folder) for folder in command.runs]
    names = _plan_names(len(runs), bool(command.training))
    check_files(out.parent, [out.name, DATA, *names])
    subjects = [
        pages.of_run(run, statements, _accountant(command.delta), images=images, plan=name)
        for run, name in zip(runs, names, strict=True)
    ]
    if command.training:
        with errors.status("bounding ..."):
            found = _training(command)
        subjects.append(pages.of_training(found, statements))
    content = pages.document(subjects, images=images)
    files = {
        out.name: pages.page(content, runs).encode(),
        DATA: json.dumps(content, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n",
        **_plans(subjects, names),
    }
    write_files(out.parent, files)
    console.print(f"evidence: {safe(out)}", soft_wrap=True)
    rest = [name for name in files if name != out.name]
    console.print(f"beside it: {', '.join(rest)}", soft_wrap=True)
    _warn(subjects)
    return 0


def _warn(subjects: Sequence[Mapping[str, Any]]) -> None:
    """Say on the screen what does not hold, and what nobody stated."""
    from leakbound.report.evidence_told import STATEMENTS

    for subject in subjects:
        for one in subject["checks"]:
            if one["holds"] is False:
                errors.print(
                    f"leakbound: {safe(subject['name'])}: does not hold: {one['words']} "
                    f"({safe(one['detail'])})",
                    soft_wrap=True,
                )
    silent = {
        item["name"]
        for subject in subjects
        for item in subject["declared"]["items"]
        if item["status"] == "not stated" and item["name"] in STATEMENTS
    }
    if silent:
        errors.print(f"not stated: {', '.join(sorted(silent))}", soft_wrap=True)


def _statements(given: Sequence[str]) -> dict[str, str]:
    """--declare NAME=TEXT, every name known and given once."""
    from leakbound.report.evidence_told import STATEMENTS

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


def _accountant(delta: float) -> Callable[[float], dict[str, Any]]:
    """Epsilons of one full-batch release with a noise multiplier."""

    def of(noise: float) -> dict[str, Any]:
        one, other = (epsilon(Setting(level, dim=1), delta) for level in (noise, noise / 2))
        return {"delta": delta, "add_remove": _told(one), "replace": _told(other)}

    return of


def _training(command: options.Evidence) -> dict[str, Any]:
    """Both edges of a training configuration, as `evidence_training.of_training` takes them."""
    given = _parsed(command.training)
    if given.noise_multiplier is None:
        raise ValueError("training has no noise_multiplier; add noise_multiplier=1.0")
    if given.clip_norm is not None:
        positive("clip_norm", given.clip_norm)
    probability("accept", given.accept)
    single("delta", probability("delta", given.delta))
    same = cast(Any, given)  # it has the fields of `leakbound bound` that these read
    thresholds = commands_risk.thresholds_of(same)
    records = commands_risk.records_of(same)
    setting = commands_risk.setting_of(same, records, given.noise_multiplier)
    prior = commands_risk.prior_of(given.prior, records)
    edges = under(prior, setting, [eta for _, eta in thresholds])
    stated = [name for name, _ in _pairs("training", command.training, _names())]
    words = " ".join(map(shlex.quote, command.training))
    return {
        "given": {**asdict(given), "dim": setting.dim, "norm": setting.norm, "stated": stated},
        "epsilons": _epsilons(setting, given.delta),
        "accepted": given.accept,
        "prior": UNIFORM if prior is None else prior.name,
        "notices": [] if edges.informed else [f"{UNINFORMED}; state data=... prior=mixture"],
        "thresholds": _rows(thresholds, edges, records, given.accept),
        "lower_scope": asdict(edges.lower_scope),
        "upper_scope": asdict(edges.upper_scope),
        "records": {
            "source": records.source,
            "values": records.dim,
            "norms": list(records.norms),
            "records": records.count,
        },
        "curve": _curve(thresholds, setting, prior, given.input_range),
        "versions": versions(),
        "command": f"leakbound evidence --training {words} --out rerun",
    }


def _names() -> list[str]:
    return [field.name for field in fields(Training)]


def _parsed(given: Sequence[str]) -> Training:
    """NAME=VALUE, by the types of `Training`."""
    found: dict[str, Any] = {}
    for name, text in _pairs("training", given, _names()):
        found[name] = _value(name, text)
    training = Training(**found)
    if len(training.input_range) != 2:
        raise ValueError(f"training input_range is {training.input_range}; give LOW,HIGH")
    check.one_of(["visible", "hidden"], participation=training.participation)
    if training.prior is not None:
        check.one_of(["sphere", *ladder.KINDS], prior=training.prior)
    return training


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


def _rows(
    thresholds: Sequence[tuple[float, float]],
    edges: Corridor,
    records: commands_risk.Records,
    accepted: float,
) -> list[dict[str, Any]]:
    seen, rows = records.images, []
    for i, (psnr, eta) in enumerate(thresholds):
        alike = None if seen is None else reach(seen, eta).most
        lower, upper = float(edges.lower[i]), float(edges.upper[i])
        verdict = verdict_of(edges, i, alike, accepted)
        row: dict[str, Any] = {"psnr": psnr, "mse": eta, "lower": lower, "upper": upper}
        rows.append({**row, "alike": alike, "verdict": verdict})
    return rows


def _epsilons(setting: Setting, delta: float) -> dict[str, Any]:
    """Of adding or removing one example; of replacing one where that is a shift twice as long.

    It is so in every step whose participation is seen, and with full batches. Of hidden samples
    replacing has another pair of worst cases, for which there is no accountant here.
    """
    twice = setting.participation == "visible" or setting.sampling_rate == 1
    half = replace(setting, noise_multiplier=setting.noise_multiplier / 2)
    return {
        "delta": delta,
        "add_remove": _told(epsilon(setting, delta)),
        "replace": _told(epsilon(half, delta)) if twice else None,
    }


def _curve(
    thresholds: Sequence[tuple[float, float]],
    setting: Setting,
    prior: ladder.Rung | None,
    input_range: Sequence[float],
) -> dict[str, list[float]]:
    low, high = input_range
    psnr = np.linspace(thresholds[0][0] - AROUND, thresholds[-1][0] + AROUND, 61)
    edges = under(prior, setting, (high - low) ** 2 / 10 ** (psnr / 10))
    return {name: np.asarray(rows).tolist() for name, rows in
            (("psnr", psnr), ("lower", edges.lower), ("upper", edges.upper))}  # fmt: skip


def _told(value: float) -> float | str:
    return float(value) if math.isfinite(value) else "infinite"


def _plan_names(runs: int, training: bool) -> list[str]:
    """What the plans of the runs are called: numbered where there is more than one subject."""
    if runs + training == 1:
        return [PLAN] * runs
    return [PLAN.replace(".", f"-{number}.") for number in range(1, runs + 1)]


def _plans(subjects: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, bytes]:
    """The plans of the runs, each as a file that runs it again."""
    texts = [subject["rerun"]["plan"] for subject in subjects]
    pairs = zip(names, texts, strict=False)
    return {name: text.encode() for name, text in pairs if text is not None}
