"""Which cells of a plan are computed together, and how.

Cells of one attack, model and batch size differ in their weights, data and noise alone. Records do
not depend on the company: what `Attack.many` answers to one does not depend on the others, and a
cell alone is a bundle of one. A bundle's records come together, so that a stop may lose a few
cells' work instead of one's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import ceil

from leakbound.audit import cells
from leakbound.audit import plan as plans
from leakbound.audit.bench import Bench, one_thread
from leakbound.audit.cells import Result
from leakbound.audit.plan import Unit
from leakbound.engines.choose import LARGEST


def bundles(units: Sequence[Unit], bench: Bench, workers: int = 1) -> list[tuple[Unit, ...]]:
    """All units, those together that gain from it, in the order of each bundle's first.

    A few cells are spread over all workers.
    """
    groups: dict[object, list[Unit]] = {}
    for unit in units:
        groups.setdefault(_kind(unit, bench), []).append(unit)
    found: list[tuple[Unit, ...]] = []
    for group in groups.values():
        most = min(_together(group[0]), max(1, ceil(len(group) / workers)))
        found += [tuple(group[at : at + most]) for at in range(0, len(group), most)]
    place = {unit.id: number for number, unit in enumerate(units)}
    return sorted(found, key=lambda bundle: place[bundle[0].id])


def run_cells(given: Sequence[plans.Cell], bench: Bench, *, pictures: bool = True) -> list[Result]:
    """As `run_cell` for each, to the bit.

    Where the attack throws for one of them, each runs alone, so that its record says why.
    """
    if len(given) == 1:
        return [cells.run_cell(given[0], bench, pictures=pictures)]
    began = time.perf_counter()
    played, rest = [], []
    with one_thread():
        for cell in given:
            try:
                played.append((cell, cells.play_cell(cell, bench)))
            except Exception:  # its own run says why
                rest.append(cell)
        try:
            sources = [cells.source_of(cell) for cell, _ in played]
            answers = cells.answers(given[0].attack, [round_ for _, round_ in played], sources)
        except Exception:  # as above
            return [cells.run_cell(cell, bench, pictures=pictures) for cell in given]
        share = (time.perf_counter() - began) / len(given)
        results = {
            cell.id: cells.judged(cell, bench, round_, answer, pictures, share)
            for (cell, round_), answer in zip(played, answers, strict=True)
        }
    results |= {cell.id: cells.run_cell(cell, bench, pictures=pictures) for cell in rest}
    return [results[cell.id] for cell in given]


def _kind(unit: Unit, bench: Bench) -> object:
    if not isinstance(unit, plans.Cell) or _together(unit) == 1:
        return unit.id
    try:
        size = bench.size(unit.model)
    except Exception:  # as above
        return unit.id
    if size is None or size > LARGEST:
        return unit.id
    return unit.attack, unit.model, unit.batch_size, unit.threat


def _together(unit: Unit) -> int:
    if not isinstance(unit, plans.Cell):
        return 1
    try:
        return plans.build_attack(unit.attack).at_once
    except Exception:  # its record will say why
        return 1
