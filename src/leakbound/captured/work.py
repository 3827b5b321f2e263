"""What is still to do on captured updates, and how long it takes at the pace measured so far."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leakbound.attacks.pace import Pace, planned
from leakbound.audit import plan as plans
from leakbound.captured.assess import Case
from leakbound.captured.observe import Understood

Watch = Callable[[int, int, str, float | None], None]
"""Called with attacks done, attacks in total, what runs now, and seconds left (None: unknown)."""


@dataclass(frozen=True)
class Job:
    """One attack on one update.

    Attributes:
        at, rank: the places of the update and of the attack.
        steps: that its search takes at most; 0 for a closed form.
        cost: of a step, in gradients of one example.
    """

    at: int
    rank: int
    spec: plans.Spec
    steps: int
    cost: int


class Work:
    """Attacks on all updates: closed forms first, then searches, those of few steps first.

    Args:
        pace: the time for all of them.
        cases: the updates; where one is replaced later, `again` is called.
        chosen: the attacks on an update, by what is understood of it.

    Attributes:
        jobs: that have not ended, in the order in which they run.
        done: how many have ended.
    """

    def __init__(
        self,
        pace: Pace,
        cases: list[Case],
        chosen: Callable[[Understood], Sequence[plans.Spec]],
    ) -> None:
        self._pace, self.cases, self._chosen = pace, cases, chosen
        self._ended = set[tuple[int, int]]()
        self._paid, self._spent, self._began = 0.0, 0.0, 0.0
        self.jobs: list[Job] = []
        for at in range(len(cases)):
            self.again(at)

    @property
    def done(self) -> int:
        """How many have ended."""
        return len(self._ended)

    @property
    def total(self) -> int:
        """How many there are."""
        return self.done + len(self.jobs)

    @property
    def share(self) -> float:
        """Seconds of those left for one of the attacks left."""
        return self._pace.left / len(self.jobs)

    def tell(self, watch: Watch, what: str, step: int = 0) -> None:
        """Say how far they are, after so many steps of the first."""
        watch(self.done, self.total, what, self.left(step) if self.jobs else None)

    def again(self, at: int) -> None:
        """Choose the attacks on an update again; more is understood of it now."""
        seen = self.cases[at].understood.observation
        cost = seen.examples * seen.task.plan.steps
        found = [job for job in self.jobs if job.at != at]
        for rank, spec in enumerate(self._chosen(self.cases[at].understood)):
            if (at, rank) not in self._ended:
                found.append(Job(at, rank, spec, planned(plans.build_attack(spec)), cost))
        self.jobs = sorted(found, key=lambda job: (job.steps, job.at))

    def begins(self) -> None:
        """The first job begins."""
        self._began = time.monotonic()

    def ended(self) -> None:
        """It has ended."""
        job = self.jobs.pop(0)
        self._ended.add((job.at, job.rank))
        if job.steps:
            self._spent += time.monotonic() - self._began
            self._paid += job.steps * job.cost

    def left(self, step: int = 0) -> float | None:
        """Seconds until all have ended, after so many steps of the first; None if unknown."""
        paid, spent, limit = self._paid, self._spent, self._pace.left
        own = min(step, self.jobs[0].steps) * self.jobs[0].cost
        if step:
            paid, spent = paid + own, spent + time.monotonic() - self._began
        if not paid:
            return limit if math.isfinite(limit) else None
        rest = sum(job.steps * job.cost for job in self.jobs) - own
        return min(limit, spent / paid * rest)
