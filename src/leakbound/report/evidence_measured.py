"""What attacks did: counted, with n and intervals, as JSON values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtrit

from leakbound.assess.record import Record
from leakbound.report import captured, strength_table, tables
from leakbound.report.folder import Run

SHOWN = 100
"""Of how many combinations the pictures are kept."""
Rows = Sequence[tables.Verdict]
_PICTURES = ("truth", "reconstruction", "leak_map")


def combinations(run: Run, names: tables.Names, rows: Rows) -> list[dict[str, Any]]:
    """One row for each model, batch size and defense: what all attacks together did."""
    strengths = {
        (section.model, section.batch_size, row.defense): row
        for section in strength_table.sections(run.cells, run.trainings, names)
        for row in section.rows
    }
    return [
        {
            "model": row.model,
            "batch_size": row.batch_size,
            "defense": row.defense,
            "guarantee": names.settings[row.defense].guarantee,
            "data_dependent_law": names.settings[row.defense].data_dependent_law,
            "verdict": row.verdict,
            "strongest_attack": row.attack,
            "best_psnr": row.best,
            "rebuilt": share_of(row.reached),
            "proved": row.proved,
            "strength": _strength(strengths.get((row.model, row.batch_size, row.defense))),
            "cells": row.cells,
            "failed": row.failed,
        }
        for row in rows
    ]


def inspected(cells: Sequence[Record], names: tables.Names) -> list[dict[str, Any]]:
    """One row for each attack on each combination."""
    return [
        {
            "model": group.model,
            "batch_size": group.batch_size,
            "defense": group.defense,
            "attack": group.attack,
            "psnr": middle_of(group.psnr),
            "ssim": middle_of(group.ssim),
            "best_psnr": group.best,
            "psnr_without_update": group.blind,
            "rebuilt": share_of(group.reached),
            "identified": group.identified,
            "labels_right": group.labels,
            "ran": group.ok,
            "in_trouble": group.problems,
            "not_applicable": group.not_applicable,
            "failed": group.failed,
        }
        for group in tables.groups(cells, names)
    ]


def explained(cells: Iterable[Record], names: tables.Names) -> list[dict[str, Any]]:
    """How much of each captured update each guess explains, and whether the update proves it."""
    return [
        {
            "update": row.capture.label,
            "kind": row.capture.kind,
            "attack": attack,
            "explained": capture.explained,
            "at_the_best_length": capture.scaled,
            "proof": capture.certificate,
            "status": status,
            "note": reason or None,
        }
        for row in captured.rows(cells, names.attack)
        for attack, capture, status, reason in row.attacks
    ]


def strongest(run: Run, names: tables.Names, rows: Rows, *, images: bool) -> list[dict[str, Any]]:
    """For each combination the cell in which its strongest attack rebuilt the best image."""
    found, best = [], _best_cells(run.cells, names)
    for place, row in enumerate(rows):
        cell = best.get((row.model, row.batch_size, row.defense, row.attack or ""))
        if cell is None:
            continue
        files = (cell.get("pictures") or {}) if images and place < SHOWN else {}
        psnr, hits = (cell["metrics"] or {}).get("psnr") or [], tables.reaches(cell)
        found.append(
            {
                "model": row.model,
                "batch_size": row.batch_size,
                "defense": row.defense,
                "verdict": row.verdict,
                "attack": names.attack(cell),
                "seed": cell["seed"],
                "cell": cell["cell"],
                "psnr": psnr,
                "psnr_without_update": (cell["blind"] or {}).get("psnr") or [],
                "rebuilt": [*hits, *[False] * len(psnr)][: len(psnr)],
                "trouble": cell.get("problem"),
                "proof": captured.proof(cell),
                "pictures": {name: files[name] for name in _PICTURES if name in files} or None,
            }
        )
    return found


def trainings(units: Sequence[Record], names: tables.Names) -> list[dict[str, Any]]:
    """Test accuracy of each model under each defense, and what is lost against no defense."""
    found: dict[tuple[str, str], list[Record]] = {}
    for unit in units:
        found.setdefault((names.model(unit), names.defense(unit)), []).append(unit)
    plain = {
        (model, unit["seed"]): float(unit["accuracy"])
        for (model, _), own in found.items()
        for unit in own
        if unit["defense"]["name"] == tables.NO_DEFENSE and unit["status"] == "ok"
    }
    made = []
    for (model, defense), own in found.items():
        ran = [unit for unit in own if unit["status"] == "ok"]
        lost = [
            plain[model, unit["seed"]] - float(unit["accuracy"])
            for unit in ran
            if (model, unit["seed"]) in plain and unit["defense"]["name"] != tables.NO_DEFENSE
        ]
        accuracy = mean_of([float(unit["accuracy"]) for unit in ran])
        made.append(
            {
                "model": model,
                "defense": defense,
                "rounds": _most([unit.get("rounds") for unit in own]),
                "accuracy": accuracy,
                "lost": mean_of(lost),
                "failed": len(own) - len(ran),
            }
        )
    return made


def mean_of(values: Sequence[float]) -> dict[str, Any] | None:
    """A mean over seeds with Student's t interval of 95 %, which one seed has not.

    Example:
        >>> round(mean_of([1.0, 2.0, 3.0])["low"], 4), mean_of([1.0])["low"], mean_of([])
        (-0.4841, None, None)
    """
    if not values:
        return None
    n, middle = len(values), fmean(values)
    low = high = None
    if n > 1:
        half = float(stdtrit(n - 1, (1 + tables.LEVEL) / 2)) * stdev(values) / math.sqrt(n)
        low, high = middle - half, middle + half
    return {"mean": middle, "low": low, "high": high, "n": n, "level": tables.LEVEL}


def share_of(share: tables.Share | None) -> dict[str, Any] | None:
    """Some of n images with a Clopper-Pearson interval of 95 %."""
    if share is None:
        return None
    return {**asdict(share), "value": share.value, "level": tables.LEVEL}


def middle_of(middle: tables.Middle | None) -> dict[str, Any] | None:
    """A median over cells; `level` is None where low and high are the least and the most."""
    if middle is None:
        return None
    known = asdict(middle)
    exact = known.pop("exact")
    return {**known, "level": tables.LEVEL if exact else None}


def _strength(row: strength_table.Row | None) -> dict[str, Any] | None:
    """S_D: what an attacker leaves who must choose his attack beforehand."""
    if row is None or row.found is None:
        return None
    found = row.found
    return {
        "rmse": found.rmse,
        "low": found.low if math.isfinite(found.low) and found.n > 1 else None,
        "high": found.high if math.isfinite(found.high) else None,
        "level": tables.LEVEL,
        "attack": row.winner,
        "rmse_without_update": found.blind,
        "rounds": found.n,
        "left_out": row.left_out,
    }


def _best_cells(
    cells: Iterable[Record], names: tables.Names
) -> dict[tuple[str, int, str, str], Record]:
    """By model, batch size, defense and attack, the cell with the best image."""
    found: dict[tuple[str, int, str, str], tuple[float, Record]] = {}
    for cell in cells:
        if cell["status"] == "ok":
            key = (names.model(cell), cell["batch_size"], names.defense(cell), names.attack(cell))
            best = _best(cell)
            if key not in found or best > found[key][0]:
                found[key] = (best, cell)
    return {key: cell for key, (_, cell) in found.items()}


def _best(cell: Record) -> float:
    if tables.proved(cell):
        return math.inf
    values = [v for v in (cell["metrics"] or {}).get("psnr") or [] if v is not None]
    return max(values, default=-math.inf)


def _most(values: Sequence[Any]) -> int | None:
    whole = [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
    return max(whole, default=None)
