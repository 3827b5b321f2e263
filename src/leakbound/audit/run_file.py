"""`run.json`: what a folder's records depend on, so that no other records are mixed in."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from leakbound._util import files
from leakbound._util.text import plain, version
from leakbound.assess.record import SCHEMA
from leakbound.audit.context import PlanContext, code, fingerprint
from leakbound.audit.plan import Plan
from leakbound.data.packaged import TABLES
from leakbound.engines.base import kernels

OWN = ("leakbound", "torch", "numpy", "scipy", "pillow")
BUILT_IN = frozenset({"mnist5k", "digits", "photos", "topics", "ecg", *TABLES})
COMPARED = {
    "schema": "another schema",
    "plan": "another plan",
    "plan_hash": "another plan",
    "data": "other data",
    "code": "other code of its models",
    "versions": "other versions",
    "machine": "another kind of machine",
    "pictures": "another choice of --no-examples",
}


def header(
    plan: Plan,
    context: PlanContext,
    pictures: bool,
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "plan": plain(plan),
        "plan_hash": plan.hash,
        **facts(plan, context),
        "pictures": pictures,
        "experiments": len(plan.experiments()),
        "own_data": plan.data.source not in BUILT_IN,
        "notes": list(context.dataset.notes),
    }


def facts(plan: Plan, context: PlanContext) -> dict[str, Any]:
    """The part of `header` that depends on the machine; if it differs, records may differ too."""
    here = machine()
    device = context.device
    if device.type != "cpu":
        cuda = device.type == "cuda"
        here["device"] = torch.cuda.get_device_name(device) if cuda else str(device)
    return {
        "data": fingerprint(plan, context),
        "code": code(plan),
        "versions": versions(),
        "machine": here,
    }


def machine() -> dict[str, Any]:
    """The CPU properties that change the last bits of a sum."""
    return {
        "processor": platform.machine(),
        "system": platform.system(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "engine": kernels(),
        "threads": 1,
    }


def versions() -> dict[str, str]:
    """Versions of the packages that a record depends on."""
    return {"python": platform.python_version()} | {name: version(name) for name in OWN}


def claim(folder: Path, now: dict[str, Any]) -> None:
    """Write `run.json` into a claimed folder, or reject one whose records may differ."""
    path = folder / files.RUN
    # Only what is not the same stops the run: the records of both would be mixed.
    differs = os.path.lexists(path) and difference(json.loads(files.read(path)), now)
    if differs:
        what, where, before, after = differs
        raise ValueError(
            f"out is {str(folder)!r}, which belongs to {what} ({where} is {before} there and "
            f"{after} now); choose another folder, or remove this one"
        )
    files.write(
        path,
        json.dumps(now, indent=1, sort_keys=True).encode() + b"\n",
    )


def difference(
    then: dict[str, Any],
    now: dict[str, Any],
) -> tuple[str, str, str, str] | None:
    """The first difference between two headers' records: what, where, and both values, short.

    Only the keys of `now` are compared; None if nothing differs.
    """
    for key, what in COMPARED.items():
        if key in now and then.get(key) != now[key]:
            return what, *_difference(key, then.get(key), now[key])
    return None


def _difference(
    where: str,
    then: Any,
    now: Any,
) -> tuple[str, str, str]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted({*then, *now}):
            if then.get(key) != now.get(key):
                return _difference(f"{where}.{key}", then.get(key), now.get(key))
    return where, _short(then), _short(now)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
