"""Reading a plan from TOML: every key known, every value checked, every list expanded."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from leakbound import check, registry
from leakbound.audit.plan import (
    DataSpec,
    ModelSpec,
    Plan,
    Spec,
    UtilitySpec,
    build_attack,
    build_defense,
)
from leakbound.types import Server, ThreatModel

LIMIT = 1 << 20  # bytes of a plan


def load(path: Path) -> Plan:
    """Read a plan from a TOML file.

    Raises:
        ValueError: not readable, not TOML, an unknown key or name (the closest is offered), a value
            of the wrong type, or a defense whose links do not fit.
    """
    try:
        if path.stat().st_size > LIMIT:
            raise ValueError(f"plan {str(path)!r} is over {LIMIT} bytes; a plan is a short text")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"plan {str(path)!r} cannot be read: {_why(error)}") from None
    try:
        return parse(tomllib.loads(text), name=path.stem)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"plan {str(path)!r} is not valid TOML: {error}") from None


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def parse(table: Mapping[str, Any], *, name: str = "plan") -> Plan:
    """A plan from the tables of a TOML document.

    Example:
        >>> plan = parse({"models": [{"name": "mlp"}], "attacks": [{"name": "linear_inversion"}],
        ...               "defenses": [{"name": "gaussian_noise", "noise_std": [0.1, 1.0]}]})
        >>> len(plan.cells())
        2
    """
    known = [
        "name",
        "seeds",
        "batch_sizes",
        "data",
        "models",
        "attacks",
        "defenses",
        "threat",
        "thresholds",
        "utility",
    ]
    _known_keys("the plan", table, known)
    for need in ("models", "attacks"):
        if not table.get(need):
            raise ValueError(f"the plan names no {need}; add [[{need}]] with a name")
    threshold = _thresholds(_table("thresholds", table.get("thresholds", {})))
    defenses = [
        d
        for row in _rows("defenses", table.get("defenses", [{"name": "none"}]))
        for d in _defenses(row)
    ]
    plan = Plan(
        name=_typed("name", table.get("name", name), str),
        data=_dataclass(DataSpec, "data", table.get("data", {})),
        models=tuple(m for row in _rows("models", table["models"]) for m in _models(row)),
        defenses=tuple(defenses),
        attacks=tuple(
            s for row in _rows("attacks", table["attacks"]) for s in _expand("attack", row)
        ),
        batch_sizes=_whole("batch_sizes", table.get("batch_sizes", [1]), 1),
        seeds=_whole("seeds", table.get("seeds", [0]), 0),
        threat=_threat(_table("threat", table.get("threat", {}))),
        threshold=threshold,
        utility=_utility(table),
    )
    for links in plan.defenses:
        build_defense(links)
    for attack in plan.attacks:
        build_attack(attack)
    return plan


def _utility(table: Mapping[str, Any]) -> UtilitySpec:
    if "utility" not in table:
        return UtilitySpec(rounds=0)
    spec: UtilitySpec = _dataclass(UtilitySpec, "utility", table["utility"])
    check.count(clients=spec.clients, batch_size=spec.batch_size, repeats=spec.repeats)
    check.non_negative(rounds=spec.rounds)
    check.positive(learning_rate=spec.learning_rate)
    return spec


def _threat(table: Mapping[str, Any]) -> ThreatModel:
    _known_keys("threat", table, ["labels_known", "defense_known", "server"])
    server = table.get("server", "honest")
    check.one_of([s.value for s in Server], server=server)
    return ThreatModel(
        labels_known=_typed("labels_known", table.get("labels_known", True), bool),
        defense_known=_typed("defense_known", table.get("defense_known", True), bool),
        server=Server(server),
    )


def _thresholds(table: Mapping[str, Any]) -> float:
    _known_keys("thresholds", table, ["psnr"])
    value = table.get("psnr", 20.0)
    check.positive(psnr=value)
    return float(value)


def _defenses(row: Mapping[str, Any]) -> Iterator[tuple[Spec, ...]]:
    if "links" in row:
        _known_keys("a defense with links", row, ["links"])
        options = [list(_expand("defense", link)) for link in _rows("links", row["links"])]
        yield from (tuple(combination) for combination in product(*options))
    elif row.get("name") == "none":
        _known_keys("defense 'none'", row, ["name"])
        yield ()
    else:
        yield from ((spec,) for spec in _expand("defense", row))


def _models(row: Mapping[str, Any]) -> Iterator[ModelSpec]:
    own = {k: v for k, v in row.items() if k in ("train_steps", "weights")}
    rest = {k: v for k, v in row.items() if k not in own}
    steps = own.get("train_steps", 0)
    check.non_negative(train_steps=steps)
    weights = own.get("weights")
    if weights is not None:
        _typed("weights", weights, str)
    name = _typed("models.name", rest.get("name", ""), str)
    if ":" in name:
        settings = tuple(sorted((k, _frozen(v)) for k, v in rest.items() if k != "name"))
        yield ModelSpec(name, settings, int(steps), weights)
        return
    for spec in _expand("model", rest):
        yield ModelSpec(spec.name, spec.settings, int(steps), weights)


def _expand(kind: str, row: Mapping[str, Any]) -> Iterator[Spec]:
    """One spec for each combination of settings that are given as lists."""
    if "name" not in row:
        raise ValueError(f'{kind} {dict(row)!r} has no name; add name = "..."')
    entry = registry.find(kind, _typed(f"{kind} name", row["name"], str))
    keys = [k for k in row if k != "name"]
    options = []
    for key in keys:
        value = row[key]
        many = isinstance(value, list) and not registry.takes_list(entry, key)
        if many and not value:
            raise ValueError(f"{entry.name}.{key} is an empty list; give at least one value")
        options.append(value if many else [value])
    for combination in product(*options):
        settled = registry.settle(entry, dict(zip(keys, combination, strict=True)))
        yield Spec(entry.name, tuple(sorted((k, _frozen(v)) for k, v in settled.items())))


def _frozen(value: Any) -> Any:
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


def _table(name: str, value: Any) -> Mapping[str, Any]:
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


def _dataclass(kind: Any, name: str, value: Any) -> Any:
    entry = registry.Entry("table", name, kind)
    return kind(**registry.settle(entry, _table(name, value)))
