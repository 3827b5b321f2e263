"""One comparison of a study, with the verdict of its own interval: for full tables."""

from __future__ import annotations

from dataclasses import dataclass

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"


@dataclass(frozen=True)
class Comparison:
    """One comparison with its own 95 % interval and the verdict of this interval alone."""

    number: str
    statement: str
    measured: str
    word: str
