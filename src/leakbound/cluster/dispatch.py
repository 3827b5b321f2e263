"""Assign units to workers, and handle dead workers; independent of Ray."""

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
    """A worker that accepts units from now on."""

    worker: int


@dataclass(frozen=True)
class Done:
    worker: int
    result: Result


@dataclass(frozen=True)
class Died:
    """A worker that has ended, with all its units; the pool starts another one."""

    worker: int


class Pool(Protocol):
    """Numbered workers that process their units in order."""

    def submit(self, worker: int, unit: Unit) -> None:
        """Give a unit to a worker that is ready."""

    def wait(self) -> Ready | Done | Died:
        """The next event."""


def dispatch(
    units: Iterable[Unit],
    pool: Pool,
    started: Callable[[Unit], None],
    lost: Callable[[Unit], Result],
) -> Iterator[Result]:
    """Assign units until each has one result; `lost` makes the result of a unit that ends its
    workers.

    A worker's death counts against the unit that it was running; units that waited behind it go
    back to the queue. The last of a unit's `TRIES` runs alone.
    """
    waiting = deque(units)
    suspects = deque[Unit]()
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
            queue = held[event.worker]
            queue.remove(next(unit for unit in queue if unit.id == event.result.id))
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
    waiting: deque[Unit],
    suspects: deque[Unit],
    held: dict[int, deque[Unit]],
) -> Iterator[tuple[int, Unit]]:
    """The next assignment: idle workers first; one ahead while many wait; suspects alone at the
    end.
    """
    while held and waiting:
        worker = min(held, key=lambda one: len(held[one]))
        if len(held[worker]) > (len(waiting) > len(held)):
            return
        yield worker, waiting.popleft()
    if suspects and held and not waiting and not any(held.values()):
        yield next(iter(held)), suspects.popleft()
