"""The parts of a docstring as Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

from leakbound._util.docstrings import HEADINGS, Parts, parts

__all__ = ["HEADINGS", "Parts", "inline", "markdown", "parts"]

_CODE = re.compile(r"(`+)(.+?)\1")
_SPECIAL = str.maketrans(
    {"*": r"\*", "_": r"\_", "[": r"\[", "]": r"\]", "<": "&lt;", ">": "&gt;", "|": "&#124;"}
)


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
            shown.append(f"```text\n{textwrap.dedent(paragraph)}\n```")
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
