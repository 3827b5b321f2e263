"""One comparison of a study, with the word of its own interval alone: for full tables."""

from __future__ import annotations

from dataclasses import dataclass

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"


@dataclass(frozen=True)
class Comparison:
    """One comparison with its own interval of 95 % and the word that this one alone gives."""

    number: str
    statement: str
    measured: str
    word: str
