"""The folder of a run on captured updates: records, pictures and the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakbound._util import files
from leakbound.assess.record import KEYS, SCHEMA, Assessment, encode
from leakbound.audit import plan as plans
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
        ValueError: a folder that holds other files or an audit, or cannot be written.
    """
    from leakbound import report

    about = json.dumps(_header(cases, settings, pictures, total), indent=1).encode() + b"\n"
    lines = b"".join(map(encode, outcome.records))
    with files.writing(folder), files.claimed(folder):
        check_place(folder)
        files.write(folder / files.RUN, about)
        place = files.folder(folder, "pictures")
        for name, content in outcome.pictures.items():
            files.write(place / name, content)
        files.write(folder / "records.jsonl", lines, key=KEYS[Assessment])
        page = report.write(folder, images=pictures)
    return replace(outcome, folder=folder, page=page)


def check_place(folder: Path) -> None:
    """Refuse a folder that `write_run` cannot write into, before any attack runs.

    Raises:
        ValueError: the folder belongs to an audit, or holds a file that leakbound did not write.
    """
    from leakbound.report import check_installed
    from leakbound.report.page import FILE

    check_installed()
    with files.writing(folder):
        files.check_run(folder)
        files.check(folder / FILE)
        files.check(folder / "records.jsonl", key=KEYS[Assessment])
        old = (folder / files.RUN).exists()
        about = json.loads(files.read(folder / files.RUN)) if old else {}
    if about.get("data", {}).get("source", OWN_DATA) != OWN_DATA:
        raise ValueError(
            f"out is {str(folder)!r}, which belongs to an audit; take an empty or new folder"
        )


def _header(
    cases: Sequence[Case], settings: Settings, pictures: bool, total: int
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
        "experiments": total,
        "own_data": True,
    }
