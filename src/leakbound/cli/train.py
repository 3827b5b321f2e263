"""What `leakbound train` does: a plan's trainings, and what each defense costs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.markup import escape
from rich.table import Table

from leakbound import audit as audits
from leakbound.assess.record import Training, decode
from leakbound.audit.context import named_code_of
from leakbound.audit.folder import Runner
from leakbound.audit.plan import Plan
from leakbound.cli.progress import Bar
from leakbound.cli.shared import check_files, showing, workers_of, write_files
from leakbound.cli.terminal import brief, console, errors

if TYPE_CHECKING:
    from leakbound.cli import options
    from leakbound.report.tables import MeanInterval

PAGE = "training.html"


@dataclass(frozen=True)
class TrainingRow:
    """One model under one defense: what its trainings came to.

    A training whose loss is no number is counted in `diverged`, and left out of `loss` alone.
    """

    model: str
    defense: str
    loss: MeanInterval | None
    accuracy: MeanInterval | None
    diverged: int
    failed: int


def train(command: options.Train) -> int:
    """Run a plan's trainings into a folder, show their table and write their curves."""
    from leakbound import report as reports

    reports.check_installed()
    plan = audits.load(command.plan)
    if not plan.trainings():
        raise ValueError(
            f"plan {str(command.plan)!r} trains nothing: it has no [utility], or one with rounds = "
            "0; add a table [utility] with rounds = 40 and repeats = 3"
        )
    out = command.out or Path("runs") / f"{_file_name(plan.name)}-training"
    check_files(out, [PAGE])
    workers = workers_of(command.workers)
    run = _runner(command.engine)
    screen = errors if command.json else console
    screen.print(
        f"training [bold]{brief(plan.name)}[/bold]: {len(plan.trainings())} of "
        f"{plan.utility.rounds} rounds with {plan.utility.clients} clients, {workers} "
        f"{'process' if workers == 1 else 'processes'}, into {brief(out)}",
        soft_wrap=True,
    )
    for name in named_code_of(plan):
        errors.print(f"importing Python code that the plan names: {brief(name)}", soft_wrap=True)
    with Bar(console) as bar:
        outcome = audits.audit(
            plan, out, workers=workers, watch=showing(bar), run=run, trainings_only=True
        )
    return _tell(plan, out, outcome.failed, command.json)


def _runner(engine: str) -> Runner:
    if engine == "local":
        return audits.run
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # read when flwr is imported
    try:
        from leakbound.flower import training
    except ModuleNotFoundError as error:
        raise ValueError(
            f"engine is 'flower', which needs {error.name!r}: install leakbound[flower,ray]"
        ) from None
    return training.run


def _tell(plan: Plan, out: Path, failed: int, as_json: bool) -> int:
    with (out / "utility.jsonl").open("rb") as stream:
        records = {unit.key: unit for unit in (decode(line, Training) for line in stream)}
    units = [records[unit.id] for unit in plan.trainings()]
    rows = table(units)
    page = out / PAGE
    write_files(out, {PAGE: _page(plan, units, rows).encode()})
    if as_json:
        print(json.dumps([msgspec.to_builtins(row) for row in rows], indent=1, allow_nan=False))
    else:
        _show(rows)
        console.print(f"curves: {brief(page)}", soft_wrap=True)
    if failed:
        reason = next(unit.reason or "" for unit in units if unit.status == "failed")
        errors.print(f"leakbound: {failed} trainings failed; the first: {brief(reason)}")
        return 1
    return 0


def table(units: Iterable[Training]) -> list[TrainingRow]:
    """One row a model and defense, in the order of the records.

    Args:
        units: records of trainings, as `utility.jsonl` holds them.
    """
    from leakbound.report import tables

    units = list(units)
    names = tables.Names([], units)
    found: dict[tuple[str, str], list[Training]] = {}
    for unit in units:
        found.setdefault((names.model(unit), names.defense(unit)), []).append(unit)
    rows = []
    for key, own in found.items():
        ok = [unit for unit in own if unit.status == "ok"]
        losses = [unit.training_loss for unit in ok if unit.training_loss is not None]
        rows.append(
            TrainingRow(
                *key,
                loss=tables.mean_of(losses),
                accuracy=tables.mean_of(
                    [unit.accuracy for unit in ok if unit.accuracy is not None]
                ),
                diverged=len(ok) - len(losses),
                failed=len(own) - len(ok),
            )
        )
    return rows


def _show(rows: Sequence[TrainingRow]) -> None:
    shown = Table(
        show_edge=False, caption="mean [95 % interval over seeds]", caption_justify="left"
    )
    for head in ("model", "defense", "training loss", "test accuracy", "seeds", "failed"):
        right = head not in ("model", "defense")
        shown.add_column(head, justify="right" if right else "left", overflow="fold")
    for row in rows:
        shown.add_row(brief(row.model), brief(row.defense), *map(escape, _words(row)))
    console.print(shown)


def _words(row: TrainingRow) -> tuple[str, str, str, str]:
    """Loss, accuracy, seeds and failures as the table has them."""
    loss = _number(row.loss, 3) + (f" ({row.diverged} diverged)" if row.diverged else "")
    seeds = row.accuracy.n if row.accuracy else 0
    return loss, _number(row.accuracy, 3), str(seeds), str(row.failed or "")


def _number(value: MeanInterval | None, digits: int) -> str:
    if value is None:
        return "–"
    if value.low is None or value.high is None:
        return f"{value.mean:.{digits}f}"
    return f"{value.mean:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Training under defenses: {{ name }}</title>
<style>body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse}th,td{padding:.2em .8em;text-align:left}
tr{border-bottom:1px solid #8884}svg{max-width:100%;height:auto}.legend{list-style:none;padding:0}
@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}}</style></head><body>
<h1>Training under defenses: {{ name }}</h1>
<p>{{ rounds }} rounds, {{ clients }} clients a round with {{ batch }} examples each,
{{ optimizer }} at the server. Means over seeds with 95&nbsp;% intervals (Student's t).</p>
<table><tr><th>model</th><th>defense</th><th>training loss</th><th>test accuracy</th>
<th>seeds</th><th>failed</th></tr>
{% for row, words in rows %}<tr><td>{{ row.model }}</td><td>{{ row.defense }}</td>
{% for word in words %}<td>{{ word }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% for panel in panels %}<figure><h2>{{ panel.title }}</h2>
<div role="img" aria-label="{{ panel.description }}">{{ svg(panel.svg) }}</div>
<figcaption>{{ panel.notes|join("; ") }}</figcaption></figure>
{% endfor %}<ul class="legend">{% for label, key in keys %}<li>{{ svg(key) }} {{ label }}</li>
{% endfor %}</ul></body></html>
"""


def _page(plan: Plan, units: Sequence[Training], rows: Sequence[TrainingRow]) -> str:
    from markupsafe import Markup

    from leakbound.report import charts, tables
    from leakbound.report.template import environment_of

    names = tables.Names([], units)
    progress = charts.loss_curves(units, names)
    labels = charts.drawn_losses(progress, names)
    return (
        environment_of()
        .from_string(TEMPLATE)
        .render(
            name=plan.name,
            rounds=plan.utility.rounds,
            clients=plan.utility.clients,
            batch=plan.utility.batch_size,
            optimizer=plan.utility.optimizer,
            rows=[(row, _words(row)) for row in rows],
            panels=charts.loss_panels(progress, labels),
            keys=charts.keys(labels, "kl"),
            svg=Markup,
        )
    )


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "-", name)[:60].strip("-") or "plan"
