"""What `leakbound schema` does: draft the schema of a table, and say what to check."""

from __future__ import annotations

import shlex

from leakbound.cli import options
from leakbound.cli.parser import first
from leakbound.cli.shared import Bar, check_files, write_files
from leakbound.cli.terminal import brief, console, errors, table
from leakbound.data import Schema
from leakbound.domains import Column

MOST_ROWS = 60
"""How many columns the terminal shows; the file has all."""


def schema(command: options.SchemaOptions) -> int:
    path = command.table
    beside = command.table.with_suffix(".toml")
    out = command.out or beside
    if out.suffix != ".toml":
        raise ValueError(f"out is {str(out)!r}; name a file that ends in .toml, as in table.toml")
    check_files(out.parent, [out.name])
    with Bar(errors, "%") as bar:
        draft = Schema.infer(
            path, command.target, watch=lambda done, size: bar(100 * done // size, 100, "reading")
        )
    write_files(out.parent, {out.name: draft.text().encode()})
    _show(draft)
    console.say(f"schema: {brief(out)}")
    more = "" if out == beside else f" --schema {brief(shlex.quote(str(out)))}"
    source = brief(shlex.quote(f"table:{path}"))
    console.say(
        "Check it and set confirmed = true in it: no verdict rests on a draft. Then:\n"
        f"  leakbound attack --data {source}{more}"
    )
    return 0


def _show(draft: Schema) -> None:
    shown = table("column", "kind", "values", "check")
    columns = [(c.name, c.kind, _values(c)) for c in draft.columns]
    columns += [(name, "ignored", "") for name in draft.ignore]
    for name, kind, values in columns[:MOST_ROWS]:
        shown.add_row(*map(brief, (name, kind, values, first(draft.notes.get(name, " ")).strip())))
    if len(columns) > MOST_ROWS:
        shown.add_row(f"{len(columns) - MOST_ROWS} more")
    classes = f"{len(draft.classes)} classes" if draft.classes else "a number"
    shown.add_row(*map(brief, (draft.target, "label", classes, draft.notes[draft.target])))
    console.print(shown)


def _values(column: Column) -> str:
    missing = ", or missing" if column.missing else ""
    if column.categorical:
        return f"{len(column.levels)} levels{missing}"
    return f"{column.text(column.low)} to {column.text(column.high)}{missing}"
