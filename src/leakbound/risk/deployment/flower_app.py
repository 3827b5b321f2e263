"""The facts of a Flower app from the run configuration in its pyproject.toml; nothing is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from leakbound._util import files
from leakbound.risk.deployment import mistakes
from leakbound.risk.deployment.facts import (
    LARGEST,
    Claim,
    ClipFacts,
    Deployment,
    Local,
    Mistake,
    Noise,
    Participation,
)
from leakbound.risk.deployment.file import line_of

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
    own = _flat(config) if isinstance(config, Mapping) else {}
    found = dict[str, Any]()
    where = dict[str, str]()
    for fact, names in KEYS.items():
        value, key = next(((own[n]) for n in names if n in own), (None, ""))
        if value is not None:
            found[fact] = _number(key, value, whole=fact in WHOLE)
            where[fact] = key
    project = table.get("project")
    name = project.get("name", "app") if isinstance(project, Mapping) else "app"
    given = _facts(found, str(name)[:200])
    text = path.read_text(encoding="utf-8-sig")
    lined = (
        msgspec.structs.replace(one, line=_line(text, one.key, where))
        for one in mistakes.find(given)
    )
    return given, tuple(lined)


def _facts(found: Mapping[str, Any], name: str) -> Deployment:
    def part(kind: str) -> dict[str, Any]:
        return {key.partition(".")[2]: v for key, v in found.items() if key.startswith(kind + ".")}

    noise = part("noise")
    claim = part("claim")
    at = None
    clip = ClipFacts(norm=found.get("clip.norm"), kind="l2" if "clip.norm" in found else None)
    if "example norm" in found:  # Opacus' name
        clip = ClipFacts(norm=found["example norm"], kind="example", at="client")
        at = "optimizer"
    local_dp = {"epsilon", "delta", "sensitivity"} <= noise.keys() and "multiplier" not in noise
    if local_dp:
        clip = msgspec.structs.replace(clip, at="client")
        at = "client"
        claim |= {"epsilon": noise["epsilon"], "delta": noise["delta"], "rounds": 1}
    else:  # of an accountant
        stated = {key: noise.pop(key) for key in ("epsilon", "delta") if key in noise}
        claim = stated | claim
        noise = {k: v for k, v in noise.items() if k == "multiplier"}
    share = found.get("fraction")
    who = part("participation")
    if share is not None and who.get("population", 1) is not None:
        who["law"] = "all" if share >= 1 else "fixed-size"
        if share < 1 and "population" in who and "cohort" not in who:
            sampled = max(1, int(who["population"] * share), found.get("least") or 0)
            who["cohort"] = min(who["population"], sampled)
    return Deployment(
        title=f"Flower app {name}",
        clip=clip,
        noise=Noise(at=at, **noise),  # type: ignore[arg-type]
        rounds=found.get("rounds"),
        participation=Participation(**who),
        local=Local(**part("local")),
        claim=Claim(**claim),
    )


def _flat(table: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Value and full key by the last part of the key, as written with hyphens."""
    found: dict[str, tuple[Any, str]] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            below = {name: (own, f"{key}.{full}") for name, (own, full) in _flat(value).items()}
            found = below | found
        else:
            found[key.rpartition(".")[2].replace("_", "-").lower()] = value, key
    return found


def _number(key: str, value: Any, *, whole: bool) -> float | int | None:
    """The value; None for 0 where a count is asked for, as apps write "off" so."""
    wrong = isinstance(value, bool) or not isinstance(value, int | float)
    if wrong or not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{HERE}.{key} is {value!r}; give a number")
    if not whole:
        return float(value)
    if value != int(value):
        raise ValueError(f"{HERE}.{key} is {value!r}; give a whole number")
    return int(value) or None


def _line(text: str, fact: str, where: Mapping[str, str]) -> int | None:
    key = where.get(fact) or where.get(fact.replace("noise.", "claim."))
    key = key or where.get(fact.replace("claim.", "noise."))
    return None if key is None else line_of(text, f"{HERE}.{key}")
