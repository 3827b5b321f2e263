"""What several verbs need: names with settings, output files, progress."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from leakbound import audit as audits
from leakbound._util import files
from leakbound.audit.context import named_code_of
from leakbound.audit.plan import Experiment, Plan, TrainingUnit, defense_name
from leakbound.cli.progress import Bar, duration
from leakbound.cli.terminal import brief, errors

LONG = 600.0
"""Seconds from which an audit says before it starts how long it takes."""


def workers_of(asked: int) -> int:
    """How many processes: as many as asked, or one for each core that is ours.

    Raises:
        ValueError: a negative number.
    """
    if asked < 0:
        raise ValueError(f"workers is {asked}; give 0 for one a core, or a number of processes")
    if asked:
        return asked
    ours = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return len(ours) or os.cpu_count() or 1


def announce_code(plan: Plan) -> None:
    """Say which Python code of the user is imported, before it is."""
    for name in named_code_of(plan):
        errors.print(f"importing Python code that the plan names: {brief(name)}", soft_wrap=True)


def check_files(folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder that `write_files` would refuse, before any work is done.

    Raises:
        ValueError: no folder, or a file of one of the names that leakbound did not write.
    """
    with files.writing(folder):
        files.check(*(folder / name for name in names))
        if os.path.lexists(folder) and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is no folder")


def write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Put files of these names into a folder, made where it is missing.

    Raises:
        ValueError: it cannot be written, or holds a file of one of the names that leakbound did
            not write; then nothing is written.
    """
    check_files(folder, contents)
    with files.writing(folder):
        files.folder(folder)
        for name, content in contents.items():
            files.write(folder / name, content)


def plural(count: int, noun: str) -> str:
    """`1 experiment`, `2 experiments`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def showing(bar: Bar) -> Callable[[audits.Progress], None]:
    """What shows an audit's progress on a bar; before a long one it says so."""
    warned = False

    def show(now: audits.Progress) -> None:
        nonlocal warned
        if not warned and now.left is not None and now.left > LONG:
            errors.print(
                f"this takes about {duration(now.left)} by an estimate ({brief(now.basis)}); it "
                "can be stopped and started again at any time, and fewer steps, experiments or a "
                "smaller model make it shorter",
                soft_wrap=True,
            )
        warned = True
        text = "starting" if now.current is None else _describe(now.current)
        text = "writing the report" if now.done == now.total else text
        bar(now.done, now.total, text, now.left)

    return show


def _describe(unit: Experiment | TrainingUnit) -> str:
    what = unit.attack.name if isinstance(unit, Experiment) else "training"
    return f"{what} · {unit.model.name} · {defense_name(unit.defense)}"
