"""Run many units, in this process or in several with one torch thread each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from math import ceil
from multiprocessing import connection
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from leakbound._util import stops
from leakbound._util.groups import grouped
from leakbound.audit import experiment
from leakbound.audit import plan as plans
from leakbound.audit.context import PlanContext, one_thread
from leakbound.audit.experiment import Result, died, run_training
from leakbound.audit.plan import DataSpec, Experiment, Plan, TrainingUnit, Unit, units_left
from leakbound.core import Reconstruction
from leakbound.engines.choose import LARGEST
from leakbound.protocol import Round

T = TypeVar("T")
TOGETHER = 16
"""Most releases in a bundle; what runs together in it has its results at once."""
TRIES = 3
"""Number of processes that a unit may end before it counts as failed; the last runs it alone."""

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
    """Run the units of a plan that are not done yet, lazily; this writes nothing.

    Results come in the order in which they finish. The number of `workers`, processes with one
    torch thread each, changes no record. `done` are ids of units to skip. `started` is called with
    each unit that starts or is handed out.

    Example:
        >>> from leakbound.audit import parse
        >>> plan = parse({"data": {"source": "digits"}, "models": [{"name": "mlp"}],
        ...               "attacks": [{"name": "linear_inversion"}]})
        >>> [result.record.verdict for result in run(plan)]
        ['exposed']
    """
    units = units_left(plan, done)
    context = context or PlanContext(plan.data)
    if workers > 1:
        yield from _run_many(units, context, workers, pictures, started)
        return
    for bundle in bundles(units, context):
        for group in groups_of(bundle):
            for unit in group:
                started(unit)
            yield from _run_group(group, context, pictures)


def groups_of(bundle: Iterable[Unit]) -> list[tuple[Unit, ...]]:
    """What of it runs together: the experiments with one attack if the attack can, else one."""

    def key(unit: Unit) -> object:
        if isinstance(unit, Experiment) and plans.build_attack(unit.attack).at_once > 1:
            return unit.attack
        return unit.id

    return [tuple(group) for group in grouped((key(unit), unit) for unit in bundle).values()]


def _run_group(
    group: tuple[Unit, ...],
    context: PlanContext,
    pictures: bool,
) -> list[Result]:
    results = [run_training(unit, context) for unit in group if isinstance(unit, TrainingUnit)]
    experiments = [unit for unit in group if isinstance(unit, Experiment)]
    return results or run_experiments(experiments, context, pictures=pictures)


def bundles(
    units: Sequence[Unit],
    context: PlanContext,
    workers: int = 1,
) -> list[tuple[Unit, ...]]:
    """All units, grouped where this is faster, the largest groups first.

    Small models share a bundle: experiments on one release share its bounds, and searches that
    differ only in weights, data and noise share their computation. Records do not depend on the
    bundle: the result of `Attack.many` for one does not depend on the others.
    """
    groups: dict[object, dict[object, list[Unit]]] = {}
    for unit in units:
        group, release = _kind(unit, context)
        groups.setdefault(group, {}).setdefault(release, []).append(unit)
    bundled: list[tuple[Unit, ...]] = []
    for releases in groups.values():
        each = sorted(releases.values(), key=lambda some: some[0].seed)
        most = min(TOGETHER, ceil(len(each) / workers))
        bundled += [tuple(chain(*each[at : at + most])) for at in range(0, len(each), most)]
    return sorted(bundled, key=len, reverse=True)


def run_experiments(
    units: Sequence[plans.Experiment],
    context: PlanContext,
    *,
    pictures: bool = True,
) -> list[Result]:
    """As `run_experiment` for each, to the bit; if the attack raises, each runs alone."""

    def alone(unit: plans.Experiment) -> Result:
        return experiment.run_experiment(unit, context, pictures=pictures)

    if len(units) == 1:
        return [alone(units[0])]
    began = time.perf_counter()
    played = []
    with one_thread():
        for unit in units:
            try:
                played.append((unit, experiment.play_round(unit, context)))
            except Exception as error:  # its separate run reports the reason
                stops.reraise(error)
        try:
            sources = [experiment.source_of(unit) for unit, _ in played]
            rounds = [round_ for _, round_ in played]
            answers = experiment.answers(units[0].attack, rounds, sources)
        except Exception as error:  # as above
            stops.reraise(error)
            return [alone(unit) for unit in units]
        # The time of the common work is split evenly; each is given a start so far back.
        share = (time.perf_counter() - began) / len(units)
        results = {}
        for (unit, round_), answer in zip(played, answers, strict=True):
            began = time.perf_counter() - share
            results[unit.id] = experiment.assessed(
                unit, context, partial(_both, round_, answer), pictures, began
            )
    return [results.get(unit.id) or alone(unit) for unit in units]


def _both(
    round_: Round,
    answer: Reconstruction,
) -> tuple[Round, Reconstruction]:
    return round_, answer


def _kind(unit: Unit, context: PlanContext) -> tuple[object, object]:
    if isinstance(unit, Experiment):
        with suppress(Exception):  # as above
            size = context.size(unit.model)
            if size is not None and size <= LARGEST:
                return (unit.model, unit.batch_size), (unit.seed, unit.defense)
    return unit.id, None


def _run_many(
    units: list[Unit],
    context: PlanContext,
    workers: int,
    pictures: bool,
    started: Callable[[Unit], None],
) -> Iterator[Result]:
    """Hand out bundles, each to one process, whose results come as each of its groups ends.

    If a process dies, the units of the group that it ran are tried again, each alone; what else was
    handed out waits again. A unit running in `TRIES` processes that died is recorded as failed.
    """
    waiting = deque(bundles(units, context, workers))
    suspects = deque[tuple[Unit, ...]]()
    deaths: Counter[str] = Counter()
    starts = 0  # that failed, one after the other
    while waiting or suspects:
        alone = bool(suspects)
        source, count = (suspects, 1) if alone else (waiting, workers)
        pools = [_pool(context) for _ in range(count)]
        held: list[deque[tuple[Unit, ...]]] = [deque() for _ in pools]  # the first one runs
        running: dict[Future[list[Result]], int] = {}
        done: SimpleQueue[Future[list[Result]]] = SimpleQueue()
        at = 0  # the process that dies, if one does
        try:
            # Otherwise a process that cannot start at all would count as a death of its unit.
            if alone:
                starts += 1
                _wait_for_start(pools[0], last=starts == TRIES)
                starts = 0
            while source or any(held):
                ahead = not alone and len(source) > count  # no process then waits for this one
                for at in sorted(range(count), key=lambda one: len(held[one])):
                    if not source or len(held[at]) > ahead:
                        continue
                    groups = groups_of(source.popleft())
                    held[at].extend(groups)  # first: a death meanwhile loses none of them
                    for group in groups:
                        with _undisturbed():
                            future = pools[at].submit(_work, group, pictures)
                            future.add_done_callback(done.put)
                            running[future] = at
                        for unit in group:
                            started(unit)
                future = _next(done)
                at = running.pop(future)
                with _undisturbed():
                    results = future.result()
                held[at].popleft()
                yield from results
        except BrokenProcessPool:
            guilty = held[at].popleft() if held[at] else ()
            waiting.extendleft(tuple(chain(*queue)) for queue in held if queue)
            for unit in guilty:
                deaths[unit.id] += 1
                if deaths[unit.id] == TRIES:
                    yield died(unit, context)
                else:
                    suspects.append((unit,))
        finally:
            _stop(pools)


def _pool(context: PlanContext) -> ProcessPoolExecutor:
    """One process: it runs what it gets in that order, and keeps what releases share."""
    return ProcessPoolExecutor(
        1,
        # Not by fork: it copies locks that other threads hold, and CUDA does not survive it.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(context.spec, context.dataset.fingerprint, str(context.device)),
    )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait while a future is touched. An interrupt in between leaves it locked,
    and the pool's thread then waits for that lock forever (as in `concurrent.futures.wait`).

    The mask is for a process that starts in here: it starts with Ctrl-C blocked, as we handle it.
    It is not enough for this process, because any other thread may take the signal.
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


def _wait_for_start(pool: ProcessPoolExecutor, *, last: bool) -> None:
    """Raise `BrokenProcessPool` if no worker starts, and what to do if this was the last try."""
    try:
        done: SimpleQueue[Future[Any]] = SimpleQueue()
        with _undisturbed():
            pool.submit(_started).add_done_callback(done.put)
        future = _next(done)
        with _undisturbed():
            future.result()
    except BrokenProcessPool:
        if not last:
            raise
        raise ValueError(
            "worker processes cannot start; call this from a file under "
            'if __name__ == "__main__", or set workers = 1'
        ) from None


def _next(done: SimpleQueue[Future[T]]) -> Future[T]:
    """The next future that ended. On Windows, Ctrl-C comes only between two waits."""
    while True:
        with suppress(Empty):
            return done.get(timeout=1.0)


def _started() -> Any:
    """Return nothing; only a worker's response matters."""


def _stop(pools: Iterable[ProcessPoolExecutor]) -> None:
    """Cancel what waits and end the workers, so that Ctrl-C waits for no running experiment."""
    processes = [process for pool in pools for process in (pool._processes or {}).values()]
    for pool in pools:
        pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(5)
        process.kill()  # if the user's code blocks; no effect if it has ended


def _start_worker(
    spec: DataSpec,
    fingerprint: str,
    device: str,
) -> None:
    """One torch thread; ignore Ctrl-C (the parent handles it); die with the parent."""
    global _bench, _fingerprint
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None:
        watch = threading.Thread(
            target=_die_with,
            args=(parent.sentinel,),
            daemon=True,
        )
        watch.start()
    _bench = PlanContext(spec, device)
    _fingerprint = fingerprint


def _die_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)  # `sys.exit` would end this thread alone


def _work(group: tuple[Unit, ...], pictures: bool) -> list[Result]:
    assert _bench is not None  # set by _start_worker
    with warnings.catch_warnings(action="ignore"):  # the parent has shown the data's
        _ = _bench.dataset
    if _bench.dataset.fingerprint != _fingerprint:
        raise ValueError(
            f"data source {_bench.spec.source!r} changed while the audit ran; "
            "restore it, or start again in another folder"
        )
    return _run_group(group, _bench, pictures)
