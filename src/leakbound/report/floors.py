"""Bounds on every attacker: what the records hold of them, one row a combination.

A floor is on the mean over the images of its prior and over the noise, never on a single image. As
a PSNR it is a ceiling: the PSNR of the mean squared error, which no attacker exceeds. The other
kind of bound is a probability: no attacker reaches the threshold more often, under its prior.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from leakbound.assess.record import Record

Key = tuple[str, str, str, str | None]
SHOWN = 30
"""How many of a long list a page shows."""
LONGEST = 600
"""How many letters of a sentence a page shows."""
_EXTREME = 300.0


@dataclass(frozen=True)
class Source:
    """What a bound rests on: one footnote. `number` is that of the footnote.

    `accepted`: for a probability, the one that the plan accepts, as text; else None.
    """

    number: int
    name: str
    prior: str
    rests_on_prior: bool
    covers: str
    equation: str
    assumptions: tuple[str, ...]
    accepted: str | None = None


@dataclass(frozen=True)
class Ceiling:
    """The strongest floor of a combination: the median over its cells, as PSNR in dB.

    `n` of `cells` cells that ran hold this floor.
    """

    psnr: float
    source: Source
    n: int
    cells: int


@dataclass(frozen=True)
class Chance:
    """With what probability any attacker reaches the threshold: the largest over the cells.

    `n` of `cells` cells that ran hold it.
    """

    value: float
    source: Source
    n: int
    cells: int


class Sources:
    """The footnotes of a page: one for each bound's name, prior, attackers and accepted risk."""

    def __init__(self, cells: Iterable[Record]) -> None:
        bounds: dict[Key, list[Record]] = {}
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


def chance(cells: Sequence[Record], sources: Sources) -> Chance | None:
    """The probability that covers all attackers, of the worst cell; None where there is none."""
    ran = [cell for cell in cells if cell["status"] == "ok"]
    found = [
        (float(bound["probability"]), sources.of(bound))
        for cell in ran
        for bound in cell.get("bounds") or []
        if bound["covers"] == "all" and bound.get("probability") is not None
    ]
    if not found:
        return None
    value, source = max(found, key=lambda one: one[0])
    return Chance(value, source, len(found), len(ran))


def is_floor(bound: Record) -> bool:
    """Whether it is on the mean error; else it is a probability."""
    return bound.get("probability") is None


def spelled(value: float | None) -> str:
    """A probability of any size, never below itself.

    Example:
        >>> spelled(0.1234), spelled(2.11e-14), spelled(0.0)
        ('0.124', '2.2e−14', 'at most 1e−300')
    """
    if value is None:
        return "–"
    if value <= 1e-300:
        return "at most 1e−300"
    digits = 2 if value < 1e-4 else 3
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    up = value if value == float(f"{value:.{digits}g}") else math.ceil(value / unit) * unit
    return f"{up:.{digits}g}".replace("-", "−")


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
    """Why a bound is missing: each reason with the defenses that it holds for."""
    found: dict[str, dict[str, None]] = {}
    for cell in cells:
        if cell.get("bounds_note"):
            found.setdefault(short(cell["bounds_note"]), {})[label(cell)] = None
    return [(reason, list(defenses)) for reason, defenses in found.items()]


def short(text: str) -> str:
    """A sentence that is not endless."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _key(bound: Record) -> Key:
    accepted = None
    if not is_floor(bound):
        level = bound.get("accepted")
        accepted = "none named" if level is None else f"{level:g}"
    return short(bound["name"]), short(bound["prior"]), short(bound["covers"]), accepted


def _source(number: int, key: Key, bounds: Sequence[Record]) -> Source:
    name, prior, covers, accepted = key
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
        accepted,
    )
