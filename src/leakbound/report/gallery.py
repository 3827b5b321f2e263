"""The gallery of a report: every batch under every defense, and what each attack made of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from leakbound.assess.record import Record
from leakbound.report import tables
from leakbound.report.captured import Capture, capture_of, proof
from leakbound.report.drill import Detail, Facts, detail, facts
from leakbound.report.folder import Picture, Run
from leakbound.report.rerun import reruns

IMAGE_SIDE = 64
CELLS = 500
"""How many cells a page shows one by one."""
ROWS = 8000
"""How many lines of numbers (one image, one attack) a page holds; large batches are cut."""


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


@dataclass(frozen=True)
class Batch:
    """The cells of one card: one batch under one defense.

    `key`: its model, batch size, clients, defense and seed. `number`: its place on all pages.
    """

    number: int
    key: tuple[str, int, int, str, int]
    cells: tuple[Record, ...]


def pages_of(cells: Iterable[Record], names: tables.Names) -> list[list[Batch]]:
    """Cells that apply, by batch and defense, on pages of at most `CELLS` cells; one at least."""
    found: dict[tuple[str, int, int, str, int], list[Record]] = {}
    for cell in cells:
        if cell["status"] != "not_applicable":
            size, clients = cell["batch_size"], cell["clients"]
            key = (names.model(cell), size, clients, names.defense(cell), cell["seed"])
            found.setdefault(key, []).append(cell)
    pages: list[list[Batch]] = [[]]
    room_left = CELLS
    certified_first = sorted(found.items(), key=lambda one: not any(map(proof, one[1])))
    for number, (key, own) in enumerate(certified_first, 1):
        if pages[-1] and len(own) > room_left:
            pages.append([])
            room_left = CELLS
        pages[-1].append(Batch(number, key, tuple(own)))
        room_left -= len(own)
    return pages


def cards_of(
    run: Run, names: tables.Names, page: Sequence[Batch], *, images: bool, inline: bool
) -> list[Card]:
    """The cards of one page, its pictures `inline` or as links; pictures are read once each."""
    load = cache(partial(run.picture, inline=inline))
    most, commands = room(page), reruns(run.header["plan"], _cells(page))

    def entries(cells: Iterable[Record]) -> Iterable[Entry]:
        last: dict[str, str] = {}
        for cell in cells:
            files = (cell.get("pictures") or {}) if images else {}
            new = {name: files[name] for name in ("truth", "leak_map") if name in files}
            new = {name: file for name, file in new.items() if file != last.get(name)}
            last |= new
            guess = files.get("reconstruction")
            pictures = {name: load(file) for name, file in new.items()}
            known = facts(cell, commands)
            entry = _entry(cell, names, pictures, load(guess) if guess else None, known)
            yield replace(entry, columns=_columns(cell, values=images))

    return [
        Card(
            batch.number,
            *batch.key,
            tuple(entries(batch.cells)),
            _cost(batch.cells),
            detail(batch.cells, names, most),
        )
        for batch in page
    ]


def best_images(
    pages: Iterable[Sequence[Batch]], names: tables.Names
) -> dict[tuple[str, int, str, str], tuple[int, str]]:
    """By model, batch size, defense and attack, page and anchor of the image it rebuilt best.

    Only images that the page shows one by one have one.
    """
    found: dict[tuple[str, int, str, str], tuple[float, int, str]] = {}
    for number, page in enumerate(pages):
        most = room(page)
        for batch in page:
            model, size, _, defense, _ = batch.key
            for cell in batch.cells:
                key = (model, size, defense, names.attack(cell))
                for i, psnr in enumerate(_psnrs(cell), 1):
                    if psnr is not None and (key not in found or psnr > found[key][0]):
                        anchor = f"image-{batch.number}-{i}" if i <= most else ""
                        found[key] = (psnr, number, anchor)
    return {key: (page, anchor) for key, (_, page, anchor) in found.items() if anchor}


def room(page: Sequence[Batch]) -> int:
    """How many images of each batch a page has room for."""
    ran = [cell for cell in _cells(page) if cell["status"] == "ok"]
    return max(1, ROWS // max(1, len(ran)))


def _cells(page: Iterable[Batch]) -> list[Record]:
    return [cell for batch in page for cell in batch.cells]


def _psnrs(cell: Record) -> Sequence[float | None]:
    return (cell["metrics"] or {}).get("psnr", ()) if cell["status"] == "ok" else ()


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
    values = _psnrs(cell)
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
