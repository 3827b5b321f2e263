"""What ruff does not forbid and a reader stumbles over: packed lines and nested ternaries.

A tuple of values goes to a tuple of names only where it swaps or advances them: `a, b = b, a + b`.
Anything else is two statements in one line. A starred tuple of written values, as in `f(*(a, b))`,
only keeps the formatter from giving each a line. A ternary within a ternary has no names for its
cases.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "reproductions/src", "tools")


def findings(source: str) -> Iterator[tuple[int, str]]:
    """The line and the fault of each place.

    Example:
        >>> list(findings("a, b = 1, 2"))
        [(1, 'packed assignment: write one statement for each name')]
        >>> list(findings("a, b = b, a + b"))
        []
        >>> list(findings("x = 1 if a else 2 if b else 3"))
        [(1, 'nested ternary: name the cases, or use if statements')]
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and _packed(node):
            yield node.lineno, "packed assignment: write one statement for each name"
        if isinstance(node, ast.IfExp) and _branches(node):
            yield node.lineno, "nested ternary: name the cases, or use if statements"
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List):
            yield node.lineno, "starred values: write them without the star"


def _packed(node: ast.Assign) -> bool:
    target = node.targets[0]
    values = node.value
    if not isinstance(target, ast.Tuple) or not isinstance(values, ast.Tuple):
        return False
    if any(isinstance(part, ast.Starred) for part in (*target.elts, *values.elts)):
        return False
    read = {ast.unparse(part) for part in ast.walk(values) if isinstance(part, ast.expr)}
    return not any(ast.unparse(name) in read for name in target.elts)


def _branches(node: ast.IfExp) -> bool:
    """Whether a branch of a ternary is a ternary, also one within parentheses."""
    return isinstance(node.body, ast.IfExp) or isinstance(node.orelse, ast.IfExp)


def main() -> int:
    found = 0
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, fault in findings(path.read_text("utf-8")):
                print(f"{path.relative_to(ROOT)}:{line}: {fault}")
                found += 1
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
