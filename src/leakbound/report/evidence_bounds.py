"""What theorems say of a run: every bound with its assumptions, and the corridor of both sides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from leakbound.assess.record import Record
from leakbound.report import floors, tables
from leakbound.report.evidence_measured import share_of

WHOM = {
    "all": "all attackers",
    "unproved": "nobody for certain: it is not proved here, the assumptions say why",
}


def bounds_of(cells: Sequence[Record], names: tables.Names) -> dict[str, list[dict[str, Any]]]:
    """One row for each bound on each combination, its theorems, and where one is missing, why."""
    sources = floors.Sources(cells)
    found: dict[tuple[str, int, str, int], list[Record]] = {}
    ran: dict[tuple[str, int, str], int] = {}
    about: dict[int, floors.Source] = {}
    for cell in cells:
        if cell["status"] != "ok":
            continue
        key = (names.model(cell), cell["batch_size"], names.defense(cell))
        ran[key] = ran.get(key, 0) + 1
        for bound in cell.get("bounds") or []:
            source = sources.of(bound)
            about[source.number] = source
            found.setdefault((*key, source.number), []).append(bound)
    return {
        "bounds": [_row(key[:3], own, about[key[3]], ran[key[:3]]) for key, own in found.items()],
        "theorems": [theorem(source) for source in about.values()],
        "missing": [
            {"reason": reason, "defenses": defenses}
            for reason, defenses in floors.notes(cells, names.defense)
        ],
    }


def theorem(source: floors.Source) -> dict[str, Any]:
    """What a bound rests on; sentences that differ from cell to cell stand one below the other."""
    return {
        "number": source.number,
        "name": source.name,
        "prior": source.prior,
        "rests_on_prior": source.rests_on_prior,
        "covers": WHOM.get(source.covers, f"{source.covers} attackers only"),
        "covers_all": source.covers == "all",
        "equation": source.equation or None,
        "assumptions": list(source.assumptions),
    }


def _row(
    key: tuple[str, int, str], own: Sequence[Record], source: floors.Source, cells: int
) -> dict[str, Any]:
    """The median of floors over the cells; of probabilities the largest."""
    floor = floors.is_floor(own[0])
    values = [float(bound["value"]) for bound in own]
    levels = [float(bound["psnr"]) for bound in own if bound["psnr"] is not None]
    errors = [float(b["standard_error"]) for b in own if b.get("standard_error") is not None]
    return {
        "model": key[0],
        "batch_size": key[1],
        "defense": key[2],
        "name": source.name,
        "kind": "floor on the mean squared error" if floor else "probability of a rebuilt example",
        "value": median(values) if floor else max(values),
        "least": min(values),
        "most": max(values),
        "psnr": median(levels) if levels else None,
        "standard_error": max(errors, default=None),
        "accepted": None if source.accepted is None else own[0].get("accepted"),
        "prior": source.prior,
        "covers_all": source.covers == "all",
        "theorem": source.number,
        "cells": len(own),
        "of_cells": cells,
        "verdict": None,
    }


def corridor_of(rows: Sequence[tables.Verdict], cells: Sequence[Record]) -> dict[str, Any]:
    """Both sides of each combination on one axis: as mean error, and as a probability."""
    blind = _blind(rows, cells)
    limits = {float(c["threshold"]["value"]) for c in cells if c["threshold"]["metric"] == "psnr"}
    errors, chances = [], []
    for place, row in enumerate(rows):
        who = {"model": row.model, "batch_size": row.batch_size, "defense": row.defense}
        who |= {"verdict": row.verdict}
        top, chance = row.ceiling, row.chance
        errors.append(
            {
                **who,
                "attack": row.mean_error,
                "ceiling": top.psnr if top else None,
                "ceiling_prior": top.source.prior if top else None,
                "without_update": blind[place],
            }
        )
        if chance is not None:
            chances.append(
                {
                    **who,
                    "rebuilt": share_of(row.reached),
                    "bound": chance.value,
                    "bound_prior": chance.source.prior,
                    "accepted": _accepted(chance.source.accepted),
                }
            )
    return {
        "threshold": limits.pop() if len(limits) == 1 else None,
        "mean_error": errors,
        "probability": chances,
        "curve": None,
    }


def _blind(rows: Sequence[tables.Verdict], cells: Iterable[Record]) -> list[float | None]:
    """The same measure of the guess that saw no update, by combination."""
    known = tables.Names(cells)
    found: dict[tuple[str, int, str], list[float]] = {}
    for cell in cells:
        if cell["status"] == "ok" and cell.get("blind"):
            key = (known.model(cell), cell["batch_size"], known.defense(cell))
            values = [v for v in cell["blind"].get("psnr") or [] if v is not None]
            found.setdefault(key, []).extend(values)
    return [
        floors.of_mean_error(found.get((row.model, row.batch_size, row.defense), []))
        for row in rows
    ]


def _accepted(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:  # "none named"
        return None
