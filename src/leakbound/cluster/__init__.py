"""Run a plan's units on a Ray cluster: many machines, the same records. Needs the extra `ray`.

Only this package imports Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from functools import partial

from leakbound.audit.context import PlanContext
from leakbound.audit.experiment import Result, died
from leakbound.audit.folder import Runner
from leakbound.audit.plan import Plan, Unit, units_left
from leakbound.cluster.connection import connected
from leakbound.cluster.dispatch import dispatch

__all__ = ["engine", "run"]


def run(
    plan: Plan,
    done: Iterable[str] = (),
    *,
    workers: int = 1,
    pictures: bool = True,
    context: PlanContext | None = None,
    started: Callable[[Unit], None] = lambda unit: None,
    address: str | None = None,
) -> Generator[Result, None, None]:
    """Run the units of a plan that are not done yet on a Ray cluster; else as
    `leakbound.audit.run`.

    A unit whose worker dies is tried on another one. A unit that ends three workers, the last time
    with nothing else running, is recorded as failed. The workers end with the generator, and so
    does the Ray that it started. A cluster at an address, or one that this process is already
    connected to, keeps running.

    `workers` have one CPU each; 0 takes all CPUs of the cluster. `address` is "auto" or host:port
    of a running cluster's head; None starts a Ray here. A node whose versions, machine, data or
    code differ from this process's is rejected, since these change records.
    """
    units = units_left(plan, done)
    context = context or PlanContext(plan.data)
    if context.device.type != "cpu":
        raise ValueError(f"device is {str(context.device)!r}, but workers on Ray compute on CPUs")
    if not units:
        return
    with connected(address, workers) as count:
        from leakbound.cluster.workers import Actors

        pool = Actors(plan, context, pictures, min(count, len(units)))
        try:
            yield from dispatch(units, pool, started, partial(died, context=context))
        finally:
            pool.close()


def engine(address: str | None = None) -> Runner:
    """`run` at an address, in the form that `leakbound.audit.audit` takes."""
    return partial(run, address=address)
