"""What several commands need: output files, the number of processes, and progress."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from leakbound import audit as audits
from leakbound._util import files
from leakbound._util.text import printable
from leakbound.assess.header import defense_name
from leakbound.assess.record import VERDICTS, Assessment, Training
from leakbound.audit.context import named_code_of
from leakbound.audit.plan import Experiment, Plan
from leakbound.cli.terminal import brief, console, errors, safe
from leakbound.data.sources import is_code

EVERY = 10.0
"""Seconds between two lines if there is no terminal."""


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Bar:
    """Progress: what is done (counted in `unit`), what runs now, and the estimated time left.

    On a terminal it is a bar. Elsewhere it is a line on stderr every `EVERY` seconds.
    """

    def __init__(self, console: Console, unit: str = "") -> None:
        self._unit = f" {unit}" if unit else ""
        current = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self._progress = Progress(
            BarColumn(20),
            MofNCompleteColumn(),
            TextColumn(unit),
            _Left(self),
            TextColumn("{task.description}", table_column=current),
            console=console,
            disable=not console.is_terminal,
            expand=True,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._began = self._at = time.monotonic()
        self._left: float | None = None
        self._ended = threading.Event()
        self._lines: threading.Thread | None = None
        self.done = 0
        self.total = 0
        self._current = "starting"

    def __call__(
        self,
        done: int,
        total: int,
        current: str,
        left: float | None = None,
    ) -> None:
        self.done = done
        self.total = total
        self._current = printable(current)
        self._left = left
        self._at = time.monotonic()
        self._progress.update(
            self._task,
            completed=done,
            total=total,
            description=escape(self._current),
        )

    @property
    def left(self) -> float | None:
        """The estimated seconds left: as given, else from the pace so far; None before that."""
        now = time.monotonic()
        if self._left is not None:
            return self._left - (now - self._at)
        if not 0 < self.done < self.total:
            return None
        rate = (self._at - self._began) / self.done
        return rate * (self.total - self.done) - (now - self._at)

    def __enter__(self) -> Self:
        if not self._progress.disable:
            self._progress.start()
        else:
            self._lines = threading.Thread(target=self._write_lines, daemon=True)
            self._lines.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._lines is None:
            self._progress.stop()
            return
        self._lines.join()
        if self.total:
            self._line("")

    def _write_lines(self) -> None:
        while not self._ended.wait(EVERY):
            if not self.total:
                passed = duration(time.monotonic() - self._began)
                print(
                    f"{self._current}: running for {passed}",
                    file=sys.stderr,
                    flush=True,
                )
                continue
            left = self.left
            words = "time left not known yet"
            if left is not None:
                words = f"about {duration(left)} left" if left > 0 else "longer than estimated"
            self._line(f", {words}: {self._current}" if self.done < self.total else "")

    def _line(self, rest: str) -> None:
        passed = duration(time.monotonic() - self._began)
        done = f"{self.done} of {self.total}{self._unit}"
        print(f"{done} done after {passed}{rest}", file=sys.stderr, flush=True)


class _Left(ProgressColumn):
    def __init__(self, bar: Bar) -> None:
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))
        self._bar = bar

    def render(self, task: Task) -> Text:
        left = self._bar.left
        return Text("" if left is None else f"{duration(max(left, 0.0))} left")


LONG = 600.0
"""Seconds. A longer audit shows its estimated time before it starts."""


def workers_of(asked: int) -> int:
    """How many processes: as many as asked, or one for each available core."""
    if asked < 0:
        raise ValueError(f"workers is {asked}; give 0 for one per core, or a number of processes")
    if asked:
        return asked
    # A container or a batch job may have fewer cores than the machine.
    ours = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    cores = len(ours) or os.cpu_count() or 1
    return min(cores, 61) if os.name == "nt" else cores  # Windows waits for no more at once


def announce_code(plan: Plan) -> None:
    for name in named_code_of(plan):
        announce("the plan", name)


def announce_data(option: str, source: str | None) -> None:
    """Say that a source of data is code, if it is."""
    if source is not None and is_code(source):
        announce(f"--{option}", source)


def announce(who: str, path: str) -> None:
    """Say that code is imported, and find modules in this folder too."""
    errors.say(f"importing Python code that {who} names: {brief(path.partition(',')[0])}")
    here = str(Path.cwd())
    # Last: a module here must not take the place of an installed one.
    if here not in sys.path:
        sys.path.append(here)


def check_files(folder: Path, names: Iterable[str]) -> None:
    with files.writing(folder):
        files.check(*(folder / name for name in names))
        if os.path.lexists(folder) and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is not a folder")


def write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write all files, or none if the folder holds a file of a name that is not leakbound's."""
    check_files(folder, contents)
    with files.writing(folder):
        files.folder(folder)
        for name, content in contents.items():
            files.write(folder / name, content)


def write_results(
    folder: Path,
    contents: Mapping[str, bytes],
    *,
    json: bool,
) -> None:
    """Write the files of a result, and say so: on stderr if stdout is JSON."""
    write_files(folder, contents)
    out = errors if json else console
    out.print(f"written: {', '.join(contents)} into {safe(folder)}")


def verdicts(
    assessments: Sequence[Assessment], trainings: Sequence[Training] = ()
) -> tuple[int, str]:
    """The configurations, counted as in the report: how many, and how many of each verdict."""
    from leakbound.report import tables

    rows = tables.configurations(assessments, tables.Names(assessments, trainings))
    counts = Counter(row.verdict for row in rows)
    return len(rows), ", ".join(f"{counts[word]} {word}" for word in VERDICTS if counts[word])


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def showing(bar: Bar) -> Callable[[audits.Progress], None]:
    """A function that shows an audit's progress on a bar, and warns before a long audit."""
    warned = False

    def show(now: audits.Progress) -> None:
        nonlocal warned
        if not warned and now.left is not None and now.left > LONG:
            errors.say(
                f"this takes about {duration(now.left)} by an estimate ({brief(now.basis)}). You "
                "can stop it and start it again at any time. Fewer steps, fewer experiments or a "
                "smaller model take less time."
            )
        warned = True
        text = "starting"
        unit = now.current
        if now.done == now.total:
            text = "writing the report"
        elif unit is not None:
            what = unit.attack.name if isinstance(unit, Experiment) else "training"
            text = f"{what} · {unit.model.name} · {defense_name(unit.defense)}"
        bar(now.done, now.total, text, now.left)

    return show
