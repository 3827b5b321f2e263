"""Trap weights: a malicious layer whose units each switch on for few images, ideally one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import scipy
import torch
from torch import Tensor

from leakbound import check
from leakbound.attacks.base import Attack
from leakbound.attacks.blind import answered
from leakbound.attacks.planted import (
    Caught,
    PixelPrior,
    caught,
    gain_for,
    gradients_of,
    in_front,
    layer_of,
    planted_task,
)
from leakbound.attacks.rounding import HALVES, type_near
from leakbound.core import LocalPlan, Observation, Reconstruction, Task
from leakbound.randomness import normal, stream

# Rows that differ by this share of their size are still of the same images: values round.
SAME = 1e-3
# An image may leave the input range by this share of it: noise and rounding.
SLACK = 0.05
# The probability that noise makes any two equal rows look different.
CHANCE = 1e-3
MOST = 2048
FEWEST = 8
SHARE = 0.6
"""A row is tuned for this share of the examples that the local steps see, and at least `FEWEST`:
what other rows explain is subtracted, so rows that see several examples still help.
"""
SURE = 2.0
"""Standard deviations by which stored weights may round rows of the same images apart."""


@dataclass(frozen=True)
class TrapWeights(Attack):
    """Send a malicious layer whose rows few images activate; a row with one image reveals it.

    In each row a random half of the weights is negative, -|N(0, 1)|, and the other half positive,
    scale |N(0, 1)|. A row that one image activates gives the image, dW_i / db_i. Rows with the same
    gradient were activated by the same images. The attack takes the value that most rows agree on
    as an image, subtracts it from every row that it activates, and repeats until all rows are
    explained.

    If each of B images activates a row with probability p, independently, an image is alone in one
    of the rows with probability 1 - (1 - p (1 - p)^(B - 1))^rows, best at p = 1 / B.

    Args:
        rows: the number of units.
        scale: of the positive weights. None: tuned row by row so that a row activates for one in
            `expected` public images (the first 2048).
        expected: the batch size that the tuning targets. None: 60 % of the examples in the
            minibatches of all local steps, and at least 8.
        gain: the derivative of the model's input with respect to a unit. A larger gain outweighs
            noise that does not scale with a clip norm. None: 100 for one step of SGD, and otherwise
            little enough for the client's steps to add gradients up.
        seed: the seed of the rows.
        features: number of input values; None: that of the public images.

    For several local steps, or another optimizer than SGD, the layer is sent as `RobbingTheFed`
    sends its own.

    Assumptions: the model takes the input at its own shape.

    Raises:
        NotApplicable: the server is honest, there is no public data to build the layer from, or the
            client trains by Lion.

    Source: Boenisch et al., "When the Curious Abandon Honesty", EuroS&P 2023 (trap weights); the
        subtraction is from this project.

    Example:
        >>> from torch import nn
        >>> task = Task.of(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
        >>> planted = TrapWeights(rows=3, scale=0.9, features=4).plant(task)
        >>> (planted.unflatten(planted.parameters)["layer.weight"] < 0).sum(1)
        tensor([2, 2, 2])
    """

    rows: int = 256
    scale: float | None = None
    expected: int | None = None
    gain: float | None = None
    seed: int = 0
    features: int | None = None

    def __post_init__(self) -> None:
        check.count(rows=self.rows)
        check.given(check.count, expected=self.expected)
        check.given(check.positive, gain=self.gain)
        check.given(check.positive, scale=self.scale)
        check.given(check.count, features=self.features)

    def plant(self, task: Task) -> Task:
        """Put the layer before the model; return the task unchanged without public data to build
        it.
        """
        public = task.public
        features = public.inputs[0].numel() if public is not None else self.features
        if features is None or (public is None and self.scale is None):
            return task
        source = stream(self.seed, "trap weights", features)
        shape = (self.rows, features)
        size = normal(shape, source).double().abs()
        negative = normal(shape, source).argsort(1) < features // 2
        low, _ = task.input_range
        scale: Tensor | float = 1.0 if self.scale is None else self.scale
        if self.scale is None and public is not None:
            above = (public.inputs[:MOST].flatten(1).double().cpu() - low).clamp_min(0)
            down = above @ (size * negative).T
            up = above @ (size * ~negative).T
            # A row is on where scale * up exceeds down: the ratio is the scale from which it is.
            ratio = down / up.clamp_min(1e-12 * features)
            scale = ratio.quantile(1 / self._expected(task.plan), 0)
            scale = scale.clamp(1e-3, 1e3)[:, None]
        weight = torch.where(negative, -size, scale * size) / features**0.5
        # The bias moves the lowest value to 0, for which the rows were tuned.
        bias = -low * weight.sum(1)
        gain = gain_for(task, self.gain)
        return in_front(task, weight, bias, gain, "trap", steady=not task.plan.is_gradient)

    def _expected(self, plan: LocalPlan) -> int:
        if self.expected is not None:
            return self.expected
        return max(FEWEST, round(SHARE * plan.steps * (plan.batch_size or 0)))

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        observation = gradients_of(observation)
        task = planted_task(observation, "trap")
        prior = PixelPrior.of(observation)
        images = []
        sure = 0
        left = 0
        for row in caught(observation, task, differences=False):
            reader = _WeightReader(row, task, prior)
            decoded, supports = reader.all()
            images += [*decoded, prior.mean.expand(row.examples - len(decoded), -1)]
            sure += sum(n > 1 for n in supports)
            left += reader.unexplained()
        problem = None
        if sure < observation.examples:
            problem = f"rows agree on only {sure} of {observation.examples} inputs"
        elif left:
            problem = f"{left} rows are not sums of the answers: some answers may be mixtures"
        return answered(observation, task, torch.cat(images), problem)


def _rounding(row: Caught, task: Task) -> float:
    """The relative error of a change that local steps store in half precision; else 0."""
    plan = task.plan
    times = plan.learning_rate * plan.total_weight
    change = (times * row.values).float()
    kind = type_near(change, torch.float32)
    if kind not in HALVES:
        return 0.0
    return SURE * torch.finfo(kind).eps * math.sqrt(plan.steps / 12)


class _WeightReader:
    """The rows of one update, minus what has been explained; float64."""

    def __init__(
        self,
        row: Caught,
        task: Task,
        prior: PixelPrior,
    ) -> None:
        layer = layer_of(task)
        self.weight = layer[:, :-1]
        self.bias = layer[:, -1]
        self.row = row
        self.prior = prior
        self.range = task.input_range
        self.precision = row.precision
        self.left = row.values.clone()
        self.seen = (row.precision > 0).double()
        self.typical = row.precision.sum(0) / self.seen.sum(0).clamp_min(1)
        self.used = torch.zeros(
            len(self.left),
            dtype=torch.bool,
            device=self.left.device,
        )
        shared = self.seen @ self.seen.T
        # All pairs of rows share the chance.
        limit = scipy.stats.chi2.isf(CHANCE / len(shared) ** 2, shared.clamp_min(1).cpu().numpy())
        self.limit = torch.from_numpy(limit).to(self.left)
        # Rows that have few sent values in common cannot be compared.
        self.shared = shared > 0.1 * self.left.shape[1]
        # What rounding leaves of a row's energy stays when images are subtracted from it.
        scaled = self.left * self.seen * self.typical.sqrt()
        self.rounded = _rounding(row, task) ** 2 * scaled.square().sum(1)
        self.distance = torch.zeros_like(shared)
        self._measure(torch.arange(len(self.left), device=self.left.device))

    def all(self) -> tuple[list[Tensor], list[int]]:
        """The images (1, N) in the order they are found, and how many rows agree on each."""
        images: list[Tensor] = []
        supports: list[int] = []
        while len(images) < self.row.examples:
            members = self._most_common()
            if not members.any():
                break
            atom, image = self._read(members)
            images.append(image[None])
            supports.append(int(members.sum()))
            # A row that no other confirms may be a mixture: it is answered, but not subtracted.
            if supports[-1] == 1:
                self.used |= members
                continue
            changed = members | (self.weight @ image.clamp(*self.range) + self.bias > 0)
            self.left[changed] -= atom
            self._measure(changed.nonzero()[:, 0])
        return images, supports

    def unexplained(self) -> int:
        return int((self._loud(4.0) & ~self.used).sum())

    def _loud(self, factor: float) -> Tensor:
        energy = (self.left.square() * self.precision).sum(1)
        return energy > factor * self.limit.diagonal()

    def _measure(self, rows: Tensor) -> None:
        """Squared standardized distances of the given rows to all, where both sent a value."""
        scaled = self.left * self.seen * self.typical.sqrt()
        square = scaled.square()
        part = scaled[rows]
        squares = square[rows] @ self.seen.T + self.seen[rows] @ square.T
        # A difference of two rows has twice the variance of one.
        distance = (squares - 2 * part @ scaled.T).clamp_min(0) / 2
        energy = (square.sum(1)[rows, None] + square.sum(1)) / 2
        rounded = (self.rounded[rows, None] + self.rounded) / 2
        distance = (distance - SAME**2 * energy - rounded).clamp_min(0)
        self.distance[rows] = distance
        self.distance[:, rows] = distance.T

    def _most_common(self) -> Tensor:
        """The rows (units,) with the value on which most agree; of several, the largest value."""
        low, high = self.range
        width = high - low
        size = self.left[:, -1]
        # The size is a divisor, so it has to exceed four standard deviations of its noise.
        readable = (size.square() * self.precision[:, -1] > 16) & self._loud(1.0) & ~self.used
        size = torch.where(readable, size, 1)
        images = self.left[:, :-1] / size[:, None]
        doubt = (4 / self.precision[:, :-1].sqrt()) / size.abs()[:, None] + SLACK * width
        outside = (images < low - doubt) | (images > high + doubt)
        readable &= ~(outside & (self.seen[:, :-1] > 0)).any(1)
        agree = (self.distance <= self.limit) & self.shared & readable & readable[:, None]
        support = agree.sum(1)
        best = (support == support.max()) & readable
        loudest = torch.where(best, size.abs(), -1).argmax()
        return agree[loudest] & readable[loudest]

    def _read(self, members: Tensor) -> tuple[Tensor, Tensor]:
        """The mean [d x | d] (N + 1,) of rows that agree, and its image (N,)."""
        total = self.precision[members].sum(0)
        mean = (self.precision[members] * self.left[members]).sum(0) / total.clamp_min(1e-300)
        variance = 1 / (total[:-1] * mean[-1].square())
        image = self.prior.fused(mean[:-1] / mean[-1], variance)
        return torch.where(total > 0, mean, torch.cat([mean[-1] * image, mean[-1:]])), image
