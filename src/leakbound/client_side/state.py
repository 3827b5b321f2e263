"""What a defense keeps between rounds, as text and tensors: no pickle, no code by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from leakbound import covariance
from leakbound.defenses.base import Chain


def packed(value: Any) -> tuple[str, dict[str, Tensor]]:
    """A state as text, in which its tensors have numbers.

    Raises:
        ValueError: it holds something that cannot be stored.

    Example:
        >>> packed({"rounds": (1, 2)})
        ('{"dict": {"rounds": {"tuple": [1, 2]}}}', {})
    """
    tensors: dict[str, Tensor] = {}
    return json.dumps(_plain(value, tensors)), tensors


def unpacked(
    text: str,
    tensors: Mapping[str, Tensor],
    defense: Chain,
) -> Any:
    """The state that was packed.

    Only dataclasses that the modules of the defense's own links define are restored.

    Raises:
        ValueError: it names another class.
    """
    return _value(json.loads(text), tensors, _known(defense))


def _plain(value: Any, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_plain(item, tensors) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _plain(item, tensors) for key, item in value.items()}}
    if is_dataclass(value) and not isinstance(value, type):
        # Fields without `init` follow from the others when the class is made again.
        values = {f.name: _plain(getattr(value, f.name), tensors) for f in fields(value) if f.init}
        return {"class": type(value).__qualname__, "of": type(value).__module__, "fields": values}
    raise ValueError(
        f"a defense keeps a {type(value).__name__} between rounds, which cannot be stored; keep "
        "numbers, tensors, tuples, dictionaries and dataclasses of these"
    )


def _value(
    plain: Any,
    tensors: Mapping[str, Tensor],
    known: Mapping[str, type],
) -> Any:
    if not isinstance(plain, dict):
        return plain
    if "tensor" in plain:
        return tensors[plain["tensor"]]
    if "tuple" in plain:
        return tuple(_value(item, tensors, known) for item in plain["tuple"])
    if "list" in plain:
        return [_value(item, tensors, known) for item in plain["list"]]
    if "dict" in plain:
        return {key: _value(item, tensors, known) for key, item in plain["dict"].items()}
    name = f"{plain['of']}:{plain['class']}"
    if name not in known:
        raise ValueError(f"the state holds a {name}, which the defense does not know")
    values = {key: _value(item, tensors, known) for key, item in plain["fields"].items()}
    return known[name](**values)


def _known(defense: Chain) -> dict[str, type]:
    """The dataclasses that the modules of the links (and of covariances) define, by name."""
    modules = {cls.__module__ for link in defense.links for cls in type(link).__mro__}
    # covariances are kept by noise that is correlated over rounds
    places = [sys.modules[name] for name in modules if name in sys.modules] + [covariance]
    things = [thing for place in places for thing in vars(place).values()]
    return {
        f"{thing.__module__}:{thing.__qualname__}": thing
        for thing in things
        if isinstance(thing, type) and is_dataclass(thing)
    }
