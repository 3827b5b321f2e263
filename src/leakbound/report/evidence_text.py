"""Text and numbers of strangers, made fit for a page that people sign and for its JSON."""

from __future__ import annotations

import math
import unicodedata
from typing import Any

from leakbound.assess.record import ON_AVERAGE, PROVED

LONGEST = 600
"""How many letters of one text are kept."""
DEEPEST = 16
NOT_STATED = "not stated"
MOST = 1e300
SYMBOLS = {"exposed": "▲", PROVED: "▲", "undecided": "?", ON_AVERAGE: "≈", "protected": "✓"}
_UNSEEN = {"Cc", "Cf", "Cs", "Co"}


def clean(value: Any, depth: int = 0) -> Any:
    r"""The same JSON value with texts that are short and hide nothing, and finite numbers.

    Letters without a shape (controls, marks that turn the reading direction) become "\ufffd".

    Example:
        >>> clean({"a\u202eb": [1.0, float("inf"), "x\n"]})
        {'a\ufffdb': [1.0, None, 'x\n']}
    """
    if isinstance(value, str):
        return _shown(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return value if math.isfinite(number(value, math.inf)) else None
    if depth >= DEEPEST:
        return "…"
    if isinstance(value, dict):
        return {_shown(str(key)): clean(item, depth + 1) for key, item in value.items()}
    return [clean(item, depth + 1) for item in value]


def number(value: Any, other: float = math.nan) -> float:
    """A number as a float; `other` for what is none, or too large to be one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MOST:
        return other
    return float(value)


def finite(value: Any) -> float | None:
    """A number as a float, or None."""
    found = number(value)
    return found if math.isfinite(found) else None


def _shown(text: str) -> str:
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return "".join(
        "\ufffd" if unicodedata.category(c) in _UNSEEN and c not in "\n\t" else c for c in text
    )
