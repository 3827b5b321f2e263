"""Count the tokens of the package, and compare them with the limit in pyproject.toml.

A reader pays for tokens, not for lines: a line limit only rewards packed lines. Comments,
docstrings and blank lines are free.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

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


def count(source: str) -> tuple[int, int]:
    """Tokens, and lines that hold them.

    Example:
        >>> count("x = 1  # why")
        (3, 1)
    """
    documentation = docstring_lines(source)
    code_lines = set[int]()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in FREE or token.start[0] in documentation:
            continue
        tokens += 1
        code_lines.update(range(token.start[0], token.end[0] + 1))
    return tokens, len(code_lines)


def main() -> int:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    limit = settings["tool"]["leakbound"]["most_tokens"]
    packages = Counter[str]()
    code_lines = 0
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        tokens, lines = count(path.read_text("utf-8"))
        packages[parts[0] if len(parts) > 1 else "(root)"] += tokens
        code_lines += lines
    total = sum(packages.values())
    shown = ", ".join(f"{name} {tokens:,}" for name, tokens in packages.most_common())
    print(f"{total:,} tokens, {total / code_lines:.1f} a code line ({shown})")
    if total > limit:
        print(f"the package has {total:,} tokens; pyproject.toml allows {limit:,} (most_tokens)")
    return int(total > limit)


if __name__ == "__main__":
    sys.exit(main())
