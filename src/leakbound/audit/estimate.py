"""Estimate the duration of an audit: counted steps, times the measured time of one gradient."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from leakbound import client
from leakbound.attacks.pace import planned
from leakbound.audit.attacked_round import OTHERS
from leakbound.audit.context import TRAINED_ON, PlanContext, one_thread
from leakbound.audit.plan import Experiment, ModelSpec, Unit, build_attack, build_defense
from leakbound.registry import Spec

EVALUATION = 3.0
"""Gradients that one search step costs: autograd takes 9 forwards where a gradient takes 3."""
OVERHEAD = 0.05
"""Seconds per unit besides its gradients."""
PRIOR = 0.05
"""The share of all work that the estimate counts as when finished units correct it."""


def predicted_seconds(
    units: Sequence[Unit],
    context: PlanContext,
    seed: int,
) -> tuple[dict[str, float], str]:
    """Seconds on one core by unit, and a sentence that says what they rest on.

    It counts the steps of units and measures one gradient of each model and batch size, on the
    context's device. It does not count bounds, closed forms or searches that stop early. The first
    unit of a model that is trained first has that training's time. `seed` names the weights.
    """
    slowest = (0.0, "")
    steps = 0
    seconds = dict[str, float]()
    trained = set[tuple[ModelSpec, int]]()

    @cache
    def measured(model: ModelSpec, size: int) -> float:
        nonlocal slowest
        taken = _gradient(context, model, size, seed)
        words = f"one gradient of {model.name} at batch size {size} took {taken:.2g} s here"
        slowest = max(slowest, (taken, words))
        return taken

    def gradient(model: ModelSpec, size: int) -> float:
        return measured(replace(model, train_steps=0), size)

    @cache
    def evaluations(attack: Spec) -> int:
        try:
            return planned(build_attack(attack))
        except Exception:  # its record will report the reason
            return 0

    for unit in units:
        if isinstance(unit, Experiment):
            count = evaluations(unit.attack)
            steps += count
            size = unit.batch_size * build_defense(unit.defense).cohort_size
            one = gradient(unit.model, size) if count or unit.round else 0.0
            work = count * EVALUATION * one
            # The rounds before the attacked one, which other clients play, too.
            work += ((unit.round or 1) - 1) * (1 + OTHERS) * one
        else:
            spec = unit.utility
            work = spec.rounds * spec.clients * gradient(unit.model, spec.batch_size)
        if unit.model.train_steps and (unit.model, unit.seed) not in trained:
            trained.add((unit.model, unit.seed))
            work += unit.model.train_steps * gradient(unit.model, TRAINED_ON)
        seconds[unit.id] = OVERHEAD + work
    basis = f"{steps:,} steps of searches were counted, each as {EVALUATION:g} gradients"
    return seconds, "; ".join(filter(None, [basis, slowest[1]]))


def _gradient(
    context: PlanContext,
    model: ModelSpec,
    size: int,
    seed: int,
) -> float:
    """Seconds of one gradient; 0 if there is none, as the unit's record will report."""
    try:
        task = context.task(model, seed)
        batch = context.batches(size, 1, seed)[0]
        with one_thread():
            # The first call also pays for what happens once; only the second is timed.
            client.gradient(task, batch.inputs, batch.labels)
            began = time.perf_counter()
            # A number, as a GPU's tensor may not be ready yet.
            float(client.gradient(task, batch.inputs, batch.labels)[0])
            return time.perf_counter() - began
    except Exception:  # as above
        return 0.0


class Clock:
    def __init__(
        self,
        seconds: Mapping[str, float],
        basis: str,
        workers: int,
    ) -> None:
        self._seconds = dict(seconds)
        self.basis = basis
        self._workers = workers
        self._whole = self._rest = sum(self._seconds.values())
        self._began = time.monotonic()

    def finished(self, unit: str) -> None:
        self._rest -= self._seconds.pop(unit, 0.0)

    @property
    def left(self) -> float:
        rest = max(self._rest, 0.0)
        prior = PRIOR * self._whole
        done = self._whole - rest
        passed = time.monotonic() - self._began
        # Until a unit ends, the time that passed shows no pace.
        passed = passed if done else 0.0
        return rest * (prior / self._workers + passed) / max(prior + done, 1e-9)
