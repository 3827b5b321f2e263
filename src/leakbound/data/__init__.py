"""Data: images from packages, from the user's own files, and the disjoint splits of both.

Files are taken as written by a stranger: no pickle runs, archives are read in place, and what a
header declares is checked against the file and a limit before memory is taken.
"""

from leakbound.data import federated
from leakbound.data.sources import SOURCES, Dataset, load
from leakbound.data.splits import split, without_copies

__all__ = ["SOURCES", "Dataset", "federated", "load", "split", "without_copies"]
