"""One image at a time: what every attack made of it, by every measure, and how to run it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from leakbound.assess.record import Record
from leakbound.report import tables
from leakbound.report.rerun import Rerun

BLIND = "without update"
"""The column of the guess that saw no update."""
_FIRST = ("psnr", "rmse", "mse", "ssim", "ms_ssim", "lpips", "ncc", "identification")


@dataclass(frozen=True)
class Guess:
    """What one attack made of one image: a value a column, None where there is none."""

    attack: str
    values: tuple[float | None, ...]
    reached: bool


@dataclass(frozen=True)
class Detail:
    """The images of one card, one after the other.

    Attributes:
        columns: the measures that any of its cells has, by their name in the records.
        images: for each image shown what every attack made of it.
        more: how many images of the batch are not shown.
    """

    columns: tuple[str, ...]
    images: tuple[tuple[Guess, ...], ...]
    more: int


@dataclass(frozen=True)
class Facts:
    """What is to be said of one cell besides its images.

    Attributes:
        name: the cell's own name, a hash.
        attack: the hash of the attack's settings.
        start, end: the attack's own objective; None where it has none.
        rerun: how to run this cell alone, where the run's plan tells.
    """

    name: str
    attack: str
    start: float | None
    end: float | None
    rerun: Rerun | None


def detail(cells: Sequence[Record], names: tables.Names, most: int) -> Detail:
    """The images of some cells on one batch, at most so many."""
    ran = [cell for cell in cells if cell["status"] == "ok" and cell["metrics"]]
    count = max((len(cell["metrics"]["psnr"]) for cell in ran), default=0)
    columns = _columns(ran)
    guesses = [(names.attack(cell), cell, tables.reaches(cell)) for cell in ran]
    images = [
        tuple(
            Guess(attack, tuple(_value(cell, column, i) for column in columns), reached[i])
            for attack, cell, reached in guesses
            if i < len(reached)
        )
        for i in range(min(count, most))
    ]
    return Detail(columns, tuple(images), count - len(images))


def facts(cell: Record, reruns: Mapping[str, Rerun]) -> Facts:
    """What a record says of its cell besides the images."""
    objective = cell.get("objective") if isinstance(cell.get("objective"), dict) else None
    start, end = ((objective or {}).get(key) for key in ("start", "end"))
    return Facts(
        cell["cell"],
        cell["attack"]["hash"],
        start if _is_number(start) else None,
        end if _is_number(end) else None,
        reruns.get(cell["cell"]),
    )


def _columns(cells: Iterable[Record]) -> tuple[str, ...]:
    """The measures with a value for some image: the best known first, the blind guess second."""
    held = {
        name
        for cell in cells
        for name, values in cell["metrics"].items()
        if len(values) == len(cell["metrics"]["psnr"]) and set(values) != {None}
    }
    known = [name for name in _FIRST if name in held]
    rest = sorted(held - set(known))
    return (*known[:1], BLIND, *known[1:], *rest) if held else ()


def _value(cell: Record, column: str, image: int) -> float | None:
    values = cell["blind"]["psnr"] if column == BLIND else cell["metrics"].get(column) or []
    value = values[image] if image < len(values) else None
    return float(value) if _is_number(value) else None


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
