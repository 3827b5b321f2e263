"""Infer inputs from data-dependent noise variances: in closed form, and by search."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from leakbound import check
from leakbound._util import optimizers
from leakbound._util.cache import RecentCache
from leakbound.attacks.analytic import input_layer, layer_part
from leakbound.attacks.base import Attack, boxed, seen_task
from leakbound.attacks.blind import VANISHED
from leakbound.attacks.data_dependent_law import (
    CandidateLikelihood,
    _defense,
    _sent,
    _single,
    negative_log_likelihood,
    several,
)
from leakbound.attacks.labels import infer_labels
from leakbound.attacks.matching.distances import total_variation
from leakbound.attacks.pace import tick
from leakbound.client import refuse_codes
from leakbound.core import (
    Batch,
    DefenseProtocol,
    NotApplicable,
    Observation,
    Reconstruction,
    Task,
)
from leakbound.domains import has_neighbors
from leakbound.randomness import normal, uniform

TRACE_POINTS = 50
PUBLIC_NOISE = "the defense's noise does not depend on the batch"
FITS = (0.2, 5.0)
"""Least and largest ratio of the noise's power to the power that an answer predicts."""
PACE = 0.7
SOME = 10
MIXED = 0.1
"""Share of the images' variance that the readout must explain in public images."""


@dataclass(frozen=True)
class VarianceReadout(Attack):
    """Infer each pixel from the mean log-power of its column in the first layer's noisy gradient.

    Row r of that layer has g_rp = delta_r x_p. The noise of the local optimum therefore has, up to
    a factor for the row, the variance sqrt(|grad delta_r|²/delta_r² + ... + 1/x_p²): dark pixels
    get the most. Subtracting each row's median removes the factor. The attack fits the monotone
    function from log-power to pixel by replaying the defense on public images. More noise does not
    protect: it scales all powers equally.

    Args:
        images: the largest number of public images that are replayed.
        bins: how many groups of equal size the calibration averages over.

    Assumptions: one client with one example; the first linear layer sees the input.

    Raises:
        NotApplicable: there is no such layer, there are several examples or no public images, or
            the noise has a public distribution.

    Source: this project (see `docs/sharp_edges/private_noise.md`).

    Example:
        >>> VarianceReadout(images=32)
        VarianceReadout(images=32, bins=100)
    """

    images: int = 64
    bins: int = 100

    def __post_init__(self) -> None:
        check.count(images=self.images, bins=self.bins)

    def why_not(self, defense: DefenseProtocol, examples: int) -> str | None:
        return several(examples) or (None if defense.data_dependent_law else PUBLIC_NOISE)

    def __call__(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        _single(observation)
        task = seen_task(observation)
        defense = _defense(observation)
        name = input_layer(task, observation.input_shape)
        public = self._public(observation)
        if self.why_not(defense, 1) or (
            defense.noise_variance(task, public.inputs[:1], public.labels[:1]) is None
        ):
            raise NotApplicable(PUBLIC_NOISE)
        powers = []
        for i in range(public.size):
            one = Batch(public.inputs[i : i + 1], public.labels[i : i + 1])
            powers.append(_log_power(task, _sent(observation, defense, one, generator).rows, name))
        power = torch.stack(powers)
        pixels = public.inputs.flatten(1).double()
        curve = Curve.fitted(power.flatten(), pixels.flatten(), self.bins)
        left = (curve(power) - pixels).square().mean() / pixels.var(correction=0).clamp_min(1e-30)
        seen = _log_power(task, observation.update.rows, name)
        inputs = curve(seen).reshape(observation.batch_shape).to(task.parameters)
        problem = None
        if not bool(observation.update.rows.any()):
            problem = VANISHED
        elif not float(left) < 1 - MIXED:
            problem = "the noise of public images reveals almost nothing of their pixels"
        return Reconstruction(boxed(inputs, task), observation.labels, float(left), (), problem)

    def _public(self, observation: Observation) -> Batch:
        known = observation.auxiliary
        if known is None:
            raise NotApplicable("the calibration needs public images, and there are none")
        inputs = known.inputs[: self.images].to(observation.task.parameters)
        return Batch(inputs, known.labels[: self.images].to(inputs.device))


def _log_power(task: Task, rows: Tensor, name: str) -> Tensor:
    """(D,) mean over the layer's rows of log y², minus each row's median; zero rows left out."""
    weight, _ = layer_part(task, rows.sum(0), name)
    squares = weight.double().square()
    squares = squares[squares.amax(1) > 0]
    if len(squares) == 0:
        return torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
    logs = squares.clamp_min(1e-30 * float(squares.max())).log()
    return (logs - logs.median(1, keepdim=True).values).mean(0)


@dataclass(frozen=True)
class LawMatching(Attack):
    """Search the inputs that make the update and its noise pattern most likely together.

    The attack minimizes -log p(y; g(x), v(x)) / P + total_variation · TV(x) by Adam. Here v(x) is
    the noise variance that a candidate would have caused: a second observation. p is Gaussian, or a
    Student distribution, which tolerates the effect of the defense's random directions on single
    variances. The answer is the iterate with the lowest objective.

    Args:
        total_variation: weight of the total variation.
        steps: steps of Adam; the rate falls tenfold at 3/8, 5/8 and 7/8 of them.
        learning_rate: Adam's learning rate at the start.
        signed: feed Adam only the gradient's sign.
        start: "random", "candidate" (the most likely public image) or "readout"
            (`VarianceReadout`).
        freedom: degrees of freedom of the Student distribution; infinite: the Gaussian.
        floor: what is added to every variance, as a share of their mean. From a random start it
            begins as large as the mean, so that almost silent coordinates do not dominate at first.
        lift: how far above the range's lower end a pixel is moved, in units of the range's width:
            an exactly black pixel has a capped variance without a derivative.

    Assumptions: one client; its batch-dependent noise is the last link that changes values.

    Raises:
        NotApplicable: the noise has a public distribution, or there are several clients.

    Source: this project; what a covariance that depends on x leaks: `docs/errata.md`, A12.

    Example:
        >>> LawMatching(start="readout").start
        'readout'
    """

    total_variation: float = 1e-3
    steps: int = 500
    learning_rate: float = 0.1
    signed: bool = True
    start: str = "random"
    freedom: float = 3.0
    floor: float = 1e-6
    lift: float = 1e-3

    def __post_init__(self) -> None:
        check.count(steps=self.steps)
        check.positive(learning_rate=self.learning_rate, floor=self.floor, freedom=self.freedom)
        check.non_negative(total_variation=self.total_variation, lift=self.lift)
        check.one_of(["random", "candidate", "readout"], start=self.start)

    def __call__(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        task = seen_task(observation)
        labels = observation.labels
        defense = _defense(observation)
        if len(observation.cohort) > 1:
            raise NotApplicable(
                f"the update sums the noise of {len(observation.cohort)} clients; give one"
            )
        labels = infer_labels(observation, generator) if labels is None else labels
        x = self._start(observation, task, generator)
        if defense.noise_variance(task, x, labels) is None:
            raise NotApplicable(PUBLIC_NOISE)
        if self.total_variation and not has_neighbors(observation.input_shape):
            raise NotApplicable("total variation needs images (C, H, W)")
        if not bool(observation.update.rows.any()):
            return Reconstruction(boxed(x, task), labels, problem=VANISHED)
        best, trace = self._descend(observation, task, x, labels)
        final, fit = negative_log_likelihood(
            observation, task, best, labels, floor=self.floor, freedom=self.freedom
        )
        problem = None
        if not bool(torch.isfinite(final)):
            problem = "not finite: the objective was never a number"
        elif not FITS[0] < float(fit) < FITS[1]:
            problem = f"the noise power is {float(fit):.2g} times what the answer predicts"
        objective = float(final + self._prior(best))
        return Reconstruction(boxed(best, task), labels, objective, tuple(trace), problem)

    def _start(self, observation: Observation, task: Task, generator: torch.Generator) -> Tensor:
        if self.start == "candidate":
            return CandidateLikelihood()(observation, generator).inputs.clone()
        if self.start == "readout":
            return VarianceReadout()(observation, generator).inputs.clone()
        low, high = task.input_range
        return low + (high - low) * uniform(
            observation.batch_shape, generator, like=task.parameters
        )

    def _prior(self, x: Tensor) -> Tensor | float:
        return self.total_variation * total_variation(x) if self.total_variation else 0.0

    def _descend(
        self, observation: Observation, task: Task, x: Tensor, labels: Tensor
    ) -> tuple[Tensor, list[float]]:
        refuse_codes(task, observation.input_shape)
        low, high = task.input_range
        least = low + self.lift * (high - low)
        x = x.clamp(least, high).requires_grad_()
        optimizer = optimizers.Adam([x], lr=self.learning_rate * (high - low))
        best = x.detach().clone()
        lowest = float("inf")
        trace = []
        for step in range(self.steps):
            done = step / self.steps
            begun = 2 * done if self.start == "random" else 1.0
            floor = max(self.floor, self.floor ** min(1.0, begun))
            loss, _ = negative_log_likelihood(
                observation, task, x, labels, floor=floor, freedom=self.freedom
            )
            total = loss + self._prior(x)
            (slope,) = torch.autograd.grad(total, x)
            if floor == self.floor and float(total.detach()) < lowest:
                best = x.detach().clone()
                lowest = float(total.detach())
            if step % max(1, self.steps // TRACE_POINTS) == 0:
                trace.append(float(total.detach()))
            if tick() or not bool(torch.isfinite(slope).all()):
                break
            x.grad = slope.sign() if self.signed else slope
            rate = 0.1 ** sum(done >= mark for mark in (3 / 8, 5 / 8, 7 / 8))
            optimizer.param_groups[0]["lr"] = self.learning_rate * (high - low) * rate
            optimizer.step()
            with torch.no_grad():
                x.clamp_(least, high)
        return (best if lowest < float("inf") else x.detach()), trace


@dataclass(frozen=True)
class LawEvolution(Attack):
    """Search the span of public images for the inputs that make update and noise most likely.

    The attack handles Gaussian noise of any distribution that the attacker knows or can replay. It
    is like `LawMatching`, but without derivatives, which are uninformative for convolutions with
    max pools. It runs the cross-entropy method on the coefficients of the leading principal
    components of public images.

    Args:
        components: how many principal components.
        population: candidates per generation; the most likely quarter makes the next.
        generations: how many generations.
        freedom: degrees of freedom of the Student distribution that is fitted; see `LawMatching`.
        floor: what is added to every variance, as a share of their mean.
        lift: as in `LawMatching`.
        public_laws: False skips releases whose noise does not depend on the batch.

    Assumptions: one client; its batch-dependent noise is the last link that changes values.

    Raises:
        NotApplicable: there are no public images, there is no noise of a known distribution, or
            there are several clients.

    Source: Rubinstein 1999 (cross-entropy method); its use here is from this project.

    Example:
        >>> LawEvolution(generations=5).population
        80
    """

    components: int = 60
    population: int = 80
    generations: int = 30
    freedom: float = 3.0
    floor: float = 1e-6
    lift: float = 1e-3
    public_laws: bool = True

    def __post_init__(self) -> None:
        check.count(components=self.components, generations=self.generations)
        check.count(population=self.population)
        check.positive(freedom=self.freedom, floor=self.floor)
        check.non_negative(lift=self.lift)

    def why_not(self, defense: DefenseProtocol, examples: int) -> str | None:
        return None if self.public_laws or defense.data_dependent_law else PUBLIC_NOISE

    def __call__(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        if not self.public_laws and (reason := self.why_not(_defense(observation), 1)):
            raise NotApplicable(reason)
        task = seen_task(observation)
        labels = observation.labels
        labels = infer_labels(observation, generator) if labels is None else labels
        public = observation.auxiliary
        if public is None or public.size < 2:
            raise NotApplicable("the search needs the span of public images, and there are none")
        center, basis, known = _principal(public, task.parameters, self.components)
        refuse_codes(task, observation.input_shape)
        low, high = task.input_range
        least = low + self.lift * (high - low)

        def image(z: Tensor) -> Tensor:
            found = (center + z @ basis).reshape(observation.batch_shape)
            return boxed(found.clamp_min(least), task)

        def cost(z: Tensor) -> float:
            found, _ = negative_log_likelihood(
                observation, task, image(z), labels, floor=self.floor, freedom=self.freedom
            )
            return float(found)

        middle, spread = _by_label(known, public.labels.to(labels.device), labels)
        with torch.no_grad():
            first = cost(middle)
            if not bool(observation.update.rows.any()):
                return Reconstruction(image(middle), labels, problem=VANISHED)
            middle, trace = self._evolve(cost, middle, spread, generator)
            final = cost(middle)
        problem = None
        if not final < first:
            problem = f"objective did not fall: {first:.6g} at the start, {final:.6g} at the end"
        return Reconstruction(image(middle), labels, final, (first, *trace), problem)

    def _evolve(
        self,
        cost: Callable[[Tensor], float],
        middle: Tensor,
        spread: Tensor,
        generator: torch.Generator,
    ) -> tuple[Tensor, list[float]]:
        best = middle
        lowest = cost(middle)
        trace = []
        for _ in range(self.generations):
            drawn = normal((self.population, *middle.shape), generator, like=middle)
            guesses = middle + spread * drawn
            costs = torch.tensor([cost(z) for z in guesses], dtype=torch.float64)
            chosen = guesses[costs.argsort()[: max(2, self.population // 4)]]
            middle = (1 - PACE) * middle + PACE * chosen.mean(0)
            variance = (1 - PACE) * spread.square() + PACE * chosen.var(0, correction=0)
            spread = variance.sqrt()
            now = cost(middle)
            trace.append(now)
            if now < lowest:
                best = middle
                lowest = now
            if tick():
                break
        return best, trace


_SPANS = RecentCache[tuple[Tensor, Tensor, Tensor]](2**26)


def _principal(public: Batch, like: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Center (D,), leading principal components (k, D) and coefficients (n, k) of the images."""

    def find() -> tuple[Tensor, Tensor, Tensor]:
        flat = public.inputs.flatten(1).to(like)
        center = flat.mean(0)
        basis = torch.linalg.svd(flat - center, full_matrices=False).Vh[:most].clone()
        return center, basis, (flat - center) @ basis.T

    return _SPANS.get((public, like.dtype, like.device, most), find)


def _by_label(known: Tensor, own: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and spread (N, K) of the public coefficients of each label; of all if few have it."""
    middles = []
    spreads = []
    for label in labels:
        same = known[own == label]
        some = same if len(same) >= SOME else known
        middles.append(some.mean(0))
        spreads.append(some.std(0))
    return torch.stack(middles), torch.stack(spreads)


@dataclass(frozen=True, eq=False)
class Curve:
    """A monotone piecewise linear function through (at, value), constant beyond its ends."""

    at: Tensor
    value: Tensor

    @staticmethod
    def fitted(x: Tensor, y: Tensor, bins: int) -> Curve:
        """Isotonic regression, in the direction of the covariance, of means over equal bins."""
        order = torch.argsort(x, stable=True)
        size = math.ceil(len(x) / bins)
        at = torch.stack([part.mean() for part in torch.split(x[order], size)])
        value = torch.stack([part.mean() for part in torch.split(y[order], size)])
        count = [len(part) for part in torch.split(x, size)]
        falls = float(((x - x.mean()) * (y - y.mean())).sum()) < 0
        fitted = isotonic_regression(value.cpu().numpy(), weights=count, increasing=not falls).x
        return Curve(at, torch.as_tensor(fitted.copy()).to(value))

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.at) == 1:
            return self.value.expand(x.shape)
        right = torch.searchsorted(self.at, x.contiguous()).clamp(1, len(self.at) - 1)
        low = self.at[right - 1]
        high = self.at[right]
        share = ((x - low) / (high - low).clamp_min(1e-300)).clamp(0, 1)
        return self.value[right - 1] + share * (self.value[right] - self.value[right - 1])
