"""Named tensors: read and written without pickle, and laid out as one vector in a model's order."""

from leakbound.tensors.archive import of_bytes
from leakbound.tensors.files import read, weights_in, write
from leakbound.tensors.layout import (
    Named,
    bare,
    by_name,
    flat,
    unnamed,
    unusable,
    weight_spans,
)

__all__ = [
    "Named",
    "bare",
    "by_name",
    "flat",
    "of_bytes",
    "read",
    "unnamed",
    "unusable",
    "weight_spans",
    "weights_in",
    "write",
]
