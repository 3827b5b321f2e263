"""Named tensors: read and written without pickle, and laid out as one vector in a model's order."""

from leakbound.tensors.archive import of_bytes
from leakbound.tensors.files import read, write
from leakbound.tensors.layout import (
    Named,
    absent,
    bare,
    by_name,
    flat,
    spoiled,
    unnamed,
    weight_spans,
)
from leakbound.tensors.shards import weights_in

__all__ = [
    "Named",
    "absent",
    "bare",
    "by_name",
    "flat",
    "of_bytes",
    "read",
    "spoiled",
    "unnamed",
    "weight_spans",
    "weights_in",
    "write",
]
