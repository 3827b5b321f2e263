"""Who runs what when workers die: a pool of ours that kills as it is told."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from leakbound.audit.engine import TRIES
from leakbound.audit.experiment import Result
from leakbound.cluster.dispatch import Died, Done, Ready, dispatch


@dataclass(frozen=True)
class Unit:
    id: str


@dataclass
class Record:
    key: str
    status: str = "ok"


@dataclass
class FakePool:
    """Works in order, one step a `wait`; `kills` says whether a worker dies at a unit now."""

    kills: object
    workers: int = 2
    queues: dict = field(default_factory=dict)
    events: list = field(default_factory=list)
    log: list = field(default_factory=list)
    behind: list = field(default_factory=list)
    source: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self):
        self.born = self.workers
        self.events = [Ready(i) for i in range(self.workers)]

    def submit(self, worker, unit):
        others = sum(len(queue) for queue in self.queues.values())
        self.behind.append(len(self.queues[worker]))
        self.queues[worker].append(unit)
        self.log.append((unit.id, worker, others))

    def wait(self):
        if self.events:
            event = self.events.pop(0)
            if isinstance(event, Ready):
                self.queues.setdefault(event.worker, [])
            return event
        worker = self.source.choice(sorted(w for w, queue in self.queues.items() if queue))
        unit = self.queues[worker][0]
        if self.kills(unit.id):
            del self.queues[worker]
            self.events.append(Ready(self.born))
            self.born += 1
            return Died(worker)
        self.queues[worker].pop(0)
        return Done(worker, Result(Record(unit.id)))


def lost(unit):
    return Result(Record(unit.id, "failed"))


def play(kills, units=20, workers=2, seed=0):
    pool = FakePool(kills, workers, source=random.Random(seed))
    started = []
    every = [Unit(f"u{i}") for i in range(units)]
    results = list(dispatch(every, pool, lambda unit: started.append(unit.id), lost))
    assert Counter(r.id for r in results) == Counter(u.id for u in every), "lost or doubled"
    assert set(started) == {u.id for u in every}
    return pool, {r.id: r.record for r in results}


def failures(found):
    return {key for key, record in found.items() if record.status == "failed"}


def test_all_units_once_and_all_workers_busy():
    pool, found = play(lambda unit: False)
    assert failures(found) == set()
    assert Counter(worker for _, worker, _ in pool.log).keys() == {0, 1}


def test_no_units_no_waiting():
    assert list(dispatch([], FakePool(lambda unit: False), lambda unit: None, lost)) == []


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
def test_a_unit_whose_worker_dies_is_tried_on_another(times):
    left = Counter({"u5": times})

    def kills(unit):
        left[unit] -= 1
        return left[unit] >= 0

    pool, found = play(kills)
    assert failures(found) == set()
    tries = [(worker, others) for unit, worker, others in pool.log if unit == "u5"]
    assert len({worker for worker, _ in tries}) == len(tries) == times + 1
    if times == TRIES - 1:
        assert tries[-1][1] == 0, "the last try is alone"


def test_what_no_worker_survives_is_recorded_and_the_rest_runs():
    for seed in range(20):
        pool, found = play(lambda unit: unit in ("u0", "u7"), seed=seed)
        assert failures(found) == {"u0", "u7"}
        for deadly in ("u0", "u7"):
            tries = [others for unit, _, others in pool.log if unit == deadly]
            assert tries[-1] == 0, "alone: nothing else was given out at its last try"


@pytest.mark.parametrize("workers", [1, 3])
def test_random_deaths_lose_and_double_nothing(workers):
    """Deaths by chance may fail a unit, but never twice by one death, and never silently."""
    for seed in range(50):
        chance = random.Random(seed)
        deaths = Counter()

        def kills(unit, chance=chance, deaths=deaths):
            died = chance.random() < 0.2
            deaths[unit] += died
            return died

        _, found = play(kills, units=15, workers=workers, seed=seed)
        assert failures(found) == {unit for unit, count in deaths.items() if count == TRIES}


def test_a_worker_that_dies_before_it_is_ready_costs_no_unit():
    pool = FakePool(lambda unit: False, 1)
    pool.events = [Died(0), Ready(1)]
    units = [Unit("a"), Unit("b")]
    assert [r.id for r in dispatch(units, pool, lambda unit: None, lost)] == ["a", "b"]


def test_one_ahead_while_much_waits_and_nothing_behind_a_unit_at_the_end():
    pool, _ = play(lambda unit: False, units=20, workers=3)
    assert max(pool.behind) == 1
    assert pool.behind[-3:] == [0, 0, 0]
