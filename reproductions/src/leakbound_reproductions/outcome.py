"""The result of a reproduction: claims with verdicts, and figures in the paper's form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from leakbound_reproductions.claim import Claim

SCALES = ("minutes", "cpu", "paper")
"""A short look in minutes, a full run on two cores, and the paper's own setting."""

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
