"""Check paper B's theory numerically: the sweep, its claims, tables and a figure in one folder."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from leakbound.audit.context import one_thread
from leakbound.cli import kit
from leakbound_reproductions import kept
from leakbound_reproductions.outcome import Tell
from leakbound_reproductions.systematic_evaluation import sweep, theory_figure
from leakbound_reproductions.systematic_evaluation.all_attackers import Compared, compared
from leakbound_reproductions.systematic_evaluation.sweep import Row, Withheld
from leakbound_reproductions.systematic_evaluation.theory_claims import Rows, over_width
from leakbound_reproductions.systematic_evaluation.trial import Cell, Trial, run

SEEDS = {"minutes": 6, "cpu": 20, "paper": 20}
"""The theory has no larger setting of its own: the paper prints no numbers for it."""
PRECISE = {"minutes": 1, "cpu": 5, "paper": 5}
"""Factor of seeds for experiments that a claim needs to a few percent."""
REPEATED = {"minutes": 0, "cpu": 400, "paper": 400}
"""Seeds of what is measured again, from `sweep.AGAIN` on; nothing if 0."""
VERSION = 1
"""Raise it if a code change alters trials; journals then start again."""
EDGES = (0.5, 0.9, 1.0)
BEYOND = (0.1, 0.5, 0.9)
"""Pruning rates of claim 2-9: parts of n / (n + 1), and of what is left above it."""
COLUMNS = (
    *Cell.__dataclass_fields__,
    "seeds",
    "median",
    "low",
    "high",
    "span",
    "upper_order",
    "conditions",
    "lower_order",
    "floor",
    "error_over_floor",
)


@dataclass(frozen=True)
class Theory:
    """What was measured: the sweep's rows, lower bounds for all attackers, and pruned shares."""

    rows: Rows
    everyone: Sequence[Compared]
    shares: Sequence[Withheld]


def study(folder: Path, scale: str, tell: Tell) -> Theory:
    """Measure what is missing and write theory.csv, theory.png and theory.md.

    Each trial is stored in theory.jsonl when it is ready; a later call continues from them.
    """
    kit.folder(folder)
    seeds = SEEDS[scale]
    wanted = sweep.cells(quick=scale == "minutes")
    with one_thread():
        journal = folder / "theory.jsonl"
        times = PRECISE[scale]
        part = "two-layer networks"
        each = {cell: sweep.fresh(seeds * (times if sweep.precise(cell) else 1)) for cell in wanted}
        rows = measure(each, journal, part, tell)
        seconds = range(sweep.AGAIN, sweep.AGAIN + REPEATED[scale])
        second = dict.fromkeys([*sweep.over_inputs(), *sweep.loud(2)] if seconds else [], seconds)
        again = measure(second, journal, f"{part}, again", tell)
        parts = f"{part}: lower bounds and pruned shares"
        tell(parts, 0, 2)
        everyone = compared(seeds)
        tell(parts, 1, 2)
        shares: list[Withheld] = []
        for inputs in (10, 20):
            edge = inputs / (inputs + 1)
            rates = [edge * part for part in EDGES] + [edge + (1 - edge) * p for p in BEYOND]
            shares += sweep.withheld(rates, inputs, seeds)
        tell(parts, 2, 2)
    found = Theory(Rows(rows, again), everyone, shares)
    _write(found, folder)
    return found


def measure(each: Mapping[Cell, range], journal: Path, part: str, tell: Tell) -> list[Row]:
    """The rows of the experiments, each at its seeds; trials in the journal are not run again."""
    kit.check(journal, key="seed")
    trials = _read(journal)
    rows = []
    done = 0
    total = sum(map(len, each.values()))
    tell(part, 0, total)
    for cell, seeds in each.items():
        for seed in seeds:
            if (cell, seed) not in trials:
                trials[cell, seed] = run(cell, seed)
                known = {"schema": 1, "version": VERSION, "cell": asdict(cell), "seed": seed}
                kit.append(journal, known | asdict(trials[cell, seed]), "seed")
            done += 1
            tell(part, done, total)
        rows.append(sweep.row(cell, [trials[cell, seed] for seed in seeds]))
    return rows


def _read(journal: Path) -> dict[tuple[Cell, int], Trial]:
    found = {}
    lines = kit.read(journal).splitlines(keepends=True) if journal.exists() else []
    for line in lines:
        record: dict[str, Any] | None = kit.decode(line, "seed")
        if record is not None and record["version"] == VERSION:
            trial = Trial(record["error"], record["span"], record["floor"])
            found[Cell(**record["cell"]), record["seed"]] = trial
    return found


def _write(found: Theory, folder: Path) -> None:
    table = io.StringIO(newline="")
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_values(row) for row in found.rows.all)
    kit.write(folder / "theory.csv", table.getvalue().encode())
    theory_figure.draw(found.rows, found.shares, folder / "theory.png")
    kept.page(folder / "theory.md", _page(found))


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


def _page(found: Theory) -> list[str]:
    rows = found.rows.all
    return [
        "# Two-layer network: all experiments",
        "",
        f"{found.rows.seeds}, from {sweep.FIRST} on. R is the root mean squared distance between "
        "unit inputs and matched estimates; a random unit vector has 1.41. The better sign "
        "counts if signs cannot be known, and for the printed attack, whose theorem leaves them "
        "open. R is a median with an interval of at least 95 %. Slopes are means over seeds with "
        '95 % t intervals. "printed" is the attack as in the paper; "library" removes lower '
        "moments first.",
        "",
        "## Slopes of log error in log M",
        "",
        "Over the widths at which the median error is at most 0.5.",
        "",
        "| attack | slope |",
        "|---|---|",
        *(_line(pair) for pair in over_width(found.rows).items()),
        "",
        "## Is an attack better than a lower bound?",
        "",
        *_floors(rows, found.everyone),
        "",
        "## All experiments",
        "",
        "Orders omit their constants and bound nothing. The lower bound is Cramér-Rao's, for "
        "estimators that know all norms and are unbiased near these inputs. It is the root of a "
        'mean over seeds, capped at the error of the zero estimate, 1. "met": both conditions '
        "of the upper order (B <= n^(1/4), M >= n B^2 / (nu pi_min)^2), with constants of one.",
        "",
        *_table(rows),
    ]


def _floors(rows: Sequence[Row], everyone: Sequence[Compared]) -> list[str]:
    ratios = [(r.over_floor, r) for r in rows if r.over_floor is not None]
    least, where = min(ratios, key=lambda pair: pair[0] or 0.0)
    below = sum(1 for ratio, _ in ratios if ratio is not None and ratio < 1)
    lines = [
        f"Lower bound for unbiased estimators, {len(ratios)} experiments with noise: the root "
        f"mean squared error is below it in {below}; the smallest ratio of error to lower bound "
        f"is {least:.2f} ({_name(where.cell)}, B = {where.cell.batch}, noise_std "
        f"{where.cell.noise_std:g}).",
        "",
        "Lower bound for all attackers, estimated (van Trees; one Gaussian input of 10 numbers, "
        "M = 2048, softplus):",
        "",
        "| noise_std | attack | lower bound | mean squared error minus squared lower bound |",
        "|---|---|---|---|",
    ]
    lines += [f"| {c.noise_std:g} | {c.error:.3f} | {c.floor:.3f} | {c.gap} |" for c in everyone]
    beaten = sum(c.gap.high < 0 for c in everyone)
    return [*lines, "", f"The attack is better in {beaten} of {len(everyone)}."]


def _table(rows: Iterable[Row]) -> list[str]:
    lines = [
        "| defense | activation | n | M | B | attack | R | outside the span | upper order (met) "
        "| lower order | lower bound | R / lower bound |",
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
    """One line of a table; bars are escaped."""
    return "| " + " | ".join(str(value).replace("|", "\\|") for value in values) + " |"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _name(cell: Cell) -> str:
    parts = [] if cell.defense == "none" else [f"{cell.defense} {cell.level:g}"]
    parts += [f"x {cell.steps}"] if cell.steps > 1 else []
    parts += [f"noise {cell.noise_std:g}"] if cell.noise_std else []
    return ", ".join(parts) or "none"
