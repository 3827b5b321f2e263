"""What `leakbound evidence` does: a sign-off page with its annex, JSON, a model card's section."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from leakbound import check
from leakbound._util.formats import format_upper
from leakbound._util.text import printable
from leakbound.bounds import conversions
from leakbound.bounds.law import probability, single
from leakbound.cli.shared import check_files, write_files
from leakbound.cli.terminal import console, errors, safe
from leakbound.risk.deployment import file, state
from leakbound.risk.deployment.laws import noise_of
from leakbound.risk.deployment.statement import OF, WHO

if TYPE_CHECKING:
    from leakbound.cli import options
    from leakbound.report.evidence.parts import EpsilonPart, EvidenceReport, Subject
    from leakbound.report.folder import Run
    from leakbound.report.settings import DeclaredTraining
    from leakbound.risk.deployment import Mistake, Row

PAGE = "evidence.html"
DATA = "report.json"
PLAN = "evidence.toml"
CARD = "model-card.md"
RECORDS = ("run.json", "records.jsonl", "utility.jsonl")
LONGEST = 400
"""Letters of a statement."""
MOST_AUDITED = 2
"""Audits of clients that the page has room for."""


def evidence(command: options.EvidenceCommand) -> int:
    from leakbound.report import check_installed, folder
    from leakbound.report import evidence as pages
    from leakbound.report.evidence.privacy import accountant_of

    check_installed()
    statements = _statements(command.declare)
    images = not command.no_examples
    audited = _audited(command.audited)
    out = _place(command)
    single(probability, delta=command.delta)
    runs = [folder.read(place) for place in command.runs]
    if not images:
        runs = [run.withheld() for run in runs]
    names = [PLAN]
    if len(runs) > 1:
        names = [PLAN.replace(".", f"-{number}.") for number in range(1, len(runs) + 1)]
    check_files(out.parent, [out.name, _annex(out), DATA, CARD, *names[: len(runs)]])
    accountant = accountant_of(conversions.epsilon, command.delta)
    subjects = [
        pages.of_run(
            run,
            statements,
            accountant,
            images=images,
            plan=name,
            audited=audited,
            training=_training(command.deployment, run, command.delta),
        )
        for run, name in zip(runs, names, strict=True)
    ]
    content = pages.document(subjects, images=images)
    written = _write(out, content, list(zip(runs, names, strict=True)))
    console.say(f"sign-off page: {safe(out)}")
    console.say(f"in the same folder: {', '.join(written)}")
    _warn(subjects)
    return 0


def _write(
    out: Path,
    content: EvidenceReport,
    runs: Sequence[tuple[Run, str]],
) -> list[str]:
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
    write_files(out.parent, beside)  # before the page, which holds their digests
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

    silent = set()
    for subject in subjects:
        for one in subject.checks:
            if one.holds is False:
                errors.say(
                    f"leakbound: {safe(subject.name)}: does not hold: {one.words} "
                    f"({safe(one.detail)})"
                )
        for item in subject.declared.items:
            if item.status == "not stated" and item.name in STATEMENTS:
                silent.add(item.name)
    if silent:
        errors.say(f"not stated: {', '.join(sorted(silent))}")


def _statements(texts: Sequence[str]) -> dict[str, str]:
    """What approvers state, by name; NAME=TEXT."""
    from leakbound.report.evidence import STATEMENTS

    statements: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            first = next(iter(STATEMENTS))
            raise ValueError(f"declare is {text!r}; write NAME=VALUE, such as {first}=...")
        if name not in STATEMENTS:
            raise ValueError(f"declare has no name {name!r}; {check.closest(name, STATEMENTS)}")
        if name in statements:
            raise ValueError(f"declare names {name} twice; give it once")
        line = printable(value)
        if not line or len(line) > LONGEST:
            raise ValueError(
                f"declare {name} has {len(line)} letters; give a text of 1 to {LONGEST}"
            )
        statements[name] = line
    return statements


def _audited(paths: Sequence[Path]) -> list[EpsilonPart]:
    from leakbound.audit_epsilon import finding
    from leakbound.report.evidence.auxiliary import item
    from leakbound.report.evidence.parts import EpsilonPart, Status

    if len(paths) > MOST_AUDITED:
        raise ValueError(f"audited names {len(paths)} files; give at most {MOST_AUDITED}")
    status: dict[str, Status] = {"declared": "declared", "bounded": "computed"}
    holds = {finding.CONSISTENT: True, finding.LEAKS: False, finding.UNKNOWN: None}
    parts = []
    for path in paths:
        audit = finding.read(path)
        items = tuple(
            item(name, value, status.get(name, "measured"), source)
            for name, value, source in audit.lines
        )
        about = audit.claims.delta, audit.confidence, holds[audit.code], audit.sentence
        parts.append(EpsilonPart(audit.client or path.name, *about, items))
    return parts


def _training(
    path: Path | None,
    run: Run,
    delta: float,
) -> DeclaredTraining | None:
    """What a deployment file says of all rounds, at a run's threshold."""
    if path is None:
        return None
    from leakbound.report.settings import DeclaredTraining

    deployment, mistakes = file.read(path)
    bounds = [bound for a in run.assessments for bound in a.bounds]
    accepted = min((bound.accepted for bound in bounds if bound.accepted), default=None)
    guesses = [a.attained.baseline[1] for a in run.assessments if a.attained is not None]
    rounds = deployment.rounds
    rows: tuple[Row, ...] = ()
    words = f"{path.name}: " + ("rounds not stated" if rounds is None else f"{rounds} rounds")
    if guesses:
        guess = max(guesses)
        known = msgspec.structs.replace(deployment.record, kappa=guess)
        rows = state(msgspec.structs.replace(deployment, record=known), delta=delta)
        kept = tuple(row for row in rows if row.unit in ("example", "person"))
        rows = kept or rows
    if rows:
        units = ", ".join(dict.fromkeys(OF[row.unit] for row in rows))
        said = [f"{WHO[row.audience]} at most {format_upper(row.rises[-1][1])}" for row in rows]
        words += (
            f"; {units} is reconstructed over all rounds with a probability of "
            f"{'; '.join(said)}, if a guess without the training succeeds with at most "
            f"{format_upper(guess)}"
        )
    why = _why_not(rows, accepted, mistakes)
    return DeclaredTraining(path.name, rounds, noise_of(deployment), not why, f"{words}.", why)


def _why_not(
    rows: Sequence[Row],
    accepted: float | None,
    mistakes: Sequence[Mistake],
) -> str:
    """What keeps a declared training from being enough; empty if nothing does."""
    if accepted is None or not rows:
        return "the run has no bound that counts public examples, so no fixed guess is bounded"
    if mistakes:
        return f"its file has a mistake ({mistakes[0].name})"
    worst = max(rows, key=lambda row: row.rises[-1][1])
    if worst.rises[-1][1] <= accepted:
        return ""
    missing = f" (not stated: {', '.join(worst.missing)})" if worst.missing else ""
    return (
        f"over all rounds, the bound for {OF[worst.unit]} ({WHO[worst.audience]}) is "
        f"{format_upper(worst.rises[-1][1])}, and {accepted:g} is accepted{missing}"
    )


def _place(command: options.EvidenceCommand) -> Path:
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
