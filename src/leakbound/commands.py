"""What the command line's commands do."""

from __future__ import annotations

import errno
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.markup import escape
from rich.table import Table

from leakbound import audit as audits
from leakbound import check, registry
from leakbound._util import files
from leakbound.assess.record import Assessment, ColumnResult
from leakbound.attacks.pace import Pace, planned
from leakbound.audit.experiment import defense_info
from leakbound.audit.folder import Runner
from leakbound.audit.plan import (
    Experiment,
    Plan,
    Spec,
    TrainingUnit,
    build_attack,
    defense_name,
)
from leakbound.audit.plan_file import LIMIT
from leakbound.progress import Bar, duration
from leakbound.risk.statement import of_bound, of_guarantee
from leakbound.terminal import brief, console, errors

if TYPE_CHECKING:
    from leakbound import options

LONG = 600.0
"""Seconds from which an audit says before it starts how long it takes."""
_OF_UPDATES = (
    *("before", "kind", "input_shape", "classes", "labels", "local_steps", "learning_rate"),
    *("local_batch_size", "steps_search", "truth", "public", "round", "no_images"),
)


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
    console.print(f"{_plural(outcome.experiments, 'experiment')}: {ends}")
    console.print(f"report: {brief(page)}", soft_wrap=True)
    if outcome.failed:
        what = "experiments or trainings" if plan.utility.rounds else "experiments"
        errors.print(f"leakbound: {outcome.failed} {what} failed; the report gives the reasons")
        return 1
    return 0


def attack(command: options.Attack) -> int:
    """Run one experiment and show what came out, or attack a captured update."""
    idle = [n for n in _OF_UPDATES if getattr(command, n) not in (None, "", False, "auto")]
    if idle:
        raise ValueError(f"{idle[0]} goes with a captured update; give --update FILE too")
    if len(command.attack) > 1:
        raise ValueError(f"attack names {len(command.attack)}; name one, or give an --update")
    name = command.attack[0] if command.attack else "inverting_gradients"
    batch_size = 1 if command.batch_size is None else command.batch_size
    check.count(batch_size=batch_size)
    if command.seed < 0:
        raise ValueError(f"seed is {command.seed}; give a whole number of at least 0")
    path = command.lpips_weights
    plan = audits.parse(
        {
            "data": {"source": command.data},
            "models": [spec_of("model", command.model)],
            "attacks": [spec_of("attack", name)],
            "defenses": [spec_of("defense", command.defense)],
            "batch_sizes": [batch_size],
            "seeds": [command.seed],
            "threat": {
                "labels_known": not command.labels_unknown,
                "defense_known": not command.defense_unknown,
                "server": "malicious" if command.malicious_server else "honest",
                "statistics_known": command.statistics_known,
            },
            "error_bound": {"kind": command.error_bound},
            "metrics": {} if path is None else {"lpips_weights": str(path)},
        }
    )
    units = plan.experiments()
    if command.out is not None:
        check_files(command.out, ("truth.png", "reconstruction.png", "leak_map.png"))
    if len(units) != 1:
        raise ValueError(
            f"the settings name {len(units)} experiments; give one value for each setting"
        )
    _announce_code(plan)
    from leakbound.audit.context import check_plan

    context = audits.PlanContext(plan.data)
    check_plan(plan, context)
    steps, bar = planned(build_attack(units[0].attack)), Bar(errors)
    with bar, Pace(command.time, lambda step: bar(step, steps, name)):
        result = next(iter(audits.run(plan, context=context)))
    record = result.record
    assert isinstance(record, Assessment)  # a plan without [utility] has no trainings
    if command.out is not None:
        named = record.pictures.items()
        write_files(command.out, {f"{name}.png": result.pictures[file] for name, file in named})
    if command.json:
        print(json.dumps(msgspec.to_builtins(record), indent=1, sort_keys=True))
    else:
        _show(record)
    return {"ok": 0, "failed": 1, "not_applicable": 2}[record.status]


def listing(command: options.List) -> int:
    """Print what a plan can name."""
    from leakbound import data, metrics
    from leakbound.types import Guarantee

    tables: dict[str, list[dict[str, Any]]] = {}
    for kind in registry.PACKAGES:
        tables["pruning" if kind == "pruning" else f"{kind}s"] = [
            {
                "name": entry.name,
                "summary": entry.summary,
                "parameters": [
                    {"name": p.name, "type": p.kind, "default": p.default} for p in entry.parameters
                ],
            }
            for entry in registry.entries(kind).values()
        ]
    for row in tables["defenses"]:
        built = registry.build("defense", row["name"], {})
        about = defense_info((Spec(row["name"]),), built)
        row |= {"guarantee": about.guarantee, "data_dependent_law": about.data_dependent_law}
        row["summary"] += f" [guarantee: {of_guarantee(about)}]"
    nothing = {"guarantee": Guarantee.NONE.value, "data_dependent_law": False, "parameters": []}
    tables["defenses"].insert(0, {"name": "none", "summary": "The plain update.", **nothing})
    tables["metrics"] = [
        {"name": m.name, "summary": m.description, "parameters": []} for m in metrics.METRICS
    ]
    tables["data"] = [
        {"name": name, "summary": text, "parameters": []} for name, text in data.SOURCES.items()
    ]
    if command.json:
        print(json.dumps(tables, indent=1, default=str))
        return 0
    for title, rows in tables.items():
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        for row in rows:
            settings = ", ".join(f"{p['name']}={p['default']!r}" for p in row["parameters"])
            text = escape(row["summary"]) + (f"\n[dim]{escape(settings)}[/dim]" if settings else "")
            table.add_row(escape(row["name"]), text)
        console.print(table)
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
    text = (
        resources.files("leakbound.experiments").joinpath(f"plans/{name}.toml").read_text("utf-8")
    )
    return audits.parse(tomllib.loads(text)), command.out or Path("runs") / name


def workers_of(asked: int) -> int:
    """How many processes: as many as asked, or one for each core that is ours.

    Raises:
        ValueError: a negative number.
    """
    if asked < 0:
        raise ValueError(f"workers is {asked}; give 0 for one a core, or a number of processes")
    if asked:
        return asked
    ours = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return len(ours) or os.cpu_count() or 1


def _engine(command: options.Audit) -> tuple[Runner, int]:
    """What runs the cells, and with how many workers; 0 for as many as a cluster has CPUs."""
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
    also = f" and {_plural(trainings, 'training')}" if trainings else ""
    console.print(
        f"audit [bold]{brief(plan.name)}[/bold]: "
        f"{_plural(len(plan.experiments()), 'experiment')}{also}, "
        f"{_plural(workers, 'worker') if workers else 'one worker a CPU'}, into {brief(out)}",
        soft_wrap=True,
    )
    _announce_code(plan)


def _announce_code(plan: Plan) -> None:
    from leakbound.audit.context import named_code_of

    for name in named_code_of(plan):
        errors.print(f"importing Python code that the plan names: {brief(name)}", soft_wrap=True)


def spec_of(kind: str, text: str) -> dict[str, Any]:
    """`name,key=value,...` as a table; values as in TOML."""
    name, _, settings = text.partition(",")
    try:
        table = tomllib.loads(f"settings = {{{settings}}}")["settings"]
    except tomllib.TOMLDecodeError:
        raise ValueError(
            f'{kind} is {text!r}; write settings as in {kind} NAME,key=1.5,other="text"'
        ) from None
    if len(text) > LIMIT or "name" in table:
        raise ValueError(f"{kind} is {text!r}; the name stands first: NAME,key=value")
    return {"name": name, **table}


def check_files(folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder that `write_files` would refuse, before any work is done.

    Raises:
        ValueError: no folder, or a file of one of the names that leakbound did not write.
    """
    with files.writing(folder):
        files.check(*(folder / name for name in names))
        if os.path.lexists(folder) and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is no folder")


def write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Put files of these names into a folder, made where it is missing.

    Raises:
        ValueError: it cannot be written, or holds a file of one of the names that leakbound did
            not write; then nothing is written.
    """
    check_files(folder, contents)
    with files.writing(folder):
        files.folder(folder)
        for name, content in contents.items():
            files.write(folder / name, content)


def _show(record: Assessment) -> None:
    console.print(
        f"{brief(record.attack.settings)}\non {brief(record.model.name)} under "
        f"{brief(record.defense.settings)} (guarantee: {of_guarantee(record.defense)})"
    )
    if record.status != "ok":
        console.print(f"{record.status.replace('_', ' ')}: {brief(record.reason or '')}")
        if record.threat.server == "honest" and "malicious server" in (record.reason or ""):
            console.print("(--malicious-server gives the attack such a server)")
        return
    table = Table(show_edge=False)
    learned = record.metrics.get("lpips")
    for column in ("example", "PSNR dB", "baseline", "SSIM", "identified"):
        table.add_column(column, justify="right", overflow="fold")
    if learned is not None:
        table.add_column("LPIPS", justify="right", overflow="fold")
    measured = (record.metrics[name] for name in ("ssim", "identification"))
    rows = zip(record.psnr, record.baseline, *measured, strict=True)
    for i, (psnr, baseline, ssim, identified) in enumerate(rows):
        same = "" if identified is None else ("yes" if identified else "no")
        more = [] if learned is None else [_number(learned[i], 3)]
        values = (_number(psnr, 1), _number(baseline, 1), _number(ssim, 3), same)
        table.add_row(str(i), *values, *more)
    console.print(table)
    _show_columns(record.columns or ())
    if record.problem:
        console.print(f"the attack says that it failed: {brief(record.problem)}")
    for bound in record.bounds:
        console.print(brief(of_bound(bound, record.criterion.value)))
    if record.bounds_note:
        console.print(f"no bound: {brief(record.bounds_note)}")
    console.print(
        f"verdict: [bold]{record.verdict}[/bold] (threshold {record.criterion.value:g} dB)"
    )


def _show_columns(columns: Sequence[ColumnResult]) -> None:
    """The columns of a table, the best known first; nothing for images."""
    if not columns:
        return
    table = Table(show_edge=False)
    for head in ("column", "mean error", "worst", "known"):
        table.add_column(head, justify="left" if head == "column" else "right", overflow="fold")
    for column in sorted(columns, key=lambda c: (-c.matched, c.name)):
        values = (f"{column.mean:.3g}", f"{column.worst:.3g}", f"{column.matched:.0%}")
        table.add_row(brief(column.name), *values)
    console.print(table)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def showing(bar: Bar) -> Callable[[audits.Progress], None]:
    """What shows an audit's progress on a bar; before a long one it says so."""
    warned = False

    def show(now: audits.Progress) -> None:
        nonlocal warned
        if not warned and now.left is not None and now.left > LONG:
            errors.print(
                f"this takes about {duration(now.left)} by an estimate ({brief(now.basis)}); it "
                "can be stopped and started again at any time, and fewer steps, experiments or a "
                "smaller model make it shorter",
                soft_wrap=True,
            )
        warned = True
        text = "starting" if now.current is None else _describe(now.current)
        text = "writing the report" if now.done == now.total else text
        bar(now.done, now.total, text, now.left)

    return show


def _describe(unit: Experiment | TrainingUnit) -> str:
    what = unit.attack.name if isinstance(unit, Experiment) else "training"
    return f"{what} · {unit.model.name} · {defense_name(unit.defense)}"
