"""Plug-and-play matching and posterior sampling with a learned prior."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from leakbound import check
from leakbound._util import copies
from leakbound.attacks.base import Attack, boxed
from leakbound.attacks.blind import gray, public_images
from leakbound.attacks.matching.attack import GradientMatching
from leakbound.attacks.matching.engine import Evaluator, Search
from leakbound.attacks.matching.images import Images
from leakbound.attacks.matching.loop import MASKED, begin, unexplained
from leakbound.attacks.matching.objective import Objective
from leakbound.attacks.pace import tick
from leakbound.attacks.prior.denoiser import LEAST
from leakbound.attacks.prior.files import DenoisingPrior, prior_for
from leakbound.client import forward
from leakbound.core import NotApplicable, Observation, Reconstruction, Task
from leakbound.randomness import normal, stream

HARDNESS = (4.0, 8.0, 16.0, math.inf)
"""Of activations in successive quarters of a search: Softplus rises within 1 / hardness of the
standard deviation of its inputs. With a hard ReLU the likelihood jumps where a unit turns on, which
no gradient shows."""
FIRST = 0.4
"""Share of the steps before the first denoising."""
EXACT = 0.03
"""Noise assumed in an exact update, times the level: relative to the root mean square of what was
sent. So the prior decides at high levels, and the update at low ones."""
ALIKE = 20.0
"""Starts whose log-likelihoods differ by less than this share the answer: their average is closer
to the posterior mean than the best one is."""
NATS = 10.0
"""An answer with a gain in log-likelihood below this, over the prior alone, proves little."""
SIGMAS = 6.0
"""How far above its expectation the noise in an answer may be, in its standard deviations."""
FINAL = 0.5
"""Level of the last denoising, times the lowest one: the search has removed part of that noise."""
PROBE = 64
PROBES = 4
"""Public examples that show the inputs of activations; directions that measure the Jacobian."""


@dataclass(frozen=True)
class LearnedPrior(Attack):
    """Search what explains the update under its known noise and is likely under a learned prior.

    The prior is a small denoiser of public examples. The search starts from the likelihood alone.
    Then it alternates, at falling noise levels: denoise the candidate at this level, and take steps
    on the likelihood plus the distance to the denoised candidate (plug-and-play). With `renoise`,
    it adds fresh noise of the level before it denoises (decoupled annealing), so that several
    starts are samples of the posterior. The answer is the mean of all starts; starts of higher
    likelihood weigh more. The attack searches no labels.

    In the first three quarters of a search, ReLUs of the simulated client are smooth (Softplus).

    Args:
        prior: "" trains a denoiser on the attacker's public examples; a .safetensors file of
            `leakbound train-prior`; or the user's "package.module:build" (a plan that names it runs
            code). `build(input_shape=...)` returns `denoise(x, sigma)`.
        steps: evaluations of the likelihood, for each start.
        restarts: starts.
        levels: how often a candidate is denoised.
        highest, lowest: noise levels, in standard deviations of public examples; with the user's
            denoiser in quarters of the input range. Known noise so small that the update leaves
            less than `lowest` moves the lowest level down to what it leaves, but not below 0.01.
        reach: the candidate's allowed distance to the denoised one, in units of the level.
        renoise: noise added before it is denoised, in units of the level.
        learning_rate: Adam's.
        labels: "told" (inferred if they are not known) or "inferred".
        training: training steps if `prior` is "".

    Raises:
        NotApplicable: `prior` is "" and there are no public examples of the input's shape.

    Source: Venkatakrishnan et al. 2013 (plug-and-play); Zhang et al. 2024 (DAPS); Zhang et al. 2021
        (DPIR) for the schedule.

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> images = torch.rand(50, 1, 4, 4, generator=lb.stream(0, "public"))
        >>> public = lb.Batch(images, torch.arange(50) % 3)
        >>> batch = torch.linspace(0, 1, 16).reshape(1, 1, 4, 4), torch.tensor([2])
        >>> attack = LearnedPrior(steps=200, restarts=1, training=20)
        >>> lb.simulate(model, batch, public=public, attack=attack).scores[0] > 20
        True
    """

    prior: str = ""
    steps: int = 800
    restarts: int = 2
    levels: int = 12
    highest: float = 4.0
    lowest: float = 0.1
    reach: float = 1.0
    renoise: float = 0.0
    learning_rate: float = 0.1
    labels: str = "told"
    training: int = 800

    @property
    def step_trainings(self) -> int:
        """The slope's size is probed before the first step."""
        return PROBES

    def __post_init__(self) -> None:
        check.count(
            restarts=self.restarts,
            levels=self.levels,
            training=self.training,
        )
        check.positive(
            highest=self.highest,
            lowest=self.lowest,
            reach=self.reach,
        )
        check.non_negative(renoise=self.renoise)
        check.one_of(["told", "inferred"], labels=self.labels)
        if self.lowest > self.highest:
            raise ValueError(
                f"lowest is {self.lowest} and highest {self.highest}; give a lower `lowest`"
            )
        self._settings()

    def _settings(self) -> GradientMatching:
        return GradientMatching(
            distance="euclidean",
            steps=self.steps,
            learning_rate=self.learning_rate,
            labels=self.labels,
        )

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        objective = Objective.of(self._settings(), observation)
        if objective.blank:
            return gray(observation)
        if not observation.update.rows.isfinite().all():
            raise NotApplicable("the update is not finite")
        prior = prior_for(
            self.prior,
            observation,
            generator,
            steps=self.training,
        )
        chains = [_Chain(self, objective, prior, generator) for _ in range(self.restarts)]
        for chain in chains:
            chain.run()
        nats = torch.tensor([chain.nats for chain in chains], dtype=torch.float64)
        # Finite: infinity minus infinity is NaN in a softmax.
        weights = torch.softmax(-nats.nan_to_num(nan=torch.inf).clamp_max(1e300) / ALIKE, 0)
        mean = sum(w * c.answer.double() for w, c in zip(weights, chains, strict=True))
        assert isinstance(mean, Tensor)  # there is a chain
        best = chains[int(weights.argmax())]
        images = boxed(prior.natural(mean.to(best.answer)), observation.task)
        return Reconstruction(
            images, best.labels, best.nats, tuple(best.trace), best.problem(images)
        )


class Standardized(Images):
    """Images as a function of standardized ones, which are searched."""

    def __init__(self, prior: DenoisingPrior, start: Tensor) -> None:
        self.prior = prior
        self.start = start.requires_grad_()
        self.variables = [self.start]

    def __call__(self) -> Tensor:
        return self.prior.natural(self.start)


@dataclass(eq=False)
class _Chain:
    """One start: a candidate, and the likelihood at the present hardness of activations."""

    attack: LearnedPrior
    objective: Objective
    prior: DenoisingPrior
    generator: torch.Generator
    trace: list[float] = field(default_factory=list)
    evaluators: dict[float, Evaluator] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.objective.observation.batch_shape
        like = self.objective.seen
        self.images = Standardized(
            self.prior,
            normal(shape, self.generator, like=like),
        )
        self.labels = self._search(math.inf).labels
        self.answer = self.images.start.detach().clone()
        self.sigma = self.attack.highest

    @cached_property
    def known(self) -> float | None:
        """Variance of the noise in a coordinate of the objective with weight 1; None: no noise."""
        weights = self.objective.weights
        known = self.objective.observation.noise_variance
        if self.objective.whitener is not None:
            return 1.0
        if known is None or not (known > 0).any():
            return None
        scaled = known if weights is None else known * weights.double().square()
        return float(scaled[scaled > 0].median())

    @cached_property
    def energy(self) -> float:
        """Mean square of what was sent."""
        sent = self.objective.seen[self.objective.seen != 0].double()
        return float(sent.square().mean())

    def variance(self, sigma: float) -> float:
        return self.known or (EXACT * sigma) ** 2 * self.energy

    @cached_property
    def seen(self) -> int:
        """How many coordinates were seen."""
        weights = self.objective.weights
        return self.objective.seen.numel() if weights is None else int((weights > 0).sum())

    def run(self) -> None:
        attack = self.attack
        u = self.images.start
        first = max(1, round(FIRST * attack.steps))
        each = max(1, (attack.steps - first) // attack.levels)
        with torch.no_grad():
            u.copy_(self._denoised(attack.highest * u, attack.highest))
        self._descend(first, u.detach().clone(), attack.highest, 1.5 * attack.highest, 0.0)
        for level in range(attack.levels):
            if level:
                ratio = self._lowest() / self.sigma
                self.sigma *= min(1.0, ratio) ** (1 / (attack.levels - level))
            sigma = self.sigma
            fresh = attack.renoise * sigma * normal(u.shape, self.generator, like=u)
            anchor = self._denoised(u.detach() + fresh, sigma)
            with torch.no_grad():
                u.copy_(anchor)
            self._descend(each, anchor, sigma, attack.reach * sigma, (level + 1) / attack.levels)
        self.answer = u.detach().clone()
        if self.known is not None:
            self.answer = self._denoised(self.answer, FINAL * self.sigma)

    def _lowest(self) -> float:
        """The lowest level: at most the standard deviation that the update alone leaves.

        That is the noise's over the root mean square of the Jacobian's columns at the candidate.
        """
        most = self.attack.lowest
        if self.known is None or most <= LEAST:
            return most
        source = stream(0, "probes")
        weights = self.objective.weights
        rows = self.objective.seen_of(self.objective.rows(self.images(), self.labels))
        seen = rows if weights is None else rows * weights
        steep = 0.0
        for _ in range(PROBES):
            along = (seen * normal(seen.shape, source, like=seen)).sum()
            (slope,) = torch.autograd.grad(
                along,
                self.images.start,
                retain_graph=True,
            )
            steep += float(slope.double().square().mean()) / PROBES
        alone = math.sqrt(self.known / steep) if steep > 0 else math.inf
        return min(most, max(LEAST, alone))

    def _denoised(self, x: Tensor, sigma: float) -> Tensor:
        labels = self.labels
        classes = labels if labels.ndim == 1 and not labels.is_floating_point() else None
        return self.prior.denoise(x, sigma, classes)

    def _descend(
        self,
        steps: int,
        anchor: Tensor,
        sigma: float,
        reach: float,
        done: float,
    ) -> None:
        """Adam on the likelihood plus the distance to the anchor; its rate falls to 0."""
        u = self.images.start
        variance = self.variance(sigma)
        hardness = HARDNESS[min(len(HARDNESS) - 1, int(done * len(HARDNESS)))]
        # Kept: levels of one hardness share the softened model and its engine.
        if hardness not in self.evaluators:
            self.evaluators[hardness] = Evaluator([self._search(hardness)])
        evaluator = self.evaluators[hardness]
        rate = min(self.attack.learning_rate, 0.1 * reach)
        mean = torch.zeros_like(anchor)
        square = torch.zeros_like(anchor)
        for step in range(1, steps + 1):
            if tick():
                break
            evaluator.evaluate()
            with torch.no_grad():
                assert u.grad is not None
                slope = u.grad / (2 * variance) + (u - anchor) / reach**2
                mean.lerp_(slope, 0.1)
                square.lerp_(slope.square(), 0.01)
                size = (square / (1 - 0.99**step)).sqrt().add_(1e-30)
                u.sub_(mean / (1 - 0.9**step) / size, alpha=rate * (1 - (step - 1) / steps))
        self.trace.append(float(evaluator.searches[0].match))

    def _search(self, hardness: float) -> Search:
        """The search of this candidate in a client with activations of this hardness."""
        task = self.objective.task
        if hardness < math.inf:
            public = public_images(self.objective.observation)
            probe = self.images() if public is None else public[:PROBE]
            task = softened(task, probe.detach().to(task.parameters), hardness)
        objective = replace(self.objective, task=task)
        settings = self.attack._settings()
        return begin(settings, objective, self.generator, images=self.images)

    @cached_property
    def nats(self) -> float:
        """The negative log-likelihood of the answer, up to a constant."""
        return self._nats(self.prior.natural(self.answer))

    def _nats(self, images: Tensor) -> float:
        rows = self.objective.rows(images, self.labels)
        return float(self.objective.match(rows).detach()) / (2 * self.variance(self.attack.lowest))

    def problem(self, images: Tensor) -> str | None:
        """Why the answer is no evidence; None if no sign of failure shows."""
        nats = self._nats(images)
        noise = self.objective.noise_share
        if not math.isfinite(nats):
            return "not finite: the likelihood was never a number"
        if not noise:
            left = unexplained(self.objective, images, self.labels)
            if left > MASKED:
                return (
                    "objective did not fall far enough: the answer leaves "
                    f"{100 * left:.2g}% of the update unexplained"
                )
            return None
        alone = self._denoised(torch.zeros_like(images), self.attack.highest)
        gained = self._nats(self.prior.natural(alone)) - nats
        if gained < NATS:
            return f"too much noise: it is {noise:.0%} of the update, and a match proves little"
        # Of pure noise, -log p is n / 2 on average, with standard deviation sqrt(n / 2).
        excess = (nats - self.seen / 2) / math.sqrt(self.seen / 2)
        if excess > SIGMAS:
            return (
                f"objective did not fall far enough: what the answer leaves of the update exceeds "
                f"its noise by {excess:.0f} standard deviations"
            )
        return None


def softened(
    task: Task,
    probe: Tensor,
    hardness: float,
) -> Task:
    """The task with Softplus in place of ReLU and LeakyReLU modules, as hard for each one's inputs
    (of examples `probe`).
    """
    model = copies.duplicate(task.model)
    rectifiers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ReLU | nn.LeakyReLU)]
    spread: dict[str, float] = {}

    def measure(name: str) -> Any:
        def look(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            spread[name] = float(args[0].detach().double().std())

        return look

    for name, module in rectifiers:
        module.register_forward_pre_hook(measure(name))
    with torch.no_grad():
        forward(replace(task, model=model), probe)
    model = copies.duplicate(task.model)  # without hooks
    for name, _ in rectifiers:
        if spread.get(name, 0.0) > 0:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, nn.Softplus(hardness / spread[name]))
    return replace(task, model=model)
