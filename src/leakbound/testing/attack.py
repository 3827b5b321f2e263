"""The contract of an attack: a function of its observation and one generator, without the truth."""

from __future__ import annotations

import gc
import inspect
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
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
from leakbound.defenses import Chain, Defense, NoDefense
from leakbound.pairing import pair
from leakbound.protocol import play
from leakbound.randomness import normal, permutation, stream
from leakbound.registry import parse
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
DEFENDED = (
    "clip,clip_norm=0.1",
    "dp_sgd,clip_norm=1,noise_multiplier=0.5",
    "gaussian_noise,noise_std=0.01",
    "gradient_dropout,rate=0.5",
    "hidden_dropout,rate=0.5",
    "laplace_noise,noise_std=0.1",
    "local_aggregation,steps=3,learning_rate=0.1",
    "local_optimal_noise,noise_std=0.1",
    "magnitude_pruning,rate=0.7",
    "mixup",
    "noisy_copy,noise_std=0.1",
    "optimal_noise,noise_std=0.1",
    "optimal_pruning,rate=0.5",
    "pri_prune",
    "quantization,bits=4",
    "secure_aggregation,clients=2",
    "sign",
    "soteria,rate=0.4",
    "top_k,rate=0.9",
    "whitened_dp_sgd,clip_norm=1,noise_multiplier=0.5",
    "withhold",
)
"""One of every kind of update: clipped, noisy, sparse, coarse, of other weights or steps, a sum."""
KNOWLEDGE = ((False, True), (True, False), (True, True), (False, False))
"""Whether labels and defense are known."""
MALICIOUS = ThreatModel(server=Server.MALICIOUS)
UNDEFENDED = NoDefense()


def check_attack(
    attack: Attack,
    *,
    task: Task | None = None,
    batch: Batch | None = None,
) -> None:
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
    _AttackContract(attack, *given_or_small(task, batch)).check()


class _AttackContract:
    """An attack, and the task and the batch that it is checked on."""

    def __init__(
        self,
        attack: Attack,
        task: Task,
        batch: Batch,
    ) -> None:
        self.attack = attack
        self.name = repr(attack)
        self.task = task
        self.batch = batch

    def check(self) -> None:
        """All checks, in order."""
        self._check_signature()
        check_settings(self.attack, self.name)
        self._check_plant()
        observation = self._seen([self.batch])
        unchanged = self._unchanged(observation)
        if self._attempt(observation, "attack") is None:
            return
        unchanged.check(self.name)
        self._check_pure(observation)
        self._check_many()
        self._check_zero(observation)
        self._check_blind()
        self._check_chance(observation)
        undefended = ["none"] * len(KNOWLEDGE)
        for name, knows in zip([*undefended, *DEFENDED], cycle(KNOWLEDGE), strict=False):
            defense = parse("defense", name)
            self._check_knowledge(defense, ThreatModel(*knows, Server.MALICIOUS))
            self._check_seen_task(defense)

    def _other_batch(self, seed: int) -> Batch:
        return small_batch(self.task, self.batch, seed=seed)

    def _seen(
        self,
        batches: Sequence[Batch],
        defense: Defense = UNDEFENDED,
        threat: ThreatModel = MALICIOUS,
    ) -> Observation:
        """What a malicious server sees of clients; the attack may change their model."""
        sources = [stream(0, "contract", "clients", i) for i in range(len(batches) + 1)]
        played = play(
            self.task,
            batches,
            defense,
            sources,
            threat=threat,
            attack=self.attack,
        )
        return played.observation

    def _defended(
        self,
        defense: Chain,
        threat: ThreatModel,
    ) -> Observation | None:
        """What the server sees of clients under a defense; None if it refuses the task."""
        batches = [self._other_batch(i) for i in range(defense.cohort_size)]
        try:
            return self._seen(batches, defense, threat)
        except (NotApplicable, ValueError):
            return None

    def _unchanged(self, observation: Observation) -> Unchanged:
        update = observation.update
        written = update.rows, update.mask, observation.labels
        return Unchanged(observation.task, self.batch, *written)

    def _attempt(
        self,
        observation: Observation,
        source: str,
        where: str = "",
        mend: str = "",
    ) -> Reconstruction | None:
        """The answer, checked; None if the attack gives a reason why it does not apply."""
        try:
            answer = self.attack(observation, stream(0, "contract", source))
        except NotApplicable as none:
            stated = isinstance(none.reason, str) and none.reason.strip()
            require(stated, f"{self.name} is not applicable without a reason")
            return None
        except Exception as error:
            raise ContractError(
                f"{self.name} raises {type(error).__name__}: {error}{where}; answer, or raise "
                f"NotApplicable(reason){mend}"
            ) from error
        _check_answer(answer, observation, f"{self.name}{where}")
        return answer

    def _answer(
        self,
        observation: Observation,
        generator: torch.Generator,
        truth: Batch | None = None,
    ) -> Reconstruction | None:
        """The answer while a truth is in this frame and visible to the garbage collector."""
        in_reach = [truth, None if truth is None else truth.inputs]
        try:
            answer = self.attack(observation, generator)
        except NotApplicable:
            answer = None
        # Used after the call, so that nothing drops them before.
        assert truth is in_reach[0]
        return answer

    def _check_signature(self) -> None:
        takes = {
            "__call__": "observation, generator",
            "many": "observations, generators",
            "plant": "task",
        }
        for method, names in takes.items():
            parameters = inspect.signature(getattr(self.attack, method)).parameters.values()
            plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
            require(
                plain and ", ".join(p.name for p in parameters) == names,
                f"{method} of {self.name} takes ({', '.join(map(str, parameters))}); it must take "
                f"exactly ({names})",
            )

    def _check_plant(self) -> None:
        unchanged = Unchanged(self.task, self.batch)
        planted = self.attack.plant(self.task)
        unchanged.check(f"plant of {self.name}")
        require(isinstance(planted, Task), f"plant of {self.name} returns no Task")
        again = self.attack.plant(self.task)
        require(
            same_bits(planted.parameters, again.parameters),
            f"plant of {self.name} gives other weights the second time",
        )

    def _check_knowledge(self, defense: Chain, threat: ThreatModel) -> None:
        """An answer or `NotApplicable`, whatever the defense sends and the attacker knows."""
        observation = self._defended(defense, threat)
        if observation is None:
            return
        labels, known = (
            "known" if known else "unknown" for known in (threat.labels_known, threat.defense_known)
        )
        self._attempt(
            observation,
            "defended",
            f" of an update under {defense!r}, with labels {labels} and defense {known}",
            ". Without labels, observation.labels is None: "
            "leakbound.attacks.labels.infer_labels infers them; observation.defense is then None, "
            "too",
        )

    def _check_seen_task(self, defense: Chain) -> None:
        """What a known defense reveals of the client's model or steps is asked for, if it matters.

        It matters if the answer changes where the task already is what the defense reveals.
        """
        observation = self._defended(defense, MALICIOUS)
        if observation is None:
            return
        shown = defense.infer(observation.task, observation.update)
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

        watched = replace(observation, defense=Watched(defense.links))
        answer = self._answer(watched, stream(0, "contract", "seen"))
        if asked:  # it may compare both tasks: whether they differ says what is known
            return
        revealed = replace(observation, task=shown, defense=Known(defense.links))
        require(
            _same_answers(answer, self._answer(revealed, stream(0, "contract", "seen"))),
            f"{self.name} simulates observation.task under {defense!r}, which is not what the "
            "client trained; use leakbound.attacks.base.seen_task(observation)",
        )

    def _check_pure(self, observation: Observation) -> None:
        """Same generator, same bits, for any global random state, and nothing is written to."""
        unchanged = self._unchanged(observation)
        kept = _global_states()
        answers = []
        try:
            for seed in (1, 2):
                torch.manual_seed(seed)
                np.random.seed(seed)  # noqa: NPY002  (the global state is what is looked at)
                random.seed(seed)
                before = _global_states()
                answers.append(self.attack(observation, stream(0, "contract", "attack")))
                after = _global_states()
                same = torch.equal(before[0], after[0]) and repr(before[1:]) == repr(after[1:])
                require(same, f"{self.name} draws from a global random state; use the generator")
        finally:
            torch.set_rng_state(kept[0])
            np.random.set_state(kept[1])  # noqa: NPY002
            random.setstate(kept[2])
        unchanged.check(self.name)
        same = _same_answers(*answers)
        require(same, f"{self.name} gives two answers to one observation and generator")

    def _check_many(self) -> None:
        def generators() -> list[torch.Generator]:
            return [stream(i, "contract", "many") for i in range(2)]

        seen = [self._seen([self._other_batch(i)]) for i in range(2)]
        if None in map(self._answer, seen, generators()):
            return
        together = self.attack.many(seen, generators())
        require(
            len(together) == 2,
            f"many of {self.name} gives {len(together)} answers to 2 observations",
        )
        for observation, answer in zip(seen, together, strict=True):
            _check_answer(answer, observation, self.name)
        alone = [self.attack.many([o], [g])[0] for o, g in zip(seen, generators(), strict=True)]
        same = all(map(_same_answers, alone, together))
        require(same, f"many of {self.name} gives other answers than many of one observation each")

    def _check_zero(self, observation: Observation) -> None:
        rows = torch.zeros_like(observation.update.rows)
        zero = replace(observation, update=replace(observation.update, rows=rows))
        answer = self._answer(zero, stream(0, "contract", "zero"))
        if answer is not None:
            _check_answer(answer, zero, self.name)
            require(
                answer.problem, f"{self.name} reports no problem with an update that is all zero"
            )

    def _check_blind(self) -> None:
        """The answer is the same while the truth is gone, in reach, or replaced by another."""
        hidden = self._seen([self._other_batch(3)])
        # No truth of an earlier check may be left for the first answer.
        gc.collect()
        first = self._answer(hidden, stream(0, "contract", "blind"))
        for seed in (3, 4, 5):
            truth = self._other_batch(seed)
            require(
                _same_answers(first, self._answer(hidden, stream(0, "contract", "blind"), truth)),
                f"{self.name} answers differently while a batch is in its stack frames or in "
                "memory: it looks for the truth outside of its observation",
            )

    def _check_chance(self, observation: Observation) -> None:
        """Given noise, the answer is not closer to a truth than to other images beyond chance."""
        batch = self.batch

        def other(k: int, i: int) -> Batch:
            return self._other_batch(1000 + CANDIDATES * k + i)

        # The same histogram, which an attack with a prior may know.
        def shuffled(k: int, i: int) -> Batch:
            if i == 0:
                return batch
            order = permutation(batch.inputs[0].numel(), stream(k, "contract", "order", i))
            return Batch(batch.inputs.flatten(1)[:, order].view_as(batch.inputs), batch.labels)

        for candidate in (other, shuffled):
            hits = asked = 0
            for k in range(REPEATS):
                truth = candidate(k, 0)
                noise = _noise(observation, k)
                answer = self._answer(noise, stream(k, "contract", "chance"), truth)
                if answer is None:
                    continue
                error, *others = (_error(candidate(k, i), answer) for i in range(CANDIDATES))
                asked = asked + 1
                hits = hits + (error < min(others))
            require(
                # The chance of at least as many hits.
                scipy.stats.binom.sf(hits - 1, max(asked, 1), 1 / CANDIDATES) > UNLIKELY,
                f"{self.name} was shown noise, but its answer was closest to the truth {hits} of "
                f"{asked} times among {CANDIDATES} images: it knows the truth from another source",
            )


def _check_answer(
    answer: Reconstruction,
    observation: Observation,
    name: str,
) -> None:
    require(isinstance(answer, Reconstruction), f"{name} returns no Reconstruction")
    inputs = answer.inputs
    labels = answer.labels
    domain = observation.task.domain
    require(
        isinstance(inputs, Tensor) and inputs.layout == torch.strided and not inputs.is_meta,
        f"{name} returns inputs that are no dense tensor",
    )
    codes = domain is not None and not domain.dtype.is_floating_point
    real = not inputs.is_complex() and inputs.is_floating_point() != codes
    wanted = "whole numbers" if codes else "floats"
    require(real, f"{name} returns inputs of type {inputs.dtype}; they must be {wanted}")
    is_tensor = labels is None or isinstance(labels, Tensor)
    require(is_tensor, f"{name} returns labels that are no tensor")
    require(isinstance(answer.objective, float), f"{name} returns an objective that is no float")
    is_text = answer.problem is None or isinstance(answer.problem, str)
    require(is_text, f"{name} returns a problem that is no sentence")
    asked = observation.batch_shape
    shape = tuple(inputs.shape)
    require(shape == asked, f"{name} returns inputs of shape {shape}; the observation asks {asked}")
    require(inputs.isfinite().all(), f"{name} returns inputs that are not finite")
    low, high = observation.task.input_range
    inside = ((inputs >= low) & (inputs <= high)).all()
    require(inside, f"{name} returns inputs outside the input range {low, high}")
    require(not inputs.requires_grad, f"{name} returns inputs that still require gradients")
    if labels is None:
        return
    fits = labels.ndim > 0 and len(labels) == len(inputs)
    require(fits, f"{name} returns labels that are not one for each input")
    classes = outputs_of(observation)
    if classes is not None and labels.ndim == 1:
        whole = not labels.is_floating_point() and labels.dtype != torch.bool
        require(whole, f"{name} returns labels of type {labels.dtype}; they must be class numbers")
        known = ((labels >= 0) & (labels < classes)).all()
        require(known, f"{name} returns labels outside 0 to {classes - 1}")


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
