"""Convert Flower's records to tensors and back: messages, and a client's state between rounds.

An array record declares each array's type, shape and storage, and the bytes declare them again. The
sender may lie in both, and Flower's own reader allocates the size that the bytes declare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from leakbound.client_side.setup import MOST_BYTES, Conflict
from leakbound.client_side.state import packed, unpacked
from leakbound.defenses.base import Chain
from leakbound.tensors import of_bytes

COUNTS = ("num-examples", "num_examples")
"""Metrics in which clients report their number of examples."""
SENT = "the server's message"
REPLY = "the reply"
_STORAGE = "numpy.ndarray"
_KINDS = {"f": "floating-point", "i": "whole", "u": "whole", "b": "boolean"}
_TYPES = (
    "bool",
    "float16",
    "float32",
    "float64",
    "int16",
    "int32",
    "int64",
    "int8",
    "uint8",
)


def is_train(message: Message) -> bool:
    return message.metadata.message_type.split(".")[0] == "train"


def settings(message: Message, context: Context) -> dict[str, Any]:
    """The app's run configuration and the server's message configuration, by their keys.

    A mod cannot see which of two values your training uses: a server could add a key to remove a
    defense's noise.
    """
    config: dict[str, Any] = dict(context.run_config)
    for record in message.content.config_records.values():
        for key, value in record.items():
            differs = key in config and config[key] != value
            config[key] = Conflict((config[key], value)) if differs else value
    return config


def client_of(context: Context) -> str:
    """The client's name: its partition in a simulation, otherwise its node."""
    return str(context.node_config.get("partition-id", context.node_id))


def first(keys: Sequence[str], records: Iterable[Mapping[str, Any]]) -> Any:
    """The value of the first key that a record has."""
    return next((record[key] for record in records for key in keys if key in record), None)


def add_metrics(reply: Message, numbers: Mapping[str, float]) -> None:
    records = reply.content.metric_records
    if records:
        next(iter(records.values())).update(numbers)
    else:
        reply.content["leakbound"] = MetricRecord(dict(numbers))


def only_arrays(content: RecordDict, what: str) -> tuple[str, ArrayRecord]:
    records = list(content.array_records.items())
    if len(records) != 1:
        names = ", ".join(repr(key) for key, _ in records) or "none"
        raise ValueError(
            f"{what} holds {len(records)} array records ({names}); put the weights, and nothing "
            "else, into one ArrayRecord"
        )
    return records[0]


def names(
    record: ArrayRecord,
    like: Mapping[str, Tensor],
    what: str,
) -> dict[str, str]:
    """The model's name for each key of a record: the key, or the name at its position if numbered.

    A record of plain NumPy arrays (`get_weights`, Flower's `NumPyClient`) has the keys 0, 1, ...
    """
    keys = list(record)
    if keys and keys == [str(i) for i in range(len(keys))] and keys[0] not in like:
        if len(keys) != len(like):
            raise ValueError(
                f"{what} holds {len(keys)} numbered arrays, but the model has {len(like)} tensors; "
                "send the values of model.state_dict() in their order"
            )
        return dict(zip(keys, like, strict=True))
    unknown = [key for key in keys if key not in like]
    if unknown:
        raise ValueError(
            f"{what} holds an array {unknown[0]!r}, which the model of the Setup does not have "
            f"(it has {', '.join(list(like)[:6])}{', ...' if len(like) > 6 else ''}); give the "
            "Setup the model that is trained"
        )
    return {key: key for key in keys}


def read(
    record: ArrayRecord,
    like: Mapping[str, Tensor],
    *,
    what: str,
    most_bytes: int = MOST_BYTES,
    not_finite: type[ValueError] = ValueError,
) -> dict[str, Tensor]:
    """The tensors of a record by the model's names, in the types of `like` (a state dict).

    Nothing is allocated before the record's declared type and shape, the header of its bytes and
    their length agree with each other and with `like`.
    """
    total = sum(len(array.data) for array in record.values())
    if total > most_bytes:
        raise ValueError(
            f"{what} holds {total} bytes of arrays, but the limit is {most_bytes}; "
            "give Setup a larger most_bytes if the model is that large"
        )
    tensors = {}
    for key, name in names(record, like, what).items():
        value = _values(record[key], like[name], f"{what}: array {key!r}")
        if not bool(torch.isfinite(value).all()):
            raise not_finite(f"{what}: array {key!r} holds values that are NaN or infinite")
        tensors[name] = value.to(like[name].dtype)
    return tensors


def write(
    changed: Mapping[str, Tensor],
    record: ArrayRecord,
    like: Mapping[str, Tensor],
    what: str,
) -> ArrayRecord:
    """A record with the keys, order and types of `record`, and the new values in `changed`."""
    fresh = dict(record)
    for key, name in names(record, like, what).items():
        if name in changed:
            value = changed[name].detach().cpu().numpy()
            kind = record[key].dtype or value.dtype  # the older interface declares none
            fresh[key] = Array(value.astype(np.dtype(kind), copy=False))
    return ArrayRecord(fresh)


def digest(record: ArrayRecord) -> str:
    total = hashlib.sha256()
    for key, array in record.items():
        total.update(repr((key, array.dtype, tuple(array.shape), len(array.data))).encode())
        total.update(array.data)
    return total.hexdigest()


def _values(
    array: Array,
    like: Tensor,
    where: str,
) -> Tensor:
    """The values of an array, if it is what it declares and what the model expects."""
    if array.stype != _STORAGE:
        raise ValueError(f"{where} is stored as {array.stype!r}; only {_STORAGE!r} is supported")
    values = of_bytes(where, array.data)
    kind = str(values.dtype)
    declared = bool(array.dtype or array.shape)  # Flower's older interface declares nothing
    if declared and (tuple(array.shape), array.dtype) != (values.shape, kind):
        raise ValueError(
            f"{where} declares {array.dtype[:40]} of shape {tuple(array.shape)}, but its own "
            f"header declares {kind} of {values.shape}"
        )
    if kind not in _TYPES:
        raise ValueError(f"{where} has the type {kind}; known are {list(_TYPES)}")
    if values.shape != like.shape:
        raise ValueError(
            f"{where} has shape {values.shape}, but the model's is {tuple(like.shape)}; give the "
            "Setup the model that is trained"
        )
    expected = _KINDS[torch.empty(0, dtype=like.dtype).numpy().dtype.kind]
    if _KINDS[values.dtype.kind] != expected:
        raise ValueError(f"{where} holds {kind} numbers, but the model's are {expected}")
    # A copy: the bytes of a message are read-only.
    return torch.from_numpy(values.copy(order="C"))


def save(
    records: RecordDict,
    key: str,
    owner: str,
    value: Any,
) -> None:
    """Put a value under a key: its tensors as arrays, the rest as text. `load` checks the owner."""
    tree, tensors = packed(value)
    arrays = {name: Array(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()}
    records[f"{key}.arrays"] = ArrayRecord(arrays)
    records[f"{key}.tree"] = ConfigRecord({"tree": tree, "owner": owner})


def load(
    records: RecordDict,
    key: str,
    owner: str,
    defense: Chain,
) -> Any:
    """The value under a key, None if there is none."""
    if f"{key}.tree" not in records:
        return None
    kept = records[f"{key}.tree"]
    arrays = records[f"{key}.arrays"]
    if not isinstance(kept, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise ValueError(f"the state under {key!r} is not what was stored there; start a new run")
    if kept["owner"] != owner:
        raise ValueError(
            f"this node has the state of {kept['owner']!s}, but {owner} asks for it; keep the "
            "mods and the model of a run unchanged, or start a new run"
        )
    tensors = {name: torch.from_numpy(np.array(array.numpy())) for name, array in arrays.items()}
    return unpacked(str(kept["tree"]), tensors, defense)
