"""A malicious server's linear trap: a layer whose gradient is the input itself.

The estimators take an example X from z = scale X + noise, where |X| is known or assumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from leakbound import check
from leakbound.attacks.base import Attack, expected_rows, seen_task
from leakbound.attacks.blind import VANISHED, answered, public_images
from leakbound.attacks.planted import placed, sent_by_attacker, small_gain, takes_numbers
from leakbound.core import Gaussian, Loss, NotApplicable, Observation, Reconstruction, Task
from leakbound.correlation import Factor

__all__ = [
    "CorrelatedTrap",
    "LinearTrap",
    "TrapReading",
    "max_success_estimate",
    "shrinkage",
    "sphere_mean",
    "unbiased",
]

# Public norms that are tried, evenly spaced: each simulates the client once.
MOST_NORMS = 64
# A limit on the turns of the fixed point of norm and clipping scale, which stops by itself.
TURNS = 100
# The recurrence for the ratio of Bessel functions starts this many orders above the wanted one.
EXTRA_ORDERS = 1000


class Trap(nn.Module):
    """A linear layer on the flattened input; its output (B, rows) follows the model's (B, K), if
    any.
    """

    def __init__(
        self,
        features: int,
        rows: int,
        scale: float,
        bias: bool,
        inner: nn.Module | None,
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(features, rows, bias).requires_grad_(False)
        self.inner = inner
        self.rows = rows
        self.scale = scale
        # Of this module alone: `eval` would switch the inner model, too.
        self.training = False

    def forward(self, inputs: Tensor) -> Tensor:
        caught = self.scale * self.layer(inputs.flatten(1))
        if self.inner is None:
            return caught
        output = self.inner(inputs)
        if output.ndim != 2:
            raise ValueError(
                f"the model's output has shape {tuple(output.shape)}; a trap inside a model needs "
                "(B, K): give inside=False"
            )
        return torch.cat([output, caught], 1)


@dataclass(frozen=True)
class TrapLoss:
    """The mean over the batch of the sum of the trap's outputs, plus the model's own loss."""

    rows: int
    inner: Loss | None = None

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        caught = output[:, output.shape[1] - self.rows :].sum(1).mean()
        if self.inner is None:
            return caught
        return self.inner(output[:, : output.shape[1] - self.rows], labels) + caught


@dataclass(frozen=True)
class LinearTrap(Attack):
    """Send a malicious linear layer whose gradient holds copies of the input.

    The server sends f(X) = W X with the sum of the outputs as loss. The gradient of each of the
    `rows` rows of W is X itself. With clipping to C, the noise on the average is as small as
    possible if rows >= ceil((C / (scale min |X|))^2); the default reaches C = 4 min |X| at scale 1.

    The attack weights the rows by their known noise. It simulates the client to find how clipping
    and other known parts of the defense change the scale. It takes the noise as white. It assumes
    that an unknown defense does not clip, and estimates its noise from the spread of the rows.

    For several examples in one update row, the answer for each is their mean, with a `problem`.

    Args:
        estimator: "unbiased" (paper C's), "shrinkage" (best multiple of it), "optimal" (least mean
            squared error for a uniformly random direction), "gamma" (achieves the error `eta` as
            often as any estimator can), or "division" (weight gradient over bias gradient, row by
            row, then the mean: under noise its error has no mean; it adds a bias to the layer).
        rows: M, how often the input is copied.
        scale: factor on the trap's outputs; a larger one has the effect of more rows. None: 1, or
            so little that gradients stay far below the epsilon of the client's Adam or similar.
        inside: keep the model next to the trap (its parameters use up part of the norm); otherwise
            the trap is the whole model.
        bias: give the trap a trainable bias, whose gradient takes part of the clip norm: the noise
            is then that of |X|^2 + 1 (paper C uses none).
        norm: |X| if the attacker knows it. None: if nothing was clipped, the scale needs no norm,
            and |X| is inferred from the update; otherwise the mean norm of those public images that
            agree with the update (of uniform pixels if none are public).
        eta: the mean squared error that "gamma" targets, in input units squared.
        features: number of input values; None: that of the public images.

    Guarantees: answers lie in the input range. Moving them there lowers their error, so the laws
        of bounds.from_scratch hold for `estimate`, and for answers if the range is wide.

    Raises:
        NotApplicable: the server is honest, or the task has no public images and `features` is
            None.

    Source: Riess et al. (paper C), section IV, corrected: docs/errata.md.

    Example:
        >>> import leakbound as lb
        >>> from leakbound.core import Server, ThreatModel
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> batch = torch.tensor([[[[0.1, 0.2], [0.3, 0.4]]]]), torch.tensor([0])
        >>> trap, threat = LinearTrap("unbiased", features=4), ThreatModel(server=Server.MALICIOUS)
        >>> lb.simulate(model, batch, attack=trap, threat=threat).reconstruction.flatten()
        tensor([0.1000, 0.2000, 0.3000, 0.4000])
    """

    estimator: str = "optimal"
    rows: int = 16
    scale: float | None = None
    inside: bool = False
    bias: bool = False
    norm: float | None = None
    eta: float | None = None
    features: int | None = None

    def __post_init__(self) -> None:
        check.one_of([*ESTIMATES, "gamma", "division"], estimator=self.estimator)
        check.count(rows=self.rows)
        check.given(check.positive, scale=self.scale)
        check.given(check.positive, norm=self.norm)
        check.given(check.count, features=self.features)
        if self.eta is not None:
            check.positive(eta=self.eta)
        elif self.estimator == "gamma":
            raise ValueError("eta is None; give the squared error for 'gamma'")

    def plant(self, task: Task) -> Task:
        """Put the trap in place of the model, or next to it; the task unchanged without a known
        size, and of a model that takes tokens.
        """
        if not takes_numbers(task):
            return task
        features = self.features
        if features is None:
            if task.public is None:
                return task
            features = task.public.inputs[0].numel()
        inner = task.model if self.inside else None
        bias = self.bias or self.estimator == "division"
        scale = small_gain(task, 1.0) if self.scale is None else self.scale
        model = Trap(features, self.rows, scale, bias, inner).to(task.parameters)
        # The gradient of a sum of linear outputs does not depend on the weights.
        own = {f"layer.{name}": torch.zeros_like(w) for name, w in model.layer.named_parameters()}
        weights = torch.cat([value.flatten() for value in own.values()])
        loss = TrapLoss(self.rows, task.loss if self.inside else None)
        if self.inside:
            return replace(placed(task, model, own), loss=loss)
        return replace(
            task,
            model=model,
            parameters=weights,
            loss=loss,
            buffers={},
            kept=None,
        )

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        estimates = self.estimate(observation)
        task = _task(observation)
        together = max(observation.update.examples)
        problem = f"the answer is the mean of {together} inputs" if together > 1 else None
        if not _trap_rows(task, observation.update.rows).any():
            problem = VANISHED
        return answered(
            observation,
            task,
            estimates,
            problem,
            labels=observation.labels,
        )

    def estimate(self, observation: Observation) -> Tensor:
        """The estimates before they are moved into the input range, (examples, N), float64.

        Raises:
            NotApplicable: as for the whole attack.
        """
        if self.estimator == "division":
            each = _ratios(observation)
        else:
            readings = _Reader(self.norm, observation).all()
            if self.estimator == "gamma":
                assert self.eta is not None  # checked at construction
                estimates = [max_success_estimate(reading, self.eta) for reading in readings]
            else:
                estimates = [ESTIMATES[self.estimator](reading) for reading in readings]
            each = torch.stack(estimates)
        counts = torch.tensor(observation.update.examples, device=each.device)
        return each.repeat_interleave(counts, 0)


class _Reader:
    """Scale, noise and norm (R,) of the example behind each row of the update; float64."""

    def __init__(self, norm: float | None, observation: Observation) -> None:
        self.norm = norm
        self.observation = observation
        self.task = _task(observation)
        caught = _trap_rows(self.task, observation.update.rows)
        self.means, self.noise = _matched(observation, self.task, caught)
        self.width = width = self.means.shape[1]
        # The noise adds its variance to every square: the expectation is subtracted.
        self.energy = self.means.square().sum(1) - width * self.noise.square()
        low, high = self.task.input_range
        self.largest = math.sqrt(width) * max(abs(low), abs(high))
        # Uniform pixels: E x^2 = (low^2 + low high + high^2) / 3.
        self.usual = math.sqrt(width * (low * low + low * high + high * high) / 3)

    def all(self) -> list[TrapReading]:
        if max(self.observation.update.examples) > 1:
            scale = self._scale(self._full(self.norm or float(self._public().mean())))
            norms = self.energy.clamp_min(0).sqrt() / scale
        elif self.norm is not None:
            norms = self._full(self.norm)
            scale = self._scale(norms)
        else:
            norms, scale = self._inferred()
        rows = zip(
            self.means,
            scale.tolist(),
            self.noise.tolist(),
            norms.tolist(),
            strict=True,
        )
        return [TrapReading(*row) for row in rows]

    def _full(self, value: float) -> Tensor:
        return torch.full_like(self.noise, value)

    def _inferred(self) -> tuple[Tensor, Tensor]:
        """|X| and the scale of single examples of unknown norm."""
        noise = self.noise.square()
        # The standard deviation of |z|^2 (noncentral chi-square).
        spread = (noise * (2 * self.width * noise + 4 * self.energy.clamp_min(0))).sqrt()
        length, visible = self._inverted(spread)
        sure = visible & (spread < 0.1 * self.energy)
        norms = length if sure.all() else torch.where(sure, length, self._agreeing(spread))
        least = 1e-12 * self.largest
        return norms, self._scale(torch.where(visible, length, norms).clamp_min(least))

    def _inverted(self, spread: Tensor) -> tuple[Tensor, Tensor]:
        """|X| as inferred from the update, and where this holds: a larger norm would be visible."""
        length = self._full(self.largest)
        top = (length * self._scale(length)).square()
        # Beyond the clip norm, all lengths give the same signal, and |X| cannot be inferred.
        visible = self.energy <= top * (1 - 1e-4) - 4 * spread
        signal = self.energy.clamp_min(0).sqrt()
        least = 1e-12 * self.largest
        for _ in range(TURNS):
            before = length
            length = signal / self._scale(length)
            length = length.clamp(least, self.largest)
            if not (visible & ((length - before).abs() > 1e-6 * before)).any():
                break
        return length, visible

    def _agreeing(self, spread: Tensor) -> Tensor:
        """The mean of the public norms, weighted by how well each explains the signal's energy."""
        norms = self._public()
        norms = norms[torch.linspace(0, len(norms) - 1, min(len(norms), MOST_NORMS)).long()]
        wanted = torch.stack([(r * self._scale(self._full(float(r)))).square() for r in norms])
        slack = torch.hypot(spread, 1e-3 * torch.maximum(wanted.amax(0), self.energy.abs()))
        away = (wanted - self.energy) / slack.clamp_min(1e-150)  # squared next: must not overflow
        return (-away.square() / 2).softmax(0).T @ norms

    def _public(self) -> Tensor:
        """Sorted norms (n,) of public images; of uniform pixels if none are public."""
        public = public_images(self.observation)
        if public is None or public[0].numel() != self.width:
            return self.noise.new_tensor([self.usual])
        norms = public.flatten(1).to(self.noise).norm(dim=1)
        return norms.clamp_min(1e-12).sort().values

    def _scale(self, norms: Tensor) -> Tensor:
        """The client's factor on examples of these norms, by simulation."""
        observation = self.observation
        update = observation.update
        directions = nn.functional.normalize(self.means, eps=1e-300)
        # A row of zeros has no direction: any unit vector will do.
        directions[~directions.any(1)] = self.width**-0.5
        labels = observation.labels
        if labels is None:
            labels = torch.zeros(
                observation.examples,
                dtype=torch.long,
                device=norms.device,
            )
        each = torch.tensor(update.examples, device=norms.device)
        inputs = (norms[:, None] * directions).repeat_interleave(each, 0)
        inputs = inputs.to(update.rows).reshape(observation.batch_shape)
        with torch.no_grad():
            sent = expected_rows(observation, self.task, inputs, labels).detach()
        caught, _ = _matched(observation, self.task, _trap_rows(self.task, sent))
        scale = (caught * directions).sum(1) / norms
        return scale.clamp_min(1e-300)


def _task(observation: Observation) -> Task:
    return sent_by_attacker(
        observation,
        seen_task,
        lambda task: isinstance(task.model, Trap),
        lacks="linear trap: without public images the input's size is not known; give features",
    )


def _trap_rows(
    task: Task,
    rows: Tensor,
    name: str = "layer.weight",
) -> Tensor:
    """What rows (R, P) hold of the trap, (R, M, N), float64."""
    at = {n: (shape, start, stop) for n, shape, start, stop in task.layout}
    shape, start, stop = at[name]
    return rows[:, start:stop].reshape(len(rows), *shape).double()


def _matched(
    observation: Observation,
    task: Task,
    caught: Tensor,
) -> tuple[Tensor, Tensor]:
    """The rows' mean (R, N) weighted by their noise, and its standard deviation (R,). Unknown noise
    is estimated from the spread of the rows (0 for a single row).
    """
    update = observation.update
    weights = torch.ones_like(caught)
    variance = observation.noise_variance
    if variance is not None:
        noise = _trap_rows(task, variance)
        # Relative and limited: an entry without noise would have an infinite weight.
        loud = noise.amax().clamp_min(1e-300)
        weights = 1 / (noise / loud).clamp_min(1e-12)
    if update.mask is not None and observation.threat.defense_known:
        weights = weights * _trap_rows(task, update.mask)
    total = weights.sum(1)
    mean = (weights * caught).sum(1) / total.clamp_min(1e-300)
    if variance is not None:
        each = (weights.square() * noise).sum(1) / total.square().clamp_min(1e-300)
        seen = (total > 0).sum(1).clamp_min(1)
        return mean, ((each * (total > 0)).sum(1) / seen).sqrt()
    copies = caught.shape[1]
    rest = weights * (caught - mean[:, None]).square()
    scatter = rest.sum((1, 2)) / weights.sum((1, 2)).clamp_min(1e-300)
    return mean, (scatter / max(1, copies - 1)).sqrt()


def _ratios(observation: Observation) -> Tensor:
    """dW_j / db_j, the mean over the rows whose bias gradient is not zero, (R, N)."""
    task = _task(observation)
    if "layer.bias" not in task.names:
        raise NotApplicable("the server's trap has no bias to divide by")
    weight = _trap_rows(task, observation.update.rows)
    bias = _trap_rows(task, observation.update.rows, "layer.bias")
    used = bias != 0
    each = torch.where(used[..., None], weight / torch.where(used, bias, 1)[..., None], 0)
    return each.sum(1) / used.sum(1, keepdim=True).clamp_min(1)


@dataclass(frozen=True)
class CorrelatedTrap(LinearTrap):
    """Send the linear trap in every round and combine all releases into one estimate.

    The example adds the same vector u in the rounds of its pattern p. Releases of `CorrelatedNoise`
    have the noise sigma C^-1 Z, which the weights C^T C p / |C p|^2 average best: the result is u
    with noise sigma / |C p|, and holds all that the releases say about u. Rounds without the
    example count too, because their noise cancels. A mean over the example's own rounds is weaker.

    Without correlated noise the weights are equal. Without a history it is `linear_trap`.

    Args:
        pattern: the rounds of the history that hold the example, from 0 on; empty: all.

    The other settings are those of `LinearTrap`.

    Assumptions: the history has every release of the client, all with the same bound on an example.
        In rounds outside the pattern the malicious layer's gradient is zero, or known and
        subtracted.

    Raises:
        NotApplicable: as `LinearTrap`; the rounds differ in shape or bound; the pattern names
            rounds that were not seen.

    Source: docs/correlated_noise.md; the linear trap: Riess et al. (paper C), section IV.

    Example:
        >>> CorrelatedTrap("gamma", eta=0.01, pattern=(0, 4, 8, 12)).pattern
        (0, 4, 8, 12)
    """

    pattern: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = all(type(at) is int and at >= 0 for at in self.pattern)
        if not whole or len({*self.pattern}) < len(self.pattern):
            raise ValueError(f"pattern is {self.pattern}; give different rounds from 0 on")

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        return super().__call__(self._together(observation), generator)

    def estimate(self, observation: Observation) -> Tensor:
        return super().estimate(self._together(observation))

    def _together(self, observation: Observation) -> Observation:
        """One observation, without a history, of the weighted sum of all rounds."""
        if not observation.history:
            return observation
        seen = [each.update for each in (*observation.history, observation)]
        last = seen[-1]
        count = len(seen)
        pattern = self.pattern or tuple(range(count))
        if max(pattern) >= count:
            raise NotApplicable(f"pattern is {pattern}, but only {count} rounds were seen")
        if any(each.rows.shape != last.rows.shape or each.bound != last.bound for each in seen):
            raise NotApplicable("the rounds differ in shape, or in the bound on an example")
        factors = (getattr(k, "factor", None) for k in getattr(observation.defense, "links", ()))
        known = next((one for one in factors if isinstance(one, Factor)), None)
        factor = Factor.parse("none", count) if known is None else known.first(count)
        weights = factor.weights(pattern)
        none = torch.zeros_like(last.rows)
        rows = sum(
            (float(w) * u.rows for w, u in zip(weights, seen, strict=True)),
            none,
        )
        law = last.law
        if isinstance(law, Gaussian):
            # One release has noise sigma |last row of C^-1|, the weighted sum has sigma / |C p|.
            last_noise = float(factor.inverse[-1] @ factor.inverse[-1])
            least = 1 / factor.attained(pattern) ** 2
            law = replace(law, covariance=law.covariance * (least / last_noise))
        return replace(
            observation,
            update=replace(last, rows=rows, law=law),
            history=(),
        )


@dataclass(frozen=True, eq=False)
class TrapReading:
    """What all rows of a linear trap show together: z = scale X + N(0, noise_std^2 I).

    Attributes:
        mean: z (N,), float64.
        scale: the factor on the example; above 0.
        noise_std: standard deviation of the noise on every coordinate of z; 0 without noise.
        norm: |X| in input units, known or assumed; 0 or above.
    """

    mean: Tensor
    scale: float
    noise_std: float
    norm: float

    @property
    def noise_multiplier(self) -> float:
        """Noise over signal: noise_std / (scale |X|)."""
        signal = self.scale * self.norm
        if self.noise_std == 0:
            return 0.0
        return self.noise_std / signal if signal > 0 else math.inf

    @property
    def direction(self) -> Tensor:
        """The direction of z: z / |z|; zeros if z is zero."""
        largest = self.mean.abs().max()
        if not float(largest) > 0:
            return self.mean * 0
        # By the largest value first: the squares of raw values may overflow or vanish.
        inside = self.mean / largest
        return inside / inside.norm()


def unbiased(reading: TrapReading) -> Tensor:
    """Return z / scale, the best unbiased estimator; its error follows a chi-square distribution.

    Source: paper C, Theorem IV.1; docs/errata.md, C1.
    """
    return reading.mean / reading.scale


def shrinkage(reading: TrapReading) -> Tensor:
    """Return c z / scale, c = 1 / (1 + N noise^2), the multiple of least mean squared error.

    Source: James and Stein 1961, with a known norm.
    """
    noise = reading.noise_multiplier
    factor = 1 + reading.mean.numel() * noise * noise
    return reading.mean / reading.scale / factor


def sphere_mean(reading: TrapReading) -> Tensor:
    """The mean of X given z, X uniform on the sphere of radius |X|: the least mean squared error.

    The posterior of the direction is von Mises-Fisher with concentration |z| scale |X| /
    noise_std^2.

    Source: docs/errata.md, "gamma*" (the posterior of the direction).
    """
    noise = reading.noise_multiplier
    if noise == math.inf:
        return reading.mean * 0
    if noise == 0:
        return reading.norm * reading.direction
    length = float(reading.mean.norm()) / (reading.scale * reading.norm)
    ratio = bessel_ratio(reading.mean.numel(), length / noise / noise)
    return reading.norm * ratio * reading.direction


def max_success_estimate(reading: TrapReading, eta: float) -> Tensor:
    """|X| cos(theta) z / |z|, sin^2 theta = N eta / |X|^2: the most likely to achieve an MSE of
    eta.

    It attains gamma*. If N eta >= |X|^2, it is the zero image, which always succeeds.

    Source: docs/errata.md, "gamma*".
    """
    if reading.norm == 0:
        return reading.mean * 0
    # Divided twice: the square of the norm may overflow or vanish.
    error = reading.mean.numel() * (eta / reading.norm / reading.norm)
    return reading.norm * math.sqrt(max(0.0, 1 - error)) * reading.direction


ESTIMATES = {"optimal": sphere_mean, "unbiased": unbiased, "shrinkage": shrinkage}
"""Estimators without settings, by the name in `LinearTrap`."""


def bessel_ratio(dim: int, concentration: float) -> float:
    """I_{dim/2}(k) / I_{dim/2 - 1}(k): the mean length of a von Mises-Fisher unit vector.

    Backward recurrence from a bound at an order a thousand higher (Amos 1974), whose error shrinks
    in each step: relative error below 1e-9 for all arguments.
    """
    k = concentration
    if k == math.inf:
        return 1.0
    if k == 0:
        return 0.0
    order = dim / 2 + EXTRA_ORDERS
    ratio = k / (order - 0.5 + math.hypot(order + 0.5, k))
    for step in range(EXTRA_ORDERS - 1, -1, -1):
        ratio = k / (dim + 2 * step + k * ratio)
    return ratio
