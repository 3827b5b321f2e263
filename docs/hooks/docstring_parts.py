"""A docstring taken apart: summary, text, settings, and what it says under each heading."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

HEADINGS = (
    *("Args", "Assumptions", "Cost", "Example", "Guarantees", "Raises", "Returns", "Shapes"),
    *("Source", "Units"),
)
_HEADING = re.compile(rf"^({'|'.join(HEADINGS)}):(?: +|$)(.*)$")
_NAMED = re.compile(r"^(\w[\w, .]*?): +(.*)$")
_CODE = re.compile(r"(`+)(.+?)\1")
_SPECIAL = str.maketrans(
    {"*": r"\*", "_": r"\_", "[": r"\[", "]": r"\]", "<": "&lt;", ">": "&gt;", "|": "&#124;"}
)


@dataclass(frozen=True)
class Parts:
    """What a docstring says, by heading; every text is as it was written, without its indent."""

    summary: str = ""
    body: str = ""
    sections: Mapping[str, str] = field(default_factory=dict)

    def named(self, heading: str) -> dict[str, str]:
        """The entries `name: text` under a heading; several names before one colon share it."""
        found: dict[str, str] = {}
        for item in _items(self.sections.get(heading, "")):
            match = _NAMED.match(item)
            if match:
                found |= {name.strip(): match[2] for name in match[1].split(",")}
        return found


def parts(documentation: str) -> Parts:
    r"""Take a docstring (as `inspect.getdoc` gives it) apart.

    Example:
        >>> parts("Adds noise.\n\nOf one law.\n\nSource: a paper.").sections
        {'Source': 'a paper.'}
    """
    summary, _, rest = documentation.strip().partition("\n")
    lines: dict[str, list[str]] = {"": []}
    heading, blank = "", False
    for line in rest.split("\n"):
        found = _HEADING.match(line)
        if found:
            heading, line = found[1], found[2]
        elif blank and line and not line.startswith(" "):
            heading = ""  # text that stands at the margin after a blank line is body again
        blank = not line.strip()
        lines.setdefault(heading, []).append(line)
    texts = {name: _dedented(text) for name, text in lines.items()}
    return Parts(summary, texts.pop(""), texts)


def markdown(text: str, link: Callable[[str], str]) -> str:
    r"""A docstring's text as Markdown: marks in it are only marks where they stand in code.

    Args:
        text: paragraphs; an indented one is a formula and becomes a block of code.
        link: what stands for a name in code, as `` `Name` `` itself or a link on it.

    Example:
        >>> markdown("a * b of `Name`", lambda name: f"`{name}`")
        'a \\* b of `Name`'
    """
    shown = []
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        if paragraph.startswith("    "):
            shown.append(f"```text\n{_dedented(paragraph)}\n```")
        else:
            shown.append(inline(paragraph, link))
    return "\n\n".join(shown)


def inline(text: str, link: Callable[[str], str]) -> str:
    """One paragraph or the cell of a table: no mark but code and links."""
    pieces, end = [], 0
    for code in _CODE.finditer(text):
        pieces += [text[end : code.start()].translate(_SPECIAL), link(code[2])]
        end = code.end()
    return "".join(pieces) + text[end:].translate(_SPECIAL)


def _items(text: str) -> Iterator[str]:
    """Entries of a section: an entry starts at the margin, its other lines are indented."""
    item: list[str] = []
    for line in text.split("\n"):
        if line and not line.startswith(" ") and item:
            yield " ".join(item)
            item = []
        if line.strip():
            item.append(line.strip())
    if item:
        yield " ".join(item)


def _dedented(lines: str | list[str]) -> str:
    """Without the indent that all lines but the first have (the first may follow its heading)."""
    rows = lines.split("\n") if isinstance(lines, str) else lines
    rest = [row for row in (rows if isinstance(lines, str) else rows[1:]) if row.strip()]
    width = min((len(row) - len(row.lstrip()) for row in rest), default=0)
    cut = [row[width:] if not row[:width].strip() else row.strip() for row in rows]
    return "\n".join(cut).strip("\n")
