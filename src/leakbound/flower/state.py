"""What a client keeps between rounds, in Flower's own records: no pickle, no code by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from leakbound import covariance
from leakbound.defenses.base import Chain


def save(records: RecordDict, key: str, owner: str, value: Any) -> None:
    """Put a value under a key: its tensors as arrays, the rest as text. `load` checks the owner.

    Raises:
        ValueError: a value of other things than numbers, texts, tensors, tuples, dictionaries and
            dataclasses of these.
    """
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_plain(value, tensors))
    arrays = {name: Array(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()}
    records[f"{key}.arrays"] = ArrayRecord(arrays)
    records[f"{key}.tree"] = ConfigRecord({"tree": tree, "owner": owner})


def load(records: RecordDict, key: str, owner: str, defense: Chain) -> Any:
    """The value under a key, None where there is none.

    Only dataclasses that the modules of the defense's own links know are made again.

    Raises:
        ValueError: it was kept by another defense, or for another model.
    """
    if f"{key}.tree" not in records:
        return None
    kept, arrays = records[f"{key}.tree"], records[f"{key}.arrays"]
    if not isinstance(kept, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise ValueError(f"the state under {key!r} is not what was kept there; start a new run")
    if kept["owner"] != owner:
        raise ValueError(
            f"this node keeps the state of {kept['owner']!s}, and {owner} asks for it; keep the "
            "mods and the model of a run as they are, or start a new run"
        )
    tensors = {name: torch.from_numpy(np.array(array.numpy())) for name, array in arrays.items()}
    return _value(json.loads(str(kept["tree"])), tensors, _known(defense))


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
        own = {f.name: _plain(getattr(value, f.name), tensors) for f in fields(value) if f.init}
        return {"class": type(value).__qualname__, "of": type(value).__module__, "fields": own}
    raise ValueError(
        f"a defense keeps a {type(value).__name__} between rounds, which cannot be stored; keep "
        "numbers, tensors, tuples, dictionaries and dataclasses of these"
    )


def _value(plain: Any, tensors: Mapping[str, Tensor], known: Mapping[str, type]) -> Any:
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
    own = {key: _value(item, tensors, known) for key, item in plain["fields"].items()}
    return known[name](**own)


def _known(defense: Chain) -> dict[str, type]:
    """The dataclasses that the modules of the links (and of covariances) know, by their names."""
    modules = {cls.__module__ for link in defense.links for cls in type(link).__mro__}
    places = [sys.modules[name] for name in modules if name in sys.modules] + [covariance]
    things = [thing for place in places for thing in vars(place).values()]
    return {
        f"{thing.__module__}:{thing.__qualname__}": thing
        for thing in things
        if isinstance(thing, type) and is_dataclass(thing)
    }
