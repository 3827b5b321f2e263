"""Make untrusted text safe: on one line of a terminal, and as values of TOML; name things."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import metadata
from typing import Any

DEEPEST = 8
"""How deep lists of a setting may lie in one another."""
_MARKDOWN = re.compile(
    r"[^\w .,:;=+()%/'’“”–−-]|(?<![^\W_])_|_(?![^\W_])|:(?! |$)|(?<=www)\.", re.IGNORECASE
)
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_WORD = re.compile(
    r""""[^"]*"|'[^']*'|=\s*(?!(?:true|false|inf|nan)\s*(?:,|$))([a-zA-Z_~/][\w.:/~-]*)(?=\s*(?:,|$))"""
)
"""A string, or a value without quotes: a word or a path, and no keyword of TOML."""
LONGEST_ROW = 1 << 20
"""Characters of a name with its settings."""


def digest(value: Any) -> str:
    """Sixteen hex digits that name a JSON value."""
    text = json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plain(thing: Any) -> Any:
    """A dataclass or a container as JSON values; enums by value."""
    if is_dataclass(thing):
        return {f.name: plain(getattr(thing, f.name)) for f in fields(thing)}
    if isinstance(thing, Enum):
        return thing.value
    if isinstance(thing, tuple | list):
        return [plain(value) for value in thing]
    if isinstance(thing, dict):
        return {key: plain(value) for key, value in thing.items()}
    return thing


def row_of_text(kind: str, text: str) -> dict[str, Any]:
    """`name,key=value,...` as a plan's table; values as in TOML, where words need no quotes."""
    name, _, settings = text.partition(",")
    settings = _WORD.sub(lambda match: f'="{match[1]}"' if match[1] else match[0], settings)
    try:
        table = tomllib.loads(f"settings = {{{settings}}}")["settings"]
    except tomllib.TOMLDecodeError:
        raise ValueError(
            f"{kind} is {text!r}; write settings as in {kind} NAME,key=1.5,other=word"
        ) from None
    # A name among the settings would silently replace the one before the comma.
    if len(text) > LONGEST_ROW or "name" in table:
        raise ValueError(f"{kind} is {text!r}; write the name first: NAME,key=value")
    return {"name": name, **table}


def version(name: str) -> str:
    """The version of an installed distribution, or "not installed"."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def printable(text: str) -> str:
    """Untrusted text on one line that no terminal interprets as a command."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def markdown(text: str) -> str:
    """Untrusted text within a line of Markdown: it makes no link, mention, emphasis, column or tag.

    What could is an entity; a "_" or ":" only where it means something.
    """
    return _MARKDOWN.sub(lambda match: f"&#{ord(match[0])};", printable(text))


def toml(value: Any, depth: int = 0) -> str:
    """A value as TOML; a whole number stays whole and a float stays a float.

    Text is a basic string; letters that nobody sees stand as escapes, so that a reader sees them.
    """
    if depth > DEEPEST:
        raise TypeError("lists lie too deep in one another")
    if isinstance(value, bool):  # before int, of which it is a subclass
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a basic string of TOML, but keeps letters that nobody sees.
        plain = json.dumps(value, ensure_ascii=False)
        return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in plain)
    if isinstance(value, float):
        return float.__repr__(value)  # NumPy's own would name its type
    if isinstance(value, int):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(item, depth + 1) for item in value) + "]"
    if isinstance(value, dict):
        rows = (f"{toml_key(key)} = {toml(item, depth + 1)}" for key, item in value.items())
        return "{ " + ", ".join(rows) + " }"
    raise TypeError(f"no TOML for {type(value).__name__}")


def toml_key(name: str) -> str:
    return name if _BARE.fullmatch(name) else toml(name)
