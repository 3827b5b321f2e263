"""What `leakbound compare` does: two runs beside each other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rich.table import Table

from leakbound.cli import options
from leakbound.cli.shared import check_files
from leakbound.cli.terminal import console, errors, safe, table

if TYPE_CHECKING:
    from leakbound.report.compare import RunComparison

MOST_ROWS = 12
"""How many lines of each kind the terminal shows; the page has all."""


def compare(command: options.Compare) -> int:
    from leakbound.report.compare import FILE, summary, write_comparison
    from leakbound.report.folder import read

    # Two paths may lead to one folder.
    if os.path.realpath(command.first) == os.path.realpath(command.second):
        raise ValueError(
            f"first and second are both {str(command.first)!r}, which shows nothing; give two runs"
        )
    path = command.second / FILE if command.out is None else command.out
    if path.is_dir():
        raise ValueError(f"out is {str(path)!r}, which is a folder; name a file, as in {FILE}")
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"out is {str(path)!r}; name a file that ends in .html, as in {FILE}")
    check_files(path.parent, [path.name])
    with errors.status("comparing ..."):
        comparison = write_comparison(read(command.first), read(command.second), path)
    for words in comparison.grave:
        console.print(f"[bold]not fair:[/bold] {safe(words)}")
    if comparison.identical:
        console.print(f"{' and '.join(comparison.identical)}: byte-identical in both runs")
    console.print(summary(comparison))
    for rows in (_verdicts(comparison), _attacks(comparison)):
        if rows.row_count:
            console.print(rows)
    console.print(_counts(comparison))
    console.say(f"page: {safe(path)}")
    return 0


def _verdicts(comparison: RunComparison) -> Table:
    rows = table("Defense", "Model", "Batch", "A", "B")
    changed = [pair for pair in comparison.verdicts if pair.change]
    for pair in changed[:MOST_ROWS]:
        one = pair.first
        other = pair.second
        texts = (one.defense, one.model, one.batch_size, one.verdict, other.verdict)
        rows.add_row(*map(safe, texts))
    return _ended(rows, len(changed))


def _attacks(comparison: RunComparison) -> Table:
    """The attacks whose score differs visibly, the largest differences first."""
    from leakbound.report.compare import signed

    rows = table(
        "Defense", "Attack", "Batch", f"{comparison.axis}, B - A", "95 % interval", "Seeds"
    )
    seen = [
        (row, row.score) for row in comparison.attacks if row.score is not None and row.score.side
    ]
    seen.sort(key=lambda pair: -abs(pair[1].mean))
    for row, score in seen[:MOST_ROWS]:
        _, size, defense = row.key
        between = f"{signed(score.low)} to {signed(score.high)}"
        texts = (
            defense,
            row.attack,
            size,
            f"{signed(score.mean)} {comparison.unit}",
            between,
            score.n,
        )
        rows.add_row(*map(safe, texts))
    return _ended(rows, len(seen))


def _counts(comparison: RunComparison) -> str:
    words = [f"{comparison.both} settings in both"]
    words += [
        f"{sum(count for _, count in rows)} experiments only in {letter}"
        for letter, rows in zip("AB", comparison.only, strict=True)
        if rows
    ]
    known = [row.score for row in comparison.attacks if row.score is not None]
    same = sum(one.same for one in known)
    unseen = sum(not one.side and not one.same and one.n > 1 for one in known)
    single = sum(one.n == 1 and not one.same for one in known)
    words += [f"{same} with the same {comparison.axis} in every pair"] if same else []
    words += [f"{unseen} where no difference can be seen"] if unseen else []
    words += [f"{single} of one pair, too few for an interval"] if single else []
    return "; ".join(words)


def _ended(rows: Table, count: int) -> Table:
    if count > MOST_ROWS:
        rows.add_row(f"{count - MOST_ROWS} more on the page")
    return rows
