"""The gallery of a report: every batch under every defense, and what each attack made of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from leakbound.report import tables
from leakbound.report.captured import Capture, capture_of
from leakbound.report.folder import Picture, Record, Run

IMAGE_SIDE = 64


@dataclass(frozen=True)
class Score:
    """One image's PSNR and whether it counts as rebuilt."""

    psnr: float | None
    reached: bool


@dataclass(frozen=True)
class Entry:
    """One cell of the gallery.

    `truth` and `leak_map` are set where they differ from those of the entry before.
    """

    attack: str
    status: str
    verdict: str
    note: str | None
    mean: float | None
    scores: tuple[Score, ...]
    truth: Picture | None
    leak_map: Picture | None
    picture: Picture | None
    scale: int
    columns: tuple[Record, ...] = ()
    captured: Capture | None = None


@dataclass(frozen=True)
class Card:
    """One batch under one defense: the truth and what each attack made of it.

    `cost`: the share of first-order utility kept, and the noise of equal second-order cost.
    """

    model: str
    batch_size: int
    clients: int
    defense: str
    seed: int
    entries: tuple[Entry, ...]
    cost: tuple[float | None, float | None]

    @property
    def captured(self) -> Capture | None:
        """The captured update that is attacked, where it is none of the audit's own."""
        return self.entries[0].captured


def gallery_of(run: Run, names: tables.Names, *, images: bool) -> list[Card]:
    """Cells that ran, by batch and defense; pictures are read once each."""
    cards: dict[tuple[str, int, int, str, int], list[Record]] = {}
    for cell in run.cells:
        if cell["status"] != "not_applicable":
            size, clients = cell["batch_size"], cell["clients"]
            key = (names.model(cell), size, clients, names.defense(cell), cell["seed"])
            cards.setdefault(key, []).append(cell)
    load = cache(run.picture)

    def entries(cells: list[Record]) -> Iterable[Entry]:
        last: dict[str, str] = {}
        for cell in cells:
            files = (cell.get("pictures") or {}) if images else {}
            new = {name: files[name] for name in ("truth", "leak_map") if name in files}
            new = {name: file for name, file in new.items() if file != last.get(name)}
            last |= new
            guess = files.get("reconstruction")
            pictures = {name: load(file) for name, file in new.items()}
            entry = _entry(cell, names, pictures, load(guess) if guess else None)
            yield replace(entry, columns=_columns(cell, values=images))

    return [Card(*key, tuple(entries(cells)), _cost(cells)) for key, cells in cards.items()]


def _cost(cells: Iterable[Record]) -> tuple[float | None, float | None]:
    """First- and second-order utility of a release, from the first cell that knows it."""
    for cell in cells:
        kept = (cell.get("release") or {}).get("utility") or {}
        values = kept.get("first_order"), kept.get("second_order")
        if values != (None, None):
            return values
    return None, None


def _entry(
    cell: Record,
    names: tables.Names,
    shared: Mapping[str, Picture | None],
    picture: Picture | None,
) -> Entry:
    fine = cell["status"] == "ok"
    values = (cell["metrics"] or {}).get("psnr", []) if fine else []
    hits = tables.reaches(cell) if fine else []
    truth, leak_map = shared.get("truth"), shared.get("leak_map")
    strip = picture or truth or leak_map
    count = len(values) or (cell["batch_size"] if fine and cell["metrics"] is None else 1)
    wide = strip.width / count if strip else IMAGE_SIDE
    return Entry(
        attack=names.attack(cell),
        status=cell["status"],
        verdict=cell.get("verdict") or "undecided",
        note=cell.get("problem") if fine else cell.get("reason"),
        mean=tables.cell_value(cell, "psnr") if fine else None,
        scores=tuple(map(Score, values, hits)),
        truth=truth,
        leak_map=leak_map,
        picture=picture,
        scale=max(1, round(IMAGE_SIDE / wide)),
        captured=capture_of(cell),
    )


def _columns(cell: Record, *, values: bool) -> tuple[Record, ...]:
    """The columns of a table, those told best first; () for images.

    With `values` each has pairs of true and rebuilt values, as far as the record holds them.
    """
    found = cell.get("columns")
    if not isinstance(found, list):
        return ()
    numbers = ("mean", "worst", "matched")
    whole = [
        c
        for c in found
        if isinstance(c, dict)
        and isinstance(c.get("name"), str)
        and all(isinstance(c.get(key), int | float) for key in numbers)
    ]
    shown = [{**c, "pairs": _pairs(c) if values else []} for c in whole]
    return tuple(sorted(shown, key=lambda c: (-c["matched"], c["name"])))


def _pairs(column: Record) -> list[tuple[float, float]]:
    truth, guess = column.get("truth"), column.get("reconstruction")
    if not (isinstance(truth, list) and isinstance(guess, list)):
        return []
    pairs = list(zip(truth, guess, strict=False))
    return pairs if all(isinstance(v, int | float) for pair in pairs for v in pair) else []
