"""Measured results: tables stored as JSON in docs/results, which `make docs` turns into pages.

One file holds a page: its title and its sections. A section's body is a list of paragraphs
(Markdown) and tables, written by a script that measured them; `says` is what a person reads in the
numbers, and stays when the script runs again. Links are relative to docs/results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Page = dict[str, Any]
FOLDER = Path(__file__).parents[1] / "docs" / "results"
_RULES = {"l": "---", "r": "--:", "c": ":-:"}
_BORDER = re.compile(r"(?<!\\)\|")


def read(name: str) -> Page:
    """The stored page of a name."""
    found: Page = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return found


def markdown(page: Page) -> str:
    """The whole page."""
    blocks = [f"# {page['title']}"]
    for section in page["sections"]:
        if section.get("heading"):
            blocks.append(f"{'#' * section.get('level', 2)} {section['heading']}")
        blocks += _body(section)
    return "\n\n".join(blocks) + "\n"


def section(page: Page, slug: str) -> str:
    """The body of the section that a link's anchor names, without its heading.

    Raises:
        ValueError: no section has this heading.
    """
    for one in page["sections"]:
        if slug_of(one.get("heading", "")) == slug:
            return "\n\n".join(_body(one))
    raise ValueError(f"slug is {slug!r}, but no section of {page['title']!r} has this heading")


def slug_of(heading: str) -> str:
    """A heading as the anchor of a link.

    Example:
        >>> slug_of("Steps, on a `GPU`")
        'steps-on-a-gpu'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def parse(text: str) -> Page:
    """The page that `markdown` writes as this text; what a section says is part of its body."""
    page: Page = {"title": "", "sections": [{"body": []}]}
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        heading = re.match(r"(#+) (.+)", block)
        if heading and len(heading[1]) == 1:
            page["title"] = heading[2]
        elif heading:
            level = {} if len(heading[1]) == 2 else {"level": len(heading[1])}
            page["sections"].append({"heading": heading[2], **level, "body": []})
        elif block.lstrip().startswith("|"):
            page["sections"][-1]["body"].append(_parsed(block.splitlines()))
        else:
            page["sections"][-1]["body"].append(block)
    if not page["sections"][0]["body"]:
        page["sections"].pop(0)
    return page


def dumps(page: Page) -> str:
    """The page as JSON with one line for each row of a table, so that a change shows as one."""
    rows: list[str] = []

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(one) for key, one in value.items()}
        if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            rows.append(json.dumps(value, ensure_ascii=False))
            return f"<{len(rows) - 1}>"
        return [short(one) for one in value] if isinstance(value, list) else value

    text = json.dumps(_opened(page, short), ensure_ascii=False, indent=1)
    return re.sub(r'"<(\d+)>"', lambda match: rows[int(match[1])], text) + "\n"


def keep(name: str, text: str) -> None:
    """Store sections, given as Markdown: each replaces the body of its heading, or is added."""
    path = FOLDER / f"{name}.json"
    new = parse(text)
    page = read(name) if path.is_file() else {"title": new["title"], "sections": []}
    page["title"] = new["title"] or page["title"]
    places = {one.get("heading"): place for place, one in enumerate(page["sections"])}
    for one in new["sections"]:
        if one.get("heading") in places:
            page["sections"][places[one.get("heading")]]["body"] = one["body"]
        else:
            page["sections"].append(one)
    path.write_text(dumps(page), "utf-8")


def texts(page: Page) -> Iterator[str]:
    """What a person wrote of a page: its paragraphs, not its tables."""
    for one in page["sections"]:
        yield from (block for block in one["body"] if isinstance(block, str))
        yield from one.get("says", ())


def _body(section: Page) -> list[str]:
    shown = [block if isinstance(block, str) else _table(block) for block in section["body"]]
    return [*shown, *section.get("says", ())]


def _table(table: Page) -> str:
    align = table.get("align", "l" * len(table["columns"]))
    lines = [_row(table["columns"]), "|" + "|".join(_RULES[one] for one in align) + "|"]
    return "\n".join([*lines, *map(_row, table["rows"])])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _parsed(lines: list[str]) -> Page:
    columns, rules, *rows = [
        [cell.strip() for cell in _BORDER.split(line.strip())[1:-1]] for line in lines
    ]
    sides = {(":", ":"): "c", ("-", ":"): "r"}
    align = "".join(sides.get((rule[0], rule[-1]), "l") for rule in rules)
    return {"columns": columns, "align": align, "rows": rows}


def _opened(page: Page, short: Callable[[Any], Any]) -> Page:
    """The page with rows made short; paragraphs keep a line each."""
    sections = [
        {
            **one,
            "body": [block if isinstance(block, str) else short(block) for block in one["body"]],
        }
        for one in page["sections"]
    ]
    return {**page, "sections": sections}
