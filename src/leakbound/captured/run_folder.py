"""The folder of a run on captured updates: records, pictures and the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakbound.assess.record import SCHEMA
from leakbound.audit import plan as plans
from leakbound.audit.records import encode, write_atomically
from leakbound.audit.run_file import machine, versions
from leakbound.captured.records import Case

if TYPE_CHECKING:
    from leakbound.captured.run import Outcome, Settings

OWN_DATA = "captured updates"


def write_run(
    outcome: Outcome,
    folder: Path,
    cases: Sequence[Case],
    settings: Settings,
    pictures: bool,
    total: int,
) -> Outcome:
    """Records, pictures, run.json and the page into a folder of their own.

    `total` is how many attacks were to run; those that are missing are called missing on the page.

    Raises:
        ValueError: a folder that holds other files, or cannot be written.
    """
    from leakbound import report

    report.check_installed()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = sorted(p.name for p in folder.iterdir())
        if others and not (folder / "run.json").exists():
            raise ValueError(
                f"out is {str(folder)!r}, which holds other files ({others[0]!r}, ...); take an "
                "empty or new folder"
            )
        (folder / "pictures").mkdir(mode=0o700, exist_ok=True)
        for name, content in outcome.pictures.items():
            write_atomically(folder / "pictures" / name, content)
        about = json.dumps(_header(cases, settings, pictures, total), indent=1)
        write_atomically(folder / "run.json", about.encode() + b"\n")
        lines = b"".join(encode(record) for record in outcome.records)
        write_atomically(folder / "records.jsonl", lines)
    except OSError as error:
        raise ValueError(
            f"out is {str(folder)!r}, which cannot be written: {error.strerror or error}"
        ) from None
    page = report.write(folder, images=pictures)
    return replace(outcome, folder=folder, page=page)


def _header(
    cases: Sequence[Case], settings: Settings, pictures: bool, cells: int
) -> dict[str, Any]:
    """What `run.json` holds."""
    plan = {"name": OWN_DATA, **plans.plain(replace(settings, defense=None))}
    plan["defense"] = repr(settings.defense) if settings.defense else "none"
    first = cases[0].understood.observation
    return {
        "schema": SCHEMA,
        "plan": plan,
        "plan_hash": plans.digest(plan)[:16],
        "data": {
            "source": OWN_DATA,
            "fingerprint": plans.digest([case.capture.digest for case in cases])[:16],
            "examples": sum(case.understood.observation.examples for case in cases),
            "shape": list(first.input_shape),
            "classes": first.task.label_range,
            "weights": {},
        },
        "code": {},
        "versions": versions(),
        "machine": machine(),
        "pictures": pictures,
        "cells": cells,
        "own_data": True,
    }
