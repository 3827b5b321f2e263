"""The contract of an attack: above all, that it never sees the truth."""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch
from scipy import stats

from leakbound.attacks.base import Attack
from leakbound.defenses import chain
from leakbound.pairing import pair, squared_distances
from leakbound.protocol import play
from leakbound.random import normal, stream
from leakbound.testing.common import (
    CHANCE,
    Unchanged,
    check_repr,
    check_settings,
    other_images,
    require,
    same_bits,
    small_batch,
    small_task,
)
from leakbound.types import Batch, NotApplicable, Observation, Reconstruction, Task

DISTRACTORS = 49
NOISES = 4


def check_attack(attack: Attack, *, task: Task | None = None, batch: Batch | None = None) -> None:
    """Raise `ContractError` unless the attack keeps its contract.

    Guarantees checked: two arguments; the same bits for the same observation and generator, with
    other truths planted around it; an answer of the observation's shape, finite and in range; no
    change of the observation, the model or the global random state; `many` equals one by one; a
    zero update is called a problem; an update without information gives no more than chance.

    Args:
        attack: the attack, with few steps: it runs about a dozen times.
        task: a model that it applies to; a small MLP otherwise.
        batch: the truth that a cheating attack might hold; random images otherwise.
    """
    if task is not None and batch is None:
        raise ValueError("batch is None; give a batch that fits your task")
    task = task or small_task()
    batch = batch or small_batch(task)
    check_settings(attack, repr(attack))
    check_repr(attack, type(attack).__name__)
    _two_arguments(attack)
    observation = _observe(attack, task, batch)
    unchanged = Unchanged(task, batch, observation.update.rows)
    try:
        first = _run(attack, observation)
    except NotApplicable as reason:
        require(bool(reason.reason), f"{attack!r} does not apply here and gives no reason")
        return
    _answer(attack, first, observation)
    _surroundings(attack, observation, first, batch)
    _no_traces(attack, observation, first)
    attack.plant(task)
    unchanged.check(repr(attack))
    _no_information(attack, observation, batch)
    _nothing_to_see(attack, observation)


def _observe(attack: Attack, task: Task, batch: Batch) -> Observation:
    sources = [stream(0, "contract", "round", i) for i in range(2)]
    return play(task, [batch], chain(), sources, attack=attack).observation


def _run(attack: Attack, observation: Observation, seed: int = 0) -> Reconstruction:
    return attack(observation, stream(seed, "contract", "attack"))


def _two_arguments(attack: Attack) -> None:
    parameters = list(inspect.signature(attack).parameters.values())
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    require(
        len(parameters) == 2 and len(plain) == 2,
        f"{attack!r} takes {[p.name for p in parameters]}: an attack takes an observation and a "
        "generator, and nothing else",
    )


def _answer(attack: Attack, answer: Reconstruction, observation: Observation) -> None:
    shape = tuple(answer.inputs.shape)
    require(
        shape == observation.batch_shape,
        f"{attack!r} answers shape {shape}, not {observation.batch_shape}",
    )
    require(bool(torch.isfinite(answer.inputs).all()), f"{attack!r} answers numbers not finite")
    low, high = observation.task.input_range
    inside = bool((answer.inputs >= low).all() and (answer.inputs <= high).all())
    require(inside, f"{attack!r} answers outside the input range [{low}, {high}]")


def _surroundings(
    attack: Attack, observation: Observation, first: Reconstruction, batch: Batch
) -> None:
    """Other truths in the callers' frames and in memory change nothing."""
    kept = []
    for name in ("decoy one", "decoy two"):
        truth = other_images(batch, name)
        kept.append(truth)
        answer = _run(attack, observation)
        require(
            same_bits(answer.inputs, first.inputs),
            f"{attack!r} answers otherwise when another batch lies around it: it looks at more "
            "than the observation, or draws from more than the generator",
        )


def _no_traces(attack: Attack, observation: Observation, first: Reconstruction) -> None:
    state = torch.get_rng_state()
    streams = [stream(0, "contract", "attack"), stream(1, "contract", "attack")]
    several = attack.many([observation, observation], streams)
    require(
        same_bits(several[0].inputs, first.inputs)
        and same_bits(several[1].inputs, _run(attack, observation, 1).inputs),
        f"{attack!r}.many answers otherwise than one by one",
    )
    require(
        same_bits(torch.get_rng_state(), state), f"{attack!r} draws from the global random state"
    )


def _nothing_to_see(attack: Attack, observation: Observation) -> None:
    silent = _seeing(observation, torch.zeros_like(observation.update.rows))
    try:
        answer = _run(attack, silent)
    except NotApplicable:
        return
    _answer(attack, answer, silent)
    require(
        answer.problem is not None,
        f"{attack!r} sees an update of zeros and reports no problem: its picture would pass for "
        "safety",
    )


def _no_information(attack: Attack, observation: Observation, batch: Batch) -> None:
    """From noise alone, the guess names the true image among others no more often than chance."""
    rows = observation.update.rows
    others = other_images(batch, "distractors", DISTRACTORS).inputs
    hits = 0
    for seed in range(NOISES):
        noise = normal(rows.shape, stream(seed, "contract", "no information"), like=rows)
        scaled = noise * rows.norm() / noise.norm()
        try:
            answer = _run(attack, _seeing(observation, scaled), seed)
        except NotApplicable:
            continue
        guess = pair(batch, answer).inputs
        own = (guess - batch.inputs).flatten(1).square().mean(1)
        nearest = squared_distances(guess, others).min(1).values.to(own)
        hits += int((own < nearest).sum())
    chance = 1 / (DISTRACTORS + 1)
    luck = float(stats.binom.sf(hits - 1, NOISES * batch.size, chance))
    require(
        luck > CHANCE,
        f"{attack!r} finds the true image in {hits} of {NOISES * batch.size} updates that hold no "
        "information: it sees the truth elsewhere",
    )


def _seeing(observation: Observation, rows: torch.Tensor) -> Observation:
    return replace(observation, update=replace(observation.update, rows=rows))
