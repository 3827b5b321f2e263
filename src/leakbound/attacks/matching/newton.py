"""Gauss-Newton: second-order search of the inputs whose update is the one that was seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakbound import check
from leakbound.attacks.base import Attack, boxed, rank
from leakbound.attacks.blind import gray, public_examples
from leakbound.attacks.matching.attack import inverting_gradients
from leakbound.attacks.matching.loop import labels_of, unexplained_problem
from leakbound.attacks.matching.objective import Objective
from leakbound.attacks.matching.settings import MatchingSettings
from leakbound.attacks.pace import tick
from leakbound.core import Batch, NotApplicable, Observation, Reconstruction, Task
from leakbound.randomness import normal

ROUNDING = 1e-14
"""Share of the energy of an exact update that its rounding has, in float32."""
CLEAN = 1e-5
"""Share of noise up to which the last steps do without the prior's metric."""
LARGEST = 20_000_000
"""Numbers of public examples that the covariance is fitted to; of more, examples are left out."""
REST = 1e-3
"""Variance of what public examples do not show, in their mean variance."""
DAMPED = 10.0
EASED = 0.2
LEAST = 1e-9
"""How much the damping grows after a step that failed and falls after one that did not, and its
least value.
"""
# A step is tried at three lengths, with up to six dampings.
ATTEMPTS = 6
LENGTHS = (1.0, 0.5, 0.25)
RISE = 1.5
MEMORY = 4
"""A step may raise the objective up to this factor over the highest of the last few: where units
switch on or off, no descending path may lead to the solution.
"""
STALLED = 0.98
WAIT = 6
"""A search ends if the last steps did not bring the lowest objective below this share."""
SOLVED = 1e-8
"""A linear system is solved if the residual's squared norm fell by this."""


class Linearized:
    """A function at a point with its derivatives: J v and Jᵀ u, without computing J.

    J v is the derivative of Jᵀ u in u, so both come from graphs that are built once.

    Example:
        >>> at = Linearized(lambda x: x.square(), torch.tensor([1.0, 2.0]))
        >>> at.value.tolist(), at.push(torch.ones(2)).tolist(), at.pull(torch.ones(2)).tolist()
        ([1.0, 4.0], [2.0, 4.0], [2.0, 4.0])
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        at: Tensor,
    ) -> None:
        self._x = at.detach().clone().requires_grad_()
        with torch.enable_grad():
            self._rows = function(self._x)
            self._dual = torch.zeros_like(self._rows).requires_grad_()
            (self._back,) = torch.autograd.grad(
                self._rows, self._x, self._dual, create_graph=True, materialize_grads=True
            )

    @property
    def value(self) -> Tensor:
        return self._rows.detach()

    def push(self, v: Tensor) -> Tensor:
        """J v, in the shape of the value."""
        # A derivative of zero has no graph to differentiate again.
        if not self._back.requires_grad:
            return torch.zeros_like(self._dual)
        (moved,) = torch.autograd.grad(
            self._back,
            self._dual,
            v,
            retain_graph=True,
        )
        return moved

    def pull(self, u: Tensor) -> Tensor:
        """Jᵀ u, in the shape of the point."""
        (gradient,) = torch.autograd.grad(
            self._rows, self._x, u, retain_graph=True, materialize_grads=True
        )
        return gradient


@dataclass(frozen=True, eq=False)
class PublicGaussian:
    """Independent examples of mean `mean` (B, *S) and one covariance: V diag(extra) Vᵀ + rest."""

    mean: Tensor
    basis: Tensor
    extra: Tensor
    rest: float

    @staticmethod
    def of(
        observation: Observation,
        task: Task,
        labels: Tensor,
        known: bool,
    ) -> PublicGaussian:
        """Fitted to public examples, with the mean of each class; else the middle of the range."""
        public = public_examples(observation)
        like = task.parameters
        shape = observation.batch_shape
        if not known or public is None:
            low, high = task.input_range
            mean = like.new_full(shape, (low + high) / 2)
            none = like.new_empty(mean[0].numel(), 0), like.new_empty(0)
            # The variance of values that are uniform in the range.
            return PublicGaussian(mean, *none, (high - low) ** 2 / 12)
        inputs = public.inputs.to(like)
        step = math.ceil(inputs.numel() / LARGEST)
        flat = inputs[::step].flatten(1).double()
        # Scaled so that squared singular values are variances.
        flat = (flat - flat.mean(0)) / len(flat) ** 0.5
        _, size, basis = torch.linalg.svd(flat, full_matrices=False)
        rest = REST * max(float(size.square().sum()) / flat.shape[1], 1e-12)
        mean = _means(Batch(inputs, public.labels), labels)
        return PublicGaussian(mean, basis.T.to(like), size.square().to(like), rest)

    @property
    def flat(self) -> PublicGaussian:
        """The same mean with equal variances."""
        total = self.rest + float(self.extra.sum()) / len(self.basis)
        return replace(
            self,
            basis=self.basis[:, :0],
            extra=self.extra[:0],
            rest=total,
        )

    def covariance(self, x: Tensor) -> Tensor:
        return self._times(x, self.rest, self.extra)

    def root(self, x: Tensor) -> Tensor:
        return self._times(x, self.rest**0.5, (self.rest + self.extra).sqrt() - self.rest**0.5)

    def precision(self, x: Tensor) -> Tensor:
        return self._times(x, 1 / self.rest, 1 / (self.rest + self.extra) - 1 / self.rest)

    def draw(self, generator: torch.Generator) -> Tensor:
        """An example of the prior for each of the batch."""
        wide = normal(self.mean.shape, generator, like=self.mean) * self.rest**0.5
        few = normal(
            (len(self.mean), len(self.extra)),
            generator,
            like=self.mean,
        )
        common = (few * self.extra.sqrt() @ self.basis.T).view_as(self.mean)
        return torch.add(self.mean + wide, common)

    def _times(
        self,
        x: Tensor,
        rest: float,
        extra: Tensor,
    ) -> Tensor:
        flat = x.flatten(1)
        return (rest * flat + (flat @ self.basis * extra) @ self.basis.T).view_as(x)


@dataclass(frozen=True)
class GaussNewton(Attack):
    """Solve for the inputs: least squares of the whole update, by Gauss-Newton steps.

    A candidate's update minus the one seen is linearized, and the linear least-squares problem is
    solved by conjugate gradients, with Levenberg-Marquardt damping and the input range as bounds.
    Near a solution an error squares in every step, where gradient matching gains digits slowly; and
    the region from which a search converges is wider. The prior is a Gaussian around the mean of
    the public examples of the class. It is the metric of a step, so large, common structures come
    first. If the noise is known, it counts as in Bayes' rule, and the answer is the candidate of
    the highest posterior density.

    Args:
        steps: steps of a search.
        directions: conjugate-gradient iterations of a step, each two derivatives of the update.
        restarts: the largest number of starts: the prior's mean, the answer of gradient matching,
            then draws from the prior. An exact update that is explained needs no further one.
        matching: steps of that gradient matching; 0 for none.
        prior: "public", or "none" for a search from the middle of the input range.
        labels: "told" (inferred if they are not known) or "inferred".

    Assumptions: the update is differentiable in the inputs almost everywhere. Without a known
        defense, the update is known up to its length.

    Raises:
        NotApplicable: labels cannot be inferred; inputs are codes.

    Source: Levenberg 1944; Marquardt 1963; Steihaug 1983 (conjugate gradients within a step).

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> batch = torch.linspace(0, 1, 16).reshape(1, 1, 4, 4), torch.tensor([2])
        >>> lb.simulate(model, batch, attack=GaussNewton(steps=10)).scores[0] > 60
        True
    """

    steps: int = 30
    directions: int = 40
    restarts: int = 2
    matching: int = 500
    prior: str = "public"
    labels: str = "told"

    def __post_init__(self) -> None:
        check.count(
            steps=self.steps,
            directions=self.directions,
            restarts=self.restarts,
        )
        check.one_of(["public", "none"], prior=self.prior)
        check.one_of(["told", "inferred"], labels=self.labels)

    @property
    def step_trainings(self) -> int:
        """A step multiplies by the Jacobian and its transpose for each direction."""
        return self.directions

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        settings = MatchingSettings(distance="euclidean", labels=self.labels)
        objective = Objective.of(settings, observation)
        task = objective.task
        if objective.blank:
            return gray(observation)
        labels = labels_of(settings, observation, generator)
        if labels.requires_grad:
            raise NotApplicable("the labels cannot be inferred from the update; give them")
        prior = PublicGaussian.of(observation, task, labels, self.prior == "public")
        problem = _LeastSquares.of(objective, labels, prior)
        answers = list[Reconstruction]()
        for number in range(self.restarts):
            if number == 1 and self.matching:
                search = inverting_gradients(steps=self.matching)
                start = search(observation, generator).inputs
            else:
                start = prior.draw(generator) if number else prior.mean
            x = start.clamp(*task.input_range)
            trace = list[float]()
            for metric in problem.metrics:
                x, falls = problem.solve(x, metric, self)
                trace += falls
            failure = unexplained_problem(objective, x, labels)
            answers.append(Reconstruction(boxed(x, task), labels, trace[-1], tuple(trace), failure))
            if trace[-1] < SOLVED:
                break
        return min(answers, key=rank)

    def near(
        self,
        objective: Objective,
        labels: Tensor,
        start: Tensor,
    ) -> Tensor:
        """Where the search from a start ends, without further starts."""
        known = self.prior == "public"
        prior = PublicGaussian.of(objective.observation, objective.task, labels, known)
        problem = _LeastSquares.of(objective, labels, prior)
        if not len(prior.extra):
            problem = replace(problem, weight=0.0)  # gray is no knowledge
        return problem.solve(start, problem.metrics[-1], self)[0]


@dataclass(frozen=True, eq=False)
class _LeastSquares:
    """|rows(x) - seen|² + weight (x - mean)ᵀ C⁻¹ (x - mean), for an update of length 1."""

    rows: Callable[[Tensor], Tensor]
    seen: Tensor
    prior: PublicGaussian
    weight: float
    box: tuple[float, float]
    metrics: tuple[PublicGaussian, ...]

    @staticmethod
    def of(
        objective: Objective,
        labels: Tensor,
        prior: PublicGaussian,
    ) -> _LeastSquares:
        scale = objective.seen.new_ones(()) if objective.weights is None else objective.weights
        seen = objective.seen * scale
        length = seen.norm()
        known = objective.observation.threat.defense_known
        share = max(objective.noise_share, ROUNDING)

        def rows(x: Tensor) -> Tensor:
            sent = torch.mul(objective.seen_of(objective.rows(x, labels)), scale)
            if known:
                return sent / length
            fit = ((sent * seen).sum() / sent.square().sum().clamp_min(1e-30)).detach()
            return sent * (fit / length)

        count = int((scale != 0).sum()) if scale.ndim else seen.numel()
        metrics = (prior,) if share > CLEAN or not len(prior.extra) else (prior, prior.flat)
        box = objective.task.input_range
        return _LeastSquares(rows, seen / length, prior, share / max(count, 1), box, metrics)

    def value(self, x: Tensor) -> float:
        off = (self.rows(x.detach().requires_grad_()).detach() - self.seen).double()
        away = x - self.prior.mean
        penalty = (away * self.prior.precision(away)).double().sum()
        return float(off.square().sum() + self.weight * penalty)

    def solve(
        self,
        x: Tensor,
        metric: PublicGaussian,
        settings: GaussNewton,
    ) -> tuple[Tensor, list[float]]:
        """The last of the steps from x, and the objective after each."""
        value = self.value(x)
        damping = 1e-2
        trace = [value]
        best = (value, x)
        for _ in range(settings.steps):
            if tick() or not value < float("inf"):  # `not`: NaN ends it, too
                break
            at = Linearized(self.rows, x)
            slope = at.pull(at.value - self.seen)
            slope = slope + self.weight * self.prior.precision(x - self.prior.mean)
            low, high = self.box
            # Inputs at a bound stay there while the slope pushes them outward.
            free = ~(((x <= low) & (slope > 0)) | ((x >= high) & (slope < 0)))
            for _ in range(ATTEMPTS):
                shift = self._step(at, slope, free, damping * value / x.numel(), metric, settings)
                moved, after, whole = self._along(x, shift, RISE * max(trace[-MEMORY:]))
                if moved is not None:
                    break
                damping *= DAMPED
            if moved is None:
                break
            damping = max(damping * (EASED if whole else 1.0), LEAST)
            x = moved
            value = after
            trace.append(value)
            best = min(best, (value, x), key=lambda one: one[0])
            if len(trace) > WAIT and min(trace[-WAIT:]) > STALLED * min(trace[:-WAIT]):
                break
        return best[1], [*trace, best[0]]

    def _along(
        self,
        x: Tensor,
        shift: Tensor,
        most: float,
    ) -> tuple[Tensor | None, float, bool]:
        for length in LENGTHS:
            moved = (x + length * shift).clamp(*self.box)
            after = self.value(moved)
            if after < most:
                return moved, after, length == 1.0
        return None, most, False

    def _step(
        self,
        at: Linearized,
        slope: Tensor,
        free: Tensor,
        damping: float,
        metric: PublicGaussian,
        settings: GaussNewton,
    ) -> Tensor:
        """-(JᵀJ + weight C⁻¹ + damping M⁻¹)⁻¹ slope on the free inputs, with preconditioner M."""
        shift = torch.zeros_like(slope)
        residual = -slope * free
        better = metric.covariance(residual) * free
        direction = better
        size = float((residual * better).sum())
        least = SOLVED * size
        for _ in range(settings.directions):
            image = at.pull(at.push(direction)) + damping * metric.precision(direction)
            image = (image + self.weight * self.prior.precision(direction)) * free
            curvature = float((direction * image).sum())
            # Only rounding leaves no positive curvature: the shift so far is taken.
            if not curvature > 0:
                break
            length = size / curvature
            shift = shift + length * direction
            residual = residual - length * image
            better = metric.covariance(residual) * free
            now = float((residual * better).sum())
            if not now > least:
                break
            direction = better + (now / size) * direction
            size = now
        return shift


def _means(public: Batch, labels: Tensor) -> Tensor:
    """(B, *S): the mean public example of each label's class, or of all."""
    every = public.inputs.mean(0)
    if public.labels.ndim > 1 or labels.ndim > 1 or labels.is_floating_point():
        return every.expand(len(labels), *every.shape).clone()
    members = [public.inputs[public.labels == label] for label in labels.to(public.labels)]
    return torch.stack([one.mean(0) if len(one) else every for one in members])
