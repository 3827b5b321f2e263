"""An audit in a folder: what is done is kept, what is missing is run, a report is written."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from leakbound.audit import engine
from leakbound.audit.bench import Bench, check_plan, fingerprint
from leakbound.audit.cells import SCHEMA, Result
from leakbound.audit.plan import Plan, plain
from leakbound.audit.records import Journal, encode, write_atomically

OWN = ("leakbound", "torch", "numpy", "scipy", "torchmetrics", "pillow")
BUILT_IN = frozenset({"mnist5k", "digits", "photos"})


@dataclass(frozen=True)
class Progress:
    """Where an audit is: units done and in all, and the unit that started last."""

    done: int
    total: int
    current: engine.Unit | None
    result: Result | None = None


@dataclass(frozen=True)
class Outcome:
    """A finished audit: its folder and how its cells ended."""

    folder: Path
    cells: int
    failed: int


def audit(
    plan: Plan,
    folder: Path,
    *,
    workers: int = 1,
    pictures: bool = True,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> Outcome:
    """Run a plan into a folder, going on from what the folder already holds.

    Leaves `run.json`, `records.jsonl` and `utility.jsonl` in the plan's order, `timings.jsonl` and
    `pictures/`. A killed audit loses no finished cell; started again, it ends with the same bytes
    as one that was never stopped.

    Raises:
        ValueError: a folder of another plan, data, version or machine; one in use by another
            process; a plan that cannot work on its data; a folder or disk that cannot be written.
    """
    bench = Bench(plan.data)
    check_plan(plan, bench)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=0, mode=0o600):
            return _audit(plan, folder, bench, workers, pictures, watch)
    except Timeout:
        raise ValueError(
            f"out is {str(folder)!r}, where another audit is running; wait for it or take another "
            "folder"
        ) from None
    except OSError as error:
        raise ValueError(
            f"out is {str(folder)!r}, which cannot be written: {error.strerror or error}; what was "
            "recorded is kept, make room or take another folder and run again"
        ) from None


def _audit(
    plan: Plan,
    folder: Path,
    bench: Bench,
    workers: int,
    pictures: bool,
    watch: Callable[[Progress], None],
) -> Outcome:
    _claim(folder, _header(plan, bench, pictures))
    cells, trainings = plan.cells(), plan.utility_cells()
    records = Journal(folder / "records.jsonl", "cell")
    utility = Journal(folder / "utility.jsonl", "unit")
    timings = folder / "timings.jsonl"
    kept = _kept(records, {c.id for c in cells}, folder) | set(
        _known(utility.read(), {t.id for t in trainings}, utility.path)
    )
    total, done = len(cells) + len(trainings), len(kept)
    state: dict[str, Any] = {"current": None}

    def started(unit: engine.Unit) -> None:
        state["current"] = unit
        watch(Progress(done, total, unit))

    watch(Progress(done, total, None))
    try:
        for result in engine.run(
            plan, kept, workers=workers, pictures=pictures, bench=bench, started=started
        ):
            _store(folder, result)
            journal = records if "cell" in result.record else utility
            journal.append(result.record)
            _note_time(timings, result)
            done += 1
            watch(Progress(done, total, state["current"], result))
    finally:
        records.close()
        utility.close()
    utility.finish(t.id for t in trainings)
    records.finish(c.id for c in cells)
    failed = sum(
        b'"status":"failed"' in line for line in (*records.lines.values(), *utility.lines.values())
    )
    return Outcome(folder, len(cells), failed)


def _kept(records: Journal, wanted: set[str], folder: Path) -> set[str]:
    """Cells that need not run: recorded, and their pictures are there."""
    read = _known(records.read(), wanted, records.path)
    lost = [
        key
        for key, record in read.items()
        if not all((folder / "pictures" / f).is_file() for f in (record["pictures"] or {}).values())
    ]
    if lost:
        records.drop(lost)
    return set(read) - set(lost)


def _known(
    read: dict[str, dict[str, Any]], wanted: set[str], path: Path
) -> dict[str, dict[str, Any]]:
    strangers = set(read) - wanted
    if strangers:
        raise ValueError(
            f"{path} holds {len(strangers)} records of another plan (first: {min(strangers)}); "
            "take another folder"
        )
    return read


def _store(folder: Path, result: Result) -> None:
    for name, content in result.pictures.items():
        target = folder / "pictures" / name
        if not target.exists():
            target.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomically(target, content)


def _note_time(path: Path, result: Result) -> None:
    line = encode({"id": result.id, "seconds": round(result.seconds, 4)})
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab") as stream:
        stream.write(line)


def _header(plan: Plan, bench: Bench, pictures: bool) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "plan": plain(plan),
        "plan_hash": plan.hash,
        "data": fingerprint(plan, bench),
        "versions": versions(),
        "machine": {
            "processor": platform.machine(),
            "system": platform.system(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": 1,
        },
        "pictures": pictures,
        "cells": len(plan.cells()),
        "own_data": plan.data.source not in BUILT_IN,
    }


def versions() -> dict[str, str]:
    """Versions of what a record depends on."""
    found = {"python": platform.python_version()}
    for name in OWN:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _claim(folder: Path, header: dict[str, Any]) -> None:
    """Write run.json, or compare it with the one that is there.

    Raises:
        ValueError: what differs, then and now.
    """
    path = folder / "run.json"
    if not path.exists():
        others = [p.name for p in folder.iterdir() if p.name != ".lock"]
        if others:
            raise ValueError(
                f"out is {str(folder)!r}, which holds other files ({sorted(others)[0]}, ...) but "
                "no run.json; take an empty or new folder"
            )
        write_atomically(path, json.dumps(header, indent=1, sort_keys=True).encode() + b"\n")
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path} is damaged; take another folder") from None
    if not isinstance(before, dict):
        raise ValueError(f"{path} is damaged; take another folder")
    names = {
        "plan_hash": "another plan",
        "data": "other data",
        "versions": "other versions",
        "machine": "another kind of machine",
        "pictures": "another choice of --no-images",
    }
    for key, what in names.items():
        if before.get(key) != header[key]:
            then, now = _difference(before.get(key), header[key])
            raise ValueError(
                f"out is {str(folder)!r}, which belongs to {what} ({then} there, {now} now); take "
                "another folder, or remove this one"
            )


def _difference(then: Any, now: Any) -> tuple[str, str]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted({*then, *now}):
            if then.get(key) != now.get(key):
                return f"{key} {then.get(key)}", f"{now.get(key)}"
    return str(then), str(now)
