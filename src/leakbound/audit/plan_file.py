"""Read a plan from TOML: every key known, every value checked, every list expanded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any, cast

from leakbound import check, registry
from leakbound._util import files
from leakbound._util.decibels import EXTREME
from leakbound.audit import plan as plans
from leakbound.core import Server, ThreatModel
from leakbound.risk import ErrorBoundSpec, RiskSpec

NESTED = {"psnr": "criterion", "share": "criterion", "lpips_weights": "metrics"}
"""The plan's fields that are tables."""
KEYS = [NESTED.get(field.name, field.name) for field in fields(plans.Plan)]
LAST_ROUND = 1000
"""The last round that an audit attacks: the server remembers all before it."""


def load(path: Path) -> plans.Plan:
    """Read a plan from a TOML file; for an unknown key or name the error offers the closest."""
    return parse(files.read_toml(path, f"plan {str(path)!r}"), name=path.stem)


def parse(table: Mapping[str, Any], *, name: str = "plan") -> plans.Plan:
    """A plan from the tables of a TOML document.

    Example:
        >>> plan = parse({"models": [{"name": "mlp"}], "attacks": [{"name": "linear_inversion"}],
        ...               "defenses": [{"name": "gaussian_noise", "noise_std": [0.1, 1.0]}]})
        >>> len(plan.experiments())
        2
    """
    check.known_keys("the plan", table, KEYS)
    for key, value in table.items():
        registry.storable(key, value)
    for need in ("models", "attacks"):
        if not table.get(need):
            raise ValueError(f"the plan names no {need}; add [[{need}]] with a name")
    psnr, share = _criterion(_section("criterion", table))
    utility = plans.UtilitySpec(rounds=0)
    if "utility" in table:
        utility = _dataclass(plans.UtilitySpec, "utility", table)
    metrics = _section("metrics", table)
    check.known_keys("metrics", metrics, ["lpips_weights"])
    lpips_weights = metrics.get("lpips_weights")
    if lpips_weights is not None:
        _typed("lpips_weights", lpips_weights, str)
    models = [_models(row) for row in _rows("models", table["models"])]
    defense_rows = _rows("defenses", table.get("defenses", [{"name": registry.NO_DEFENSE}]))
    defenses = [registry.grids_of("defense", row) for row in defense_rows]
    attack_rows = _rows("attacks", table["attacks"])
    attacks = [grid for row in attack_rows for grid in registry.grids_of("attack", row)]
    batch_sizes = _whole("batch_sizes", table.get("batch_sizes", [1]), 1)
    seeds = _whole("seeds", table.get("seeds", [0]), 0)
    rounds = _rounds(table.get("rounds"), utility.rounds)
    # by lengths alone: a list in each setting multiplies beyond any memory
    plans.refuse_large(
        {
            "models": sum(count for count, _ in models),
            "batch_sizes": len(batch_sizes),
            "defenses": sum(math.prod(grid.count for grid in grids) for grids in defenses),
            "attacks": sum(grid.count for grid in attacks),
            "seeds": len(seeds),
            "rounds": len(rounds),
        }
    )
    plan = plans.Plan(
        name=_typed("name", table.get("name", name), str),
        data=_dataclass(plans.DataSpec, "data", table),
        models=tuple(model for _, some in models for model in some),
        defenses=tuple(
            tuple(spec for spec in specs if spec.name != registry.NO_DEFENSE)
            for grids in defenses
            for specs in product(*grids)
        ),
        attacks=tuple(attack for grid in attacks for attack in grid),
        batch_sizes=batch_sizes,
        seeds=seeds,
        threat=_threat(_section("threat", table)),
        psnr=psnr,
        share=share,
        utility=utility,
        error_bound=_dataclass(ErrorBoundSpec, "error_bound", table),
        risk=_risk(table),
        lpips_weights=lpips_weights,
        rounds=rounds,
    )
    # built once here, so that a wrong value stops the audit before its first experiment
    for links in plan.defenses:
        plans.build_defense(links)
    for attack in plan.attacks:
        plans.build_attack(attack)
    return plan


def _risk(table: Mapping[str, Any]) -> RiskSpec:
    """`probability = 0` requests no bound on the probability."""
    value = _section("risk", table)
    if value.get("probability") == 0:
        table = {"risk": {**value, "probability": None}}
    return cast(RiskSpec, _dataclass(RiskSpec, "risk", table))


def _threat(table: Mapping[str, Any]) -> ThreatModel:
    check.known_keys("threat", table, [field.name for field in fields(ThreatModel)])
    server = table.get("server", "honest")
    check.one_of([s.value for s in Server], server=server)
    known = _typed("known", table.get("known", ""), str)
    flags = {key: value for key, value in table.items() if key not in ("server", "known")}
    knows = {key: _typed(key, value, bool) for key, value in flags.items()}
    return ThreatModel(server=Server(server), known=known, **knows)


def _criterion(table: Mapping[str, Any]) -> tuple[float, float]:
    check.known_keys("criterion", table, ["psnr", "share"])
    value = table.get("psnr", 20.0)
    share = table.get("share", 0.9)
    check.positive(psnr=value, share=share)
    if value >= EXTREME:
        raise ValueError(f"psnr is {value:g}; give decibels, such as 20")
    if share > 1:
        raise ValueError(f"share is {share:g}; give a share, such as 0.9")
    return float(value), float(share)


def _rounds(value: Any, last: int) -> tuple[int | None, ...]:
    """The attacked rounds; None if the plan leaves the round to each defense.

    Words name rounds of the training of `[utility]`, which has `last` rounds.
    """
    if value is None:
        return (None,)
    values = value if isinstance(value, list) else [value]
    words = {"first": 1, "middle": (1 + last) // 2, "last": last}
    named = [one for one in values if isinstance(one, str)]
    for one in named:
        check.one_of(words, rounds=one)
    if named and last < 1:
        raise ValueError(
            f"rounds holds {named[0]!r}, a round of the training of [utility], which the plan does "
            "not have; add it, or give a number"
        )
    numbers = [words[one] if isinstance(one, str) else one for one in values]
    found = _whole("rounds", numbers, 1)
    if max(found, default=1) > LAST_ROUND:
        raise ValueError(f"rounds holds {max(found)}; give at most {LAST_ROUND}")
    return found


def _models(row: Mapping[str, Any]) -> tuple[int, Iterator[plans.ModelSpec]]:
    """The number of models in a table, and an iterator that makes them."""
    rest = {k: v for k, v in row.items() if k not in ("train_steps", "weights", plans.SCHEME)}
    steps = _whole("train_steps", row.get("train_steps", 0), 0)
    if not steps:
        raise ValueError("models.train_steps is an empty list; give at least one value")
    schemes = _schemes(row.get(plans.SCHEME, [registry.NO_DEFENSE]))
    weights = row.get("weights")
    if weights is not None:
        _typed("weights", weights, str)
    specs: registry.Grid | tuple[registry.Spec, ...]
    if ":" in _typed("models.name", rest.get("name", ""), str):
        specs = registry.specs_of("model", rest)  # lists are values of the user's own function
        count = len(steps) * len(schemes)
    else:
        (specs,) = registry.grids_of("model", rest)
        count = specs.count * len(steps) * len(schemes)
    return count, (
        plans.ModelSpec(spec.name, (*spec.settings, *scheme), many, weights)
        for spec in specs
        for many in steps
        for scheme in schemes
    )


def _schemes(values: Any) -> list[tuple[tuple[str, str], ...]]:
    """By scheme, what it adds to the settings of a model; nothing for "none"."""
    schemes: list[tuple[tuple[str, str], ...]] = []
    for value in values if isinstance(values, list) else [values]:
        if _typed("models.scheme", value, str) == registry.NO_DEFENSE:
            schemes.append(())
        else:
            registry.parse("scheme", value)
            schemes.append(((plans.SCHEME, value),))
    if not schemes:
        raise ValueError('models.scheme is an empty list; give at least one, or "none"')
    return schemes


def _whole(
    name: str,
    values: Any,
    least: int,
) -> tuple[int, ...]:
    if not isinstance(values, list):
        values = [values]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} holds {value!r}; give whole numbers of at least {least}")
    return tuple(values)


def _rows(name: str, value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise ValueError(f"{name} is {value!r}; write each as a table: [[{name}]]")
    return value


def _section(name: str, table: Mapping[str, Any]) -> Mapping[str, Any]:
    value = table.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r}; write it as a table: [{name}]")
    return value


def _typed(
    name: str,
    value: Any,
    kind: type,
) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r}; give a value of type {kind.__name__}")
    return value


def _dataclass(
    kind: Any,
    name: str,
    table: Mapping[str, Any],
) -> Any:
    return kind(**registry.settle(registry.Entry("table", name, kind), _section(name, table)))
