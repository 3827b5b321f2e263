"""Paper B's theory checked by numbers: the sweep, the claims, tables and a figure in one folder."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from leakbound.audit.bench import one_thread
from leakbound.experiments.systematic_evaluation import sweep, theory_figure
from leakbound.experiments.systematic_evaluation.all_attackers import Compared, compared
from leakbound.experiments.systematic_evaluation.sweep import Row
from leakbound.experiments.systematic_evaluation.theory_claims import Claim, Rows, claims
from leakbound.experiments.systematic_evaluation.trial import Cell, Trial, run

SEEDS, FEW = 20, 3
EDGES = (0.5, 0.9, 1.0)
BEYOND = (0.1, 0.5, 0.9)
"""Pruning rates of claim 2-9: parts of n / (n + 1), and of what is left above it."""
COLUMNS = (
    *Cell.__dataclass_fields__,
    *("seeds", "median", "low", "high", "span", "upper_order", "conditions", "lower_order"),
    *("floor", "error_over_floor"),
)


def study(folder: Path, *, quick: bool = False) -> list[Claim]:
    """Measure everything and write theory.csv, theory_claims.json, theory.png and theory.md.

    The table grows row by row, so an interrupted run leaves what it has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seeds, wanted = (FEW if quick else SEEDS), sweep.cells(quick)
    with one_thread(), _progress() as progress:
        bar = progress.add_task("trials", total=len(wanted) * seeds)
        rows = _kept(wanted, seeds, run, lambda: progress.advance(bar), folder / "theory.csv")
        progress.update(bar, description="floors for all attackers, pruned shares")
        everyone = compared(2 * seeds)
        shares = []
        for inputs in (10, 20):
            edge = inputs / (inputs + 1)
            rates = [edge * part for part in EDGES] + [edge + (1 - edge) * p for p in BEYOND]
            shares += sweep.withheld(rates, inputs, seeds)
    found = claims(Rows(rows), shares)
    text = json.dumps([asdict(claim) for claim in found], indent=1)
    (folder / "theory_claims.json").write_text(text + "\n", encoding="utf-8")
    theory_figure.draw(Rows(rows), shares, folder / "theory.png")
    page = _page(found, rows, everyone, seeds)
    (folder / "theory.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    return found


def _kept(
    wanted: Sequence[Cell],
    seeds: int,
    trial: Callable[[Cell, int], Trial],
    step: Callable[[], None],
    table: Path,
) -> list[Row]:
    """The rows, each written to the table as soon as it is there."""
    rows = []
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in sweep.measure(wanted, seeds, trial, step):
            writer.writerow(_values(row))
            file.flush()
            rows.append(row)
    return rows


def _values(row: Row) -> list[object]:
    floor = float(np.sqrt(np.mean(np.square(row.floors)))) if row.floors else None
    numbers = (row.median, row.low, row.high, row.span)
    rest = (row.upper, row.meets if row.upper is not None else None, row.lower, floor)
    return [
        *asdict(row.cell).values(),
        len(row.errors),
        *(_number(value) for value in (*numbers, *rest, row.over_floor)),
    ]


def _number(value: float | bool | None) -> object:
    if value is None:
        return ""
    return value if isinstance(value, bool) else f"{value:.5g}"


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _page(
    found: Sequence[Claim], rows: Sequence[Row], everyone: Sequence[Compared], seeds: int
) -> list[str]:
    return [
        "# The two-layer network: what was claimed and what was measured",
        "",
        f"Written by `python -m leakbound.experiments.systematic_evaluation theory`; {seeds} seeds "
        "a cell. R is the root mean squared distance of unit inputs and matched guesses (a random "
        "unit guess: 1.41; where signs cannot be known, the better sign counts). Medians with "
        "intervals of at least 95 %; slopes are means over seeds with t intervals of 95 %. "
        '"printed" is the attack as the paper has it, "library" takes lower moments out first.',
        "",
        "| claim | statement | measured | verdict |",
        "|---|---|---|---|",
        *(_line((c.number, c.statement, c.measured, c.word)) for c in found),
        "",
        "## Does an attack beat a floor that covers it?",
        "",
        *_floors(rows, everyone),
        "",
        "## All cells",
        "",
        "Orders leave out their constants and bound nothing. The floor is Cramer-Rao's for "
        "estimators that know all norms and are unbiased near these inputs, as a root of the mean "
        'over seeds; it is capped at the zero guess\'s error, 1. "met": both conditions of the '
        "upper order (B <= n^(1/4), M >= n B^2 / (nu pi_min)^2), with constants of one.",
        "",
        *_table(rows),
    ]


def _floors(rows: Sequence[Row], everyone: Sequence[Compared]) -> list[str]:
    ratios = [(r.over_floor, r) for r in rows if r.over_floor is not None]
    least, where = min(ratios, key=lambda pair: pair[0] or 0.0)
    below = sum(1 for ratio, _ in ratios if ratio is not None and ratio < 1)
    lines = [
        f"Unbiased estimators' floor, {len(ratios)} cells with noise: root mean squared error "
        f"below it in {below}; the least error over floor is {least:.2f} "
        f"({_name(where.cell)}, B = {where.cell.batch}, noise_std {where.cell.noise_std:g}).",
        "",
        "All attackers' floor (van Trees; one Gaussian input of 10 numbers, M = 2048, softplus):",
        "",
        "| noise_std | attack | floor | mean squared error less squared floor |",
        "|---|---|---|---|",
    ]
    lines += [f"| {c.noise_std:g} | {c.error:.3f} | {c.floor:.3f} | {c.gap} |" for c in everyone]
    beaten = sum(c.gap.high < 0 for c in everyone)
    return [*lines, "", f"Beaten in {beaten} of {len(everyone)}."]


def _table(rows: Iterable[Row]) -> list[str]:
    lines = [
        "| defense | s | n | M | B | attack | R | outside the span | upper order (met) | "
        "lower order | floor | R / floor |",
        "|" + "---|" * 12,
    ]
    for row in rows:
        cell = row.cell
        upper = "unknown"
        if row.upper is not None:
            upper = f"{row.upper:.3f} ({'yes' if row.meets else 'no'})"
        floor = float(np.sqrt(np.mean(np.square(row.floors)))) if row.floors else None
        values = [_name(cell), cell.activation, cell.inputs, cell.width, cell.batch, cell.method]
        values += [f"{row.median:.3f} [{row.low:.3f}, {row.high:.3f}]", f"{row.span:.3f}", upper]
        values += [_short(row.lower), _short(floor), _short(row.over_floor)]
        lines.append(_line(values))
    return lines


def _line(values: Iterable[object]) -> str:
    """One line of a table, bars inside its cells escaped."""
    return "| " + " | ".join(str(value).replace("|", "\\|") for value in values) + " |"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _name(cell: Cell) -> str:
    parts = [] if cell.defense == "none" else [f"{cell.defense} {cell.level:g}"]
    parts += [f"x {cell.steps}"] if cell.steps > 1 else []
    parts += [f"noise {cell.noise_std:g}"] if cell.noise_std else []
    return ", ".join(parts) or "none"
