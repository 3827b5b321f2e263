"""Running many units: in this process, or in several with one torch thread each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection

import torch

from leakbound.audit.bench import Bench
from leakbound.audit.cells import Result, failed, run_cell, run_utility
from leakbound.audit.plan import Cell, Plan, UtilityCell

Unit = Cell | UtilityCell
_bench: Bench | None = None


def run(
    plan: Plan,
    done: Iterable[str] = (),
    *,
    workers: int = 1,
    pictures: bool = True,
    bench: Bench | None = None,
    started: Callable[[Unit], None] = lambda unit: None,
) -> Iterator[Result]:
    """Run what is not done yet of a plan, lazily; nothing is written.

    Results come in the order in which they finish; each depends on its own cell alone, so the
    number of workers changes no record.

    Args:
        plan: what to run.
        done: ids of cells and trainings that need not run.
        workers: processes, each with one torch thread; 1 runs in this process.
        pictures: whether results carry pictures of the data.
        bench: the plan's data, where it is loaded already.
        started: called with a unit when it starts (workers = 1) or is handed out.

    Example:
        >>> from leakbound.audit import parse
        >>> plan = parse({"data": {"source": "digits"}, "models": [{"name": "mlp"}],
        ...               "attacks": [{"name": "linear_inversion"}]})
        >>> [result.record["verdict"] for result in run(plan)]
        ['exposed']
    """
    finished = set(done)
    everything: list[Unit] = [*plan.utility_cells(), *plan.cells()]
    units = [unit for unit in everything if unit.id not in finished]
    bench = bench or Bench(plan.data)
    if workers <= 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for unit in units:
                started(unit)
                yield _run_one(unit, bench, pictures)
        finally:
            torch.set_num_threads(threads)
    else:
        yield from _run_many(units, bench, workers, pictures, started)


def _run_one(unit: Unit, bench: Bench, pictures: bool) -> Result:
    if isinstance(unit, UtilityCell):
        return run_utility(unit, bench)
    return run_cell(unit, bench, pictures=pictures)


def _run_many(
    units: list[Unit],
    bench: Bench,
    workers: int,
    pictures: bool,
    started: Callable[[Unit], None],
) -> Iterator[Result]:
    """Hand out units to processes; a unit that kills its process twice is recorded as failed."""
    waiting = list(reversed(units))
    suspects: list[Unit] = []
    while waiting or suspects:
        alone = not waiting
        pool = _pool(bench, 1 if alone else workers)
        running: dict[Future[Result], Unit] = {}
        try:
            source = suspects if alone else waiting
            while source or running:
                while source and len(running) < (1 if alone else workers + 1):
                    unit = source.pop()
                    started(unit)
                    running[pool.submit(_work, unit, pictures)] = unit
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    result = future.result()
                    running.pop(future)
                    yield result
        except BrokenProcessPool:
            if alone:
                for unit in running.values():
                    yield failed(unit, bench, "its process died (out of memory, or a crash)")
            else:
                suspects.extend(running.values())
        finally:
            _stop(pool)


def _pool(bench: Bench, workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(bench.spec,),
    )


def _stop(pool: ProcessPoolExecutor) -> None:
    """Cancel what waits and end the workers, so that Ctrl-C does not wait for running cells."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
    for process in processes:
        process.join()


def _start_worker(spec: object) -> None:
    """One torch thread; ignore Ctrl-C (the parent handles it); die with the parent."""
    global _bench
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None:
        watch = threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True)
        watch.start()
    from leakbound.audit.plan import DataSpec

    assert isinstance(spec, DataSpec)  # what _pool passes
    _bench = Bench(spec)


def _die_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


def _work(unit: Unit, pictures: bool) -> Result:
    assert _bench is not None  # set by _start_worker
    return _run_one(unit, _bench, pictures)
