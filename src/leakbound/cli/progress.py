"""How far a command is: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from leakbound._util.text import printable

EVERY = 10.0
"""Seconds between two lines where there is no terminal."""


def duration(seconds: float) -> str:
    """A time for reading.

    Example:
        >>> duration(4.2), duration(100), duration(7500)
        ('4 s', '1 min 40 s', '2 h 05 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Bar:
    """Units done of all, what runs now, and the time left. Use as a context manager.

    Args:
        console: where it is shown; without a terminal, lines go to stderr.
    """

    def __init__(self, console: Console) -> None:
        current = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self._progress = Progress(
            BarColumn(20),
            MofNCompleteColumn(),
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
        self.done, self.total, self._current = 0, 0, "starting"

    def __call__(self, done: int, total: int, current: str, left: float | None = None) -> None:
        """Show where the command is; `left` are the seconds that it still takes, if known."""
        self.done, self.total, self._current = done, total, printable(current)
        self._left, self._at = left, time.monotonic()
        self._progress.update(
            self._task, completed=done, total=total, description=escape(self._current)
        )

    @property
    def left(self) -> float | None:
        """The seconds left; by the units done so far where nobody said it, None without any."""
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
            words = f", {_words(self.left)}: {self._current}"
            self._line(words if self.done < self.total else "")

    def _line(self, rest: str) -> None:
        passed = duration(time.monotonic() - self._began)
        print(f"{self.done} of {self.total} done after {passed}{rest}", file=sys.stderr, flush=True)


class _Left(ProgressColumn):
    """The time left, as the bar has it."""

    def __init__(self, bar: Bar) -> None:
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))
        self._bar = bar

    def render(self, task: Task) -> Text:
        """The column's text now."""
        left = self._bar.left
        return Text("" if left is None else f"{duration(max(left, 0.0))} left")


def _words(left: float | None) -> str:
    if left is None:
        return "time left not known yet"
    return f"about {duration(left)} left" if left > 0 else "longer than estimated"
