"""Names and settings: the one parser of what users write.

Names are those of attacks, defenses, models and pruning schemes.

A built-in entry is what its package exports, under its snake_case name. Third parties add to it
through entry points: `leakbound.attacks`, `leakbound.defenses`, `leakbound.models` and
`leakbound.schemes`.
"""

from __future__ import annotations

import inspect
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import entry_points
from itertools import product
from types import ModuleType, UnionType
from typing import Any, cast

from leakbound import attacks, check, defenses, losses, models, pruning
from leakbound._util.text import row_of_text
from leakbound.models.custom import load_user_model

__all__ = [
    "Entry",
    "Grid",
    "Parameter",
    "Spec",
    "build",
    "entries",
    "find",
    "grids_of",
    "parse",
    "row_of",
    "settle",
    "snake",
    "specs_of",
    "storable",
    "takes_list",
]

GIVEN = {"model": frozenset({"input_shape", "classes", "generator"})}
"""Arguments that no user sets: they follow from the data."""
NO_DEFENSE = "none"
HIDDEN = frozenset(
    {
        "Attack",
        "BestOf",
        "ByNoise",
        "LABEL_RULES",
        "adapted",
        "joined",
        "infer",
        "infer_labels",
        "label_accuracy",
        "label_totals",
        "load_prior",
        "save_prior",
        "settings_hash",
        "train_prior",
        "Chain",
        "Defense",
        "chain",
        "LayerCount",
        "OneShot",
        "PrunedTurn",
        "Pruning",
        "bytes_sent",
        "client_task",
        "density",
        "existing",
        "layer_counts",
        "named_masks",
        "next_task",
        "prunable",
        "turn_of",
        "withheld",
    }
)
LISTS = frozenset({list, tuple, Sequence})
PACKAGES: dict[str, ModuleType] = {
    "attack": attacks,
    "defense": defenses,
    "model": models,
    "scheme": pruning,
}


@dataclass(frozen=True)
class Parameter:
    """One setting of an entry: its name, its type as text and its default."""

    name: str
    kind: str
    default: Any


@dataclass(frozen=True)
class Entry:
    """A named object and how to build it."""

    kind: str
    name: str
    build: Callable[..., Any]

    @property
    def summary(self) -> str:
        """The first line of its documentation."""
        return (inspect.getdoc(self.build) or "").strip().split("\n")[0]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Its settings, without those that the audit itself provides."""
        rows = []
        for one in _signature(self.build).values():
            if one.name not in GIVEN.get(self.kind, ()) and one.kind is not one.VAR_KEYWORD:
                kind = one.annotation
                text = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
                default = None if one.default is one.empty else one.default
                rows.append(Parameter(one.name, text, default))
        return tuple(rows)


def snake(name: str) -> str:
    """`GaussianNoise` as `gaussian_noise`; `NoDefense` is "none", as in plans."""
    if name == "NoDefense":
        return NO_DEFENSE
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@cache
def entries(kind: str) -> Mapping[str, Entry]:
    """All entries of a kind ("attack", "defense", "model", "scheme") by name.

    Example:
        >>> "gaussian_noise" in entries("defense"), "dlg" in entries("attack")
        (True, True)
    """
    package = PACKAGES[kind]
    exported = (name for name in package.__all__ if name not in HIDDEN)
    known = {snake(name): Entry(kind, snake(name), getattr(package, name)) for name in exported}
    # another package may not replace a built-in: records name attacks by these names
    for point in entry_points(group=f"leakbound.{kind}s"):
        if point.name in known:
            raise ValueError(
                f"the entry point {point.value!r} calls itself {point.name!r}, which is taken by "
                f"another {kind}; give it another name"
            )
        try:
            known[point.name] = Entry(kind, point.name, point.load())
        except Exception as error:
            raise ValueError(
                f"the entry point {point.value!r} for the {kind} {point.name!r} does not load: "
                f"{error}; repair or uninstall that package"
            ) from error
    return dict(sorted(known.items()))


def find(kind: str, name: str) -> Entry:
    """The entry of that name; the error offers the closest."""
    known = entries(kind)
    if name not in known:
        see = f"leakbound list {kind}s"
        raise ValueError(f"{kind} {name!r} is not known; {check.closest(name, known, see)}")
    return known[name]


def settle(entry: Entry, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check settings by name and type against an entry; convert whole numbers to floats if needed.

    Raises:
        ValueError: an unknown setting (the closest is offered), a missing one, or a wrong type.

    Example:
        >>> settle(find("defense", "gaussian_noise"), {"noise_std": 1})
        {'noise_std': 1.0}
    """
    hints = _hints(entry.build)
    signature = _signature(entry.build)
    names = [p.name for p in entry.parameters]
    settled = {}
    for name, value in settings.items():
        if name not in names:
            see = f"leakbound list {entry.name}" if entry.kind in PACKAGES else None
            raise ValueError(
                f"{entry.kind} {entry.name!r} has no setting {name!r}; "
                f"{check.closest(name, names, see)}"
            )
        settled[name] = _coerce(f"{entry.name}.{name}", value, hints.get(name, Any))
    for name in names:
        if signature[name].default is inspect.Parameter.empty and name not in settled:
            raise ValueError(f"{entry.kind} {entry.name!r} needs the setting {name!r}")
    return settled


def takes_list(entry: Entry, name: str) -> bool:
    """Whether a list is one value of the setting, not several values to try in turn.

    Example:
        >>> takes_list(find("model", "mlp"), "hidden"), takes_list(find("attack", "dlg"), "steps")
        (True, False)
    """
    return bool(LISTS & set(_kinds(_hints(entry.build).get(name, Any))))


def build(
    kind: str,
    name: str,
    settings: Mapping[str, Any],
    **data: Any,
) -> Any:
    """Build the object; `data` is what the data determine (a model's shape and generator)."""
    if kind == "model" and ":" in name:
        return load_user_model(name, **data, **settings)
    entry = find(kind, name)
    taken = {key: value for key, value in data.items() if key in GIVEN.get(kind, ())}
    return entry.build(**settle(entry, settings), **taken)


def parse(
    kind: str,
    described: object,
    **data: Any,
) -> Any:
    """The attack, chain of defenses, model, pruning scheme or loss that a user describes.

    Args:
        kind: "attack", "defense", "model", "scheme" or "loss".
        described: its name, with settings after commas; a plan's table; or a registered object.
        data: what the data provide for a model: `input_shape`, `classes` and `generator`.

    Raises:
        ValueError: an unknown name or setting (the closest is offered), or a wrong value.

    Example:
        >>> parse("attack", "linear_inversion,tolerance=0.1").tolerance
        0.1
        >>> parse("defense", "gaussian_noise,noise_std=0.1").links
        (GaussianNoise(noise_std=0.1),)
    """
    if kind == "loss":
        return losses.named(cast(str, described))
    specs = specs_of(kind, described)
    built = [build(kind, spec.name, spec.parameters, **data) for spec in specs]
    return defenses.chain(*built) if kind == "defense" else built[0]


@dataclass(frozen=True)
class Spec:
    """A name and its settings, hashable and in one order."""

    name: str
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def parameters(self) -> dict[str, Any]:
        """The settings as a dictionary."""
        return dict(self.settings)


@dataclass(frozen=True)
class Grid:
    """An entry with one or several values for each setting; iterate for every configuration."""

    entry: Entry
    values: Mapping[str, Sequence[Any]]

    @property
    def count(self) -> int:
        """The number of configurations, without making any: a plan is refused by its size alone."""
        return math.prod(map(len, self.values.values()))

    def __iter__(self) -> Iterator[Spec]:
        for combination in product(*self.values.values()):
            settled = settle(
                self.entry,
                dict(zip(self.values, combination, strict=True)),
            )
            yield Spec(self.entry.name, frozen_settings(settled))


def specs_of(kind: str, described: object) -> tuple[Spec, ...]:
    """What a user describes as name and settings; of a defense, the links of its chain.

    Raises:
        ValueError: as for `parse`; also for a setting with several values.

    Example:
        >>> specs_of("defense", "clip,clip_norm=2")
        (Spec(name='clip', settings=(('clip_norm', 2.0),)),)
    """
    row = row_of(kind, described)
    if kind == "model" and ":" in str(row.get("name")):  # only their function knows its settings
        settings = {key: value for key, value in row.items() if key != "name"}
        storable(kind, settings)
        return (Spec(row["name"], frozen_settings(settings)),)
    grids = grids_of(kind, row)
    count = math.prod(grid.count for grid in grids)
    if count != 1:
        raise ValueError(f"{kind} names {count} settings; give one value for each")
    return tuple(spec for grid in grids for spec in grid if spec.name != NO_DEFENSE)


def row_of(kind: str, described: object) -> dict[str, Any]:
    """A plan's table from user input: a name with settings, a table, or a registered object."""
    if isinstance(described, str):
        return row_of_text(kind, described)
    if isinstance(described, Mapping):
        return dict(described)
    if isinstance(described, defenses.Chain):
        rows = [row_of(kind, link) for link in described.links]
        return {"links": rows} if rows else {"name": NO_DEFENSE}
    name = snake(type(described).__name__)
    if name in entries(kind) and is_dataclass(described):
        values = {f.name: getattr(described, f.name) for f in fields(described) if f.init}
        settings = {key: value for key, value in values.items() if value is not None}
        # an object may hold what its settings do not say, such as a changed attribute
        if build(kind, name, settings) == described:
            return {"name": name, **settings}
    raise ValueError(
        f"{kind} is {str(described)[:60]!r}, which no name and settings describe; give it by name "
        f'(`leakbound list`), as in "NAME,key=1.5"'
    )


def grids_of(kind: str, row: Mapping[str, Any]) -> list[Grid]:
    """The settings of a plan's table: one grid, or one for each link of a defense."""
    if kind != "defense" or "links" not in row:
        return [_grid(kind, row)]
    links = row["links"]
    check.known_keys("a defense with links", row, ["links"])
    if not isinstance(links, list) or not all(isinstance(link, Mapping) for link in links):
        raise ValueError(f"defenses.links is {links!r}; write each as a table: [[defenses.links]]")
    if not links:
        raise ValueError('links is empty; name at least one link, or name = "none"')
    return [_grid(kind, link) for link in links]


def _grid(kind: str, row: Mapping[str, Any]) -> Grid:
    if "name" not in row:
        raise ValueError(f'{kind} {dict(row)!r} has no name; add name = "..."')
    if not isinstance(row["name"], str):
        raise ValueError(f"{kind} name is {row['name']!r}; give a value of type str")
    entry = find(kind, row["name"])
    known = {parameter.name for parameter in entry.parameters}
    values = {}
    for key, value in row.items():
        if key == "name":
            continue
        storable(f"{entry.name}.{key}", value)
        many = isinstance(value, list) and not (key in known and takes_list(entry, key))
        if many and not value:
            raise ValueError(f"{entry.name}.{key} is an empty list; give at least one value")
        values[key] = value if many else [value]
    return Grid(entry, values)


def storable(name: str, value: Any) -> None:
    """Reject what a record cannot hold: dates, infinite numbers, integers over 64 bits."""
    if isinstance(value, dict | list | tuple):
        rows = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in rows:
            storable(f"{name}.{key}", inner)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; give a finite number")
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{name} is a number of over 64 bits; give a smaller one")
    elif not isinstance(value, str | int | float):
        raise ValueError(f"{name} is {value}; give a number, a text or a list of them")


def frozen_settings(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Settings in one order, with tuples for lists: equal settings have one hash."""
    return tuple(sorted((key, _frozen(value)) for key, value in settings.items()))


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        raise ValueError(f"a setting is the table {value!r}; give a number, a text or a list")
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


@cache
def _signature(thing: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(thing).parameters


@cache
def _hints(thing: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(thing.__init__ if inspect.isclass(thing) else thing)


def _kinds(hint: Any) -> dict[Any, Any]:
    """The types that a hint allows: plain type -> type of its items (Any if not stated)."""
    union = isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union
    each = typing.get_args(hint) if union else (hint,)
    return {typing.get_origin(k) or k: (typing.get_args(k) or (Any,))[0] for k in each}


def _coerce(
    name: str,
    value: Any,
    hint: Any,
) -> Any:
    kinds = _kinds(hint)
    if Any in kinds or not all(isinstance(kind, type) for kind in kinds):
        return value  # Any, Literal and similar: the object itself checks
    items = [item for kind, item in kinds.items() if kind in LISTS]
    plain = tuple(kind for kind in kinds if kind not in LISTS)
    if items and isinstance(value, list | tuple):
        return tuple(_coerce(f"{name}[{i}]", v, items[0]) for i, v in enumerate(value))
    # a plan's `1` and `1.0` are one setting, so they must have one hash
    if type(value) is int and float in plain and int not in plain:
        return float(value)
    # Python counts True as an int; a plan that says true for a number is a mistake
    if isinstance(value, plain) and (bool in plain or not isinstance(value, bool)):
        return value
    words = [k.__name__ for k in plain if k is not type(None)] + ["list"] * bool(items)
    raise ValueError(f"{name} is {value!r}; give a value of type {' or '.join(words)}")
