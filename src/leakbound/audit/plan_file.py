"""Read a plan from TOML: every key known, every value checked, every list expanded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

from leakbound import check, registry
from leakbound._util import files
from leakbound._util.decibels import EXTREME
from leakbound.audit import plan as plans
from leakbound.core import Server, ThreatModel
from leakbound.defenses import Chain
from leakbound.registry import spec_of
from leakbound.risk import ErrorBoundSpec, RiskSpec

NESTED = {"psnr": "criterion", "share": "criterion", "lpips_weights": "metrics"}
"""The plan's fields that are tables."""
KEYS = [NESTED.get(field.name, field.name) for field in fields(plans.Plan)]
NO_DEFENSE = {"name": "none"}
LAST_ROUND = 1000
"""The last round that an audit attacks: the server remembers all before it."""


def load(path: Path) -> plans.Plan:
    """Read a plan from a TOML file; for an unknown key or name the error offers the closest."""
    return parse(files.read_toml(path, f"plan {str(path)!r}"), name=path.stem)


def row_of(kind: str, given: object) -> dict[str, Any]:
    """A plan's table from user input: a name with settings, a table, or a registered object."""
    if isinstance(given, str):
        return spec_of(kind, given)
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, Chain):
        rows = [row_of(kind, link) for link in given.links]
        return {"links": rows} if rows else NO_DEFENSE
    name = registry.snake(type(given).__name__)
    if name in registry.entries(kind) and is_dataclass(given):
        own = {f.name: getattr(given, f.name) for f in fields(given) if f.init}
        own = {f: value for f, value in own.items() if value is not None}
        if registry.build(kind, name, own) == given:
            return {"name": name, **own}
    raise ValueError(
        f"{kind} is {str(given)[:60]!r}, which no name and settings describe; give it by name "
        f'(`leakbound list`), as in "NAME,key=1.5"'
    )


def parse(table: Mapping[str, Any], *, name: str = "plan") -> plans.Plan:
    """A plan from the tables of a TOML document.

    Example:
        >>> plan = parse({"models": [{"name": "mlp"}], "attacks": [{"name": "linear_inversion"}],
        ...               "defenses": [{"name": "gaussian_noise", "noise_std": [0.1, 1.0]}]})
        >>> len(plan.experiments())
        2
    """
    _known_keys("the plan", table, KEYS)
    for key, value in table.items():
        _storable(key, value)
    for need in ("models", "attacks"):
        if not table.get(need):
            raise ValueError(f"the plan names no {need}; add [[{need}]] with a name")
    psnr, share = _criterion(_section("criterion", table))
    models = [_models(row) for row in _rows("models", table["models"])]
    defenses = [_defenses(row) for row in _rows("defenses", table.get("defenses", [NO_DEFENSE]))]
    attacks = [_options("attack", row) for row in _rows("attacks", table["attacks"])]
    batch_sizes = _whole("batch_sizes", table.get("batch_sizes", [1]), 1)
    seeds = _whole("seeds", table.get("seeds", [0]), 0)
    plans.refuse_large(
        {
            "models": sum(count for count, _ in models),
            "batch_sizes": len(batch_sizes),
            "defenses": sum(count for count, _ in defenses),
            "attacks": sum(map(_count, attacks)),
            "seeds": len(seeds),
        }
    )
    plan = plans.Plan(
        name=_typed("name", table.get("name", name), str),
        data=_dataclass(plans.DataSpec, "data", table),
        models=tuple(model for _, some in models for model in some),
        defenses=tuple(links for _, some in defenses for links in some),
        attacks=tuple(attack for some in attacks for attack in _specs(some)),
        batch_sizes=batch_sizes,
        seeds=seeds,
        threat=_threat(_section("threat", table)),
        psnr=psnr,
        share=share,
        utility=_utility(table),
        error_bound=_dataclass(ErrorBoundSpec, "error_bound", table),
        risk=_risk(table),
        lpips_weights=_lpips_weights(_section("metrics", table)),
        round=_round(table.get("round")),
    )
    for links in plan.defenses:
        plans.build_defense(links)
    for attack in plan.attacks:
        plans.build_attack(attack)
    return plan


def only(kind: str, given: object) -> Any:
    """The one attack (a spec), or the one defense (its links), that a user's text names."""
    table = {"models": [{"name": "mlp"}], "attacks": [{"name": "dlg"}]}
    found = getattr(parse({**table, f"{kind}s": [row_of(kind, given)]}), f"{kind}s")
    if len(found) != 1:
        raise ValueError(f"{kind} names {len(found)} settings; give one value for each")
    return found[0]


def _utility(table: Mapping[str, Any]) -> plans.UtilitySpec:
    if "utility" not in table:
        return plans.UtilitySpec(rounds=0)
    spec: plans.UtilitySpec = _dataclass(plans.UtilitySpec, "utility", table)
    check.count(clients=spec.clients, batch_size=spec.batch_size, repeats=spec.repeats)
    check.non_negative(rounds=spec.rounds)
    check.positive(learning_rate=spec.learning_rate)
    check.one_of(["adam", "sgd"], optimizer=spec.optimizer)
    return spec


def _risk(table: Mapping[str, Any]) -> RiskSpec:
    """`probability = 0` requests no bound on the probability."""
    value = _section("risk", table)
    if value.get("probability") == 0:
        table = {"risk": {**value, "probability": None}}
    return cast(RiskSpec, _dataclass(RiskSpec, "risk", table))


def _threat(table: Mapping[str, Any]) -> ThreatModel:
    _known_keys("threat", table, [field.name for field in fields(ThreatModel)])
    server = table.get("server", "honest")
    check.one_of([s.value for s in Server], server=server)
    given = {key: _typed(key, value, bool) for key, value in table.items() if key != "server"}
    return ThreatModel(server=Server(server), **given)


def _criterion(table: Mapping[str, Any]) -> tuple[float, float]:
    _known_keys("criterion", table, ["psnr", "share"])
    value = table.get("psnr", 20.0)
    share = table.get("share", 0.9)
    check.positive(psnr=value, share=share)
    if value >= EXTREME:
        raise ValueError(f"psnr is {value:g}; give decibels, such as 20")
    if share > 1:
        raise ValueError(f"share is {share:g}; give a share, such as 0.9")
    return float(value), float(share)


def _lpips_weights(table: Mapping[str, Any]) -> str | None:
    _known_keys("metrics", table, ["lpips_weights"])
    path = table.get("lpips_weights")
    return path if path is None else str(_typed("lpips_weights", path, str))


def _round(value: Any) -> int | None:
    """The attacked round; None if the plan leaves it to each defense."""
    if value is None:
        return None
    if isinstance(value, list):
        raise ValueError(f"round is the list {value}; give one whole number, such as 15")
    (number,) = _whole("round", value, 1)
    if number > LAST_ROUND:
        raise ValueError(f"round is {number}; give at most {LAST_ROUND}")
    return number


def _defenses(row: Mapping[str, Any]) -> tuple[int, Iterator[tuple[plans.Spec, ...]]]:
    """The number of defenses in a table, and an iterator that makes them."""
    if "links" in row:
        _known_keys("a defense with links", row, ["links"])
        options = [_options("defense", link) for link in _rows("defenses.links", row["links"])]
        if not options:
            raise ValueError('links is empty; name at least one link, or name = "none"')
    else:
        options = [_options("defense", row)]
    return math.prod(map(_count, options)), _chains(options)


def _chains(options: list[_Options]) -> Iterator[tuple[plans.Spec, ...]]:
    for specs in product(*map(_specs, options)):
        yield tuple(spec for spec in specs if spec.name != "none")


def _models(row: Mapping[str, Any]) -> tuple[int, Iterator[plans.ModelSpec]]:
    rest = {k: v for k, v in row.items() if k not in ("train_steps", "weights")}
    steps = _whole("train_steps", row.get("train_steps", 0), 0)
    if not steps:
        raise ValueError("models.train_steps is an empty list; give at least one value")
    weights = row.get("weights")
    if weights is not None:
        _typed("weights", weights, str)
    name = _typed("models.name", rest.get("name", ""), str)
    if ":" in name:
        settings = tuple(sorted((k, _frozen(v)) for k, v in rest.items() if k != "name"))
        return len(steps), (plans.ModelSpec(name, settings, many, weights) for many in steps)
    option = _options("model", rest)
    specs = (
        plans.ModelSpec(one.name, one.settings, many, weights)
        for one in _specs(option)
        for many in steps
    )
    return _count(option) * len(steps), specs


@dataclass(frozen=True)
class _Options:
    entry: registry.Entry
    values: dict[str, list[Any]]


def _options(kind: str, row: Mapping[str, Any]) -> _Options:
    if "name" not in row:
        raise ValueError(f'{kind} {dict(row)!r} has no name; add name = "..."')
    entry = registry.find(kind, _typed(f"{kind} name", row["name"], str))
    values = {}
    names = {parameter.name for parameter in entry.parameters}
    for key, value in row.items():
        if key == "name":
            continue
        known = key in names
        many = isinstance(value, list) and not (known and registry.takes_list(entry, key))
        if many and not value:
            raise ValueError(f"{entry.name}.{key} is an empty list; give at least one value")
        values[key] = value if many else [value]
    return _Options(entry, values)


def _count(options: _Options) -> int:
    return math.prod(len(values) for values in options.values.values())


def _specs(options: _Options) -> Iterator[plans.Spec]:
    for combination in product(*options.values.values()):
        given = dict(zip(options.values, combination, strict=True))
        settled = registry.settle(options.entry, given)
        yield plans.Spec(
            options.entry.name, tuple(sorted((k, _frozen(v)) for k, v in settled.items()))
        )


def _storable(name: str, value: Any) -> None:
    """Reject what a record cannot hold: dates, infinite numbers, integers over 64 bits."""
    if isinstance(value, dict | list):
        rows = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in rows:
            _storable(f"{name}.{key}", inner)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; give a finite number")
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{name} is a number of over 64 bits; give a smaller one")
    elif not isinstance(value, str | int | float):
        raise ValueError(f"{name} is {value}; give a number, a text or a list of them")


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        raise ValueError(f"a setting is the table {value!r}; give a number, a text or a list")
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value


def _whole(name: str, values: Any, least: int) -> tuple[int, ...]:
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


def _typed(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r}; give a value of type {kind.__name__}")
    return value


def _known_keys(where: str, table: Mapping[str, Any], known: list[str]) -> None:
    for key in table:
        if key not in known:
            raise ValueError(f"{where} has no key {key!r}; {check.closest(key, known)}")


def _dataclass(kind: Any, name: str, table: Mapping[str, Any]) -> Any:
    return kind(**registry.settle(registry.Entry("table", name, kind), _section(name, table)))
