"""Which experiments of a plan are computed together, and how.

Experiments of one attack, model and batch size differ in their weights, data and noise alone.
Records do not depend on the bundle: what `Attack.many` answers to one does not depend on the
others, and an experiment alone is a bundle of one. A bundle's records come together, so that a stop
may lose a few experiments' work instead of one's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from math import ceil

from leakbound.audit import experiment
from leakbound.audit import plan as plans
from leakbound.audit.context import PlanContext, one_thread
from leakbound.audit.experiment import Result
from leakbound.audit.plan import Unit
from leakbound.engines.choose import LARGEST
from leakbound.protocol import Round
from leakbound.types import Reconstruction


def bundles(
    units: Sequence[Unit], context: PlanContext, workers: int = 1
) -> list[tuple[Unit, ...]]:
    """All units, those together that gain from it, in the order of each bundle's first.

    A few experiments are spread over all workers.
    """
    groups: dict[object, list[Unit]] = {}
    for unit in units:
        groups.setdefault(_kind(unit, context), []).append(unit)
    found: list[tuple[Unit, ...]] = []
    for group in groups.values():
        most = min(_together(group[0]), max(1, ceil(len(group) / workers)))
        found += [tuple(group[at : at + most]) for at in range(0, len(group), most)]
    place = {unit.id: number for number, unit in enumerate(units)}
    return sorted(found, key=lambda bundle: place[bundle[0].id])


def run_experiments(
    given: Sequence[plans.Experiment], context: PlanContext, *, pictures: bool = True
) -> list[Result]:
    """As `run_experiment` for each, to the bit.

    Where the attack throws for one of them, each runs alone, so that its record says why.
    """

    def alone(unit: plans.Experiment) -> Result:
        return experiment.run_experiment(unit, context, pictures=pictures)

    if len(given) == 1:
        return [alone(given[0])]
    began = time.perf_counter()
    played = []
    with one_thread():
        for unit in given:
            with suppress(Exception):  # its own run says why
                played.append((unit, experiment.play_round(unit, context)))
        try:
            sources = [experiment.source_of(unit) for unit, _ in played]
            rounds = [round_ for _, round_ in played]
            answers = experiment.answers(given[0].attack, rounds, sources)
        except Exception:  # as above
            return [alone(unit) for unit in given]
        share = (time.perf_counter() - began) / len(given)
        results = {
            unit.id: experiment.assessed(
                unit,
                context,
                partial(_both, round_, answer),
                pictures,
                time.perf_counter() - share,
            )
            for (unit, round_), answer in zip(played, answers, strict=True)
        }
    return [results.get(unit.id) or alone(unit) for unit in given]


def _both(round_: Round, answer: Reconstruction) -> tuple[Round, Reconstruction]:
    return round_, answer


def _kind(unit: Unit, context: PlanContext) -> object:
    if not isinstance(unit, plans.Experiment) or _together(unit) == 1:
        return unit.id
    try:
        size = context.size(unit.model)
    except Exception:  # as above
        return unit.id
    if size is None or size > LARGEST:
        return unit.id
    return unit.attack, unit.model, unit.batch_size, unit.threat


def _together(unit: Unit) -> int:
    if not isinstance(unit, plans.Experiment):
        return 1
    try:
        return plans.build_attack(unit.attack).at_once
    except Exception:  # its record will say why
        return 1
