"""Markdown as the repository shows it, made what the site's own renderer reads the same way.

Two things differ: links are relative to the file, of which some stand outside `docs/`, and lists
need less of an indent and no blank line before them.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Callable

_FENCE = re.compile(r"^ *(`{3,}|~{3,})")
_ITEM = re.compile(r"^( *)([-*+]|\d+[.)])( +)(?=\S)")
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)((?:\s+\"[^\"]*\")?\))")
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
_CODE_LINK = re.compile(r"(\]\([^)\s#]+\.py)#([\w.]+)\)")
TAB = 4


def targets(text: str) -> list[str]:
    """Every relative link of a page, without its anchor, in order."""
    found: list[str] = []

    def note(target: str) -> str:
        found.append(target)
        return target

    relinked(text, note)
    return found


def relinked(text: str, place: Callable[[str], str]) -> str:
    """The page with `place(target)` for every relative link outside code; anchors stay.

    Example:
        >>> relinked("[a](x.md#b), `[a](x.md)`", lambda target: "y/" + target)
        '[a](y/x.md#b), `[a](x.md)`'
    """

    def link(match: re.Match[str]) -> str:
        target, mark, anchor = match[2].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        return f"{match[1]}{place(target)}{mark}{anchor}{match[3]}"

    def line(written: str) -> str:
        pieces, end = [], 0
        for code in _CODE.finditer(written):
            between = written[end : code.start()]
            # a link's own text may hold code: it is then no place to cut
            if between.count("[") > between.count("]") or between.endswith("]("):
                continue
            pieces += [_LINK.sub(link, between), code[0]]
            end = code.end()
        return "".join(pieces) + _LINK.sub(link, written[end:])

    return _outside_fences(text, line)


def resolved(source: str, target: str) -> str:
    """Where a relative link of the file `source` leads, as a path from the repository's root.

    Example:
        >>> resolved("docs/how_to/lpips.md", "../risk.md")
        'docs/risk.md'
    """
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def relative(page: str, target: str) -> str:
    """A link to `target` in `page`, both paths within the site."""
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def with_lines(text: str, read: Callable[[str], str]) -> str:
    r"""The page with the line of every function that a link names, as `x.py#Class.method` does.

    Args:
        text: the page.
        read: the source behind a link's target.

    Example:
        >>> with_lines("[`g`](x.py#A.g)", lambda target: "class A:\n    def g(self): ...")
        '[`g`](x.py), line 2'
    """

    def line(match: re.Match[str]) -> str:
        target = match[1].removeprefix("](")
        return f"{match[1]}), line {line_of(read(target), match[2])}"

    return _CODE_LINK.sub(line, text)


def line_of(source: str, name: str) -> int:
    """The line on which a function or class, or one of its methods, begins.

    Raises:
        ValueError: the source has no such name.
    """
    body = ast.parse(source).body
    found = None
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = next((n for n in body if isinstance(n, kinds) and n.name == part), None)
        if found is None:
            raise ValueError(f"name is {name!r}, which the source does not define")
        body = found.body
    return found.lineno if found else 1


def lists(text: str) -> str:
    r"""Lists with four spaces a level and a blank line before, which every renderer understands.

    Example:
        >>> print(lists("Text:\n- one\n  - two"))
        Text:
        <BLANKLINE>
        -   one
            -   two
    """
    shown: list[str] = []
    columns: list[int] = []  # where the text of each open item starts, outermost first
    fence = ""
    for line in text.split("\n"):
        mark = _FENCE.match(line)
        item = None if fence else _ITEM.match(line)
        if not line.strip():
            shown.append("")
            continue
        before = bool(columns)
        if not fence:
            _close(columns, line, follows=bool(shown and shown[-1]) and not (item or mark))
        lead = " " * (TAB * len(columns))
        if item:
            if shown and shown[-1] and not before:
                shown.append("")
            columns.append(len(item[0]))
            shown.append(lead + f"{item[2]:<{TAB - 1}} {line[item.end() :]}")
        else:
            indent = len(line) - len(line.lstrip())
            shown.append(lead + line[min(columns[-1] if columns else 0, indent) :])
        if mark:
            fence = "" if fence and mark[1].startswith(fence) else fence or mark[1]
    return "\n".join(shown)


def _close(columns: list[int], line: str, follows: bool) -> None:
    """Drop the items that a line ends; one that follows a line of text goes on with it."""
    if follows and not line.startswith("#"):
        return
    indent = len(line) - len(line.lstrip())
    while columns and indent < columns[-1]:
        columns.pop()


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    shown, fence = [], ""
    for line in text.split("\n"):
        mark = _FENCE.match(line)
        shown.append(line if fence or mark else change(line))
        if mark:
            fence = "" if fence and mark[1].startswith(fence) else fence or mark[1]
    return "\n".join(shown)
