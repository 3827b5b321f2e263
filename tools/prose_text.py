"""Find the prose of a file: the text with everything else blanked, so that offsets stay."""

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterable

Span = tuple[int, int]
# Names, not words: dotted or underscored, options, addresses, quoted code.
CODE = re.compile(
    r"``[^`]+``|`[^`]+`|https?://[^\s)>\"]+|(?<!\S)--[\w-]+|\b\w[\w-]*(?:\.\w+)+|\b(?!S_D\b)\w*_\w*\b"
)
FENCE = re.compile(r"^([ \t]*)(```+|~~~+)[^\n]*\n.*?(?:^[ \t]*\2[ \t]*$|\Z)", re.M | re.S)
MARKDOWN_CODE = re.compile(
    r"\A---\n.*?\n---\n|<!--.*?-->|<(?:script|style|svg)\b.*?</(?:script|style|svg)>"
    r"|</?[a-zA-Z][^<>]*>|(?<=\])\([^()\s]*(?:\([^()]*\)[^()\s]*)*(?: +\"[^\"]*\")?\)"
    r"|^\[[^\]]+\]:.*$|\$\$.*?\$\$|\$[^$\n]+\$",
    re.M | re.S,
)
TEMPLATE_CODE = re.compile(
    r"\{\{.*?\}\}|\{%.*?%\}|<!--.*?-->|<(?:script|style)\b.*?</(?:script|style)>"
    r"|</?[a-zA-Z!](?:[^<>\"]|\"[^\"]*\")*>",
    re.S,
)
READ_ALOUD = re.compile(r"\b(?:title|alt|aria-label|placeholder)=\"([^\"]*)\"")


def prose(raw: str, suffix: str) -> str:
    """Return ``raw`` with all that is not prose replaced by blanks; line breaks stay."""
    readers = {
        ".md": markdown,
        ".json": results,
        ".py": python,
        ".j2": template,
        ".ipynb": notebook,
        ".toml": toml,
    }
    return readers[suffix](raw)


def blank(text: str) -> str:
    """Replace all but line breaks by blanks."""
    return re.sub(r"[^\n]", " ", text)


def without(text: str, pattern: re.Pattern[str]) -> str:
    """Blank what ``pattern`` matches."""
    return pattern.sub(lambda match: blank(match.group()), text)


def keep(text: str, spans: Iterable[Span]) -> str:
    """Blank all but ``spans``, which are in order."""
    parts = []
    end = 0
    for start, stop in spans:
        parts += [blank(text[end:start]), text[start:stop]]
        end = stop
    return "".join(parts) + blank(text[end:])


def markdown(raw: str) -> str:
    """Blank fences, code, formulas, link targets and tags of Markdown."""
    for pattern in (FENCE, MARKDOWN_CODE, CODE):
        raw = without(raw, pattern)
    return raw


def template(raw: str) -> str:
    """Blank the tags of a Jinja or HTML template, but for what a browser shows of them."""
    tags = [match.span() for match in TEMPLATE_CODE.finditer(raw)]
    shown = [
        (start + match.start(1), start + match.end(1))
        for start, end in tags
        if raw[start] == "<"
        for match in READ_ALOUD.finditer(raw[start:end])
    ]
    text = without(raw, TEMPLATE_CODE)
    for start, end in shown:
        text = text[:start] + without(raw[start:end], TEMPLATE_CODE) + text[end:]
    return without(text, CODE)


def notebook(raw: str) -> str:
    """Keep the Markdown cells of a notebook, whose lines are strings of the file."""
    spans = []
    end = 0
    for cell in json.loads(raw)["cells"]:
        source = cell["source"]
        for line in [source] if isinstance(source, str) else source:
            forms = (json.dumps(line, ensure_ascii=False), json.dumps(line))
            start, quoted = min((raw.index(form, end), form) for form in forms if form in raw[end:])
            end = start + len(quoted)
            if cell["cell_type"] == "markdown":
                spans.append((end - len(quoted) + 1, end - 1))
    kept = re.sub(r'\\n|\\"', "  ", keep(raw, spans))
    return markdown(kept)


def results(raw: str) -> str:
    """Keep the strings of stored results, which are Markdown."""
    values = re.finditer(r'"((?:[^"\\]|\\.)*)"(?!\s*:)', raw)
    kept = keep(raw, [match.span(1) for match in values])
    return markdown(re.sub(r'\\[n"\\]', "  ", kept))


def toml(raw: str) -> str:
    """Keep the comments of a TOML file."""
    comments = re.finditer(r"(?:^|\s)#([^\n]*)", raw)
    return without(keep(raw, [match.span(1) for match in comments]), CODE)


def python(raw: str) -> str:
    """Keep docstrings, comments, and strings that contain a blank: messages, help."""
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = raw.splitlines(keepends=True)

    def offset(row: int, column: int) -> int:  # ast counts a column in bytes
        return starts[row - 1] + len(lines[row - 1].encode()[:column].decode())

    text = blank(raw)
    for node in strings(ast.parse(raw)):
        start = offset(node.lineno, node.col_offset)
        end = offset(node.end_lineno or 0, node.end_col_offset or 0)
        shown = string(raw[start:end], formatted=isinstance(node, ast.JoinedStr))
        text = text[:start] + shown + text[end:]
    for token in tokenize.generate_tokens(io.StringIO(raw).readline):
        if token.type == tokenize.COMMENT:
            start = starts[token.start[0] - 1] + token.start[1]
            end = start + len(token.string)
            note = re.sub(r"^#+:?|noqa.*|type: ignore.*", lambda m: blank(m.group()), token.string)
            text = text[:start] + note + text[end:]
    return without(text, CODE)


def strings(tree: ast.AST) -> Iterable[ast.Constant | ast.JoinedStr]:
    """Yield the strings with a blank in them; of a formatted string the whole, not its parts."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.JoinedStr):
            if any(
                isinstance(part, ast.Constant) and " " in str(part.value) for part in node.values
            ):
                yield node
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and " " in node.value:
                yield node
        else:
            todo += ast.iter_child_nodes(node)


def string(source: str, formatted: bool) -> str:
    """Blank the quotes, escapes, examples and names of arguments in a string's source."""
    marks = [
        r"(?<!\w)[rRbBfFuU]{0,2}(?:\"\"\"|'''|\"|')",
        r"(?<!\\)\\[ntr]|\\\n",
        r"^[ \t]*(?:>>>|\.\.\.)[^\n]*$",
        r"^[ \t]+\*{0,2}\w+(?: \([^)\n]*\))?:(?=[ \n])",
        *([r"\{\{|\}\}|\{[^{}]*\}"] if formatted else []),
    ]
    return without(source, re.compile("|".join(marks), re.M))
