"""How to run one cell of an audit again by itself, taken from the plan that the run kept.

A cell's name is a hash of all that its record depends on. The plan's entries that give this very
hash are the cell's; where none do, nothing is offered, so what a page offers is never a guess.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

from leakbound.assess.record import Record
from leakbound.report.evidence_plan import toml_of

FLOOR = {"kind": "trace", "prior": "gaussian", "components": 32, "images": 16, "directions": 4}
RISK = {"probability": 0.001, "prior": "mixture", "components": 32}
THRESHOLD = 20.0
_LATER = ("floor", "risk", "lpips_weights")
_WHOLE_PLAN = ("data", "threat", "threshold", *_LATER)
_DAMAGED = (KeyError, TypeError, ValueError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Rerun:
    """What to type, and for settings that a command cannot name the plan to save before."""

    command: str
    plan: str | None = None


def reruns(plan: Record, cells: Iterable[Record]) -> dict[str, Rerun]:
    """By cell, how to run it alone; without the cells that the kept plan does not name.

    Whoever made the run wrote its plan: values are quoted for a shell, and text that a terminal
    would act on is left out.
    """
    found = {}
    alike = cache(partial(_alike, plan))
    for cell in cells:
        names = (cell[kind]["name"] for kind in ("model", "defense", "attack"))
        try:
            known = alike(*names, cell["batch_size"], cell["seed"]).get(cell["cell"])
            made = None if known is None else _rerun(known, cell["cell"])
        except _DAMAGED:
            continue
        if made is not None and _plain_text(made):
            found[cell["cell"]] = made
    return found


def cell_id(known: Mapping[str, Any]) -> str:
    """The name of a cell from all that its record depends on, as audits compute it."""
    kept = dict(known)
    for key, default in (("floor", FLOOR), ("risk", RISK)):
        if kept.get(key) == default:
            del kept[key]
    kept["threat"] = dict(kept["threat"])
    if not kept["threat"].get("statistics_known"):
        kept["threat"].pop("statistics_known", None)
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _alike(
    plan: Record, model: str, defense: str, attack: str, batch_size: int, seed: int
) -> dict[str, dict[str, Any]]:
    """By the hash that names it, every choice of a plan's entries with these names and numbers."""
    common = {key: plan[key] for key in _WHOLE_PLAN if key in plan}
    models = [m for m in plan["models"] if m["name"] == model]
    defenses = [d for d in plan["defenses"] if _name(d) == defense]
    attacks = [a for a in plan["attacks"] if a["name"] == attack]
    found = {}
    for one, links, other in product(models, defenses, attacks):
        own = {"model": one, "defense": links, "attack": other}
        own |= common | {"batch_size": batch_size, "seed": seed}
        found[cell_id(own)] = own
    return found


def _name(links: list[Record]) -> str:
    return "+".join(link["name"] for link in links) or "none"


def _rerun(known: Mapping[str, Any], name: str) -> Rerun:
    if _fits_a_command(known):
        return Rerun(_command(known))
    return Rerun(f"leakbound audit cell.toml --out cell-{name}", _plan(known, name))


def _fits_a_command(known: Mapping[str, Any]) -> bool:
    """Whether `leakbound attack` can name all of it."""
    data, floor = known["data"], dict(known.get("floor", FLOOR))
    return (
        len(known["defense"]) < 2
        and not any(value for key, value in data.items() if key != "source")
        and floor | {"kind": "trace"} == FLOOR
        and known.get("risk", RISK) == RISK
        and known["threshold"] == THRESHOLD
    )


def _command(known: Mapping[str, Any]) -> str:
    threat, words = known["threat"], ["leakbound", "attack"]
    words += ["--attack", _spec(known["attack"]), "--model", _spec(_model(known["model"]))]
    words += ["--data", known["data"]["source"]]
    words += ["--defense", _spec(known["defense"][0])] if known["defense"] else []
    words += ["--batch-size", str(known["batch_size"]), "--seed", str(known["seed"])]
    flags = {
        "--labels-unknown": not threat["labels_known"],
        "--defense-unknown": not threat["defense_known"],
        "--malicious-server": threat["server"] == "malicious",
        "--statistics-known": bool(threat.get("statistics_known")),
    }
    words += [flag for flag, given in flags.items() if given]
    kind = known.get("floor", FLOOR)["kind"]
    words += [] if kind == "trace" else ["--floor", kind]
    weights = known.get("lpips_weights")
    return shlex.join([*words, *(["--lpips-weights", weights] if weights else [])])


def _plan(known: Mapping[str, Any], name: str) -> str:
    """A plan of this cell alone."""
    one = {"models": [known["model"]], "attacks": [known["attack"]], "name": f"cell-{name}"}
    one |= {"defenses": [known["defense"]], "batch_sizes": [known["batch_size"]]}
    return toml_of(dict(known) | one | {"seeds": [known["seed"]]})


def _model(model: Record) -> Record:
    """A model as a name and settings, with what is done to it among them."""
    more = [["train_steps", model["train_steps"]]] if model.get("train_steps") else []
    more += [["weights", model["weights"]]] if model.get("weights") else []
    return {"name": model["name"], "settings": [*model["settings"], *more]}


def _spec(spec: Record) -> str:
    return ",".join([spec["name"], *(f"{k}={_toml(v)}" for k, v in spec["settings"])])


def _toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if not isinstance(value, bool | int | float | str):
        raise ValueError(f"{value!r} has no form in TOML")
    return json.dumps(value, ensure_ascii=False)


def _plain_text(made: Rerun) -> bool:
    """Whether a terminal shows all of it as it is."""
    lines = [made.command, *(made.plan or "").splitlines()]
    return all(line.isprintable() for line in lines)
