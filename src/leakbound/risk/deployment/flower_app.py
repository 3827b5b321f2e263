"""The facts of a Flower app from the run configuration in its pyproject.toml; nothing is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from leakbound._util import files
from leakbound.risk.deployment.facts import LARGEST, Deployment, Mistake
from leakbound.risk.deployment.file import described, line_of

KEYS: dict[str, tuple[str, ...]] = {
    "rounds": ("num-server-rounds", "num-rounds", "server-rounds", "rounds"),
    "fraction": ("fraction-train", "fraction-fit"),
    "least": ("min-train-nodes", "min-fit-clients"),
    "participation.cohort": ("num-sampled-clients",),
    "participation.population": ("num-supernodes", "num-clients", "num-partitions"),
    "noise.multiplier": ("noise-multiplier", "server-noise-multiplier"),
    "clip.norm": ("clipping-norm", "clip-norm", "l2-norm-clip"),
    "example norm": ("max-grad-norm",),
    "noise.epsilon": ("epsilon",),
    "noise.delta": ("delta",),
    "noise.sensitivity": ("sensitivity",),
    "claim.epsilon": ("target-epsilon",),
    "claim.delta": ("target-delta",),
    "local.epochs": ("local-epochs", "epochs"),
    "local.batch": ("batch-size", "local-batch-size"),
    "local.learning_rate": ("learning-rate", "lr"),
}
"""A fact, and the configuration's keys that state it; the first of them that exists counts."""
LOCAL_DP = {"noise.epsilon", "noise.delta", "noise.sensitivity"}
"""What Flower's LocalDpMod takes, and nothing else does."""
MOST_BYTES = 2**20
HERE = "tool.flwr.app.config"
WHOLE = frozenset({"rounds", "least", "participation.cohort", "participation.population",
                   "local.epochs", "local.batch"})  # fmt: skip


def read(path: Path) -> tuple[Deployment, tuple[Mistake, ...]]:
    r"""The facts that a Flower app's run configuration states, and their mistakes with lines.

    Code and libraries of the app are not imported, so who clips and who adds noise is "not stated"
    unless a key implies it: `sensitivity` is that of LocalDpMod, `max-grad-norm` that of Opacus.
    `leakbound.flower.describe` reads the same from the app's live objects.

    Args:
        path: a pyproject.toml with [tool.flwr.app.config], of at most 1 MB.

    Raises:
        ValueError: it cannot be read, is no Flower app, or a value is outside its range.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "pyproject.toml"
        >>> _ = path.write_text("[tool.flwr.app.config]\nnum-server-rounds = 50\n")
        >>> read(path)[0].rounds
        50
    """
    what = f"Flower app {str(path)!r}"
    # sizes before memory: the file may be anybody's
    if path.is_file() and path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{what} is over {MOST_BYTES} bytes; give a smaller file")
    table = files.read_toml(path, what)
    app: Any = table
    for part in ("tool", "flwr", "app"):
        app = app.get(part) if isinstance(app, Mapping) else None
    if not isinstance(app, Mapping):
        raise ValueError(
            f"{str(path)!r} has no [tool.flwr.app]; give a Flower app's pyproject.toml"
        )
    config = app.get("config", {})
    values = _flat(config) if isinstance(config, Mapping) else {}
    stated = dict[str, Any]()
    where = dict[str, str]()
    for fact, names in KEYS.items():
        value, key = next(((values[n]) for n in names if n in values), (None, ""))
        if value is not None:
            stated[fact] = _number(key, value, whole=fact in WHOLE)
            where[fact] = key
    project = table.get("project")
    name = project.get("name", "app") if isinstance(project, Mapping) else "app"
    deployment, mistakes = described({"title": f"Flower app {str(name)[:200]}", **_implied(stated)})
    text = path.read_text(encoding="utf-8-sig")
    return deployment, tuple(
        msgspec.structs.replace(one, line=_line(text, one.key, where)) for one in mistakes
    )


def _implied(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The facts, with what their names imply of who clips and who adds noise."""
    facts = dict(stated)
    share = facts.pop("fraction", None)
    least = facts.pop("least", None) or 0
    if "clip.norm" in facts:
        facts["clip.kind"] = "l2"
    if (norm := facts.pop("example norm", None)) is not None:  # Opacus' name
        facts |= {"clip.norm": norm, "clip.kind": "example", "clip.at": "client"}
        facts["noise.at"] = "optimizer"
    if facts.keys() >= LOCAL_DP and "noise.multiplier" not in facts:
        facts |= {"clip.at": "client", "noise.at": "client", "claim.rounds": 1}
        facts |= {f"claim.{key}": facts[f"noise.{key}"] for key in ("epsilon", "delta")}
    else:  # of an accountant
        facts.pop("noise.sensitivity", None)
        for key in ("epsilon", "delta"):
            facts.setdefault(f"claim.{key}", facts.pop(f"noise.{key}", None))
    people = facts.get("participation.population", 0)
    if share is not None and people is not None:
        facts["participation.law"] = "all" if share >= 1 else "fixed-size"
        if share < 1 and people and "participation.cohort" not in facts:
            facts["participation.cohort"] = min(people, max(1, int(people * share), least))
    return facts


def _flat(table: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Value and full key by the last part of the key, as written with hyphens."""
    flat: dict[str, tuple[Any, str]] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            below = {name: (inner, f"{key}.{full}") for name, (inner, full) in _flat(value).items()}
            # a key at the top counts before one of the same name in a table
            flat = below | flat
        else:
            flat[key.rpartition(".")[2].replace("_", "-").lower()] = value, key
    return flat


def _number(
    key: str,
    value: Any,
    *,
    whole: bool,
) -> float | int | None:
    """The value; None for 0 where a count is asked for, as apps write "off" so."""
    wrong = isinstance(value, bool) or not isinstance(value, int | float)
    if wrong or not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{HERE}.{key} is {value!r}; give a number")
    if not whole:
        return float(value)
    if value != int(value):
        raise ValueError(f"{HERE}.{key} is {value!r}; give a whole number")
    return int(value) or None


def _line(
    text: str,
    fact: str,
    where: Mapping[str, str],
) -> int | None:
    key = where.get(fact) or where.get(fact.replace("noise.", "claim."))
    key = key or where.get(fact.replace("claim.", "noise."))
    return None if key is None else line_of(text, f"{HERE}.{key}")
