"""Splits a docstring into summary, text, and the entries under each heading."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HEADINGS = (
    "Args",
    "Assumptions",
    "Cost",
    "Example",
    "Guarantees",
    "Raises",
    "Returns",
    "Shapes",
    "Source",
    "Units",
)
_HEADING = re.compile(rf"^({'|'.join(HEADINGS)}):(?: +|$)(.*)$")
_NAMED = re.compile(r"^(\w[\w, .]*?): +(.*)$")


@dataclass(frozen=True)
class Parts:
    """The parts of a docstring; `sections` is the text under each heading, without its indent."""

    summary: str = ""
    body: str = ""
    sections: Mapping[str, str] = field(default_factory=dict)

    def named(self, heading: str) -> dict[str, str]:
        """The entries `name: text` under a heading; several names before one colon share it."""
        entries: dict[str, str] = {}
        # An entry starts without indent, its other lines are indented.
        for item in re.split(r"\n(?=\S)", self.sections.get(heading, "")):
            match = _NAMED.match(" ".join(item.split()))
            if match:
                # Such as "low, high: ...", which describes both.
                entries |= {name.strip(): match[2] for name in match[1].split(",")}
        return entries


def parts(documentation: str) -> Parts:
    r"""Split a docstring (as `inspect.getdoc` gives it).

    Example:
        >>> parts("Adds noise.\n\nOf one law.\n\nSource: a paper.").sections
        {'Source': 'a paper.'}
    """
    summary, _, rest = documentation.strip().partition("\n")
    lines: dict[str, list[str]] = {"": []}
    heading = ""
    blank = False
    for line in rest.split("\n"):
        match = _HEADING.match(line)
        if match:
            heading = match[1]
            line = match[2]
        elif blank and line and not line.startswith(" "):
            heading = ""  # text without indent after a blank line is body again
        blank = not line.strip()
        lines.setdefault(heading, []).append(line)
    texts = {name: inspect.cleandoc("\n".join(text)) for name, text in lines.items()}
    return Parts(summary, texts.pop(""), texts)


def cleaned(schema: Any) -> Any:
    """A JSON schema; descriptions made from docstrings lose their indent, as in Python 3.13."""
    if isinstance(schema, list):
        return [cleaned(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    described = {key: cleaned(value) for key, value in schema.items()}
    if isinstance(text := described.get("description"), str):
        described["description"] = inspect.cleandoc(text)
    return described
