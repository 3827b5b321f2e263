"""Named tensors: read and written without pickle, and laid out as one vector in a model's order."""

from leakbound.tensors.files import read, write
from leakbound.tensors.layout import Named, flat

__all__ = ["Named", "flat", "read", "write"]
