"""The options of `leakbound reproduce`; heavy imports happen when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from leakbound.cli.parser import Option


@dataclass(frozen=True)
class Reproduce:
    """Repeat a paper's experiments and say which of its claims hold here.

    Writes results.json, results.md and results.html. Run the same command again to go on after a
    stop.
    """

    RESUMES: ClassVar = True

    name: Annotated[
        Literal[
            "optimal_defenses",
            "systematic_evaluation",
            "mean_to_extreme",
            "priprune",
            "practical_feasibility",
            "all",
        ],
        Option("NAME", positional=True),
    ]
    """Which paper: optimal_defenses (A), systematic_evaluation (B), mean_to_extreme (C), priprune
    (D), practical_feasibility (E), or all of them one after the other."""
    scale: Literal["minutes", "cpu", "paper"] = "minutes"
    """A look in minutes, a full run on two cores (ten minutes to some hours), or the paper's own
    setting (hours to days)."""
    out: Annotated[Path | None, Option("DIR")] = None
    """Output folder; runs/reproduce/NAME/SCALE if not given. With `all` it holds one for each."""
    figure: Annotated[str | None, Option("N")] = None
    """Say where this figure of the paper is; its values are in a CSV file beside it."""
    workers: int = 0
    """Processes; 0 takes one a core. The numbers are the same for any number."""
    color: Annotated[str, Option("DATA")] = "photos"
    """Data source of color images, where a paper takes CIFAR-10 or the like."""
    parts: Annotated[str, Option("A,B")] = ""
    """Paper B at its own scale: run only these parts; the run first lists all, with their cost."""
    steps: Annotated[int | None, Option("N")] = None
    """Paper B at its own scale: steps of every search, instead of 10,000."""
    seeds: Annotated[int | None, Option("N")] = None
    """Paper B at its own scale: rounds, instead of 10."""
    hours: Annotated[float | None, Option("H")] = None
    """Paper B at its own scale: stop after H hours; 0 only lists the parts with their cost."""
    device: Annotated[str | None, Option("DEVICE")] = None
    """Paper B at its own scale: "cpu", or "cuda" for a GPU; by default a GPU if there is one."""
    lpips_weights: Annotated[Path | None, Option("FILE")] = None
    """Paper B at its own scale: weights of LPIPS, which is then measured as well."""


REPRODUCE = (Reproduce, "leakbound_reproductions.command:reproduce")
"""The verb, as the entry point names it."""
