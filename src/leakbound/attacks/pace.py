"""Time limits for attacks: when a search has to stop, and its progress.

Searches call `tick` once per step. Without an open `Pace` it does nothing, and results do not
change.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import fields, is_dataclass, replace
from types import FrameType
from typing import Any, Self

from leakbound.core import Reconstruction

__all__ = ["tick"]

EVALUATIONS = 20
"""The most evaluations of the objective in one step of L-BFGS."""
STEPS = ("steps", "generations")
CLIENTS = "local_steps"
TIMES = ("restarts", "seeds", "stages")
"""Settings that count search steps, the client's own steps, and repetitions of a search."""


STOPPED = "stopped early"


class Pace:
    """A time limit for the searches inside it; a nested pace keeps to the shorter limit.

    `watch` is called after every search step with the number of steps so far; `cut`: a search was
    stopped before its end.
    """

    def __init__(
        self,
        seconds: float | None = None,
        watch: Callable[[int], None] | None = None,
    ) -> None:
        # Monotonic: a change of the system's clock must not move the limit.
        self.end = math.inf if seconds is None else time.monotonic() + seconds
        self.steps = 0
        self.cut = False
        self._watch = watch
        self._token = list[Token[Pace | None]]()
        self._above: Pace | None = None

    def __enter__(self) -> Self:
        self._above = _OPEN.get()
        self._token.append(_OPEN.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        _OPEN.reset(self._token.pop())

    def stop(self) -> None:
        self.end = -math.inf

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.end or (self._above is not None and self._above.over)

    @property
    def left(self) -> float:
        mine = max(0.0, self.end - time.monotonic())
        return mine if self._above is None else min(mine, self._above.left)

    def step(self) -> None:
        self.steps += 1
        if self._watch is not None:
            self._watch(self.steps)
        if self._above is not None:
            self._above.step()


# A context variable: searches of different threads have their own limits.
_OPEN: ContextVar[Pace | None] = ContextVar("leakbound_pace", default=None)


def tick() -> bool:
    """Count one step of a search; return whether the search has to stop."""
    pace = _OPEN.get()
    if pace is None:
        return False
    pace.step()
    pace.cut = pace.cut or pace.over
    return pace.cut


def is_over() -> bool:
    """Whether the time is up, for computation that counts no steps, before it goes on."""
    pace = _OPEN.get()
    if pace is None or not pace.over:
        return False
    pace.cut = True
    return True


@contextmanager
def ended_by_interrupt(pace: Pace) -> Iterator[None]:
    """The first Ctrl-C ends the pace: searches return their best, and the interrupt is raised after
    the block. A second one is raised at once. Outside of the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    came = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, before)
        pace.stop()

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def noted(answer: Reconstruction, planned: int = 0) -> Reconstruction:
    """The answer; if the search was stopped, its `problem` says so, with its `planned` steps."""
    pace = _OPEN.get()
    if pace is None or not pace.cut:
        return answer
    whole = f" of {planned:,}" if planned > pace.steps else ""
    words = f"{STOPPED}, after {pace.steps:,}{whole} steps"
    return replace(answer, problem="; ".join(filter(None, [words, answer.problem])))


def planned(attack: Any) -> int:
    """The most evaluations of its objective that an attack takes; 0 for closed forms. Inferred from
    the names of the settings (`steps`, `restarts`, ...), including those of nested attacks.
    """
    settings: dict[str, Any] = {field.name: getattr(attack, field.name) for field in fields(attack)}
    counts = [k for k in settings if k in STEPS or (k.endswith("_steps") and k != CLIENTS)]
    tried = settings["candidates"] if CLIENTS in settings and settings[CLIENTS] is None else ()
    steps = sum(settings[name] for name in counts)
    steps += settings.get("trial", 0) * (settings.get("deals", 0) + len(tried))
    steps *= EVALUATIONS if settings.get("optimizer") == "lbfgs" else 1
    inner = [planned(value) for value in settings.values() if is_dataclass(value)]
    return int((steps + max(inner, default=0)) * math.prod(settings.get(name, 1) for name in TIMES))
