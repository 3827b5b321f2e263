"""One comparison of a study, with the verdict of its own interval: for full tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

HOLDS = "holds"
FAILS = "does not hold"
UNDECIDED = "undecided"
AGAINST = "against it in this small run"
"""What a small run says instead of FAILS: it refutes nothing."""


@dataclass(frozen=True)
class Comparison:
    """One comparison with its own 95 % interval and the verdict of this interval alone."""

    number: str
    statement: str
    measured: str
    word: str


def shown(found: Iterable[Comparison], *, small: bool) -> list[Comparison]:
    """The comparisons as a page shows them; those of a `small` run refute nothing."""
    return [replace(c, word=AGAINST) if small and c.word == FAILS else c for c in found]
