"""`leakbound audit` and `leakbound train`: run a plan into a folder, and show the results."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.markup import escape

from leakbound import audit as audits
from leakbound import data
from leakbound._util.formats import UNKNOWN, format_fixed
from leakbound.assess.record import Training, decode
from leakbound.audit.context import usable
from leakbound.audit.folder import Runner
from leakbound.audit.plan import Plan
from leakbound.cli import options, shared, terminal
from leakbound.cli.terminal import brief, console, errors

if TYPE_CHECKING:
    from leakbound.report.tables import MeanInterval, TrainingCost


def audit(command: options.Audit) -> int:
    from leakbound import report as reports
    from leakbound.report.page import FILE

    reports.check_installed()
    usable(command.device)
    plan, out = _plan(command)
    shared.check_files(out, [FILE])
    run, workers = _engine(command)
    trainings = len(plan.trainings())
    also = f" and {shared.plural(trainings, 'training')}" if trainings else ""
    console.say(
        f"audit [bold]{brief(plan.name)}[/bold]: "
        f"{shared.plural(len(plan.experiments()), 'experiment')}{also}, "
        f"{shared.plural(workers, 'worker') if workers else 'one worker per CPU'}, "
        f"into {brief(out)}"
    )
    shared.announce_code(plan)
    with shared.Bar(console) as bar:
        outcome = audits.audit(
            plan,
            out,
            workers=workers,
            pictures=not command.no_examples,
            device=command.device,
            watch=shared.showing(bar),
            run=run,
        )
    if command.diagnose:
        with shared.Bar(console, "diagnoses") as bar:
            show = partial(bar, current="why undecided")
            audits.diagnose_undecided(
                plan,
                out,
                device=command.device,
                watch=show,
            )
    page = reports.write(out, images=not command.no_examples)
    console.print(_counted(out))
    console.say(f"report: {brief(page)}")
    if outcome.failed:
        what = "experiments or trainings" if plan.utility.rounds else "experiments"
        errors.print(f"leakbound: {outcome.failed} {what} failed; the report gives the reasons")
        return 1
    return 0


def _counted(out: Path) -> str:
    from leakbound.report import folder

    run = folder.read(out)
    rows, ends = shared.verdicts(run.assessments, run.trainings)
    many = shared.plural(rows, "configuration")
    failed = sum(one.status == "failed" for one in run.assessments)
    rest = f"; {failed} of {len(run.assessments)} experiments failed" if failed else ""
    return f"{many} (model, batch size, defense): {ends}{rest}"


def _plan(command: options.Audit) -> tuple[Plan, Path]:
    if command.plan is not None and command.quick:
        raise ValueError(
            f"quick runs a built-in plan, but plan is {str(command.plan)!r}; give a plan or "
            "--quick, not both"
        )
    if command.plan is not None:
        if command.data is not None or command.schema is not None:
            option = "data" if command.data is not None else "schema"
            raise ValueError(f"{option} goes with a built-in plan; name it in [data] of the plan")
        plan = audits.load(command.plan)
        if command.out is None:
            raise ValueError("out is not given; a plan of your own needs a folder: --out DIR")
        return plan, command.out
    name = "quick" if command.quick else "demo"
    source = {}
    masks = False
    if command.data is not None:
        source = {"source": command.data}
        if command.schema is not None:
            source["schema"] = str(command.schema)
        shared.announce_data("data", command.data)
        dataset = data.load(command.data, schema=command.schema)
        name = "quick"
        if dataset.columns:
            name = "table"
        elif dataset.words:
            name = "text"
        masks = dataset.labels.ndim > 2
    elif command.schema is not None:
        raise ValueError(f"schema is {str(command.schema)!r} without a table; add --data FILE")
    text = resources.files("leakbound.audit").joinpath(f"plans/{name}.toml").read_text("utf-8")
    table = tomllib.loads(text)
    table["data"] |= source
    if masks:
        table["models"] = [{"name": "unet"}]
    return audits.parse(table), command.out or Path("runs") / name


def _engine(command: options.Audit) -> tuple[Runner, int]:
    """What runs the experiments, and the number of workers; 0 means one per CPU of a cluster."""
    if command.engine == "local":
        if command.address is not None:
            raise ValueError(
                f"address is {command.address!r}, but engine is 'local'; give --engine ray too"
            )
        return audits.run, shared.workers_of(command.workers)
    from leakbound import cluster

    if command.address is None or command.workers < 0:
        return cluster.engine(), shared.workers_of(command.workers)
    return cluster.engine(command.address), command.workers


def train(command: options.Train) -> int:
    from leakbound.report import tables

    plan = audits.load(command.plan)
    if not plan.trainings():
        raise ValueError(
            f"plan is {str(command.plan)!r}, which trains nothing: it has no table [utility], or "
            "its rounds are 0; add [utility] with rounds = 40 and repeats = 3"
        )
    # A plan's name may hold a path: here it becomes one folder's name.
    name = re.sub(r"[^A-Za-z0-9_]+", "-", plan.name)[:60].strip("-") or "plan"
    out = command.out or Path("runs") / f"{name}-training"
    shared.check_files(out, [])
    workers = shared.workers_of(command.workers)
    screen = errors if command.json else console
    many = shared.plural(len(plan.trainings()), "training")
    screen.say(
        f"training [bold]{brief(plan.name)}[/bold]: {many} of "
        f"{plan.utility.rounds} rounds with {plan.utility.clients} clients, {workers} "
        f"{'process' if workers == 1 else 'processes'}, into {brief(out)}"
    )
    shared.announce_code(plan)
    with shared.Bar(console) as bar:
        outcome = audits.audit(
            plan,
            out,
            workers=workers,
            watch=shared.showing(bar),
            trainings_only=True,
        )
    with (out / "utility.jsonl").open("rb") as stream:
        records = {unit.key: unit for unit in (decode(line, Training) for line in stream)}
    units = [records[unit.id] for unit in plan.trainings()]
    rows = [*tables.training_costs(units, tables.Names([], units)).values()]
    if command.json:
        print(
            json.dumps(
                [msgspec.to_builtins(row) for row in rows],
                indent=1,
                allow_nan=False,
            )
        )
    else:
        _show(rows)
    if outcome.failed:
        reason = next(unit.reason or "" for unit in units if unit.status == "failed")
        errors.print(f"leakbound: {outcome.failed} trainings failed; the first: {brief(reason)}")
        return 1
    return 0


def _show(rows: Sequence[TrainingCost]) -> None:
    right = ["loss", "accuracy", "balanced", "AUC", "seeds"]
    pruned = any(isinstance(row.sent, float) for row in rows)
    right += ["left", "kB sent"] * pruned
    shown = terminal.table("model", "defense", right=right)
    shown.caption = "mean [95 % interval over seeds]"
    shown.caption_justify = "left"
    for row in rows:
        words = (*_words(row), *_size(row) * pruned)
        shown.add_row(brief(row.model), brief(row.defense), *map(escape, words))
    console.print(shown)
    for model in dict.fromkeys(row.model for row in rows if row.unskilled):
        console.say(
            f"{brief(model)}: the undefended training did not beat the majority class, so what a "
            "defense costs in accuracy is unknown"
        )


def _words(row: TrainingCost) -> tuple[str, ...]:
    loss = _number(row.loss) + (f" ({row.diverged} diverged)" if row.diverged else "")
    seeds = row.accuracy.n if row.accuracy else 0
    balanced = format_fixed(row.balanced_accuracy, 3)
    area = format_fixed(row.auc, 3)
    failed = f" ({row.failed} without a result)" if row.failed else ""
    return loss, _number(row.accuracy), balanced, area, f"{seeds}{failed}"


def _size(row: TrainingCost) -> tuple[str, str]:
    """The share of weights that pruning left, and the size of a client's message."""
    if not isinstance(row.kept, float) or not isinstance(row.sent, float):
        return "100 %", UNKNOWN
    return f"{100 * row.kept:.0f} %", f"{row.sent / 1000:,.1f}"


def _number(value: MeanInterval | None) -> str:
    if value is None:
        return UNKNOWN
    between = ""
    if value.low is not None:
        between = f" [{format_fixed(value.low, 3)}, {format_fixed(value.high, 3)}]"
    return f"{format_fixed(value.mean, 3)}{between}"
