"""Who runs which unit, and what happens when a worker dies; knows nothing of Ray."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from leakbound.audit.engine import TRIES
from leakbound.audit.experiment import Result
from leakbound.audit.plan import Unit


@dataclass(frozen=True)
class Ready:
    """A worker that takes units from now on."""

    worker: int


@dataclass(frozen=True)
class Done:
    worker: int
    result: Result


@dataclass(frozen=True)
class Died:
    """A worker that is gone, with all that it held; the pool starts another one."""

    worker: int


class Pool(Protocol):
    """Workers, each with a number, which work off what they are given in order."""

    def submit(self, worker: int, unit: Unit) -> None:
        """Give a unit to a worker that is ready."""

    def wait(self) -> Ready | Done | Died:
        """The next thing that happens."""


def dispatch(
    units: Iterable[Unit],
    pool: Pool,
    started: Callable[[Unit], None],
    lost: Callable[[Unit], Result],
) -> Iterator[Result]:
    """Hand out units until each has one result; `lost` makes that of a unit no worker survives.

    A worker's death counts against the unit that it was at; what waited behind it goes back. The
    last of a unit's `TRIES` runs alone.
    """
    waiting, suspects = deque(units), deque[Unit]()
    held: dict[int, deque[Unit]] = {}
    deaths: Counter[str] = Counter()
    while waiting or suspects or any(held.values()):
        for worker, unit in _next(waiting, suspects, held):
            pool.submit(worker, unit)
            held[worker].append(unit)
            started(unit)
        event = pool.wait()
        if isinstance(event, Ready):
            held[event.worker] = deque()
        elif isinstance(event, Done):
            own = held[event.worker]
            own.remove(next(unit for unit in own if unit.id == event.result.id))
            yield event.result
        else:
            waiting.extendleft(reversed(list(held.get(event.worker, ()))[1:]))
            for unit in list(held.pop(event.worker, ()))[:1]:
                deaths[unit.id] += 1
                if deaths[unit.id] == TRIES:
                    yield lost(unit)
                elif deaths[unit.id] == TRIES - 1:
                    suspects.append(unit)
                else:
                    waiting.appendleft(unit)


def _next(
    waiting: deque[Unit], suspects: deque[Unit], held: dict[int, deque[Unit]]
) -> Iterator[tuple[int, Unit]]:
    """Who gets what now: the idle first; one ahead while much waits; suspects alone at the end."""
    while held and waiting:
        worker = min(held, key=lambda one: len(held[one]))
        if len(held[worker]) > (len(waiting) > len(held)):
            return
        yield worker, waiting.popleft()
    if suspects and held and not waiting and not any(held.values()):
        yield next(iter(held)), suspects.popleft()
