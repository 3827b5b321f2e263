"""`leakbound attack` on a simulated update: one experiment, and what came out."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from leakbound import audit as audits
from leakbound import check
from leakbound.assess.record import Assessment, ColumnResult
from leakbound.attacks.pace import Pace, planned
from leakbound.audit.context import check_plan
from leakbound.audit.plan import build_attack
from leakbound.audit.plan_file import spec_of
from leakbound.cli import captured, options
from leakbound.cli.shared import Bar, announce_code, check_files, write_files
from leakbound.cli.terminal import brief, console, errors, table
from leakbound.risk.statement import of_assessment, of_guarantee

_OF_UPDATES = (
    *("before", "kind", "input_shape", "classes", "labels", "local_steps", "learning_rate"),
    *("local_batch_size", "steps_search", "truth", "public", "round", "no_images"),
)


def attack(command: options.AttackOptions) -> int:
    if command.update is not None:
        return captured.attack(command)
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
    announce_code(plan)
    context = audits.PlanContext(plan.data)
    check_plan(plan, context)
    steps, bar = planned(build_attack(units[0].attack)), Bar(errors)
    with bar, Pace(command.time, lambda step: bar(step, steps, name)):
        result = audits.run_experiment(units[0], context)
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


def _show(record: Assessment) -> None:
    console.print(
        f"{brief(record.attack.settings)}\non {brief(record.model.name)} under "
        f"{brief(record.defense.settings)} (guarantee: {of_guarantee(record.defense)})"
    )
    if record.status != "ok":
        console.print(f"{record.status.replace('_', ' ')}: {brief(record.reason or '')}")
        if record.threat.server == "honest" and "plants no" in (record.reason or ""):
            console.print("(--malicious-server gives the attack such a server)")
        return
    learned = record.metrics.get("lpips")
    last = [] if learned is None else ["LPIPS"]
    found = table(right=["example", "PSNR dB", "baseline", "SSIM", "identified", *last])
    measured = (record.metrics[name] for name in ("ssim", "identification"))
    rows = zip(record.psnr, record.baseline, *measured, strict=True)
    for i, (psnr, baseline, ssim, identified) in enumerate(rows):
        same = "" if identified is None else ("yes" if identified else "no")
        more = [] if learned is None else [_number(learned[i], 3)]
        values = (_number(psnr, 1), _number(baseline, 1), _number(ssim, 3), same)
        found.add_row(str(i), *values, *more)
    console.print(found)
    _show_columns(record.columns or ())
    if record.problem:
        console.print(f"the attack says that it failed: {brief(record.problem)}")
    for said in of_assessment(record):
        console.print(brief(said))
    console.print(
        f"verdict: [bold]{record.verdict}[/bold] (threshold {record.criterion.value:g} dB)"
    )


def _show_columns(columns: Sequence[ColumnResult]) -> None:
    if not columns:
        return
    found = table("column", right=["mean error", "worst", "known"])
    for column in sorted(columns, key=lambda c: (-c.matched, c.name)):
        values = (f"{column.mean:.3g}", f"{column.worst:.3g}", f"{column.matched:.0%}")
        found.add_row(brief(column.name), *values)
    console.print(found)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
