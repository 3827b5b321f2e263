"""The plan of a run as the TOML text that makes it again, and the command that runs it.

A header holds the plan as it was expanded: every list already taken apart. The text names each
choice by itself, so that reading it gives the same plan, with the same hash, in the same order.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from leakbound.assess.record import Record

DEEPEST = 8
"""How deep lists of a setting may lie in one another."""
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_TABLES = ("data", "threat", "utility", "floor", "risk")


def toml_of(plan: Record) -> str:
    """The plan as a TOML document that `leakbound audit` reads.

    Raises:
        ValueError: what is stored is not in the form of a plan.

    Example:
        >>> print(toml_of({"name": "tiny", "models": [{"name": "mlp", "settings": []}],
        ...                "attacks": [{"name": "dlg", "settings": [["steps", 9]]}],
        ...                "defenses": [[]], "batch_sizes": [1], "seeds": [0]}))
        name = "tiny"
        batch_sizes = [1]
        seeds = [0]
        <BLANKLINE>
        [[models]]
        name = "mlp"
        <BLANKLINE>
        [[attacks]]
        name = "dlg"
        steps = 9
        <BLANKLINE>
        [[defenses]]
        name = "none"
        <BLANKLINE>
    """
    try:
        return "\n".join([_head(plan), *_lists(plan), *_tables(plan)])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise ValueError("the stored plan has not the form of a plan") from None


def hash_of(plan: Record) -> str:
    """The hash that belongs to a stored plan."""
    text = json.dumps(plan, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def command_of(header: Record, plan: str = "plan.toml", out: str = "rerun") -> str:
    """The one command that runs the plan again as this run was made.

    Example:
        >>> command_of({"pictures": False, "machine": {"device": "NVIDIA H200"}})
        'leakbound audit plan.toml --out rerun --no-images --device cuda'
    """
    words = ["leakbound", "audit", plan, "--out", out]
    words += ["--no-images"] if header.get("pictures") is False else []
    words += ["--device", "cuda"] if header["machine"].get("device") else []
    return " ".join(words)


def _head(plan: Record) -> str:
    rows = {name: plan[name] for name in ("name", "batch_sizes", "seeds")}
    return _rows(rows)


def _lists(plan: Record) -> list[str]:
    models = [_block("models", _model(row)) for row in plan["models"]]
    attacks = [_block("attacks", _spec(row)) for row in plan["attacks"]]
    defenses = [_block("defenses", _defense(links)) for links in plan["defenses"]]
    if not models or not attacks or not defenses:
        raise KeyError("a plan names models, attacks and defenses")
    return [*models, *attacks, *defenses]


def _model(row: Record) -> dict[str, Any]:
    found = _spec(row)
    if row.get("train_steps"):
        found["train_steps"] = row["train_steps"]
    if row.get("weights") is not None:
        found["weights"] = row["weights"]
    return found


def _spec(row: Record) -> dict[str, Any]:
    """A name with its settings; no setting may take the name's place."""
    settings = {str(key): value for key, value in row["settings"]}
    if "name" in settings:
        raise KeyError("a setting is called name")
    return {"name": row["name"], **settings}


def _defense(links: list[Record]) -> dict[str, Any]:
    if not links:
        return {"name": "none"}
    specs = [_spec(link) for link in links]
    return specs[0] if len(specs) == 1 else {"links": specs}


def _tables(plan: Record) -> list[str]:
    found = {name: dict(plan[name]) for name in _TABLES if plan.get(name) is not None}
    if found.get("utility", {}).get("rounds") == 0:
        found["utility"] = {"rounds": 0, **found["utility"]}
    if "risk" in found and found["risk"].get("probability") is None:
        found["risk"]["probability"] = 0
    if plan.get("threshold") is not None:
        found["thresholds"] = {"psnr": plan["threshold"]}
    if plan.get("lpips_weights") is not None:
        found["metrics"] = {"lpips_weights": plan["lpips_weights"]}
    kept = {name: {k: v for k, v in rows.items() if v is not None} for name, rows in found.items()}
    return [f"[{name}]\n{_rows(rows)}" for name, rows in kept.items() if rows]


def _block(name: str, rows: Mapping[str, Any]) -> str:
    return f"[[{name}]]\n{_rows(rows)}"


def _rows(rows: Mapping[str, Any]) -> str:
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in rows.items())


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _value(value: Any, depth: int = 0) -> str:
    """A value as TOML; a whole number stays whole and a float stays a float."""
    if depth > DEEPEST:
        raise TypeError("lists lie too deep in one another")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(_value(item, depth + 1) for item in value) + "]"
    if isinstance(value, dict):
        rows = (f"{_key(key)} = {_value(item, depth + 1)}" for key, item in value.items())
        return "{ " + ", ".join(rows) + " }"
    raise TypeError(f"no TOML for {type(value).__name__}")


def _text(text: str) -> str:
    """A basic string; letters that nobody sees stand as escapes, so that a reader sees them."""
    plain = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in plain)
