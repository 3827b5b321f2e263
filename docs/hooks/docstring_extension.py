"""Docstrings of this repository as griffe, which mkdocstrings reads them with, understands them."""

from __future__ import annotations

import re
from typing import Any

import griffe

_LABEL = re.compile(r"^(Assumptions|Cost|Guarantees|Shapes|Source|Units): +(?=\S)", re.MULTILINE)
_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
_SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+):(.*(?:\n\1 +\S.*)*)", re.MULTILINE)


class Ours(griffe.Extension):
    """Rewrites headings that griffe does not know."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute that was read."""
        if obj.docstring is not None:
            obj.docstring.value = understood(obj.docstring.value)


def understood(text: str) -> str:
    """The docstring with headings, and settings that share a line, as griffe reads them.

    Example:
        >>> understood("Source: a paper.")
        '**Source.** a paper.'
    """

    def alone(match: re.Match[str]) -> str:
        indent, names, said = match.groups()
        return "\n".join(f"{indent}{name}:{said}" for name in names.split(", "))

    text = _EXAMPLE.sub("Examples:", text)
    text = _LABEL.sub(r"**\1.** ", text)
    head, mark, settings = text.partition("\nArgs:\n")
    return head + mark + _SEVERAL.sub(alone, settings)
