"""Data: images and tables, from packages and from files of the user, and disjoint splits.

Files count as untrusted: no pickle runs, archives are read in place, and the size in a header is
checked against the file and a limit before memory is allocated.
"""

from leakbound.data import federated
from leakbound.data.schema import Schema
from leakbound.data.sources import SOURCES, Dataset, load
from leakbound.data.splits import split, without_copies
from leakbound.data.tokenizer import token_words

__all__ = [
    "SOURCES",
    "Dataset",
    "Schema",
    "federated",
    "load",
    "split",
    "token_words",
    "without_copies",
]
