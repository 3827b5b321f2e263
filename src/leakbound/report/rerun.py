"""How to run a plan, or one experiment of it, again: as TOML text and as a command.

`run.json` holds the plan with every list of values expanded. An experiment's name is a hash of all
that its record depends on; where no entries of the plan give this very hash, nothing is offered, so
that what a page offers is never a guess.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

from leakbound._util.text import digest, toml, toml_key
from leakbound.assess.record import Assessment, RunInfo

ERROR_BOUND = {
    "kind": "trace", "prior": "gaussian", "components": 32, "images": 16, "directions": 4
}  # fmt: skip
RISK = {
    "probability": 0.001, "prior": "mixture", "components": 32, "these": False, "people": None
}  # fmt: skip
DATA = {
    "size": None,
    "channels": None,
    "limit": None,
    "bits": None,
    "person": None,
    "loss": "cross_entropy",
}
CRITERION = {"psnr": 20.0, "share": 0.9}
_TABLES = ("data", "threat", "utility", "error_bound", "risk")
_WHOLE_PLAN = ("data", "threat", *CRITERION, "error_bound", "risk", "lpips_weights")
_DAMAGED = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
Table = Mapping[str, Any]


@dataclass(frozen=True)
class Rerun:
    """What to type, and for settings that a command cannot name the plan to save before."""

    command: str
    plan: str | None = None


def command_of(
    info: RunInfo,
    plan: str = "plan.toml",
    out: str = "rerun",
) -> str:
    words = ["leakbound", "audit", plan, "--out", out]
    words += [] if info.pictures else ["--no-examples"]
    words += ["--device", "cuda"] if info.machine.get("device") else []
    return " ".join(words)


def reruns(plan: Table, assessments: Iterable[Assessment]) -> dict[str, Rerun]:
    """By experiment, how to run it alone; without those that the kept plan does not name.

    Whoever made the run wrote its plan: values are quoted for a shell, and text that a terminal
    would act on is left out.
    """
    offered = {}
    choices = cache(partial(_choices, plan))
    for a in assessments:
        try:
            named = choices(a.model.name, a.defense.name, a.attack.name, a.batch_size, a.seed)
            if a.experiment not in named:
                continue
            rerun = _rerun(named[a.experiment], a.experiment)
        except _DAMAGED:
            continue
        lines = [rerun.command, *(rerun.plan or "").splitlines()]
        # A terminal would act on what it cannot show.
        if all(line.isprintable() for line in lines):
            offered[a.experiment] = rerun
    return offered


def toml_of(plan: Table) -> str:
    """The plan as a TOML document that `leakbound audit` reads.

    It names each choice by itself, so that reading it gives the same plan and hash, in the same
    order.
    """
    try:
        names = ["name", "batch_sizes", "seeds", *(["rounds"] if plan["rounds"] != [None] else [])]
        head = _rows({name: plan[name] for name in names})
        models = [f"[[models]]\n{_rows(_spec(_model(row)))}" for row in plan["models"]]
        attacks = [f"[[attacks]]\n{_rows(_spec(row))}" for row in plan["attacks"]]
        defenses = [f"[[defenses]]\n{_rows(_defense(links))}" for links in plan["defenses"]]
        if not models or not attacks or not defenses:
            raise KeyError("a plan names models, attacks and defenses")
        return "\n".join([head, *models, *attacks, *defenses, *_tables(plan)])
    except _DAMAGED:
        raise ValueError("the stored plan has not the form of a plan") from None


def _model(row: Table) -> Table:
    more = [[key, row[key]] for key in ("train_steps", "weights") if row.get(key)]
    return {"name": row["name"], "settings": [*row["settings"], *more]}


def _spec(row: Table) -> dict[str, Any]:
    settings = {str(key): value for key, value in row["settings"]}
    # It would overwrite the name of the attack or model itself.
    if "name" in settings:
        raise KeyError("a setting is called name")
    return {"name": row["name"], **settings}


def _defense(links: list[Table]) -> dict[str, Any]:
    specs = [_spec(link) for link in links] or [{"name": "none"}]
    return {"links": specs} if len(specs) > 1 else specs[0]


def _tables(plan: Table) -> list[str]:
    tables = {name: dict(plan[name]) for name in _TABLES if plan.get(name) is not None}
    if "risk" in tables and tables["risk"].get("probability") is None:
        # TOML has no null: 0 accepts nothing, which a plan reads as none.
        tables["risk"]["probability"] = 0
    tables["criterion"] = {name: plan.get(name) for name in CRITERION}
    tables["metrics"] = {"lpips_weights": plan.get("lpips_weights")}
    kept = {
        name: {k: v for k, v in table.items() if v is not None} for name, table in tables.items()
    }
    return [f"[{name}]\n{_rows(table)}" for name, table in kept.items() if table]


def _rows(rows: Table) -> str:
    return "".join(f"{toml_key(key)} = {toml(value)}\n" for key, value in rows.items())


def _choices(
    plan: Table,
    model: str,
    defense: str,
    attack: str,
    batch_size: int,
    seed: int,
) -> dict[str, dict[str, Any]]:
    """By the hash that names it, every choice of a plan's entries with these names and numbers."""
    common = {key: plan[key] for key in _WHOLE_PLAN}
    common |= {"batch_size": batch_size, "seed": seed}
    every = product(
        (entry for entry in plan["models"] if entry["name"] == model),
        (
            links
            for links in plan["defenses"]
            if defense == ("+".join(link["name"] for link in links) or "none")
        ),
        (entry for entry in plan["attacks"] if entry["name"] == attack),
        plan["rounds"],
    )
    names = ("model", "defense", "attack", "round")
    choices = [dict(zip(names, one, strict=True)) | common for one in every]
    return {digest(choice): choice for choice in choices}


def _rerun(known: Table, name: str) -> Rerun:
    """A command where `leakbound attack` can name all settings, else a plan of this one alone."""
    if (
        len(known["defense"]) < 2
        and DATA.items() <= known["data"].items()
        and known["error_bound"] | {"kind": "trace"} == ERROR_BOUND
        and known["risk"] | {"people": None} == RISK
        and known["round"] is None
        and CRITERION.items() <= known.items()
    ):
        return Rerun(_command(known))
    alone = {
        "name": f"experiment-{name}",
        "models": [known["model"]],
        "attacks": [known["attack"]],
        "defenses": [known["defense"]],
        "batch_sizes": [known["batch_size"]],
        "seeds": [known["seed"]],
        "rounds": [known["round"]],
    }
    plan = toml_of(dict(known) | alone)
    return Rerun(f"leakbound audit experiment.toml --out experiment-{name}", plan)


def _command(known: Table) -> str:
    threat = known["threat"]
    kind = known["error_bound"]["kind"]
    people = known["risk"].get("people")
    options = {
        "--attack": _words(known["attack"]),
        "--model": _words(_model(known["model"])),
        "--data": known["data"]["source"],
        "--schema": known["data"].get("schema"),
        "--defense": _words(known["defense"][0]) if known["defense"] else None,
        "--batch-size": str(known["batch_size"]),
        "--seed": str(known["seed"]),
        "--labels-unknown": not threat["labels_known"],
        "--defense-unknown": not threat["defense_known"],
        "--malicious-server": threat["server"] == "malicious",
        "--statistics-known": threat["statistics_known"],
        "--known": threat.get("known") or None,
        "--error-bound": kind if kind != "trace" else None,
        "--people": None if people is None else str(people),
        "--lpips-weights": known["lpips_weights"],
    }
    words = ["leakbound", "attack"]
    for option, value in options.items():
        if value:
            words += [option] if value is True else [option, value]
    return shlex.join(words)


def _words(spec: Table) -> str:
    return ",".join([spec["name"], *(f"{key}={toml(value)}" for key, value in spec["settings"])])
