"""The papers that can be reproduced, and what each scale runs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from leakbound_reproductions.jobs import Jobs
from leakbound_reproductions.outcome import SCALES, Outcome, Tell, at_scale


class Reproduce(Protocol):
    """Repeat a paper's claims at a scale, continuing from what the folder already holds."""

    def __call__(
        self, scale: str, folder: Path, *, workers: int, color: str, tell: Tell, **jobs: Jobs
    ) -> Outcome:
        """The claims with their findings; `color` names a data source of color images.

        A paper whose own scale is chosen by parts also takes `jobs`.
        """


@dataclass(frozen=True)
class _Judged:
    """What a paper's module measures, as each scale may state it."""

    measure: Reproduce

    def __call__(
        self, scale: str, folder: Path, *, workers: int, color: str, tell: Tell, **jobs: Jobs
    ) -> Outcome:
        found = self.measure(scale, folder, workers=workers, color=color, tell=tell, **jobs)
        return at_scale(scale, found)


@dataclass(frozen=True)
class Paper:
    """Title, authors, year and where it appeared."""

    title: str
    authors: str
    year: int
    venue: str

    def __str__(self) -> str:
        when = "" if str(self.year) in self.venue else f", {self.year}"
        return f'{self.authors}, "{self.title}", {self.venue}{when}'


@dataclass(frozen=True)
class Reproduction:
    """One paper and how it is reproduced.

    Attributes:
        name: of the experiment's package and on the command line.
        letter: the project's pages call the paper by it.
        scales: scale -> what it runs and about how long that takes.
        figures: numbers of the paper's figures that it draws.
        by_parts: whether the paper's own scale is chosen by parts, as `Jobs`.
    """

    name: str
    letter: str
    paper: Paper
    scales: Mapping[str, str]
    figures: tuple[str, ...] = ()
    by_parts: bool = False

    def load(self) -> Reproduce:
        """The function that runs it.

        Raises:
            ValueError: this version cannot run it yet.
        """
        module = f"leakbound_reproductions.{self.name}.reproduce"
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            others = ", ".join(name for name in REPRODUCTIONS if name != self.name)
            raise ValueError(
                f"name is {self.name!r}, which this version cannot reproduce yet; choose {others}"
            ) from None
        return _Judged(found.reproduce)


REPRODUCTIONS: dict[str, Reproduction] = {
    one.name: one
    for one in (
        Reproduction(
            "optimal_defenses",
            "A",
            Paper(
                "Optimal Defenses Against Data Reconstruction Attacks",
                "Yuxiao Chen, Gamze Gürsoy and Qi Lei",
                2025,
                "DIG-BUGS workshop at ICML 2025, arXiv 2411.03746",
            ),
            {
                "minutes": "MNIST, 3 seeds, short attacks; a few minutes on two cores",
                "cpu": "MNIST, 24 seeds for errors and losses, 256 for the errors of claim 0-3, "
                "12 under attacks that know the defense; some hours on two cores",
                "paper": "the paper's batches of 16, 2,000 attack steps and 640 rounds, on MNIST "
                "alone; some days on two cores",
            },
            (*map(str, range(2, 15)),),
        ),
        Reproduction(
            "systematic_evaluation",
            "B",
            Paper(
                "Data Reconstruction Attacks and Defenses: A Systematic Evaluation",
                "Sheng Liu, Zihan Wang, Yuxiao Chen and Qi Lei",
                2025,
                "AISTATS 2025, arXiv 2402.09478",
            ),
            {
                "minutes": "the two-layer network at few widths, and a small grid of pictures: "
                "several minutes on two cores",
                "cpu": "the two-layer network in full, and smaller models and images than the "
                "paper's with its rates: hours on two cores",
                "paper": "the paper's model, batches and attacks, in parts; it says their cost "
                "first",
            },
            ("2", "3", "4"),
            by_parts=True,
        ),
        Reproduction(
            "mean_to_extreme",
            "C",
            Paper(
                "From Mean to Extreme: Formal Differential Privacy Bounds on the Success of "
                "Real-World Data Reconstruction Attacks",
                "Anneliese Riess, Kristian Schwethelm, Johannes Kaiser, Tamara T. Mueller, Julia "
                "A. Schnabel, Daniel Rueckert and Alexander Ziller",
                2025,
                "preprint",
            ),
            {
                "minutes": "60 images, few draws; about a minute",
                "cpu": "500 images as in the paper, ResNet-18 for ResNet-101; about ten minutes",
                "paper": "as cpu, with 224 x 224 pixels through ResNet-18, 100 attacked color "
                "images with 3 restarts, and further tables; hours",
            },
            ("1", "2", "3", "4", "5"),
        ),
        Reproduction(
            "priprune",
            "D",
            Paper(
                "PriPrune: Quantifying and Preserving Privacy in Pruned Federated Learning",
                "Tianyue Chu, Mengwei Yang, Nikolaos Laoutaris and Athina Markopoulou",
                2024,
                "ACM TOMPECS",
            ),
            {
                "minutes": "a small grid of few seeds: about five minutes on two cores",
                "cpu": "smaller models and fewer rounds than the paper's, 545 trainings and "
                "2,688 single rounds: hours on two cores",
                "paper": "the paper's data, models and rounds; days, and 25 GB of memory",
            },
            ("2", "3", "4a", "4b", "5a", "5b", "6", "8a", "8b", "8c", "8d", "9"),
        ),
        Reproduction(
            "practical_feasibility",
            "E",
            Paper(
                "Practical Feasibility of Gradient Inversion Attacks in Federated Learning",
                "Viktor Valadi, Mattias Åkesson, Johan Östman, Fazeleh Hoseini, Salman Toor and "
                "Andreas Hellander",
                2025,
                "arXiv 2508.19819",
            ),
            {
                "minutes": "200 configurations on 8 x 8 digits, 2 seeds and short attacks: about "
                "five minutes on one core",
                "cpu": "the same with 2 seeds and attacks of 120 steps: about half an hour on one "
                "core",
                "paper": "the same with 12 seeds and attacks of 1,000 steps: a day; the paper's "
                "images and models are not built here",
            },
        ),
    )
}


def named(name: str) -> list[Reproduction]:
    """The reproduction of a name, or every one for "all".

    Raises:
        ValueError: no such name.
    """
    if name == "all":
        return list(REPRODUCTIONS.values())
    if name not in REPRODUCTIONS:
        names = ", ".join([*REPRODUCTIONS, "all"])
        raise ValueError(f"name is {name!r}; choose one of {names}")
    return [REPRODUCTIONS[name]]


def check_scale(scale: str) -> str:
    """The scale, if it exists."""
    if scale not in SCALES:
        raise ValueError(f"scale is {scale!r}; choose one of {', '.join(SCALES)}")
    return scale
