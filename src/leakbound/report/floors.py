"""Floors on every attacker's mean error: what the records hold of them, one row a combination.

A floor is on the mean over the images of its prior and over the noise, never on a single image. As
a PSNR it is a ceiling: the PSNR of the mean squared error, which no attacker exceeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from leakbound.report.folder import Record

SHOWN = 30
"""How many of a long list a page shows."""
LONGEST = 600
"""How many letters of a sentence a page shows."""
_EXTREME = 300.0


@dataclass(frozen=True)
class Source:
    """What a floor rests on: one footnote. `number` is that of the footnote."""

    number: int
    name: str
    prior: str
    rests_on_prior: bool
    covers: str
    equation: str
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class Ceiling:
    """The strongest floor of a combination: the median over its cells, as PSNR in dB.

    `n` of `cells` cells that ran hold this floor.
    """

    psnr: float
    source: Source
    n: int
    cells: int


class Sources:
    """The footnotes of a page: one for each floor's name, prior and attackers."""

    def __init__(self, cells: Iterable[Record]) -> None:
        bounds: dict[tuple[str, str, str], list[Record]] = {}
        for cell in cells:
            for bound in cell.get("bounds") or []:
                bounds.setdefault(_key(bound), []).append(bound)
        self._found = {
            key: _source(number, key, own) for number, (key, own) in enumerate(bounds.items(), 1)
        }

    def of(self, bound: Record) -> Source:
        """The footnote of a bound."""
        return self._found[_key(bound)]

    @property
    def all(self) -> list[Source]:
        """Every footnote in the order of the records."""
        return list(self._found.values())


def ceiling(cells: Sequence[Record], sources: Sources) -> Ceiling | None:
    """The strongest floor that covers all attackers; None where there is none.

    Floors of different name or prior are not mixed: the one with the lowest median is taken.
    """
    ran = [cell for cell in cells if cell["status"] == "ok"]
    levels: dict[Source, list[float]] = {}
    for cell in ran:
        for bound in cell.get("bounds") or []:
            if bound["covers"] == "all" and bound["psnr"] is not None:
                levels.setdefault(sources.of(bound), []).append(float(bound["psnr"]))
    found = [Ceiling(median(own), s, len(own), len(ran)) for s, own in levels.items()]
    return min(found, key=lambda one: one.psnr, default=None)


def of_mean_error(values: Iterable[float]) -> float | None:
    """The PSNR of the mean squared error of images with these PSNRs, which a ceiling limits.

    It is never above their mean PSNR.

    Example:
        >>> round(of_mean_error([10.0, 20.0]), 4)
        12.5964
    """
    errors = [10 ** (-max(min(value, _EXTREME), -_EXTREME) / 10) for value in values]
    return -10 * math.log10(math.fsum(errors) / len(errors)) if errors else None


def notes(cells: Iterable[Record], label: Callable[[Record], str]) -> list[tuple[str, list[str]]]:
    """Why there is no floor: each reason with the defenses that it holds for."""
    found: dict[str, dict[str, None]] = {}
    for cell in cells:
        if cell.get("bounds_note"):
            found.setdefault(short(cell["bounds_note"]), {})[label(cell)] = None
    return [(reason, list(defenses)) for reason, defenses in found.items()]


def short(text: str) -> str:
    """A sentence that is not endless."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _key(bound: Record) -> tuple[str, str, str]:
    return short(bound["name"]), short(bound["prior"]), short(bound["covers"])


def _source(number: int, key: tuple[str, str, str], bounds: Sequence[Record]) -> Source:
    name, prior, covers = key
    equations = dict.fromkeys(short(bound.get("equation") or "") for bound in bounds)
    sentences = dict.fromkeys(
        short(text) for bound in bounds for text in (bound.get("assumptions") or [])[:SHOWN]
    )
    return Source(
        number,
        name,
        prior,
        any(bound.get("rests_on_prior") is not False for bound in bounds),
        covers,
        "; ".join(text for text in list(equations)[:SHOWN] if text),
        tuple(sentences)[:SHOWN],
    )
