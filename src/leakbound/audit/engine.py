"""Running many units: in this process, or in several with one torch thread each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection
from queue import SimpleQueue
from typing import Any

import torch

from leakbound.audit.bundles import bundles, run_experiments
from leakbound.audit.context import PlanContext
from leakbound.audit.experiment import Result, died, run_training
from leakbound.audit.plan import DataSpec, Experiment, Plan, TrainingUnit, Unit

TRIES = 3
"""How many processes a unit may end before it is recorded as failed; the last are its own."""

_bench: PlanContext | None = None
_fingerprint = ""


def run(
    plan: Plan,
    done: Iterable[str] = (),
    *,
    workers: int = 1,
    pictures: bool = True,
    context: PlanContext | None = None,
    started: Callable[[Unit], None] = lambda unit: None,
) -> Generator[Result, None, None]:
    """Run what is not done yet of a plan, lazily; nothing is written.

    Results come in the order in which they finish; each depends on its own unit alone, so the
    number of workers changes no record.

    Args:
        plan: what to run.
        done: ids of experiments and trainings that need not run.
        workers: processes, each with one torch thread; 1 runs in this process, so that one that
            ends its process ends the audit too.
        pictures: whether results carry pictures of the data.
        context: the plan's data, where it is loaded already.
        started: called with a unit when it starts (workers = 1) or is handed out.

    Example:
        >>> from leakbound.audit import parse
        >>> plan = parse({"data": {"source": "digits"}, "models": [{"name": "mlp"}],
        ...               "attacks": [{"name": "linear_inversion"}]})
        >>> [result.record.verdict for result in run(plan)]
        ['exposed']
    """
    finished = set(done)
    everything: list[Unit] = [*plan.trainings(), *plan.experiments()]
    units = [unit for unit in everything if unit.id not in finished]
    context = context or PlanContext(plan.data)
    if workers > 1:
        yield from _run_many(units, context, workers, pictures, started)
        return
    for bundle in bundles(units, context):
        for unit in bundle:
            started(unit)
        yield from _run_bundle(bundle, context, pictures)


def _run_bundle(bundle: tuple[Unit, ...], context: PlanContext, pictures: bool) -> list[Result]:
    experiments = [unit for unit in bundle if isinstance(unit, Experiment)]
    if experiments:
        return run_experiments(experiments, context, pictures=pictures)
    return [run_training(unit, context) for unit in bundle if isinstance(unit, TrainingUnit)]


def _run_many(
    units: list[Unit],
    context: PlanContext,
    workers: int,
    pictures: bool,
    started: Callable[[Unit], None],
) -> Iterator[Result]:
    """Hand out bundles to processes; a unit at work in `TRIES` that died is recorded as failed.

    When a process dies, all units in flight are suspects: each is tried again alone.
    """
    waiting, suspects = deque(bundles(units, context, workers)), deque[tuple[Unit, ...]]()
    deaths: Counter[str] = Counter()
    while waiting or suspects:
        alone = bool(suspects)
        source, width = (suspects, 1) if alone else (waiting, workers + 1)
        running: dict[Future[list[Result]], tuple[Unit, ...]] = {}
        done: SimpleQueue[Future[list[Result]]] = SimpleQueue()
        pool = _pool(context, 1 if alone else workers)
        try:
            if alone:
                _wait_for_start(pool)
            while source or running:
                while source and len(running) < width:
                    bundle = source[0]
                    with _undisturbed():
                        future = pool.submit(_work, bundle, pictures)
                        future.add_done_callback(done.put)
                        running[future] = bundle
                    source.popleft()
                    for unit in bundle:
                        started(unit)
                future = done.get()
                with _undisturbed():
                    results = future.result()
                running.pop(future)
                yield from results
        except BrokenProcessPool:
            for unit in [unit for bundle in running.values() for unit in bundle]:
                deaths[unit.id] += 1
                if deaths[unit.id] == TRIES:
                    yield died(unit, context)
                else:
                    suspects.append((unit,))
        finally:
            _stop(pool)


def _pool(context: PlanContext, workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(context.spec, context.dataset.fingerprint, str(context.device)),
    )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait while a future is touched: one that comes between leaves it locked,
    and the pool's own thread then waits for that lock forever (as in `concurrent.futures.wait`).

    The mask is for a process that starts in here: it is born with Ctrl-C blocked, as we handle it.
    It is not enough for ourselves, as any other thread may take the signal.
    """
    main = threading.current_thread() is threading.main_thread()
    stops = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = {number: signal.getsignal(number) for number in stops}
    ours = {number: handler for number, handler in before.items() if callable(handler)}
    came: list[int] = []
    for number in ours:
        signal.signal(number, lambda sent, frame: came.append(sent))
    try:
        with _masked():
            yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
        for sent in came[:1]:
            signal.raise_signal(sent)


@contextmanager
def _masked() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for_start(pool: ProcessPoolExecutor) -> None:
    try:
        done: SimpleQueue[Future[Any]] = SimpleQueue()
        with _undisturbed():
            pool.submit(_started).add_done_callback(done.put)
        future = done.get()
        with _undisturbed():
            future.result()
    except BrokenProcessPool:
        raise ValueError(
            "worker processes cannot start; call this from a file under "
            'if __name__ == "__main__", or take workers = 1'
        ) from None


def _started() -> Any:
    """Nothing: that a worker answers is all that is asked."""


def _stop(pool: ProcessPoolExecutor) -> None:
    """Cancel what waits and end the workers, so that Ctrl-C waits for no running experiment."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(5)
        process.kill()  # where the user's code holds on; nothing where it has ended


def _start_worker(spec: DataSpec, fingerprint: str, device: str) -> None:
    """One torch thread; ignore Ctrl-C (the parent handles it); die with the parent."""
    global _bench, _fingerprint
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None:
        watch = threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True)
        watch.start()
    _bench, _fingerprint = PlanContext(spec, device), fingerprint


def _die_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


def _work(bundle: tuple[Unit, ...], pictures: bool) -> list[Result]:
    assert _bench is not None  # set by _start_worker
    if _bench.dataset.fingerprint != _fingerprint:
        raise ValueError(
            f"data source {_bench.spec.source!r} changed while the audit ran; "
            "put it back, or start anew in another folder"
        )
    return _run_bundle(bundle, _bench, pictures)
