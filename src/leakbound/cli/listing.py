"""`leakbound list`: what a plan can name."""

from __future__ import annotations

import json
from typing import Any

from rich.markup import escape
from rich.table import Table

from leakbound import data, metrics, registry
from leakbound.audit.experiment import defense_info
from leakbound.audit.plan import Spec
from leakbound.cli import options
from leakbound.cli.terminal import console
from leakbound.risk.statement import of_guarantee
from leakbound.types import Guarantee


def listing(command: options.List) -> int:
    tables: dict[str, list[dict[str, Any]]] = {}
    for kind in registry.PACKAGES:
        tables["pruning" if kind == "pruning" else f"{kind}s"] = [
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
        about = defense_info((Spec(row["name"]),), built)
        row |= {"guarantee": about.guarantee, "data_dependent_law": about.data_dependent_law}
        row["summary"] += f" [guarantee: {of_guarantee(about)}]"
    nothing = {"guarantee": Guarantee.NONE.value, "data_dependent_law": False, "parameters": []}
    tables["defenses"].insert(0, {"name": "none", "summary": "The plain update.", **nothing})
    said = {m.name: m.description for m in metrics.METRICS}
    for kind, known in (("metrics", said), ("data", data.SOURCES)):
        tables[kind] = [{"name": n, "summary": text, "parameters": []} for n, text in known.items()]
    if command.json:
        print(json.dumps(tables, indent=1, default=str))
        return 0
    for title, rows in tables.items():
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        for row in rows:
            settings = ", ".join(f"{p['name']}={p['default']!r}" for p in row["parameters"])
            text = escape(row["summary"]) + (f"\n[dim]{escape(settings)}[/dim]" if settings else "")
            table.add_row(escape(row["name"]), text)
        console.print(table)
    return 0
