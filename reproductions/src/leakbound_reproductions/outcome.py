"""The result of a reproduction: claims with verdicts, and figures in the paper's form."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from leakbound_reproductions import words
from leakbound_reproductions.claim import Claim, Mark, Verdict, left_open
from leakbound_reproductions.comparison import AGAINST

SCALES = ("minutes", "cpu", "paper")
"""A short look in minutes, a full run on two cores, and the paper's own setting."""

SMALL = "minutes"
"""The scale that refutes nothing."""
UNREFUTED = (
    "a run of this scale speaks against it, and is too small to refute it: scale cpu judges it"
)

_VERDICT = re.compile(rf"(, n = [\d,]+, |the verdict is: ){Verdict.FAILS}")
"""A verdict in a remark: of a finding in words, or of another reading."""

Tell = Callable[[str, int, int], None]
"""Called with the part that runs, how many of its steps are done, and how many there are."""


@dataclass(frozen=True)
class Figure:
    """A figure in the output folder.

    Attributes:
        file: its name there.
        caption: what it shows; also the alternative text.
        paper: the figure of the paper that it redraws; empty for new figures.
    """

    file: str
    caption: str
    paper: str = ""

    @property
    def numbers(self) -> tuple[str, ...]:
        """The numbers of these figures in the paper.

        Example:
            >>> Figure("a.png", "All.", "figures 4a and 5").numbers
            ('4a', '5')
        """
        return tuple(re.findall(r"\d+[a-z]?", self.paper))


@dataclass(frozen=True)
class Outcome:
    """What a reproduction measured.

    Attributes:
        claims: every claim of the paper, in the order of their numbers; those that cannot be
            tested at this scale say why.
        figures: files that were drawn.
        settings: data, models, attacks and how many seeds, in a paragraph of Markdown.
        pages: names of further Markdown pages in the folder: full tables and all experiments.
    """

    claims: tuple[Claim, ...]
    figures: tuple[Figure, ...]
    settings: str
    pages: tuple[str, ...] = ()


def at_scale(scale: str, outcome: Outcome) -> Outcome:
    """The outcome as this scale may state it: a small run refutes no claim.

    Few seeds, short searches and small models can turn a verdict around. So at the smallest scale
    a claim is left open if any of its findings speaks against it. What was measured stays as
    remarks. Theorems and identities are judged at every scale: no size changes them.
    """
    if scale != SMALL:
        return outcome
    return replace(outcome, claims=tuple(map(_unrefuted, outcome.claims)))


def _unrefuted(claim: Claim) -> Claim:
    if Mark.THEOREM in claim.marks:
        return claim
    claim = replace(claim, why=_VERDICT.sub(rf"\1{AGAINST}", claim.why))
    if not any(finding.against for finding in claim.findings):
        return claim
    measured = [
        f"{one.statement}: {words.measured(one)} {words.interval(one.interval)}, n = {one.n}"
        for one in claim.findings
    ]
    return left_open(claim, "\n".join(filter(None, [UNREFUTED, *measured, claim.why])))
