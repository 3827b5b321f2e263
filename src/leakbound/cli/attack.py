"""`leakbound attack` on a simulated update: one experiment, and what came out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.table import Table

from leakbound import audit as audits
from leakbound import check, registry
from leakbound._util.formats import UNKNOWN, format_fixed
from leakbound.assess.record import OPEN, Assessment
from leakbound.attacks import Attack
from leakbound.attacks.pace import Pace, planned
from leakbound.audit import diagnosis
from leakbound.audit.context import check_plan
from leakbound.audit.plan import Plan, build_attack
from leakbound.cli import captured, describe, options, trees
from leakbound.cli.shared import Bar, announce_code, check_files, write_files
from leakbound.cli.terminal import as_json, brief, console, errors, table
from leakbound.risk.statement import of_assessment, of_guarantee

DEFAULT = "inverting_gradients"
"""The attack where none is named."""


def attack(command: options.AttackOptions) -> int:
    if command.kind == "xgboost":
        return trees.attack(command)
    if command.update is not None:
        return captured.attack(command)
    options.refuse_unused(command, options.OF_EXPERIMENTS)
    if len(command.attack) > 1:
        raise ValueError(
            f"--attack has {len(command.attack)} names; give one (several go with --update)"
        )
    name = command.attack[0] if command.attack else DEFAULT
    batch_size = 1 if command.batch_size is None else command.batch_size
    check.count(batch_size=batch_size)
    if command.diagnose and command.json:
        raise ValueError("diagnose is text for the screen; leave out --diagnose or --json")
    if command.seed < 0:
        raise ValueError(f"seed is {command.seed}; give a whole number of at least 0")
    plan = _plan(command, name, batch_size)
    units = plan.experiments()
    # Before the experiment, which may take minutes.
    if command.out is not None:
        check_files(command.out, ("truth.png", "reconstruction.png", "leak_map.png"))
    if len(units) != 1:
        raise ValueError(
            f"the settings name {len(units)} experiments; give one value for each setting"
        )
    announce_code(plan)
    context = audits.PlanContext(plan.data)
    check_plan(plan, context)
    with _progress(command, build_attack(units[0].attack)):
        result = audits.run_experiment(units[0], context)
    record = result.record
    assert isinstance(record, Assessment)  # a plan without [utility] has no trainings
    if command.out is not None:
        named = record.pictures.items()
        write_files(command.out, {f"{name}.png": result.pictures[file] for name, file in named})
    if command.json:
        print(as_json(record))
    else:
        _show(record, command, name)
        if command.diagnose and record.verdict in OPEN:
            why = diagnosis.diagnose_unit(units[0], context)
            console.print(f"why: {diagnosis.text(why)}")
    return {"ok": 0, "failed": 1, "not_applicable": 2}[record.status]


def _plan(
    command: options.AttackOptions,
    name: str,
    batch_size: int,
) -> Plan:
    path = command.lpips_weights
    return audits.parse(
        {
            "data": {"source": command.data, "loss": command.loss}
            | ({} if command.schema is None else {"schema": str(command.schema)}),
            "models": [registry.row_of("model", command.model)],
            "attacks": [registry.row_of("attack", name)],
            "defenses": [registry.row_of("defense", command.defense or "none")],
            "batch_sizes": [batch_size],
            "seeds": [command.seed],
            "threat": {
                "labels_known": not command.labels_unknown,
                "defense_known": not command.defense_unknown,
                "server": "malicious" if command.malicious_server else "honest",
                "statistics_known": command.statistics_known,
                "known": command.known,
            },
            "error_bound": {"kind": command.error_bound},
            "risk": {} if command.people is None else {"people": command.people},
            "metrics": {} if path is None else {"lpips_weights": str(path)},
        }
    )


@contextmanager
def _progress(
    command: options.AttackOptions,
    attack: Attack,
) -> Iterator[None]:
    """Show the steps of a search, of all its restarts together, and keep to the time limit."""
    name = command.attack[0] if command.attack else DEFAULT
    steps = planned(attack)
    restarts = getattr(attack, "restarts", 1)
    text = f"{name} ({restarts} restarts)" if restarts > 1 else name

    def show(step: int) -> None:
        bar(step, max(step, steps), text if step < steps else "measuring")

    with Bar(errors, "steps") as bar, Pace(command.time, show):
        bar(0, steps, text)
        yield


def _show(
    record: Assessment,
    command: options.AttackOptions,
    name: str,
) -> None:
    console.print(f"attack:  {brief(name)}")
    size = record.batch_size
    console.print(f"model:   {brief(command.model)} on {brief(command.data)}, batch size {size}")
    if record.model.loss != options.AttackOptions.loss:
        console.print(f"loss:    {record.model.loss}")
    promise = of_guarantee(record.defense)
    shown = brief(command.defense or "none")
    console.print(f"defense: {shown} (guarantee: {promise})")
    if record.threat.known:
        console.print(f"known:   {brief(record.threat.known)}")
    if record.status != "ok":
        console.print(f"{record.status.replace('_', ' ')}: {brief(record.reason or '')}")
        entry = registry.find("attack", record.attack.name)
        if record.threat.server == "honest" and describe.is_malicious(entry):
            console.print("This attack needs a malicious server: add --malicious-server.")
        return
    if record.release is not None and (record.release.round or 1) > 1:
        console.print(
            f"round:   {record.release.round}, the first in which the defense has an effect; "
            "earlier rounds have no protection"
        )
    captured.show_facts([record])
    if record.matched:
        console.print(_measured(record))
    captured.show_row(record)
    if record.problem:
        console.print(f"the attack reports a problem: {brief(record.problem)}")
    for said in of_assessment(record, reasons=False):
        console.print(brief(said))
    captured.show_scope(record.bounds, explain=command.explain)
    console.print(f"verdict: [bold]{record.verdict}[/bold] (threshold {record.criterion.goal})")


def _measured(record: Assessment) -> Table:
    known = {"ssim": "SSIM", "lpips": "LPIPS"}
    more = [name for name in known if name in record.metrics]
    criterion = record.criterion
    matches = record.reidentified
    named = [f"named of {one.candidates} ({one.matcher})" for one in matches]
    score = f"{criterion.axis}{' dB' * (criterion.unit == 'dB')}"
    shown = table(right=["example", score, "baseline", *(known[name] for name in more), *named])
    columns = [record.scores, record.baseline, *(record.metrics[name] for name in more)]
    for i, row in enumerate(zip(*columns, strict=True)):
        cells = [UNKNOWN if v is None else criterion.shown(v).rpartition(" ")[0] for v in row[:2]]
        for value in row[2:]:
            cells.append(format_fixed(value, 3))
        shown.add_row(str(i), *cells, *("yes" if one.right[i] else "no" for one in matches))
    return shown
