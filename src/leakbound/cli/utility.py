"""What `leakbound calibrate --plan` does: the noise of each defense at an accepted utility."""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields
from pathlib import Path

from rich.markup import escape

from leakbound import audit
from leakbound._util.formats import format_number
from leakbound.audit.noise_at_utility import (
    LEVEL,
    NoisesAtUtility,
    UtilityTarget,
    noise_at_utility,
)
from leakbound.cli import options
from leakbound.cli.shared import Bar, announce_code
from leakbound.cli.terminal import as_json, brief, console, errors, table
from leakbound.report.tables import MeanInterval
from leakbound.risk.calibrate import refuse_given

OWN = ("plan", "target", "json")


def calibration(command: options.Calibrate, path: Path) -> int:
    target = UtilityTarget.parse(command.target)
    refuse_given(
        {
            one.name: None if (value := getattr(command, one.name)) == one.default else value
            for one in fields(command)
            if one.name not in OWN and one.default is not MISSING
        },
        f"{command.target} with a plan",
    )
    plan = audit.load(path)
    announce_code(plan)
    with Bar(errors, "trainings") as bar:
        found = noise_at_utility(plan, target, watch=bar)
    if command.json:
        noises = [asdict(one) for one in found.noises]
        print(as_json({"target": command.target, "most": found.most, "noises": noises}))
    else:
        _show(found)
    return 0


def _show(found: NoisesAtUtility) -> None:
    unit = "points of accuracy" if found.target.kind == "points" else "loss"
    console.print(
        f"at most [bold]{format_number(found.most)}[/bold] ({unit}) more than undefended:"
    )
    shown = table("defense", right=(LEVEL, "costs", "information"))
    for one in found.noises:
        bought = "unknown" if one.information is None else _number(one.information)
        shown.add_row(brief(one.defense), f"{one.noise_std:g}", _number(one.cost), bought)
    console.print(shown)
    for one in found.noises:
        if one.why:
            console.say(f"{brief(one.defense)}: {escape(one.why)}")
    console.say(
        f"mean [95 % interval over {found.noises[0].cost.n} seeds]. Information of an update about "
        "its inputs (trace of the Fisher information), relative to equal noise of this cost. It is "
        "no attack: audit the plan with these noises to attack them."
    )


def _number(found: MeanInterval) -> str:
    low, high = (format_number(end) for end in (found.low or 0.0, found.high or 0.0))
    return escape(f"{format_number(found.mean)} [{low}, {high}]")
