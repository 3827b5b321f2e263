"""The base of attacks: functions of an observation and a generator only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from leakbound import check
from leakbound.attacks.idle import beside_decay
from leakbound.attacks.pace import is_over
from leakbound.attacks.rounding import spacing
from leakbound.client import call, example_gradients, forward, simulate
from leakbound.core import (
    DefenseProtocol,
    NotApplicable,
    Observation,
    Reconstruction,
    Task,
    Unit,
)
from leakbound.domains import TableDomain, TokenDomain
from leakbound.domains.known import KnownValues
from leakbound.losses import named
from leakbound.randomness import stream, uniform

__all__ = [
    "Attack",
    "BestOf",
    "ByNoise",
    "boxed",
    "domain_of",
    "each_row",
    "expected_rows",
    "outputs_of",
    "seen_task",
    "summed",
]


@dataclass(frozen=True, repr=False)
class Attack:
    """Base of all attacks: a frozen dataclass whose fields are its settings.

    `__call__` takes an observation and a generator. It may raise `NotApplicable`. It never sees the
    true inputs: it chooses restarts, steps and settings by its own objective.
    """

    def __init_subclass__(cls) -> None:
        # An inherited `many` would bypass a subclass's `__call__`: a subclass that defines only
        # `__call__` is called once for each observation.
        defined = vars(cls)
        if "__call__" in defined and "many" not in defined and cls.many is not Attack.many:
            cls.many = Attack.many  # type: ignore[method-assign]
            cls.at_once = Attack.at_once  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """List all settings; settings marked `unlisted` appear only if changed."""
        shown = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if not (f.metadata.get("unlisted") and getattr(self, f.name) == f.default)
        ]
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        """Reconstruct the private inputs from the observation."""
        raise TypeError(f"{type(self).__name__} defines no __call__(observation, generator)")

    def why_not(self, defense: DefenseProtocol, examples: int) -> str | None:
        """Why the attack cannot apply to a batch of this size under this defense; None if it may.

        Known without a round, so an audit can leave these pairs out of its plan.
        """
        return None

    @property
    def at_once(self) -> int:
        """How many observations one call of `many` handles efficiently."""
        return 1

    @property
    def step_trainings(self) -> int:
        """The most simulated trainings, with derivatives, before a search sees that its time is
        over; 0 if nothing is simulated. That of an attack inside counts, too.
        """
        return max((attack.step_trainings for attack in self._inside()), default=0)

    @property
    def explains(self) -> bool:
        """Whether its examples are meant to explain the update; if not, they only hold facts."""
        return True

    @property
    def across_rounds(self) -> bool:
        """Whether it uses what the same clients sent before. No bound of one update limits it then.
        That of an attack inside counts, too.
        """
        return any(attack.across_rounds for attack in self._inside())

    def _inside(self) -> list[Attack]:
        return [value for value in vars(self).values() if isinstance(value, Attack)]

    def many(
        self,
        observations: Sequence[Observation],
        generators: Sequence[torch.Generator],
    ) -> list[Reconstruction]:
        """Attack each observation with its own generator; answers do not depend on the others.

        An attack may share computation between observations. An answer then equals that of a single
        call up to rounding, which a search may amplify. Raises what a failing call raises.

        Guarantees:
            On one torch thread, `many([a, b])` is `many([a]) + many([b])`.
        """
        return [self(o, g) for o, g in zip(observations, generators, strict=True)]

    def plant(self, task: Task) -> Task:
        """Return the model a malicious server sends; honest attacks return the task unchanged."""
        return task

    def plant_each(self, task: Task, clients: int) -> list[Task]:
        """The model for each client, of one layout. A server may send different ones: secure
        aggregation sums the updates without a check that they are of one model.
        """
        return [self.plant(task)] * clients


@dataclass(frozen=True)
class BestOf(Attack):
    """Restart an attack and keep the answer with the lowest objective.

    Args:
        attack: the attack to repeat; all starts draw from the same generator in turn.
        restarts: the largest number of starts.
        enough: stop at the first answer with an objective of at most this; None runs every start.
    """

    attack: Attack
    restarts: int = 3
    enough: float | None = None

    def __post_init__(self) -> None:
        check.count(restarts=self.restarts)
        check.non_negative(enough=self.enough or 0.0)

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        best = self.attack(observation, generator)
        for _ in range(1, self.restarts):
            if self._done(best) or is_over():
                break
            best = min(best, self.attack(observation, generator), key=rank)
        return best

    @property
    def at_once(self) -> int:
        return self.attack.at_once

    def many(
        self,
        observations: Sequence[Observation],
        generators: Sequence[torch.Generator],
    ) -> list[Reconstruction]:
        best = self.attack.many(observations, generators)
        for _ in range(1, self.restarts):
            live = [i for i, answer in enumerate(best) if not self._done(answer)]
            arguments = [observations[i] for i in live], [generators[i] for i in live]
            for i, answer in zip(live, self.attack.many(*arguments), strict=True):
                best[i] = min(best[i], answer, key=rank)
        return best

    def _done(self, answer: Reconstruction) -> bool:
        low = self.enough is not None and answer.objective <= self.enough
        return low and answer.problem is None

    def plant(self, task: Task) -> Task:
        return self.attack.plant(task)

    def plant_each(self, task: Task, clients: int) -> list[Task]:
        return self.attack.plant_each(task, clients)


@dataclass(frozen=True)
class ByNoise(Attack):
    """Choose between two attacks by the share of noise in the update.

    Args:
        clean: the attack for a smaller share of noise, and for unknown noise.
        noisy: the attack for a larger share.
        share: the share of noise in the update's energy from which `noisy` is used.
    """

    clean: Attack
    noisy: Attack
    share: float = 0.3

    def __post_init__(self) -> None:
        check.fraction(share=self.share)

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        return (self.noisy if self._hides(observation) else self.clean)(observation, generator)

    def _hides(self, observation: Observation) -> bool:
        return observation.noise_share >= self.share

    @property
    def at_once(self) -> int:
        return max(self.clean.at_once, self.noisy.at_once)

    def many(
        self,
        observations: Sequence[Observation],
        generators: Sequence[torch.Generator],
    ) -> list[Reconstruction]:
        answers: dict[int, Reconstruction] = {}
        hidden = [self._hides(observation) for observation in observations]
        for attack, kind in ((self.clean, False), (self.noisy, True)):
            mine = [i for i, hides in enumerate(hidden) if hides is kind]
            arguments = [observations[i] for i in mine], [generators[i] for i in mine]
            answers |= zip(mine, attack.many(*arguments), strict=True)
        return [answers[i] for i in range(len(observations))]

    def plant(self, task: Task) -> Task:
        return self.noisy.plant(self.clean.plant(task))

    def plant_each(self, task: Task, clients: int) -> list[Task]:
        clean = self.clean.plant_each(task, clients)
        return [self.noisy.plant_each(planted, clients)[i] for i, planted in enumerate(clean)]


def rank(answer: Reconstruction) -> tuple[bool, float]:
    """A sort key, lower for better answers: no problem first, then a low objective."""
    value = answer.objective
    # NaN compares as False with every number: it would win or lose by its place.
    return (answer.problem is not None, value if value == value else float("inf"))


def seen_task(observation: Observation) -> Task:
    """The task that the attacker simulates, with what a known defense lets the update reveal."""
    if observation.defense is None:
        return observation.task
    return observation.defense.infer(observation.task, observation.update)


def outputs_of(observation: Observation) -> int | None:
    """How many classes the model tells apart, which may be more than the data has; None: none.

    Searches for labels run over these, because the client's loss does.
    """
    task = observation.task
    loss = named(task.loss)
    if task.label_range is None or not loss.has_classes or loss.of_inputs:
        return task.label_range
    output = probed(observation)
    width = int(output.shape[1]) if output.ndim > 1 else 1
    return max(width, task.label_range) if loss.outputs(width) == width else task.label_range


def probed(observation: Observation) -> Tensor:
    """The model's output for inputs that have nothing to do with the client's."""
    task = observation.task
    domain = task.domain
    # Batch norm in training mode may refuse a single example.
    size = 2 if task.coupled else 1
    probe = torch.full((size, *observation.input_shape), sum(task.input_range) / 2)
    if domain is not None and not domain.dtype.is_floating_point:
        probe = domain.start(size, stream(0, "outputs")).to(task.parameters.device)
    with torch.no_grad():
        return forward(task, probe.to(task.parameters) if probe.is_floating_point() else probe)


def uniform_inputs(
    task: Task,
    shape: Sequence[int],
    generator: torch.Generator,
) -> Tensor:
    """Inputs of this shape (N, *S) whose values are uniform in the input range."""
    low, high = task.input_range
    return low + (high - low) * uniform(shape, generator, like=task.parameters)


class _Reached(Exception):
    """The module was called; what follows it is not computed."""


def seen_by(
    task: Task,
    names: Iterable[str],
    inputs: Tensor,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    whole: bool = True,
) -> dict[str, Tensor | None]:
    """What modules get for inputs (B, *S), by name in the order of their calls: the first argument.

    None for a module that is called several times, or without a tensor. Unless `whole`, the run
    ends at the first call. `tensors`: of the model; default: the task's.
    """
    inputs_by_name: dict[str, Tensor | None] = {}

    def watch(name: str) -> Any:
        def note(
            _: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> None:
            first = args[0] if args else next(iter(kwargs.values()), None)
            once = isinstance(first, Tensor) and name not in inputs_by_name
            # A copy: later layers may overwrite their input.
            inputs_by_name[name] = first.clone() if isinstance(first, Tensor) and once else None
            if not whole:
                raise _Reached

        return note

    with ExitStack() as hooks:
        for name in names:
            module = task.model.get_submodule(name)
            hook = module.register_forward_pre_hook(watch(name), with_kwargs=True)
            hooks.enter_context(hook)
        with suppress(_Reached):
            call(
                task,
                task.tensors() if tensors is None else tensors,
                inputs,
                twice=False,
            )
    return inputs_by_name


def modules_of(
    task: Task,
    kinds: type[nn.Module] | tuple[type[nn.Module], ...],
) -> dict[str, Any]:
    """The model's modules of these kinds, by name."""
    return {
        name: module for name, module in task.model.named_modules() if isinstance(module, kinds)
    }


def parameter(layer: str, what: str) -> str:
    """The name of a layer's parameter; the layer "" is the model itself.

    Example:
        >>> parameter("head", "bias"), parameter("", "weight")
        ('head.bias', 'weight')
    """
    return f"{layer}.{what}" if layer else what


def summed(observation: Observation) -> Observation:
    """The observation for attacks that need a sum of gradients: without known weight decay of SGD.

    Raises:
        NotApplicable: the client trains by another optimizer than SGD, or as `idle.beside_decay`.
    """
    task = seen_task(observation)
    if task.plan.optimizer != "sgd":
        raise NotApplicable(
            f"the client trains by {task.plan.rule}, whose update is no sum of "
            "gradients: what it leaks is undecided, not protected"
        )
    return beside_decay(observation, task)


def expected_rows(
    observation: Observation,
    task: Task,
    inputs: Tensor,
    labels: Tensor,
) -> Tensor:
    """The rows (R, P) that a candidate would have sent, by the client's own functions."""
    if observation.defense is None and observation.update.unit is Unit.EXAMPLE:
        return example_gradients(task, inputs, labels)
    return simulate(
        task,
        inputs,
        labels,
        cohort=observation.cohort,
        defense=observation.defense,
    )


Kind = TypeVar("Kind", TableDomain, TokenDomain)


def domain_of(task: Task, kind: type[Kind]) -> Kind:
    """The task's domain, for an attack that is for this kind of example alone.

    Raises:
        NotApplicable: it is another kind, or not known.
    """
    if not isinstance(task.domain, kind):
        raise NotApplicable(f"the inputs are not {kind.what}")
    return task.domain


class Answer(NamedTuple):
    """Inputs (count, *S) for one row of an update, what is wrong with them, and the objective."""

    inputs: Tensor
    problem: str | None = None
    objective: float = math.nan


@dataclass(frozen=True, eq=False)
class SentRow:
    """One row of an update: the sum over `count` examples, as the attacker's `task` explains it."""

    observation: Observation
    task: Task
    at: int
    count: int

    @property
    def values(self) -> Tensor:
        """(P,)."""
        return self.observation.update.rows[self.at]

    @property
    def variance(self) -> Tensor | None:
        """(P,) of the noise, if it is known."""
        noise = self.observation.noise_variance
        return None if noise is None else noise[self.at]

    def rounding(self, part: Callable[[Tensor], Tensor]) -> Tensor | None:
        """The standard deviation that the rounding of stored weights leaves in a part of the row;
        None if it is no difference of such weights. `part` takes it from a flat vector (P,).
        """
        plan = self.task.plan
        sent = self.observation.sent
        unit = spacing(
            plan.learning_rate * part(self.values),
            part(self.task.parameters),
            None if sent is None else part(sent[self.at]),
        )
        # Every local step rounds the weights once.
        return None if unit is None else unit * math.sqrt(plan.steps / 12) / plan.learning_rate

    @property
    def is_zero(self) -> bool:
        """Whether there is no gradient at all."""
        return not self.values.any()

    @property
    def places(self) -> slice:
        """Where the row's examples stand among those of the observation."""
        update = self.observation.update
        first = 0 if update.unit is Unit.COHORT else sum(update.examples[: self.at])
        return slice(first, first + self.count)

    @property
    def known(self) -> KnownValues | None:
        """The parts of the row's examples that the attacker has from elsewhere, on the CPU."""
        known = self.observation.known
        return None if known is None else replace(known, values=known.values[self.places].cpu())


def rows_of(observation: Observation, task: Task) -> list[SentRow]:
    """The rows of the update; that of a cohort is of all its examples."""
    update = observation.update
    counts = (observation.examples,) if update.unit is Unit.COHORT else update.examples
    return [SentRow(observation, task, at, count) for at, count in enumerate(counts)]


def each_row(
    observation: Observation,
    task: Task,
    one: Callable[[SentRow], Answer],
) -> Reconstruction:
    """The answers for every row of the update, together.

    Labels of several examples are left out: their order is another one. So are labels of places.
    """
    update = observation.update
    if not update.rows.isfinite().all():
        raise NotApplicable("the update is not finite")
    answers = [one(row) for row in rows_of(observation, task)]
    problems = dict.fromkeys(answer.problem for answer in answers if answer.problem)
    labels = observation.labels
    if observation.examples > 1 or (labels is not None and labels.ndim > 1):
        labels = None
    examples = torch.cat([answer.inputs for answer in answers]).to(update.rows.device)
    # Token numbers stay whole.
    examples = examples.to(update.rows.dtype) if examples.is_floating_point() else examples
    worst = max(answer.objective for answer in answers)
    return Reconstruction(examples, labels, worst, (), "; ".join(problems) or None)


def boxed(inputs: Tensor, task: Task) -> Tensor:
    """Move the candidate into the task's input range; NaN becomes the middle of the range.

    If the task's domain is known, onto its valid examples.
    """
    if task.domain is not None:
        return task.domain.project(inputs)
    low, high = task.input_range
    middle = (low + high) / 2
    return torch.nan_to_num(inputs, nan=middle, posinf=high, neginf=low).clamp(low, high)
