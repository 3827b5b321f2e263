"""What `leakbound ledger` does: check a ledger's chain, and show what its rounds have cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from leakbound import check
from leakbound._util.formats import format_upper
from leakbound.cli import options
from leakbound.cli.shared import check_files, plural, write_results
from leakbound.cli.terminal import as_json, brief, console, errors, safe, table
from leakbound.ledger import Ledger, PaidRound, Standing
from leakbound.risk.deployment.statement import OF, WHO

FILES = ("ledger.json", "ledger.png")
ANY = "any example"
"""One of many is hit by chance more often than a given one: its gain would count that, too."""
POINTS = 500
"""Rounds that the figure shows, at most."""


def ledger(command: options.LedgerCommand) -> int:
    """Exit code 0: the chain is whole."""
    check.count(last=command.last)
    if not command.ledger.exists():
        raise ValueError(f"ledger {str(command.ledger)!r} does not exist; check the path")
    if command.out is not None:
        check_files(command.out, FILES)
    with errors.status("checking the chain ..."):
        book = Ledger(command.ledger)
    lines = list(book.lines(max(1, book.rounds - command.last + 1)))
    result = {
        "rounds": book.rounds,
        "head": book.head,
        "mechanisms": [
            {"rounds": count, "facts": msgspec.to_builtins(facts)} for facts, count in book.spent
        ],
        "after": msgspec.to_builtins(lines[-1].after) if lines else [],
        "last": [_plain(line) for line in lines],
    }
    text = as_json(result)
    if command.json:
        print(text)
    else:
        _show(book, lines)
    if command.out is not None:
        contents = dict(zip(FILES, (text.encode(), _picture(book)), strict=True))
        write_results(command.out, contents, json=command.json)
    return 0


def _plain(line: PaidRound) -> dict[str, Any]:
    return {"number": line.number, "at": line.at, "job": line.job, "round": line.round}


def _show(book: Ledger, lines: Sequence[PaidRound]) -> None:
    console.print(f"{plural(book.rounds, 'round')}, whole chain, head {book.head[:16]}")
    if not lines:
        return
    first = lines[-1].after[0]
    shown = table(
        "who",
        "of whom",
        f"epsilon (delta {first.delta:g})",
        "adds at most",
        f"{first.prior:g} becomes at most",
    )
    for row in lines[-1].after:
        shown.add_row(
            WHO.get(row.audience, row.audience),
            OF.get(row.unit, row.unit),
            "no bound" if row.epsilon is None else f"{row.epsilon:.4g}",
            "-" if row.unit == ANY else format_upper(row.gain),
            format_upper(row.success),
        )
    console.print(shown)
    missing = dict.fromkeys(key for row in lines[-1].after for key in row.missing)
    if missing:
        console.print(f"not stated, so its worst case counts: {safe(', '.join(missing))}")
    last = table("line", "time of the node", "job", "round", "mechanism")
    for line in lines:
        last.add_row(*map(brief, (str(line.number), line.at, line.job, line.round, line.mechanism)))
    console.print(last)


def _picture(book: Ledger) -> bytes:
    from leakbound.report import figures

    every = max(1, book.rounds // POINTS)
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in book.lines():
        if line.number % every and line.number != book.rounds:
            continue
        for row in line.after:
            if row.unit != ANY:
                curves.setdefault(_label(row), []).append((line.number, row.gain))
    # One line for names that have the same points: they would hide one another.
    alike: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for name, points in curves.items():
        alike.setdefault(tuple(points), []).append(name)
    merged = {"\n".join(names): points for points, names in alike.items()}
    return figures.png(figures.over_rounds(merged, "added to anyone's success, at most"))


def _label(row: Standing) -> str:
    return f"{WHO.get(row.audience, row.audience)}: {OF.get(row.unit, row.unit)}"
