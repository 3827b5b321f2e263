"""`leakbound list`: the names that plans and commands know, and what each one is."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.markup import escape

from leakbound import data, metrics, registry
from leakbound._util.docstrings import parts
from leakbound._util.text import printable
from leakbound.assess.header import defense_info
from leakbound.check import closest
from leakbound.cli import describe, options
from leakbound.cli.terminal import console
from leakbound.core import Guarantee
from leakbound.registry import Spec
from leakbound.risk.statement import of_guarantee

Row = dict[str, Any]
KINDS = ("attacks", "defenses", "models", "schemes", "metrics", "data")
SLOT = 19
NAMES = 18
"""Columns of a name in the overview, and of a short name beside its text."""


def listing(command: options.List) -> int:
    tables = catalog()
    shown = tables
    if command.what is None:
        lines = _overview(tables)
    elif (kind := _kind(command.what)) is not None:
        shown = {kind: tables[kind]}
        lines = _of_kind(kind, tables[kind])
    else:
        shown = _named(command.what, tables)
        lines = (line for kind, rows in shown.items() for line in _of_name(kind, rows[0]))
    if command.json:
        print(json.dumps(shown, indent=1, default=str))
    else:
        for line in lines:
            console.print(line, soft_wrap=True)
    return 0


def catalog() -> dict[str, list[Row]]:
    """Every name by kind, with its summary and its settings."""
    tables: dict[str, list[Row]] = {}
    for kind in registry.PACKAGES:
        tables[f"{kind}s"] = [
            {
                "name": entry.name,
                "summary": entry.summary,
                "parameters": [
                    {"name": p.name, "type": p.kind, "default": p.default} for p in entry.parameters
                ],
            }
            for entry in registry.entries(kind).values()
        ]
    for row in tables["defenses"]:
        built = registry.build("defense", row["name"], {})
        about = defense_info(built, (Spec(row["name"]),))
        row |= {"guarantee": about.guarantee, "data_dependent_law": about.data_dependent_law}
        row["summary"] += f" [guarantee: {of_guarantee(about)}]"
    if all(row["name"] != "none" for row in tables["defenses"]):
        nothing = {"guarantee": Guarantee.NONE.value, "data_dependent_law": False, "parameters": []}
        tables["defenses"].insert(0, {"name": "none", "summary": "The plain update.", **nothing})
    said = {m.name: m.description for m in metrics.METRICS}
    for kind, known in (("metrics", said), ("data", data.SOURCES)):
        tables[kind] = [{"name": n, "summary": text, "parameters": []} for n, text in known.items()]
    return tables


def _kind(word: str) -> str | None:
    """The kind that a word names, as "attack" or "attacks"; None if it names none."""
    return next((kind for kind in KINDS if word.rstrip("s") == kind.rstrip("s")), None)


def _named(word: str, tables: Mapping[str, list[Row]]) -> dict[str, list[Row]]:
    """The rows of that name by kind; a data source also by the part before its colon.

    Raises:
        ValueError: there is no such name; the message suggests some.
    """
    named: dict[str, list[Row]] = {}
    for kind, rows in tables.items():
        some = [row for row in rows if word in (row["name"], row["name"].partition(":")[0])]
        if some:
            named[kind] = some
    if not named:
        names = {row["name"] for rows in tables.values() for row in rows}
        near = closest(word, names | set(KINDS), "leakbound list")
        raise ValueError(f"there is no name {printable(word)!r}; {near}")
    return named


def _overview(tables: Mapping[str, list[Row]]) -> Iterator[str]:
    for kind in KINDS:
        names = [row["name"] for row in tables[kind]]
        yield f"[bold]{kind}[/bold] ({len(names)})"
        yield from (escape(line) for line in _columns(names))
    yield from _filled("Details: leakbound list attacks, or leakbound list NAME")


def _columns(names: Sequence[str]) -> Iterator[str]:
    """Names in columns; a long name takes several."""
    across = max(1, (_width() - 2) // SLOT)
    line = ""
    used = 0
    for name in names:
        slots = -(-(len(name) + 1) // SLOT)
        if used and used + slots > across:
            yield f"  {line}".rstrip()
            line = ""
            used = 0
        line = line + name.ljust(slots * SLOT)
        used = used + slots
    if line:
        yield f"  {line}".rstrip()


def _of_kind(kind: str, rows: Sequence[Row]) -> Iterator[str]:
    yield f"[bold]{kind}[/bold] ({len(rows)})"
    for row in rows:
        yield from _item(row["name"], row["summary"])
    yield from _filled("Settings, source and an example: leakbound list NAME")


def _of_name(kind: str, row: Row) -> Iterator[str]:
    """All about one name: what it is, its settings with their meaning, its source, an example."""
    singular = kind.removesuffix("s")
    yield f"[bold]{escape(row['name'])}[/bold] ({singular})"
    yield from _filled(row["summary"])
    entry = registry.entries(singular).get(row["name"]) if singular in registry.PACKAGES else None
    if entry is None:
        if kind == "data":
            example = f"leakbound attack --data {row['name']}"
            yield from ("", "[bold]Example[/bold]", f"  {escape(example)}")
        return
    said = parts(inspect.getdoc(entry.build) or "")
    known = describe.meanings(entry)
    needed = describe.required(entry)
    if entry.parameters:
        yield from ("", "[bold]Settings[/bold] (default; meaning)")
    for setting in entry.parameters:
        value = "required" if setting.name in needed else describe.written(setting.default)
        yield f"  {setting.name} = {escape(value)}"
        yield from _filled(known.get(setting.name, ""), "      ")
    if source := " ".join(said.sections.get("Source", "").split()):
        yield from ("", "[bold]Source[/bold]")
        yield from _filled(source, "  ")
    yield from ("", "[bold]Example[/bold]", f"  {escape(describe.command(entry))}")


def _item(name: str, text: str) -> Iterator[str]:
    """A name and its text beside it; a long name has its text below."""
    if len(name) >= NAMES:
        yield f"  {escape(name)}"
        yield from _filled(text, " " * (NAMES + 2))
        return
    first, *rest = _filled(text, " " * (NAMES + 2)) or [""]
    yield f"  {escape(name.ljust(NAMES))}{first.lstrip()}".rstrip()
    yield from rest


def _filled(text: str, indent: str = "") -> list[str]:
    line = printable(text)
    wrapped = textwrap.wrap(
        line,
        _width(),
        initial_indent=indent,
        subsequent_indent=indent,
    )
    return [escape(part) for part in wrapped]


def _width() -> int:
    return min(console.width, 80)
