"""The gallery of a report: every batch under every defense, and what each attack made of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from leakbound.assess.record import Record
from leakbound.report import tables
from leakbound.report.captured import Capture, capture_of
from leakbound.report.drill import Detail, Facts, detail, facts, room
from leakbound.report.folder import Picture, Run
from leakbound.report.rerun import reruns

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
    facts: Facts
    columns: tuple[Record, ...] = ()
    captured: Capture | None = None


@dataclass(frozen=True)
class Card:
    """One batch under one defense: the truth and what each attack made of it.

    `number` is its place on the page. `cost`: the share of first-order utility kept, and the noise
    of equal second-order cost.
    """

    number: int
    model: str
    batch_size: int
    clients: int
    defense: str
    seed: int
    entries: tuple[Entry, ...]
    cost: tuple[float | None, float | None]
    detail: Detail

    @property
    def captured(self) -> Capture | None:
        """The captured update that is attacked, where it is none of the audit's own."""
        return self.entries[0].captured


def gallery_of(run: Run, names: tables.Names, *, images: bool) -> list[Card]:
    """Cells that apply, by batch and defense; pictures are read once each."""
    cards: dict[tuple[str, int, int, str, int], list[Record]] = {}
    for cell in run.cells:
        if cell["status"] != "not_applicable":
            size, clients = cell["batch_size"], cell["clients"]
            key = (names.model(cell), size, clients, names.defense(cell), cell["seed"])
            cards.setdefault(key, []).append(cell)
    load, most, commands = cache(run.picture), room(run.cells), reruns(run)
    places = {cell["cell"]: place for place, cell in enumerate(run.cells, 1)}

    def entries(cells: list[Record]) -> Iterable[Entry]:
        last: dict[str, str] = {}
        for cell in cells:
            files = (cell.get("pictures") or {}) if images else {}
            new = {name: files[name] for name in ("truth", "leak_map") if name in files}
            new = {name: file for name, file in new.items() if file != last.get(name)}
            last |= new
            guess = files.get("reconstruction")
            pictures = {name: load(file) for name, file in new.items()}
            known = facts(cell, places[cell["cell"]], commands)
            entry = _entry(cell, names, pictures, load(guess) if guess else None, known)
            yield replace(entry, columns=_columns(cell, values=images))

    return [
        Card(number, *key, tuple(entries(cells)), _cost(cells), detail(cells, names, most))
        for number, (key, cells) in enumerate(cards.items(), 1)
    ]


def best_images(
    cards: Iterable[Card],
) -> dict[tuple[str, int, str, str], str]:
    """By model, batch size, defense and attack, the anchor of the image it rebuilt best.

    Only images that the page shows one by one have one.
    """
    found: dict[tuple[str, int, str, str], tuple[float, str]] = {}
    for card in cards:
        for entry in card.entries:
            key = (card.model, card.batch_size, card.defense, entry.attack)
            for i, score in enumerate(entry.scores, 1):
                if score.psnr is None or (key in found and found[key][0] >= score.psnr):
                    continue
                shown = i <= len(card.detail.images)
                found[key] = (score.psnr, f"image-{card.number}-{i}" if shown else "")
    return {key: anchor for key, (_, anchor) in found.items() if anchor}


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
    known: Facts,
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
        facts=known,
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
