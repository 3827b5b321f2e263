"""The contract of an attack: a function of its observation and one generator, without the truth."""

from __future__ import annotations

import gc
import inspect
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor

from leakbound.attacks import Attack
from leakbound.attacks.base import outputs_of
from leakbound.core import (
    Batch,
    NotApplicable,
    Observation,
    Reconstruction,
    Server,
    Task,
    ThreatModel,
    Update,
)
from leakbound.defenses import (
    Chain,
    Clip,
    Defense,
    DpSgd,
    GaussianNoise,
    GradientDropout,
    HiddenDropout,
    LaplaceNoise,
    LocalAggregation,
    LocalOptimalNoise,
    MagnitudePruning,
    Mixup,
    NoDefense,
    NoisyCopy,
    OptimalNoise,
    OptimalPruning,
    PriPrune,
    Quantization,
    SecureAggregation,
    Sign,
    Soteria,
    TopK,
    WhitenedDpSgd,
    Withhold,
    chain,
)
from leakbound.pairing import pair
from leakbound.protocol import play
from leakbound.randomness import normal, permutation, stream
from leakbound.testing.common import (
    ContractError,
    Unchanged,
    check_settings,
    given_or_small,
    require,
    same_bits,
    small_batch,
)

CANDIDATES = 8
REPEATS = 8
UNLIKELY = 1e-4
"""Number of images that include the truth, number of trials, and the chance level that is no luck.
"""
DEFENDED: tuple[Defense, ...] = (
    Clip(0.1),
    DpSgd(1.0, 0.5),
    GaussianNoise(0.01),
    GradientDropout(0.5),
    HiddenDropout(0.5),
    LaplaceNoise(0.1),
    LocalAggregation(3, 0.1),
    LocalOptimalNoise(0.1),
    MagnitudePruning(0.7),
    Mixup(),
    NoisyCopy(0.1),
    OptimalNoise(0.1),
    OptimalPruning(0.5),
    PriPrune(),
    Quantization(4),
    SecureAggregation(2),
    Sign(),
    Soteria(0.4),
    TopK(0.9),
    WhitenedDpSgd(1.0, 0.5),
    Withhold(),
)
"""One of every kind of update: clipped, noisy, sparse, coarse, of other weights or steps, a sum."""
KNOWLEDGE = ((False, True), (True, False), (True, True), (False, False))
"""Whether labels and defense are known."""


def check_attack(attack: Attack, *, task: Task | None = None, batch: Batch | None = None) -> None:
    """Check that an attack keeps its contract, above all that it never sees the truth.

    The check covers:

    - signature and settings, `many` and `plant`;
    - purity, determinism and global random states;
    - the answer's shape and range, and a problem for an update of zeros;
    - the same answer for any truth in reach of its stack frames or the garbage collector;
    - no better than chance at finding a truth that the update does not contain;
    - an answer or `NotApplicable` for every kind of defended update, labels and defense known or
      not;
    - under a known defense that changes the client's model or steps, the task that the update shows
      (`leakbound.attacks.base.seen_task`) and not the one that the server sent.

    `ContractError` states the first violation. An attack that raises `NotApplicable` for this task
    is only checked for its signature.

    Args:
        attack: with few steps, since it is called about sixty times.
        task: by default a small perceptron on 6x6 images with 3 classes.
        batch: needed with your own task; a cheating attack may hold it. Random pixels are the fair
            choice: an attack with a prior knows something of natural images.
    """
    require(
        isinstance(attack, Attack),
        f"{attack!r} is no attack; give an instance of a class derived from "
        "leakbound.attacks.Attack",
    )
    task, batch = given_or_small(task, batch)
    name = repr(attack)
    _check_signature(attack, name)
    check_settings(attack, name)
    _check_plant(attack, task, batch, name)
    observation = _observed(attack, task, batch)
    unchanged = _unchanged(observation, batch)
    try:
        answer = attack(observation, stream(0, "contract", "attack"))
    except NotApplicable as none:
        _check_reason(none, name)
        return
    except Exception as error:
        raise ContractError(
            f"{name} raises {type(error).__name__}: {error}; answer, or raise NotApplicable(reason)"
        ) from error
    unchanged.check(name)
    _check_answer(answer, observation, name)
    _check_pure(attack, observation, batch, name)
    _check_many(attack, task, batch, name)
    _check_zero(attack, observation, name)
    _check_blind(attack, task, batch, name)
    _check_chance(attack, observation, batch, name)
    for labels_known, defense_known in KNOWLEDGE:
        threat = ThreatModel(labels_known, defense_known, Server.MALICIOUS)
        _check_knowledge(attack, task, batch, NoDefense(), threat, name)
    for number, defense in enumerate(DEFENDED):
        labels_known, defense_known = KNOWLEDGE[number % len(KNOWLEDGE)]
        threat = ThreatModel(labels_known, defense_known, Server.MALICIOUS)
        _check_knowledge(attack, task, batch, defense, threat, name)
        _check_seen_task(attack, task, batch, defense, name)


def _check_signature(attack: Attack, name: str) -> None:
    wanted = {"__call__": "observation, generator", "many": "observations, generators"}
    for method, names in {**wanted, "plant": "task"}.items():
        given = inspect.signature(getattr(attack, method)).parameters.values()
        plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in given)
        require(
            plain and ", ".join(p.name for p in given) == names,
            f"{method} of {name} takes ({', '.join(map(str, given))}); it must take exactly "
            f"({names})",
        )


def _check_plant(attack: Attack, task: Task, batch: Batch, name: str) -> None:
    unchanged = Unchanged(task, batch)
    planted = attack.plant(task)
    unchanged.check(f"plant of {name}")
    require(isinstance(planted, Task), f"plant of {name} returns no Task")
    require(
        same_bits(planted.parameters, attack.plant(task).parameters),
        f"plant of {name} gives other weights the second time",
    )


def _observed(attack: Attack, task: Task, batch: Batch) -> Observation:
    """What a malicious server sees of an undefended client; the attack may change the model."""
    threat = ThreatModel(server=Server.MALICIOUS)
    sources = [stream(0, "contract", "observe", i) for i in range(2)]
    return play(task, [batch], NoDefense(), sources, threat=threat, attack=attack).observation


def _defended(
    attack: Attack, task: Task, batch: Batch, defense: Defense, threat: ThreatModel
) -> Observation | None:
    """What the server sees of a client under a defense; None if the defense refuses the task."""
    whole = chain(defense)
    batches = [small_batch(task, batch, seed=i) for i in range(whole.cohort_size)]
    sources = [stream(0, "contract", "defended", i) for i in range(len(batches) + 1)]
    try:
        return play(task, batches, whole, sources, threat=threat, attack=attack).observation
    except (NotApplicable, ValueError):
        return None


def _check_knowledge(
    attack: Attack, task: Task, batch: Batch, defense: Defense, threat: ThreatModel, name: str
) -> None:
    """An answer or `NotApplicable`, whatever the defense sends and the attacker knows."""
    observation = _defended(attack, task, batch, defense, threat)
    if observation is None:
        return
    labels, defended = (
        "known" if known else "unknown" for known in (threat.labels_known, threat.defense_known)
    )
    where = f"of an update under {defense!r}, with labels {labels} and defense {defended}"
    try:
        answer = attack(observation, stream(0, "contract", "defended"))
    except NotApplicable as none:
        _check_reason(none, name)
        return
    except Exception as error:
        raise ContractError(
            f"{name} raises {type(error).__name__}: {error} {where}; answer, or raise "
            "NotApplicable(reason). Without labels, observation.labels is None: "
            "leakbound.attacks.labels.infer_labels infers them; observation.defense is then None, "
            "too"
        ) from error
    _check_answer(answer, observation, f"{name} {where}")


def _check_seen_task(attack: Attack, task: Task, batch: Batch, defense: Defense, name: str) -> None:
    """What a known defense reveals of the client's model or steps is asked for, if it matters.

    It matters if the answer changes where the task already is what the defense reveals.
    """
    threat = ThreatModel(server=Server.MALICIOUS)
    observation = _defended(attack, task, batch, defense, threat)
    if observation is None:
        return
    whole = chain(defense)
    shown = whole.infer(observation.task, observation.update)
    if shown is observation.task:
        return
    asked: list[bool] = []

    class Watched(Chain):
        def infer(self, task: Task, update: Update) -> Task:
            asked.append(True)
            return super().infer(task, update)

    class Known(Chain):
        def infer(self, task: Task, update: Update) -> Task:
            return task

    watched = replace(observation, defense=Watched(whole.links))
    answer = _answer(attack, watched, stream(0, "contract", "seen"))
    if asked:  # it may compare both tasks: whether they differ says what is known
        return
    given = replace(observation, task=shown, defense=Known(whole.links))
    other = _answer(attack, given, stream(0, "contract", "seen"))
    require(
        _same_answers(answer, other),
        f"{name} simulates observation.task under {defense!r}, which is not what the client "
        "trained; use leakbound.attacks.base.seen_task(observation)",
    )


def _unchanged(observation: Observation, batch: Batch) -> Unchanged:
    update = observation.update
    return Unchanged(observation.task, batch, update.rows, update.mask, observation.labels)


def _check_reason(none: NotApplicable, name: str) -> None:
    given = isinstance(none.reason, str) and bool(none.reason.strip())
    require(given, f"{name} is not applicable without a reason")


def _check_answer(answer: Reconstruction, observation: Observation, name: str) -> None:
    require(isinstance(answer, Reconstruction), f"{name} returns no Reconstruction")
    _check_types(answer, observation, name)
    shape = observation.batch_shape
    found = tuple(answer.inputs.shape)
    require(found == shape, f"{name} returns inputs of shape {found}; the observation asks {shape}")
    require(bool(answer.inputs.isfinite().all()), f"{name} returns inputs that are not finite")
    low, high = observation.task.input_range
    inside = bool(((answer.inputs >= low) & (answer.inputs <= high)).all())
    require(inside, f"{name} returns inputs outside the input range {low, high}")
    require(not answer.inputs.requires_grad, f"{name} returns inputs that still require gradients")
    labels = answer.labels
    if labels is None:
        return
    fits = labels.ndim > 0 and len(labels) == shape[0]
    require(fits, f"{name} returns labels that are not one for each input")
    classes = outputs_of(observation)
    if classes is not None and labels.ndim == 1:
        whole = not labels.is_floating_point() and labels.dtype != torch.bool
        require(whole, f"{name} returns labels of type {labels.dtype}; they must be class numbers")
        known = bool(((labels >= 0) & (labels < classes)).all())
        require(known, f"{name} returns labels outside 0 to {classes - 1}")


def _check_types(answer: Reconstruction, observation: Observation, name: str) -> None:
    inputs = answer.inputs
    domain = observation.task.domain
    require(
        isinstance(inputs, Tensor) and inputs.layout == torch.strided and not inputs.is_meta,
        f"{name} returns inputs that are no dense tensor",
    )
    codes = domain is not None and not domain.dtype.is_floating_point
    real = not inputs.is_complex() and inputs.is_floating_point() != codes
    wanted = "whole numbers" if codes else "floats"
    require(real, f"{name} returns inputs of type {inputs.dtype}; they must be {wanted}")
    labels = answer.labels
    require(
        labels is None or isinstance(labels, Tensor), f"{name} returns labels that are no tensor"
    )
    require(isinstance(answer.objective, float), f"{name} returns an objective that is no float")
    said = answer.problem is None or isinstance(answer.problem, str)
    require(said, f"{name} returns a problem that is no sentence")


def _check_pure(attack: Attack, observation: Observation, batch: Batch, name: str) -> None:
    """Same generator, same bits, for any global random state, and nothing is written to."""
    unchanged = _unchanged(observation, batch)
    kept = _global_states()
    answers = []
    try:
        for seed in (1, 2):
            torch.manual_seed(seed)
            np.random.seed(seed)  # noqa: NPY002  (the global state is what is looked at)
            random.seed(seed)
            before = _global_states()
            answers.append(attack(observation, stream(0, "contract", "attack")))
            after = _global_states()
            same = torch.equal(before[0], after[0]) and repr(before[1:]) == repr(after[1:])
            require(same, f"{name} draws from a global random state; use the generator")
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002
        random.setstate(kept[2])
    unchanged.check(name)
    same = _same_answers(*answers)
    require(same, f"{name} gives two answers to one observation and generator")


def _check_many(attack: Attack, task: Task, batch: Batch, name: str) -> None:
    def generators() -> list[torch.Generator]:
        return [stream(i, "contract", "many") for i in range(2)]

    seen = [_observed(attack, task, small_batch(task, batch, seed=i)) for i in range(2)]
    if any(_answer(attack, o, g) is None for o, g in zip(seen, generators(), strict=True)):
        return
    together = attack.many(seen, generators())
    require(len(together) == 2, f"many of {name} gives {len(together)} answers to 2 observations")
    for observation, answer in zip(seen, together, strict=True):
        _check_answer(answer, observation, name)
    alone = [attack.many([o], [g])[0] for o, g in zip(seen, generators(), strict=True)]
    same = all(map(_same_answers, alone, together))
    require(same, f"many of {name} gives other answers than many of one observation each")


def _check_zero(attack: Attack, observation: Observation, name: str) -> None:
    rows = torch.zeros_like(observation.update.rows)
    zero = replace(observation, update=replace(observation.update, rows=rows))
    answer = _answer(attack, zero, stream(0, "contract", "zero"))
    if answer is not None:
        _check_answer(answer, zero, name)
        require(bool(answer.problem), f"{name} reports no problem with an update that is all zero")


def _check_blind(attack: Attack, task: Task, batch: Batch, name: str) -> None:
    """The answer is the same while the truth is gone, in reach, or replaced by another."""
    hidden = _observed(attack, task, small_batch(task, batch, seed=3))
    # No truth of an earlier check may be left for the first answer.
    gc.collect()
    answers = [_answer(attack, hidden, stream(0, "contract", "blind"))]
    for seed in (3, 4, 5):
        truth = small_batch(task, batch, seed=seed)
        answers.append(_beside(attack, hidden, stream(0, "contract", "blind"), truth))
    for answer in answers[1:]:
        require(
            _same_answers(answers[0], answer),
            f"{name} answers differently while a batch is in its stack frames or in memory: it "
            "looks for the truth outside of its observation",
        )


def _check_chance(attack: Attack, observation: Observation, batch: Batch, name: str) -> None:
    """Given noise, the answer is not closer to a truth than to other images beyond chance."""
    task = observation.task

    def other(k: int, i: int) -> Batch:
        return small_batch(task, batch, seed=1000 + CANDIDATES * k + i)

    # The same histogram, which an attack with a prior may know.
    def shuffled(k: int, i: int) -> Batch:
        order = permutation(batch.inputs[0].numel(), stream(k, "contract", "order", i))
        return Batch(batch.inputs.flatten(1)[:, order].view_as(batch.inputs), batch.labels)

    kinds: list[tuple[Callable[[int], Batch], Callable[[int, int], Batch]]] = [
        (lambda k: other(k, 0), other),
        (lambda k: batch, shuffled),
    ]
    for truth_of, distractor in kinds:
        hits = asked = 0
        for k in range(REPEATS):
            noise = _noise(observation, k)
            answer = _beside(attack, noise, stream(k, "contract", "chance"), truth_of(k))
            if answer is None:
                continue
            errors = [_error(truth_of(k), answer)]
            errors += [_error(distractor(k, i), answer) for i in range(1, CANDIDATES)]
            asked = asked + 1
            hits = hits + (errors[0] < min(errors[1:]))
        require(
            # The chance of at least as many hits.
            scipy.stats.binom.sf(hits - 1, max(asked, 1), 1 / CANDIDATES) > UNLIKELY,
            f"{name} was shown noise, but its answer was closest to the truth {hits} of {asked} "
            f"times among {CANDIDATES} images: it knows the truth from another source",
        )


def _noise(observation: Observation, seed: int) -> Observation:
    """The same observation with noise of each tensor's size instead of the update."""
    rows = observation.update.rows
    noise = normal(rows.shape, stream(seed, "contract", "noise"), like=rows)
    for _, _, start, stop in observation.task.layout:
        size = rows[:, start:stop].square().mean().sqrt()
        noise[:, start:stop] *= size.clamp_min(1e-3)
    return replace(observation, update=replace(observation.update, rows=noise))


def _error(truth: Batch, answer: Reconstruction) -> float:
    inputs = pair(truth, answer).inputs
    return float((inputs.double() - truth.inputs.double()).square().mean())


def _answer(
    attack: Attack, observation: Observation, generator: torch.Generator
) -> Reconstruction | None:
    try:
        return attack(observation, generator)
    except NotApplicable:
        return None


def _beside(
    attack: Attack, observation: Observation, generator: torch.Generator, truth: Batch
) -> Reconstruction | None:
    """The answer while a truth is in this frame and visible to the garbage collector."""
    batch = truth
    inputs = truth.inputs
    in_reach = [truth]
    answer = _answer(attack, observation, generator)
    # Used after the call, so that nothing drops them before.
    assert batch is in_reach[0]
    assert inputs is truth.inputs
    return answer


def _same_answers(a: Reconstruction | None, b: Reconstruction | None) -> bool:
    if a is None or b is None:
        return a is b
    return (
        same_bits(a.inputs, b.inputs)
        and same_bits(a.labels, b.labels)
        and repr(a.objective) == repr(b.objective)
        and a.problem == b.problem
    )


def _global_states() -> tuple[Tensor, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
