"""Find every attack, defense and model by name, with its parameters.

A built-in entry is what its package exports, under its snake_case name. Third parties add to it
through the entry points `leakbound.attacks`, `leakbound.defenses` and `leakbound.models`.
"""

from __future__ import annotations

import inspect
import re
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType, UnionType
from typing import Any

from leakbound import attacks, check, defenses, models

__all__ = [
    "Entry",
    "Parameter",
    "build",
    "entries",
    "find",
    "settle",
    "snake",
    "spec_of",
    "takes_list",
]

GIVEN = {"model": frozenset({"input_shape", "classes", "generator"})}
HIDDEN = frozenset(
    {
        "Attack",
        "BestOf",
        "ByNoise",
        "LABEL_RULES",
        "adapted",
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
    }
)
LISTS = frozenset({list, tuple, Sequence})
PACKAGES: dict[str, ModuleType] = {
    "attack": attacks,
    "defense": defenses,
    "model": models,
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
        for own in _signature(self.build).values():
            if own.name not in GIVEN.get(self.kind, ()) and own.kind is not own.VAR_KEYWORD:
                kind = own.annotation
                text = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
                default = None if own.default is own.empty else own.default
                rows.append(Parameter(own.name, text, default))
        return tuple(rows)


def snake(name: str) -> str:
    """`GaussianNoise` as `gaussian_noise`; `NoDefense` is "none", as in plans."""
    if name == "NoDefense":
        return "none"
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@cache
def entries(kind: str) -> Mapping[str, Entry]:
    """All entries of a kind ("attack", "defense", "model") by name.

    Example:
        >>> "gaussian_noise" in entries("defense"), "dlg" in entries("attack")
        (True, True)
    """
    package = PACKAGES[kind]
    exported = (name for name in package.__all__ if name not in HIDDEN)
    known = {snake(name): Entry(kind, snake(name), getattr(package, name)) for name in exported}
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


def settle(entry: Entry, given: Mapping[str, Any]) -> dict[str, Any]:
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
    for name, value in given.items():
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


def build(kind: str, name: str, settings: Mapping[str, Any], **given: Any) -> Any:
    """Build the object; `given` is what the audit provides (a model's shape and generator)."""
    entry = find(kind, name)
    return entry.build(**settle(entry, settings), **given)


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


def _coerce(name: str, value: Any, hint: Any) -> Any:
    kinds = _kinds(hint)
    if Any in kinds or not all(isinstance(kind, type) for kind in kinds):
        return value  # Any, Literal and similar: the object itself checks
    items = [item for kind, item in kinds.items() if kind in LISTS]
    plain = tuple(kind for kind in kinds if kind not in LISTS)
    if items and isinstance(value, list | tuple):
        return tuple(_coerce(f"{name}[{i}]", v, items[0]) for i, v in enumerate(value))
    if type(value) is int and float in plain and int not in plain:
        return float(value)
    if isinstance(value, plain) and (bool in plain or not isinstance(value, bool)):
        return value
    words = [k.__name__ for k in plain if k is not type(None)] + ["list"] * bool(items)
    raise ValueError(f"{name} is {value!r}; give a value of type {' or '.join(words)}")


WORD = re.compile(
    r""""[^"]*"|'[^']*'|=\s*(?!(?:true|false|inf|nan)\s*(?:,|$))([a-zA-Z_~/][\w.:/~-]*)(?=\s*(?:,|$))"""
)
"""A string, or a value without quotes: a word or a path, and no keyword of TOML."""
LIMIT = 1 << 20
"""Characters of a name with its settings."""


def spec_of(kind: str, text: str) -> dict[str, Any]:
    """`name,key=value,...` as a plan's table; values as in TOML, where words need no quotes."""
    name, _, settings = text.partition(",")
    settings = WORD.sub(lambda found: f'="{found[1]}"' if found[1] else found[0], settings)
    try:
        table = tomllib.loads(f"settings = {{{settings}}}")["settings"]
    except tomllib.TOMLDecodeError:
        raise ValueError(
            f"{kind} is {text!r}; write settings as in {kind} NAME,key=1.5,other=word"
        ) from None
    if len(text) > LIMIT or "name" in table:
        raise ValueError(f"{kind} is {text!r}; write the name first: NAME,key=value")
    return {"name": name, **table}
