"""What `leakbound evidence` does: a sign-off page with its annex, JSON, a model card's section."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from leakbound import check
from leakbound._util.text import printable
from leakbound.bounds import conversions
from leakbound.bounds.law import probability, single
from leakbound.cli.shared import check_files, write_files
from leakbound.cli.terminal import console, errors, safe

if TYPE_CHECKING:
    from leakbound.cli import options
    from leakbound.report.evidence.parts import EpsilonPart, EvidenceReport, Subject
    from leakbound.report.folder import Run

PAGE, DATA, PLAN, CARD = "evidence.html", "report.json", "evidence.toml", "model-card.md"
RECORDS = ("run.json", "records.jsonl", "utility.jsonl")
LONGEST = 400
"""Letters of a statement."""
MOST_AUDITED = 2
"""Audits of clients that the page has room for."""


def evidence(command: options.Evidence) -> int:
    from leakbound.report import check_installed, folder
    from leakbound.report import evidence as pages
    from leakbound.report.evidence.privacy import accountant_of

    check_installed()
    statements, images = _statements(command.declare), not command.no_examples
    audited = _audited(command.audited)
    out = _place(command)
    single("delta", probability("delta", command.delta))
    runs = [folder.read(place) for place in command.runs]
    names = [PLAN]
    if len(runs) > 1:
        names = [PLAN.replace(".", f"-{number}.") for number in range(1, len(runs) + 1)]
    check_files(out.parent, [out.name, _annex(out), DATA, CARD, *names[: len(runs)]])
    accountant = accountant_of(conversions.epsilon, command.delta)
    subjects = [
        pages.of_run(run, statements, accountant, images=images, plan=name, audited=audited)
        for run, name in zip(runs, names, strict=True)
    ]
    content = pages.document(subjects, images=images)
    written = _write(out, content, list(zip(runs, names, strict=True)))
    console.say(f"sign-off page: {safe(out)}")
    console.say(f"in the same folder: {', '.join(written)}")
    _warn(subjects)
    return 0


def _write(out: Path, content: EvidenceReport, runs: Sequence[tuple[Run, str]]) -> list[str]:
    """Write the page after the files that it names with their digests; the names of these.

    `runs`: those of the subjects, and what their plan's file is called.
    """
    from leakbound.report import evidence as pages

    annex = _annex(out)
    value = msgspec.to_builtins(content)
    plans = {
        name: one.rerun.plan.encode()
        for one, (_, name) in zip(content.subjects, runs, strict=True)
        if one.rerun.plan is not None
    }
    beside = {
        annex: pages.annex(content, [run for run, _ in runs]).encode(),
        DATA: json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n",
        CARD: pages.card(content).encode(),
        **plans,
    }
    write_files(out.parent, beside)
    common = pages.digests(out.parent, (annex, DATA, CARD))
    digests = [
        pages.digests(run.folder, RECORDS)
        | common
        | pages.digests(out.parent, [name] if name in plans else [])
        for run, name in runs
    ]
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


def _audited(given: Sequence[Path]) -> list[EpsilonPart]:
    from leakbound.audit_epsilon import finding
    from leakbound.report.evidence.auxiliary import item
    from leakbound.report.evidence.parts import EpsilonPart, Status

    if len(given) > MOST_AUDITED:
        raise ValueError(f"audited names {len(given)} files; give at most {MOST_AUDITED}")
    status: dict[str, Status] = {"declared": "declared", "bounded": "computed"}
    holds = {finding.CONSISTENT: True, finding.LEAKS: False, finding.UNKNOWN: None}
    parts = []
    for path in given:
        own = finding.read(path)
        items = tuple(
            item(name, value, status.get(name, "measured"), source)
            for name, value, source in own.lines
        )
        about = own.claims.delta, own.confidence, holds[own.code], own.sentence
        parts.append(EpsilonPart(own.client or path.name, *about, items))
    return parts


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
    if not command.runs:
        raise ValueError("runs are not given; name the folder of a run (see docs/evidence.md)")
    if len({os.path.realpath(run) for run in command.runs}) < len(command.runs):
        raise ValueError("runs name one folder twice; name each run once")
    if command.out is None:
        if len(command.runs) != 1:
            raise ValueError("out is not given; name the folder for the evidence: --out DIR")
        return command.runs[0] / PAGE
    if command.out.suffix.lower() in (".html", ".htm"):
        return command.out
    return command.out / PAGE
