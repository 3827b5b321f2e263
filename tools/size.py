"""Count the tokens of the package, and compare them with the limits in pyproject.toml.

A reader pays for tokens, not for lines: a line limit only rewards packed lines. Comments,
docstrings and blank lines are free. A few tokens a line and a share of comments are asked for too,
so that nobody meets the number by packing lines or by dropping reasons.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "leakbound"
FREE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def docstring_lines(source: str) -> set[int]:
    """The lines of docstrings, and of other strings that stand alone."""
    lines = set[int]()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if not isinstance(statement, ast.Expr):
                continue
            value = statement.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                lines.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return lines


class Size(NamedTuple):
    """What a source holds: tokens, the lines that hold them, comments, and all lines."""

    tokens: int = 0
    code_lines: int = 0
    comments: int = 0
    lines: int = 0


def count(source: str) -> Size:
    """The size of a source.

    Example:
        >>> count("x = 1  # why")
        Size(tokens=3, code_lines=1, comments=1, lines=1)
    """
    documentation = docstring_lines(source)
    code_lines = set[int]()
    tokens = 0
    comments = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        comments += token.type == tokenize.COMMENT
        if token.type in FREE or token.start[0] in documentation:
            continue
        tokens += 1
        code_lines.update(range(token.start[0], token.end[0] + 1))
    return Size(tokens, len(code_lines), comments, len(source.splitlines()))


def total(sizes: Iterable[Size]) -> Size:
    """The sizes of several sources, added."""
    return Size(*map(sum, zip(Size(), *sizes, strict=True)))


def main() -> int:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    limits = settings["tool"]["leakbound"]
    packages = defaultdict[str, list[Size]](list)
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        packages[parts[0] if len(parts) > 1 else "(root)"].append(count(path.read_text("utf-8")))
    sizes = {name: total(files) for name, files in packages.items()}
    whole = total(sizes.values())
    print(f"{'':14}{'tokens':>9}{'a line':>8}{'comments':>10}")
    rows = sorted(sizes.items(), key=lambda row: -row[1].tokens)
    for name, size in [*rows, ("all", whole)]:
        print(f"{name:14}{size.tokens:9,}{_per_line(size):8.1f}{_comments(size):10.1%}")
    faults = []
    if whole.tokens > limits["most_tokens"]:
        faults.append(f"more than {limits['most_tokens']:,} tokens (most_tokens)")
    if _per_line(whole) > limits["most_tokens_a_line"]:
        faults.append(f"more than {limits['most_tokens_a_line']} a line (most_tokens_a_line)")
    if _comments(whole) < limits["least_comments"]:
        faults.append(f"comments on less than {limits['least_comments']:.1%} (least_comments)")
    for fault in faults:
        print(f"{fault}: the limit stands in pyproject.toml")
    return int(bool(faults))


def _per_line(size: Size) -> float:
    return size.tokens / max(size.code_lines, 1)


def _comments(size: Size) -> float:
    return size.comments / max(size.lines, 1)


if __name__ == "__main__":
    sys.exit(main())
