"""Single-line faults: what to change in a source file, and where that line stands in another tree.

A fault is stored as the function's name and the text of its line before and after. It can be found
again after code has moved to another file, as long as the function and the line kept their text.
"""

from __future__ import annotations

import ast
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WEIGHTS = {
    **dict.fromkeys(("attacks", "bounds", "defenses"), 4),
    **dict.fromkeys(("r_operator", "sensitivity", "engines"), 3),
    **dict.fromkeys(("tensors", "metrics", "client", "types", "_util", "audit", "captured"), 2),
    **dict.fromkeys(("experiments", "cli", "options", "progress", "terminal"), 0),
}
"""How many faults a package gets against the others, 1 where it is not listed. Commands get none:
their lines are mostly text."""
COMPARISONS = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    **{"is not": "is", "is": "is not", "not in": "in", "in": "not in"},
}
OPERATORS = {"+": "-", "-": "+", "*": "/", "/": "*", "**": "*", "//": "*", "%": "+"}
CALLS = {
    **{"min": "max", "max": "min", "amin": "amax", "amax": "amin", "argmin": "argmax"},
    **{"argmax": "argmin", "any": "all", "all": "any", "minimum": "maximum", "floor": "ceil"},
    **{"maximum": "minimum", "ceil": "floor", "zeros_like": "ones_like", "log1p": "log"},
    **{"ones_like": "zeros_like", "expm1": "exp", "sum": "mean", "mean": "sum", "cdf": "sf"},
    **{"logsf": "logcdf", "sf": "cdf", "cumsum": "cumprod", "prod": "sum", "sorted": "list"},
}
DROPPED = ("clamp", "clip", "abs", "sqrt", "square", "detach", "clone", "flip", "log", "exp")
"""Methods that are taken away: `x.clamp(0, 1)` becomes `x`."""


@dataclass(frozen=True)
class Fault:
    """One change of one line of one function."""

    file: str
    function: str
    before: str
    after: str
    nth: int = 0
    """Which of the function's lines with this text it is."""


@dataclass(frozen=True)
class Place:
    """Where a fault stands in a tree."""

    path: Path
    line: int
    lines: range
    """The lines of its statement: a tracer may report any of them."""


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function with its qualified name; functions inside functions belong to the outer."""
    todo: list[tuple[str, ast.AST]] = [("", tree)]
    while todo:
        prefix, node = todo.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{prefix}{child.name}", child
            elif isinstance(child, ast.ClassDef):
                todo.append((f"{prefix}{child.name}.", child))
            elif isinstance(child, ast.If | ast.Try | ast.With):
                todo.append((prefix, child))


def _body(function: ast.FunctionDef) -> list[ast.stmt]:
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def _nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """What may be changed: no annotations, no texts, no messages."""
    todo: list[ast.AST] = [*_body(function)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
            continue
        yield node
        if isinstance(node, ast.Raise):
            continue
        skipped = {"annotation", "returns", "decorator_list", "args" if _is_def(node) else ""}
        for name, value in ast.iter_fields(node):
            if name not in skipped:
                children = value if isinstance(value, list) else [value]
                todo += [child for child in children if isinstance(child, ast.AST)]


def _is_def(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _edits(node: ast.AST, lines: list[str]) -> Iterator[tuple[int, int, int, str]]:
    """Changes of one node: line, first and last column, and the text that is put there."""

    def between(left: ast.AST, right: ast.AST, table: dict[str, str]) -> Iterator[tuple]:
        if left.end_lineno != right.lineno:
            return
        text = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
        word = text.strip(" ()")
        if word in table:
            at = left.end_col_offset + text.index(word)
            yield right.lineno, at, at + len(word), table[word]

    if isinstance(node, ast.Compare):
        yield from between(node.left, node.comparators[0], COMPARISONS)
    elif isinstance(node, ast.BinOp):
        yield from between(node.left, node.right, OPERATORS)
    elif isinstance(node, ast.BoolOp):
        other = {"and": "or", "or": "and"}
        yield from between(node.values[0], node.values[1], other)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.lineno, node.col_offset, node.operand.col_offset, ""
    elif isinstance(node, ast.Constant):
        new = _constant(node.value)
        if new is not None:
            yield node.lineno, node.col_offset, node.end_col_offset, new
    elif isinstance(node, ast.Call):
        yield from _call_edits(node)
    elif isinstance(node, ast.Raise | ast.Expr | ast.AugAssign):
        if node.lineno == node.end_lineno and not isinstance(getattr(node, "value", 0), ast.Yield):
            yield node.lineno, node.col_offset, node.end_col_offset, "pass"
    elif isinstance(node, ast.If) and node.test.lineno == node.test.end_lineno:
        test = node.test
        yield test.lineno, test.col_offset, test.end_col_offset, "False"
    elif isinstance(node, ast.Return) and node.value and node.lineno == node.end_lineno:
        yield node.value.lineno, node.value.col_offset, node.value.end_col_offset, "None"


def _constant(value: object) -> str | None:
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int):
        return {0: "1", 1: "0"}.get(value, str(value + 1))
    if isinstance(value, float):
        return repr(value * 2 if value else 1.0)
    return None


def _call_edits(node: ast.Call) -> Iterator[tuple[int, int, int, str]]:
    name = node.func
    if isinstance(name, ast.Attribute) and name.lineno == name.end_lineno:
        start, end = name.end_col_offset - len(name.attr), name.end_col_offset
        if name.attr in CALLS:
            yield name.end_lineno, start, end, CALLS[name.attr]
        if name.attr in DROPPED and node.end_lineno == name.value.end_lineno:
            yield name.end_lineno, name.value.end_col_offset, node.end_col_offset, ""
    elif isinstance(name, ast.Name) and name.id in CALLS:
        yield name.lineno, name.col_offset, name.end_col_offset, CALLS[name.id]


def candidates(path: Path, file: str) -> Iterator[Fault]:
    """Every fault that one file has."""
    lines = path.read_text("utf-8").splitlines()
    for name, function in functions(ast.parse("\n".join(lines))):
        texts = [lines[at].strip() for at in range(function.lineno - 1, function.end_lineno or 0)]
        for node in _nodes(function):
            for at, first, last, text in _edits(node, lines):
                raw = lines[at - 1].encode()
                changed = (raw[:first] + text.encode() + raw[last:]).decode()
                before, after = lines[at - 1].strip(), changed.strip()
                if before == after or not _compiles(lines, at, changed):
                    continue
                nth = texts[: at - function.lineno].count(before)
                yield Fault(file, name, before, after, nth)


def _compiles(lines: list[str], at: int, changed: str) -> bool:
    try:
        compile("\n".join([*lines[: at - 1], changed, *lines[at:]]), "fault", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def sample(source: Path, count: int, seed: int) -> list[Fault]:
    """`count` faults of a source tree: packages by weight, at most two to a function."""
    by_part: dict[str, list[Fault]] = defaultdict(list)
    draw = random.Random(seed)
    for path in sorted(source.rglob("*.py")):
        file = path.relative_to(source).as_posix()
        part = file.split("/")[0].removesuffix(".py")
        if WEIGHTS.get(part, 1) and not part.startswith(("commands", "__")):
            found = list(candidates(path, file))
            by_part[part] += draw.sample(found, min(len(found), 60))
    parts = sorted(part for part, found in by_part.items() if found)
    # A large package gets more than a small one, though less than in proportion to its size.
    shares = [WEIGHTS.get(part, 1) * len(by_part[part]) ** 0.5 for part in parts]
    chosen: list[Fault] = []
    taken: Counter[tuple[str, str]] = Counter()
    while len(chosen) < count:
        fault = draw.choice(by_part[draw.choices(parts, shares)[0]])
        own = (fault.file, fault.function)
        twin = any(other.before == fault.before and other.file == fault.file for other in chosen)
        if taken[own] < 2 and not twin:
            taken[own] += 1
            chosen.append(fault)
    return chosen


def locate(source: Path, faults: list[Fault]) -> list[Place | None]:
    """Where each fault stands in a tree; None where its function or its line is gone.

    The line is looked for in the function of the same file, then in a function of the same name
    elsewhere, then anywhere if it stands in one function alone.
    """
    known: dict[str, list[tuple[str, Path, ast.FunctionDef, list[int]]]] = defaultdict(list)
    wanted = {fault.before for fault in faults}
    for path in sorted(source.rglob("*.py")):
        lines = path.read_text("utf-8").splitlines()
        for name, function in functions(ast.parse("\n".join(lines))):
            at: dict[str, list[int]] = defaultdict(list)
            for number in range(function.lineno, (function.end_lineno or 0) + 1):
                at[lines[number - 1].strip()].append(number)
            for text in wanted & set(at):
                known[text].append((name, path, function, at[text]))
    return [_choose(source, fault, known[fault.before]) for fault in faults]


def _choose(source: Path, fault: Fault, found: list) -> Place | None:
    last = fault.function.rpartition(".")[2]
    rules = (
        lambda name, path: name == fault.function and path == source / fault.file,
        lambda name, path: name == fault.function,
        lambda name, path: name.rpartition(".")[2].lstrip("_") == last.lstrip("_"),
        lambda name, path: True,
    )
    for rule in rules:
        fits = [one for one in found if rule(one[0], one[1])]
        if len(fits) == 1:
            _, path, function, numbers = fits[0]
            line = numbers[min(fault.nth, len(numbers) - 1)]
            return Place(path, line, _statement(function, line))
        if fits:
            return None
    return None


def _statement(function: ast.FunctionDef, line: int) -> range:
    """The lines of the innermost statement, without the statements inside it."""
    best = range(line, line + 1)
    size = None
    for node in ast.walk(function):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno
            lines = range(node.lineno, max(last, line) + 1)
            if size is None or len(lines) <= size:
                best, size = lines, len(lines)
    return best


def put(fault: Fault, place: Place) -> str:
    """The file's text with the fault in it."""
    lines = place.path.read_text("utf-8").split("\n")
    old = lines[place.line - 1]
    if old.strip() != fault.before:
        raise ValueError(f"{place.path}:{place.line} is {old.strip()!r}, not {fault.before!r}")
    lines[place.line - 1] = old.replace(old.strip(), fault.after)
    return "\n".join(lines)
