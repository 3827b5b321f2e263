"""Workers as actors of Ray, one CPU and one torch thread each."""

from __future__ import annotations

import os
import platform
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import torch

from leakbound._util import user_code
from leakbound.audit.context import PlanContext, named_code_of
from leakbound.audit.experiment import Result, run_experiment, run_training
from leakbound.audit.plan import Plan, TrainingUnit, Unit
from leakbound.audit.run_file import difference, facts
from leakbound.cluster.connection import one_line
from leakbound.cluster.dispatch import Died, Done, Ready

STARTS = 3
PATIENCE = 180.0
"""How many workers in turn may end before they are ready; seconds to wait for the first."""
_library: Any = ray  # some of it has no types
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Actors:
    def __init__(
        self,
        plan: Plan,
        context: PlanContext,
        pictures: bool,
        count: int,
    ) -> None:
        self._plan = plan
        self._pictures = pictures
        _import_code(plan)
        # of this process: a node must agree with them before it gets work
        self._facts = facts(plan, context)
        self._actors: dict[int, Any] = {}
        self._starting: dict[Any, int] = {}
        self._working: dict[Any, int] = {}
        self._born = 0
        self._stillborn = 0
        for _ in range(count):
            self._start()

    def submit(self, worker: int, unit: Unit) -> None:
        self._working[self._actors[worker].work.remote(unit)] = worker

    def wait(self) -> Ready | Done | Died:
        everything = [*self._working, *self._starting]
        nobody = len(self._starting) == len(self._actors)
        ready, _ = ray.wait(everything, timeout=PATIENCE if nobody else None)
        if not ready:
            free = _library.available_resources().get("CPU", 0)
            raise ValueError(
                f"no worker could start in {PATIENCE:.0f} seconds, {free:g} CPUs of the cluster "
                "are free; wait for free CPUs, or use another cluster"
            )
        reference = ready[0]
        starting = reference in self._starting
        worker = (self._starting if starting else self._working).pop(reference)
        try:
            answer = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise ValueError(f"a worker on Ray failed: {error.cause}") from None
        except (ray.exceptions.RayError, ray.exceptions.RaySystemError) as error:
            return self._bury(worker, starting, error)
        if not starting:
            return Done(worker, answer)
        node, its_facts = answer
        if (differs := difference(self._facts, its_facts)) is not None:
            what, where, here, there = differs
            raise ValueError(
                f"node {node} has {what} ({where} is {there} there and {here} here), so its "
                "records may differ; make them equal, or use only nodes that are equal"
            )
        self._stillborn = 0
        return Ready(worker)

    def close(self) -> None:
        for actor in self._actors.values():
            with suppress(Exception):  # it may have ended already
                ray.kill(actor)
        self._actors.clear()

    def _start(self) -> None:
        options = {"num_cpus": 1, "max_restarts": 0, "runtime_env": {"env_vars": ONE_THREAD}}
        actor: Any = ray.remote(Worker).options(**options).remote()
        self._actors[self._born] = actor
        begun = actor.begin.remote(self._plan, self._pictures, list(sys.path), str(Path.cwd()))
        self._starting[begun] = self._born
        self._born += 1

    def _bury(
        self,
        worker: int,
        starting: bool,
        error: Exception,
    ) -> Died:
        """Replace a worker that died; its other answers will not come."""
        self._stillborn += starting
        if self._stillborn >= STARTS:
            raise ValueError(f"workers on Ray cannot start: {one_line(error)}") from None
        with suppress(Exception):
            ray.kill(self._actors[worker])
        del self._actors[worker]
        self._working = {ref: one for ref, one in self._working.items() if one != worker}
        self._start()
        return Died(worker)


class Worker:
    def begin(
        self,
        plan: Plan,
        pictures: bool,
        path: list[str],
        folder: str,
    ) -> tuple[str, dict[str, Any]]:
        """Prepare for a plan; returns this node's name, and the facts on which records depend.

        `path` lists where the driver finds modules; folders that exist here too are searched last.
        Relative names start from `folder`, the driver's working directory, if it exists here.
        """
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch.set_num_threads(1)
        if Path(folder).is_dir():
            os.chdir(folder)
        here = [str(Path(entry).absolute()) for entry in path if Path(entry).exists()]
        sys.path += [entry for entry in here if entry not in sys.path]
        self._context = PlanContext(plan.data)
        self._pictures = pictures
        _import_code(plan)
        node = f"{platform.node()} ({_library.util.get_node_ip_address()})"
        return node, facts(plan, self._context)

    def work(self, unit: Unit) -> Result:
        if isinstance(unit, TrainingUnit):
            return run_training(unit, self._context)
        return run_experiment(unit, self._context, pictures=self._pictures)


def _import_code(plan: Plan) -> None:
    """Import the plan's own code: `facts` holds the digests of what is imported."""
    for name in named_code_of(plan):
        with suppress(ValueError):  # a missing module shows as a difference of `facts`
            user_code.find("code", name)
