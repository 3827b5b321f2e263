"""`leakbound audit`: a plan into a folder, and its report."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from leakbound import audit as audits
from leakbound.audit.folder import Runner
from leakbound.audit.plan import Plan
from leakbound.cli.progress import Bar
from leakbound.cli.shared import announce_code, check_files, plural, showing, workers_of
from leakbound.cli.terminal import brief, console, errors

if TYPE_CHECKING:
    from leakbound.cli import options


def audit(command: options.Audit) -> int:
    """Run an audit into a folder and write its report."""
    from leakbound import report as reports
    from leakbound.report.page import FILE

    reports.check_installed()
    plan, out = _plan(command)
    check_files(out, [FILE])
    run, workers = _engine(command)
    _announce(plan, out, workers)
    with Bar(console) as bar:
        outcome = audits.audit(
            plan,
            out,
            workers=workers,
            pictures=not command.no_images,
            device=command.device,
            watch=showing(bar),
            run=run,
        )
    page = reports.write(out, images=not command.no_images)
    ends = ", ".join(f"{n} {word.replace('_', ' ')}" for word, n in outcome.counts.items())
    console.print(f"{plural(outcome.experiments, 'experiment')}: {ends}")
    console.print(f"report: {brief(page)}", soft_wrap=True)
    if outcome.failed:
        what = "experiments or trainings" if plan.utility.rounds else "experiments"
        errors.print(f"leakbound: {outcome.failed} {what} failed; the report gives the reasons")
        return 1
    return 0


def _plan(command: options.Audit) -> tuple[Plan, Path]:
    if command.plan is not None and command.quick:
        raise ValueError("quick runs a built-in plan; give a plan or --quick, not both")
    if command.plan is not None:
        plan = audits.load(command.plan)
        if command.out is None:
            raise ValueError("out is not given; name the folder for the results: --out DIR")
        return plan, command.out
    name = "quick" if command.quick else "demo"
    text = resources.files("leakbound.audit").joinpath(f"plans/{name}.toml").read_text("utf-8")
    return audits.parse(tomllib.loads(text)), command.out or Path("runs") / name


def _engine(command: options.Audit) -> tuple[Runner, int]:
    """What runs the experiments, and with how many workers; 0 for as many as a cluster has CPUs."""
    if command.engine == "local":
        if command.address is not None:
            raise ValueError(
                f"address is {command.address!r}, but engine is 'local'; give --engine ray too"
            )
        return audits.run, workers_of(command.workers)
    from leakbound import cluster

    if command.address is None or command.workers < 0:
        return cluster.engine(), workers_of(command.workers)
    return cluster.engine(command.address), command.workers


def _announce(plan: Plan, out: Path, workers: int) -> None:
    trainings = len(plan.trainings())
    also = f" and {plural(trainings, 'training')}" if trainings else ""
    console.print(
        f"audit [bold]{brief(plan.name)}[/bold]: "
        f"{plural(len(plan.experiments()), 'experiment')}{also}, "
        f"{plural(workers, 'worker') if workers else 'one worker a CPU'}, into {brief(out)}",
        soft_wrap=True,
    )
    announce_code(plan)
