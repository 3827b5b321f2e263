"""Measure paper A's claims at a scale; finished parts are stored in the folder."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from leakbound import audit
from leakbound.audit.context import one_thread
from leakbound.audit.plan import Plan
from leakbound.registry import Spec
from leakbound_reproductions.kept import Parts, note_data
from leakbound_reproductions.optimal_defenses import (
    drawn,
    points,
    scatter,
    settings,
    theory,
    verdicts,
)
from leakbound_reproductions.optimal_defenses.points import Key, Point
from leakbound_reproductions.optimal_defenses.settings import FRESH, LOUD, OURS, SETTINGS, Setting
from leakbound_reproductions.outcome import Outcome, Tell

WORDS = {
    "naive": "errors, the paper's attack",
    "aware": "errors, attacks that know",
    "again": "errors, claim 0-3 again",
    "color": "errors on color images",
    "noise training": "trainings under noise",
    "pruning training": "trainings under pruning",
}


def reproduce(scale: str, folder: Path, *, workers: int, color: str, tell: Tell) -> Outcome:
    """Claims 0-1 to 0-6; see `leakbound reproduce`.

    Args:
        scale: a name of `SETTINGS`.
        folder: for the parts, audits and figures.
        workers: processes for attacks and trainings.
        color: a data source of color images, for what the paper shows on CIFAR-10.
        tell: called as the run goes on.
    """
    setting = SETTINGS[scale]
    plans = settings.plans(setting, color)
    found = {name: _audited(name, plan, folder, workers, tell) for name, plan in plans.items()}
    parts = Parts(folder / "parts")
    with one_thread():
        descents = _descents(plans["naive"], setting, folder, parts, tell)
        colored = _descents(plans["color"], setting, folder, parts, tell, "color-")
        tell("theory", 0, 1)
        proved = parts.once(
            "theory", partial(theory.measured, setting.models, 1000 * setting.draws)
        )
        tell("theory", 1, 1)
        fresh = _fresh(plans["naive"], setting, parts, tell)
    loud = descents[verdicts.noise(OURS, LOUD)]
    measured = verdicts.Measured(
        setting,
        found["naive"],
        _losses(descents),
        found["noise training"] | found["pruning training"],
        _noises(loud),
        proved,
        found.get("aware", {}),
        _sizes(plans["naive"]),
        found.get("again", {}),
        found["color"],
        _losses(colored),
        _noises(fresh),
    )
    return Outcome(
        verdicts.all_claims(measured),
        drawn.all_figures(measured, folder),
        _settings(setting, color),
    )


def _audited(name: str, plan: Plan, folder: Path, workers: int, tell: Tell) -> dict[Key, Point]:
    """The points of one audit, which continues where it was stopped."""
    own = folder / name.replace(" ", "-")

    def watch(now: audit.Progress) -> None:
        tell(WORDS[name], now.done, now.total)

    done = audit.audit(
        plan,
        own,
        workers=workers,
        pictures=name in drawn.GALLERIES,
        watch=watch,
        trainings_only="training" in name,
    )
    if done.failed:
        raise ValueError(f"{done.failed} units of {str(own)!r} failed; see records.jsonl there")
    return points.read(own)


def _descents(
    plan: Plan, setting: Setting, folder: Path, parts: Parts, tell: Tell, prefix: str = ""
) -> dict[Key, dict[str, Any]]:
    """Losses after a few steps on one batch, by defense and seed."""
    words = f"{prefix.replace('-', ' ')}losses after 5 steps"
    bench = audit.PlanContext(plan.data)
    found = {}
    note_data(folder, plan.data.source, bench.dataset)
    for number, links in enumerate(plan.defenses):
        tell(words, number, len(plan.defenses))
        spec = links[0]
        key = points.key_of(spec.name, spec.parameters)
        make = partial(_each, bench, plan, links, range(setting.seeds))
        found[key] = parts.once(f"descent-{prefix}{key.name}-{key.level:g}", make)
    tell(words, len(plan.defenses), len(plan.defenses))
    return found


def _fresh(plan: Plan, setting: Setting, parts: Parts, tell: Tell) -> dict[str, Any]:
    """The loudest optimal noise again, on the seeds of `again`."""
    if not setting.again:
        return {}
    words = "noise by layer, claim 0-5 again"
    tell(words, 0, 1)
    bench = audit.PlanContext(plan.data)
    (links,) = (
        links
        for links in plan.defenses
        if points.key_of(links[0].name, links[0].parameters) == verdicts.noise(OURS, LOUD)
    )
    seeds = range(FRESH, FRESH + setting.again)
    found: dict[str, Any] = parts.once(
        "descent-again",
        partial(_each, bench, plan, links, seeds),
    )
    tell(words, 1, 1)
    return found


def _noises(descents: dict[str, Any]) -> dict[int, dict[str, float]]:
    return {int(seed): one["noise"] for seed, one in descents.items()}


def _losses(descents: dict[Key, dict[str, Any]]) -> dict[Key, dict[int, float]]:
    return {key: {int(s): one["loss"] for s, one in own.items()} for key, own in descents.items()}


def _each(
    bench: audit.PlanContext, plan: Plan, links: tuple[Spec, ...], seeds: range
) -> dict[str, Any]:
    model = plan.models[0]
    return {str(s): asdict(scatter.descend(bench, model, links, s)) for s in seeds}


def _sizes(plan: Plan) -> dict[str, int]:
    """Parameters of each tensor of the model."""
    task = audit.PlanContext(plan.data).task(plan.models[0], 0)
    return {name: stop - start for name, _, start, stop in task.layout}


def _settings(setting: Setting, color: str) -> str:
    aware = "none at this scale"
    if setting.aware:
        aware = f"Inverting Gradients and law_evolution, {setting.aware} seeds"
    fresh = f"{setting.again} seeds from {FRESH} on"
    again = f"Claims 0-3 (errors) and 0-5 again: {fresh}. " if setting.again else ""
    return (
        "MNIST (5,000 images) and the paper's SimpleConvNet with LeakyReLU and random weights. "
        f"Figures 2, 3, 4, 12 and 13, of CIFAR-10 in the paper: color images ({color}, 32 x 32). "
        f"Errors: batches of {setting.batch_size}, Inverting Gradients as the paper "
        f"runs it (cosine distance, TV 1e-6, signed Adam at 0.2, labels known), {setting.steps} "
        f"steps, {setting.seeds} seeds. {again}Attacks that know the defense: {aware}. Losses: 5 "
        f"steps of Adam on one batch of 64 from 4 clients, {setting.seeds} seeds; "
        f"{setting.rounds} rounds with 4 clients x 16 images, {setting.trained} seeds. Optimal "
        "defenses are the local forms of algorithm 1 with eq. 7."
    )
